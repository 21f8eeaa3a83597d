"""Nearest neighbours by NumPy in fp64, ties to the lower id: flat_golden.json.

usage: python make_flat_goldens.py OUT    (numpy 2.4)

Vectors are whole numbers / 256, drawn by RandomState(seed): centres [clusters, width] of randint(0, spread), then for each row (queries first) the number
of its centre, randint(0, clusters), and what is added to it, randint(0, noise) each. Rows i with i % 50 == 49 are copies of row i - 7. Squared distances
of such vectors are exact in fp64.
"""
import json, sys
import numpy as np

CASES = [dict(name="random", seed=1, rows=100000, width=32, clusters=1, spread=1, noise=65536, queries=20, k=20),
         dict(name="clustered", seed=2, rows=100000, width=32, clusters=300, spread=65536, noise=256, queries=20, k=20),
         dict(name="ties", seed=3, rows=20000, width=8, clusters=5, spread=65536, noise=3, queries=30, k=40),
         dict(name="few", seed=4, rows=7, width=5, clusters=2, spread=300, noise=20, queries=3, k=10)]

for c in CASES:
    r = np.random.RandomState(c["seed"])
    draw = lambda n: int(r.randint(0, n)) if n > 1 else 0
    centres = np.array([[draw(c["spread"]) for _ in range(c["width"])] for _ in range(c["clusters"])])
    def row():
        centre = centres[draw(c["clusters"])]
        return centre + np.array([draw(c["noise"]) for _ in range(c["width"])])
    queries = np.stack([row() for _ in range(c["queries"])]) / 256.0
    rows = np.stack([row() for _ in range(c["rows"])]) / 256.0
    for i in range(49, c["rows"], 50): rows[i] = rows[i - 7]
    distances = ((queries[:, None, :] - rows[None]) ** 2).sum(-1) if c["rows"] < 1000 else np.stack([((q - rows) ** 2).sum(-1) for q in queries])
    order = np.argsort(distances, axis=1, kind="stable")[:, : c["k"]]
    c["ids"] = [row.tolist() + [-1] * (c["k"] - len(row)) for row in order]
with open(f"{sys.argv[1]}/flat_golden.json", "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in CASES) + "\n]\n")
