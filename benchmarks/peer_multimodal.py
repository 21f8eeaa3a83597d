#!/usr/bin/env python3
"""The peers of models that see on one GPU, in PyTorch.

    python benchmarks/peer_multimodal.py KIND [--mode whole|layers|eager] [--frozen]

    clip      ViT-L/14-336 alone, 64 pictures, forward and backward, bf16: a plain encoder with SDPA
    hf-clip   CLIPVisionModel of transformers with SDPA
    qwen2_5   the tower of Qwen2.5-VL of transformers, 16 images of 224x224 to 1288x1288 packed, forward and backward; --attention chooses its
              attention (sdpa goes from segment to segment)
    llava     ViT-L/14-336 of 23 layers, a projector of two linears and 8 layers of Llama 3 8B: steps of samples of 4096 tokens with 4 images
              of 576, bf16 autocast over fp32 parameters, fused AdamW, clipping; --frozen: the encoder is not trained

--mode layers compiles each layer by itself, eager compiles nothing. Prints medians and the peak memory.
"""
import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("kind", choices=["clip", "hf-clip", "qwen2_5", "llava"])
for name, value in {"images": 0, "layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 128256, "seq": 4096, "micro_batch": 2,
                    "accumulate": 4, "steps": 8, "warmup": 3}.items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
parser.add_argument("--mode", choices=["whole", "layers", "eager"], default="whole")
parser.add_argument("--attention", default="sdpa")
parser.add_argument("--frozen", action="store_true")
ARGS = parser.parse_args()
DEVICE, PATCH, SIDE, VISION = "cuda", 14, 336, 1024


class VisionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(VISION), nn.LayerNorm(VISION)
        self.qkv, self.out = nn.Linear(VISION, 3 * VISION), nn.Linear(VISION, VISION)
        self.up, self.down = nn.Linear(VISION, 4 * VISION), nn.Linear(4 * VISION, VISION)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (16, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.up(self.norm2(x))
        return x + self.down(y * torch.sigmoid(1.702 * y))


class Vision(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.conv = nn.Linear(3 * PATCH * PATCH, VISION, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 1, VISION))
        self.places = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2 + 1, VISION))
        self.norm = nn.LayerNorm(VISION)
        self.layers = nn.ModuleList(VisionLayer() for _ in range(layers))

    def forward(self, patches):
        x = self.conv(patches)
        x = torch.cat((self.first.to(x.dtype).expand(x.shape[0], -1, -1), x), 1) + self.places.to(x.dtype)
        x = self.norm(x).to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class TextLayer(nn.Module):
    def __init__(self):
        super().__init__()
        head = ARGS.hidden // ARGS.heads
        self.head, self.widths = head, [ARGS.hidden, ARGS.groups * head, ARGS.groups * head]
        self.norm1, self.norm2 = nn.RMSNorm(ARGS.hidden), nn.RMSNorm(ARGS.hidden)
        self.qkv, self.out = nn.Linear(ARGS.hidden, sum(self.widths), bias=False), nn.Linear(ARGS.hidden, ARGS.hidden, bias=False)
        self.up, self.down = nn.Linear(ARGS.hidden, 2 * ARGS.ffn, bias=False), nn.Linear(ARGS.ffn, ARGS.hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, -1, self.head).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(self.widths, -1))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llava(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = Vision(23)
        if ARGS.frozen:
            self.vision.requires_grad_(False)
        self.project = nn.Sequential(nn.Linear(VISION, ARGS.hidden), nn.GELU(), nn.Linear(ARGS.hidden, ARGS.hidden))
        self.words = nn.Embedding(ARGS.vocab, ARGS.hidden)
        self.layers = nn.ModuleList(TextLayer() for _ in range(ARGS.layers))
        self.norm, self.out = nn.RMSNorm(ARGS.hidden), nn.Linear(ARGS.hidden, ARGS.vocab, bias=False)

    def forward(self, tokens, labels, patches, at, cos, sin):
        seen = self.project(self.vision(patches)[:, 1:])
        x = self.words(tokens).to(torch.bfloat16)
        x = x.flatten(0, 1).index_copy(0, at, seen.flatten(0, 1).to(x.dtype)).view_as(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.out(self.norm(x)).float().flatten(0, 1), labels.flatten())


def compiled(model, layer):
    if ARGS.mode == "layers":
        for module in model.modules():
            if isinstance(module, layer):
                module.compile()
    return torch.compile(model) if ARGS.mode == "whole" else model


def median_ms(step):
    times = []
    for _ in range(ARGS.warmup + ARGS.steps):
        torch.cuda.synchronize()
        start = time.time()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.time() - start))
    return statistics.median(times[ARGS.warmup:]), times[0] / 1e3


