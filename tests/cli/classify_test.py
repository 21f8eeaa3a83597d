#!/usr/bin/env python3
"""`megatron finetune --task classify` and `megatron classify`: from a bare model of Hugging Face to classes, metrics, a number; what is refused.

Usage: classify_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import pathlib
import struct

import support

SENTENCE = str(pathlib.Path(__file__).resolve().parent.parent / "golden" / "encoders" / "sentence")
MODERN = SENTENCE.replace("sentence", "modern_sentence")
RUN = ["finetune", "--task", "classify", "--load", SENTENCE, "--seq-length", "16", "--micro-batch-size", "8", "--global-batch-size", "16",
       "--train-iters", "60", "--lr", "1e-2", "--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0", "--num-workers", "0",
       "--num-threads", "1", "--device", "cpu"]


def tensors_of(folder, file="model.safetensors"):
    """Bytes of the tensors of a folder's safetensors file."""
    data = pathlib.Path(folder, file).read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    return {name: data[begin + t["data_offsets"][0]:begin + t["data_offsets"][1]] for name, t in header.items() if name != "__metadata__"}


class ClassifyTest(support.FolderTest):
    def write(self, name, lines):
        path = self.path(name)
        pathlib.Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def test_classes_are_learned(self):
        # The class is that of the second text's animal, the number that of the first text's word.
        words = ["cat", "dog", "mat", "small"]
        pairs = [(f"the {a} ran", f"a {b} sat", int(b in ("cat", "dog"))) for a in words for b in words]
        rows = self.write("train.tsv", ["index\tsentence1\tsentence2\tlabel"] +
                          [f"{i}\t{a}\t{b}\t{['other', 'animal'][label]}" for i, (a, b, label) in enumerate(pairs * 2)])
        labels = ["--labels", "other", "animal"]
        saved = self.path("saved")
        self.output(*RUN, "--bert-classes", "2", *labels, "--train-data-path", rows, "--save", saved)
        samples = self.path("samples.jsonl")
        metrics = json.loads(self.output("classify", saved, "--input", rows, *labels, "--log-samples", samples, "--device", "cpu"))
        written = self.path("written")
        self.output("convert-checkpoint", "--load", saved, "--save", written)
        config = json.loads(pathlib.Path(written, "config.json").read_text())
        self.assertEqual(config["architectures"], ["BertForSequenceClassification"])
        self.assertIn("classifier.weight", tensors_of(written))
        self.assertEqual(json.loads(self.output("classify", written, "--input", rows, *labels, "--device", "cpu")), metrics)
        self.assertEqual(metrics["texts"], 32)
        self.assertGreater(metrics["accuracy"], 0.9)
        logged = [json.loads(line) for line in pathlib.Path(samples).read_text().splitlines()]
        self.assertEqual([row["label"] for row in logged], [label for _, _, label in pairs * 2])
        hits = sum(row["prediction"] == row["label"] == (row["logits"][1] > row["logits"][0]) for row in logged)
        self.assertAlmostEqual(hits / 32, metrics["accuracy"])
        numbers = self.write("numbers.jsonl", [json.dumps({"text": a, "label": i // 4}) for i, (a, _, _) in enumerate(pairs)])
        self.output(*RUN, "--bert-classes", "1", "--train-data-path", numbers, "--save", self.path("number"))
        metrics = json.loads(self.output("classify", self.path("number"), "--input", numbers, "--device", "cpu"))
        self.assertGreater(metrics["spearman"], 0.8)

    def test_adapters_and_the_head_beside_them(self):
        words = ["cat", "dog", "mat", "small"]
        rows = self.write("train.tsv", ["sentence1\tsentence2\tlabel"] +
                          [f"the {a} ran\ta {b} sat\t{int(b in ('cat', 'dog'))}" for a in words for b in words])
        run = [*RUN, "--bert-classes", "2", "--train-data-path", rows]
        saved, peft, whole = self.path("saved"), self.path("peft"), self.path("whole")
        self.output(*run, "--lora-rank", "4", "--lora-targets", "query", "value", "--save", saved)
        classify = lambda folder: json.loads(self.output("classify", folder, "--input", rows, "--device", "cpu"))
        metrics = classify(saved)
        self.assertGreater(metrics["accuracy"], 0.9)
        self.output("convert-checkpoint", "--load", saved, "--save", peft)
        config = json.loads(pathlib.Path(peft, "adapter_config.json").read_text())
        self.assertEqual((config["task_type"], config["modules_to_save"], config["target_modules"]),
                         ("SEQ_CLS", ["classifier", "pooler"], ["query", "value"]))
        stored = tensors_of(peft, "adapter_model.safetensors")
        self.assertIn("base_model.model.classifier.weight", stored)
        # The base has no head; the file's is the model's.
        self.output("convert-checkpoint", "--load", SENTENCE, "--adapter", peft, "--save", whole)
        self.assertEqual(classify(whole), metrics)
        self.output("convert-checkpoint", "--load", whole, "--save", self.path("merged"), "--merge-adapter")
        self.assertAlmostEqual(classify(self.path("merged"))["accuracy"], metrics["accuracy"], delta=0.1)
        # Nothing is learned at a learning rate of 0, neither by adapters nor by the head.
        on, again = [arg.replace("1e-2", "0") for arg in RUN], self.path("again")
        self.output(*on, "--adapter", peft, "--train-data-path", rows, "--no-save-frozen", "--pretrained-checkpoint", SENTENCE, "--save", again)
        self.output("convert-checkpoint", "--load", again, "--save", self.path("peft again"), "--hf-model-type", "bert")
        self.assertEqual(tensors_of(self.path("peft again"), "adapter_model.safetensors"), stored)

    def test_the_head_of_a_modernbert_becomes_the_pooler(self):
        rows = self.write("train.jsonl", [json.dumps({"text": text, "label": label}) for text, label in (("a cat", 0), ("a dog", 1), ("mats", 2))])
        saved, written = self.path("saved"), self.path("written")
        run = [MODERN if arg == SENTENCE else "1" if arg == "60" else "1e-30" if arg == "1e-2" else arg for arg in RUN]
        self.output(*run, "--bert-classes", "3", "--train-data-path", rows, "--save", saved)
        self.assertEqual(json.loads(self.output("classify", saved, "--input", rows, "--device", "cpu"))["texts"], 3)
        self.output("convert-checkpoint", "--load", saved, "--save", written)
        config = json.loads(pathlib.Path(written, "config.json").read_text())
        self.assertEqual(config["architectures"], ["ModernBertForSequenceClassification"])
        self.assertEqual(config["id2label"], {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"})
        before, after = tensors_of(MODERN), tensors_of(written)
        for name in ("head.dense.weight", "head.norm.weight", "model.layers.1.attn.Wqkv.weight"):
            self.assertEqual(before[name], after[name], name)
        self.assertNotIn("decoder.bias", after)
        self.assertEqual(len(after["classifier.weight"]), 3 * len(after["head.norm.weight"]))

    def test_what_is_refused(self):
        rows = self.write("train.tsv", ["sentence\tlabel", "a cat\t1", "a dog\t2"])
        self.assert_error(2, "--task classify needs --bert-classes", *RUN, "--train-data-path", rows)
        self.assert_error(1, f'{rows}:3: label "2" is none of the 2 classes', *RUN, "--bert-classes", "2", "--train-data-path", rows)
        self.assert_error(1, "the model has no classification head and no multiple-choice head", "classify", SENTENCE,
                          "--input", self.write("a.jsonl", ['{"text": "a"}']), "--device", "cpu")


if __name__ == "__main__":
    support.main()
