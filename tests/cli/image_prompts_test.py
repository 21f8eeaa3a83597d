"""generate and logits of prompts with images: the tokens of transformers, and what is wrong with images is named."""
import json
import os
import shutil
import subprocess
import wave

import support
from media_model import GOLDEN, SAME
from support import call, read_safetensors

ADAPTER = os.path.join(GOLDEN, "..", "lora", "llava_modules")
SOUNDS = os.path.join(GOLDEN, "sounds")
MEDIA = os.path.join(SAME, "json", "media")


def media(*names):
    return [os.path.join(SOUNDS if name.endswith(".wav") else MEDIA, name) for name in names]


def families():
    with open(os.path.join(GOLDEN, "generations.json")) as file:
        return json.load(file)


def write_model(folder, facts, positions=512):
    """A golden's model with what its processor needs; of rotary positions there may be more without other numbers."""
    golden = os.path.join(GOLDEN, facts["family"])
    os.makedirs(folder)
    shutil.copy(os.path.join(golden, "model.safetensors"), folder)
    with open(os.path.join(golden, "config.json")) as file:
        config = json.load(file)
    config["text_config"]["max_position_embeddings"] = positions
    config.update(facts["config"])
    files = {"config.json": config, "preprocessor_config.json": facts["processor"], "tokenizer.json": facts["tokenizer"],
             "tokenizer_config.json": {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}}
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file)
    with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
        file.write(facts["template"])


