#!/usr/bin/env python3
"""`megatron pretrain --task bert`: resumed runs have the bits of uninterrupted ones, and checkpoints say what they hold.

Usage: encoder_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import os
import pathlib
import shutil

import parallel_test as ranks
import support

SAVE_EVERY = 3
SHARDED = ["--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather"]


class EncoderTest(support.FolderTest):
    def start(self, count, *flags):
        ranks.BINARY = support.BINARY
        run = ["pretrain", *ranks.MODEL, *ranks.RUN, "--optimizer", "adam", "--save-interval", str(SAVE_EVERY)]
        return ranks.finish(ranks.start(count, [*run, *flags]))

    def train(self, count, *flags):
        codes, out, error = self.start(count, "--task", "bert", *flags)
        self.assertEqual(set(codes), {0}, error + out)

    def test_resumed_runs_have_the_same_bits(self):
        for count, flags in ((1, []), (2, SHARDED)):
            with self.subTest(ranks=count):
                whole, resumed = self.path(f"whole{count}"), self.path(f"resumed{count}")
                self.train(count, *flags, "--save", whole)
                name = f"iter_{SAVE_EVERY:07}"
                shutil.copytree(os.path.join(whole, name), os.path.join(resumed, name))
                self.train(count, *flags, "--load", resumed, "--save", resumed)
                self.assertEqual(ranks.tensors(resumed, 2 * SAVE_EVERY), ranks.tensors(whole, 2 * SAVE_EVERY))
                losses, again = ranks.records(whole), ranks.records(resumed)
                for iteration in range(SAVE_EVERY + 1, 2 * SAVE_EVERY + 1):
                    for loss in ("lm loss", "sop loss"):
                        self.assertEqual(again[iteration][loss], losses[iteration][loss])
                self.assertLess(losses[6]["lm loss"], losses[1]["lm loss"])

    def test_checkpoints_say_what_they_hold(self):
        saved = self.path("saved")
        self.train(1, "--save", saved, "--bert-no-binary-head")
        stored = pathlib.Path(saved, f"iter_{2 * SAVE_EVERY:07}", "config.yaml").read_text()
        self.assertIn("model_type: bert\n", stored)
        self.assertIn("bert_binary_head: false\n", stored)
        self.assertNotIn("sop loss", ranks.records(saved)[1])
        codes, _, error = self.start(1, "--load", saved, "--finetune", "--save", self.path("gpt"))
        self.assertEqual(codes, [1])
        self.assertIn("holds a model of type bert, expected one of type gpt", error)
        done = support.call("generate", "--load", saved, "--prompt", "Once")
        self.assertEqual(done.returncode, 1)
        self.assertIn("an encoder continues no text", done.stderr)

    def test_a_share_of_masked_tokens_is_one(self):
        codes, _, error = self.start(1, "--task", "bert", "--mask-prob", "0")
        self.assertEqual(codes, [2])
        self.assertIn("--mask-prob 0 is outside (0, 1]", error)


if __name__ == "__main__":
    support.main()
