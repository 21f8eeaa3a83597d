#!/usr/bin/env python3
"""`megatron serve` as several processes: tensor ranks and stages answer as one rank does, and end together.

Usage: serve_ranks_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import support
from ports import free_port
from serving import EXACT, Ranks, Server, train_talker

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
FLAGS = ["--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "8", "--inference-dynamic-batching-max-tokens", "24"]
LIMIT = 40  # seconds; an idle machine needs less than five after the deadline of a step
PROMPTS = ["The cat", "Numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18", "x = [", "The cat sat on", "zz"]


def answers(server):
    """Greedy and drawn texts with log-probabilities, of prompts in one batch and from the cache."""
    given = []
    for members in ({"temperature": 0}, {"temperature": 1.2, "seed": 3, "top_p": 0.9}, {"temperature": 0, "echo": True}):
        body = {"prompt": PROMPTS, "max_tokens": 12, "logprobs": 2, "return_token_ids": True, **members}
        for choice in server.ok("/v1/completions", body)["choices"]:
            given.append((choice["text"], choice["token_ids"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]))
    return given


class ServeRanksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.model = os.path.join(cls.shared, "talker")
        train_talker(cls.model)
        cls.other = os.path.join(cls.shared, "other")
        train_talker(cls.other, "--seed", "5")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def start(self, ranks, *flags):
        server = Ranks(ranks, self.model, *FLAGS, *flags)
        self.addCleanup(server.close)
        return server

    def assert_alike(self, got, want):
        for (text, ids, reason, numbers), (text1, ids1, reason1, numbers1) in zip(got, want, strict=True):
            self.assertEqual((text, ids, reason), (text1, ids1, reason1))
            for a, b in zip(numbers, numbers1, strict=True):
                self.assertTrue(a == b or abs(a - b) < 1e-5, (a, b))

    def test_ranks_answer_as_one(self):
        one = Server(self.model, *FLAGS)
        self.addCleanup(one.close)
        want = answers(one)
        one.ok("/admin/update_weights", {"source": self.other, "version": 1})
        other = answers(one)
        self.assertNotEqual(want[0], other[0])
        for flags in ([TP, "2", "--num-speculative-tokens", "3", "--speculative-model", self.model], [PP, "2", "--num-speculative-tokens", "3", "--ngram-prompt-lookup-min", "1"]):
            server = self.start(2, *flags)
            self.assert_alike(answers(server), want)
            server.ok("/admin/pause", {})
            server.ok("/admin/suspend", {"cache": "drop", "weights": "offload"})
            server.ok("/admin/resume", {})
            server.ok("/admin/update_weights", {"source": self.other, "version": 1})
            self.assert_alike(answers(server), other)
            # A signal drains, and all ranks leave.
            self.assertEqual(server.stop(), [0, 0], server.messages())

    def test_a_load_is_sent_to_ranks(self):
        """bench serve loads a model over ranks, and says what one of them could do at most."""
        def load(ranks, *flags):
            variables = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                         "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
            line = [support.BINARY, "bench", "serve", self.model, *EXACT, *FLAGS, "--num-requests", "5", "--prompt-tokens", "6", "--output-tokens", "4", *flags]
            processes = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                          env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
            outputs = [process.communicate(timeout=120) for process in processes]
            self.assertEqual([process.returncode for process in processes], [0] * ranks, outputs)
            self.assertEqual([out for out, _ in outputs[1:]], [""] * (ranks - 1))
            return outputs[0][0]

        got = json.loads(load(2, TP, "2", "--json"))
        self.assertEqual((got["completed"], got["failed"], got["output_tokens"]), (5, 0, 20))
        self.assertRegex(load(2, TP, "2"), r"bound of this machine: .* generated tokens/s, of which [\d.]+% were seen")
        self.assertNotIn("bound", load(2, PP, "2"))

    def test_weights_in_8_bits(self):
        one = Server(self.model, *FLAGS, "--int8")
        self.addCleanup(one.close)
        want = answers(one)
        stages = self.start(2, PP, "2", "--int8")
        self.assert_alike(answers(stages), want)
        self.assertEqual(stages.stop(), [0, 0], stages.messages())
        # Rows and weights of a share have scales of their own. With echo the prompts come first.
        got = [choice[3] for choice in answers(self.start(2, TP, "2", "--int8"))[-len(PROMPTS):]]
        for numbers, numbers1, prompt in zip(got, (choice[3] for choice in want[-len(PROMPTS):]), PROMPTS, strict=True):
            for a, b in zip(numbers[1:len(prompt)], numbers1[1:len(prompt)], strict=True):
                self.assertAlmostEqual(a, b, delta=0.2)

    def test_flags_of_communication_reach_the_ranks(self):
        # A step may take long, other waits of the ranks may not.
        server = self.start(2, TP, "2", "--distributed-backend", "gloo", "--distributed-timeout-minutes", "3",
                            "--distributed-timeout-seconds-after-init", "2", "--step-timeout-seconds", "3000")
        server.processes[1].send_signal(signal.SIGSTOP)
        try:
            server.ask("/v1/completions", {"prompt": "The cat", "max_tokens": 12})
        except OSError:
            pass
        codes = server.wait(LIMIT)
        self.assertTrue(all(code != 0 for code in codes), codes)
        result = support.call("serve", self.model, "--distributed-timeout-minutes", "0")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--distributed-timeout-minutes is 0", result.stderr)

    def test_a_killed_rank_ends_all_and_is_named(self):
        for killed in (1, 0):
            server = self.start(2, TP, "2", "--step-timeout-seconds", "5")
            self.assertTrue(server.ok("/health")["ready"])
            server.processes[killed].kill()
            began, why = time.monotonic(), ""
            while killed == 1 and not why and time.monotonic() - began < LIMIT:
                try:
                    status, answer = server.ask("/health")
                    why = str(answer) if status == 503 else ""
                except OSError:
                    break
            codes = server.wait(LIMIT)
            if killed == 1:
                self.assertIn("rank 1", why)
            self.assertTrue(all(code != 0 for code in codes), codes)
            self.assertIn(f"rank {killed}", server.messages())

    def test_a_stopped_rank_ends_all_and_is_named(self):
        server = self.start(2, TP, "2", "--step-timeout-seconds", "3")
        server.processes[1].send_signal(signal.SIGSTOP)
        try:
            server.ask("/v1/completions", {"prompt": "The cat", "max_tokens": 12})
        except OSError:
            pass
        codes = server.wait(LIMIT)
        self.assertTrue(all(code != 0 for code in codes), codes)
        self.assertIn("rank 1", server.messages())


if __name__ == "__main__":
    support.main()
