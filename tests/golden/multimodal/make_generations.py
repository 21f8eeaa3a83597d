#!/usr/bin/env python3
"""Writes generations.json: what `transformers` makes of prompts with image files and the tiny models of make_vision_goldens.py, by their processors,
with the cache: 64 greedy tokens behind a text with an image, a text with two, and in a conversation whose second image comes in a later turn;
of models that read images also behind a text with images of odd sizes (odd_images.json: PNG files in base64), with the logits of the row behind each
image (and greedy tokens of models whose images keep their sizes). There llava_next prefers tall grids, so that the map of the third image is cut to no row.

The tokenizer has small letters and the special tokens of the families; a text is changed until no choice of a token is close and no token ends
the text. Of qwen2_audio sounds stand in the place of images; write_sounds() makes them. Made with transformers 5.23.0, tokenizers 0.23.3, pillow 12.3.0, torch 2.11.0 (CPU). Run: python make_generations.py [FAMILY]..., which
keeps the other families.
"""
import base64
import io
import json
import pathlib
import random
import sys
import wave

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

assert transformers.__version__ == "5.23.0"
# No processors of videos: nothing here uses them, and they ask for torchvision.
transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, value: None
HERE = pathlib.Path(__file__).resolve().parent
MEDIA = HERE / "same" / "json" / "media"
SOUNDS = HERE / "sounds"
FAMILIES = ("llava", "llava_next", "internvl", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen2_audio")
LETTERS = "abcdefghijklmnopqrstuvwxyz\u0120\u010a.,:?<->"
# At ids that the models choose seldom.
PLACEHOLDERS = {"internvl": "<IMG_CONTEXT>", "gemma3": "<img>", "qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>", "qwen2_audio": "<|AUDIO|>"}
OWN_SIZES = ("qwen2_vl", "qwen2_5_vl")
# Height and width of images of odd sizes: the smallest one, as long as qwen2_vl allows, wide, between two multiples of a block, higher than wide; square (not of models whose images keep their sizes).
ODD_SIZES = ((1, 1), (4000, 20), (37, 2911), (70, 98), (333, 77), (45, 45))
ODD_POINTS = {"llava_next": [[24, 12], [12, 24], [24, 24], [12, 36]]}
# Members of config.json that name tokens, where the tiny model has those of the large one.
CONFIGS = {"gemma3": {"boi_token_index": 19, "eoi_token_index": 32}}
SPECIALS = {"<|im_start|>": 18, "<img>": 19, "</img>": 32, "<|im_end|>": 37, "IMAGE": 39}


SPECIALS_OF = {"<|AUDIO|>": {"<|im_start|>": 1, "<img>": 3, "</img>": 8, "<|im_end|>": 10, "IMAGE": 39}}


def specials_of(image):
    return SPECIALS_OF.get(image, SPECIALS)


def tokenizer(image, **named):
    specials = {image if token == "IMAGE" else token: number for token, number in specials_of(image).items()}
    others = (number for number in range(39) if number not in specials.values())
    inner = Tokenizer(models.BPE(vocab={letter: next(others) for letter in LETTERS} | specials, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*specials, *(named[key] for key in named if key == "video_token")])
    assert inner.token_to_id(image) == 39
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", extra_special_tokens=named)


def processor_of(family):
    if family == "internvl":
        images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=3)
        tok = tokenizer("<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
                        video_token="<video>")
        return transformers.InternVLProcessor(images, tok, None, image_seq_length=4)
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        tok = tokenizer("<image_soft_token>", image_token="<image_soft_token>", boi_token="<img>", eoi_token="</img>")
        return transformers.Gemma3Processor(images, tok, image_seq_length=4)
    if family in OWN_SIZES:
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=1024)
        cls = transformers.Qwen2VLProcessor if family == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
        return cls(images, tokenizer("<|image_pad|>", image_token="<|image_pad|>"), None)
    if family == "qwen2_audio":
        return transformers.Qwen2AudioProcessor(transformers.WhisperFeatureExtractor(feature_size=80), tokenizer("<|AUDIO|>"))
    tok = tokenizer("<image>", image_token="<image>")
    more = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    if family == "llava":
        return transformers.LlavaProcessor(CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size=12), tok, **more)
    points = json.loads((HERE / family / "config.json").read_text())["image_grid_pinpoints"]
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 12}, crop_size=12, image_grid_pinpoints=points)
    return transformers.LlavaNextProcessor(images, tok, **more)


