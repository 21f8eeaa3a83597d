"""Writes goldens for bf16 on a GPU: weights (rounded to bf16), fp64 logits, loss and gradients of a mid-sized model, and the
relative error that PyTorch itself makes in bf16 on the same GPU. Run on the machine with the GPU: python make_bf16_golden.py DIR
"""
import json
import math
import os
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_goldens as g  # noqa: E402

SIZE = dict(num_layers=4, hidden_size=512, ffn_hidden_size=1408, num_attention_heads=8, num_query_groups=8, kv_channels=64,
            seq_length=256, vocab_size=1000, padded_vocab_size=1024)
CASES = {"bf16_gpt2": {}, "bf16_llama": {**g.LLAMA, "kv_channels": 64, "num_query_groups": 4}}


def forward_bf16(p, tokens, c):
    """As a PyTorch user writes it: fused attention, norms of torch.nn.functional."""
    b, s = tokens.shape
    n, q, d = c["num_attention_heads"], c["num_query_groups"], c["kv_channels"]
    r = n // q

    def norm(x, name):
        w, bias = p[name + "weight"], p.get(name + "bias")
        return F.layer_norm(x, x.shape[-1:], w, bias, c["eps"]) if c["norm"] == "LayerNorm" else F.rms_norm(x, x.shape[-1:], w, c["eps"])

    x = F.embedding(tokens, p["embedding.word_embeddings.weight"])
    if c["position"] == "learned":
        x = x + p["embedding.position_embeddings.weight"][:s]
    for layer in range(c["num_layers"]):
        at = f"decoder.layers.{layer}."
        lin = lambda y, name: F.linear(y, p[at + name + ".weight"], p.get(at + name + ".bias"))
        qkv = lin(norm(x, at + "self_attention.linear_qkv.layer_norm_"), "self_attention.linear_qkv").view(b, s, q, r + 2, d)
        query, key, value = qkv[..., :r, :].reshape(b, s, n, d), qkv[..., r, :], qkv[..., r + 1, :]
        if c["position"] == "rope":
            query, key = g.rotary(query.float(), c).to(x.dtype), g.rotary(key.float(), c).to(x.dtype)
        y = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True,
                                           scale=1 / math.sqrt(d), enable_gqa=q != n)
        x = x + lin(y.transpose(1, 2).reshape(b, s, n * d), "self_attention.linear_proj")
        y = lin(norm(x, at + "mlp.linear_fc1.layer_norm_"), "mlp.linear_fc1")
        x = x + lin(g.activation(y, c), "mlp.linear_fc2")
    x = norm(x, "decoder.final_layernorm.")
    return F.linear(x, p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"])


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).reshape(1)


def main(folder):
    os.makedirs(folder, exist_ok=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for seed, (name, change) in enumerate(CASES.items()):
        c = {**g.BASE, **change, **SIZE, **{k: v for k, v in change.items() if k in ("kv_channels", "num_query_groups")}}
        p = {}
        for key, value in g.make_parameters(c, seed + 50).items():
            scale = 1.0 if value.dim() == 1 else 0.05 / 0.3
            p[key] = (value.detach() * scale).to(torch.bfloat16).double().cuda().requires_grad_()
        tokens, labels, mask = (t.cuda() for t in g.make_batch(c, batch=4))
        with torch.device("cuda"):
            logits, total, weight = g.loss_pair(p, (tokens, labels, mask), c)
        total.backward()
        half = {k: v.detach().to(torch.bfloat16).requires_grad_() for k, v in p.items()}
        with torch.device("cuda"):
            out = forward_bf16(half, tokens, c)
        lse = out.float().logsumexp(-1)
        loss = ((lse - out.float().gather(-1, labels[..., None])[..., 0]) * mask.float()).sum()
        loss.backward()
        tensors = {"weight/" + k: v.detach().to(torch.bfloat16) for k, v in p.items()}
        tensors.update({"grad/" + k: v.grad for k, v in p.items()})
        tensors.update({"logits": logits.detach(), "loss": total.detach().reshape(1), "loss_weight": weight.reshape(1),
                        "tokens": tokens, "labels": labels, "loss_mask": mask.float(),
                        "torch_error/logits": error(out.detach(), logits.detach()),
                        # one number may be right by chance: never less than half a bf16 rounding over the tokens
                        "torch_error/loss": error(loss.detach().reshape(1), total.detach().reshape(1)).clamp_min(2.0 ** -9 / 32)})
        tensors.update({"torch_error/grad/" + k: error(half[k].grad, v.grad) for k, v in p.items()})
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, os.path.join(folder, name + ".safetensors"),
                  metadata={"config": json.dumps(c)})


if __name__ == "__main__":
    main(sys.argv[1])
