#!/usr/bin/env python3
"""End-to-end tests of `megatron evaluate` on the real binary: scores of lm-evaluation-harness, forms of output, errors.

Usage: evaluate_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "evaluate")
MODEL = os.path.join(GOLDEN, "model")
TASKS = ["hellaswag", "arc", "piqa", "mmlu", "race", "lambada", "perplexity"]
TOLERANCE = 1e-4


def data(name):
    return os.path.join(GOLDEN, "data", ("documents" if name == "perplexity" else name) + ".jsonl")


def call(*arguments, environment=None):
    environment = dict(os.environ, OMP_NUM_THREADS="1", **(environment or {}))
    return subprocess.Popen([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def finish(process):
    out, error = process.communicate(timeout=120)
    return process.returncode, out.decode(), error.decode()


class EvaluateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        with open(os.path.join(GOLDEN, "golden.json"), encoding="utf-8") as stream:
            cls.golden = json.load(stream)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def run_ok(self, *flags, environment=None):
        code, out, error = finish(call("evaluate", "--load", MODEL, "--device", "cpu", *flags, environment=environment))
        self.assertEqual(code, 0, error)
        return out

    def assert_error(self, code, message, *flags):
        actual, out, error = finish(call("evaluate", "--load", MODEL, "--device", "cpu", *flags))
        self.assertEqual(actual, code, error)
        self.assertIn("error: " + message, error.splitlines())
        self.assertEqual(out, "")

    def assert_near(self, actual, expected, what):
        self.assertLessEqual(abs(actual - expected), TOLERANCE * abs(expected), f"{what}: {actual}, expected {expected}")

    def samples(self, path):
        with open(path, encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]

    def check_metrics(self, result, name):
        self.assertEqual(result["task"], name.split("_")[0])
        metrics = self.golden[name]["metrics"]
        self.assertTrue(metrics)
        for metric, value in metrics.items():
            self.assert_near(result[metric], value, f"{name} {metric}")

    def check_samples(self, samples, name):
        expected = self.golden[name]["samples"]
        self.assertEqual(len(samples), len(expected))
        for i, (sample, reference) in enumerate(zip(samples, expected)):
            if name == "perplexity":
                self.assert_near(sample["logprob"], reference["logprobs"][0], f"{name} {i}")
                continue
            self.assertEqual(sample["context"], reference["context"])
            self.assertEqual([c["greedy"] for c in sample["choices"]], reference["greedy"])
            for choice, logprob in zip(sample["choices"], reference["logprobs"], strict=True):
                self.assert_near(choice["logprob"], logprob, f"{name} {i} {choice['text']}")

    # -- against lm-evaluation-harness

    def test_all_tasks_score_as_the_harness_does(self):
        path = os.path.join(self.folder, "samples.jsonl")
        flags = ["--tasks", *(f"{name}={data(name)}" for name in TASKS), "--log-samples", path]
        results = json.loads(self.run_ok(*flags, "--json"))["results"]
        self.assertEqual([r["task"] for r in results], TASKS)
        samples = self.samples(path)
        for result, name in zip(results, TASKS):
            self.check_metrics(result, name)
            self.check_samples([s for s in samples if s["task"] == name], name)
        self.assertEqual({g["name"]: g["examples"] for g in results[TASKS.index("mmlu")]["groups"]}, {"anatomy": 3, "abstract_algebra": 2})
        # The model was trained a little, so that the goldens hold hits and misses.
        greedy = [c["greedy"] for s in samples if s["task"] == "lambada" for c in s["choices"]]
        self.assertEqual(set(greedy), {True, False})

    def test_few_shot_examples(self):
        path = os.path.join(self.folder, "shots.jsonl")
        shots = data("arc_train")
        out = self.run_ok("--tasks", "arc=" + data("arc"), "--fewshot-data", "arc=" + shots, "--num-fewshot", "2", "--log-samples", path, "--json")
        self.check_metrics(json.loads(out)["results"][0], "arc_shots")
        self.check_samples(self.samples(path), "arc_shots")

    def test_stride(self):
        path = os.path.join(self.folder, "stride.jsonl")
        golden = self.golden["perplexity_stride"]
        self.run_ok("--tasks", "perplexity=" + data("perplexity"), "--stride", str(golden["stride"]), "--log-samples", path)
        logprobs = [s["logprob"] for s in self.samples(path)]
        for actual, expected, disjoint in zip(logprobs, golden["logprobs"], self.golden["perplexity"]["samples"], strict=True):
            self.assert_near(actual, expected, "stride")
        self.assertNotAlmostEqual(logprobs[0], self.golden["perplexity"]["samples"][0]["logprobs"][0], 0)

    def test_several_ranks(self):
        for ranks, tp in ((2, 2), (2, 1)):
            outputs = []
            environment = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0", MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=str(20000 + os.getpid() % 20000 + 7 * tp))
            flags = ["evaluate", "--load", MODEL, "--device", "cpu", "--tensor-model-parallel-size", str(tp), "--batch-tokens", "256",
                     "--json", "--tasks", *(f"{name}={data(name)}" for name in TASKS)]
            processes = [call(*flags, environment=dict(environment, RANK=str(r), LOCAL_RANK=str(r))) for r in range(ranks)]
            for process in processes:
                code, out, error = finish(process)
                self.assertEqual(code, 0, error)
                outputs.append(out)
            self.assertEqual(outputs[1:], [""] * (ranks - 1))
            for result, name in zip(json.loads(outputs[0])["results"], TASKS, strict=True):
                self.check_metrics(result, name)

    # -- what users see

    def test_table(self):
        lines = self.run_ok("--tasks", "arc=" + data("arc"), "mmlu=" + data("mmlu"), "perplexity=" + data("perplexity"), "--limit", "2").splitlines()
        self.assertEqual(lines[0].split(), ["task", "file", "examples", "metric", "value", "stderr"])
        self.assertEqual(lines[1].split()[:4], ["arc", "arc.jsonl", "2", "acc"])
        self.assertEqual(lines[2].split()[0], "acc_norm")
        self.assertEqual(lines[4].split()[:3], ["mmlu", "mmlu.jsonl", "2"])
        self.assertEqual(lines[5].split()[:3], ["abstract_algebra", "1", "acc"])
        self.assertEqual([line.split()[-2] for line in lines[7:]],
                         ["token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"])

    def test_a_text_file_is_one_document(self):
        path = os.path.join(self.folder, "text.txt")
        with open(data("perplexity"), encoding="utf-8") as stream:
            document = json.loads(stream.readline())["page"]
        with open(path, "w", encoding="utf-8") as out:
            out.write(document)
        samples = os.path.join(self.folder, "text_samples.jsonl")
        self.run_ok("--tasks", "perplexity=" + path, "--log-samples", samples)
        sample = self.samples(samples)[0]
        self.assert_near(sample["logprob"], self.golden["perplexity"]["samples"][0]["logprobs"][0], "text")
        self.assertEqual((sample["bytes"], sample["words"]), (len(document.encode()), len(document.split())))

    def test_errors(self):
        self.assert_error(2, "--tasks is required")
        self.assert_error(2, "--tasks arc: expected NAME=FILE", "--tasks", "arc")
        self.assert_error(2, "--fewshot-data has no effect without --num-fewshot", "--tasks", "arc=x", "--fewshot-data", "arc=y")
        self.assert_error(2, "--pipeline-model-parallel-size is refused: evaluate splits a model over tensor-parallel ranks only",
                          "--tasks", "arc=x", "--pipeline-model-parallel-size", "2")
        self.assert_error(1, "unknown task boolq", "--tasks", "boolq=" + data("arc"))
        self.assert_error(1, f"{data('arc')}:1: no field \"goal\"", "--tasks", "piqa=" + data("arc"))
        self.assert_error(1, "--num-fewshot 1 needs solved examples for arc", "--tasks", "arc=" + data("arc"), "--num-fewshot", "1")
        self.assert_error(1, f"{data('arc_train')}: holds 3 examples, --num-fewshot is 4", "--tasks", "arc=" + data("arc"),
                          "--num-fewshot", "4", "--fewshot-data", "arc=" + data("arc_train"))
        self.assert_error(1, "--stride 97 is larger than the windows of 96 tokens (--max-length)",
                          "--tasks", "perplexity=" + data("perplexity"), "--stride", "97")
        self.assert_error(1, f"{data('piqa')}:1: a choice has 55 tokens, --max-length is 20", "--tasks", "piqa=" + data("piqa"), "--max-length", "20")
        self.assert_error(2, "1 ranks are not divisible by --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-size 1 = 2", "--tasks", "arc=" + data("arc"),
                          "--tensor-model-parallel-size", "2")


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
