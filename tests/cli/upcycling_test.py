#!/usr/bin/env python3
"""End-to-end tests of --moe-use-upcycling: a model with experts starts from a dense one and computes the same where mathematics says so.

Usage: upcycling_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import os
import struct

from support import FolderTest, call, main, read_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = os.path.join(HERE, "..", "golden", "hf", "llama2")
RUN = ["--mock-data", "--num-workers", "0", "--micro-batch-size", "2", "--train-iters", "2", "--lr", "1e-3", "--eval-iters", "0", "--device", "cpu"]
SHAPE = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "24", "--seq-length", "16",
         "--squared-relu", "--tokenizer-type", "NullTokenizer", "--vocab-size", "40"]
EXPERTS = ["--moe-use-upcycling", "--num-experts", "4", "--moe-router-topk", "2"]
TOKENS = "3,1,4,1,5,9,2,6"


class UpcyclingTest(FolderTest):
    def logits(self, model):
        out = self.path("logits.safetensors")
        self.output("logits", "--load", model, "--dtype", "fp32", "--device", "cpu", "--tokens", TOKENS, "--output", out)
        shape, data = read_safetensors(out)["logits"]
        return struct.unpack(f"<{shape[0] * shape[1]}f", data)

    def difference(self, first, second):
        """Of the logits of two models, relative."""
        a, b = self.logits(first), self.logits(second)
        return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5

    def test_experts_of_whole_mlps_compute_what_the_dense_model_does(self):
        sparse = self.path("sparse")
        result = self.run_ok("pretrain", "--load", LLAMA, "--save", sparse, *EXPERTS, *RUN, "--skip-train", "--seq-length", "16")
        self.assertIn("which become those of experts", result.stdout + result.stderr)
        self.assertIn("iter_0000000", os.listdir(sparse))
        self.assertLess(self.difference(sparse, LLAMA), 1e-5)

    def test_parts_of_one_copy_tie_and_add_up(self):
        # Multiplied as they are, the parts of an MLP with squared ReLU are exactly its parts.
        dense, sparse = self.path("dense"), self.path("sparse")
        self.run_ok("pretrain", *SHAPE, *RUN, "--save", dense)
        self.run_ok("pretrain", *SHAPE, *RUN, "--load", dense, "--save", sparse, *EXPERTS, "--moe-ffn-hidden-size", "12",
                    "--moe-upcycling-granularity", "2", "--skip-train")
        self.assertLess(self.difference(sparse, dense), 1e-5)
        # Without the second part of the copy, half of it is missing.
        self.run_ok("pretrain", *SHAPE, *RUN, "--load", dense, "--save", self.path("half"), *EXPERTS, "--moe-ffn-hidden-size", "12",
                    "--moe-upcycling-granularity", "2", "--moe-router-topk", "3", "--skip-train")
        self.assertGreater(self.difference(self.path("half"), dense), 1e-3)

    def test_a_run_starts_once(self):
        run, dense = self.path("run"), self.path("dense")
        self.run_ok("pretrain", *SHAPE, *RUN, "--save", dense)
        start = ["pretrain", *SHAPE, *RUN, *EXPERTS, "--save", run]
        self.run_ok(*start, "--load", dense)
        self.assertEqual(sorted(name for name in os.listdir(run) if name.startswith("iter_")), ["iter_0000000", "iter_0000002"])
        result = call(*start, "--load", dense)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"error: --moe-use-upcycling starts a new run, but {run} holds checkpoints already\nhint: give another --save, or resume "
                      f"with --load {run} and without --moe-use-upcycling", result.stderr)
        # The same line starts, or goes on where it was stopped.
        result = self.run_ok(*start, "--load", run, "--pretrained-checkpoint", dense)
        self.assertIn(f"resuming from {run}/iter_0000002", result.stdout + result.stderr)

    def test_another_width_is_named(self):
        result = call("pretrain", "--load", LLAMA, "--save", self.path("sparse"), *EXPERTS, *RUN, "--seq-length", "16", "--moe-ffn-hidden-size", "8")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("decoder.layers.0.mlp.linear_fc1.weight", result.stderr)
        self.assertFalse(os.path.exists(self.path("sparse/iter_0000000")))


if __name__ == "__main__":
    main()
