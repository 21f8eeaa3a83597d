#!/usr/bin/env python3
"""The peer beside one GPU and our layouts of several: a Llama-like decoder, or with --gpt a GPT-2-like one, in PyTorch under
torch.compile with cuDNN attention and fused AdamW, with --experts dropless experts (torch._grouped_mm on rows sorted by expert), with
--kv-lora-rank latent attention (values padded to the width of keys), with DistributedDataParallel, fully sharded parameters (FSDP2: bf16
parameters and activations, fp32 shards and reduction) or tensor and sequence parallelism (DTensor). One GPU without torchrun.

    python benchmarks/peer_layouts.py [--gpt] [--layers 8 ...] [--mode reduce-overhead] [--experts 8 --top-k 2 [--dense-layers 1 --dense-ffn 10944]
        [--shared-ffn 2816]] [--kv-lora-rank 512 --rope-head-size 64 --head-size 128]
    torchrun --nproc-per-node 2 benchmarks/peer_layouts.py --layout ddp|fsdp|tp [--accumulate 4] [--layers 8 ...]

Prints tokens/s/GPU (median of the last steps) and peak memory of the first rank. The shape is that of recipes/llama3_8b_8layers.yaml.
"""
import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layout", choices=["one", "ddp", "fsdp", "tp"], default="one")
for name, value in {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 128256, "seq": 4096,
                    "micro_batch": 2, "accumulate": 4, "steps": 10, "warmup": 4, "experts": 0, "top_k": 2, "head_size": 0, "dense_layers": 0, "dense_ffn": 0,
                    "shared_ffn": 0, "kv_lora_rank": 0, "rope_head_size": 64}.items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
parser.add_argument("--gpt", action="store_true", help="LayerNorm, biases, GELU, learned positions and a tied table")
parser.add_argument("--mode", default="default", help="of torch.compile")
parser.add_argument("--no-compile", action="store_true")
parser.add_argument("--cpu", action="store_true", help="Gloo on CPUs: to try the script")
ARGS = parser.parse_args()
if ARGS.gpt and ARGS.layout == "tp":
    parser.error("--layout tp is written for the Llama-like decoder")
if ARGS.experts and (ARGS.gpt or ARGS.layout == "tp"):
    parser.error("--experts are written for the Llama-like decoder without --layout tp")
if ARGS.kv_lora_rank and (ARGS.gpt or ARGS.layout == "tp"):
    parser.error("--kv-lora-rank is written for the Llama-like decoder without --layout tp")
