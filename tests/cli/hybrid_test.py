#!/usr/bin/env python3
"""Models of --hybrid-layer-pattern on the real binary: the commands of docs/hybrid_models.md, and servers of several processes.

Usage: hybrid_test.py BINARY [unittest arguments].
"""
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support
from serving import GOLDEN, PRETRAIN, Ranks, Server

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
FLAGS = ["--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "8", "--inference-dynamic-batching-max-tokens", "24"]
SIZES = ["--mamba-num-heads", "4", "--mamba-head-dim", "4", "--mamba-state-dim", "6", "--mamba-num-groups", "2", "--linear-num-key-heads", "2",
         "--linear-num-value-heads", "4", "--linear-key-head-dim", "4", "--linear-value-head-dim", "6"]
PROMPTS = ["The cat", "Numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18", "x = [", "zz"]


def documented():
    """The commands of the page, in their order."""
    with open(os.path.join(ROOT, "docs", "hybrid_models.md"), encoding="utf-8") as file:
        blocks = re.findall(r"```\n(.*?)```", file.read(), re.DOTALL)
    text = re.sub(r"\\\n\s*", " ", "".join(blocks))
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("megatron ")]


class Documents(support.FolderTest):
    def test_commands_run_as_written(self):
        os.symlink(os.path.abspath(os.path.join(ROOT, "recipes")), self.path("recipes"))
        commands = documented()
        self.assertEqual({command[0] for command in commands} >= {"pretrain", "generate", "check", "prove", "bench", "evaluate"}, True, commands)
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        with open("text.txt", "w") as file:
            file.write("The state of a layer is carried from token to token.\n" * 20)
        for command in commands:
            with self.subTest(command=command):
                self.run_ok(*command)


class Serving(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.model = os.path.join(cls.shared, "talker")
        result = support.call("pretrain", *PRETRAIN[2:], "--hybrid-layer-pattern", "GM*-M", *SIZES, "--save", cls.model)
        assert result.returncode == 0, result.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def test_servers_of_any_layout_answer_as_generate_does(self):
        exact = ["--device", "cpu", "--dtype", "fp64", "--num-threads", "1"]
        result = support.call("generate", self.model, *exact, "--json", "--tokens-to-generate", "12", "--greedy", "--ignore-eod",
                              "--prompt", *PROMPTS)
        self.assertEqual(result.returncode, 0, result.stderr)
        want = [(one["text"], one["tokens"]) for one in json.loads(result.stdout)]
        for flags in ([], [TP, "2"], [PP, "2"], ["--replay-chunks"], [TP, "2", "--batch-invariant-mode"]):
            with self.subTest(flags=flags):
                server = Ranks(2, self.model, *FLAGS, *flags) if "2" in flags else Server(self.model, *FLAGS, *flags)
                self.addCleanup(server.close)
                body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
                got = [(one["text"], one["token_ids"]) for one in server.ok("/v1/completions", body)["choices"]]
                self.assertEqual(got, want)
                server.ok("/admin/pause", {})
                server.ok("/admin/suspend", {"cache": "drop", "weights": "offload"})
                server.ok("/admin/resume", {})
                again = [(one["text"], one["token_ids"]) for one in server.ok("/v1/completions", body)["choices"]]
                self.assertEqual(again, want)
                server.stop()

    def test_guesses_change_no_token(self):
        exact = ["--device", "cpu", "--dtype", "fp64", "--num-threads", "1"]
        guess = ["--num-speculative-tokens", "3", "--ngram-prompt-lookup-min", "1"]
        t5 = os.path.join(GOLDEN, "encoders", "t5_v1_1")
        for model, prompts, flags in ((self.model, PROMPTS, []), (self.model, PROMPTS, ["--batch-invariant-mode"]), (t5, ["5 6 7", "1 2"], [])):
            texts = []
            for more in ([], guess):
                result = support.call("generate", model, *exact, "--json", "--tokens-to-generate", "24", "--greedy", "--ignore-eod", "--prompt", *prompts,
                                      *flags, *more)
                self.assertEqual(result.returncode, 0, result.stderr)
                texts.append([(one["text"], one["tokens"]) for one in json.loads(result.stdout)])
            self.assertEqual(texts[0], texts[1])
        body = {"prompt": PROMPTS, "max_tokens": 48, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answers, accepted = [], 0
        for flags in ([], guess, [TP, "2", *guess], [PP, "2", *guess]):
            server = Ranks(2, self.model, *FLAGS, *flags) if "2" in flags else Server(self.model, *FLAGS, *flags)
            self.addCleanup(server.close)
            reply = server.ok("/v1/completions", body)
            answers.append([one["token_ids"] for one in reply["choices"]])
            accepted += reply["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
            server.stop()
        for other in answers[1:]:
            self.assertEqual(other, answers[0])
        self.assertGreater(accepted, 5)

    def test_what_states_keep_is_planned(self):
        flags = ["--device", "cpu", "--dtype", "fp32", *FLAGS, "--inference-dynamic-batching-buffer-size-gb", "0.02"]
        mode, guess, replay = ["--batch-invariant-mode"], ["--num-speculative-tokens", "3"], ["--replay-chunks"]
        server = Server(self.model, *flags, *mode, *guess, exact=[])
        self.addCleanup(server.close)
        weights, together = re.search(r"memory: weights (.*), cache .*, together (.*)", server.messages()).groups()

        def states(*more):
            result = support.call("check", "--serve", self.model, *flags, *more, "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            return json.loads(result.stdout)["stages"][0]["memory_bytes"]["states"]

        result = support.call("check", "--serve", self.model, *flags, *mode, *guess)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(weights, result.stdout)
        self.assertIn(together, result.stdout)
        self.assertEqual(states(*mode, *guess), states(*replay, *guess))
        self.assertGreater(states(*replay, *guess), states(*replay))
        self.assertGreater(states(*replay), states(*guess))
        self.assertGreater(states(*guess), states())

    def test_a_model_with_states_drafts_for_none(self):
        result = support.call("generate", self.model, "--device", "cpu", "--num-speculative-tokens", "2", "--speculative-model", self.model, "--prompt", "The cat")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("a draft model is a decoder without states of fixed size, and this is a model of Mamba-2 layers or gated delta nets", result.stderr)

    def test_states_have_the_types_that_are_asked_for(self):
        narrow = support.call("generate", self.model, "--device", "cpu", "--dtype", "bf16", "--mamba-inference-ssm-states-dtype", "bf16",
                              "--mamba-inference-conv-states-dtype", "fp32", "--prompt", "The cat", "--tokens-to-generate", "8")
        self.assertEqual(narrow.returncode, 0, narrow.stderr)
        refused = support.call("generate", self.model, "--device", "cpu", "--replay-chunks", "--mamba-inference-ssm-states-dtype", "bf16",
                               "--prompt", "The cat")
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("--replay-chunks keeps the bits of a forward over the whole text, which states in bf16 or fp16 lose", refused.stderr)
        for command in (["generate", "--prompt", "The cat"], ["serve", "--port", "0"]):
            refused = support.call(*command, "--load", self.model, "--device", "cpu", "--batch-invariant-mode",
                                   "--mamba-inference-ssm-states-dtype", "fp32")
            self.assertEqual(refused.returncode, 1)
            self.assertIn("--batch-invariant-mode keeps states in the types that they are computed in", refused.stderr)


if __name__ == "__main__":
    support.main()
