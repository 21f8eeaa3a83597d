#!/usr/bin/env python3
"""Images a second beside Pillow with NumPy and beside torchvision: JPEG 480x640 to CLIP's 336x336, in turns, by one worker and by two.

usage: media_peer.py BENCH_MEDIA [--turns 5] [--seconds 2]

BENCH_MEDIA is build/PRESET/bin/bench_media. Workers are threads of it, processes of the others, each on a core. Parts are measured in
processor time, images/s by the clock on the wall. Needs pillow and numpy; torchvision is left out where it is not installed.
"""

import argparse
import importlib.util
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

import numpy as np
from PIL import Image

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
PARTS = ("decoding", "resizing", "numbers")


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
    """Decoding, resizing with the crop, numbers [3, 336, 336]; and when each ended."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.load()
    decoded = time.process_time()
    height, width = (336, int(336 * image.width / image.height))
    left = (width - 336) // 2
    pixels = np.array(image.resize((width, height), Image.BICUBIC))[:, left : left + 336]
    resized = time.process_time()
    numbers = ((pixels.astype(np.float64) * (1 / 255)).astype(np.float32) - MEAN) / DEVIATION
    numbers = np.ascontiguousarray(numbers.transpose(2, 0, 1))
    return numbers, (decoded, resized, time.process_time())


def torchvision_peer(data):
    """The same by torchvision on bytes, its vectorised resizing of uint8 tensors, one thread."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import InterpolationMode, functional

    torch.set_num_threads(1)
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mean, deviation = MEAN.tolist(), DEVIATION.tolist()

    def one(_):
        image = decode_jpeg(encoded, mode=ImageReadMode.RGB)
        decoded = time.process_time()
        pixels = functional.resize(image, [336], interpolation=InterpolationMode.BICUBIC, antialias=True)
        pixels = functional.center_crop(pixels, [336, 336])
        resized = time.process_time()
        numbers = functional.normalize(functional.to_dtype(pixels, torch.float32, scale=True), mean, deviation).contiguous()
        return numbers, (decoded, resized, time.process_time())

    # The pictures are equal but for roundings of bytes
    apart = float(np.abs(one(data)[0].numpy() - pillow(data)[0]).mean())
    if apart > 0.02:
        raise SystemExit(f"error: torchvision's numbers differ from Pillow's by {apart:.3f} in the mean, expected at most 0.02")
    return one


def work(name, path, core):
    """A worker: for each line of its input, the seconds, a line with milliseconds of the parts and images/s."""
    os.sched_setaffinity(0, {core})
    with open(path, "rb") as file:
        data = file.read()
    one = pillow if name == "pillow" else torchvision_peer(data)
    one(data)
    print("ready", flush=True)
    for line in sys.stdin:
        parts, images, start = [0.0] * 3, 0, time.perf_counter()
        while time.perf_counter() - start < float(line):
            before = time.process_time()
            for i, end in enumerate(one(data)[1]):
                parts[i] += end - before
                before = end
            images += 1
        seconds = time.perf_counter() - start
        print(*(1e3 * part / images for part in parts), images / seconds, flush=True)


class Peer:
    """Worker processes of a peer, which wait between their turns."""

    def __init__(self, name, path, cores):
        command = [sys.executable, os.path.abspath(__file__), "--work", name, path]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.workers = [
            subprocess.Popen([*command, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for core in cores
        ]
        for worker in self.workers:
            if worker.stdout.readline() != "ready\n":
                raise SystemExit(f"error: a worker of {name} ended before its first turn, see above")

    def turn(self, count, seconds):
        for worker in self.workers[:count]:
            worker.stdin.write(f"{seconds}\n")
            worker.stdin.flush()
        rows = [[float(x) for x in worker.stdout.readline().split()] for worker in self.workers[:count]]
        return [*(statistics.mean(row[i] for row in rows) for i in range(3)), sum(row[3] for row in rows)]

    def close(self):
        for worker in self.workers:
            worker.stdin.close()
            worker.wait()


def ours(program, path, cores, seconds):
    command = [program, path, str(seconds), str(len(cores))]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, set(cores)))
    if done.returncode != 0 or len(done.stdout.split()) != 4:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return [float(x) for x in done.stdout.split()]


def two_cores():
    """Two processors of different cores; two threads of one where there are no others, one where there is one."""
    allowed, of_core = sorted(os.sched_getaffinity(0)), {}
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                of_core.setdefault(file.read(), cpu)
        except OSError:
            of_core.setdefault(cpu, cpu)
    chosen = list(of_core.values())[:2]
    if len(chosen) == 1 and len(allowed) > 1:
        print("both processors are threads of one core: two workers are not twice as fast")
    return chosen if len(chosen) == 2 else allowed[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench_media")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    cores = two_cores()
    out = io.BytesIO()
    photograph(480, 640).save(out, "JPEG", quality=90)
    data = out.getvalue()
    names = ["pillow"]
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed and left out")
    else:
        names.append("torchvision")
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        file.write(data)
        file.flush()
        peers = {name: Peer(name, file.name, cores) for name in names}
        rows = {}  # by peer and number of workers
        for _ in range(options.turns):
            for count in range(1, len(cores) + 1):
                rows.setdefault(("ours", count), []).append(ours(options.bench_media, file.name, cores[:count], options.seconds))
                for name, peer in peers.items():
                    rows.setdefault((name, count), []).append(peer.turn(count, options.seconds))
        for peer in peers.values():
            peer.close()
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"JPEG of {len(data)} bytes, 480x640 to 336x336, {versions}, medians of {options.turns} turns")

    def median(name, count, pick):
        return statistics.median(pick(row) for row in rows[name, count])

    def table(title, count, pick, unit, larger_is_better):
        mine = median("ours", count, pick)
        text = f"{title:22} {mine:8.2f} {unit}"
        for name in names:
            theirs = median(name, count, pick)
            text += f"   {name} {theirs:8.2f} {unit} {mine / theirs if larger_is_better else theirs / mine:5.2f}x"
        print(text)

    for i, what in enumerate(PARTS):
        table(what, 1, lambda row, i=i: row[i], "ms", False)
    table("all", 1, lambda row: sum(row[:3]), "ms", False)
    for count in range(1, len(cores) + 1):
        table("one worker" if count == 1 else "two workers", count, lambda row: row[3], "images/s", True)
    if len(cores) < 2:
        print("one processor: two workers are left out")
        return
    scaling = {name: median(name, 2, lambda row: row[3]) / median(name, 1, lambda row: row[3]) for name in ("ours", *names)}
    print("two workers over one: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in scaling.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
