"""Fifty optimizer steps by PyTorch, for tests/unit/optimizer/golden_test.cc.

Made with torch 2.11.0 (CPU), Python 3.11:
    python tests/golden/optimizer/make_optimizer_golden.py > tests/golden/optimizer/optimizer_golden.json

Everything is fp64. Parameters and gradients follow formulas that the test repeats:
    start:    p[i] = cos(0.37 i + k)                                      k: number of the parameter
    gradient: g[i] = a(t) sin(0.7 i + 1.3 t + k) + 0.1 p[i]               t: step from 0; a(t) = 0.02 + 0.4 * (t mod 5 == 3)
so that some steps are clipped and errors feed back into later gradients.
"""

import json
import math

import torch

PARAMETERS = [  # name, shape, decays, has its own learning rate
    ("embedding.word_embeddings.weight", (7, 4), True, True),
    ("decoder.layers.0.mlp.linear_fc1.weight", (5, 4), True, False),
    ("decoder.layers.0.mlp.linear_fc1.bias", (5,), False, False),
    ("decoder.final_layernorm.weight", (4,), False, False),
]
STEPS, SAMPLES = 50, 8
WARMUP, DECAY = 5 * SAMPLES, 45 * SAMPLES
MAX_LR, MIN_LR, DECOUPLED_LR, DECOUPLED_MIN_LR = 3e-2, 3e-3, 1e-2, 1e-3
START_WD, END_WD, CLIP = 0.05, 0.2, 1.0


def learning_rate(n, high, low):
    if n <= WARMUP:
        return high * n / WARMUP
    if n > DECAY:
        return low
    return low + 0.5 * (math.cos(math.pi * (n - WARMUP) / (DECAY - WARMUP)) + 1.0) * (high - low)


def weight_decay(n):
    total = STEPS * SAMPLES
    return END_WD if n > total else START_WD + n / total * (END_WD - START_WD)


def run(kind):
    tensors, groups = [], []
    for k, (_, shape, decays, decoupled) in enumerate(PARAMETERS):
        numel = math.prod(shape)
        p = torch.cos(0.37 * torch.arange(numel, dtype=torch.float64) + k).view(shape).requires_grad_()
        tensors.append(p)
        groups.append({"params": [p], "decays": decays, "decoupled": decoupled})
    if kind == "adam":
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    norms, rates = [], []
    for t in range(STEPS):
        n = t * SAMPLES
        amplitude = 0.02 + (0.4 if t % 5 == 3 else 0.0)
        for k, p in enumerate(tensors):
            i = torch.arange(p.numel(), dtype=torch.float64)
            p.grad = (amplitude * torch.sin(0.7 * i + 1.3 * t + k)).view(p.shape) + 0.1 * p.detach()
        for group in optimizer.param_groups:
            high, low = (DECOUPLED_LR, DECOUPLED_MIN_LR) if group["decoupled"] else (MAX_LR, MIN_LR)
            group["lr"] = learning_rate(n, high, low)
            group["weight_decay"] = weight_decay(n) if group["decays"] else 0.0
        norms.append(torch.nn.utils.clip_grad_norm_(tensors, CLIP).item())
        rates.append(learning_rate(n, MAX_LR, MIN_LR))
        optimizer.step()
    return {
        "grad_norm": norms,
        "lr": rates,
        "parameters": {name: p.detach().flatten().tolist() for (name, *_), p in zip(PARAMETERS, tensors)},
    }


print(json.dumps({"torch": torch.__version__, "adam": run("adam"), "sgd": run("sgd")}))
