#!/usr/bin/env python3
"""`megatron embed`: vectors of texts as a .npy file and as JSON lines, with the settings of sentence-transformers; what is refused.

Usage: embed_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import pathlib
import struct

import support

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "golden"
SENTENCE = str(GOLDENS / "encoders" / "sentence")
MODERN = str(GOLDENS / "encoders" / "modern_sentence")
T5 = str(GOLDENS / "encoders" / "t5_sentence")


class EmbedTest(support.FolderTest):
    def texts(self, name, lines):
        path = self.path(name)
        pathlib.Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def assert_vectors(self, found, expected):
        self.assertEqual(len(found), len(expected))
        for row, theirs in zip(found, expected):
            self.assertEqual(len(row), len(theirs))
            for a, b in zip(row, theirs):
                self.assertAlmostEqual(a, b, delta=1e-5)

    def test_vectors_are_those_of_sentence_transformers(self):
        golden = json.loads(pathlib.Path(SENTENCE, "vectors.json").read_text(encoding="utf-8"))
        self.output("embed", SENTENCE, "--input", self.texts("texts.txt", golden["texts"]), "--output", self.path("v.npy"), "--device", "cpu")
        data = pathlib.Path(self.path("v.npy")).read_bytes()
        size = 10 + struct.unpack("<H", data[8:10])[0]
        rows, columns = len(golden["texts"]), len(golden["auto"][0])
        self.assertIn(f"'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns})", data[10:size].decode())
        numbers = struct.unpack(f"<{rows * columns}f", data[size:])
        self.assert_vectors([numbers[i * columns:(i + 1) * columns] for i in range(rows)], golden["auto"])
        lines = self.texts("texts.jsonl", [json.dumps({"body": text}) for text in golden["texts"]])
        out = self.output("embed", SENTENCE, "--input", lines, "--json-key", "body", "--pooling", "cls", "--max-length", "16", "--device", "cpu")
        self.assert_vectors([json.loads(line)["embedding"] for line in out.splitlines()], golden["cls"])

    def test_vectors_of_modernbert_and_t5_are_those_of_transformers(self):
        for model in (MODERN, T5):
            golden = json.loads(pathlib.Path(model, "vectors.json").read_text(encoding="utf-8"))
            texts = self.texts("texts.txt", golden["texts"])
            for kind in ("mean-all", "mean", "cls"):
                out = self.output("embed", model, "--input", texts, "--pooling", kind, "--max-length", "40", "--device", "cpu")
                self.assert_vectors([json.loads(line)["embedding"] for line in out.splitlines()], golden[kind])

    def test_what_is_refused(self):
        texts = self.texts("texts.txt", ["1 2"])
        self.assert_error(1, "the model is of type gpt, whose tokens do not see those after them; this needs an encoder", "embed",
                          str(GOLDENS / "hf" / "llama2"), "--input", texts, "--device", "cpu")
        self.assert_error(1, "the model has no pooler", "embed", T5, "--input", texts, "--pooling", "pooler", "--device", "cpu")
        self.assert_error(1, "an encoder continues no text: every token sees those after it", "generate", T5, "--prompt", "the cat", "--device", "cpu")
        lines = self.texts("texts.jsonl", ['{"text": "a"}', '{"txt": "b"}'])
        self.assert_error(1, f'{lines}:2: no string under "text"', "embed", SENTENCE, "--input", lines)
        self.assert_error(2, "--output v.txt ends neither in .npy nor in .jsonl", "embed", SENTENCE, "--input", texts, "--output", "v.txt")


if __name__ == "__main__":
    support.main()
