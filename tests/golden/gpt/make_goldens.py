"""Writes the goldens of the GPT model: weights, logits, loss and every gradient of tiny models, and 50 AdamW steps.

The reference is plain PyTorch autograd in fp64, written here from the papers; where Hugging Face transformers has the same
architecture (GPT-2, Llama), its fp32 logits are compared with ours first, so that the reference itself is checked.

Made with torch 2.11.0, transformers 5 (any recent version serves), safetensors. Run: python make_goldens.py
"""
import json
import math
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
BASE = dict(num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=4, kv_channels=4,
            seq_length=12, vocab_size=29, padded_vocab_size=32, position="learned", norm="LayerNorm", eps=1e-5,
            bias=True, qkv_bias=True, activation="gelu_tanh", tied=True, window=0, qk_norm=False, zero_centered=False,
            rotary_base=10000, rotary_percent=1.0, interleaved=False, interpolation=0, rope_scaling=0.0, z_loss=0.0,
            offset=0.0)
LLAMA = dict(position="rope", norm="RMSNorm", bias=False, qkv_bias=False, activation="swiglu", tied=False,
             num_query_groups=2, kv_channels=8)
CASES = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen_like": {**LLAMA, "num_layers": 1, "qk_norm": True, "qkv_bias": True, "tied": True, "window": 3},
    "neox_like": {"num_layers": 1, "position": "rope", "rotary_percent": 0.5, "activation": "gelu", "tied": False},
    "interleaved": {**LLAMA, "num_layers": 1, "interleaved": True, "interpolation": 2, "activation": "geglu",
                    "zero_centered": True, "num_query_groups": 1},
    "scaled_rope": {**LLAMA, "num_layers": 1, "rope_scaling": 8.0, "rotary_base": 50, "activation": "quick_geglu",
                    "offset": 1.0, "z_loss": 0.01},
    "no_position": {"num_layers": 1, "position": "none", "activation": "squared_relu", "bias": False, "qkv_bias": False},
}


def shapes(c):
    h, d, n, g = c["hidden_size"], c["kv_channels"], c["num_attention_heads"], c["num_query_groups"]
    gated = c["activation"] in ("swiglu", "geglu", "quick_geglu")
    f = c["ffn_hidden_size"]
    out = {"embedding.word_embeddings.weight": (c["vocab_size"], h)}
    if c["position"] == "learned":
        out["embedding.position_embeddings.weight"] = (c["seq_length"], h)
    ln = c["norm"] == "LayerNorm"
    for i in range(c["num_layers"]):
        p = f"decoder.layers.{i}."
        for block, name, rows, cols, norm, bias in (
                ("self_attention", "linear_qkv", (n + 2 * g) * d, h, True, c["qkv_bias"]),
                ("self_attention", "linear_proj", h, n * d, False, c["bias"]),
                ("mlp", "linear_fc1", f * (2 if gated else 1), h, True, c["bias"]),
                ("mlp", "linear_fc2", h, f, False, c["bias"])):
            q = f"{p}{block}.{name}."
            if norm:
                out[q + "layer_norm_weight"] = (h,)
                if ln:
                    out[q + "layer_norm_bias"] = (h,)
            out[q + "weight"] = (rows, cols)
            if bias:
                out[q + "bias"] = (rows,)
        if c["qk_norm"]:
            out[p + "self_attention.q_layernorm.weight"] = (d,)
            out[p + "self_attention.k_layernorm.weight"] = (d,)
    out["decoder.final_layernorm.weight"] = (h,)
    if ln:
        out["decoder.final_layernorm.bias"] = (h,)
    if not c["tied"]:
        out["output_layer.weight"] = (c["vocab_size"], h)
    return out


def norm(x, w, b, c):
    w = w + 1 if c["zero_centered"] else w
    if c["norm"] == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], w, b, c["eps"])
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c["eps"]) * w


