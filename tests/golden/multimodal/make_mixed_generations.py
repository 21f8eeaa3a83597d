#!/usr/bin/env python3
"""Writes image_and_sound/generations.json: greedy tokens of the model of make_audio_goldens.py's mixed(), parts of the goldens llava and qwen2_audio that
PyTorch joins, behind texts with files of images and sounds and in a conversation with both in each turn, 64 without a cache; of the texts also logits
behind media. The tokenizer is qwen2_audio's with <image> at 38; files are read by the processors of make_generations.py, and a text is changed until
no choice is close and no special token chosen. Versions as there. Run: python make_mixed_generations.py
"""
import functools
import json
import random

import make_generations
import torch
import transformers
from make_generations import HERE, MEDIA, SOUNDS, processor_of, read_sound, specials_of
from transformers.image_utils import load_image

IMAGE, SOUND = 38, 39
make_generations.SPECIALS_OF["<|AUDIO|>"] = {"<|im_start|>": 1, "<img>": 3, "<|im_end|>": 10, "<image>": IMAGE, "IMAGE": SOUND}
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
            "{% elif c['type'] == 'audio' %}<|AUDIO|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LOAD = dict(dtype=torch.float32, attn_implementation="eager")
audio = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(HERE / "qwen2_audio", **LOAD).eval()
image = transformers.LlavaForConditionalGeneration.from_pretrained(HERE / "llava", **LOAD).eval()
processor = processor_of("qwen2_audio")
tokenizer, image_processor = processor.tokenizer, processor_of("llava").image_processor


@functools.cache
def seen(file):
    pixels = image_processor([load_image(str(MEDIA / file))], return_tensors="pt").pixel_values
    return image.model.get_image_features(pixel_values=pixels).pooler_output[0]


@functools.cache
def heard(file):
    out = processor.feature_extractor(read_sound(SOUNDS / file), sampling_rate=16000, return_attention_mask=True, padding="max_length", return_tensors="pt")
    count = (((int(out.attention_mask.sum()) - 1) // 2 + 1) - 2) // 2 + 1
    found = []
    hook = audio.model.multi_modal_projector.register_forward_hook(lambda module, given, result: found.append(result))
    audio.model(input_ids=torch.full((1, count), SOUND), attention_mask=torch.ones(1, count), input_features=out.input_features,
                feature_attention_mask=out.attention_mask)
    hook.remove()
    return found[0][0, :count]


def logits(ids, features):
    tokens = torch.tensor([ids])
    x = audio.model.language_model.embed_tokens(tokens).masked_scatter(((tokens == IMAGE) | (tokens == SOUND))[..., None], features)
    return audio.lm_head(audio.model.language_model(inputs_embeds=x).last_hidden_state)[0]


@torch.no_grad()
def greedy(text, files):
    """The prompt's ids, 64 tokens, and logits by place; None: the text will not do."""
    left = {SOUND: iter([heard(file) for file in files if file.endswith(".wav")]), IMAGE: iter([seen(file) for file in files if not file.endswith(".wav")])}
    ids, features = [], []
    for token in tokenizer(text).input_ids:
        features += [next(left[token])] if token in left else []
        ids += [token] * (len(features[-1]) if token in left else 1)
    count, features = len(ids), torch.cat(features)
    first = logits(ids, features)
    for _ in range(64):
        best = logits(ids, features)[-1].topk(2)
        if best.values[0] - best.values[1] < 1e-3 or int(best.indices[0]) in specials_of("<|AUDIO|>").values():
            return None
        ids.append(int(best.indices[0]))
    behind = [i for i in range(1, count) if ids[i - 1] in left and ids[i] not in left][-2:]
    kept = {i: [float(f"{x:.6g}") for x in first[i].tolist()] for i in behind}
    return {"prompt_tokens": ids[:count], "tokens": ids[count:], "logits": kept} if len(set(ids[count:])) > 2 else None


def first_of(make):
    words = ("".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=5)) for number in range(100000))
    return next(found | {"word": word} for word in words if (found := greedy(*make(word))))


def texts():
    for text, files in (("<image>\na {} <|AUDIO|>?", ["1_img1.jpg", "odd.wav"]),
                        ("is <|AUDIO|> {}, or <image>? <image><|AUDIO|>.", ["low.wav", "0_img1.png", "4_img1.webp", "short.wav"])):
        found = first_of(lambda word: (text.format(word), files))
        yield {"text": text.format(found.pop("word")), "files": files} | found


def turns():
    messages, given = [], []
    for files in (["short.wav", "1_img1.jpg"], ["3_img1.png", "odd.wav"]):
        def asked(word):
            content = [{"type": "audio" if file.endswith(".wav") else "image"} for file in files]
            return [*messages, {"role": "user", "content": [*content, {"type": "text", "text": f"what is {word}?"}]}]
        given = [*given, *files]
        found = first_of(lambda word: (tokenizer.apply_chat_template(asked(word), chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True), given))
        said = tokenizer.decode(found["tokens"], clean_up_tokenization_spaces=False)
        word = found.pop("word")
        messages = [*asked(word), {"role": "assistant", "content": [{"type": "text", "text": said}]}]
        found.pop("logits")
        yield {"files": files, "text": f"what is {word}?", "said": said} | found


facts = {"template": TEMPLATE, "texts": list(texts()), "turns": list(turns())}
(HERE / "image_and_sound" / "generations.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
print([len(case["prompt_tokens"]) for case in facts["texts"] + facts["turns"]])
