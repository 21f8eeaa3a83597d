"""Prompts with images and sounds of a model that reads both: generate, chat, logits, evaluate and serve say the same of them (their numbers are
compared with PyTorch in tests/unit/models/mixed_prompts_test.cc), and what is missing or too many is named."""
import json
import os
import shutil

import support
from image_prompts_test import media
from media_model import write_media_model
from mimo_test import IMAGES, MODEL, RUN
from serve_media_test import part, user
from serving import Ranks, Server

EXACT = ["--device", "cpu", "--dtype", "fp32", "--num-threads", "1"]
TEMPLATE = ("{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
            "{% elif c['type'] == 'audio' %}<|AUDIO|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}; {% endfor %}")
NAMES = [IMAGES[0], IMAGES[1], "odd.wav", "short.wav"]
IMAGE, OTHER_IMAGE, SOUND, OTHER_SOUND = media(*NAMES)


class MixedPromptsTest(support.FolderTest):
    @classmethod
    def setUpClass(cls):
        cls.made = support.FolderTest()
        cls.made.setUp()
        path = cls.made.path
        write_media_model(path("llava"), "llava")
        write_media_model(path("audio"), "qwen2_audio")
        for file in media(*NAMES):
            shutil.copy(file, cls.made.folder)
        with open(path("chat.jinja"), "w") as file:
            file.write(TEMPLATE)
        with open(path("rows.jsonl"), "w") as file:
            file.write(4 * (json.dumps({"image": NAMES[0], "audio": NAMES[2], "caption": "xyz"}) + "\n"))
        sounds = ("--audio-model-type whisper --audio-num-layers 1 --audio-hidden-size 16 --audio-ffn-hidden-size 24 --audio-num-attention-heads 2 "
                  "--audio-token-id 272 --seq-length 128 --init-method-std 0.3 --train-iters 1").split()
        cls.folders = ["--media-model", path("llava"), "--audio-media-model", path("audio")]
        cls.made.run_ok("pretrain", *RUN, *MODEL, *sounds, *cls.folders, "--data-path", path("rows.jsonl"), "--media-root", cls.made.folder, "--chat-template",
                        path("chat.jinja"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path("llava"), "--save", path("model"))
        cls.model, cls.template = path("model"), ["--chat-template", path("chat.jinja")]

    @classmethod
    def tearDownClass(cls):
        cls.made.doCleanups()

    def generate(self, *flags, text=""):
        command = ["generate", self.model, "--greedy", "--tokens-to-generate", "12", "--json", *EXACT, *self.folders, *flags]
        done = support.subprocess.run([support.BINARY, *command], input=text, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def conversation(self):
        """Two turns, each with both media, and what generate answers to them."""
        said = f"/audio {SOUND}\n/image {IMAGE}\nab?\n/image {OTHER_IMAGE}\n/audio {OTHER_SOUND}\ncd?\n"
        return self.generate("--chat", *self.template, text=said)

    def test_commands_say_the_same(self):
        text = ["--prompt", "a <|AUDIO|> b <image>"]
        told = self.generate(*text, "--image", IMAGE, "--audio", SOUND)[0]["tokens"]
        self.assertNotEqual(told, self.generate(*text, "--image", IMAGE, "--audio", OTHER_SOUND)[0]["tokens"])
        self.assertNotEqual(told, self.generate(*text, "--image", OTHER_IMAGE, "--audio", SOUND)[0]["tokens"])
        top = json.loads(self.output("logits", self.model, *text, "--image", IMAGE, "--audio", SOUND, *self.folders, *EXACT[:4], "--json", "--top", "1"))
        self.assertEqual(top[0]["id"], told[0])
        # Without placeholders: images, then sounds; in a file in its order of keys, in one batch with a text alone.
        with open(self.path("rows.jsonl"), "w") as file:
            for row in ({"prompt": "a <|AUDIO|> b <image>", "image": NAMES[0], "audio": NAMES[2]}, {"prompt": "a text"},
                        {"prompt": "<image><|AUDIO|>ab", "image": NAMES[0], "audio": NAMES[2]}):
                file.write(json.dumps(row) + "\n")
        rows = self.generate("--prompts-file", self.path("rows.jsonl"), "--media-root", self.made.folder)
        self.assertEqual(rows[0]["tokens"], told)
        self.assertEqual(rows[2]["tokens"], self.generate("--prompt", "ab", "--image", IMAGE, "--audio", SOUND)[0]["tokens"])

    def served(self, server, answers):
        first = user("ab?", part(SOUND, "audio"), part(IMAGE))
        second = user("cd?", part(OTHER_IMAGE), part(OTHER_SOUND, "audio"))
        for messages, answer in (([first], answers[0]), ([first, answers[0]["messages"][-1], second], answers[1])):
            reply = server.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True})
            choice = reply["choices"][0]
            self.assertEqual(choice["prompt_token_ids"], answer["prompt_tokens"])
            self.assertEqual(choice["token_ids"][:len(answer["tokens"])], answer["tokens"])

    def test_turns_of_servers_are_those_of_generate(self):
        answers = self.conversation()
        ids = answers[1]["prompt_tokens"]
        self.assertEqual((ids.count(260) > 4, ids.count(272) > 1), (True, True))
        with open(self.path("rows.jsonl"), "w") as file:
            first = [{"type": "audio", "path": NAMES[2]}, {"type": "image", "path": NAMES[0]}, {"type": "text", "text": "ab?"}]
            file.write(json.dumps({"messages": [{"role": "user", "content": first}]}) + "\n")
        alone = self.generate("--chat", *self.template, "--prompts-file", self.path("rows.jsonl"), "--media-root", self.made.folder)
        self.assertEqual(alone[0]["tokens"], answers[0]["tokens"])
        cache = ["--inference-dynamic-batching-buffer-size-gb", "0.001"]
        server = Server(self.model, *self.folders, *self.template, *cache, "--inference-dynamic-batching-max-tokens", "16",
                        "--inference-max-requests", "4", exact=EXACT)
        self.addCleanup(server.close)
        self.served(server, answers)
        self.served(server, answers)
        self.assertEqual(server.stop(), 0)
        ranks = Ranks(2, "--tensor-model-parallel-size", "2", self.model, *self.folders, *self.template, *cache, "--dtype", "fp32")
        self.addCleanup(ranks.close)
        self.served(ranks, answers)
        self.assertEqual(ranks.stop()[0], 0)

    def test_questions_with_both(self):
        with open(self.path("questions.jsonl"), "w") as file:
            for sound in NAMES[2:]:
                file.write(json.dumps({"image": NAMES[0], "audio": sound, "question": "ab?", "choices": ["x", "y"], "answer": "x"}) + "\n")
        self.output("evaluate", self.model, "--tasks", "choices=" + self.path("questions.jsonl"), "--media-root", self.made.folder, *self.folders, *self.template,
                    "--log-samples", self.path("samples.jsonl"), *EXACT[:4])
        with open(self.path("samples.jsonl")) as file:
            first, second = (json.loads(line)["choices"][0]["logprob"] for line in file)
        self.assertNotEqual(first, second)
        # That of the logits behind the prompt.
        prompt = "user: <image><|AUDIO|>ab?; "
        likely = json.loads(self.output("logits", self.model, "--prompt", prompt, "--image", IMAGE, "--audio", SOUND, *self.folders, *EXACT[:4], "--json",
                                        "--top", "270"))
        self.assertAlmostEqual(first, next(row["logprob"] for row in likely if row["token"] == "x"), places=5)

    def test_what_is_wrong_is_named(self):
        run = ["generate", self.model, "--device", "cpu"]
        both = ["--image", IMAGE, "--audio", SOUND]
        hint = "prompt 1: the text has <image> {} for {} and <|AUDIO|> {} for {}"
        for text, flags, counts in (("<image>", both, ("1 time", "1 image", "0 times", "1 sound")),
                                    ("<image> <|AUDIO|>", ["--audio", SOUND], ("1 time", "0 images", "1 time", "1 sound")),
                                    ("<|AUDIO|>", [*both, OTHER_SOUND], ("0 times", "1 image", "1 time", "2 sounds"))):
            self.assert_error(1, hint.format(*counts), *run, *self.folders, "--prompt", text, *flags)
        for flags, missing in ((self.folders[:2], "--audio-media-model"), (self.folders[2:], "--media-model"), ([], "--media-model")):
            result = support.call(*run, *flags, "--prompt", "a", *both)
            self.assertEqual((result.returncode, f": reads images and sounds, and {missing} is not given" in result.stderr), (1, True), result.stderr)
        llava, audio = self.folders[1::2]
        self.assert_error(1, f"{audio}: its model reads sounds, expected one that reads images beside {llava}", *run, "--media-model", audio,
                          "--audio-media-model", llava, "--prompt", "a", *both)
        result = support.call(*run, "--audio-media-model", audio, "--prompt", "a")
        self.assertEqual((result.returncode, "--audio-media-model has no effect without images or sounds" in result.stderr), (2, True))
        result = support.call(*run, *self.folders, "--prompt", 110 * "a", *both)
        self.assertRegex(result.stderr, r"prompt 1 has \d+ tokens, \d+ of them of 1 image and 1 sound; with 64 to generate that is beyond")


if __name__ == "__main__":
    support.main()
