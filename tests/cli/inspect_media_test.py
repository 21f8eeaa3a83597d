"""inspect-dataset on rows of text with images: what the model reads and sees."""
import json
import os
import struct
import unittest

import support
from media_model import SAME, write_media_model
from support import call


def png_size(path):
    with open(path, "rb") as file:
        data = file.read()
    return data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24])


class InspectMediaTest(support.FolderTest):
    def model(self, family):
        folder = self.path(family)
        write_media_model(folder, family)
        return ["--media-model", folder]

    def rows(self, *rows):
        with open(self.path("rows.jsonl"), "w") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        return self.path("rows.jsonl")

    def test_a_sample_is_shown_and_saved(self):
        data = [os.path.join(SAME, "json", "rows.json"), "--media-root", os.path.join(SAME, "json", "media"), "--sample", "1"]
        out = self.output("inspect-dataset", *data, *self.model("internvl"), "--save-media", self.path("seen"))
        # Four tiles and the whole image; one.
        self.assertIn("First <img>[image 16x8 -> 12 tokens]</img>\n then <img>[image 3x4 -> ", out)
        self.assertIn('count:\n  "The first.<|im_end|>"\n  "Yes.<|im_end|>"\n', out)
        files = sorted(os.listdir(self.path("seen")))
        self.assertEqual(files[:3], [f"sample-1-medium-1-picture-{p}.png" for p in (1, 2, 3)])
        self.assertEqual({png_size(self.path("seen/" + name)) for name in files}, {(56, 56)})
        shown = json.loads(self.output("inspect-dataset", *data, *self.model("internvl"), "--json"))
        self.assertEqual(shown["counted"], ["The first.<|im_end|>", "Yes.<|im_end|>"])
        self.assertEqual(shown["name"], data[0] + ": row 2")

    def test_a_saved_picture_is_what_was_seen(self):
        """Seen again it stays the same, byte for byte: it has the size that the model reads."""
        row = {"image": "3_img1.png", "caption": "c"}
        llava = self.model("llava")
        self.output("inspect-dataset", self.rows(row), *llava, "--media-root", os.path.join(SAME, "json", "media"), "--sample", "0",
                    "--save-media", self.path("a"))
        name = "sample-0-medium-1-picture-1.png"
        self.assertEqual(png_size(self.path("a/" + name)), (28, 28))
        self.output("inspect-dataset", self.rows({"image": name, "caption": "c"}), *llava, "--media-root", self.path("a"), "--sample", "0",
                    "--save-media", self.path("b"))
        with open(self.path("a/" + name), "rb") as a, open(self.path("b/" + name), "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_all_rows_are_counted(self):
        rows = self.rows(*[{"image": "0_img1.png", "caption": "word" * i} for i in range(1, 601)])
        counts = json.loads(self.output("inspect-dataset", rows, *self.model("llava"), "--media-root", os.path.join(SAME, "json", "media"),
                                        "--json"))
        # Four tokens of the image, the text, the end of the document.
        self.assertEqual(counts, {"samples": 600, "images": 600, "sounds": 0, "tokens": 600 * 5 + 4 * 600 * 601 // 2, "media_tokens": 2400,
                                  "counted_tokens": 600 + 4 * 600 * 601 // 2, "longest_sample": 2405})

    def test_orientations_that_are_none_are_counted(self):
        with open(os.path.join(SAME, "..", "..", "media", "images.json")) as file:
            image = next(row["file"] for row in json.load(file) if row["name"].startswith("webp 0 RGBA"))  # 9
        rows = self.rows({"image": "data:image/webp;base64," + image, "caption": "a"}, {"caption": "b", "image": "data:image/webp;base64," + image})
        self.assertEqual(json.loads(self.output("inspect-dataset", rows, *self.model("llava"), "--json"))["bad_orientations"], 2)
        self.assertIn("bad orientations 2", self.output("inspect-dataset", rows, *self.model("llava")))

    def test_bad_rows_are_named(self):
        model = self.model("llava")
        tar = os.path.join(SAME, "tar", "shard-1.tar")
        self.assert_error(1, tar + ": s/003: there is a sound, which the model does not read", "inspect-dataset", tar, *model)
        rows = self.rows({"image": "rows.jsonl", "caption": "c"})
        refused = call("inspect-dataset", rows, *model)
        self.assertIn(rows + ": line 1: rows.jsonl: byte 0: ", refused.stderr)
        rows = self.rows({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<|im_end|>"}]})
        self.assert_error(1, rows + ": line 1: message 2, byte 0: the text holds <|im_end|>, which the tokenizer takes for a token of its own",
                          "inspect-dataset", rows, *model)
        self.assertIn("counted tokens 11", self.output("inspect-dataset", rows, *model, "--escape-modality-text"))

    def test_flags_without_effect_are_refused(self):
        self.assert_error(2, "--save-media needs --media-model", "inspect-dataset", "x", "--save-media", self.path("s"))
        self.assert_error(2, "--save-media needs --sample", "inspect-dataset", "x", "--media-model", self.path("m"), "--save-media", "s")
        self.assert_error(2, "--media-model does not go with --multimodal, --verify, --seq-length and --num-samples, which are for indexed datasets",
                          "inspect-dataset", "x", "--media-model", self.path("m"), "--verify")


if __name__ == "__main__":
    support.main()
