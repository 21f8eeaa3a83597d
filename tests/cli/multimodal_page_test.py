#!/usr/bin/env python3
"""The commands of docs/multimodal.md, and those of docs/evaluating.md that ask questions with images, as written but for the length of
training: on a tiny model and pictures of the goldens. What the page cuts with `...` is filled with the flags of the line before.

Usage: multimodal_page_test.py MEGATRON [unittest arguments].
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import wave

import support
from image_prompts_test import MEDIA, families, write_model

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def blocks(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [block.replace("\\\n", " ") for block in re.findall(r"^```\n(megatron .*?)^```", text, re.S | re.M)]


class MultimodalPageTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        self.model("MODEL", "llava")
        shutil.copytree(MEDIA, self.path("images"))
        for name, copy in (("1_img1.jpg", "a.jpg"), ("0_img1.png", "b.png"), ("1_img1.jpg", "b.jpg")):
            shutil.copy(os.path.join(MEDIA, name), self.path(copy))
        os.symlink(os.path.abspath(support.BINARY), self.path("megatron"))
        with wave.open(self.path("a.wav"), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(bytes(range(250)) * 128)
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a cat."}]
        self.write("rows.json", json.dumps([{"image": "1_img1.jpg", "conversations": turns}] * 8))
        message = {"role": "user", "content": [{"type": "image", "path": "1_img1.jpg"}, {"type": "text", "text": "what is it?"}]}
        self.write("conversations.jsonl", json.dumps({"messages": [message]}) + "\n")
        asked = {"image": "1_img1.jpg", "question": "what is it?", "answers": ["a cat"]}
        for name in ("questions", "documents", "charts"):
            self.write(name + ".jsonl", json.dumps(asked) + "\n")
        self.write("choices.jsonl", json.dumps({**asked, "choices": ["cat", "dog"], "answers": None, "answer": 0}) + "\n")

    def model(self, name, family):
        write_model(self.path(name), next(row for row in families() if row["family"] == family))

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)

    def shell(self, command):
        # Its tokenizer has small letters only.
        command = re.sub(r"(['\"])(.*?)\1", lambda found: found.group(0).lower(), command)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
                              cwd=self.folder, env=dict(os.environ, PATH=self.folder + ":" + os.environ["PATH"], OMP_NUM_THREADS="1"), check=False)
        self.assertEqual(done.returncode, 0, command + "\n" + done.stdout + done.stderr)
        return done.stdout + done.stderr

    def commands(self, page, start):
        return [line for block in blocks(page) for line in block.split("\n") if line.startswith("megatron " + start)]

    def test_data(self):
        seen = self.commands("multimodal.md", "inspect-dataset")
        self.assertEqual(len(seen), 2)
        self.assertIn("8", self.shell(seen[0]))
        self.assertIn("[image 16x8 -> ", self.shell(seen[1]))
        self.assertTrue(any(name.endswith(".png") for name in os.listdir(self.path("seen"))))

    def test_stages(self):
        first, second = (re.sub(r"#.*", "", line) for line in self.commands("multimodal.md", "finetune") if "stage1" in line)
        short = {"--train-iters 2000": "--train-iters 2", "--seq-length 2048": "--seq-length 64"}
        for flag, value in short.items():
            self.assertIn(flag, first)
            first = first.replace(flag, value)
        self.shell(first + " --device cpu --eval-iters 0 --split 100,0,0")
        same = re.search(r"--media-model .*?--seq-length 64", first).group(0)
        self.shell(second.replace("...", f"{same} --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --bf16 --device cpu --eval-iters 0 "
                                         "--split 100,0,0 --finetune"))
        self.assertTrue(os.path.isdir(self.path("stage2")))

    def test_asking(self):
        asked = self.commands("multimodal.md", "generate") + self.commands("multimodal.md", "logits")
        self.assertEqual(len(asked), 7)
        self.model("HEARS", "qwen2_audio")
        for command in asked:
            self.shell(command.replace("MODEL", "HEARS") if "--audio" in command else command)
        out = self.shell(self.commands("evaluating.md", "evaluate")[0])
        self.assertRegex(out, r"choices +choices.jsonl +1 +acc ")
        self.assertRegex(out, r"vqa +questions.jsonl +1 +vqa_acc ")


if __name__ == "__main__":
    support.main()
