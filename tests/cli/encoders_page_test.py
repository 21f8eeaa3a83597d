#!/usr/bin/env python3
"""The commands of docs/encoders.md, one after the other in one folder, as written but with tiny sizes: models, batches and runs.

Usage: encoders_page_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import pathlib
import random
import re
import shlex
import shutil

import support

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
SIZES = {"--num-layers": "2", "--encoder-num-layers": "1", "--decoder-num-layers": "1", "--hidden-size": "32", "--num-attention-heads": "4",
         "--seq-length": "24", "--decoder-seq-length": "20", "--max-position-embeddings": "24", "--micro-batch-size": "4",
         "--global-batch-size": "8", "--train-iters": "2"}
TRAINING = ["--eval-iters", "0", "--num-workers", "0", "--num-threads", "1", "--device", "cpu"]


def commands_of(block):
    return [shlex.split(line) for line in block.replace("\\\n", " ").strip().split("\n")]


class EncodersPageTest(support.FolderTest):
    def write(self, name, lines):
        pathlib.Path(self.path(name)).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def write_texts(self):
        """What the commands read, but models."""
        shutil.copy(GOLDEN / "masked" / "vocab.txt", self.path("vocab.txt"))
        words = [word for word in pathlib.Path(self.path("vocab.txt")).read_text(encoding="utf-8").split() if word.isalpha()]
        draw = random.Random(3)

        def text(count):
            return " ".join(draw.choice(words) for _ in range(count))

        self.write("text.jsonl", [json.dumps({"text": " ".join(text(6).capitalize() + "." for _ in range(8))}) for _ in range(40)])
        self.write("texts.txt", [text(5) for _ in range(3)])
        self.write("texts.jsonl", [json.dumps({"text": text(5)}) for _ in range(3)])
        for name in ("train.tsv", "dev.tsv"):
            self.write(name, ["sentence\tlabel"] + [f"{text(4)}\t{i % 3}" for i in range(12)])
        for name in ("train.jsonl", "dev.jsonl"):
            self.write("race-" + name, [json.dumps({"article": text(9), "questions": [text(3) + " _"], "options": [[text(1) for _ in range(4)]],
                                                    "answers": ["ABCD"[i % 4]]}) for i in range(8)])
            self.write("pairs-" + name, [json.dumps({"input": text(4), "target": text(2)}) for _ in range(8)])

    def make_t5(self):
        """A T5 of Hugging Face with a tokenizer of single letters."""
        shutil.copytree(GOLDEN / "encoders" / "t5_v1_1", self.path("their_t5"), ignore=shutil.ignore_patterns("golden*"))
        letters = ["<pad>", "</s>", "<unk>", "\u0120", *"abcdefghijklmnopqrstuvwxyz:.TEG"]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer = {"version": "1.0", "added_tokens": [{"id": i, "content": letters[i], **special} for i in range(3)], "normalizer": None,
                     "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
                     "model": {"type": "BPE", "unk_token": "<unk>", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}}
        pathlib.Path(self.path("their_t5"), "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        config = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
        pathlib.Path(self.path("their_t5"), "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    def use(self, block):
        """Lets the names of the page mean what its section says."""
        is_t5 = "seq2seq" in block or "task t5" in block
        theirs = "sentence" if "lora" in block else "modern_sentence"
        named = {"DIR": "t5" if is_t5 else "bert", "HF_FOLDER": "their_t5" if is_t5 else str(GOLDEN / "encoders" / theirs)}
        kind = "race-" if "multichoice" in block else "pairs-"
        named |= {name: kind + name for name in ("train.jsonl", "dev.jsonl")}
        for name, target in named.items():
            if os.path.lexists(self.path(name)):
                os.remove(self.path(name))
            os.symlink(target, self.path(name))
        for name in ("imported", "continued"):
            shutil.rmtree(self.path(name), ignore_errors=True)
        if "preprocess-data" in block:
            for path in pathlib.Path(self.folder).glob("*_text_sentence*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def run_command(self, words):
        self.assertEqual(words[0], "megatron")
        words = [SIZES.get(before, word) for before, word in zip(words, words[1:])]
        if words[0] in ("pretrain", "finetune"):
            words += TRAINING
        done = support.call(*words)
        self.assertEqual(done.returncode, 0, " ".join(words) + "\n" + done.stderr)
        return done.stdout

    def test_commands_run(self):
        self.write_texts()
        self.make_t5()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8"), re.S)
        self.assertEqual(len(blocks), 10)
        for block in blocks:
            self.use(block)
            for words in commands_of(block):
                out = self.run_command(words)
        self.assertIn("exact_match", out)
        self.assertTrue(os.path.exists("vectors.npy"))
        self.assertEqual(len(pathlib.Path("vectors.jsonl").read_text().splitlines()), 3)
        self.assertTrue(os.path.exists("adapter/adapter_config.json"))
        self.assertTrue(os.path.exists("exported/model.safetensors"))


if __name__ == "__main__":
    support.main()