def tower():
    """Forward and backward of an encoder alone; weights and gradients in bf16."""
    count = ARGS.images or (16 if ARGS.kind == "qwen2_5" else 64)
    if ARGS.kind == "clip":
        model, layer = Vision(24), VisionLayer
        inputs = (torch.randn(count, (SIDE // PATCH) ** 2, 3 * PATCH * PATCH),)
    else:
        import transformers
        if ARGS.kind == "hf-clip":
            from transformers.models.clip.modeling_clip import CLIPEncoderLayer as layer
            config = transformers.CLIPVisionConfig(hidden_size=VISION, intermediate_size=4 * VISION, num_hidden_layers=24, num_attention_heads=16,
                                                   image_size=SIDE, patch_size=PATCH, attn_implementation=ARGS.attention)
            model, inputs = transformers.CLIPVisionModel(config), (torch.randn(count, 3, SIDE, SIDE),)
        else:
            from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
            from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
            layer = qwen.Qwen2_5_VLVisionBlock
            config = Qwen2_5_VLVisionConfig(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=1280, window_size=112,
                                            fullatt_block_indexes=[7, 15, 23, 31])
            config._attn_implementation = ARGS.attention
            model = qwen.Qwen2_5_VisionTransformerPretrainedModel(config)
            sides = [(224 + (1288 - 224) * i // (count - 1)) // 28 * 2 for i in range(count)]
            grid = torch.tensor([[1, side, side] for side in sides])
            inputs = (torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH), grid)
    model = model.to(DEVICE, torch.bfloat16)
    inputs = [t.to(DEVICE, torch.bfloat16) if t.is_floating_point() else t.to(DEVICE) for t in inputs]
    function = compiled(model, layer)

    def step():
        out = function(*inputs)
        out = out if torch.is_tensor(out) else out[0]
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    ms, first = median_ms(step)
    print(f"{ARGS.kind} ({ARGS.mode}, {ARGS.attention}) {count} images: {ms:.2f} ms, {1e3 * count / ms:.1f} images/s, peak "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, first step {first:.0f} s", flush=True)


def train():
    with torch.device(DEVICE):
        model = Llava()
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0, 0.02)
        images = ARGS.images or 4
        places, head = (SIDE // PATCH) ** 2, ARGS.hidden // ARGS.heads
        angle = torch.arange(ARGS.seq)[:, None] / 500000 ** (torch.arange(0, head, 2) / head)
        cos, sin = angle.cos(), angle.sin()
        room = ARGS.seq // images
        at = torch.cat([torch.arange(places) + sample * ARGS.seq + i * room for sample in range(ARGS.micro_batch) for i in range(images)])

        def batch():
            tokens = torch.randint(0, ARGS.vocab, (ARGS.micro_batch, ARGS.seq + 1))
            return tokens[:, :-1], tokens[:, 1:], torch.randn(ARGS.micro_batch * images, places, 3 * PATCH * PATCH)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-5, fused=True)
    function = compiled(model, (VisionLayer, TextLayer))

    def step():
        for _ in range(ARGS.accumulate):
            tokens, labels, patches = batch()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = function(tokens.to(DEVICE), labels.to(DEVICE), patches.to(DEVICE), at, cos, sin)
            (loss / ARGS.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ms, first = median_ms(step)
    tokens = ARGS.accumulate * ARGS.micro_batch * ARGS.seq
    print(f"llava ({ARGS.mode}{', frozen encoder' if ARGS.frozen else ''}): {ms:.1f} ms a step, {1e3 * tokens / ms:.0f} tokens/s, peak "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, first step {first:.0f} s", flush=True)


if __name__ == "__main__":
    train() if ARGS.kind == "llava" else tower()
