#!/usr/bin/env python3
"""Trains one BERT here and as MegatronBertForPreTraining of transformers under torch.optim.AdamW, from the same weights on the same samples,
and compares both losses: that of masked tokens and that of the order of sentences.

    bert_loss_curve.py --program build/bin/megatron --output results [--steps 300] [--tolerance 5e-3]

Text is that of this repository's pages, split into sentences without learned parameters; the samples are those that `inspect-dataset --sample`
prints. Both compute in fp32 on a CPU, without dropout. Printed are means over windows of 20 steps and their distance; one beyond --tolerance
fails. OUTPUT/losses.json has every step. Needs torch, numpy and transformers 5.
"""
import argparse
import concurrent.futures
import json
import math
import os
import shlex
import shutil
import subprocess
import sys

import torch
import torch.nn.functional as F
from transformers import MegatronBertConfig, MegatronBertForPreTraining

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.999), 0.01, 1.0
LOSSES = ("lm loss", "sop loss")
A = None


def path(name):
    return os.path.join(A.output, name)


def megatron(*arguments):
    command = [*shlex.split(A.program), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=A.limit)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def data_flags():
    return ["--train-data-path", path("data_text_sentence"), "--seq-length", A.sequence, "--tokenizer-type", "HuggingFaceTokenizer",
            "--tokenizer-model", path("tokenizer.json"), "--data-cache-path", path("cache")]


def prepare_data():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
    with open(path("text.jsonl"), "w", encoding="utf-8") as out:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                if name.endswith(".md") and name != "flags.md":
                    with open(os.path.join(folder, name), encoding="utf-8") as stream:
                        out.write(json.dumps({"text": stream.read()}) + "\n")
    megatron("train-tokenizer", "--input", path("text.jsonl"), "--vocab-size", A.vocabulary, "--special-tokens", "[PAD]", "[CLS]", "[SEP]",
             "[MASK]", "--output", path("tokenizer.json"))
    megatron("preprocess-data", "--input", path("text.jsonl"), "--output-prefix", path("data"), "--overwrite", "--split-sentences",
             "--punkt-params", "none", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path("tokenizer.json"))


def sample(index):
    said = megatron("inspect-dataset", "--task", "bert", *data_flags(), "--num-samples", A.steps * A.batch, "--sample", index, "--json")
    return json.loads(said)["sample"]


def train_here():
    shutil.rmtree(path("ours"), ignore_errors=True)  # a run appends to its metrics.jsonl
    megatron("pretrain", "--task", "bert", "--load", path("initial"), "--run-dir", path("ours"), *data_flags(), "--micro-batch-size", A.micro_batch,
             "--global-batch-size", A.batch, "--train-iters", A.steps, "--lr", A.lr, "--min-lr", A.lr / 10, "--lr-decay-style", "cosine",
             "--lr-warmup-iters", A.warmup, "--weight-decay", WEIGHT_DECAY, "--adam-beta1", BETAS[0], "--adam-beta2", BETAS[1], "--clip-grad", CLIP,
             "--eval-iters", 0, "--hidden-dropout", 0, "--attention-dropout", 0, "--log-interval", 1, "--device", "cpu")
    with open(os.path.join(path("ours"), "metrics.jsonl")) as lines:
        rows = [row for row in map(json.loads, lines) if row["type"] == "train"]
    return {name: [row[name] for row in rows] for name in LOSSES}


def learning_rate(step):
    """Of the step with this number, from 0: Megatron's schedule counts the steps that are done."""
    if step <= A.warmup:
        return A.lr * step / A.warmup
    done = (step - A.warmup) / (A.steps - A.warmup)
    return A.lr / 10 + 0.9 * A.lr * 0.5 * (math.cos(math.pi * done) + 1)


def train_there(model):
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
                                   {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}], lr=A.lr, betas=BETAS, eps=1e-8)
    curves = {name: [] for name in LOSSES}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        samples = pool.map(sample, range(A.steps * A.batch))
        for step in range(A.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            batch = [next(samples) for _ in range(A.batch)]
            text, types, labels, counts, padding = (torch.tensor([one[key] for one in batch])
                                                    for key in ("text", "types", "labels", "loss_mask", "padding_mask"))
            order = torch.tensor([one["is_random"] for one in batch]).view(-1)
            out = model(input_ids=text, token_type_ids=types, attention_mask=padding)
            tokens = F.cross_entropy(out.prediction_logits.transpose(1, 2), labels.clamp_min(0), reduction="none")
            losses = ((tokens * counts).sum() / counts.sum(), F.cross_entropy(out.seq_relationship_logits, order))
            sum(losses).backward()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for name, loss in zip(LOSSES, losses):
                curves[name].append(loss.item())
    return curves


def compare(ours, peer):
    worst = 0.0
    print(f"{'steps':>9}" + "".join(f"{name + ', ours':>18}{'torch':>10}{'':>9}" for name in LOSSES))
    for first in range(0, A.steps, A.window):
        line = f"{first + 1:4}-{min(first + A.window, A.steps):<4}"
        for name in LOSSES:
            mine, its = (sum(c[name][first:first + A.window]) / len(c[name][first:first + A.window]) for c in (ours, peer))
            worst = max(worst, abs(mine / its - 1))
            line += f"{mine:18.5f}{its:10.5f}{100 * (mine / its - 1):+8.3f}%"
        print(line)
    print(f"largest relative difference of a window: {worst:.2e}")
    return worst


def main():
    global A
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--output", required=True)
    for name, value in {"steps": 300, "warmup": 20, "window": 20, "sequence": 128, "batch": 16, "micro_batch": 8, "vocabulary": 4096,
                        "hidden": 128, "layers": 2, "heads": 4, "seed": 1}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tolerance", type=float, default=5e-3)
    parser.add_argument("--limit", type=float, default=1800, help="seconds of one program")
    A = parser.parse_args()
    os.makedirs(A.output, exist_ok=True)
    prepare_data()
    torch.manual_seed(A.seed)
    model = MegatronBertForPreTraining(MegatronBertConfig(
        vocab_size=A.vocabulary, hidden_size=A.hidden, num_hidden_layers=A.layers, num_attention_heads=A.heads, intermediate_size=4 * A.hidden,
        max_position_embeddings=A.sequence, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act="gelu"))
    model.save_pretrained(path("initial"))
    ours = train_here()
    peer = train_there(model)
    with open(path("losses.json"), "w") as out:
        json.dump({"ours": ours, "torch": peer}, out)
    sys.exit(compare(ours, peer) > A.tolerance)


if __name__ == "__main__":
    main()
