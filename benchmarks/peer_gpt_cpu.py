"""Times training steps of recipes/quickstart.yaml in eager PyTorch on the CPU: the peer of `megatron bench train`.

Run both in one go, several times in turn, and compare the ratio:
  python benchmarks/peer_gpt_cpu.py --megatron build/bin/megatron --tokenizer runs/quickstart/tokenizer.json
"""
import argparse
import json
import statistics
import subprocess
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HIDDEN, HEADS, FFN, SEQ, BATCH = 4, 192, 6, 512, 256, 8


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.fc1(self.n2(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels, cos, sin):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1), labels.flatten())


def time_torch(vocab, steps, warmup):
    torch.manual_seed(1)
    model = Model(vocab)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    d = HIDDEN // HEADS
    angle = torch.outer(torch.arange(SEQ).float(), 10000.0 ** (-torch.arange(0, d, 2).float() / d))
    cos, sin = angle.cos(), angle.sin()
    times = []
    for step in range(warmup + steps):
        text = torch.randint(0, vocab, (BATCH, SEQ + 1))
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        loss = model(text[:, :-1], text[:, 1:], cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        loss.item()
        if step >= warmup:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megatron", default="build/bin/megatron")
    parser.add_argument("--config", default="recipes/quickstart.yaml")
    parser.add_argument("--tokenizer", default="runs/quickstart/tokenizer.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours, theirs = [], []
    for _ in range(args.rounds):
        out = subprocess.run([args.megatron, "bench", "train", "--config", args.config, "--tokenizer-model", args.tokenizer,
                              "--device", "cpu", "--num-threads", str(args.threads), "--bench-steps", str(args.steps), "--json"],
                             check=True, capture_output=True, text=True)
        ours.append(json.loads(out.stdout)["step_ms"])
        theirs.append(time_torch(4096, args.steps, 3))
    print(f"torch {torch.__version__}, {args.threads} threads, medians of {args.rounds} rounds")
    print(f"ratio of step times, ours / eager PyTorch: {statistics.median(ours) / statistics.median(theirs):.3f}"
          f"  (rounds: {', '.join(f'{a / b:.3f}' for a, b in zip(ours, theirs))})")


if __name__ == "__main__":
    main()
