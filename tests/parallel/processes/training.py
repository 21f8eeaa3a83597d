"""Short trainings by `megatron` on ranks that are processes over Gloo, started as torchrun starts them. Python's standard library only."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cli"))
from ports import free_port  # noqa: E402

BINARY = ""
RUN = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "101", "--mock-data", "--num-workers", "0", "--train-iters", "4", "--lr", "1e-2",
       "--optimizer", "sgd", "--log-interval", "1", "--eval-iters", "0"]


def start(ranks, arguments, output=subprocess.PIPE):
    """The processes of the ranks."""
    port, started = free_port(), []
    for rank in range(ranks):
        variables = dict(os.environ, OMP_NUM_THREADS="1")
        if ranks > 1:
            variables.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
                             MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        started.append(subprocess.Popen([BINARY, *arguments], env=variables, stdout=output, stderr=output, text=True))
    return started


def run(ranks, arguments):
    """The exit codes, what the ranks wrote, and what they reported."""
    started = start(ranks, arguments)
    try:
        texts = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], "".join(out for out, _ in texts), "".join(err for _, err in texts)


class Training(unittest.TestCase):
    MODEL = []

    def records(self, ranks, *flags):
        """The lines of metrics.jsonl."""
        with tempfile.TemporaryDirectory() as folder:
            codes, out, err = run(ranks, ["pretrain", *self.MODEL, *RUN, "--save", folder, *flags])
            self.assertEqual(codes, [0] * ranks, out + err)
            with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
                return [json.loads(line) for line in file]

    def train(self, ranks, *flags):
        """What the steps logged."""
        return [line for line in self.records(ranks, *flags) if line["type"] == "train"]

    def compare(self, rows, one, numbers):
        """Each row, its ranks and flags, with the steps of one rank."""
        self.assertEqual(len(one), 4)
        for name, (ranks, flags) in rows.items():
            with self.subTest(row=name):
                steps = self.train(ranks, *flags)
                self.assertEqual(len(steps), len(one))
                for ours, theirs in zip(steps, one):
                    for number in numbers:
                        self.assertAlmostEqual(ours[number] / theirs[number], 1, delta=2e-5, msg=(number, theirs["iteration"]))


def main():
    """The program `megatron` is the first argument; the others are unittest's."""
    global BINARY
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
