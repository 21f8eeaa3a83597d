"""evaluate of questions with images and sounds: answers are those of transformers, log-likelihoods of choices those of `megatron logits`.

Usage: evaluate_images_test.py MEGATRON [unittest arguments].
"""
import json
import math
import os
import struct
import subprocess

import support
from ports import free_port
from image_prompts_test import MEDIA, SOUNDS, families as all_families, write_model
from support import call, read_safetensors

TOLERANCE = 1e-4


def families():
    """qwen2_vl goes as qwen2_5_vl."""
    return [facts for facts in all_families() if facts["family"] != "qwen2_vl"]


def kind_of(facts):
    return facts.get("kind", "image")


def log_softmax(row, at):
    top = max(row)
    return row[at] - top - math.log(sum(math.exp(x - top) for x in row))


class EvaluateImagesTest(support.FolderTest):
    def rows(self, name, *rows):
        with open(self.path(name), "w") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        return self.path(name)

    def model(self, facts):
        self.media = SOUNDS if kind_of(facts) == "audio" else MEDIA
        folder = self.path(facts["family"])
        write_model(folder, facts)
        return folder

    def evaluate(self, model, *tasks, flags=()):
        out = self.output("evaluate", model, "--device", "cpu", "--num-threads", "1", "--dtype", "fp32", "--tasks", *tasks, "--json",
                          "--media-root", self.media, "--log-samples", self.path("samples.jsonl"), *flags)
        with open(self.path("samples.jsonl")) as file:
            return json.loads(out)["results"], [json.loads(line) for line in file]

    def test_answers_are_those_of_transformers(self):
        for facts in families():
            turn = facts["turns"][0]
            said = turn["said"].strip()
            asked = {kind_of(facts): turn["file"], "question": turn["text"]}
            message = {"role": "user", "content": [{"type": kind_of(facts), "path": turn["file"]}, {"type": "text", "text": turn["text"]}]}
            exact = self.rows("exact.jsonl", {**asked, "answer": said}, {**asked, "answers": ["another"]},
                              {"messages": [message], "answers": ["x", said]})
            anls = self.rows("anls.jsonl", {**asked, "answers": [said.upper()]})
            results, samples = self.evaluate(self.model(facts), f"exact={exact}", f"anls={anls}", flags=("--answer-tokens", "64"))
            self.assertEqual([sample["answer"].strip() for sample in samples], [said] * 4, facts["family"])
            self.assertEqual([sample["score"] for sample in samples], [1, 0, 1, 1])
            self.assertAlmostEqual(results[0]["exact_match"], 2 / 3)
            self.assertAlmostEqual(results[0]["exact_match_stderr"], 1 / 3)
            self.assertEqual((results[1]["anls"], results[1]["examples"]), (1, 1))

    def logprob(self, model, prompt, files, choice, kind="image"):
        media = [os.path.join(self.media, name) for name in files]
        self.output("logits", model, "--device", "cpu", "--dtype", "fp32", "--prompt", prompt + choice, f"--{kind}", *media, "--output",
                    self.path("l.safetensors"))
        tensors = read_safetensors(self.path("l.safetensors"))
        (count,), ids = tensors["tokens"]
        (rows, columns), logits = tensors["logits"]
        ids = struct.unpack(f"<{count}i", ids)
        logits = struct.unpack(f"<{rows * columns}f", logits)
        scored = len(choice)  # the tokenizers of these models have a token for each character
        return sum(log_softmax(logits[(i - 1) * columns:i * columns], ids[i]) for i in range(count - scored, count))

    def test_choices_are_scored_behind_the_images(self):
        for facts in families():
            if facts["family"] in ("llava", "internvl"):  # rows end with vectors of their own, images see both ways, or have positions
                continue
            model, turn = self.model(facts), facts["turns"][0]
            two = facts["texts"][1]
            kind = kind_of(facts)
            rows = [{kind + "s": two["files"], "question": turn["text"], "choices": ["rd", "xxz"], "answer": "rd"},
                    {kind: turn["file"], "question": turn["text"], "choices": ["ab", "ac"], "answer": 1},
                    {"question": "what is it?", "choices": ["ab", "ac"], "answer": "A"}]
            results, samples = self.evaluate(model, f"choices={self.rows('choices.jsonl', *rows)}")
            right = 0
            for row, sample in zip(rows, samples):
                files = row.get(kind + "s", [row[kind]] if kind in row else [])
                expected = [self.logprob(model, sample["prompt"], files, choice, kind) for choice in row["choices"]] if files else None
                own = [choice["logprob"] for choice in sample["choices"]]
                for value, other in zip(own, expected or own):
                    self.assertLess(abs(value - other), TOLERANCE * abs(other), (facts["family"], row))
                self.assertEqual(sample["chosen"], own.index(max(own)))
                right += sample["chosen"] == sample["gold"]
            self.assertAlmostEqual(results[0]["acc"], right / 3)
            self.assertIn("acc_norm", results[0])

    def test_ranks_share_choices(self):
        facts = next(one for one in families() if one["family"] == "qwen2_5_vl")
        model, turn = self.model(facts), facts["turns"][0]
        row = {"image": turn["file"], "question": turn["text"], "choices": ["ab", "ac"], "answer": 1}
        file = self.rows("choices.jsonl", row, {**row, "question": "what is it?"})
        _, alone = self.evaluate(model, f"choices={file}")
        for tensor_ranks in (1, 2):
            port = str(free_port())
            processes = [subprocess.Popen(
                [support.BINARY, "evaluate", model, "--device", "cpu", "--dtype", "fp32", "--tasks", f"choices={file}", "--media-root", MEDIA,
                 "--log-samples", self.path("ranks.jsonl"), "--tensor-model-parallel-size", str(tensor_ranks)],
                env=dict(os.environ, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                         RANK=str(rank), LOCAL_RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
            for process in processes:
                _, error = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, error)
            with open(self.path("ranks.jsonl")) as lines:
                for line, other in zip(lines, alone, strict=True):
                    for one, two in zip(json.loads(line)["choices"], other["choices"], strict=True):
                        self.assertLess(abs(one["logprob"] - two["logprob"]), TOLERANCE * abs(two["logprob"]))

    def test_formats(self):
        facts = families()[0]
        model, turn = self.model(facts), facts["turns"][0]
        row = {"image": turn["file"], "question": "what?", "choices": ["ab", "ac"], "answer": 0}
        file = self.rows("choices.jsonl", row)
        _, samples = self.evaluate(model, f"choices={file}", flags=("--plain-prompts", "--question-format", "{question} so:"))
        placeholder = facts["texts"][0]["text"].split("\n")[0]
        self.assertEqual(samples[0]["prompt"], placeholder + "what? so:")
        # A blank between prompt and choice.
        expected = self.logprob(model, samples[0]["prompt"], [turn["file"]], " ab")
        self.assertLess(abs(samples[0]["choices"][0]["logprob"] - expected), TOLERANCE * abs(expected))
        # With a format of one's own in front of a template, and the table.
        out = self.output("evaluate", model, "--device", "cpu", "--tasks", f"vqa={self.rows('v.jsonl', {**row, 'answer': 'a'})}", "--media-root",
                          MEDIA, "--question-format", "{question}\nbriefly.", "--answer-tokens", "2")
        self.assertRegex(out, r"vqa +v.jsonl +1 +vqa_acc +0.0000")

    def test_what_is_wrong_is_named(self):
        facts = families()[0]
        model = self.model(facts)
        run = ["evaluate", model, "--device", "cpu", "--media-root", MEDIA, "--tasks"]
        good = {"image": facts["turns"][0]["file"], "question": "what?", "answer": "a"}
        file = self.rows("q.jsonl", good)
        self.assert_error(1, f"{file}: line 1: the path ../x.png leaves the folder of media {MEDIA}", *run, "vqa=" + self.rows("q.jsonl", {**good, "image": "../x.png"}))
        self.rows("q.jsonl", {**good, "question": "a <image>"})
        self.assert_error(1, f"{file}: line 1: message 1, byte 2: the text holds <image>, which the tokenizer takes for a token of its own",
                          *run, f"vqa={file}")
        self.rows("q.jsonl", {**good, "question": "a" * 600})
        result = call(*run, f"vqa={file}")
        self.assertRegex(result.stderr, r"error: .*: line 1 has 6\d\d tokens, 9 of them of 1 image, beyond the model's context of 512")
        self.rows("q.jsonl", {"messages": [{"role": "user", "content": "a"}], "answer": "a"})
        self.assert_error(1, f"{file}: line 1: has messages, which need a chat template", *run, f"vqa={file}", "--plain-prompts")
        self.assert_error(2, "--question-format without {question}", *run, f"vqa={file}", "--question-format", "what?")
        self.assert_error(2, "--answer-tokens is 0", *run, f"vqa={file}", "--answer-tokens", "0")
        text = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "evaluate", "model")
        self.assert_error(1, f"{text}: a model of type GPT reads no images", "evaluate", text, "--device", "cpu", "--tasks", f"vqa={file}")
        self.rows("q.jsonl", {"question": "what?", "answer": "a"}, {"audio": "odd.wav", "question": "what?", "answer": "a"})
        self.assert_error(1, f"{model}: a model of type MIMO without an encoder of them reads no sounds", "evaluate", model, "--device", "cpu",
                          "--media-root", SOUNDS, "--tasks", f"vqa={file}")


if __name__ == "__main__":
    support.main()
