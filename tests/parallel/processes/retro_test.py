#!/usr/bin/env python3
"""A GPT that reads neighbours on ranks that are processes over Gloo: losses and gradient norms of each row against one rank. The ranks that make
a project make the files of one, also after one of them was killed.

Usage: retro_test.py MEGATRON [unittest arguments].
"""
import json
import pathlib
import random
import shutil
import tempfile
import time
import unittest

import training

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"


class Retro(training.Training):
    MODEL = ["--task", "retro", "--num-layers", "4", "--retro-layers", "2", "4", "--retro-chunk-length", "4", "--hidden-size", "32",
             "--num-attention-heads", "4", "--seq-length", "16", "--max-position-embeddings", "16", "--attention-dropout", "0.1",
             "--micro-batch-size", "1", "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1",
             "--distributed-timeout-minutes", "1"]

    def test_rows_train_what_one_rank_trains(self):
        rows = {"tp2_sp_pp2": (4, [TP, "2", SP, PP, "2"]), "pp2_vpp2_dp2_zero1": (4, [PP, "2", "--num-virtual-stages-per-pipeline-rank", "2",
                                                                                     "--use-distributed-optimizer"])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


class Project(unittest.TestCase):
    WORDS = "the cat sat on a mat dog ran far away and then rain fell over old hill town with river stone bridge light sun".split()
    EMBEDDER = str(pathlib.Path(__file__).resolve().parents[2] / "golden" / "encoders" / "sentence")

    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        draw = random.Random(1)
        lines = (json.dumps({"text": " ".join(draw.choices(self.WORDS, k=40))}) + "\n" for _ in range(120))
        self.root.joinpath("t.jsonl").write_text("".join(lines), encoding="utf-8")
        tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
        codes, out, err = training.run(1, ["preprocess-data", "--input", str(self.root / "t.jsonl"), "--output-prefix", str(self.root / "t"), *tokenizer,
                                           "--append-eod"])
        self.assertEqual(codes, [0], out + err)
        self.flags = ["--retro-embedder", self.EMBEDDER, "--retro-chunk-length", "16", "--retro-block-size", "30", "--seq-length", "64", *tokenizer,
                      "--data-path", str(self.root / "t_text_document"), "--split", "90,10,0", "--train-iters", "5", "--global-batch-size", "4",
                      "--micro-batch-size", "2", "--eval-iters", "1", "--device", "cpu", "--distributed-timeout-minutes", "1"]

    def command(self, project, *more):
        return ["retro", "--retro-project-dir", str(self.root / project), *self.flags, *more]

    def files(self, project):
        root = self.root / project
        return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file() and ".tmp-" not in f.name}

    def make(self, ranks, project, *more):
        codes, out, err = training.run(ranks, self.command(project, *more))
        self.assertEqual(codes, [0] * ranks, out + err)
        return self.files(project)

    def test_ranks_make_the_files_of_one(self):
        expected = self.make(1, "one")
        self.assertGreater(sum(name.startswith("embeddings/") for name in expected), 30)
        self.assertEqual(self.make(2, "two"), expected)

        ranks = training.start(2, self.command("killed"))
        while not list(self.root.glob("killed/embeddings/*0.npy")):
            time.sleep(0.002)
        ranks[1].kill()
        texts = [process.communicate(timeout=60) for process in ranks]
        self.assertNotEqual(ranks[0].returncode, 0, texts)
        errors = [line for _, err in texts for line in err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, texts)
        self.assertIn("rank 1", errors[0])
        self.assertLess(len(self.files("killed")), len(expected))
        self.assertEqual(self.make(2, "killed"), expected)

    def test_what_is_wrong_is_told_once(self):
        self.make(2, "p", "--retro-tasks", "db-build")
        for code, message, more in ((1, "the project is of another run: seed is 1234, here 7", ["--seed", "7"]),
                                    (2, "--show prints from one process", ["--show", "train:0"])):
            codes, out, err = training.run(2, self.command("p", *more))
            self.assertEqual(codes, [code] * 2, err)
            self.assertEqual(err.count(message), 1, err)


if __name__ == "__main__":
    training.main()
