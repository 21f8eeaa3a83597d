#!/usr/bin/env python3
"""End-to-end tests of `megatron finetune` and `megatron inspect-chat` on the real binary.

Usage: finetune_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
DOCUMENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "fine_tuning.md")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
BASE = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "48",
        "--position-embedding-type", "rope", "--micro-batch-size", "2", "--lr", "1e-3", "--tokenizer-type", "ByteLevelTokenizer",
        "--eval-iters", "0", "--num-threads", "1", "--device", "cpu"]


class FinetuneTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.data = os.path.join(cls.folder, "chat.jsonl")
        with open(cls.data, "w") as out:
            for i in range(40):
                out.write(json.dumps({"messages": [{"role": "user", "content": "q" * (1 + i % 9)},
                                                   {"role": "assistant", "content": str(i) * (1 + i % 3)}]}) + "\n")
        cls.base = os.path.join(cls.folder, "base")
        cls.ok("pretrain", *BASE, "--mock-data", "--train-iters", "3", "--save", cls.base)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def call(cls, *arguments, **more):
        environment = dict(os.environ, OMP_NUM_THREADS="1", PATH=os.path.join(cls.folder, "bin") + ":" + os.environ["PATH"])
        return subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300, env=environment,
                              universal_newlines=True, **more)

    @classmethod
    def ok(cls, *arguments):
        result = cls.call(BINARY, *arguments)
        assert result.returncode == 0, result.stderr
        return result

    def finetune(self, *more):
        return self.ok("finetune", "--load", self.base, "--train-data-path", self.data, "--chat-template", TEMPLATE,
                       "--micro-batch-size", "2", "--lr", "1e-3", "--eval-iters", "0", "--num-threads", "1", "--device", "cpu",
                       "--log-interval", "1", *more)

    def losses(self, folder):
        with open(os.path.join(folder, "metrics.jsonl")) as lines:
            records = [json.loads(line) for line in lines]
        return {r["iteration"]: (r["lm loss"] if "lm loss" in r else r["loss"]) for r in records if r["type"] == "train"}

    # -- the page of the documents, as written

    def test_the_document(self):
        os.mkdir(os.path.join(self.folder, "bin"))
        os.symlink(os.path.abspath(BINARY), os.path.join(self.folder, "bin", "megatron"))
        with open(DOCUMENT) as page:
            blocks = re.findall(r"```sh\n(.*?)```", page.read(), re.S)
        self.assertGreaterEqual(len(blocks), 5)
        work = os.path.join(self.folder, "document")
        os.mkdir(work)
        said = ""
        for block in blocks:
            result = self.call("bash", "-euc", block, cwd=work)
            self.assertEqual(result.returncode, 0, block + result.stderr)
            said += result.stdout + result.stderr
        self.assertIn("+ The Baltic.<|im_end|>", said)
        self.assertIn("train split of chat.jsonl: 5 conversations", said)
        self.assertIn("the layout changes nothing but rounding", said)
        self.assertIn("are frozen", said)

    # -- runs

    def test_the_same_command_goes_on_bit_for_bit(self):
        whole, parts = os.path.join(self.folder, "whole"), os.path.join(self.folder, "parts")
        self.finetune("--train-iters", "8", "--save", whole)
        for _ in range(2):
            last = self.finetune("--train-iters", "8", "--save", parts, "--exit-interval", "4")
        self.assertIn("resuming from", last.stderr)
        self.assertEqual(self.losses(whole), self.losses(parts))
        self.assertEqual(len(self.losses(whole)), 8)
        first, second = self.losses(whole)[1], self.losses(whole)[8]
        self.assertLess(second, first, "it learns")

    def test_pretrain_knows_the_task(self):
        out = self.ok("pretrain", *BASE, "--sft", "--train-iters", "2", "--train-data-path", self.data, "--chat-template", TEMPLATE)
        self.assertIn("train split of " + self.data + ": 40 conversations", out.stderr)

    # -- inspect-chat

    def test_inspect_chat(self):
        flags = ["inspect-chat", "--tokenizer-type", "ByteLevelTokenizer", "--chat-template", TEMPLATE, "--input", self.data]
        self.assertEqual(self.ok(*flags).stdout, "  <user>q</><assistant>\n+ 0</>\n25 tokens, of which 4 count (+)\n")
        shown = json.loads(self.ok(*flags, "--row", "2", "--json").stdout)
        self.assertEqual(shown["text"], "<user>qq</><assistant>11</>")
        self.assertEqual("".join(chr(t) for t, m in zip(shown["tokens"], shown["loss_mask"]) if m), "11</>")

    def error(self, *arguments):
        result = self.call(BINARY, *arguments)
        self.assertNotEqual(result.returncode, 0)
        return result.stderr

    def test_errors(self):
        self.assertIn("error: finetune has no model to start from", self.error("finetune", *BASE, "--train-iters", "1", "--mock-data"))
        said = self.error("finetune", "--load", self.base, "--train-data-path", self.data, "--micro-batch-size", "1",
                          "--train-iters", "1", "--lr", "1e-3", "--device", "cpu")
        self.assertIn("holds no chat template", said)
        self.assertIn("hint: ", said)
        said = self.error("inspect-chat", "--tokenizer-type", "ByteLevelTokenizer", "--chat-template", "{{ oops", "--input", self.data)
        self.assertIn("error: --chat-template:1:1: an expression {{ is not closed", said)
        self.assertIn("--row is 99", self.error("inspect-chat", "--tokenizer-type", "ByteLevelTokenizer", "--input", self.data, "--row", "99"))


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main()
