#!/usr/bin/env python3
"""`megatron serve-scores` on the real binary: answers of two ranks over a socket, its end, and the failure of a rank.

Usage: serve_scores_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import math
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest

import support

MODEL = str(pathlib.Path(__file__).resolve().parents[1] / "golden" / "evaluate" / "model")
TEXTS = ["The cat sat on the mat.", "A stone falls, and nobody hears it fall", "two words"]
FLAGS = ["--load", MODEL, "--device", "cpu", "--dtype", "fp32"]


class Server:
    def __init__(self, *flags):
        self.error = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([support.BINARY, "serve-scores", *FLAGS, *flags], stdout=subprocess.PIPE, stderr=self.error, text=True,
                                        env=dict(os.environ, OMP_NUM_THREADS="1"))
        line = self.process.stdout.readline()
        found = re.match(r"listening on 127\.0\.0\.1:(\d+)", line)
        assert found, line + self.errors()
        self.port = int(found[1])

    def ask(self, text):
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection, connection.makefile("rw") as stream:
            stream.write(text + "\n")
            stream.flush()
            return json.loads(stream.readline())

    def ranks(self):
        """Processes that the command has started, by rank."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        environments = {int(pid): pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") for pid in children}
        return {int(word[5:]): pid for pid, words in environments.items() for word in words if word.startswith("RANK=")}

    def errors(self):
        self.error.seek(0)
        return self.error.read()

    def end(self):
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


def expected(text):
    """Log probability of the tokens after the first one, from the logits of the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "logits.safetensors")
        done = support.call("logits", *FLAGS, "--prompt", text, "--output", path)
        assert done.returncode == 0, done.stderr
        data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, data = json.loads(data[8:8 + size]), data[8 + size:]
    ids_at, logits_at = header["tokens"]["data_offsets"], header["logits"]["data_offsets"]
    length, width = header["logits"]["shape"]
    ids = struct.unpack(f"<{length}i", data[ids_at[0]:ids_at[1]])
    logits = struct.unpack(f"<{length * width}f", data[logits_at[0]:logits_at[1]])
    total = 0.0
    for position in range(length - 1):
        row = logits[position * width:(position + 1) * width]
        most = max(row)
        total += row[ids[position + 1]] - most - math.log(sum(math.exp(value - most) for value in row))
    return length - 1, total


class ServeScoresTest(unittest.TestCase):
    def test_two_ranks_answer_and_end(self):
        server = Server("--num-ranks", "2", "--tensor-model-parallel-size", "2")
        self.addCleanup(server.process.kill)
        self.assertEqual(sorted(server.ranks()), [0, 1])
        for text in TEXTS:
            tokens, logprob = expected(text)
            answer = server.ask(text)
            self.assertEqual(answer["tokens"], tokens)
            self.assertLess(abs(answer["logprob"] / logprob - 1), 1e-5)
        self.assertEqual(server.ask("")["error"], "a text needs at least two tokens")
        time.sleep(1.5)  # a round without a request
        self.assertIn("logprob", server.ask(TEXTS[0]))
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.end(), 0)
        self.assertNotIn("error", server.errors())

    def test_a_rank_that_dies_ends_all(self):
        server = Server("--num-ranks", "2", "--tensor-model-parallel-size", "2")
        self.addCleanup(server.process.kill)
        ranks = server.ranks()
        os.kill(ranks[1], signal.SIGKILL)
        self.assertNotEqual(server.end(), 0)
        errors = [line for line in server.errors().splitlines() if line.startswith("error: ") or " error: " in line]
        self.assertEqual(len(errors), 1, server.errors())
        self.assertIn("rank 1", errors[0])
        self.assertFalse(os.path.exists(f"/proc/{ranks[0]}"))

    def test_wrong_flags_are_named(self):
        done = support.call("serve-scores", *FLAGS, "--num-ranks", "3", "--tensor-model-parallel-size", "2")
        self.assertEqual(done.returncode, 2)
        self.assertIn("3 ranks are not divisible by --tensor-model-parallel-size 2", done.stderr)


if __name__ == "__main__":
    support.main()