def rotary(x, c):  # [b, s, heads, d]
    d = int(c["kv_channels"] * c["rotary_percent"])
    inv = 1.0 / c["rotary_base"] ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    if c["rope_scaling"]:
        low, high, old = 1.0, 4.0, 8192.0
        wave = 2 * math.pi / inv
        smooth = (old / wave - low) / (high - low)
        mixed = (1 - smooth) * inv / c["rope_scaling"] + smooth * inv
        scaled = torch.where(wave > old / low, inv / c["rope_scaling"], inv)
        inv = torch.where((wave <= old / low) & (wave >= old / high), mixed, scaled)
    t = torch.arange(x.shape[1], dtype=x.dtype)
    if c["interpolation"]:
        t = t / c["interpolation"]
    angle = torch.outer(t, inv)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    r, rest = x[..., :d], x[..., d:]
    if c["interleaved"]:
        a, b = r[..., 0::2], r[..., 1::2]
        r = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = r.chunk(2, -1)
        r = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((r, rest), -1)


def activation(x, c):
    kind = c["activation"]
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "squared_relu":
        return F.relu(x) ** 2
    a, b = x.chunk(2, -1)
    if kind == "swiglu":
        return F.silu(a) * b
    if kind == "geglu":
        return F.gelu(a, approximate="tanh") * b
    return a * torch.sigmoid(1.702 * a) * (b + c["offset"])


