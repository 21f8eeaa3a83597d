#!/usr/bin/env python3
"""Compares decoded and resized bytes with Pillow's over images drawn at random.

usage: compare_pillow.py MEDIA_PIXELS [--count 5000] [--seed 1] [--most-pixels 400000]

MEDIA_PIXELS is build/PRESET/tests/media_pixels (`scripts/build.sh PRESET media_pixels`). Needs pillow==12.3.0, numpy.
"""

import argparse
import collections
import pathlib
import subprocess
import sys
import tempfile
import zlib

import numpy as np
import PIL

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import draw_images
import pillow_pixels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("media_pixels")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-pixels", type=int, default=400_000)
    options = parser.parse_args()
    assert PIL.__version__ == "12.3.0", PIL.__version__
    different, kinds = 0, collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        program = subprocess.Popen([options.media_pixels], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(options.count):
            rng = np.random.default_rng([options.seed, i])
            extension, data, what = draw_images.draw(rng, options.most_pixels)
            path = pathlib.Path(folder, f"image.{extension}")
            path.write_bytes(data)
            transparency = str(rng.choice(["white", "drop"]))
            height, width = (int(n) for n in np.round(np.exp(rng.random(2) * np.log(700))))
            top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
            box = [filter := int(rng.integers(1, 6)), height, width, top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))]
            program.stdin.write(f"{path} {transparency} {' '.join(map(str, box))}\n")
            program.stdin.flush()
            image = pillow_pixels.pixels(data, transparency)
            small = pillow_pixels.resized(image, *box)
            wanted = f"{image.height} {image.width} {zlib.crc32(image.tobytes())} {zlib.crc32(small.tobytes())}"
            found = program.stdout.readline().strip()
            kinds[extension] += 1
            if found != wanted:
                different += 1
                print(f"image {i}: {what}, {transparency}, {box}: {found}; Pillow: {wanted}", flush=True)
        program.stdin.close()
        program.wait()
    print(f"{options.count} images ({', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))}): {different} differ")
    return different != 0


if __name__ == "__main__":
    sys.exit(main())
