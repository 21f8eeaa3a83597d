#!/usr/bin/env python3
"""The peer of whole steps of state-space and hybrid models on one GPU: the letters of `--hybrid-layer-pattern` in PyTorch, each layer under
torch.compile, with cuDNN attention, fused AdamW, state-spaces' Triton scan and gated norm (mamba_ssm 2.3) and FLA's Triton convolution and
gated delta rule (fla 0.6), which torch.compile leaves alone. fp32 weights and states, bf16 products.

    python benchmarks/peer_hybrid.py --packages DIR --config recipes/nemotron_h_8b_13letters.yaml [--no-compile] [--micro-batch 1]

DIR holds the folders mamba_ssm and fla (see peer_state_spaces.py). Prints ms a step, tokens/s (median of the last steps) and peak memory.
--cpu computes states token by token, in fp32, to try the script with a small model (--set).
"""
import argparse
import re
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--packages", help="folder of mamba_ssm and fla")
parser.add_argument("--config", required=True, help="a recipe: its model, micro-batch and batch")
parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="instead of the recipe's")
parser.add_argument("--no-compile", action="store_true")
parser.add_argument("--checkpoint", action="store_true", help="compute layers again in the backward")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--cpu", action="store_true")
ARGS = parser.parse_args()
DEVICE = torch.device("cpu" if ARGS.cpu else "cuda")


def read_recipe(path):
    """The keys of a recipe that are numbers, switches or texts."""
    out = {}
    for line in [*open(path), *(pair.replace("=", ": ", 1) for pair in ARGS.set)]:
        match = re.match(r"(\w+):\s*\"?([^\"#\n]*?)\"?\s*(#.*)?$", line)
        if not match:
            continue
        text = match.group(2)
        if text in ("true", "false"):
            out[match.group(1)] = text == "true"
        else:
            try:
                out[match.group(1)] = float(text) if re.search(r"[.e]", text) else int(text)
            except ValueError:
                out[match.group(1)] = text
    return out


R = read_recipe(ARGS.config)
HIDDEN, EPSILON = R["hidden_size"], R.get("layernorm_epsilon", 1e-5)
alone = torch.compiler.disable  # a graph ends before and behind


def without_autocast(function):
    """The kernels take the types that they are given."""
    def call(*tensors):
        with torch.autocast(DEVICE.type, enabled=False):
            return function(*tensors)
    return alone(call)


# -- state-space kernels, or on a CPU the same token by token

def scan_by_tokens(x, dt, a, b, c, d):
    groups = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(groups, 2), c.repeat_interleave(groups, 2)
    state, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3]), []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(out, 1)


