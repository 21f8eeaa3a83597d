#!/usr/bin/env python3
"""Writes tokenizer/ (a small tokenizer with the marks of ChatML and that template) and prompts.jsonl: the ids that `transformers`
gives conversations which a model is to go on with.

Ran with transformers 5.23.0, tokenizers 0.23.3:
    python tests/golden/chat/make_prompts.py
"""
import json
import pathlib
import shutil

import tokenizers
import transformers

HERE = pathlib.Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def message(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = [
    [message("user", "Hello")],
    [message("system", "You are terse."), message("user", "Why?")],
    [message("user", "Hello"), message("assistant", "Hi there."), message("user", "na\u00efve \u65e5\u672c\u8a9e \U0001f389\n\n  12345")],
    [message("system", ""), message("user", " padded "), message("assistant", ""), message("user", "<|im_end|> spelled by a user")],
    [message("user", "a"), message("user", "b")],
]


def main():
    definition = json.loads((HERE / "../tokenizers/qwen2.json").read_text())
    first = len(definition["model"]["vocab"])
    definition["added_tokens"] = [
        {"id": first + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(SPECIAL)]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(definition)), eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (HERE / "templates/chatml.jinja").read_text()
    shutil.rmtree(HERE / "tokenizer", ignore_errors=True)
    tokenizer.save_pretrained(HERE / "tokenizer")
    rows = []
    for messages in CONVERSATIONS:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        rows.append({"messages": messages, "ids": ids})
    (HERE / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
