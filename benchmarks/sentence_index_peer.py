"""The sample index of sentence-level data beside helpers_cpp of Megatron-Core: the same rows, and the time on one core.

    pip install --no-deps megatron-core==0.16.1 && pip install numpy
    python benchmarks/sentence_index_peer.py build/bin/bench_sentence_index [--sentences 50_000_000] [--repeat 5] [--epochs 1]

Documents have 1 to 39 sentences of 1 to 60 tokens, one in 2,000 of them longer than 512. The two programs take turns; reported are their
medians and the least of each.
"""

import argparse
import glob
import importlib.machinery
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time

import numpy as np

LIMIT, SHORT, SEED = 509, 0.1, 1234


def load_helpers():
    """The extension alone: the package around it imports torch."""
    for folder in importlib.util.find_spec("megatron.core").submodule_search_locations:
        for path in glob.glob(os.path.join(folder, "datasets", "helpers_cpp*.so")):
            loader = importlib.machinery.ExtensionFileLoader("helpers_cpp", path)
            module = importlib.util.module_from_spec(importlib.util.spec_from_loader("helpers_cpp", loader))
            loader.exec_module(module)
            return module
    raise SystemExit("megatron-core has no helpers_cpp here")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--sentences", type=int, default=50_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--min-sentences", type=int, default=2, help="2: BERT, 1: T5")
    args = parser.parse_args()
    helpers = load_helpers()
    draw = np.random.default_rng(7)
    counts = draw.integers(1, 40, args.sentences // 20)
    ends = np.cumsum(counts)
    documents = np.concatenate([[0], ends[ends < args.sentences], [args.sentences]]).astype(np.int64)
    lengths = draw.integers(1, 61, args.sentences).astype(np.int32)
    lengths[draw.integers(0, args.sentences, args.sentences // 2000)] = 600
    most = np.iinfo(np.int64).max - 1

    def theirs(samples):
        start = time.perf_counter()
        rows = helpers.build_mapping(documents, lengths, 1 if samples == most else 2**31 - 2, samples, LIMIT, SHORT, SEED, False, args.min_sentences)
        return rows, time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("documents.npy", "lengths.npy", "rows")]
        np.save(files[0], documents)
        np.save(files[1], lengths)
        rows, _ = theirs(most)  # warms up
        samples = most if args.epochs == 1 else len(rows) * args.epochs
        flags = ["--documents", files[0], "--lengths", files[1], "--max-length", str(LIMIT), "--short-seq-prob", str(SHORT), "--seed", str(SEED),
                 "--min-sentences", str(args.min_sentences), *([] if args.epochs == 1 else ["--samples", str(samples)])]
        times = {"helpers_cpp": [], "ours": []}
        for _ in range(args.repeat):
            rows, seconds = theirs(samples)
            times["helpers_cpp"].append(seconds)
            out = subprocess.run([args.program, *flags, "--rows", files[2]], check=True, stdout=subprocess.PIPE, text=True).stdout
            times["ours"].extend(json.loads(out)["seconds"])
        ours = np.fromfile(files[2], rows.dtype).reshape(-1, 3)
    print(f"{args.sentences:,} sentences, {len(documents) - 1:,} documents, {len(rows):,} rows; equal: {np.array_equal(ours, rows)}")
    for name, seconds in times.items():
        print(f"{name:12} median {statistics.median(seconds):.3f} s, least {min(seconds):.3f} s")
    print(f"ours / helpers_cpp: median {statistics.median(times['ours']) / statistics.median(times['helpers_cpp']):.3f}, "
          f"least {min(times['ours']) / min(times['helpers_cpp']):.3f}")


if __name__ == "__main__":
    main()