PACKED = ARGS.layout != "tp"  # projections of one input in one product; DTensor splits them one by one
HEAD = ARGS.head_size or ARGS.hidden // ARGS.heads
ROTATED = ARGS.rope_head_size if ARGS.kv_lora_rank else HEAD  # features of a head
RANK, WORLD = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cpu") if ARGS.cpu else torch.device("cuda", RANK)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.widths = [ARGS.heads * HEAD, ARGS.groups * HEAD, ARGS.groups * HEAD]
        if PACKED:
            self.qkv = nn.Linear(ARGS.hidden, sum(self.widths), bias=ARGS.gpt)
        else:
            self.q, self.k, self.v = (nn.Linear(ARGS.hidden, width, bias=False) for width in self.widths)
        self.o = nn.Linear(ARGS.heads * HEAD, ARGS.hidden, bias=ARGS.gpt)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        parts = self.qkv(x).split(self.widths, -1) if PACKED else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(b, s, -1, HEAD).transpose(1, 2) for part in parts)
        if not ARGS.gpt:
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=ARGS.groups != ARGS.heads)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class LatentAttention(nn.Module):
    """DeepSeek-V2's without a query rank: keys and values of a head out of one normed latent, a rotated key that all heads share."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(ARGS.hidden, ARGS.heads * (HEAD + ROTATED), bias=False)
        self.kv_down = nn.Linear(ARGS.hidden, ARGS.kv_lora_rank + ROTATED, bias=False)
        self.kv_norm = nn.RMSNorm(ARGS.kv_lora_rank)
        self.kv_up = nn.Linear(ARGS.kv_lora_rank, ARGS.heads * 2 * HEAD, bias=False)
        self.o = nn.Linear(ARGS.heads * HEAD, ARGS.hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, rotated_q = self.q(x).view(b, s, ARGS.heads, -1).transpose(1, 2).split([HEAD, ROTATED], -1)
        latent, rotated_k = self.kv_down(x).split([ARGS.kv_lora_rank, ROTATED], -1)
        k, v = self.kv_up(self.kv_norm(latent)).view(b, s, ARGS.heads, -1).transpose(1, 2).split([HEAD, HEAD], -1)
        rotated_k = rotate(rotated_k[:, None], cos, sin).to(k.dtype).expand(-1, ARGS.heads, -1, -1)
        q = torch.cat((q, rotate(rotated_q, cos, sin).to(q.dtype)), -1)
        y = F.scaled_dot_product_attention(q, torch.cat((k, rotated_k), -1), F.pad(v, (0, ROTATED)), is_causal=True)[..., :HEAD]
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, ffn):
        super().__init__()
        if PACKED:
            self.gate_up = nn.Linear(ARGS.hidden, ffn * (1 if ARGS.gpt else 2), bias=ARGS.gpt)
        else:
            self.gate, self.up = (nn.Linear(ARGS.hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, ARGS.hidden, bias=ARGS.gpt)

    def forward(self, x):
        if ARGS.gpt:
            return self.down(F.gelu(self.gate_up(x), approximate="tanh"))
        gate, up = self.gate_up(x).chunk(2, -1) if PACKED else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Every token at the experts of its top_k router logits, weighted by their softmax; nothing is dropped."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(ARGS.hidden, ARGS.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(ARGS.experts, ARGS.hidden, 2 * ARGS.ffn))
        self.down = nn.Parameter(torch.empty(ARGS.experts, ARGS.ffn, ARGS.hidden))
        self.shared = Mlp(ARGS.shared_ffn) if ARGS.shared_ffn else None

    def forward(self, x):
        tokens = x.to(torch.bfloat16).flatten(0, 1)
        logits, chosen = self.router(tokens).float().topk(ARGS.top_k, -1)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)  # choices by expert
        ends = torch.bincount(chosen, minlength=ARGS.experts).cumsum(0).to(torch.int32)
        rows = tokens[order // ARGS.top_k]
        gate, up = torch._grouped_mm(rows, self.gate_up.to(tokens.dtype), offs=ends).chunk(2, -1)
        outputs = torch._grouped_mm(F.silu(gate) * up, self.down.to(tokens.dtype), offs=ends)
        outputs = outputs * logits.softmax(-1).flatten()[order, None].to(tokens.dtype)
        row_of_choice = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        y = outputs[row_of_choice].unflatten(0, (-1, ARGS.top_k)).sum(1).view_as(x)
        return y + self.shared(x) if self.shared else y


def norm():
    return nn.LayerNorm(ARGS.hidden) if ARGS.gpt else nn.RMSNorm(ARGS.hidden)


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = LatentAttention() if ARGS.kv_lora_rank else Attention()
        self.mlp = Mlp(ARGS.dense_ffn or ARGS.ffn) if number < ARGS.dense_layers or not ARGS.experts else Experts()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ARGS.vocab, ARGS.hidden)
        self.layers = nn.ModuleList(Layer(number) for number in range(ARGS.layers))
        self.norm, self.head = norm(), nn.Linear(ARGS.hidden, ARGS.vocab, bias=False)
        if ARGS.gpt:
            self.head.weight = self.embedding.weight
            self.positions = nn.Embedding(ARGS.seq, ARGS.hidden)

    def forward(self, tokens, labels, cos, sin):
        x = self.embedding(tokens)
        if ARGS.gpt:
            x = x + self.positions.weight
        if torch.is_autocast_enabled(DEVICE.type):
            x = x.to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def shard_fully(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def split_tensors(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                                   SequenceParallel, parallelize_module)
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    parallelize_module(model, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))})


def main():
    if not ARGS.cpu:
        torch.cuda.set_device(DEVICE)
    if WORLD > 1:
        dist.init_process_group("gloo" if ARGS.cpu else "nccl")
    torch.manual_seed(1)
    with DEVICE:
        model = Decoder()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)
    loss_context = contextlib.nullcontext
    if ARGS.layout == "fsdp":
        shard_fully(model)
    elif ARGS.layout == "tp":
        from torch.distributed.tensor.parallel import loss_parallel
        split_tensors(model)
        loss_context = loss_parallel
    if not ARGS.no_compile and ARGS.layout in ("fsdp", "tp"):
        for layer in model.layers:
            layer.compile(mode=ARGS.mode)
    wrapped = model
    if ARGS.layout == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=None if ARGS.cpu else [RANK], gradient_as_bucket_view=True)
    if not ARGS.no_compile and ARGS.layout in ("one", "ddp"):
        wrapped = torch.compile(wrapped, mode=ARGS.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=not ARGS.cpu)
    position = torch.arange(ARGS.seq, device=DEVICE)[:, None] * 500000.0 ** (-torch.arange(0, ROTATED, 2, device=DEVICE) / ROTATED)
    cos, sin = position.cos().bfloat16(), position.sin().bfloat16()
    if not ARGS.cpu:
        torch.backends.cuda.enable_flash_sdp(bool(ARGS.kv_lora_rank))  # where cuDNN has no kernel for the width
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)  # cuDNN is left
    torch.manual_seed(1 if ARGS.layout == "tp" else 1 + RANK)
    autocast = ARGS.layout != "fsdp"

    def step():
        for i in range(ARGS.accumulate):
            tokens = torch.randint(0, ARGS.vocab, (ARGS.micro_batch, ARGS.seq + 1), device=DEVICE)
            last = i + 1 == ARGS.accumulate
            context = wrapped.no_sync() if ARGS.layout == "ddp" and not last else contextlib.nullcontext()
            with context, loss_context():
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                    loss = wrapped(tokens[:, :-1], tokens[:, 1:], cos, sin)
                (loss / ARGS.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    times = []
    for i in range(ARGS.warmup + ARGS.steps):
        begin = time.time()
        loss = step()
        if not ARGS.cpu:
            torch.cuda.synchronize()
        if i >= ARGS.warmup:
            times.append(time.time() - begin)
    if RANK == 0:
        replicas = 1 if ARGS.layout == "tp" else WORLD
        tokens = ARGS.micro_batch * ARGS.seq * ARGS.accumulate * replicas
        peak = 0.0 if ARGS.cpu else torch.cuda.max_memory_allocated() / 2**30
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        print(f"peer {ARGS.layout} world {WORLD}: {tokens / statistics.median(times) / WORLD:.0f} tokens/s/GPU, "
              f"peak {peak:.1f} GiB, loss {value.item():.3f}", flush=True)
    if WORLD > 1:
        dist.destroy_process_group()


main()