def forward(p, tokens, c):
    b, s = tokens.shape
    n, g, d = c["num_attention_heads"], c["num_query_groups"], c["kv_channels"]
    r = n // g
    x = p["embedding.word_embeddings.weight"][tokens]
    if c["position"] == "learned":
        x = x + p["embedding.position_embeddings.weight"][:s]
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    hidden = (j > i) | ((i - j > c["window"]) if c["window"] else False)
    for layer in range(c["num_layers"]):
        q = f"decoder.layers.{layer}."
        get = lambda name: p.get(q + name)
        y = norm(x, get("self_attention.linear_qkv.layer_norm_weight"), get("self_attention.linear_qkv.layer_norm_bias"), c)
        qkv = F.linear(y, get("self_attention.linear_qkv.weight"), get("self_attention.linear_qkv.bias")).view(b, s, g, r + 2, d)
        query, key, value = qkv[..., :r, :].reshape(b, s, n, d), qkv[..., r, :], qkv[..., r + 1, :]
        if c["qk_norm"]:
            query = norm(query, get("self_attention.q_layernorm.weight"), None, c)
            key = norm(key, get("self_attention.k_layernorm.weight"), None, c)
        if c["position"] == "rope":
            query, key = rotary(query, c), rotary(key, c)
        key, value = key.repeat_interleave(r, 2), value.repeat_interleave(r, 2)
        score = torch.einsum("bind,bjnd->bnij", query, key) / math.sqrt(d)
        prob = score.masked_fill(hidden, float("-inf")).softmax(-1)
        y = torch.einsum("bnij,bjnd->bind", prob, value).reshape(b, s, n * d)
        x = x + F.linear(y, get("self_attention.linear_proj.weight"), get("self_attention.linear_proj.bias"))
        y = norm(x, get("mlp.linear_fc1.layer_norm_weight"), get("mlp.linear_fc1.layer_norm_bias"), c)
        y = activation(F.linear(y, get("mlp.linear_fc1.weight"), get("mlp.linear_fc1.bias")), c)
        x = x + F.linear(y, get("mlp.linear_fc2.weight"), get("mlp.linear_fc2.bias"))
    x = norm(x, p["decoder.final_layernorm.weight"], p.get("decoder.final_layernorm.bias"), c)
    return F.linear(x, p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"])


def make_parameters(c, seed):
    gen = torch.Generator().manual_seed(seed)
    p = {}
    for name, shape in shapes(c).items():
        x = torch.randn(shape, generator=gen, dtype=torch.float32)
        if "norm" in name and "weight" in name:
            x = x * 0.2 + (0.0 if c["zero_centered"] else 1.0)
        else:
            x = x * 0.3
        p[name] = x.double().requires_grad_()
    return p


def make_batch(c, step=0, batch=2):
    i = torch.arange(batch)[:, None]
    j = torch.arange(c["seq_length"] + 1)[None]
    text = (i * 11 + j * j * 7 + j * 3 + step * 5 + (j * (step + 1)) // 4) % c["vocab_size"]
    mask = torch.ones(batch, c["seq_length"], dtype=torch.float64)
    mask[:, ::5] = 0.0
    return text[:, :-1], text[:, 1:], mask


def loss_pair(p, batch, c):
    tokens, labels, mask = batch
    logits = forward(p, tokens, c)
    lse = logits.logsumexp(-1)
    per_token = lse - logits.gather(-1, labels[..., None])[..., 0] + c["z_loss"] * lse ** 2
    return logits, (per_token * mask).sum(), mask.sum()


def check_against_transformers(name, p, c, tokens):
    import transformers
    n, g, d, h = c["num_attention_heads"], c["num_query_groups"], c["kv_channels"], c["hidden_size"]
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c["vocab_size"], n_positions=c["seq_length"], n_embd=h, n_layer=c["num_layers"], n_head=n,
            n_inner=c["ffn_hidden_size"], attn_implementation="eager")).eval()
        sd = {"transformer.wte.weight": p["embedding.word_embeddings.weight"], "lm_head.weight": p["embedding.word_embeddings.weight"],
              "transformer.wpe.weight": p["embedding.position_embeddings.weight"],
              "transformer.ln_f.weight": p["decoder.final_layernorm.weight"], "transformer.ln_f.bias": p["decoder.final_layernorm.bias"]}
        for i in range(c["num_layers"]):
            ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
            un = lambda t: t.view(n, 3, d, -1).transpose(0, 1).reshape(3 * n * d, -1)
            sd[theirs + "attn.c_attn.weight"] = un(p[ours + "self_attention.linear_qkv.weight"]).t()
            sd[theirs + "attn.c_attn.bias"] = un(p[ours + "self_attention.linear_qkv.bias"])[:, 0]
            for a, b in (("attn.c_proj", "self_attention.linear_proj"), ("mlp.c_fc", "mlp.linear_fc1"), ("mlp.c_proj", "mlp.linear_fc2")):
                sd[theirs + a + ".weight"], sd[theirs + a + ".bias"] = p[ours + b + ".weight"].t(), p[ours + b + ".bias"]
            for a, b in (("ln_1", "self_attention.linear_qkv"), ("ln_2", "mlp.linear_fc1")):
                sd[theirs + a + ".weight"], sd[theirs + a + ".bias"] = p[ours + b + ".layer_norm_weight"], p[ours + b + ".layer_norm_bias"]
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=c["vocab_size"], hidden_size=h, intermediate_size=c["ffn_hidden_size"], num_hidden_layers=c["num_layers"],
            num_attention_heads=n, num_key_value_heads=g, head_dim=d, rms_norm_eps=c["eps"], max_position_embeddings=64,
            tie_word_embeddings=False, attn_implementation="eager")).eval()
        sd = {"model.embed_tokens.weight": p["embedding.word_embeddings.weight"], "model.norm.weight": p["decoder.final_layernorm.weight"],
              "lm_head.weight": p["output_layer.weight"]}
        for i in range(c["num_layers"]):
            ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
            w = p[ours + "self_attention.linear_qkv.weight"].view(g, n // g + 2, d, h)
            sd[theirs + "self_attn.q_proj.weight"] = w[:, :-2].reshape(n * d, h)
            sd[theirs + "self_attn.k_proj.weight"] = w[:, -2].reshape(g * d, h)
            sd[theirs + "self_attn.v_proj.weight"] = w[:, -1].reshape(g * d, h)
            sd[theirs + "self_attn.o_proj.weight"] = p[ours + "self_attention.linear_proj.weight"]
            gate, up = p[ours + "mlp.linear_fc1.weight"].chunk(2)
            sd[theirs + "mlp.gate_proj.weight"], sd[theirs + "mlp.up_proj.weight"] = gate, up
            sd[theirs + "mlp.down_proj.weight"] = p[ours + "mlp.linear_fc2.weight"]
            sd[theirs + "input_layernorm.weight"] = p[ours + "self_attention.linear_qkv.layer_norm_weight"]
            sd[theirs + "post_attention_layernorm.weight"] = p[ours + "mlp.linear_fc1.layer_norm_weight"]
    else:
        return
    missing = model.load_state_dict({k: v.detach().float().contiguous() for k, v in sd.items()}, strict=False)
    assert not missing.unexpected_keys and all(k.endswith((".bias", "inv_freq", ".masked_bias")) for k in missing.missing_keys), missing
    with torch.no_grad():
        theirs = model(tokens).logits
    error = (theirs - forward(p, tokens, c)).abs().max().item()
    print(f"{name}: largest difference from transformers {transformers.__version__}: {error:.2e}")
    assert error < 2e-5, (name, error)


def train(c, steps, dtype):
    """AdamW with clipping at 1, cosine decay from 1e-2 to 1e-3 over the steps, 5 warm-up steps; two micro-batches a step."""
    p = {k: v.detach().to(dtype).requires_grad_() for k, v in make_parameters(c, 77).items()}
    decay = [v for k, v in p.items() if v.dim() > 1]
    rest = [v for k, v in p.items() if v.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1.0,
                            betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        n = step  # samples are steps times the batch: the schedule sees the same fraction
        lr = 1e-2 * n / 5 if n <= 5 else 1e-3 + 0.5 * (math.cos(math.pi * (n - 5) / (steps - 5)) + 1) * (1e-2 - 1e-3)
        for group in opt.param_groups:
            group["lr"] = lr
        opt.zero_grad()
        total, weight = 0.0, 0.0
        for micro in range(2):
            batch = make_batch(c, step * 2 + micro)
            _, s, w = loss_pair(p, (batch[0], batch[1], batch[2].to(dtype)), c)
            s.backward()
            total, weight = total + s.item(), weight + w.item()
        for v in p.values():
            v.grad /= weight
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)  # coefficient: 1 / (norm + 1e-6)
        opt.step()
        losses.append(total / weight)
    return losses, p


def main():
    for seed, (name, change) in enumerate(CASES.items()):
        c = {**BASE, **change}
        p = make_parameters(c, seed + 1)
        batch = make_batch(c)
        check_against_transformers(name, p, c, batch[0])
        logits, total, weight = loss_pair(p, batch, c)
        total.backward()
        tensors = {"weight/" + k: v.detach().float().contiguous() for k, v in p.items()}
        tensors.update({"grad/" + k: v.grad.contiguous() for k, v in p.items()})
        tensors.update({"logits": logits.detach().contiguous(), "loss": total.detach().reshape(1), "loss_weight": weight.reshape(1),
                        "tokens": batch[0].contiguous(), "labels": batch[1].contiguous(), "loss_mask": batch[2].float().contiguous()})
        save_file(tensors, os.path.join(HERE, name + ".safetensors"), metadata={"config": json.dumps(c)})
    c = BASE
    losses, p = train(c, 50, torch.float64)
    tensors = {"start/" + k: v.detach().float().contiguous() for k, v in make_parameters(c, 77).items()}
    tensors.update({"end/" + k: v.detach().contiguous() for k, v in p.items()})
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    tensors["losses_fp32"] = torch.tensor(train(c, 50, torch.float32)[0], dtype=torch.float64)
    save_file(tensors, os.path.join(HERE, "adamw50.safetensors"), metadata={"config": json.dumps(c)})


if __name__ == "__main__":
    main()
