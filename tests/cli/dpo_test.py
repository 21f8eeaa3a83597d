#!/usr/bin/env python3
"""End-to-end tests of preference optimisation on the real binary: `megatron finetune --task dpo`.

Usage: dpo_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import math
import os
import shutil
import tempfile

from support import FolderTest, call, main

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PAIRS = [
    {"prompt": [{"role": "user", "content": "hi"}], "chosen": [{"role": "assistant", "content": "hello"}],
     "rejected": [{"role": "assistant", "content": "go away"}]},
    {"chosen": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
     "rejected": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "five"}]},
    {"prompt": "a b", "chosen": " c", "rejected": " x"},
    {"prompt": "too long " * 20, "chosen": " c", "rejected": " x"},
]


def records(folder, kind):
    with open(os.path.join(folder, "metrics.jsonl")) as stream:
        return [record for record in map(json.loads, stream) if record["type"] == kind]


class DpoTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        path = lambda name: os.path.join(cls.shared, name)
        with open(path("pairs.jsonl"), "w") as out:
            out.writelines(json.dumps(pair) + "\n" for pair in PAIRS)
        with open(path("template.jinja"), "w") as out:
            out.write(TEMPLATE)
        result = call("pretrain", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "64",
                      "--position-embedding-type", "rope", "--micro-batch-size", "2", "--train-iters", "2", "--lr", "1e-3",
                      "--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--eval-iters", "0", "--device", "cpu", "--num-threads",
                      "1", "--hidden-dropout", "0", "--attention-dropout", "0", "--save", path("base"))
        assert result.returncode == 0, result.stderr
        cls.flags = ["finetune", "--task", "dpo", "--load", path("base"), "--train-data-path", path("pairs.jsonl"),
                     "--valid-data-path", path("pairs.jsonl"), "--chat-template", path("template.jinja"), "--micro-batch-size", "2",
                     "--global-batch-size", "4", "--train-iters", "12", "--lr", "3e-3", "--eval-iters", "1", "--log-interval", "1",
                     "--device", "cpu", "--num-threads", "1"]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def check(self, *more):
        save = self.path("tuned")
        result = self.run_ok(*self.flags, *more, "--save", save, "--save-interval", "6", "--exit-interval", "6")
        self.assertIn("pairs.jsonl: 1 of 4 pairs are skipped: they have more tokens than --seq-length 64 plus one", result.stderr)
        self.assertIn(" rewards accuracy: ", result.stdout)
        self.run_ok(*self.flags, *more, "--save", save, "--save-interval", "6")  # goes on
        train = records(save, "train")
        self.assertEqual([record["iteration"] for record in train], list(range(1, 13)))
        # At first the model is its reference.
        self.assertAlmostEqual(train[0]["dpo loss"], math.log(2), places=5)
        self.assertAlmostEqual(train[0]["rewards margin"], 0, places=5)
        self.assertLess(train[-1]["dpo loss"], 0.6)
        self.assertEqual(train[-1]["rewards accuracy"], 1)
        self.assertGreater(records(save, "evaluation")[-1]["rewards margin"], 0.1)
        # The same steps without a stop.
        self.run_ok(*self.flags, *more, "--save", self.path("whole"))
        self.assertEqual(records(self.path("whole"), "train")[-1]["dpo loss"], train[-1]["dpo loss"])

    def test_all_weights(self):
        self.check()

    def test_adapters(self):
        self.check("--lora-rank", "4", "--lora-alpha", "32", "--lr-warmup-iters", "1")

    def test_what_is_refused(self):
        def error(*arguments):
            return call(*arguments).stderr.splitlines()[0]
        at = self.flags.index("--micro-batch-size")
        odd = [*self.flags[:at], "--micro-batch-size", "1", *self.flags[at + 2:]]
        self.assertEqual(error(*odd), "error: --micro-batch-size 1 is odd, preference optimisation needs whole pairs")
        self.assertEqual(error(*["sft" if word == "dpo" else word for word in self.flags], "--dpo-beta", "0.5"),
                         "error: --dpo-beta, --dpo-label-smoothing or --dpo-sft-weight has no effect on other data than pairs of responses")
        self.assertEqual(error(*self.flags, "--dpo-beta", "0"), "error: --dpo-beta 0 must be positive")
        with open(self.path("bad.jsonl"), "w") as out:
            out.write('{"prompt": "a", "chosen": "b"}\n')
        bad = [self.path("bad.jsonl") if word.endswith("pairs.jsonl") else word for word in self.flags]
        self.assertEqual(error(*bad), "error: %s:1: has no \"rejected\"" % self.path("bad.jsonl"))

    def test_proof(self):
        self.run_ok("prove", "--task", "dpo", "--world-size", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel",
                    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "2")


if __name__ == "__main__":
    main()