def delta_by_tokens(q, k, v, g, beta):
    ratio = v.shape[2] // q.shape[2]
    q, k = (F.normalize(t, dim=-1).repeat_interleave(ratio, 2) for t in (q, k))
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = (v[:, t] - (state * k[:, t, ..., None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * error[:, :, None]
        out.append((state * q[:, t, ..., None]).sum(2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1)


def kernels():
    if ARGS.cpu:
        def convolve(x, weight, bias):
            y = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], bias, groups=weight.shape[0])
            return F.silu(y.transpose(1, 2))

        def gate_norm(y, z, weight, groups):
            gated = (y * F.silu(z)).unflatten(-1, (groups, -1))
            return F.rms_norm(gated, gated.shape[-1:], eps=EPSILON).flatten(-2) * weight

        return scan_by_tokens, delta_by_tokens, convolve, gate_norm, lambda y, z, w: F.rms_norm(y, y.shape[-1:], w, EPSILON) * F.silu(z)
    sys.path.insert(0, ARGS.packages)
    import fla.ops.common.chunk_o as chunk_o
    chunk_o.TRITON_ABOVE_3_7_1 = True  # lifts FLA's refusal of this Triton's backward, whose times are wanted
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    return (lambda x, dt, a, b, c, d: mamba_chunk_scan_combined(x, dt, a, b, c, 128, D=d),
            lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0],
            lambda x, weight, bias: causal_conv1d(x, weight, bias, activation="silu")[0],
            lambda y, z, weight, groups: rmsnorm_fn(y, weight, None, z=z, eps=EPSILON, group_size=y.shape[-1] // groups,
                                                    norm_before_gate=False),
            lambda y, z, weight: rms_norm_gated(y, z, weight, None, eps=EPSILON))


SCAN, DELTA, CONVOLVE, GATE_NORM, NORM_GATE = (without_autocast(kernel) for kernel in kernels())


# -- layers, by letter

class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.size, self.states = R["mamba_num_heads"], R["mamba_head_dim"], R["mamba_state_dim"]
        self.groups = R["mamba_num_groups"]
        self.inner, self.mixed = self.heads * self.size, self.heads * self.size + 2 * self.groups * self.states
        self.into = nn.Linear(HIDDEN, self.inner + self.mixed + self.heads, bias=False)
        self.out = nn.Linear(self.inner, HIDDEN, bias=False)
        self.conv, self.conv_bias = nn.Parameter(0.1 * torch.randn(self.mixed, 4)), nn.Parameter(torch.zeros(self.mixed))
        self.a_log = nn.Parameter(torch.linspace(1, 16, self.heads).log())
        self.dt_bias, self.d = nn.Parameter(torch.full((self.heads,), -4.0)), nn.Parameter(torch.ones(self.heads))
        self.norm = nn.Parameter(torch.ones(self.inner))

    def forward(self, x, cos, sin):
        z, mixed, dt = self.into(x).split([self.inner, self.mixed, self.heads], -1)
        mixed = CONVOLVE(mixed.contiguous(), self.conv.to(mixed.dtype), self.conv_bias.to(mixed.dtype))
        y, b, c = mixed.split([self.inner, self.groups * self.states, self.groups * self.states], -1)
        y = SCAN(y.unflatten(-1, (self.heads, self.size)), F.softplus(dt.float() + self.dt_bias), -self.a_log.exp(),
                 b.unflatten(-1, (self.groups, self.states)), c.unflatten(-1, (self.groups, self.states)), self.d)
        return self.out(GATE_NORM(y.flatten(-2), z, self.norm.to(z.dtype), self.groups))


class GatedDelta(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = R["linear_num_key_heads"], R["linear_num_value_heads"]
        self.key_size, self.size = R["linear_key_head_dim"], R["linear_value_head_dim"]
        self.widths = [self.keys * self.key_size, self.keys * self.key_size, self.values * self.size]
        self.into = nn.Linear(HIDDEN, sum(self.widths) + self.values * self.size + 2 * self.values, bias=False)
        self.out = nn.Linear(self.values * self.size, HIDDEN, bias=False)
        self.conv = nn.Parameter(0.1 * torch.randn(sum(self.widths), 4))
        self.a_log, self.dt_bias = nn.Parameter(torch.zeros(self.values)), nn.Parameter(torch.ones(self.values))
        self.norm = nn.Parameter(torch.ones(self.size))

    def forward(self, x, cos, sin):
        mixed, z, beta, rate = self.into(x).split([sum(self.widths), self.values * self.size, self.values, self.values], -1)
        q, k, v = CONVOLVE(mixed.contiguous(), self.conv.to(mixed.dtype), None).split(self.widths, -1)
        g = -self.a_log.exp() * F.softplus(rate.float() + self.dt_bias)
        y = DELTA(q.unflatten(-1, (self.keys, self.key_size)).contiguous(), k.unflatten(-1, (self.keys, self.key_size)).contiguous(),
                  v.unflatten(-1, (self.values, self.size)).contiguous(), g, beta.sigmoid().contiguous())
        z = z.unflatten(-1, (self.values, self.size))
        return self.out(NORM_GATE(y, z.contiguous(), self.norm.to(z.dtype)).flatten(-2))


def rotate(x, cos, sin):
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.groups, self.size = R["num_attention_heads"], R.get("num_query_groups", R["num_attention_heads"]), R["kv_channels"]
        self.gated = R.get("attention_output_gate", False)
        self.widths = [self.heads * self.size, self.groups * self.size, self.groups * self.size] + [self.heads * self.size] * self.gated
        self.qkv = nn.Linear(HIDDEN, sum(self.widths), bias=False)
        self.out = nn.Linear(self.heads * self.size, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.size, EPSILON) for _ in range(2)) if R.get("qk_layernorm") else None

    def forward(self, x, cos, sin):
        q, k, v, *gate = self.qkv(x).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k, v))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=self.groups != self.heads)
        y = y.transpose(1, 2).flatten(-2)
        return self.out(y * gate[0].sigmoid() if self.gated else y)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gated, self.ffn = R.get("swiglu", False), R["ffn_hidden_size"]
        self.up = nn.Linear(HIDDEN, self.ffn * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(self.ffn, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        x = self.up(x)
        if not self.gated:
            return self.down(F.relu(x).square())
        gate, up = x.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, letter):
        super().__init__()
        self.norm, self.of = nn.RMSNorm(HIDDEN, EPSILON), {"M": Mamba, "G": GatedDelta, "*": Attention, "-": Mlp}[letter]()

    def forward(self, x, cos, sin):
        return x + self.of(self.norm(x).to(x.dtype), cos, sin)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(R["padded_vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer(letter) for letter in R["hybrid_layer_pattern"])
        self.norm, self.head = nn.RMSNorm(HIDDEN, EPSILON), nn.Linear(HIDDEN, R["padded_vocab_size"], bias=False)
        if not R.get("untie_embeddings_and_output_weights"):
            self.head.weight = self.embedding.weight

    def forward(self, tokens, labels, cos, sin):
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(DEVICE.type):
            x = x.to(torch.bfloat16)
        for layer in self.layers:
            if ARGS.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.loss(x, labels)

    def loss(self, x, labels):
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def main():
    torch.manual_seed(1)
    with DEVICE:
        model = Model()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("conv"):
            nn.init.normal_(parameter, 0, 0.02)
    if not ARGS.no_compile:
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(model.loss)
    samples, length, micro_batch = R["global_batch_size"], R["seq_length"], R["micro_batch_size"]
    cos = sin = None
    if R["position_embedding_type"] == "rope":
        turned = int(R["kv_channels"] * R.get("rotary_percent", 1.0))
        angle = torch.arange(length, device=DEVICE)[:, None] * float(R["rotary_base"]) ** (-torch.arange(0, turned, 2, device=DEVICE) / turned)
        cos, sin = angle.cos(), angle.sin()
    if not ARGS.cpu:
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=not ARGS.cpu)
    times = []
    for i in range(ARGS.warmup + ARGS.steps):
        begin = time.time()
        for _ in range(samples // micro_batch):
            tokens = torch.randint(0, R["padded_vocab_size"], (micro_batch, length + 1), device=DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not ARGS.cpu):
                loss = model(tokens[:, :-1], tokens[:, 1:], cos, sin)
            (loss * micro_batch / samples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not ARGS.cpu:
            torch.cuda.synchronize()
        if i >= ARGS.warmup:
            times.append(time.time() - begin)
    step = statistics.median(times)
    peak = 0.0 if ARGS.cpu else torch.cuda.max_memory_allocated() / 2**30
    print(f"peer of {R['hybrid_layer_pattern']}, {sum(p.numel() for p in model.parameters()) / 1e9:.3f} G parameters: {1e3 * step:.0f} ms a step, "
          f"{samples * length / step:.0f} tokens/s, peak {peak:.1f} GiB, loss {loss.item():.3f}")


main()
