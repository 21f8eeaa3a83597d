#!/usr/bin/env python3
"""The peers of encoders and encoder-decoders on one GPU, in PyTorch: bf16 autocast over fp32 parameters, torch.compile, fused AdamW, clipping,
no dropout, random tokens.

    python benchmarks/peer_encoders.py KIND [--batch 32 ...] [--mode whole|layers|eager]

    plain-bert   a pre-norm encoder of BERT-large's shape, SDPA, the output layer on 77 of 512 positions (what masking 15% leaves)
    bert         BertForPreTraining of transformers, whose output layer computes every position
    plain-t5     an encoder-decoder of T5-large's shape: 512 + 128 tokens, a learned dense bias [heads, s, s] in self-attention
    t5           T5ForConditionalGeneration of transformers; --gated: that of T5 1.1
    modernbert   ModernBertForMaskedLM of transformers, samples of full length
    embed        sentence-transformers in bf16: vectors of texts whose lengths are log-normal around 120 tokens

--mode layers compiles each layer by itself, eager compiles nothing. Prints sequences/s (median of the steps) and the peak memory.
"""
import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("kind", choices=["plain-bert", "bert", "plain-t5", "t5", "modernbert", "embed"])
for name, value in {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 30592, "seq": 512, "decoder_seq": 128, "masked": 77,
                    "batch": 32, "accumulate": 2, "steps": 10, "warmup": 4}.items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
parser.add_argument("--mode", choices=["whole", "layers", "eager"], default="whole")
parser.add_argument("--attention", default="sdpa", help="modernbert: sdpa, flex_attention or eager of transformers")
parser.add_argument("--gated", action="store_true", help="plain-t5, t5: gated GELU and an output layer of its own, as in T5 1.1")
parser.add_argument("--folder", help="embed: a folder of sentence-transformers")
parser.add_argument("--texts", help="embed: a file with one text a line")
ARGS = parser.parse_args()
DEVICE = "cuda"


