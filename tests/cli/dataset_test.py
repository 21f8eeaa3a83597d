"""A data set knows its tokenizer: from preprocess-data to a run that has another one."""
import json
import os
import unittest

import support
from support import call

KINDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "tokenizers")
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
OTHER = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", os.path.join(KINDS, "llama3.json")]
MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16", "--max-position-embeddings", "16",
         "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--eval-iters", "0", "--split", "1,0,0",
         "--device", "cpu", "--num-threads", "1"]


class DatasetTest(support.FolderTest):
    def preprocess(self, name, tokenizer):
        source = self.path(name + ".txt")
        with open(source, "w") as file:
            file.write("a text of some length, from which a few samples are cut\n" * 20)
        self.run_ok("preprocess-data", "--input", source, "--output-prefix", self.path(name), "--append-eod", *tokenizer)
        return self.path(name + "_text_document")

    def test_another_tokenizer_stops_a_run(self):
        data = self.preprocess("a", BYTES)
        with open(data + ".json") as file:
            self.assertEqual(json.load(file)["tokenizer"]["name"], "ByteLevelTokenizer")
        self.run_ok("pretrain", *MODEL, *BYTES, "--data-path", data)
        refused = call("pretrain", *MODEL, *OTHER, "--data-path", data)
        self.assertEqual(refused.returncode, 1)
        self.assertIn(data + ": was written with another tokenizer: ByteLevelTokenizer (257 ids, ", refused.stderr)
        self.assertIn("this run has HuggingFaceTokenizer of " + OTHER[-1], refused.stderr)
        os.remove(data + ".json")
        noted = self.run_ok("pretrain", *MODEL, *OTHER, "--data-path", data)
        self.assertIn("does not say which tokenizer wrote the tokens (there is no a_text_document.json)", noted.stderr)

    def test_merging_and_inspecting(self):
        a, b = self.preprocess("a", BYTES), self.preprocess("b", OTHER)
        refused = call("merge-datasets", a, b, "--output-prefix", self.path("merged"))
        self.assertEqual(refused.returncode, 1)
        self.assertIn(b + ": was written with HuggingFaceTokenizer of ", refused.stderr)
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("merged")], [])
        self.run_ok("merge-datasets", a, a, "--output-prefix", self.path("merged"))
        again = call("merge-datasets", a, a, "--output-prefix", self.path("merged"))
        self.assertIn("merged.bin: exists already\nhint: give another --output-prefix, or --overwrite", again.stderr)
        self.run_ok("merge-datasets", a, a, "--output-prefix", self.path("merged"), "--overwrite")
        self.assertIn("ByteLevelTokenizer, 257 ids", self.output("inspect-dataset", self.path("merged")))
        described = json.loads(self.output("inspect-dataset", self.path("merged"), "--json", *BYTES))["datasets"][0]["description"]
        self.assertEqual(described["sources"], [a, a])
        refused = call("inspect-dataset", self.path("merged"), *OTHER)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("was written with another tokenizer", refused.stderr)


class SentencesTest(support.FolderTest):
    def test_sentences_become_sequences(self):
        source = self.path("a.txt")
        with open(source, "w") as file:
            file.write("See cf. page nine. He sat down.")
        common = ["preprocess-data", "--input", source, "--output-prefix", self.path("a"), *BYTES]
        missing = call(*common, "--split-sentences", "--lang", "klingon")
        self.assertIn("there is no tokenizers/punkt_tab/klingon in", missing.stderr)
        self.assertIn("no effect without --split-sentences", call(*common, "--keep-newlines").stderr)
        punkt = os.path.join(KINDS, "..", "punkt", "english")
        for params, count in (("none", 3), (punkt, 2)):
            self.run_ok(*common, "--split-sentences", "--punkt-params", params, "--overwrite")
            described = json.loads(self.output("inspect-dataset", self.path("a_text_sentence"), "--json"))["datasets"][0]
            self.assertEqual((described["num_documents"], described["num_sequences"]), (1, count))


class MaskedSampleTest(support.FolderTest):
    def test_samples_of_bert_and_t5_are_printed(self):
        golden = os.path.join(KINDS, "..", "masked")
        for task, kind, flags in (("bert", "BertWordPieceLowerCase", []), ("t5", "BertWordPieceCase", ["--decoder-seq-length", "64"])):
            with open(os.path.join(golden, task + ".json")) as file:
                case = json.load(file)[0]
            tokenizer = ["--tokenizer-type", kind, "--vocab-file", os.path.join(golden, "vocab.txt")]
            common = [os.path.join(golden, "a"), "--sample", "0", "--task", task, "--seq-length", str(case["seq_length"]), "--split",
                      case["split"], "--num-samples", str(case["samples"][0]), "--data-cache-path", self.path("cache")]
            sample = json.loads(self.output("inspect-dataset", *common, *tokenizer, *flags, "--json"))["sample"]
            for key, values in case["splits"]["train"]["ends"]["0"].items():
                self.assertEqual([int(v) for v in sample[key]], values, key)
            self.assertIn("loss_mask 0 1" if task == "bert" else "loss_mask 1 1",
                          self.output("inspect-dataset", *common, *tokenizer, *flags))
            refused = call("inspect-dataset", *common, *flags)
            self.assertIn("--task bert and t5 need a tokenizer", refused.stderr)


if __name__ == "__main__":
    support.main()
