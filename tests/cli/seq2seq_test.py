#!/usr/bin/env python3
"""`megatron finetune --task seq2seq` and `megatron seq2seq`: from a T5 of Hugging Face to texts and their metrics; ranks; what is refused.

Usage: seq2seq_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import pathlib

import parallel_test as ranks
import support
from serving import Ranks, Server

CPU = ["--device", "cpu", "--num-threads", "1"]
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden" / "encoders"
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "40", "--null-tokenizer-eod-id", "1", "--null-tokenizer-pad-id", "0"]
RUN = ["finetune", "--task", "seq2seq", "--load", str(GOLDEN / "t5_v1_0"), *TOKENIZER, "--seq-length", "8", "--decoder-seq-length", "4",
       "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "60", "--lr", "2e-2", "--hidden-dropout", "0",
       "--attention-dropout", "0", "--eval-iters", "0", "--log-interval", "1", "--num-workers", "0", "--num-threads", "1", "--device", "cpu"]
# The last two tokens in reverse
PAIRS = [{"input": f"{a} {b} {c}", "target": f"{c} {b}"} for a, b, c in ((2, 3, 4), (5, 6, 7), (8, 9, 10), (11, 12, 13), (14, 15, 16), (17, 18, 19),
                                                                       (20, 21, 22), (23, 24, 25))]


class Seq2seqTest(support.FolderTest):
    def write(self, name, rows):
        path = self.path(name)
        pathlib.Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def answers(self, model, rows, *flags):
        return json.loads(self.output("seq2seq", model, "--input", rows, "--device", "cpu", *flags))

    def test_targets_are_learned(self):
        rows, saved, samples = self.write("train.jsonl", PAIRS), self.path("saved"), self.path("samples.jsonl")
        log = self.output(*RUN, "--train-data-path", rows, "--valid-data-path", rows, "--eval-iters", "1", "--save", saved)
        self.assertRegex(log, r"lm loss: \S+ \|.* token accuracy: \S+ \|")
        metrics = self.answers(saved, rows, "--log-samples", samples)
        logged = [json.loads(line) for line in pathlib.Path(samples).read_text().splitlines()]
        self.assertEqual([row["target"] for row in logged], [pair["target"] for pair in PAIRS])
        hits = sum(row["prediction"].strip() == row["target"] for row in logged)
        self.assertEqual(metrics["texts"], len(PAIRS))
        self.assertAlmostEqual(metrics["exact_match"], hits / len(PAIRS))
        self.assertGreater(metrics["exact_match"], 0.9)
        for name in ("token_f1", "rouge1", "rouge2", "rougeL"):
            self.assertGreaterEqual(metrics[name], metrics["exact_match"])
        # Greedy texts are the targets if every token is, given those before it.
        record = [json.loads(line) for line in pathlib.Path(saved, "metrics.jsonl").read_text().splitlines()]
        accuracy = [line["token accuracy"] for line in record if line["type"] == "evaluation"][-1]
        self.assertEqual(accuracy == 1, metrics["exact_match"] == 1)
        unanswered = self.write("test.jsonl", [{"input": pair["input"]} for pair in PAIRS])
        self.assertEqual(self.answers(saved, unanswered), {"texts": len(PAIRS)})
        self.served_texts_are_those(saved, [row["prediction"] for row in logged])
        # Longer inputs lose their end, as in training.
        self.assertEqual(self.answers(saved, self.write("long.jsonl", [{"input": "2 " * 20}])), {"texts": 1})

    def served_texts_are_those(self, model, predictions):
        flags = ["--inference-max-requests", "4"]
        for start in (lambda: Server(model, *flags, exact=CPU), lambda: Ranks(2, model, *flags, "--pipeline-model-parallel-size", "2")):
            server = start()
            self.addCleanup(server.close)
            body = {"prompt": [pair["input"] for pair in PAIRS], "max_tokens": 4, "temperature": 0}
            answer = server.ok("/v1/completions", body)
            self.assertEqual([choice["text"].strip() for choice in answer["choices"]], [text.strip() for text in predictions])
            self.assertEqual(answer["usage"]["prompt_tokens"], len(PAIRS) * 4)
            for members, message in (({"echo": True}, "the model's encoder reads the prompts, which its texts do not continue"),
                                     ({"prompt": "2 " * 20}, "the prompt has 21 tokens, the encoder reads 8")):
                status, error = server.ask("/v1/completions", {**body, **members})
                self.assertEqual((status, error["error"]["message"]), (400, message))
            server.stop()

    def test_layouts_train_alike(self):
        rows = self.write("train.jsonl", PAIRS)
        losses = {}
        for name, count, flags in (("one", 1, []), ("tp2", 2, ["--tensor-model-parallel-size", "2"]), ("dp2", 2, []),
                                   ("pp2", 2, ["--pipeline-model-parallel-size", "2"])):
            saved = self.path(name)
            ranks.BINARY = support.BINARY
            codes, out, error = ranks.finish(ranks.start(count, [*RUN, "--train-data-path", rows, "--train-iters", "3", "--save", saved, *flags]))
            self.assertEqual(set(codes), {0}, error + out)
            losses[name] = [ranks.records(saved)[i]["lm loss"] for i in (1, 2, 3)]
        for name, values in losses.items():
            for value, expected in zip(values, losses["one"]):
                self.assertAlmostEqual(value, expected, delta=1e-4 * expected, msg=name)

    def test_what_is_refused(self):
        rows = self.write("train.jsonl", [PAIRS[0], {"input": "2"}])
        self.assert_error(1, f"{rows}:2: no \"target\" to train on", *RUN, "--train-data-path", rows)
        rows = self.write("train.jsonl", [PAIRS[0], {"source": "2"}])
        self.assert_error(1, f"{rows}:2: nothing under \"input\"", *RUN, "--train-data-path", rows)
        mixed = self.write("mixed.jsonl", [PAIRS[0], {"input": "2"}])
        self.assert_error(1, f"{mixed}:2: has no \"target\", unlike the lines before it", "seq2seq", str(GOLDEN / "sentence"), "--input", mixed)
        rows = self.write("rows.jsonl", PAIRS)
        self.assert_error(1, "the model is of type bert, which writes no texts for others; this needs an encoder-decoder", "seq2seq",
                          str(GOLDEN / "sentence"), "--input", rows, "--device", "cpu")


if __name__ == "__main__":
    support.main()
