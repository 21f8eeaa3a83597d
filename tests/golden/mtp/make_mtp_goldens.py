"""Writes the goldens of multi-token prediction: weights, losses and every gradient of tiny models.

The reference is plain PyTorch autograd in fp64, written from DeepSeek-AI 2024 (arXiv:2412.19437) section 2.2; columns are shifted
as Megatron-LM's roll_tensor does, one token at a time within each document.

Made with torch 2.11.0, safetensors. Run: python make_mtp_goldens.py
"""
import json
import math
import os
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "gpt"))
import make_goldens as g  # noqa: E402

SMALL = {"num_layers": 1, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3, "mtp_use_repeated_layer": False}
CASES = {
    "learned_tied": ({**SMALL}, None),
    "rope_repeated_documents": ({**g.LLAMA, **SMALL, "mtp_use_repeated_layer": True}, [0, 5, 6]),
}


def roll(x, starts):
    """One token to the left inside of each document, zero at its end (Megatron's roll_tensor)."""
    x = x.clone()
    for begin, end in zip(starts, starts[1:] + [x.shape[1]]):
        x[:, begin:end] = torch.roll(x[:, begin:end], shifts=-1, dims=1)
        x[:, end - 1] = 0
    return x


def decoder_layer(p, q, x, hidden, c):
    b, s, _ = x.shape
    n, k, d = c["num_attention_heads"], c["num_query_groups"], c["kv_channels"]
    r = n // k
    get = lambda name: p.get(q + name)
    y = g.norm(x, get("self_attention.linear_qkv.layer_norm_weight"), get("self_attention.linear_qkv.layer_norm_bias"), c)
    qkv = F.linear(y, get("self_attention.linear_qkv.weight"), get("self_attention.linear_qkv.bias")).view(b, s, k, r + 2, d)
    query, key, value = qkv[..., :r, :].reshape(b, s, n, d), qkv[..., r, :], qkv[..., r + 1, :]
    if c["position"] == "rope":
        query, key = g.rotary(query, c), g.rotary(key, c)
    key, value = key.repeat_interleave(r, 2), value.repeat_interleave(r, 2)
    prob = (torch.einsum("bind,bjnd->bnij", query, key) / math.sqrt(d)).masked_fill(hidden, float("-inf")).softmax(-1)
    y = torch.einsum("bnij,bjnd->bind", prob, value).reshape(b, s, n * d)
    x = x + F.linear(y, get("self_attention.linear_proj.weight"), get("self_attention.linear_proj.bias"))
    y = g.norm(x, get("mlp.linear_fc1.layer_norm_weight"), get("mlp.linear_fc1.layer_norm_bias"), c)
    y = g.activation(F.linear(y, get("mlp.linear_fc1.weight"), get("mlp.linear_fc1.bias")), c)
    return x + F.linear(y, get("mlp.linear_fc2.weight"), get("mlp.linear_fc2.bias"))


def embed(p, tokens, positions, c):
    x = p["embedding.word_embeddings.weight"][tokens]
    return x + p["embedding.position_embeddings.weight"][positions] if c["position"] == "learned" else x


def losses(p, batch, starts, c):
    """The main loss and those of each depth: (sum of trained terms, sum over the mask, weight, labels with the largest logit)."""
    tokens, labels, mask = batch
    b, s = tokens.shape
    document = torch.bucketize(torch.arange(s), torch.tensor(starts), right=True)
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    hidden = (j > i) | (document[:, None] != document[None])
    normed = lambda x, name: g.norm(x, p[name + ".weight"], p.get(name + ".bias"), c)
    head = p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"]

    def cross_entropy(x, labels):
        logits = F.linear(x, head)
        return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0], logits.argmax(-1) == labels

    positions = torch.arange(s)[None].expand(b, s)
    x = embed(p, tokens, positions, c)
    for layer in range(c["num_layers"]):
        x = decoder_layer(p, f"decoder.layers.{layer}.", x, hidden, c)
    x = normed(x, "decoder.final_layernorm")
    ce, _ = cross_entropy(x, labels)
    weight = mask.sum(1)
    out, depths = (ce * mask).sum(), c["mtp_num_layers"]
    rows = []
    for depth in range(depths):
        tokens, labels, positions, mask = (roll(t, starts) for t in (tokens, labels, positions, mask))
        q = f"mtp.layers.{0 if c['mtp_use_repeated_layer'] else depth}."
        both = torch.cat((normed(embed(p, tokens, positions, c), q + "enorm"), normed(x, q + "hnorm")), -1)
        x = decoder_layer(p, q + "transformer_layer.", F.linear(both, p[q + "eh_proj.weight"]), hidden, c)
        x = normed(x, q + "final_layernorm")
        ce, hits = cross_entropy(x, labels)
        ratio = (weight / mask.sum(1))[:, None]
        rows.append([c["mtp_loss_scaling_factor"] / depths * (ratio * mask * ce).sum(), (mask * ce).sum(), mask.sum(),
                     (mask * hits).sum()])
    return out, rows


def shapes(c):
    out = g.shapes(c)
    h = c["hidden_size"]
    head = out.pop("output_layer.weight", None)
    layer = {k[len("decoder.layers.0."):]: v for k, v in out.items() if k.startswith("decoder.layers.0.")}
    kinds = ("weight", "bias") if c["norm"] == "LayerNorm" else ("weight",)
    for depth in range(1 if c["mtp_use_repeated_layer"] else c["mtp_num_layers"]):
        q = f"mtp.layers.{depth}."
        out.update({f"{q}{name}.{kind}": (h,) for name in ("enorm", "hnorm", "final_layernorm") for kind in kinds})
        out[q + "eh_proj.weight"] = (h, 2 * h)
        out.update({q + "transformer_layer." + k: v for k, v in layer.items()})
    if head:
        out["output_layer.weight"] = head
    return out


def make_parameters(c, seed):
    gen = torch.Generator().manual_seed(seed)
    p = {}
    for name, shape in shapes(c).items():
        x = torch.randn(shape, generator=gen, dtype=torch.float32)
        p[name] = (x * 0.2 + 1.0 if "norm" in name and "weight" in name else x * 0.3).double().requires_grad_()
    return p


def main():
    for seed, (name, (change, starts)) in enumerate(CASES.items()):
        c = {**g.BASE, **change}
        p = make_parameters(c, seed + 1)
        tokens, labels, mask = g.make_batch(c)
        mask[1, 6:9] = 0.0  # sequences of different weight
        main_sum, rows = losses(p, (tokens, labels, mask), starts or [0], c)
        (main_sum + sum(row[0] for row in rows)).backward()
        tensors = {"weight/" + k: v.detach().float().contiguous() for k, v in p.items()}
        tensors.update({"grad/" + k: v.grad.contiguous() for k, v in p.items()})
        tensors.update({"loss": main_sum.detach().reshape(1), "depths": torch.tensor([[float(v) for v in row] for row in rows],
                                                                                     dtype=torch.float64),
                        "tokens": tokens.contiguous(), "labels": labels.contiguous(), "loss_mask": mask.float().contiguous()})
        if starts:
            document = torch.bucketize(torch.arange(c["seq_length"]), torch.tensor(starts), right=True) - 1
            tensors["document_ids"] = document[None].expand(2, -1).contiguous()
        save_file(tensors, os.path.join(HERE, name + ".safetensors"), metadata={"config": json.dumps(c)})


if __name__ == "__main__":
    main()
