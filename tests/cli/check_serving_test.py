#!/usr/bin/env python3
"""End-to-end tests of `megatron check --serve` on the real binary.

Usage: check_serving_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

import support
from serving import EXACT, GOLDEN, Server

ROOT = os.path.join(GOLDEN, "..", "..")
MODEL = os.path.join(GOLDEN, "evaluate", "model")
ENCODER = os.path.join(GOLDEN, "encoders", "sentence")
# Llama 3 70B, as its config.json says.
LARGE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
         "attention_bias": False, "mlp_bias": False}
LARGE_PARAMETERS = 70_553_706_496


def check(*flags):
    return support.call("check", "--serve", *flags)


class CheckServingTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def report(self, *flags, code=0):
        result = check(*flags, "--json")
        self.assertEqual(result.returncode, code, result.stderr)
        return json.loads(result.stdout)

    def large(self):
        with open(os.path.join(self.folder, "config.json"), "w", encoding="utf-8") as stream:
            json.dump(LARGE, stream)
        return self.folder

    def test_a_plan_is_that_of_the_server(self):
        flags = ["--inference-dynamic-batching-buffer-size-gb", "0.0002", "--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "16"]
        server = Server(MODEL, *flags)
        self.addCleanup(server.close)
        told = re.search(r"memory: weights (.*), cache (.*), the largest step (.*), together (.*)", server.messages()).groups()
        result = check(MODEL, "--device", "cpu", "--dtype", "fp64", *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        for part in (told[0], told[1], told[3]):
            self.assertIn(part, result.stdout)
        tokens = re.search(r"cache: (\d+) tokens in blocks of 16", server.messages())[1]
        self.assertIn(f"cache: {tokens} tokens in blocks of 16; up to 4 requests at a time, of 96 tokens at most", result.stdout)

    def test_fp8_is_counted(self):
        flags = ["--inference-dynamic-batching-buffer-size-gb", "0.0002", "--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "16",
                 "--fp8-format", "e4m3", "--kv-cache-dtype", "fp8"]
        model = os.path.join(self.folder, "wide")  # FP8 takes sizes that are multiples of 128
        trained = support.call("pretrain", *"--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 2 --seq-length 96 "
                               "--max-position-embeddings 96 --position-embedding-type rope --tokenizer-type ByteLevelTokenizer --mock-data "
                               "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu --num-threads 1".split(),
                               "--save", model)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        server = Server(model, *flags)
        self.addCleanup(server.close)
        reply = server.ok("/v1/completions", {"prompt": "The cat", "temperature": 0, "max_tokens": 4, "ignore_eos": True})
        self.assertEqual(reply["usage"]["completion_tokens"], 4)
        told = re.search(r"memory: weights (.*), cache (.*), the largest step (.*), together (.*)", server.messages()).groups()
        result = check(model, "--device", "cpu", "--dtype", "fp64", *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        for part in (told[0], told[1], told[3]):
            self.assertIn(part, result.stdout)
        self.large()
        large = [self.folder, "--dtype", "bf16", "--device", "h200", "--tensor-model-parallel-size", "2", "--inference-max-requests", "8"]
        wide, blocks, whole = (self.report(*large, *more)["stages"][0]["memory_bytes"] for more in (
            [], ["--fp8-format", "e4m3", "--kv-cache-dtype", "fp8"], ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]))
        self.assertEqual(2 * blocks["cache"], wide["cache"])
        self.assertEqual(whole["cache"], wide["cache"])
        # Of a rank: tables and the head in bf16, linears with a byte each and a scale for 128 x 128.
        linears = 80 * (8192 * (10240 + 8192) + 3 * 8192 * 28672) // 2
        self.assertEqual(wide["weights"] - blocks["weights"], linears - linears // (128 * 128) * 4)
        self.assertEqual(wide["weights"] - whole["weights"], linears - 80 * 4 * 4)

    def test_int8_is_counted(self):
        flags = ["--inference-dynamic-batching-buffer-size-gb", "0.0002", "--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "16", "--int8"]
        server = Server(MODEL, "--device", "cpu", *flags)
        self.addCleanup(server.close)
        reply = server.ok("/v1/completions", {"prompt": "The cat", "temperature": 0, "max_tokens": 4, "ignore_eos": True})
        self.assertEqual(reply["usage"]["completion_tokens"], 4)
        told = re.search(r"memory: weights (.*), cache (.*), the largest step (.*), together (.*)", server.messages()).groups()
        result = check(MODEL, "--device", "cpu", "--dtype", "fp64", *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        for part in (told[0], told[1], told[3]):
            self.assertIn(part, result.stdout)
        wide, narrow = (self.report(MODEL, "--device", "cpu", "--dtype", "fp64", *some)["stages"][0]["memory_bytes"]["weights"] for some in (flags[:-1], flags))
        self.assertLess(narrow, 0.6 * wide)  # inputs are padded to 64, and the table stays

    def test_int8_that_is_refused(self):
        self.large()
        refused = check(self.folder, "--dtype", "bf16", "--device", "h100", "--int8")
        self.assertEqual(refused.returncode, 2, refused.stderr)
        self.assertIn("--int8 multiplies on CPUs alone", refused.stderr)
        for flags, reason in (
                (["--int8", "--fp8-format", "e4m3"], "--int8 and --fp8-format are both given"),
                (["--int8", "--batch-invariant-mode", "--dtype", "fp32", "--device", "cpu"], "--int8 with --batch-invariant-mode"),
                (["--int8", "--load", os.path.join(GOLDEN, "hf", "mixtral"), "--device", "cpu"], "--int8 is not built for experts")):
            result = support.call("generate", *([] if "--load" in flags else ["--load", MODEL]), "--prompt", "The", *flags)
            self.assertNotEqual(result.returncode, 0, result.stderr)
            self.assertIn(reason, result.stderr)

    def test_fp8_that_is_refused(self):
        for flags, reason in (
                (["--fp8-format", "e4m3", "--fp8-recipe", "delayed"], "--fp8-recipe delayed takes scales from earlier steps of training"),
                (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype")):
            result = support.call("serve", MODEL, *flags)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(reason, result.stderr)
        result = support.call("serve", MODEL, "--batch-invariant-mode", "--kv-cache-dtype", "fp8", "--device", "cpu")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--kv-cache-dtype fp8 rounds keys and values", result.stderr)

    def test_random_weights_need_a_configuration_alone(self):
        small = {**LARGE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "vocab_size": 500, "max_position_embeddings": 64}
        with open(os.path.join(self.folder, "config.json"), "w", encoding="utf-8") as stream:
            json.dump(small, stream)
        load = ["bench", "serve", self.folder, "--device", "cpu", "--num-requests", "2", "--num-warmup", "0", "--prompt-tokens", "9", "--output-tokens",
                "5", "--inference-dynamic-batching-buffer-size-gb", "0.0002", "--json"]
        dummy = ["--load-format", "dummy", "--dtype", "fp32"]
        result = support.call(*load, *dummy)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout)["output_tokens"], 10)
        self.assertIn("the weights are random: they are drawn, and not read", result.stderr)
        eight = support.call(*load, *dummy, "--int8")
        self.assertEqual(eight.returncode, 0, eight.stderr)
        for flags, reason in (
                (["--dtype", "fp32"], "safetensors"),
                (["--load-format", "dummy"], "--load-format dummy reads no weights that say a type"),
                ([*dummy, "--load", os.path.join(GOLDEN, "evaluate")], "holds no config.json of Hugging Face")):
            command = load if "--load" not in flags else [word for word in load if word != self.folder]
            refused = support.call(*command, *flags)
            self.assertNotEqual(refused.returncode, 0, refused.stdout)
            self.assertIn(reason, refused.stderr)

    def test_a_draft_model_is_counted(self):
        flags = ["--inference-dynamic-batching-buffer-size-gb", "0.0002", "--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "16",
                 "--num-speculative-tokens", "3", "--speculative-model", MODEL]
        server = Server(MODEL, *flags)
        self.addCleanup(server.close)
        told = re.search(r"memory: weights (.*), draft model (.*), cache (.*), the largest step (.*), together (.*)", server.messages()).groups()
        result = check(MODEL, "--device", "cpu", "--dtype", "fp64", *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        for part in (told[0], f"draft model, on the first rank: weights {told[1]}", told[2], told[4]):
            self.assertIn(part, result.stdout)
        plain = self.report(MODEL, "--device", "cpu", "--dtype", "fp64", *flags[:6])
        drafted = self.report(MODEL, "--device", "cpu", "--dtype", "fp64", *flags, "--pipeline-model-parallel-size", "2")
        self.assertEqual([stage["memory_bytes"]["draft_model"] for stage in drafted["stages"]], [plain["stages"][0]["memory_bytes"]["weights"], 0])
        self.assertLess(drafted["blocks"], plain["blocks"])

    def test_ranks_divide_it(self):
        self.large()
        whole = self.report(self.folder, "--dtype", "bf16", "--device", "h200", "--inference-max-requests", "8")
        self.assertEqual(whole["stages"][0]["parameters"], LARGE_PARAMETERS)
        self.assertEqual(whole["stages"][0]["memory_bytes"]["weights"], 2 * LARGE_PARAMETERS)
        self.assertTrue(whole["device"]["needed_bytes"] <= whole["device"]["memory_bytes"] or not whole["device"]["fits"])
        divided = self.report(self.folder, "--dtype", "bf16", "--device", "h100", "--tensor-model-parallel-size", "4",
                              "--pipeline-model-parallel-size", "2", "--inference-max-requests", "8")
        self.assertEqual([stage["num_layers"] for stage in divided["stages"]], [40, 40])
        self.assertAlmostEqual(sum(stage["parameters"] for stage in divided["stages"]) * 4 / LARGE_PARAMETERS, 1.0, delta=1e-3)
        self.assertTrue(divided["device"]["fits"])
        # 8 groups of 128 features, keys and values, in bf16: over 4 ranks, 40 layers and 64 positions.
        self.assertEqual(divided["stages"][0]["memory_bytes"]["cache"], divided["blocks"] * 2 * 2 * 128 * 2 * 40 * 64)
        self.assertEqual(divided["blocks"], 8 * 8192 // 64)

    def test_what_does_not_fit_is_said(self):
        self.large()
        result = check(self.folder, "--dtype", "bf16", "--device", "h100")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout, r"DOES NOT FIT an H100: a rank needs 1\d\d\.\d+ GB of \d+\.\d+ GB\nhint: more --tensor-model-parallel-size")
        self.assertFalse(self.report(self.folder, "--dtype", "bf16", "--device", "h100", code=1)["device"]["fits"])
        result = check(MODEL, "--device", "h100")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("fits an H100: a rank needs", result.stdout)

    def test_commands_of_the_manual(self):
        """The block of docs/serving.md as it is written, after the first block has named program and model."""
        with open(os.path.join(ROOT, "docs", "serving.md"), encoding="utf-8") as stream:
            blocks = stream.read().split("```")[1::2]
        names = [line for line in blocks[0].split("\n") if line.startswith(("m=", "model="))]
        (block,) = [block for block in blocks if "check --serve" in block]
        os.symlink(os.path.join(ROOT, "tests"), os.path.join(self.folder, "tests"))
        os.makedirs(os.path.join(self.folder, "build/bin"))
        os.symlink(support.BINARY, os.path.join(self.folder, "build/bin/megatron"))
        done = subprocess.run(["bash", "-euc", "\n".join([*names, block])], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        text, begin, report = done.stdout.partition("{")
        self.assertIn("fits an H100", text)
        self.assertEqual(json.loads(begin + report)["max_requests"], 256)
        self.assertEqual(len(json.loads(begin + report)["stages"]), 1)

    def test_what_is_refused(self):
        self.large()
        for flags, part in ((["/nowhere"], "there is no such folder"), ([], "--load is required"),
                            ([MODEL, "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size"),
                            ([MODEL, "--tensor-model-parallel-size", "3"], "3"),
                            ([MODEL, "--inference-max-requests", "0"], "--inference-max-requests 0 is outside"),
                            ([self.folder], "--dtype"),
                            ([ENCODER], "the memory of a server is planned for decoders, and a model of type BERT is none"),
                            ([MODEL, "--batch-invariant-mode", "--device", "h100", "--dtype", "fp32"], "--batch-invariant-mode computes in bf16 or fp16 on a GPU"),
                            ([MODEL, "--batch-invariant-mode", "--device", "cpu", "--dtype", "bf16"], "--batch-invariant-mode computes in fp32 or fp64 on a CPU"),
                            ([MODEL, "--batch-invariant-mode", "--device", "cpu", "--dtype", "fp32", "--kv-cache-dtype", "fp8"],
                             "--kv-cache-dtype fp8 rounds keys and values, which training does not: it cannot be used in --batch-invariant-mode"),
                            ([MODEL, "--batch-invariant-mode", "--device", "cpu", "--mamba-inference-ssm-states-dtype", "fp32"],
                             "--batch-invariant-mode keeps states in the types that they are computed in"),
                            ([MODEL, "--inference-dynamic-batching-buffer-size-gb", "1e-9"], "holds 0 blocks of 64 tokens, and 1 is needed")):
            result = check(*flags)
            self.assertNotEqual(result.returncode, 0, flags)
            self.assertIn(part, result.stderr)


if __name__ == "__main__":
    support.main()