class ImagePromptsTest(support.FolderTest):
    def generate(self, model, *flags, text=""):
        result = subprocess.run([support.BINARY, "generate", model, "--greedy", "--tokens-to-generate", "64", "--json", "--dtype", "fp32",
                                 "--device", "cpu", "--num-threads", "1", *flags], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def lines(self, *rows):
        with open(self.path("rows.jsonl"), "w") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        return ["--prompts-file", self.path("rows.jsonl")]

    def model(self, family="llava", **more):
        folder = self.path(family + "".join(map(str, more.values())))
        write_model(folder, next(row for row in families() if row["family"] == family), **more)
        return folder

    def test_texts_and_turns_are_those_of_transformers(self):
        for facts in families():
            if facts["family"] == "qwen2_vl":  # goes as qwen2_5_vl, and is compared in image_prompts_test.cc
                continue
            model = self.path(facts["family"])
            write_model(model, facts)
            one, two = facts["texts"]
            kind = facts.get("kind", "image")
            out = self.generate(model, "--prompt", one["text"], f"--{kind}", *media(*one["files"]))
            self.assertEqual(out[0]["tokens"], one["tokens"], facts["family"])
            # Side by side with a text, and without placeholders: the image comes first.
            placeholder = one["text"].split("\n")[0]
            rows = self.lines({"prompt": two["text"], f"{kind}s": two["files"]}, {"prompt": "a text."},
                              {"prompt": one["text"].removeprefix(placeholder), kind: one["files"][0]})
            out = self.generate(model, *rows, "--media-root", SOUNDS if kind == "audio" else MEDIA)
            self.assertEqual([out[i]["tokens"] for i in (0, 2)], [two["tokens"], one["tokens"]], facts["family"])
            self.assertEqual(out[1]["tokens"], self.generate(model, "--prompt", "a text.")[0]["tokens"])
            self.check_turns(model, facts)
            self.check_logits(model, two, kind)

    def check_turns(self, model, facts):
        turns, kind = facts["turns"], facts.get("kind", "image")
        said = "".join(f"/{kind} {media(turn['file'])[0]}\n{turn['text']}\n" for turn in turns)
        out = self.generate(model, "--chat", text=said)
        for turn, answer in zip(turns, out):
            self.assertEqual((answer["prompt_tokens"], answer["tokens"]), (turn["prompt_tokens"], turn["tokens"]), facts["family"])
        self.assertEqual(out[1]["messages"][1], {"role": "assistant", "content": turns[0]["said"]})
        # The same conversations from a file, in one batch.
        first, second = ({"role": "user", "content": [{"type": kind, "path": turn["file"]}, {"type": "text", "text": turn["text"]}]}
                         for turn in turns)
        rows = self.lines({"messages": [first, {"role": "assistant", "content": turns[0]["said"]}, second]}, {"messages": [first]})
        out = self.generate(model, "--chat", *rows, "--media-root", SOUNDS if kind == "audio" else MEDIA)
        self.assertEqual([answer["tokens"] for answer in out], [turns[1]["tokens"], turns[0]["tokens"]], facts["family"])
        one = self.generate(model, "--chat", "--prompt", turns[0]["text"], f"--{kind}", *media(turns[0]["file"]))
        self.assertEqual(one[0]["tokens"], turns[0]["tokens"])

    def check_logits(self, model, case, kind):
        self.output("logits", model, "--prompt", case["text"], f"--{kind}", *media(*case["files"]), "--output", self.path("logits.safetensors"))
        tensors = read_safetensors(self.path("logits.safetensors"))
        shape, tokens = tensors["tokens"]
        ids = [int.from_bytes(tokens[4 * i:4 * i + 4], "little") for i in range(shape[0])]
        self.assertEqual(ids, case["prompt_tokens"])
        top = json.loads(self.output("logits", model, "--prompt", case["text"], f"--{kind}", *media(*case["files"]), "--json", "--top", "1"))
        self.assertEqual(top[0]["id"], case["tokens"][0])

    def test_a_checkpoint_takes_the_processor_of_a_folder(self):
        facts = families()[0]
        model, case = self.model(), facts["texts"][0]
        self.output("convert-checkpoint", "--load", model, "--save", self.path("ours"))
        prompt = ["--prompt", case["text"], "--image", *media(*case["files"])]
        self.assertEqual(self.generate(self.path("ours"), *prompt, "--media-model", model)[0]["tokens"], case["tokens"])
        result = call("generate", self.path("ours"), *prompt)
        self.assertRegex(result.stderr, r"error: .*: has no image processor \(preprocessor_config.json\)\n.*--media-model")

    def adapter(self, name, keep):
        """PEFT's folder with the update of the modules whose names `keep` accepts alone: the others' factors B are zeros."""
        folder = self.path(name)
        shutil.copytree(ADAPTER, folder)
        file = os.path.join(folder, "adapter_model.safetensors")
        with open(file, "rb") as stream:
            data = bytearray(stream.read())
        begin = 8 + int.from_bytes(data[:8], "little")
        for tensor, entry in json.loads(bytes(data[8:begin])).items():
            if tensor.endswith("lora_B.weight") and not keep(tensor):
                first, last = (begin + offset for offset in entry["data_offsets"])
                data[first:last] = bytes(last - first)
        with open(file, "wb") as stream:
            stream.write(data)
        return folder

    def test_adapters_of_encoder_projector_and_language_model(self):
        """Each module's own update changes what is generated behind an image; that of all is what a checkpoint with them gives."""
        model, image = self.model(), media("1_img1.jpg")[0]

        def tokens(folder, *flags, image=image):
            return self.generate(folder, "--prompt", "<image>\nab", "--image", image, *flags)[0]["tokens"]
        plain, whole = tokens(model), tokens(model, "--adapter", ADAPTER)
        self.assertEqual(tokens(model, "--adapter", self.adapter("none", lambda name: False)), plain)
        own = {module: tokens(model, "--adapter", self.adapter(module, lambda name, module=module: module in name))
               for module in ("vision_tower", "multi_modal_projector", "language_model")}
        self.assertEqual(len({str(result) for result in (plain, whole, *own.values())}), 5)
        self.assertNotEqual(tokens(model, "--adapter", ADAPTER, image=media("0_img1.png")[0]), whole)
        self.output("convert-checkpoint", "--load", model, "--adapter", ADAPTER, "--save", self.path("ours"))
        self.assertEqual(tokens(self.path("ours"), "--media-model", model), whole)

    def test_what_is_wrong_with_images_is_named(self):
        model, image = self.model(), media("1_img1.jpg")[0]
        run = ["generate", model, "--device", "cpu"]
        self.assert_error(1, "cannot open /no/such.jpg: No such file or directory", *run, "--prompt", "a", "--image", "/no/such.jpg")
        cut = self.path("cut.jpg")
        with open(image, "rb") as whole, open(cut, "wb") as file:
            file.write(whole.read()[:-20])
        for flags, where in ((["--prompt", "a"], "prompt 1"), (["--chat", "--prompt", "a"], "--prompt 1")):
            result = call(*run, *flags, "--image", cut)
            self.assertEqual(result.returncode, 1)
            self.assertRegex(result.stderr, f"error: {where}: {cut}: byte \\d+: JPEG: the file is cut")
        self.assert_error(1, "prompt 1: the text has <image> 2 times for 1 image", *run, "--prompt", "<image> <image>", "--image", image)
        self.assert_error(1, "prompt 1: the text has <image> 1 time for 2 images", *run, "--prompt", "<image>", "--image", image, image)
        self.assert_error(1, "prompt 1 has the token of an image, 39, and no image", *run, "--prompt", "a <image>")
        self.assert_error(1, "--prompt 1: message 1, byte 2: the text holds <image>, which the tokenizer takes for a token of its own",
                          *run, "--chat", "--prompt", "a <image>", "--image", image)
        self.output(*run, "--chat", "--prompt", "a <image>", "--image", image, "--escape-modality-text", "--tokens-to-generate", "2")
        short = self.model(positions=32)
        self.assert_error(1, "prompt 1 has 20 tokens, 18 of them of 2 images; with 64 to generate that is beyond the model's context of 32",
                          "generate", short, "--prompt", "ab", "--image", image, image)
        result = call(*run, *self.lines({"prompt": "a", "images": ["../x.jpg"]}))
        self.assertEqual(result.returncode, 1)
        self.assertIn("rows.jsonl:1: the path ../x.jpg leaves the folder of media", result.stderr)

    def test_what_is_wrong_with_sounds_is_named(self):
        model, sound = self.model("qwen2_audio"), media("odd.wav")[0]
        run = ["generate", model, "--device", "cpu"]
        self.assert_error(1, "prompt 1: the text has <|AUDIO|> 2 times for 1 sound", *run, "--prompt", "<|AUDIO|> <|AUDIO|>", "--audio", sound)
        self.assert_error(1, "prompt 1 has the token of a sound, 39, and no sound", *run, "--prompt", "a <|AUDIO|>")
        self.assert_error(1, f"{model}: a model of type MIMO without an encoder of them reads no images", *run, "--prompt", "a", "--image",
                          media("1_img1.jpg")[0])
        llava = self.model()
        self.assert_error(1, f"{llava}: a model of type MIMO without an encoder of them reads no sounds", "generate", llava, "--prompt", "a", "--audio", sound)
        for name, rate, length, message in (("fast.wav", 44100, 3000, "1 channel at 44100 Hz, expected 1 channel at 16000 Hz: convert the sound first"),
                                            ("none.wav", 16000, 0, "the sound has 0 samples, too few for one token of the model"),
                                            ("tiny.wav", 16000, 160, "the sound has 160 samples, too few for one token of the model"),
                                            ("long.wav", 16000, 496000, "the sound has 496000 samples, more than the 480000 of 30 s")):
            with wave.open(self.path(name), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes(bytes(2 * length))
            result = call(*run, "--prompt", "a", "--audio", self.path(name))
            self.assertEqual((result.returncode, message in result.stderr), (1, True), result.stderr)

    def test_models_and_flags_without_images(self):
        golden = os.path.join(GOLDEN, "..", "evaluate", "model")
        image = media("1_img1.jpg")[0]
        for command in ("generate", "logits"):
            self.assert_error(1, f"{golden}: a model of type GPT reads no images", command, golden, "--prompt", "a", "--image", image)
        rows = self.lines({"messages": [{"role": "user", "content": [{"type": "image", "path": "1_img1.jpg"}]}]})
        result = call("generate", golden, "--chat", *rows, "--media-root", MEDIA)
        self.assertEqual(result.returncode, 1)
        self.assertIn("reads no images", result.stderr)
        for flags, message in ((["--prompt", "a", "b", "--image", image], "--image with 2 prompts"),
                               (["--prompts-file", "x", "--image", image], "--image with --prompts-file"),
                               (["--prompt", "a", "--media-model", "x"], "--media-model has no effect without images"),
                               (["--prompt", "a", "--media-root", "x"], "--media-root has no effect without --prompts-file"),
                               (["--prompt", "a", "--escape-modality-text"], "--escape-modality-text has no effect without --chat")):
            result = call("generate", golden, *flags)
            self.assertEqual((result.returncode, message in result.stderr), (2, True), result.stderr)


if __name__ == "__main__":
    support.main()
