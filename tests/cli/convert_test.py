#!/usr/bin/env python3
"""End-to-end tests of Hugging Face models on the real binary: `convert-checkpoint` both ways, `--load` of a folder.

Usage: convert_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import shutil
import struct
import subprocess
import unittest

import support
from support import FolderTest, call, main, write_safetensors

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf")
TRAIN = ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "2", "--lr", "1e-3", "--mock-data", "--eval-iters",
         "0", "--device", "cpu", "--num-threads", "1", "--seq-length", "16", "--save-interval", "2"]


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


class ConvertTest(FolderTest):
    def assert_error(self, code, message, *arguments):
        result = call(*arguments)
        error = result.stderr
        self.assertEqual(result.returncode, code, error)
        self.assertIn("error: " + message, error.splitlines())

    def test_there_and_back(self):
        golden = os.path.join(GOLDEN, "llama2")
        out = json.loads(self.output("convert-checkpoint", "--load", golden, "--save", self.path("ours"), "--json"))
        self.assertEqual((out["from"], out["to"], out["model_type"], out["iteration"]), ("huggingface", "megatron", "llama", 0))
        self.assertEqual(out["num_tensors"], len(tensors(golden)))
        self.output("inspect-checkpoint", self.path("ours"))
        text = self.output("convert-checkpoint", "--load", self.path("ours"), "--save", self.path("theirs"))
        self.assertIn(f"wrote {self.path('theirs')}: {len(tensors(golden))} tensors of a llama model", text)
        self.assertEqual(tensors(self.path("theirs")), tensors(golden))
        with open(self.path("theirs/config.json")) as stream:
            self.assertEqual(json.load(stream)["rope_parameters"], {"rope_type": "default", "rope_theta": 10000.0})

    def test_a_gguf_file(self):
        file, golden = os.path.join(GOLDEN, "..", "gguf", "llama2.gguf"), tensors(os.path.join(GOLDEN, "llama2"))
        out = json.loads(self.output("convert-checkpoint", "--load", file, "--save", self.path("ours"), "--json"))
        self.assertEqual((out["from"], out["to"], out["model_type"], out["iteration"]), ("gguf", "megatron", "llama", 0))
        self.output("convert-checkpoint", "--load", self.path("ours"), "--save", self.path("theirs"))
        theirs = tensors(self.path("theirs"))
        self.assertEqual(theirs.keys(), golden.keys())
        for name, (_, shape, data) in theirs.items():  # its norms are fp32
            self.assertEqual(shape, golden[name][1])
            if len(shape) == 2:
                self.assertEqual(data, golden[name][2], name)
        arguments = ["--tokens", "3,1,4,1,5", "--dtype", "fp32", "--device", "cpu", "--json"]
        self.assertEqual(self.output("logits", "--load", file, *arguments), self.output("logits", "--load", self.path("ours"), *arguments))
        convert = ["convert-checkpoint", "--load", file, "--save", self.path("no")]
        self.assert_error(1, f"--to torch_dist: {file} is in the format gguf, which becomes a checkpoint of ours first", *convert, "--to",
                          "torch_dist")
        self.assert_error(1, "--ckpt-step has no effect on a GGUF file", *convert, "--ckpt-step", "1")
        cut = self.path("cut.gguf")
        with open(file, "rb") as whole, open(cut, "wb") as part:
            part.write(whole.read()[:-64])
        result = call("generate", "--load", cut, "--prompt", "a", "--tokens-to-generate", "1")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, "error: " + cut + r": tensor \S+: its \d+ bytes at offset \d+ lie outside the file")

    def test_probe(self):
        golden, probe = os.path.join(GOLDEN, "qwen3"), self.path("probe.safetensors")
        self.output("logits", "--load", golden, "--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6", "--output", probe)
        out = json.loads(self.output("convert-checkpoint", "--load", golden, "--save", self.path("ours"), "--probe", probe, "--json"))
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
        self.assertIn("error: the logits of " + self.path("wrong") + " differ from those of", result.stderr)

    def test_every_family_reproduces_the_logits_of_transformers(self):
        for family in sorted(f for f in os.listdir(GOLDEN) if os.path.isdir(os.path.join(GOLDEN, f))):
            with self.subTest(family):
                with open(os.path.join(GOLDEN, family, "golden.safetensors"), "rb") as stream:
                    data = stream.read()
                length = struct.unpack("<Q", data[:8])[0]
                header = json.loads(data[8:8 + length])
                positions, begin = header["logits_short"]["shape"][0], header["tokens"]["data_offsets"][0]
                parts = {"tokens": ("I32", [positions], data[8 + length + begin:8 + length + begin + 4 * positions])}
                begin, end = header["logits_short"]["data_offsets"]
                parts["logits"] = ("F32", header["logits_short"]["shape"], data[8 + length + begin:8 + length + end])
                probe = self.path(family + ".safetensors")
                write_safetensors(probe, parts)
                out = json.loads(self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, family), "--save", self.path(family),
                                             "--probe", probe, "--json"))
                self.assertLess(out["probe_difference"], 1e-4)

    def test_a_name_map_gives_what_the_family_gives(self):
        maps = os.path.join(GOLDEN, "..", "name_map")
        for family, name_map in (("llama2", "llama2.yaml"), ("gpt2", "gpt2.json")):
            with self.subTest(family):
                golden, raw, probe = os.path.join(GOLDEN, family), self.path(family + "_raw"), self.path(family + "_probe.safetensors")
                os.mkdir(raw)
                for file in os.listdir(golden):
                    if file.startswith("model"):
                        shutil.copy(os.path.join(golden, file), raw)
                tokens = ["--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6"]
                self.output("logits", "--load", golden, *tokens, "--output", probe)
                ours, shape = self.path(family), os.path.join(maps, family + "_model.yaml")
                mapped = ["--name-map", os.path.join(maps, name_map), "--config", shape]
                out = json.loads(self.output("convert-checkpoint", "--load", raw, *mapped, "--save", ours, "--probe", probe, "--json"))
                self.assertEqual((out["from"], out["to"]), ("safetensors", "megatron"))
                self.assertEqual(out["num_tensors"], len(tensors(golden)))
                self.assertLess(out["probe_difference"], 1e-6)
                self.output("logits", "--load", ours, *tokens, "--output", self.path("logits.safetensors"))
                with open(probe, "rb") as a, open(self.path("logits.safetensors"), "rb") as b:
                    self.assertEqual(a.read(), b.read())
                self.output("convert-checkpoint", "--load", ours, "--save", self.path(family + "_back"), "--hf-model-type",
                            "llama" if family == "llama2" else family)
                self.assertEqual(tensors(self.path(family + "_back")), tensors(golden))
        raw = self.path("llama2_raw")
        self.assert_error(1, f"--to huggingface: {raw} is in the format safetensors, which becomes a checkpoint of ours first",
                          "convert-checkpoint", "--load", raw, "--save", self.path("no"), *mapped, "--to", "huggingface")
        self.assert_error(2, "--num-layers is required and must be positive", "convert-checkpoint", "--load", raw, "--save",
                          self.path("no"), "--name-map", os.path.join(maps, "llama2.yaml"))
        self.assert_error(1, raw + ": holds safetensors, and neither a config.json that names a model nor a checkpoint",
                          "convert-checkpoint", "--load", raw, "--save", self.path("no"))

    def test_the_family_survives_training(self):
        # mistral is no family that a search finds first: its settings are also a llama's.
        golden = os.path.join(GOLDEN, "mistral")
        source = self.path("source")
        shutil.copytree(golden, source)
        os.remove(os.path.join(source, "golden.safetensors"))
        with open(os.path.join(source, "config.json")) as stream:
            config = json.load(stream)
        config.update(pad_token_id=5, some_key_of_theirs={"a": [1]})
        with open(os.path.join(source, "config.json"), "w") as out:
            json.dump(config, out)
        load = {"a folder": source, "a checkpoint": self.path("ours")}
        self.output("convert-checkpoint", "--load", source, "--save", load["a checkpoint"])
        rows = os.path.join(GOLDEN, "..", "sft", "conversations.jsonl")
        tune = ["--train-data-path", rows, "--data-cache-path", self.path("cache"), "--chat-template", os.path.join(GOLDEN, "..", "sft", "template.jinja"),
                "--seq-length", "24", "--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3", "--lr-decay-iters", "2", "--eval-iters", "0",
                "--device", "cpu", "--num-threads", "1"]
        for name, start in load.items():
            with self.subTest(name):
                run, out = self.path(name + " run"), self.path(name + " out")
                self.run_ok("finetune", "--load", start, "--save", run, *tune, "--train-iters", "1")
                self.run_ok("finetune", "--load", start, "--save", run, *tune, "--train-iters", "2")  # resumes
                result = json.loads(self.output("convert-checkpoint", "--load", run, "--save", out, "--json"))
                self.assertEqual((result["model_type"], result["iteration"]), ("mistral", 2))
                with open(os.path.join(out, "config.json")) as stream:
                    written = json.load(stream)
                for key in ("model_type", "architectures", "vocab_size", "hidden_size", "num_key_value_heads", "rms_norm_eps",
                            "sliding_window", "eos_token_id", "bos_token_id", "pad_token_id", "some_key_of_theirs"):
                    self.assertEqual(written.get(key), config.get(key), key)
                with open(os.path.join(out, "generation_config.json")) as a, open(os.path.join(golden, "generation_config.json")) as b:
                    self.assertEqual(a.read(), b.read())
                self.assertNotEqual(tensors(out), tensors(golden))
                self.assertEqual({n: t[1] for n, t in tensors(out).items()}, {n: t[1] for n, t in tensors(golden).items()})

    @unittest.skipIf("ASAN_OPTIONS" in os.environ, "AddressSanitizer keeps what is freed")
    def test_memory_is_that_of_the_largest_tensor_twice(self):
        hidden, ffn, vocab, layers = 512, 2048, 8192, 12
        config = dict(model_type="llama", hidden_size=hidden, intermediate_size=ffn, vocab_size=vocab, num_hidden_layers=layers,
                      num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=10000.0,
                      tie_word_embeddings=True, hidden_act="silu", torch_dtype="float32")
        shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
        for i in range(layers):
            for name in "qkvo":
                shapes[f"model.layers.{i}.self_attn.{name}_proj.weight"] = [hidden, hidden]
            for name, shape in (("gate", [ffn, hidden]), ("up", [ffn, hidden]), ("down", [hidden, ffn])):
                shapes[f"model.layers.{i}.mlp.{name}_proj.weight"] = shape
            for name in ("input", "post_attention"):
                shapes[f"model.layers.{i}.{name}_layernorm.weight"] = [hidden]
        folder = self.path("large")
        os.mkdir(folder)
        with open(os.path.join(folder, "config.json"), "w") as out:
            json.dump(config, out)
        header, end = {}, 0
        for name, shape in shapes.items():
            size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = dict(dtype="F32", shape=shape, data_offsets=[end, end + size])
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(folder, "model.safetensors"), "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)  # zeros that take no room on the disk
        small = self.peak_bytes("--load", os.path.join(GOLDEN, "llama2"), "--save", self.path("small"))
        largest = 4 * vocab * hidden
        self.assertGreater(end, 8 * largest)
        for load, save in ((folder, self.path("ours")), (self.path("ours"), self.path("theirs"))):
            peak = self.peak_bytes("--load", load, "--save", save)
            self.assertLess(peak - small, 2 * largest + (12 << 20), f"{save}: {end} bytes in all")

    def peak_bytes(self, *flags):
        environment = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1")
        process = subprocess.Popen([support.BINARY, "convert-checkpoint", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        error = process.stderr.read()
        process.stderr.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        self.assertEqual(status, 0, error.decode())
        return usage.ru_maxrss * 1024

    def test_a_folder_is_trained_on_generated_from_and_exported(self):
        golden = os.path.join(GOLDEN, "qwen2")
        train = [*TRAIN[:5], "3", *TRAIN[6:]]
        result = call("pretrain", "--load", golden, "--save", self.path("run"), *train, "--exit-interval", "2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"starting from the weights of {golden}", (result.stdout + result.stderr))
        # The checkpoint goes on, generates, and becomes a folder again.
        self.output("pretrain", "--load", self.path("run"), "--use-checkpoint-args", "--save", self.path("run"), *train)
        self.output("generate", "--load", self.path("run"), "--prompt", "1 2 3", "--tokens-to-generate", "4", "--greedy")
        self.output("convert-checkpoint", "--load", self.path("run"), "--save", self.path("out"), "--hf-model-type", "qwen2")
        before, after = tensors(golden), tensors(self.path("out"))
        self.assertEqual({name: shape for name, (_, shape, _) in before.items()},
                         {name: shape for name, (_, shape, _) in after.items()})

    def test_flags_that_make_another_model_are_pointed_out(self):
        golden = os.path.join(GOLDEN, "mistral")
        result = call("pretrain", "--load", golden, *TRAIN[:-2], "--rotary-base", "500")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"this run is another model than {golden}: rotary_base is 500, not 10000 as its config.json says",
                      result.stderr)
        result = call("pretrain", "--load", golden, *TRAIN[:-2], "--start", "fresh")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("starting from new weights", (result.stdout + result.stderr))

    def test_a_converted_checkpoint_starts_a_run(self):
        self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, "gemma2"), "--save", self.path("ours"))
        result = call("pretrain", "--load", self.path("ours"), "--use-checkpoint-args", "--save", self.path("run"), *TRAIN)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("starting from the weights of", (result.stdout + result.stderr))

    def test_a_restarted_run_goes_on_from_its_own_checkpoint(self):
        flags = ["pretrain", "--pretrained-checkpoint", os.path.join(GOLDEN, "phi3"), "--load", self.path("run"), "--save",
                 self.path("run"), *TRAIN[:5], "4", *TRAIN[6:], "--exit-interval", "2"]
        for expected in ("starting from the weights of", "resuming from " + os.path.join(self.path("run"), "iter_0000002")):
            result = call(*flags)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(expected, (result.stdout + result.stderr))

    def test_generation_from_a_folder(self):
        out = json.loads(self.output("generate", "--load", os.path.join(GOLDEN, "gpt2"), "--prompt", "5 6 7",
                                     "--tokens-to-generate", "5", "--greedy", "--ignore-eod", "--json"))
        self.assertEqual(len(out[0]["tokens"]), 5)

    def test_what_is_refused(self):
        self.assert_error(2, "--save is required", "convert-checkpoint", "--load", os.path.join(GOLDEN, "gpt2"))
        self.assert_error(1, self.path("none") + ": there is no such folder", "convert-checkpoint", "--load", self.path("none"),
                          "--save", self.path("out"))
        self.assert_error(1, __file__ + ": is a file, not the folder of a model", "convert-checkpoint", "--load", __file__,
                          "--save", self.path("out"))
        self.assert_error(1, "--hf-model-type has no effect: a folder of Hugging Face is not what is written", "convert-checkpoint",
                          "--load", os.path.join(GOLDEN, "gpt2"), "--save", self.path("out"), "--hf-model-type", "llama")
        golden = os.path.join(GOLDEN, "gpt2")
        self.assert_error(1, f"--ckpt-step is given, but {golden} is a folder of Hugging Face", "logits", "--load", golden,
                          "--ckpt-step", "1", "--tokens", "1")


if __name__ == "__main__":
    main()
