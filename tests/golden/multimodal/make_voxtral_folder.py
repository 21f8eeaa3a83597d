#!/usr/bin/env python3
"""Writes voxtral_folder/: tables.safetensors, random tables of tokens with which the tiny model of voxtral/ has the vocabulary of
tests/golden/tokenizers/tekken.golden.json; and
prompts.json: conversations with sound files as mistral-common writes them for its tekken.json, and the 64 greedy tokens of `transformers` behind them,
with the cache, the second sound in a later turn. A text is changed until no choice of a token is close and no token is a special one.

Made with transformers 5.23.0, torch 2.11.0 (CPU), mistral-common 1.13.1. Run: python make_voxtral_folder.py
"""
import itertools
import json
import pathlib
import random
import sys
import tempfile
import wave

import numpy as np
import torch
import transformers
from mistral_common.tokens.tokenizers.audio import Audio
from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
FOLDER, SOUNDS = HERE / "voxtral_folder", HERE / "sounds"
sys.path.insert(0, str(HERE.parent / "tokenizers"))
import make_tekken  # noqa: E402

AUDIO, SPECIALS, SAMPLES = 24, make_tekken.COUNT, 480000


def tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tekken.json"
        path.write_text(json.dumps(make_tekken.tekken(make_tekken.learnt())))
        return MistralTokenizer.from_file(str(path))


def model(vocabulary):
    """That of voxtral/ with larger tables, which are written."""
    torch.manual_seed(7)
    cls = transformers.VoxtralForConditionalGeneration
    small = cls.from_pretrained(HERE / "voxtral", dtype=torch.float32)
    config = small.config
    config.text_config.vocab_size, config.audio_token_id = vocabulary, AUDIO
    made = cls._from_config(config, attn_implementation="eager").float().eval()
    tables = {f"language_model.{name}.weight": (torch.randn(vocabulary, 16) * 0.3).bfloat16() for name in ("model.embed_tokens", "lm_head")}
    state = {name: value for name, value in small.state_dict().items() if value.shape[0] != 40}
    missing = made.load_state_dict(state, strict=False).missing_keys
    assert len(missing) == 2, missing
    with torch.no_grad():
        made.get_input_embeddings().weight.copy_(tables["language_model.model.embed_tokens.weight"])
        made.get_output_embeddings().weight.copy_(tables["language_model.lm_head.weight"])
    FOLDER.mkdir(exist_ok=True)
    save_file(tables, FOLDER / "tables.safetensors")
    return made


def read_sound(name):
    with wave.open(str(SOUNDS / name), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768


def clips(names):
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    out = []
    for name in names:
        mel = extractor(read_sound(name), sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=SAMPLES, return_tensors="pt").input_features
        out.append(mel.reshape(128, -1, 3000).transpose(0, 1))
    return torch.cat(out)


def request(messages):
    def part(one):
        if one["type"] == "text":
            return TextChunk(text=one["text"])
        return AudioChunk.from_audio(Audio.from_file(str(SOUNDS / one["audio"])))

    return ChatCompletionRequest(messages=[AssistantMessage(content=m["content"]) if m["role"] == "assistant" else
                                           UserMessage(content=[part(one) for one in m["content"]]) for m in messages])


def short(ids):
    """Runs as [id, n]."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(ids)]
    return [item for value, n in runs for item in ([[value, n]] if n > 3 else [value] * n)]


def prompt(made, tokens, messages):
    ids = tokens.encode_chat_completion(request(messages)).tokens
    names = [one["audio"] for m in messages if m["role"] == "user" for one in m["content"] if one["type"] == "audio"]
    given = torch.tensor([ids])
    with torch.no_grad():
        out = made.generate(given, attention_mask=torch.ones_like(given), input_features=clips(names), max_new_tokens=64, do_sample=False,
                            eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    margin = min(float(two[0] - two[1]) for two in (step[0].topk(2).values for step in out.logits))
    new = out.sequences[0, len(ids):].tolist()
    if margin < 1e-3 or min(new) < SPECIALS or len(set(new)) < 5:
        return None
    return {"messages": messages, "ids": short(ids), "tokens": new}


def first(make):
    for number in range(1000):
        if found := make("".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=6))):
            return found
    raise RuntimeError("no text will do")


if __name__ == "__main__":
    tokens = tokenizer()
    made = model(256 + make_tekken.MERGES + SPECIALS)
    def ask(word, name):
        return {"role": "user", "content": [{"type": "audio", "audio": name}, {"type": "text", "text": f"what is {word}?"}]}

    one = first(lambda word: prompt(made, tokens, [ask(word, "odd.wav")]))
    two = first(lambda word: prompt(made, tokens, [*one["messages"], {"role": "assistant", "content": "the end"}, ask(word, "short.wav")]))
    (FOLDER / "prompts.json").write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in (one, two)) + "\n]\n")
