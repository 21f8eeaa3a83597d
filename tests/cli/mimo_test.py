"""Training of models that read images: from nothing and from a folder of Hugging Face, resumed, with frozen parts."""
import json
import os
import shutil
import tarfile
import wave

import support
from media_model import GOLDEN, SAME, write_media_model
from support import read_safetensors, write_safetensors

MODEL = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope --untie-embeddings-and-output-weights "
         "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0.1 --vision-model-type clip "
         "--vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 --vision-num-attention-heads 2 --img-h 28 --img-w 28 "
         "--patch-dim 14 --disable-vision-class-token --image-token-id 260").split()
RUN = "--task mimo --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --device cpu --num-threads 1 " \
      "--log-interval 1 --split 100,0,0".split()
IMAGES = ["0_img1.png", "1_img1.jpg", "3_img1.png", "4_img1.webp"]


def metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        return [row for row in map(json.loads, file) if row["type"] == "train"]


def weights(folder):
    """{name: bytes} of the newest checkpoint."""
    newest = max(name for name in os.listdir(folder) if name.startswith("iter_"))
    out = {}
    for name in sorted(os.listdir(os.path.join(folder, newest))):
        if name.endswith(".safetensors"):
            out.update(read_safetensors(os.path.join(folder, newest, name)))
    return out


class MimoTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        write_media_model(self.path("llava"), "llava")
        with open(self.path("rows.jsonl"), "w") as file:
            for i in range(20):
                row = {"image": IMAGES[i % 3], "caption": "xyz" * (1 + i % 5)}
                if i % 4 == 3:
                    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "abcdefghi"[:1 + i % 7]}]}
                file.write(json.dumps(row) + "\n")
        self.data = ["--data-path", self.path("rows.jsonl"), "--media-root", os.path.join(SAME, "json", "media"), "--media-model",
                     self.path("llava"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.path("llava")]

    def train(self, name, *more, command="pretrain", model=MODEL):
        return self.run_ok(command, *RUN, *model, *self.data, "--save", self.path(name), *more)

    def test_a_resumed_run_has_the_same_bits(self):
        whole = self.train("whole", "--train-iters", "6")
        self.assertIn("rows.jsonl: 20 samples, ", whole.stderr + whole.stdout)
        losses = [row["lm loss"] for row in metrics(self.path("whole"))]
        self.assertLess(losses[-1], losses[0])
        self.train("parts", "--train-iters", "6", "--exit-interval", "4", "--save-interval", "4")
        self.train("parts", "--train-iters", "6", "--num-workers", "0", "--start-mode", "resume-or-fresh")
        self.assertEqual([row["lm loss"] for row in metrics(self.path("parts"))], losses)
        self.assertEqual(weights(self.path("parts")), weights(self.path("whole")))

    def test_another_image_processor_is_named_at_a_resume(self):
        self.train("run", "--train-iters", "4", "--exit-interval", "2")
        name = os.path.join(self.path("llava"), "preprocessor_config.json")
        with open(name) as file:
            processor = json.load(file)
        resume = ["pretrain", *RUN, *MODEL, *self.data, "--save", self.path("run"), "--start-mode", "resume", "--train-iters", "4"]
        what = f"the training data or its order is another than that of {self.path('run')}/iter_0000002: "
        with open(name, "w") as file:
            json.dump(processor, file, indent=1)
        self.assert_error(1, what + "no value differs, only how a file that says them is written", *resume)
        with open(name, "w") as file:
            json.dump(processor | {"image_mean": [0.5, 0.5, 0.5]}, file)
        what += "index.encoding.media.image_processor.image_mean is [0.5,0.5,0.5], was [0.48145466,0.4578275,0.40821073]"
        self.assert_error(1, what, *resume)
        self.assertIn("\nhint: give the flags and files of the data as they were, or --accept-new-data-order", support.call(*resume).stderr)
        self.assertIn(what, self.run_ok(*resume, "--accept-new-data-order").stderr)

    def test_from_hugging_face_with_frozen_ends(self):
        self.train("run", "--train-iters", "2")
        self.run_ok("convert-checkpoint", "--load", self.path("run"), "--save", self.path("hf"), "--to", "huggingface")
        for name in ("preprocessor_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(self.path("llava"), name), self.path("hf"))
        self.data[self.data.index("--media-model") + 1] = self.path("hf")
        self.train("tuned", "--train-iters", "3", "--pretrained-checkpoint", self.path("hf"), "--freeze-except", "vision_projection",
                   command="finetune", model=["--attention-dropout", "0"])
        before, after = weights(self.path("run")), weights(self.path("tuned"))
        for name, value in before.items():
            if name in after and not name.startswith("optimizer"):
                self.assertEqual(value != after[name], name.startswith("vision_projection"), name)

    def test_from_folders_of_parts(self):
        self.train("run", "--train-iters", "2")
        self.run_ok("convert-checkpoint", "--load", self.path("run"), "--save", self.path("hf"), "--to", "huggingface")
        with open(os.path.join(self.path("hf"), "config.json")) as file:
            config = json.load(file)
        tensors = read_safetensors(os.path.join(self.path("hf"), "model.safetensors"))

        def write_part(name, prefix, other, **settings):
            kept = {other + key[len(prefix):]: ("F32", *value) for key, value in tensors.items() if key.startswith(prefix)}
            self.assertTrue(kept)
            os.mkdir(self.path(name))
            with open(os.path.join(self.path(name), "config.json"), "w") as file:
                json.dump(settings, file)
            write_safetensors(os.path.join(self.path(name), "model.safetensors"), kept)
        write_part("llama", "language_model.", "", **config["text_config"])
        # A third layer, behind the one whose output is taken.
        tensors.update({key.replace("layers.1.", "layers.2."): value for key, value in tensors.items() if "vision_tower.encoder.layers.1." in key})
        write_part("clip", "vision_tower.", "vision_model.", model_type="clip", vision_config={**config["vision_config"], "num_hidden_layers": 3})
        parts = ["--pretrained-checkpoint", self.path("llama"), "--pretrained-vision-model", self.path("clip")]
        own = ["--attention-dropout", "0", "--image-token-id", "260", "--train-iters", "3", "--freeze-except", "vision_projection"]
        said = self.train("joined", *own, *parts, "--exit-interval", "2", "--save-interval", "2", command="finetune", model=[])
        text = said.stdout + said.stderr
        self.assertIn(f"starting from the weights of {self.path('llama')}, {self.path('clip')} (vision_model)", text)
        self.assertIn(f"{self.path('clip')}: 16 of its tensors are no part of the vision_model and are not read, such as vision_model.", text)
        self.assertIn("begins at random: vision_projection", text)
        before, after = weights(self.path("run")), weights(self.path("joined"))
        for name, value in before.items():
            if not name.startswith("optimizer"):
                self.assertEqual(value != after[name], name.startswith("vision_projection"), name)
        # Only at the start: a resumed run goes on with its own projector.
        again = self.train("joined", *own, *parts, "--load", self.path("joined"), command="finetune", model=[])
        self.assertIn("resuming from", again.stdout + again.stderr)
        # Without its frozen weights, which a resumed run reads again.
        lean = [*own, *parts, "--no-save-frozen", "--load", self.path("lean")]
        self.train("lean", *lean, "--exit-interval", "2", "--save-interval", "2", command="finetune", model=[])
        self.train("lean", *lean, command="finetune", model=[])
        self.assertEqual(*([row["lm loss"] for row in metrics(self.path(name))] for name in ("lean", "joined")))
        run = ["finetune", *RUN, *self.data, *own, *parts]
        result = support.call(*run, "--vision-ffn-hidden-size", "32", "--save", self.path("wide"))
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"{self.path('clip')}: vision_model.encoder.layers.0.mlp.fc1.", result.stderr)
        self.assert_error(2, "--pretrained-vision-model is given for a model without an encoder of images", *run, "--vision-model-type", "none",
                          "--audio-model-type", "whisper")
        self.assert_error(1, f"{self.path('llama')}: holds no encoder of images: its model is of the type \"llama\"", "pretrain", *RUN, *MODEL, *self.data,
                          "--pretrained-vision-model", self.path("llama"))
        self.assertIn("--pretrained-vision-model has no effect with --task gpt", support.call("pretrain", *parts[2:]).stderr)

    def test_folders_and_blends_of_energon(self):
        energon = os.path.join(GOLDEN, "energon")
        with open(self.path("blend.yaml"), "w") as file:
            json.dump({"__class__": "MetadatasetV2", "splits": {
                "train": {"blend": [{"weight": 2, "path": os.path.join(energon, "answering")},
                                    {"weight": 1, "path": os.path.join(energon, "captions"), "subset": {"range": [1, "end"]}}]},
                "val": {"path": os.path.join(energon, "answering")}}}, file)
        self.data[1] = self.path("blend.yaml")
        out = self.train("run", "--train-iters", "2", "--data-cache-path", self.path("cache"), "--eval-iters", "1")
        said = out.stderr + out.stdout
        answering, part = os.path.realpath(os.path.join(energon, "answering")), self.path("blend.yaml") + "#1"
        for split, path, count in (("train", answering, 3), ("train", part, 2), ("valid", answering, 2)):
            self.assertRegex(said, f"{split}[a-z]* split of {path}: {count} samples")
        shown = self.run_ok("inspect-dataset", part, "--media-model", self.path("llava"), "--sample", "0").stdout
        self.assertIn("a caption 1", shown)
        # The same samples as rows of JSON: the same losses.
        self.data[1] = os.path.join(energon, "captions")
        self.train("folder", "--train-iters", "2", "--data-cache-path", self.path("cache"))
        with open(self.path("rows.jsonl"), "w") as file:
            file.write("".join(json.dumps({"image": IMAGES[i], "caption": f"a caption {i}"}) + "\n" for i in range(3)))
        self.data[1] = self.path("rows.jsonl")
        self.train("rows", "--train-iters", "2")
        self.assertEqual(*([row["lm loss"] for row in metrics(self.path(name))] for name in ("folder", "rows")))

    def test_images_in_both_directions_with_crops(self):
        write_media_model(self.path("gemma3"), "gemma3")
        self.data = [value.replace(self.path("llava"), self.path("gemma3")) for value in self.data]
        model = " ".join(MODEL).replace("type clip", "type siglip --vision-pooling 2 --vision-projection-type affine --vision-projection-norm")
        model = model.replace("--img-h 28 --img-w 28", "--img-h 56 --img-w 56").replace("id 260", "id 266").split()
        length = ["--seq-length", "320", "--train-iters", "3", "--window-size", "2", "0"]
        self.assert_error(1, f"{self.path('gemma3')}: --bidirectional-images is for models of type gemma3, and needed for them", "pretrain", *RUN, *model, *self.data, *length)
        self.train("seen", *length, "--bidirectional-images", model=model)
        self.assertEqual(len(metrics(self.path("seen"))), 3)

    def test_sounds(self):
        write_media_model(self.path("audio"), "qwen2_audio")
        with open(self.path("sounds.jsonl"), "w") as file:
            for i in range(12):
                row = {"audio": ["low.wav", "odd.wav", "short.wav"][i % 3], "caption": "xyz" * (1 + i % 5)}
                if i % 4 == 3:
                    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "abc"}]}
                file.write(json.dumps(row) + "\n")
        data = ["--data-path", self.path("sounds.jsonl"), "--media-root", os.path.join(GOLDEN, "sounds"), "--media-model", self.path("audio"),
                "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.path("audio")]
        model = (" ".join(MODEL[:MODEL.index("--vision-model-type")]) + " --audio-model-type whisper --audio-num-layers 1 --audio-hidden-size 16 "
                 "--audio-ffn-hidden-size 24 --audio-num-attention-heads 2 --audio-token-id 272").split()
        self.data = data
        self.train("heard", "--train-iters", "6", model=model)
        losses = [row["lm loss"] for row in metrics(self.path("heard"))]
        self.assertLess(losses[-1], losses[0])
        run = ["pretrain", *RUN, *data, "--train-iters", "1"]
        self.assert_error(1, f"--audio-mel-bins is 80, {self.path('audio')} has 128 as features of a frame", *run, *model, "--audio-mel-bins", "80")
        self.assert_error(1, f"{self.path('audio')}: its model reads sounds, this one images", *run, *MODEL)
        with wave.open(self.path("long.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(bytes(2 * 496000))
        with open(self.path("sounds.jsonl"), "a") as file:
            file.write(json.dumps({"audio": "long.wav", "caption": "a"}) + "\n")
        shutil.copytree(os.path.join(GOLDEN, "sounds"), self.path("sounds"))
        shutil.move(self.path("long.wav"), self.path("sounds"))
        run[run.index("--media-root") + 1] = self.path("sounds")
        self.assert_error(1, f"{self.path('sounds.jsonl')}: line 13: the sound has 496000 samples, more than the 480000 of 30 s that the model hears", *run, *model)

    def test_images_and_sounds_in_one_sample(self):
        write_media_model(self.path("audio"), "qwen2_audio")
        with open(self.path("both.jinja"), "w") as file:
            file.write("{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{% for c in m['content'] %}"
                       "{{ c['text'] }}{% endfor %}{% endgeneration %}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
                       "{% elif c['type'] == 'audio' %}<|AUDIO|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}")
        sounds, folder = ["low.wav", "odd.wav", "short.wav"], self.path("media")
        shutil.copytree(os.path.join(GOLDEN, "sounds"), folder)
        for name in IMAGES:
            shutil.copy(os.path.join(SAME, "json", "media", name), folder)
        captions = [{"image": IMAGES[i % 3], "audio": sounds[i // 3 % 3], "caption": "xyz" * (1 + i % 5)} for i in range(9)]
        captions += [{"image": IMAGES[0], "caption": "seen"}, {"audio": sounds[0], "caption": "heard"}]
        talk = {"audio": sounds[1], "image": [IMAGES[1], IMAGES[2]], "conversations": [
            {"from": "human", "value": "a <image> and <audio> then <image>"}, {"from": "gpt", "value": "abc"}]}

        def rows(name, *rows):
            with open(self.path(name), "w") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            return self.path(name)
        model = (" ".join(MODEL) + " --audio-model-type whisper --audio-num-layers 1 --audio-hidden-size 16 --audio-ffn-hidden-size 24 "
                 "--audio-num-attention-heads 2 --audio-token-id 272 --seq-length 128").split()
        self.data[1] = rows("both.jsonl", *captions, talk)
        self.data[self.data.index("--media-root") + 1] = folder
        models = ["--media-model", self.path("llava"), "--audio-media-model", self.path("audio"), "--chat-template", self.path("both.jinja")]
        self.data += models[2:]
        whole = self.train("whole", "--train-iters", "6", model=model)
        self.assertIn("both.jsonl: 12 samples, ", whole.stderr + whole.stdout)
        losses = [row["lm loss"] for row in metrics(self.path("whole"))]
        self.assertLess(losses[-1], losses[0])
        self.train("parts", "--train-iters", "6", "--exit-interval", "4", "--save-interval", "4", model=model)
        self.train("parts", "--train-iters", "6", "--num-workers", "0", "--start-mode", "resume-or-fresh", model=model)
        self.assertEqual([row["lm loss"] for row in metrics(self.path("parts"))], losses)
        self.assertEqual(weights(self.path("parts")), weights(self.path("whole")))
        shown = self.output("inspect-dataset", self.data[1], "--media-root", folder, *models, "--sample", "11", "--save-media", self.path("seen"))
        self.assertRegex(shown, r"a \[image \S+ -> 4 tokens\] and \[sound .* -> \d+ tokens?\] then \[image \S+ -> 4 tokens\]")
        self.assertEqual(sorted(os.listdir(self.path("seen"))), [f"sample-11-medium-{i}-picture-1.png" for i in (1, 3)])
        # The same captions as members of a shard: the same losses.
        with tarfile.open(self.path("shard.tar"), "w") as file:
            for i, row in enumerate(captions):
                for key in ("image", "audio"):
                    if key in row:
                        file.add(os.path.join(folder, row[key]), f"{i:03}.{row[key].rsplit('.')[-1]}")
                with open(self.path("text"), "w") as text:
                    text.write(row["caption"])
                file.add(self.path("text"), f"{i:03}.txt")
        runs = []
        for name in (rows("captions.jsonl", *captions), self.path("shard.tar")):
            self.data[1] = name
            self.train("run" + name[-3:], "--train-iters", "2", model=model)
            runs.append([row["lm loss"] for row in metrics(self.path("run" + name[-3:]))])
        self.assertEqual(*runs)
        run = ["pretrain", *RUN, *self.data, "--train-iters", "1", *model]
        at = run.index("--audio-media-model")
        self.assert_error(2, "--audio-media-model is not given", *run[:at], *run[at + 2:])
        self.assert_error(2, "--audio-media-model has no effect: the model does not read both images and sounds", *run, "--audio-model-type", "none")
        self.assert_error(1, f"{self.path('llava')}: its model reads images, expected one that reads sounds", *run, "--audio-media-model", self.path("llava"))
        self.assert_error(1, f"{self.path('audio')}: its model reads sounds, expected one that reads images beside {self.path('audio')}", *run,
                          "--media-model", self.path("audio"))

    def test_what_contradicts_the_model_is_named(self):
        model = list(MODEL)
        model[model.index("--image-token-id") + 1] = "261"
        run = ["pretrain", *RUN, *self.data, "--train-iters", "1"]
        self.assert_error(1, f"--image-token-id is 261, {self.path('llava')} has 260 as the token of images", *run, *model)
        model[model.index("--image-token-id") + 1] = "260"
        model[model.index("--img-h") + 1] = "42"
        self.assert_error(1, f"--img-h is 42, {self.path('llava')} has 28 as height of a picture", *run, *model)
        self.assert_error(2, "--lora-targets speech_model.linear_q: the model has no such module", *run, *MODEL, "--lora-rank", "4", "--lora-targets", "speech_model.linear_q")

    def test_a_bad_image_ends_the_run_and_is_named(self):
        media = self.path("media")
        shutil.copytree(os.path.join(SAME, "json", "media"), media)
        with open(os.path.join(media, "1_img1.jpg"), "r+b") as file:
            file.truncate(os.path.getsize(os.path.join(media, "1_img1.jpg")) - 40)
        self.data[self.data.index("--media-root") + 1] = media
        result = support.call("pretrain", *RUN, *MODEL, *self.data, "--train-iters", "5")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"error: .*rows.jsonl: line \d+: 1_img1.jpg: byte \d+: JPEG: the file is cut")
        skipped = self.train("skipped", "--train-iters", "3", "--on-bad-media", "skip")
        self.assertRegex(skipped.stderr, r"warning: .*rows.jsonl: line 2: 1_img1.jpg: byte \d+: JPEG: .*: the sample counts nothing")
        self.assertIn("; 5 with media that cannot be decoded, which count nothing", skipped.stderr + skipped.stdout)
        result = support.call("pretrain", *RUN, *MODEL, *self.data, "--train-iters", "3", "--on-bad-media", "skip", "--max-bad-media", "4")
        self.assertIn("5 media cannot be decoded, more than --max-bad-media 4; the first: ", result.stderr)


if __name__ == "__main__":
    support.main()
