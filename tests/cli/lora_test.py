#!/usr/bin/env python3
"""End-to-end tests of low-rank adapters on the real binary: trained over a folder of Hugging Face, written as PEFT does, read again,
merged, planned.

Usage: lora_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import shutil
import struct
import tempfile

from support import FolderTest, call, main

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
BASE = os.path.join(GOLDEN, "hf", "llama2")
ADAPTER = os.path.join(GOLDEN, "lora", "llama_all")
TRAIN = ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4", "--lr", "1e-2", "--mock-data", "--eval-iters",
         "0", "--device", "cpu", "--num-threads", "1", "--seq-length", "16"]
LORA = ["--lora-rank", "2", "--lora-alpha", "6", "--lora-targets", "q_proj", "v_proj", "down_proj"]


def tensors(path):
    """{name: bytes} of a safetensors file."""
    with open(path, "rb") as stream:
        data = stream.read()
    length = struct.unpack("<Q", data[:8])[0]
    return {name: data[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]]
            for name, entry in json.loads(data[8:8 + length]).items() if name != "__metadata__"}


class LoraTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.run_folder = os.path.join(cls.shared, "run")
        result = call("pretrain", "--load", BASE, *TRAIN, *LORA, "--save", cls.run_folder)
        assert result.returncode == 0, result.stderr
        cls.log = result.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def assert_error(self, message, *arguments):
        result = call(*arguments)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("error: " + message, result.stderr.splitlines())

    def logits(self, *arguments):
        out = self.path("logits.safetensors")
        self.run_ok("logits", *arguments, "--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6,5,3", "--output", out)
        values = tensors(out)["logits"]
        return struct.unpack("<%df" % (len(values) // 4), values)

    def assert_same_logits(self, a, b):
        error = sum((x - y) ** 2 for x, y in zip(a, b)) ** 0.5
        self.assertLess(error, 1e-5 * sum(y * y for y in b) ** 0.5)

    def test_trained_adapters_are_what_peft_reads(self):
        self.assertIn("are frozen", self.log)
        out = json.loads(self.run_ok("convert-checkpoint", "--load", self.run_folder, "--save", self.path("peft"), "--json").stdout)
        self.assertEqual(out["files"], ["adapter_model.safetensors", "adapter_config.json"])
        self.assertEqual(out["num_tensors"], 2 * 2 * 3)  # A and B, two layers, three modules
        with open(self.path("peft/adapter_config.json")) as stream:
            config = json.load(stream)
        self.assertEqual((config["peft_type"], config["r"], config["lora_alpha"]), ("LORA", 2, 6))
        self.assertEqual(config["target_modules"], ["down_proj", "q_proj", "v_proj"])
        trained = self.logits("--load", self.run_folder)
        self.assert_same_logits(self.logits("--load", BASE, "--adapter", self.path("peft")), trained)
        plain = self.logits("--load", BASE)
        self.assertGreater(max(abs(x - y) for x, y in zip(plain, trained)), 1e-3, "training did nothing")

        self.run_ok("convert-checkpoint", "--load", self.run_folder, "--save", self.path("merged"), "--merge-adapter")
        self.assert_same_logits(self.logits("--load", self.path("merged")), trained)

    def test_in_and_out_the_same_bytes(self):
        self.run_ok("convert-checkpoint", "--load", BASE, "--adapter", ADAPTER, "--save", self.path("ours"))
        self.run_ok("convert-checkpoint", "--load", self.path("ours"), "--save", self.path("theirs"))
        for name in os.listdir(self.path("theirs")):
            with open(self.path("theirs/" + name), "rb") as a, open(os.path.join(ADAPTER, name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_training_goes_on_from_an_adapter(self):
        flags = ["pretrain", "--load", BASE, *[word.replace("1e-2", "0") for word in TRAIN], "--adapter", ADAPTER, "--save",
                 self.path("run")]
        self.run_ok(*flags)
        # Nothing is learned at a learning rate of 0: the same adapters come out, by the rank and targets of the folder.
        self.run_ok("convert-checkpoint", "--load", self.path("run"), "--save", self.path("theirs"), "--hf-model-type", "llama")
        self.assertEqual(tensors(self.path("theirs/adapter_model.safetensors")), tensors(os.path.join(ADAPTER, "adapter_model.safetensors")))

    def test_checkpoints_of_adapters_alone(self):
        save = self.path("small")
        flags = ["pretrain", "--pretrained-checkpoint", BASE, *TRAIN, *LORA, "--no-save-frozen", "--load", save, "--save", save]
        self.run_ok(*flags, "--save-interval", "2", "--exit-interval", "2")
        result = self.run_ok(*flags)
        self.assertIn("resuming from", result.stderr)
        size = lambda folder: sum(os.path.getsize(os.path.join(root, file)) for root, _, files in os.walk(folder) for file in files)
        self.assertLess(size(save + "/iter_0000004"), size(self.run_folder + "/iter_0000004"))
        for folder, name in ((self.run_folder, "a"), (save, "b")):
            self.run_ok("convert-checkpoint", "--load", folder, "--save", self.path(name), "--hf-model-type", "llama")
        self.assertEqual(tensors(self.path("a/adapter_model.safetensors")), tensors(self.path("b/adapter_model.safetensors")))
        self.assert_error("--merge-adapter: %s/iter_0000004 holds adapters without their base" % save, "convert-checkpoint", "--load", save,
                          "--save", self.path("c"), "--merge-adapter")

    def test_what_is_refused(self):
        self.assert_error("--merge-adapter has an effect on checkpoints, %s is a folder of Hugging Face" % BASE, "convert-checkpoint", "--load",
                          BASE, "--save", self.path("x"), "--merge-adapter")
        self.assert_error("--adapter has an effect on a folder of Hugging Face, %s is none" % self.run_folder, "convert-checkpoint", "--load",
                          self.run_folder, "--save", self.path("x"), "--adapter", ADAPTER)
        self.assert_error("--adapter %s is given without its base model" % ADAPTER, "pretrain", "--num-layers", "2", "--hidden-size",
                          "16", "--num-attention-heads", "4", *TRAIN, "--tokenizer-type", "NullTokenizer", "--vocab-size", "40", "--adapter",
                          ADAPTER)
        self.assert_error("%s: holds no adapter_config.json" % BASE, "logits", "--load", BASE, "--adapter", BASE, "--tokens", "1,2",
                          "--output", self.path("y"))

    def test_proof_and_plan(self):
        model = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--swiglu",
                 "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4", "--lr", "1e-3", "--mock-data",
                 "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
        plans = []
        for lora in ([], ["--lora-rank", "4"]):
            result = call("check", *model, *lora, "--world-size", "2", "--tensor-model-parallel-size", "2", "--json")
            self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
            plans.append(json.loads(result.stdout)["stages"][0]["memory_bytes"])
        whole, adapters = plans
        self.assertGreater(adapters["weights"], whole["weights"])
        self.assertLess(adapters["optimizer states"], whole["optimizer states"] / 3)
        self.assertLess(adapters["gradients"], whole["gradients"] / 3)


if __name__ == "__main__":
    main()
