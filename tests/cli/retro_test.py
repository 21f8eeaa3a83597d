#!/usr/bin/env python3
"""`megatron retro`: a project at once, step by step, and killed at random moments has the same files; neighbours are the nearest vectors
of other documents; what a sample looked up is shown; what is refused.

Usage: retro_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import pathlib
import random
import struct
import subprocess
import time

import support

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "golden"
EMBEDDER = str(GOLDENS / "encoders" / "sentence")
WORDS = "the cat sat on a mat dog ran far away and then rain fell over old hill town with river stone bridge light sun".split()


def read_npy(path):
    """(shape, numbers)"""
    data = pathlib.Path(path).read_bytes()
    begin = 10 + struct.unpack("<H", data[8:10])[0]
    header = eval(data[10:begin].decode(), {})  # a dictionary of literals, as NumPy writes it
    kind = {"<i4": "i", "<u4": "I", "<f4": "f"}[header["descr"]]
    return header["shape"], struct.unpack(f"<{(len(data) - begin) // 4}{kind}", data[begin:])


class RetroTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        draw = random.Random(1)
        with open(self.path("t.jsonl"), "w", encoding="utf-8") as stream:
            for _ in range(40):
                stream.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))}) + "\n")
        support.call("preprocess-data", "--input", self.path("t.jsonl"), "--output-prefix", self.path("t"), "--tokenizer-type", "ByteLevelTokenizer",
                     "--append-eod")

    def flags(self, project, *more):
        return ["retro", "--retro-project-dir", self.path(project), "--retro-embedder", EMBEDDER, "--retro-chunk-length", "16", "--seq-length", "64",
                "--tokenizer-type", "ByteLevelTokenizer", "--data-path", self.path("t_text_document"), "--split", "90,10,0", "--train-iters", "5",
                "--global-batch-size", "4", "--micro-batch-size", "2", "--eval-iters", "1", "--device", "cpu", "--retro-block-size", "50",
                "--retro-query-num-neighbors-query", "30", "--retro-query-num-neighbors-save", "4", *more]

    def files(self, project):
        root = pathlib.Path(self.path(project))
        return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file() and ".tmp-" not in f.name}

    def test_a_project_at_once_by_steps_and_after_kills(self):
        begin = time.monotonic()
        self.run_ok(*self.flags("once"))
        took = time.monotonic() - begin
        expected = self.files("once")
        self.assertEqual(len([f for f in expected if f.startswith("embeddings/")]), 5)
        self.run_ok(*self.flags("steps", "--retro-tasks", "db-build"))
        self.run_ok(*self.flags("steps", "--retro-tasks", "index-train,index-add"))
        self.run_ok(*self.flags("steps", "--retro-tasks", "query-neighbors"))
        self.assertEqual(self.files("steps"), expected)
        self.assertIn("index-add is done already", self.run_ok(*self.flags("steps")).stderr)

        draw, killed = random.Random(2), 0
        for _ in range(40):  # the first three cannot have come to the end
            process = subprocess.Popen([support.BINARY, *self.flags("kills")], stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
            time.sleep(took * draw.uniform(0.1, 0.3))
            process.kill()
            killed += process.wait() < 0
            if len(self.files("kills")) == len(expected):
                break
        self.run_ok(*self.flags("kills"))
        self.assertEqual(self.files("kills"), expected)
        self.assertGreater(killed, 2)

    def test_neighbours_are_the_nearest_of_other_documents(self):
        self.run_ok(*self.flags("p"))
        root = pathlib.Path(self.path("p"))
        (chunks, _), rows = read_npy(root / "db" / "chunks.npy")
        vectors = []
        for block in sorted((root / "embeddings").iterdir()):
            (count, width), numbers = read_npy(block)
            vectors += [numbers[i * width:(i + 1) * width] for i in range(count)]
        self.assertEqual(len(vectors), chunks)
        query, = (root / "query").glob("train-*")
        self.assertEqual(json.loads((query / "description.json").read_text())["num_samples"], 20)
        out = self.output(*self.flags("p", "--show", "train:3")).splitlines()
        shown = [(int(line.split()[1].rstrip(",")), float(line.split()[-1])) for line in out if line.startswith("  neighbour")]
        texts = [line.split(": ", 1)[1] for line in out if line.startswith("chunk")]
        self.assertEqual((len(texts), len(shown)), (4, 16))
        pathlib.Path(self.path("q.txt")).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        asked = [json.loads(line)["embedding"] for line in
                 self.output("embed", EMBEDDER, "--input", self.path("q.txt"), "--pooling", "mean", "--device", "cpu").splitlines()]
        _, stored = read_npy(query / "000000000000-000000000050.npy")
        for u in range(4):
            distances = [sum((a - b) ** 2 for a, b in zip(asked[u], v)) for v in vectors]
            ids = stored[(12 + u) * 4:(13 + u) * 4]
            self.assertEqual([i for i, _ in shown[u * 4:u * 4 + 4]], list(ids))
            for (number, far) in shown[u * 4:u * 4 + 4]:
                self.assertAlmostEqual(far, distances[number], delta=2e-4)
            own = {d for d in range(40) if all(r[1] != d for r in (rows[i * 5:i * 5 + 5] for i in ids))}
            nearer = [i for i in range(chunks) if distances[i] < distances[ids[-1]] - 1e-6 and i not in ids]
            self.assertTrue(all(rows[i * 5 + 1] in own for i in nearer))
            self.assertEqual(list(ids), sorted(ids, key=lambda i: (round(distances[i], 6), i)))

    def train(self, project, *more):
        flags = [flag for flag in self.flags(project) if not flag.startswith("--retro-query") and flag not in ("retro", "--retro-embedder", EMBEDDER, "30")]
        flags = flags[:flags.index("--retro-block-size")]
        return ["pretrain", "--task", "retro", *flags, "--num-layers", "2", "--retro-layers", "1", "2", "--hidden-size", "16", "--num-attention-heads", "2",
                "--max-position-embeddings", "64", "--lr", "1e-2", "--log-interval", "1", *more]

    def losses(self, folder):
        lines = [json.loads(line) for line in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]
        return [line["lm loss"] for line in lines if line["type"] == "train"]

    def test_a_model_trains_with_neighbours_and_goes_on(self):
        self.run_ok(*self.flags("p"))
        self.run_ok(*self.train("p", "--save", self.path("run"), "--save-interval", "3"))
        whole = self.losses(self.path("run"))
        self.assertEqual(len(whole), 5)
        self.assertLess(whole[-1], whole[0])
        self.run_ok(*self.train("p", "--save", self.path("half"), "--exit-interval", "3"))
        self.run_ok(*self.train("p", "--save", self.path("half"), "--load", self.path("half")))
        self.assertEqual(self.losses(self.path("half")), whole)
        self.assert_error(1, f'{self.path("p")} has no neighbours of these train samples', *self.train("p", "--train-iters", "6"))
        self.assert_error(1, "--retro-num-neighbors is 5, of each chunk 4 were saved", *self.train("p", "--retro-num-neighbors", "5"))
        self.assert_error(1, f'{self.path("none")}: the step db-build is not done', *self.train("none"))

    def test_what_is_refused(self):
        self.run_ok(*self.flags("p", "--retro-tasks", "db-build"))
        hint = f'{self.path("p")}/manifest.json: the project is of another run: '
        self.assert_error(1, hint + "chunk_length is 16, here 32", *self.flags("p", "--retro-chunk-length", "32"))
        self.assert_error(1, hint + "seed is 1234, here 7", *self.flags("p", "--seed", "7"))
        self.assert_error(1, hint + "data_sets[0].last_document is 36, here 20", *self.flags("p", "--split", "50,50,0"))
        self.assert_error(1, f'{self.path("p")}: the step index-add is not done', *self.flags("p", "--retro-tasks", "query-neighbors"))
        self.assert_error(2, "--retro-tasks add is unknown", *self.flags("p", "--retro-tasks", "add"))
        self.assert_error(2, "--seq-length 64 is no multiple of --retro-chunk-length 24", *self.flags("p", "--retro-chunk-length", "24"))
        self.assert_error(2, "--retro-index-str IVF16,Flat is an index of Faiss, which is not built", *self.flags("p", "--retro-index-str", "IVF16,Flat"))
        self.assert_error(2, "--show train names no sample", *self.flags("p", "--show", "train"))


if __name__ == "__main__":
    support.main()
