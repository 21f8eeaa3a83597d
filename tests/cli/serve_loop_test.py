#!/usr/bin/env python3
"""examples/serve_loop: prompts of its standard input get the texts of `megatron generate`, in shared steps.

Usage: serve_loop_test.py BINARY [unittest arguments], with the example's path in SERVE_LOOP.
"""
import json
import os
import re
import subprocess
import sys
import unittest

BINARY = ""
MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "evaluate", "model")
PROMPTS = ["The cat", "A dog sat", "once upon a time", "The cat", "x"]


def call(program, *arguments, text=""):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([program, *arguments], input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=120, env=environment)


class ServeLoopTest(unittest.TestCase):
    example = os.environ.get("SERVE_LOOP", "")

    def test_prompts_get_the_texts_of_generate(self):
        served = call(self.example, MODEL, "12", text="\n".join(PROMPTS) + "\n")
        self.assertEqual(served.returncode, 0, served.stderr.decode())
        generated = call(BINARY, "generate", "--load", MODEL, "--greedy", "--tokens-to-generate", "12", "--json",
                         "--device", "cpu", "--prompt", *PROMPTS)
        self.assertEqual(generated.returncode, 0, generated.stderr.decode())
        names = {"length": "length", "end_of_document": "end_token"}
        wanted = "".join(sorted(f"{i + 1}: {one['prompt']}{one['text']} [{names[one['finish_reason']]}]\n"
                                for i, one in enumerate(json.loads(generated.stdout))))
        texts, count = re.fullmatch(r"(.*\n)(\d+ tokens in \d+ steps)\n", served.stdout.decode(), re.S).groups()
        entries = re.split(r"(?m)^(?=\d+: )", texts)[1:]
        self.assertEqual("".join(sorted(entries)), wanted)
        tokens, steps = (int(number) for number in re.findall(r"\d+", count))
        self.assertGreater(tokens, 20)
        self.assertLess(steps, tokens, "texts share steps")

    def test_what_cannot_run_is_refused_alone(self):
        served = call(self.example, MODEL, "100000", text="The cat\n")
        self.assertEqual(served.returncode, 0, served.stderr.decode())
        self.assertRegex(served.stdout.decode(), r"^1: refused: .*100000")
        self.assertEqual(call(self.example).returncode, 2)
        missing = call(self.example, "/nowhere")
        self.assertEqual((missing.returncode, missing.stderr.decode().startswith("error: ")), (1, True))


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main()