class Attention(nn.Module):
    def __init__(self, norm, cross=False, bias=True):
        super().__init__()
        self.norm, self.cross = norm(ARGS.hidden), cross
        self.q = nn.Linear(ARGS.hidden, ARGS.hidden * (1 if cross else 3), bias=bias)
        self.kv = nn.Linear(ARGS.hidden, 2 * ARGS.hidden, bias=bias) if cross else None
        self.out = nn.Linear(ARGS.hidden, ARGS.hidden, bias=bias)

    def forward(self, x, bias=None, encoded=None):
        y = self.norm(x)
        parts = (self.q(y), *self.kv(encoded).chunk(2, -1)) if self.cross else self.q(y).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (ARGS.heads, -1)).transpose(1, 2) for t in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, norm, gated, bias=True):
        super().__init__()
        self.norm, self.gated = norm(ARGS.hidden), gated
        self.up = nn.Linear(ARGS.hidden, ARGS.ffn * (2 if gated else 1), bias=bias)
        self.down = nn.Linear(ARGS.ffn, ARGS.hidden, bias=bias)

    def forward(self, x):
        y = self.up(self.norm(x))
        if self.gated:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.gelu(gate, approximate="tanh") * y)
        return x + self.down(F.gelu(y, approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, norm, decoder, gated, bias):
        super().__init__()
        self.attention, self.mlp = Attention(norm, bias=bias), Mlp(norm, gated, bias)
        self.cross = Attention(norm, cross=True, bias=bias) if decoder else None

    def forward(self, x, bias, encoded=None):
        x = self.attention(x, bias)
        return self.mlp(x if self.cross is None else self.cross(x, encoded=encoded))


class Plain(nn.Module):
    """A BERT without segments, or a T5."""

    def __init__(self, t5):
        super().__init__()
        norm, gated = (nn.RMSNorm if t5 else nn.LayerNorm), t5 and ARGS.gated
        stack = lambda decoder: nn.ModuleList(Layer(norm, decoder, gated, not t5) for _ in range(ARGS.layers))
        self.words, self.norm = nn.Embedding(ARGS.vocab, ARGS.hidden), norm(ARGS.hidden)
        self.head = nn.Linear(ARGS.hidden, ARGS.vocab, bias=False)
        if not gated:
            self.head.weight = self.words.weight
        self.encoder, self.decoder = stack(False), stack(True) if t5 else None
        if t5:
            self.encoder_bias = nn.Parameter(torch.zeros(1, ARGS.heads, ARGS.seq, ARGS.seq))
            self.decoder_bias = nn.Parameter(torch.zeros(1, ARGS.heads, ARGS.decoder_seq, ARGS.decoder_seq))
        else:
            self.places = nn.Embedding(ARGS.seq, ARGS.hidden)

    def forward(self, input_ids, labels, decoder_input_ids=None):
        x, bias = self.words(input_ids), None
        if self.decoder is None:
            x = x + self.places.weight
        else:
            bias = self.encoder_bias.bfloat16()
        x = x.bfloat16()
        for layer in self.encoder:
            x = layer(x, bias)
        if self.decoder is None:
            x = x[:, : ARGS.masked]
        else:
            encoded, x = x, self.words(decoder_input_ids).bfloat16()
            future = torch.full((ARGS.decoder_seq, ARGS.decoder_seq), -1e4, device=x.device).triu(1)
            bias = (self.decoder_bias + future).bfloat16()
            for layer in self.decoder:
                x = layer(x, bias, encoded)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def ids(count):
    return torch.randint(1, ARGS.vocab, (ARGS.batch, count), device=DEVICE)


def make():
    """The model, a function that gives arguments, and the class of a layer."""
    stacks = lambda: {"input_ids": ids(ARGS.seq), "decoder_input_ids": ids(ARGS.decoder_seq), "labels": ids(ARGS.decoder_seq)}
    if ARGS.kind == "plain-bert":
        return Plain(False), lambda: {"input_ids": ids(ARGS.seq), "labels": ids(ARGS.masked)}, Layer
    if ARGS.kind == "plain-t5":
        return Plain(True), stacks, Layer
    import transformers
    if ARGS.kind == "bert":
        from transformers.models.bert.modeling_bert import BertLayer
        config = transformers.BertConfig(vocab_size=ARGS.vocab, hidden_size=ARGS.hidden, num_hidden_layers=ARGS.layers, intermediate_size=ARGS.ffn,
                                         num_attention_heads=ARGS.heads, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        sentence = torch.zeros(ARGS.batch, dtype=torch.long, device=DEVICE)
        return transformers.BertForPreTraining(config), lambda: {
            "input_ids": ids(ARGS.seq), "labels": ids(ARGS.seq), "next_sentence_label": sentence}, BertLayer
    if ARGS.kind == "t5":
        from transformers.models.t5.modeling_t5 import T5Block
        config = transformers.T5Config(vocab_size=ARGS.vocab, d_model=ARGS.hidden, d_kv=ARGS.hidden // ARGS.heads, d_ff=ARGS.ffn, num_layers=ARGS.layers,
                                       num_heads=ARGS.heads, dropout_rate=0.0, feed_forward_proj="gated-gelu" if ARGS.gated else "relu",
                                       tie_word_embeddings=not ARGS.gated, use_cache=False)
        return transformers.T5ForConditionalGeneration(config), stacks, T5Block
    from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer
    config = transformers.ModernBertConfig(vocab_size=ARGS.vocab, hidden_size=ARGS.hidden, num_hidden_layers=ARGS.layers, intermediate_size=ARGS.ffn,
                                           num_attention_heads=ARGS.heads, max_position_embeddings=ARGS.seq, sparse_prediction=True,
                                           attn_implementation=ARGS.attention)

    def masked():
        tokens = ids(ARGS.seq)
        return {"input_ids": tokens, "labels": torch.where(torch.rand(tokens.shape, device=DEVICE) < 0.3, tokens, -100)}

    return transformers.ModernBertForMaskedLM(config), masked, ModernBertEncoderLayer


def train():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, arguments, layer = make()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0, 0.02)
    if ARGS.mode == "layers":
        for module in model.modules():
            if isinstance(module, layer):
                module.compile()
    optimizer, function, times = torch.optim.AdamW(model.parameters(), 1e-4, fused=True), model, []
    if ARGS.mode == "whole":
        function = torch.compile(model)
    for _ in range(ARGS.warmup + ARGS.steps):
        torch.cuda.synchronize()
        start = time.time()
        for _ in range(ARGS.accumulate):
            with torch.autocast(DEVICE, torch.bfloat16):
                result = function(**arguments())
                loss = result if torch.is_tensor(result) else result.loss
            (loss / ARGS.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.time() - start)
    seconds = statistics.median(times[ARGS.warmup:])
    print(f"{ARGS.kind} ({ARGS.mode}) {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M parameters: "
          f"{ARGS.accumulate * ARGS.batch / seconds:.1f} sequences/s, {seconds * 1e3:.0f} ms a step, peak "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {loss.item():.3f}, first step {times[0]:.0f} s", flush=True)


def embed():
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(ARGS.folder, device=DEVICE, model_kwargs={"torch_dtype": torch.bfloat16})
    with open(ARGS.texts, encoding="utf-8") as file:
        texts = file.read().splitlines()
    model.encode(texts[:512], batch_size=ARGS.batch)
    torch.cuda.synchronize()
    start = time.time()
    model.encode(texts, batch_size=ARGS.batch)
    torch.cuda.synchronize()
    print(f"embed: {len(texts) / (time.time() - start):.1f} texts/s, {len(texts)} texts", flush=True)


if __name__ == "__main__":
    embed() if ARGS.kind == "embed" else train()
