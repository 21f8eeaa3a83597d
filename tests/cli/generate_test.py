#!/usr/bin/env python3
"""End-to-end tests of `megatron generate` and `megatron logits` on the real binary.

Usage: generate_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
CHAT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "chat")

# Learned positions, so that the length is limited; ids are bytes and 256, the end of a document.
PRETRAIN = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
            "--tokenizer-type", "ByteLevelTokenizer", "--micro-batch-size", "2", "--global-batch-size", "2",
            "--train-iters", "2", "--lr", "1e-3", "--mock-data", "--eval-iters", "0", "--device", "cpu", "--num-threads", "1",
            "--init-method-std", "0.3", "--save-interval", "1"]


def call(*arguments):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
                          env=environment)


class GenerateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.model = os.path.join(cls.folder, "model")
        result = call("pretrain", *PRETRAIN, "--save", cls.model)
        assert result.returncode == 0, result.stderr.decode()

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def run_ok(self, command, *flags):
        result = call(command, "--load", self.model, *flags)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode()

    def generated(self, *flags):
        return json.loads(self.run_ok("generate", "--json", *flags))

    def assert_error(self, code, message, command, *flags):
        result = call(command, *flags)
        error = result.stderr.decode()
        self.assertEqual(result.returncode, code, error)
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        self.assertEqual(lines, ["error: " + message], error)
        self.assertEqual(result.stdout, b"")

    def test_texts_do_not_depend_on_those_beside_them(self):
        prompts = ["a", "ab", "a longer one"]
        flags = ["--batch-invariant-mode", "--temperature", "1.3", "--seed", "3", "--tokens-to-generate", "8"]
        together = self.generated(*flags, "--prompt", *prompts)
        self.assertEqual(self.generated(*flags, "--prompt", prompts[0]), together[:1])
        self.assert_error(2, "--batch-invariant-mode computes in fp32 or fp64 on a CPU, not in BFloat16", "generate",
                          "--load", self.model, "--batch-invariant-mode", "--dtype", "bf16", "--prompt", "a")

    def file(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as out:
            out.write(text)
        return path

    # -- generate --chat

    def chat_model(self):
        """A model of the tokenizer in tests/golden/chat, trained a little, so that its replies differ; and the golden prompts."""
        model = os.path.join(self.folder, "chat")
        if not os.path.exists(model):
            flags = PRETRAIN[:]
            at = flags.index("--tokenizer-type")
            flags[at:at + 2] = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", os.path.join(CHAT, "tokenizer")]
            flags[flags.index("--seq-length") + 1] = "256"
            result = call("pretrain", *flags, "--save", model)
            self.assertEqual(result.returncode, 0, result.stderr.decode())
        with open(os.path.join(CHAT, "prompts.jsonl"), encoding="utf-8") as lines:
            return model, [json.loads(line) for line in lines]

    def chat(self, *flags, text=None, tokens=16):
        model, _ = self.chat_model()
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        result = subprocess.run([BINARY, "generate", "--chat", "--load", model, "--device", "cpu", "--dtype", "fp64",
                                 "--tokens-to-generate", str(tokens), *flags], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                timeout=120, env=environment, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_chat_prompts_are_those_of_transformers(self):
        model, rows = self.chat_model()
        answers = json.loads(self.chat("--json", "--greedy", "--prompts-file", os.path.join(CHAT, "prompts.jsonl")))
        self.assertEqual([a["prompt_tokens"] for a in answers], [row["ids"] for row in rows])
        for row, answer in zip(rows, answers):
            self.assertEqual(answer["messages"], row["messages"] + [{"role": "assistant", "content": answer["text"]}])
            # The text of the plain command for the same text, up to the first token that ends a turn, without special tokens.
            plain = json.loads(self.run_plain(model, "--greedy", "--prompt", answer["prompt"]))[0]
            self.assertEqual(plain["tokens"][:len(answer["tokens"])], answer["tokens"])
            if answer["finish_reason"] == "end_of_document":
                rest = plain["tokens"][len(answer["tokens"]):]
                self.assertTrue(not rest or rest[0] in (600, 602), plain)
            shown = re.sub(r"<\|(endoftext|im_start|im_end)\|>", "", plain["text"])
            self.assertTrue(shown.startswith(answer["text"].rstrip("\ufffd")), (shown, answer["text"]))

    def run_plain(self, model, *flags):
        result = call("generate", "--load", model, "--device", "cpu", "--dtype", "fp64", "--tokens-to-generate", "16", "--ignore-eod",
                      "--json", *flags)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode()

    def test_chat_ends_with_the_turn(self):
        # Sampling at a high temperature meets every token sooner or later.
        ended = special = 0
        for answer in json.loads(self.chat("--json", "--temperature", "5.0", "--prompt", *["Hello"] * 60, tokens=100)):
            self.assertFalse({600, 602} & set(answer["tokens"]))
            self.assertNotRegex(answer["text"], r"<\|(endoftext|im_start|im_end)\|>")
            self.assertEqual(answer["finish_reason"] == "length", len(answer["tokens"]) == 100)
            ended += answer["finish_reason"] == "end_of_document"
            special += 601 in answer["tokens"]
        self.assertGreater(ended, 0)
        self.assertGreater(special, 0)  # left out of the text

    def test_chat_of_several_turns_keeps_its_history(self):
        typed = "Hello\n\nWhy?\nagain"
        answers = json.loads(self.chat("--json", "--greedy", "--system", "You are terse.", text=typed))
        self.assertEqual(len(answers), 3)
        messages = [{"role": "system", "content": "You are terse."}]
        for said, answer in zip(("Hello", "Why?", "again"), answers):
            messages.append({"role": "user", "content": said})
            alone = self.file("turn.jsonl", json.dumps({"messages": messages}))
            self.assertEqual(json.loads(self.chat("--json", "--greedy", "--prompts-file", alone)), [answer])
            messages.append({"role": "assistant", "content": answer["text"]})
            self.assertEqual(answer["messages"], messages)
        self.assertEqual(self.chat("--greedy", "--system", "You are terse.", text=typed),
                         "".join(answer["text"] + "\n" for answer in answers))

    def test_chat_texts(self):
        one, two = (json.loads(self.chat("--json", "--greedy", "--prompt", said))[0]["text"] for said in ("Hello", "Why?"))
        self.assertEqual(self.chat("--greedy", "--prompt", "Hello"), one + "\n")
        self.assertEqual(self.chat("--greedy", "--prompt", "Hello", "Why?"), one + "\n---\n" + two + "\n")
        template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
        other = json.loads(self.chat("--json", "--greedy", "--prompt", "Hello", "--chat-template", template))[0]
        self.assertEqual(other["prompt"], "Hello|")

    def test_chat_errors(self):
        model, _ = self.chat_model()
        flags = ["generate", "--chat", "--load", model, "--device", "cpu"]
        path = self.file("done.jsonl", json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
        self.assert_error(1, path + ":1: the last message is the assistant's, so there is nothing to answer", *flags, "--prompts-file", path)
        path = self.file("texts.jsonl", json.dumps({"prompt": "a", "completion": "b"}))
        self.assert_error(1, path + ":1: prompt and completion are plain texts, which no template is for", *flags, "--prompts-file", path)
        path = self.file("system.jsonl", json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}))
        self.assert_error(1, path + ":1: has a system message of its own", *flags, "--prompts-file", path, "--system", "z")
        self.assert_error(1, "the tokenizer has no chat template", "generate", "--chat", "--load", self.model, "--prompt", "a")
        self.assert_error(2, "--system has no effect without --chat", "generate", "--load", model, "--prompt", "a", "--system", "z")
        self.assert_error(2, "--ignore-eod has no effect with --chat, where replies end with their turn", *flags, "--ignore-eod")

    # -- generate

    def test_streamed_text_equals_json(self):
        for flags in (["--greedy"], ["--temperature", "0"], ["--seed", "7"], ["--top-k", "5", "--temperature", "0.7"], ["--top-p", "0.5"]):
            flags = [*flags, "--prompt", "abc", "--tokens-to-generate", "12", "--ignore-eod"]
            one = self.generated(*flags)
            self.assertEqual(len(one), 1)
            self.assertEqual(len(one[0]["tokens"]), 12)
            self.assertEqual(one[0]["finish_reason"], "length")
            self.assertEqual(self.run_ok("generate", *flags), "abc" + one[0]["text"] + "\n")

    def test_sampling_follows_the_seed(self):
        flags = ["--prompt", "abc", "--tokens-to-generate", "12", "--ignore-eod"]
        self.assertEqual(self.generated(*flags), self.generated(*flags, "--seed", "1234"))
        self.assertNotEqual(self.generated(*flags), self.generated(*flags, "--seed", "1"))

    def test_prompts_of_a_batch_as_alone(self):
        prompts = ["a longer prompt", "b", "cde"]
        flags = ["--greedy", "--ignore-eod", "--dtype", "fp64", "--tokens-to-generate", "10"]
        batch = self.generated(*flags, "--prompt", *prompts)
        self.assertEqual([one["prompt"] for one in batch], prompts)
        for prompt, one in zip(prompts, batch):
            self.assertEqual(self.generated(*flags, "--prompt", prompt), [one])
        lines = self.file("prompts.txt", "a longer prompt\n\nb\r\ncde")
        objects = self.file("prompts.jsonl", "".join(
            json.dumps({key: prompt}) + "\n" for key, prompt in zip(("prompt", "text", "prompt"), prompts)))
        for path in (lines, objects):
            self.assertEqual(self.generated(*flags, "--prompts-file", path), batch)
        text = self.run_ok("generate", *flags, "--prompt", *prompts)
        self.assertEqual(text, "---\n".join(one["prompt"] + one["text"] + "\n" for one in batch))

    def test_stop(self):
        flags = ["--greedy", "--ignore-eod", "--prompt", "abc", "--tokens-to-generate", "12"]
        text = self.generated(*flags)[0]["text"]
        stop = text[4:6]
        stopped = self.generated(*flags, "--stop", "never seen", stop)[0]
        self.assertEqual(stopped["text"], text[:text.index(stop)])
        self.assertEqual(stopped["finish_reason"], "stop")

    def test_an_older_checkpoint(self):
        result = call("generate", "--load", self.model, "--ckpt-step", "1", "--prompt", "a", "--tokens-to-generate", "1")
        self.assertIn("loaded iteration 1 from", result.stderr.decode())

    def test_generate_errors(self):
        load = ["--load", self.model]
        prompt = ["--prompt", "abc"]
        nowhere = os.path.join(self.folder, "nowhere")
        empty = os.path.join(self.folder, "empty")
        os.makedirs(empty, exist_ok=True)
        self.assert_error(1, nowhere + ": there is no such folder", "generate", "--load", nowhere, *prompt)
        self.assert_error(1, __file__ + ": is a file, not the folder of a model", "generate", "--load", __file__, *prompt)
        self.assert_error(1, empty + ": holds no checkpoint", "generate", "--load", empty, *prompt)
        self.assert_error(1, self.model + ": has no checkpoint of --ckpt-step 7", "generate", *load, *prompt, "--ckpt-step", "7")
        self.assert_error(2, "--load is required", "generate", *prompt)
        self.assert_error(2, "exactly one of --prompt and --prompts-file is needed", "generate", *load)
        self.assert_error(2, "exactly one of --prompt and --prompts-file is needed", "generate", *load, *prompt,
                          "--prompts-file", "x")
        self.assert_error(2, "--temperature -1 is outside [0, 100]", "generate", *load, *prompt, "--temperature", "-1")
        self.assert_error(2, "--tokens-to-generate 0 must be positive", "generate", *load, *prompt, "--tokens-to-generate", "0")
        self.assert_error(2, "--stop: an empty text would end everything", "generate", *load, *prompt, "--stop", "")
        self.assert_error(2, '--device "tpu" is not one of its values; did you mean cpu?', "generate", *load, *prompt, "--device", "tpu")
        self.assert_error(1, "prompt 1 has 3 tokens; with 64 to generate that is beyond the model's 32 positions",
                          "generate", *load, *prompt)
        path = self.file("empty.txt", "\n\n")
        self.assert_error(1, path + " holds no prompts", "generate", *load, "--prompts-file", path)
        path = self.file("list.jsonl", '{"prompt": "a"}\n[1]\n')
        self.assert_error(1, path + ":2: expected a JSON object", "generate", *load, "--prompts-file", path)
        path = self.file("keys.jsonl", '{"prompt": "a"}\n{"p": "a"}\n')
        self.assert_error(1, path + ':2: no string under "prompt" or "text"', "generate", *load, "--prompts-file", path)

    # -- logits

    def test_logits_agree_with_generate(self):
        best = json.loads(self.run_ok("logits", "--tokens", "97,98,99", "--json", "--top", "3"))
        self.assertEqual(len(best), 3)
        self.assertGreaterEqual(best[0]["logprob"], best[1]["logprob"])
        self.assertEqual(best, json.loads(self.run_ok("logits", "--prompt", "abc", "--json", "--top", "3")))
        token = self.generated("--prompt", "abc", "--greedy", "--ignore-eod", "--tokens-to-generate", "1")[0]["tokens"]
        self.assertEqual(token, [best[0]["id"]])
        lines = self.run_ok("logits", "--prompt", "abc", "--top", "3").splitlines()
        self.assertEqual([int(line.split("\t")[0]) for line in lines], [one["id"] for one in best])

    def test_logits_file(self):
        path = os.path.join(self.folder, "logits.safetensors")
        self.run_ok("logits", "--tokens", "97,98,99", "--output", path)
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            data = file.read()
        self.assertEqual(header["logits"]["shape"], [3, 257])
        self.assertEqual(header["logits"]["dtype"], "F32")
        begin, end = header["tokens"]["data_offsets"]
        self.assertEqual(struct.unpack("<3i", data[begin:end]), (97, 98, 99))
        begin, end = header["logits"]["data_offsets"]
        last = struct.unpack("<%df" % ((end - begin) // 4), data[begin:end])[-257:]
        best = json.loads(self.run_ok("logits", "--tokens", "97,98,99", "--json", "--top", "1"))[0]["id"]
        self.assertEqual(last.index(max(last)), best)

    def test_logits_errors(self):
        load = ["--load", self.model]
        self.assert_error(1, "--tokens 257 is outside the vocabulary of 257", "logits", *load, "--tokens", "1,257")
        self.assert_error(1, "--tokens -1 is outside the vocabulary of 257", "logits", *load, "--tokens", "-1")
        self.assert_error(2, '--tokens "x" is not an integer', "logits", *load, "--tokens", "1,x")
        self.assert_error(2, "exactly one of --tokens and --prompt is needed", "logits", *load)
        self.assert_error(2, "--top 0 must be positive", "logits", *load, "--tokens", "1", "--top", "0")
        self.assert_error(1, "33 token ids are beyond the model's 32 positions", "logits", *load, "--tokens",
                          ",".join(["1"] * 33))
        path = os.path.join(self.folder, "no", "logits.safetensors")
        self.assert_error(1, "cannot create " + path + ": No such file or directory", "logits", *load, "--tokens", "1",
                          "--output", path)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
