#!/usr/bin/env python3
"""Writes expansions.json and tokenizer/: conversations with media, with the token ids and the mask of the assistant that processors of
transformers give. The tokenizer has bytes and the special tokens of six families; the templates write media as those families do.

Made with transformers 5.23.0, tokenizers 0.23.3, pillow 12.3.0, jinja2 3.1, numpy 2.4 (torch is not needed). Run: python make_expansions.py
"""
import json
import pathlib

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

assert transformers.__version__ == "5.23.0"
# Without torch there are no processors of videos, which two families ask for and nothing here uses.
transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, value: None
HERE = pathlib.Path(__file__).resolve().parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<start_of_image>", "<end_of_image>",
            "<image_soft_token>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_bos|>", "<|AUDIO|>",
            "<|audio_eos|>", "<video>"]


def tokenizer(**named):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "\n\n" is one token, which text before and behind images may or may not become.
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {"\u010a\u010a": len(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u010a", "\u010a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>", extra_special_tokens=named)


def template(image, audio="", images_first=False):
    """ChatML with media as the family writes them."""
    turn = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
            "{% if m['role'] == 'assistant' %}{% generation %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<|im_end|>{% endgeneration %}\n"
            "{% else %}BODY<|im_end|>\n{% endif %}{% endfor %}")
    text = "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    if images_first:
        body = ("{% for c in m['content'] if c['type'] == 'image' %}" + image + "{% endfor %}"
                "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}")
    else:
        body = "{% for c in m['content'] %}{% if c['type'] == 'image' %}" + image + "{% elif c['type'] == 'audio' %}" + audio + text + "{% endfor %}"
    return turn.replace("BODY", body)


def processor_of(family):
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
        tok = tokenizer(image_token="<image>")
        made = transformers.LlavaProcessor(images, tok, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1)
        config = {"model_type": "llava", "image_token_index": tok.convert_tokens_to_ids("<image>"), "vision_feature_select_strategy": "default",
                  "vision_config": {"patch_size": 14}}
        return made, config, template("<image>\n", images_first=True)
    if family == "llava_next":
        points = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
        images = LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=points)
        tok = tokenizer(image_token="<image>")
        made = transformers.LlavaNextProcessor(images, tok, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1)
        config = {"model_type": "llava_next", "image_token_index": tok.convert_tokens_to_ids("<image>"), "image_grid_pinpoints": points,
                  "vision_feature_select_strategy": "default", "vision_config": {"patch_size": 14}}
        return made, config, template("<image>\n")
    if family == "internvl":
        images = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=6)
        tok = tokenizer(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>")
        made = transformers.InternVLProcessor(images, tok, None, image_seq_length=4)
        config = {"model_type": "internvl", "image_token_id": tok.convert_tokens_to_ids("<IMG_CONTEXT>"), "downsample_ratio": 0.5,
                  "vision_config": {"patch_size": [14, 14], "image_size": [56, 56]}}
        return made, config, template("<IMG_CONTEXT>\n")
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, do_pan_and_scan=True, pan_and_scan_min_crop_size=16,
                                         pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2)
        tok = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
        made = transformers.Gemma3Processor(images, tok, image_seq_length=4)
        ids = tok.convert_tokens_to_ids(["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
        config = {"model_type": "gemma3", "image_token_index": ids[0], "boi_token_index": ids[1], "eoi_token_index": ids[2],
                  "mm_tokens_per_image": 4, "vision_config": {"patch_size": 14, "image_size": 56}}
        return made, config, template("<start_of_image>")
    if family == "qwen2_vl":
        images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20})
        tok = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
        made = transformers.Qwen2VLProcessor(images, tok, None)
        config = {"model_type": "qwen2_vl", "image_token_id": tok.convert_tokens_to_ids("<|image_pad|>"), "vision_config": {"patch_size": 14}}
        return made, config, template("<|vision_start|><|image_pad|><|vision_end|>")
    features = transformers.WhisperFeatureExtractor(feature_size=8)
    tok = tokenizer(audio_token="<|AUDIO|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>")
    made = transformers.Qwen2AudioProcessor(features, tok)
    config = {"model_type": "qwen2_audio", "audio_token_index": tok.convert_tokens_to_ids("<|AUDIO|>")}
    return made, config, template("", "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n")


# Turns: a text, or media and texts; a medium is [height, width] or a number of samples.
CASES = [
    [[[30, 40], "What is it?"], ["A thing."]],
    [["See ", [50, 20], "\n", [17, 90], "\n\nWhich?"], ["The first.\n"], ["And ", [33, 33], "?"], ["No \u00e9."]],
    [["No image."], ["None."]],
    [[[1, 1], [100, 100], "twice\n\n"], ["\n\nyes"]],
]
SOUNDS = [
    [[16000, "What is said?"], ["Hello."]],
    [["A ", 480, " and ", 479999, "."], ["Two."], ["Also ", 20123, "?"], ["Three."]],
    [["Nothing."], ["So."]],
]


def case(made, turns, chat):
    messages, media = [], []
    for i, turn in enumerate(turns):
        content = []
        for part in turn:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "image"} if isinstance(part, list) else {"type": "audio"})
                media.append(part)
        messages.append({"role": "user" if i % 2 == 0 else "assistant", "content": content})
    text = made.apply_chat_template(messages, chat_template=chat, tokenize=False)
    mask_text = made.tokenizer.apply_chat_template(messages, chat_template=chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    given = {}
    if media and isinstance(media[0], list):
        given["images"] = [Image.new("RGB", (w, h), (9, 99, 199)) for h, w in media]
    elif media:
        given["audio"] = [np.zeros(n, dtype=np.float32) for n in media]
    if isinstance(made, transformers.Gemma3Processor) and media:  # which turns off what its image processor says
        scan = made.image_processor.to_dict()
        given |= {key: scan[key] for key in scan if "pan_and_scan" in key}
    out = made(text=[text], **given)
    ids = [int(i) for i in out["input_ids"][0]]
    # What the assistant wrote has no media: its tokens are those of the text without them, in order.
    said = [t for t, counts in zip(mask_text["input_ids"], mask_text["assistant_masks"]) if counts]
    return {"messages": messages, "media": media, "ids": runs_of(ids), "said": said}


def runs_of(ids):
    """[id, times] for what repeats more than thrice."""
    out = []
    for i in ids:
        if out and out[-1][0] == i:
            out[-1][1] += 1
        else:
            out.append([i, 1])
    return [i if n == 1 else [i, n] for i, n in out]


def main():
    out = []
    for family in ("llava", "llava_next", "internvl", "gemma3", "qwen2_vl", "qwen2_audio"):
        made, config, chat = processor_of(family)
        images = {} if family == "qwen2_audio" else made.image_processor.to_dict()
        images = {k: v for k, v in images.items() if v is not None}
        if images:
            images["image_processor_type"] = type(made.image_processor).__name__.removesuffix("Pil")
        out.append({"family": family, "config": config, "processor": images, "template": chat,
                    "cases": [case(made, turns, chat) for turns in (SOUNDS if family == "qwen2_audio" else CASES)]})
    (HERE / "expansions.json").write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in out) + "\n]\n")
    tokenizer().save_pretrained(HERE / "tokenizer")
    for extra in ("special_tokens_map.json", "chat_template.jinja"):
        (HERE / "tokenizer" / extra).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
