#!/usr/bin/env python3
"""`megatron finetune --task multichoice` and `megatron classify`: from a bare model of Hugging Face to answers and their accuracy; what is refused.

Usage: multichoice_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import itertools
import json
import pathlib

import support

SENTENCE = str(pathlib.Path(__file__).resolve().parent.parent / "golden" / "encoders" / "sentence")
RUN = ["finetune", "--task", "multichoice", "--load", SENTENCE, "--seq-length", "16", "--micro-batch-size", "6", "--global-batch-size", "12",
       "--bert-choices", "3", "--train-iters", "40", "--lr", "1e-2", "--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0",
       "--log-interval", "1", "--num-workers", "0", "--num-threads", "1", "--device", "cpu"]


class MultichoiceTest(support.FolderTest):
    def write(self, name, articles):
        path = self.path(name)
        pathlib.Path(path).write_text("".join(json.dumps(article) + "\n" for article in articles), encoding="utf-8")
        return path

    def test_answers_are_learned(self):
        # The answer is the animal, wherever it stands.
        articles = []
        for animal, order in itertools.product(("cat", "dog"), itertools.permutations((0, 1, 2))):
            options = [(animal, "mat", "small")[i] for i in order]
            articles.append({"article": "the small cat sat", "questions": ["a _ ran", "the"], "options": [options, options],
                             "answers": ["ABC"[order.index(0)]] * 2})
        rows, saved = self.write("train.jsonl", articles), self.path("saved")
        log = self.output(*RUN, "--train-data-path", rows, "--save", saved)
        self.assertRegex(log, r"multiple-choice loss: \S+ \|.* accuracy: \S+ \|")
        samples = self.path("samples.jsonl")
        metrics = json.loads(self.output("classify", saved, "--input", rows, "--log-samples", samples, "--device", "cpu"))
        self.assertEqual(metrics["questions"], 24)
        self.assertGreater(metrics["accuracy"], 0.9)
        logged = [json.loads(line) for line in pathlib.Path(samples).read_text().splitlines()]
        self.assertEqual(["ABC"[int(row["label"])] for row in logged], [answer for article in articles for answer in article["answers"]])
        hits = sum(row["logits"][int(row["label"])] == max(row["logits"]) for row in logged)
        self.assertAlmostEqual(hits / 24, metrics["accuracy"])
        unanswered = [{key: value for key, value in article.items() if key != "answers"} for article in articles]
        self.assertEqual(json.loads(self.output("classify", saved, "--input", self.write("test.jsonl", unanswered), "--device", "cpu")),
                         {"questions": 24})

    def test_what_is_refused(self):
        article = {"article": "a cat", "questions": ["a _ ran"], "options": [["cat", "dog"]], "answers": ["A"]}
        rows = self.write("train.jsonl", [article])
        self.assert_error(1, f"{rows}:1: question 1 has 2 choices, --bert-choices is 3", *RUN, "--train-data-path", rows)
        del article["answers"]
        article["options"] = [["cat", "dog", "mat"]]
        rows = self.write("test.jsonl", [article])
        self.assert_error(1, f"{rows}: question 1 has no answer to train on", *RUN, "--train-data-path", rows)
        self.assert_error(2, "--micro-batch-size 4 is no multiple of --bert-choices 3", *RUN, "--micro-batch-size", "4", "--train-data-path", rows)


if __name__ == "__main__":
    support.main()
