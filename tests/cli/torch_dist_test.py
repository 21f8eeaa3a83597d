#!/usr/bin/env python3
"""End-to-end tests of Megatron-LM's torch_dist checkpoints on the real binary: `convert-checkpoint` both ways, `--load` of them.

Usage: torch_dist_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import hashlib
import json
import os
import struct

from support import FolderTest, call, main, read_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden", "torch_dist")
MODELS = {"llama": 5, "gpt": 0, "moe": 3, "mla": 7, "gpt_oss": 2}  # iteration

# SHA-256 of what is exported from the goldens. These very files were loaded by megatron-core, strictly, on one and several ranks,
# and gave its logits and losses (check_torch_dist_export.py): when one changes, run that again.
METADATA = "9817072de14c715c"
EXPORTED = {
    "llama": {".metadata": "c6c8d2e580d10f7b", "__0_0.distcp": "c8243207c9fc9f57", "common.pt": "11c6834b59876e9e", "metadata.json": METADATA},
    "gpt": {".metadata": "a3006b0a838cc371", "__0_0.distcp": "e9223bc0b5a0d4a8", "common.pt": "ac2d7a7745bf868c", "metadata.json": METADATA},
    "moe": {".metadata": "61a481c0e2971abf", "__0_0.distcp": "019aa99e60755ceb", "common.pt": "58c7423fbe8e4ae2", "metadata.json": METADATA},
    "mla": {".metadata": "d0e4c4fc6f37fe47", "__0_0.distcp": "fbaaf4923af687a6", "common.pt": "f1bdd88bdca74b0f", "metadata.json": METADATA},
    "gpt_oss": {".metadata": "09f9400101b751e6", "__0_0.distcp": "3b6ad9b5333e268d", "common.pt": "1b4029bdb9e72a03", "metadata.json": METADATA},
}


class TorchDistTest(FolderTest):
    def assert_error(self, code, message, *arguments):
        result = call(*arguments)
        error = result.stderr
        self.assertEqual(result.returncode, code, error)
        self.assertTrue(any(line.startswith("error: " + message) for line in error.splitlines()), error)

    def golden(self, name):
        return os.path.join(GOLDEN, name, "golden.safetensors")

    # -- in

    def test_imports_give_the_logits_of_megatron_core(self):
        for name, iteration in MODELS.items():
            out = self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, name), "--save", self.path(name), "--probe",
                              self.golden(name), "--json")
            result = json.loads(out)
            self.assertEqual((result["from"], result["to"], result["iteration"]), ("torch_dist", "megatron", iteration))
            self.assertLess(result["probe_difference"], 1e-4)
            waived = " ".join(result["waived"])
            self.assertIn("_extra_state", waived)
            self.assertEqual("states of the optimizer" in waived, name == "llama")

    def test_a_checkpoint_is_loaded_as_it_is(self):
        probe = read_safetensors(self.golden("llama"))
        tokens = struct.unpack(f"<{probe['tokens'][0][0]}i", probe["tokens"][1])
        out = self.path("logits.safetensors")
        for load in (os.path.join(GOLDEN, "llama"), os.path.join(GOLDEN, "llama", "iter_0000005")):
            self.output("logits", "--load", load, "--tokens", ",".join(map(str, tokens)), "--dtype", "fp32", "--device", "cpu", "--output", out)
            actual, expected = read_safetensors(out)["logits"], probe["logits"]
            self.assertEqual(actual[0], expected[0])
            count = expected[0][0] * expected[0][1]
            a, b = struct.unpack(f"<{count}f", actual[1]), struct.unpack(f"<{count}f", expected[1])
            self.assertLess(sum((x - y) ** 2 for x, y in zip(a, b)) ** 0.5, 1e-4 * sum(y * y for y in b) ** 0.5)

    def test_padding_of_the_vocabulary_is_dropped(self):
        self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, "llama"), "--save", self.path("a"), "--vocab-size", "61")
        with open(os.path.join(self.path("a"), "iter_0000005", "manifest.json")) as stream:
            manifest = json.load(stream)
        self.assertEqual(manifest["tensors"]["embedding.word_embeddings.weight"]["shape"], [61, 32])
        self.assert_error(1, os.path.join(GOLDEN, "llama", "iter_0000005") + ": the embedding has 72 rows, the vocabulary 73 tokens",
                          "convert-checkpoint", "--load", os.path.join(GOLDEN, "llama"), "--save", self.path("b"), "--vocab-size", "73")

    def test_flags_of_the_model_count_where_they_are_given(self):
        # Another rotary base is another model: the probe finds it. Other sizes do not fit the tensors.
        load = ["convert-checkpoint", "--load", os.path.join(GOLDEN, "llama")]
        self.assert_error(1, f"the logits of {self.path('a')} differ from those of", *load, "--save", self.path("a"), "--rotary-base", "90000",
                          "--probe", self.golden("llama"))
        self.assert_error(1, os.path.join(GOLDEN, "llama", "iter_0000005") + ": decoder.layers.", *load, "--save", self.path("b"),
                          "--ffn-hidden-size", "40")
        self.assert_error(2, "unknown flag --rotary-base", "convert-checkpoint", "--load", os.path.join(HERE, "..", "golden", "hf", "llama2"),
                          "--save", self.path("c"), "--rotary-base", "1")

    def test_there_is_no_tie_where_the_arguments_say_one(self):
        self.assert_error(1, os.path.join(GOLDEN, "llama", "iter_0000005") + ": output_layer.weight (in __0_1.distcp) is in the checkpoint, the model of its "
                          "arguments has no such tensor: its output layer is tied to the embedding", "convert-checkpoint", "--load",
                          os.path.join(GOLDEN, "llama"), "--save", self.path("a"), "--untie-embeddings-and-output-weights", "false")

    # -- out

    def test_exports_are_what_megatron_core_loaded(self):
        for name, iteration in MODELS.items():
            ours, out = self.path(name), self.path(name + "_out")
            self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, name), "--save", ours)
            self.output("convert-checkpoint", "--load", ours, "--to", "torch_dist", "--save", out, "--probe", self.golden(name))
            with open(os.path.join(out, "latest_checkpointed_iteration.txt")) as stream:
                self.assertEqual(stream.read(), str(iteration))
            directory = os.path.join(out, f"iter_{iteration:07d}")
            hashes = {}
            for file in sorted(os.listdir(directory)):
                with open(os.path.join(directory, file), "rb") as stream:
                    hashes[file] = hashlib.sha256(stream.read()).hexdigest()[:16]
            self.assertEqual(hashes, EXPORTED[name])

    def test_there_and_back_every_tensor_has_the_same_bytes(self):
        ours, out, back = self.path("ours"), self.path("out"), self.path("back")
        self.output("convert-checkpoint", "--load", os.path.join(GOLDEN, "llama"), "--save", ours)
        self.output("convert-checkpoint", "--load", ours, "--save", out, "--to", "torch_dist")
        self.output("convert-checkpoint", "--load", out, "--save", back)
        a, b = (read_safetensors(os.path.join(f, "iter_0000005", "rank_00000.safetensors")) for f in (ours, back))
        self.assertEqual(a, b)
        self.assertEqual(len(a), 3 + 3 * 9)

    def test_a_folder_of_hugging_face_becomes_a_checkpoint_of_megatron(self):
        model = os.path.join(HERE, "..", "golden", "hf", "llama3")
        probe = self.path("probe.safetensors")
        self.output("logits", "--load", model, "--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6", "--output", probe)
        result = call("convert-checkpoint", "--load", model, "--to", "torch_dist", "--save", self.path("a"), "--probe", probe)
        error = result.stderr
        # Its scaling starts elsewhere than Megatron-LM's.
        self.assertEqual(result.returncode, 1, error)
        self.assertIn("rope_scaling_type", error)
        for name in ("llama2", "mixtral", "qwen2_moe"):  # layers and experts stacked, layers numbered
            model = os.path.join(HERE, "..", "golden", "hf", name)
            self.output("logits", "--load", model, "--dtype", "fp32", "--device", "cpu", "--tokens", "3,1,4,1,5,9,2,6", "--output", probe)
            self.output("convert-checkpoint", "--load", model, "--to", "torch_dist", "--save", self.path(name), "--probe", probe)

    def test_what_megatron_does_not_have_is_named(self):
        self.assert_error(1, "the model has norms after its branches (norm_placement), which Megatron-LM's GPT has not", "convert-checkpoint",
                          "--load", os.path.join(HERE, "..", "golden", "hf", "gemma2"), "--to", "torch_dist", "--save", self.path("a"))
        self.assert_error(1, "--to huggingface: ", "convert-checkpoint", "--load", os.path.join(GOLDEN, "gpt"), "--to", "huggingface", "--save",
                          self.path("a"))
        for folder, what in (("deepseek_v2", "groups of experts ranked by their best one (moe_router_group_score)"),
                             ("deepseek_v3", "another epsilon in the norms of latents (latent_norm_epsilon)")):
            self.assert_error(1, f"the model has {what}", "convert-checkpoint", "--load", os.path.join(HERE, "..", "golden", "hf", folder), "--to",
                              "torch_dist", "--save", self.path("a"))
        self.assertFalse(os.path.exists(self.path("a")))


if __name__ == "__main__":
    main()
