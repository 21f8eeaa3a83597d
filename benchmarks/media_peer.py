#!/usr/bin/env python3
"""Images a second of one core beside Pillow with NumPy: JPEG 480x640 to CLIP's 336x336, in turns, by processor time.

usage: media_peer.py BENCH_MEDIA [--turns 5] [--seconds 2]

BENCH_MEDIA is build/PRESET/benchmarks/bench_media or where the build puts it. Needs pillow and numpy.
"""

import argparse
import io
import os
import statistics
import subprocess
import tempfile
import time

import numpy as np
import PIL
from PIL import Image

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def photograph(height, width):
    """Smooth colours, edges and some noise: about 70 kB as JPEG of quality 90, as a photograph has."""
    rng = np.random.default_rng(1)
    y, x = np.mgrid[0:height, 0:width]
    out = np.empty((height, width, 3))
    for c in range(3):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
        out[..., c] = np.array(coarse) * 0.8 + 25 * ((x // 40 + y // 30) % 2) + rng.normal(0, 4, (height, width))
    return Image.fromarray(np.clip(out, 0, 255).astype(np.uint8))


def pillow(data):
    """Milliseconds of decoding, of resizing with the crop, and of numbers."""
    a = time.process_time()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.load()
    b = time.process_time()
    height, width = (336, int(336 * image.width / image.height))
    left = (width - 336) // 2
    pixels = np.array(image.resize((width, height), Image.BICUBIC))[:, left : left + 336]
    c = time.process_time()
    numbers = ((pixels.astype(np.float64) * (1 / 255)).astype(np.float32) - MEAN) / DEVIATION
    np.ascontiguousarray(numbers.transpose(2, 0, 1))
    d = time.process_time()
    return [1e3 * (b - a), 1e3 * (c - b), 1e3 * (d - c)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench_media")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for both
    out = io.BytesIO()
    photograph(480, 640).save(out, "JPEG", quality=90)
    data = out.getvalue()
    ours, theirs = [], []
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        file.write(data)
        file.flush()
        for _ in range(options.turns):
            line = subprocess.run([options.bench_media, file.name, str(options.seconds)], check=True, capture_output=True, text=True).stdout
            ours.append([float(x) for x in line.split()])
            rows, end = [], time.process_time() + options.seconds
            while time.process_time() < end:
                rows.append(pillow(data))
            theirs.append(list(np.mean(rows, axis=0)))
    print(f"JPEG of {len(data)} bytes, 480x640 to 336x336, one core, Pillow {PIL.__version__}, medians of {options.turns} turns")
    for i, what in enumerate(("decoding", "resizing", "numbers")):
        a, b = (statistics.median(row[i] for row in rows) for rows in (ours, theirs))
        print(f"{what:9}  {a:6.2f} ms  Pillow {b:6.2f} ms  {b / a:5.2f}x")
    a, b = (statistics.median(sum(row) for row in rows) for rows in (ours, theirs))
    print(f"all        {a:6.2f} ms  Pillow {b:6.2f} ms  {b / a:5.2f}x   {1e3 / a:.0f} and {1e3 / b:.0f} images/s")


if __name__ == "__main__":
    main()
