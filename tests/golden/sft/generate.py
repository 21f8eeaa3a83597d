"""Writes conversations.jsonl and golden.safetensors: the summed loss of what the assistant wrote, and its gradients, of the
tiny Llama in ../hf/llama2, computed by transformers one conversation at a time, without packing.

Tokens are decimal numbers in the text (NullTokenizer). The mask comes from the {% generation %} spans of transformers.
Gradients packed (../packed_gradients.py); fp64, eager attention.
Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python generate.py
"""
import json
import os
import re
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import chat_template_utils

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

MAX_TOKENS = 25  # of a conversation: sequences of 24 and a label


def text(random, low, high):
    return " ".join(str(int(i)) for i in torch.randint(7, 40, (int(torch.randint(low, high, (1,), generator=random)),),
                                                       generator=random))


def conversations():
    random = torch.Generator().manual_seed(5)
    for i in range(14):
        messages = [{"role": "system", "content": text(random, 1, 4)}] if i % 4 == 1 else []
        for _ in range(1 + i % 3):
            messages.append({"role": "user", "content": text(random, 1, 5)})
            messages.append({"role": "assistant", "content": text(random, 1, 6)})
        if i % 2 == 0:
            yield {"messages": messages}
        else:
            names = {"system": "system", "user": "human", "assistant": "gpt"}
            yield {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}


def main():
    template = chat_template_utils._compile_jinja_template(open(os.path.join(HERE, "template.jinja")).read())
    model = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, "..", "hf", "llama2"), dtype=torch.float64,
                                                 attn_implementation="eager")
    rows, total, count = list(conversations()), 0.0, 0
    for row in rows:
        back = {"human": "user", "gpt": "assistant", "system": "system"}
        messages = row.get("messages") or [{"role": back[m["from"]], "content": m["value"]} for m in row["conversations"]]
        rendered, spans = chat_template_utils._render_with_assistant_indices(template, messages, None, None, False)
        words = list(re.finditer(r"\d+", rendered))[:MAX_TOKENS]
        ids = torch.tensor([[int(w.group()) for w in words]])
        counts = torch.tensor([[any(a <= w.start() < b for a, b in spans) for w in words]])
        labels = torch.where(counts, ids, -100)[:, 1:]
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        total += loss.item()
        count += int((labels != -100).sum())
    out = {"grad/" + name: parameter.grad.flatten() for name, parameter in model.named_parameters()}
    out["loss"] = torch.tensor([total], dtype=torch.float64)
    out["counted"] = torch.tensor([count])
    save_file(packed(out), os.path.join(HERE, "golden.safetensors"))
    with open(os.path.join(HERE, "conversations.jsonl"), "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{len(rows)} conversations, {count} tokens count, loss {total / count:.6f}")


if __name__ == "__main__":
    main()