def write_sounds():
    """Of 2, 3 and 25 tokens; integers of 16 bits."""
    SOUNDS.mkdir(exist_ok=True)
    for name, length, step in (("short.wav", 1200, 1100), ("odd.wav", 2000, 1700), ("low.wav", 16000, 400)):
        t = np.arange(length, dtype=np.int64)
        samples = (np.abs((step * t + t * t // 9) % 65536 - 32768) - 16384).astype("<i2")
        with wave.open(str(SOUNDS / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())


def read_sound(path):
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768


def template(image, kind="image"):
    return ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == '" + kind + "' %}" + image +
            "\n{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% endif %}")


def drawn(height, width):
    """A PNG file of few bytes, no two parts of which are alike."""
    image = Image.new("RGB", (width, height))
    image.putdata([(255 * y // height, 255 * x // width, (37 * (8 * y // height) + 91 * (8 * x // width)) % 256)
                   for y in range(height) for x in range(width)])
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


class Family:
    def __init__(self, name):
        self.name = name
        self.processor = processor_of(name)
        self.image = PLACEHOLDERS.get(name, "<image>")
        self.hears = name == "qwen2_audio"
        self.kind = "audio" if self.hears else "image"
        cls = transformers.Qwen2AudioForConditionalGeneration if self.hears else transformers.AutoModelForImageTextToText
        self.model = cls.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager").eval()

    def greedy(self, text, files):
        """The prompt's ids and 64 tokens; None if a choice is close, or they end or are too few."""
        if self.hears:
            given = self.processor(text=[text], audio=[read_sound(SOUNDS / file) for file in files], sampling_rate=16000, return_tensors="pt")
        else:
            images = [load_image(str(MEDIA / file)) if isinstance(file, str) else Image.open(io.BytesIO(file)) for file in files]
            given = self.processor(text=[text], images=images, return_tensors="pt")
        with torch.no_grad():
            out = self.model.generate(**given, max_new_tokens=64, do_sample=False, eos_token_id=None, output_logits=True,
                                      return_dict_in_generate=True)
        margin = min(float(two[0] - two[1]) for two in (step[0].topk(2).values for step in out.logits))
        prompt = given["input_ids"][0].tolist()
        tokens = out.sequences[0, len(prompt):].tolist()
        if margin < 1e-3 or set(tokens) & set(specials_of(self.image).values()) or len(set(tokens)) < 3:
            return None
        return {"prompt_tokens": prompt, "tokens": tokens, "margin": margin}

    def logits_behind(self, text, files):
        """The prompt's ids, and by its place the logits of the first token behind each image."""
        given = self.processor(text=[text], images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
        with torch.no_grad():
            logits = self.model(**given).logits[0]
        image = given["input_ids"][0] == self.processor.tokenizer.convert_tokens_to_ids(self.image)
        places = [i for i in range(1, len(image)) if image[i - 1] and not image[i]]
        return {"prompt_tokens": given["input_ids"][0].tolist(), "logits": {i: [float(f"{x:.7g}") for x in logits[i].tolist()] for i in places}}

    def first_of(self, make):
        """The first of the texts, numbered, that will do."""
        for number in range(100000):
            word = "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=6))
            text, files = make(word)
            if found := self.greedy(text, files):
                return {"word": word} | found
        raise RuntimeError("no text will do")

    def chat(self, messages):
        text = self.processor.apply_chat_template(messages, chat_template=template(self.image, self.kind), tokenize=False, add_generation_prompt=True)
        return text

    def turns(self, files):
        """A conversation in which each turn brings an image."""
        messages, out = [], []
        for file in files:
            def ask(word):
                return {"role": "user", "content": [{"type": self.kind}, {"type": "text", "text": f"what is {word}?"}]}
            found = self.first_of(lambda word: (self.chat([*messages, ask(word)]), [*files[:len(out)], file]))
            said = self.processor.tokenizer.decode(found["tokens"], clean_up_tokenization_spaces=False)
            messages += [ask(found["word"]), {"role": "assistant", "content": [{"type": "text", "text": said}]}]
            out.append({"file": file, "text": f"what is {found['word']}?", "said": said} | found)
        return out

    def facts(self):
        def one(word):
            return f"{self.image}\na {word}", ["odd.wav"] if self.hears else ["1_img1.jpg"]

        def two(word):
            return f"is {self.image} {word}, or {self.image}?", ["low.wav", "short.wav"] if self.hears else ["0_img1.png", "4_img1.webp"]

        processor = self.processor.feature_extractor if self.hears else self.processor.image_processor
        given = {k: v for k, v in processor.to_dict().items() if v is not None and k != "mel_filters"}
        if not self.hears:
            given["image_processor_type"] = type(processor).__name__.removesuffix("Pil")
        texts = []
        for make in (one, two):
            found = self.first_of(make)
            text, files = make(found["word"])
            texts.append({"text": text, "files": files} | found)
        facts = {"family": self.name, "config": CONFIGS.get(self.name, {}), "processor": given, "template": template(self.image, self.kind),
                 "tokenizer": json.loads(self.processor.tokenizer.backend_tokenizer.to_str()), "texts": texts,
                 "turns": self.turns(["short.wav", "odd.wav"] if self.hears else ["1_img1.jpg", "3_img1.png"])}
        odd = {}
        if not self.hears:
            files = [drawn(*size) for size in (ODD_SIZES[:5] if self.name in OWN_SIZES else ODD_SIZES)]
            if points := ODD_POINTS.get(self.name):
                self.processor.image_processor.image_grid_pinpoints = self.model.config.image_grid_pinpoints = points

            def many(word):  # ends with text: behind an image its cache goes on elsewhere than without one
                return f"{self.image} {word} " * len(files), files

            odd = self.first_of(many) if self.name in OWN_SIZES else {"word": "abc"}
            text = many(odd["word"])[0]
            odd = {"odd": odd | self.logits_behind(text, files) | {"text": text} | ({"points": points} if points else {})}
        more = odd | ({"kind": "audio", "media": "sounds"} if self.hears else {})
        return more | facts


if __name__ == "__main__":
    write_sounds()
    (HERE / "odd_images.json").write_text(json.dumps([base64.b64encode(drawn(*size)).decode() for size in ODD_SIZES], separators=(",", ":")) + "\n")
    path = HERE / "generations.json"
    kept = {row["family"]: row for row in json.loads(path.read_text())}
    rows = [Family(name).facts() if not sys.argv[1:] or name in sys.argv[1:] else kept[name] for name in FAMILIES]
    path.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
    for row in rows:
        print(row["family"], [case["margin"] for case in (*row["texts"], *row["turns"])], [case["word"] for case in (*row["texts"], *row["turns"])])
