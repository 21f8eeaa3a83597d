"""Writes golden.safetensors: direct preference optimisation of the tiny Llama of tests/golden/hf/llama2 as PyTorch computes it,
the loss written out as in trl (DPOTrainer, loss_type "sigmoid"), with the label smoothing of conservative DPO (Mitchell 2023):

  tokens, labels [6, s], loss_mask   three pairs, preferred and rejected one after the other; responses of different lengths
  full/...                           reference: the model; trained: the model with all weights times 1.1
  lora/...                           reference: the model; trained: with the adapters of tests/golden/lora/llama_all
    log_probs, reference [6]         of the responses, fp64
    losses [3], metrics [4]          fp64; metrics: sums of rewards of preferred and rejected, margins, accuracies
    grad/<name> [elements, 3]        of the sum of the losses, packed (../packed_gradients.py)

beta 0.3, label smoothing 0.1. All in fp64 with eager attention.
Made with peft 0.21.2, transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_dpo_golden.py
"""
import os
import sys

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

BASE = os.path.join(HERE, "..", "hf", "llama2")
ADAPTER = os.path.join(HERE, "..", "lora", "llama_all")
BETA, SMOOTHING, LENGTH, VOCAB = 0.3, 0.1, 16, 40
# Tokens of prompt, preferred and rejected response.
PAIRS = [(4, 6, 9), (7, 10, 3), (2, 1, 5)]


def batch():
    gen = torch.Generator().manual_seed(3)
    tokens, labels, mask = (torch.zeros(2 * len(PAIRS), LENGTH, dtype=torch.long) for _ in range(3))
    for i, (prompt_length, *responses) in enumerate(PAIRS):
        prompt = torch.randint(3, VOCAB, (prompt_length,), generator=gen)
        for j, length in enumerate(responses):
            text = torch.cat([prompt, torch.randint(3, VOCAB, (length,), generator=gen)])
            row = 2 * i + j
            tokens[row, :min(LENGTH, len(text))] = text[:LENGTH]
            labels[row, :len(text) - 1] = text[1:]
            mask[row, prompt_length - 1:len(text) - 1] = 1
    return tokens, labels, mask


def log_probs(model, tokens, labels, mask):
    logits = model(tokens).logits
    return (torch.gather(logits.log_softmax(-1), 2, labels[..., None]).squeeze(-1) * mask).sum(-1)


def dpo(log_probs, reference):
    """trl.DPOTrainer.dpo_loss"""
    chosen_logratios = log_probs[0::2] - reference[0::2]
    rejected_logratios = log_probs[1::2] - reference[1::2]
    delta_score = chosen_logratios - rejected_logratios
    losses = -F.logsigmoid(BETA * delta_score) * (1 - SMOOTHING) - F.logsigmoid(-BETA * delta_score) * SMOOTHING
    chosen, rejected = BETA * chosen_logratios.detach(), BETA * rejected_logratios.detach()
    metrics = torch.stack([chosen.sum(), rejected.sum(), (chosen - rejected).sum(), (chosen > rejected).double().sum()])
    return losses, metrics


def load():
    return AutoModelForCausalLM.from_pretrained(BASE, attn_implementation="eager", dtype=torch.float32).double().eval()


def run(kind, out, data):
    with torch.no_grad():
        reference = log_probs(load(), *data)
    model = load()
    if kind == "lora":
        model = PeftModel.from_pretrained(model, ADAPTER, is_trainable=True).double().eval()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    trained = log_probs(model, *data)
    losses, metrics = dpo(trained, reference)
    losses.sum().backward()
    for name, value in dict(log_probs=trained, reference=reference, losses=losses, metrics=metrics).items():
        out[f"{kind}/{name}"] = value.detach()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            out[f"{kind}/grad/{name.replace('.default.', '.')}"] = parameter.grad.flatten()
    print(kind, "losses", losses.tolist(), "metrics", metrics.tolist())


if __name__ == "__main__":
    data = batch()
    out = dict(zip(("tokens", "labels", "loss_mask"), (x.to(torch.int32) for x in data)))
    for kind in ("full", "lora"):
        run(kind, out, data)
    save_file({name: tensor.contiguous() for name, tensor in packed(out).items()}, os.path.join(HERE, "golden.safetensors"))
