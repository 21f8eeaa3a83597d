#!/usr/bin/env python3
"""End-to-end tests of Hugging Face models on the real binary: `convert-checkpoint` both ways, `--load` of a folder.

Usage: convert_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf")
TRAIN = ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "2", "--lr", "1e-3", "--mock-data", "--eval-iters",
         "0", "--device", "cpu", "--num-threads", "1", "--seq-length", "16", "--save-interval", "2"]


def call(*arguments):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, env=environment)


def tensors(folder):
    """{name: (dtype, shape, bytes)} of the safetensors files that hold a model."""
    out = {}
    for file in os.listdir(folder):
        if not (file.startswith("model") and file.endswith(".safetensors")):
            continue
        with open(os.path.join(folder, file), "rb") as stream:
            data = stream.read()
        length = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = (entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end])
    return out


class ConvertTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_ok(self, *arguments):
        result = call(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode()

    def assert_error(self, code, message, *arguments):
        result = call(*arguments)
        error = result.stderr.decode()
        self.assertEqual(result.returncode, code, error)
        self.assertIn("error: " + message, error.splitlines())

    def test_there_and_back(self):
        golden = os.path.join(GOLDEN, "llama2")
        out = json.loads(self.run_ok("convert-checkpoint", "--load", golden, "--save", self.path("ours"), "--json"))
        self.assertEqual((out["from"], out["to"], out["model_type"], out["iteration"]), ("huggingface", "megatron", "llama", 0))
        self.assertEqual(out["num_tensors"], len(tensors(golden)))
        self.run_ok("inspect-checkpoint", self.path("ours"))
        text = self.run_ok("convert-checkpoint", "--load", self.path("ours"), "--save", self.path("theirs"))
        self.assertIn(f"wrote {self.path('theirs')}: {len(tensors(golden))} tensors of a llama model", text)
        self.assertEqual(tensors(self.path("theirs")), tensors(golden))
        with open(self.path("theirs/config.json")) as stream:
            self.assertEqual(json.load(stream)["rope_parameters"], {"rope_type": "default", "rope_theta": 10000.0})

    def test_probe(self):
        golden, probe = os.path.join(GOLDEN, "qwen3"), self.path("probe.safetensors")
        self.run_ok("logits", "--load", golden, "--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6", "--output", probe)
        out = json.loads(self.run_ok("convert-checkpoint", "--load", golden, "--save", self.path("ours"), "--probe", probe, "--json"))
        self.assertLess(out["probe_difference"], 1e-6)
        # Gate and up exchanged: names and shapes fit, the logits do not.
        swapped = self.path("swapped")
        shutil.copytree(golden, swapped)
        file = os.path.join(swapped, "model.safetensors")
        with open(file, "rb") as stream:
            data = stream.read()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + length])
        gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
        header[gate], header[up] = header[up], header[gate]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text + data[8 + length:])
        result = call("convert-checkpoint", "--load", swapped, "--save", self.path("wrong"), "--probe", probe)
        self.assertEqual(result.returncode, 1)
        self.assertIn("error: the logits of " + self.path("wrong") + " differ from those of", result.stderr.decode())

    def test_a_folder_is_trained_on_generated_from_and_exported(self):
        golden = os.path.join(GOLDEN, "qwen2")
        train = [*TRAIN[:5], "3", *TRAIN[6:]]
        result = call("pretrain", "--load", golden, "--save", self.path("run"), *train, "--exit-interval", "2")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(f"starting from the weights of {golden}", (result.stdout + result.stderr).decode())
        # The checkpoint goes on, generates, and becomes a folder again.
        self.run_ok("pretrain", "--load", self.path("run"), "--use-checkpoint-args", "--save", self.path("run"), *train)
        self.run_ok("generate", "--load", self.path("run"), "--prompt", "1 2 3", "--tokens-to-generate", "4", "--greedy")
        self.run_ok("convert-checkpoint", "--load", self.path("run"), "--save", self.path("out"), "--hf-model-type", "qwen2")
        before, after = tensors(golden), tensors(self.path("out"))
        self.assertEqual({name: shape for name, (_, shape, _) in before.items()},
                         {name: shape for name, (_, shape, _) in after.items()})

    def test_flags_that_make_another_model_are_pointed_out(self):
        golden = os.path.join(GOLDEN, "mistral")
        result = call("pretrain", "--load", golden, *TRAIN[:-2], "--rotary-base", "500")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(f"this run is another model than {golden}: rotary_base is 500, not 10000 as its config.json says",
                      result.stderr.decode())
        result = call("pretrain", "--load", golden, *TRAIN[:-2], "--start", "fresh")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn("starting from new weights", (result.stdout + result.stderr).decode())

    def test_a_converted_checkpoint_starts_a_run(self):
        self.run_ok("convert-checkpoint", "--load", os.path.join(GOLDEN, "gemma2"), "--save", self.path("ours"))
        result = call("pretrain", "--load", self.path("ours"), "--use-checkpoint-args", "--save", self.path("run"), *TRAIN)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn("starting from the weights of", (result.stdout + result.stderr).decode())

    def test_a_restarted_run_goes_on_from_its_own_checkpoint(self):
        flags = ["pretrain", "--pretrained-checkpoint", os.path.join(GOLDEN, "phi3"), "--load", self.path("run"), "--save",
                 self.path("run"), *TRAIN[:5], "4", *TRAIN[6:], "--exit-interval", "2"]
        for expected in ("starting from the weights of", "resuming from " + os.path.join(self.path("run"), "iter_0000002")):
            result = call(*flags)
            self.assertEqual(result.returncode, 0, result.stderr.decode())
            self.assertIn(expected, (result.stdout + result.stderr).decode())

    def test_generation_from_a_folder(self):
        out = json.loads(self.run_ok("generate", "--load", os.path.join(GOLDEN, "gpt2"), "--prompt", "5 6 7",
                                     "--tokens-to-generate", "5", "--greedy", "--ignore-eod", "--json"))
        self.assertEqual(len(out[0]["tokens"]), 5)

    def test_what_is_refused(self):
        self.assert_error(2, "--save is required", "convert-checkpoint", "--load", os.path.join(GOLDEN, "gpt2"))
        self.assert_error(1, self.path("none") + ": there is no such folder", "convert-checkpoint", "--load", self.path("none"),
                          "--save", self.path("out"))
        self.assert_error(1, "--ckpt-step and --hf-model-type have no effect on a folder of Hugging Face", "convert-checkpoint",
                          "--load", os.path.join(GOLDEN, "gpt2"), "--save", self.path("out"), "--hf-model-type", "llama")
        golden = os.path.join(GOLDEN, "gpt2")
        self.assert_error(1, f"--ckpt-step is given, but {golden} is a folder of Hugging Face", "logits", "--load", golden,
                          "--ckpt-step", "1", "--tokens", "1")


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main()
