#!/usr/bin/env python3
"""Trains one Llama-like model, or with --pattern one of Mamba-2 (M), attention (*) and MLP (-) layers as Nemotron-H has them, here and in
plain PyTorch, from the same weights on the same samples, and compares the losses.

    loss_curve.py --program 'dist/bin/megatron-run megatron' --output results --ours bf16 fp8-tensorwise fp8-delayed fp8-blockwise
    loss_curve.py --program 'dist/bin/megatron-run megatron' --output results --pattern M-M*M- --tolerance 5e-3
    loss_curve.py --program build/bin/megatron --output results --device cpu --ours fp32 --peers fp32 --steps 20 --warmup 5 \
        --layers 2 --hidden 64 --ffn 128 --heads 4 --groups 2 --sequence 64 --batch 4 --micro-batch 2 --vocabulary 512 --window 5 --lr 3e-3 --tolerance 1e-5

Text is what --text names (this repository by default), tokenized by a tokenizer that is trained on it. The weights are drawn here, rounded
to bf16, and written as a folder of Hugging Face, which both programs read; the samples are those of our index, read by the peer from the
.npy, .bin and .idx files. The peer has fp32 parameters and torch.optim.AdamW: fp32 and tf32 multiply in that, bf16 under autocast. Ours in
bf16 has fp32 master weights. Printed are means over windows of steps, each window's distance from the first peer, and the largest; a run that
is further away than --tolerance (--tolerance-fp8) in one window fails. OUTPUT/losses.json has every step. Needs torch and numpy alone.
"""
import argparse
import json
import math
import os
import shlex
import shutil
import struct
import subprocess
import sys
import time

import numpy
import torch
import torch.nn.functional as F

OURS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp8-tensorwise": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "fp8-delayed": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "fp8-blockwise": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
}
PEERS = ("fp32", "tf32", "bf16")
ENDINGS = (".md", ".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake", ".yaml", ".txt")
SKIPPED = ("build", "dist", "runs", "golden", "shared", "site-packages", "dist-packages", "__pycache__", "results")
CONVOLUTION, CHUNK = 4, 128  # of Mamba-2: rows of the convolution, tokens of a chunk
EPSILON, ROTARY_BASE, BETAS, WEIGHT_DECAY, CLIP = 1e-5, 10000.0, (0.9, 0.95), 0.1, 1.0


# -- text and tokens


def texts(roots):
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
            for name in sorted(files):
                if name.endswith(ENDINGS) and name != "flags.md":
                    try:
                        with open(os.path.join(folder, name), encoding="utf-8") as stream:
                            yield stream.read()
                    except UnicodeDecodeError:
                        pass


def megatron(*arguments):
    command = [*shlex.split(ARGUMENTS.program), *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=ARGUMENTS.limit)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{shlex.join(command)} took more than --limit {ARGUMENTS.limit:.0f} s")
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def prepare_data():
    text = os.path.join(ARGUMENTS.output, "text.jsonl")
    if os.path.exists(path("data_text_document.idx")):
        return
    size = 0
    with open(text, "w") as out:
        for document in texts(ARGUMENTS.text):
            size += len(document)
            if document and size <= 1e6 * ARGUMENTS.megabytes:
                out.write(json.dumps({"text": document}) + "\n")
    megatron("train-tokenizer", "--input", text, "--vocab-size", ARGUMENTS.vocabulary, "--output", path("tokenizer.json"))
    megatron("preprocess-data", "--input", text, "--output-prefix", path("data"), "--overwrite", "--append-eod", "--workers", os.cpu_count(),
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path("tokenizer.json"))


class Samples:
    """Samples of an indexed dataset in the order of a cached index (docs/formats/indexed_dataset.md)."""

    def __init__(self, prefix, cache):
        with open(prefix + ".idx", "rb") as stream:
            head = stream.read()
        kind, sequences = struct.unpack_from("<BQ", head, 17)
        self.lengths = numpy.frombuffer(head, "<i4", sequences, 34)
        self.starts = numpy.frombuffer(head, "<i8", sequences, 34 + 4 * sequences)
        self.tokens = numpy.fromfile(prefix + ".bin", {4: "<i4", 8: "<u2"}[kind])
        self.starts = self.starts // self.tokens.itemsize
        self.documents, self.cuts, self.order = (self.index(cache, name) for name in ("document", "sample", "shuffle"))

    @staticmethod
    def index(cache, name):
        found = [f for f in sorted(os.listdir(cache)) if f.endswith(f"-train-{name}_index.npy")]
        if len(found) != 1:
            raise SystemExit(f"{cache} holds {len(found)} {name} indices, expected the one of these runs\nhint: an empty --output")
        return numpy.load(os.path.join(cache, found[0]))

    def __getitem__(self, i):
        """S + 1 tokens."""
        row = int(self.order[i])
        (first, begin), (last, end) = self.cuts[row].tolist(), self.cuts[row + 1].tolist()
        parts = []
        for place in range(first, last + 1):
            document = self.documents[place]
            start, length = int(self.starts[document]), int(self.lengths[document])
            parts.append(self.tokens[start + (begin if place == first else 0):start + (end + 1 if place == last else length)])
        return numpy.concatenate(parts).astype(numpy.int64)


# -- weights


def mamba_widths():
    """Of all heads, and with the keys and queries of the groups beside them."""
    inner = 2 * ARGUMENTS.hidden
    return inner, inner + 2 * ARGUMENTS.mamba_groups * ARGUMENTS.states


def hybrid_shapes():
    a = ARGUMENTS
    (inner, mixed), heads, key = mamba_widths(), 2 * a.hidden // a.mamba_head, a.groups * (a.hidden // a.heads)
    mixers = {
        "M": {"in_proj.weight": (inner + mixed + heads, a.hidden), "conv1d.weight": (mixed, 1, CONVOLUTION), "conv1d.bias": (mixed,),
              "A_log": (heads,), "D": (heads,), "dt_bias": (heads,), "norm.weight": (inner,), "out_proj.weight": (a.hidden, inner)},
        "*": {"q_proj.weight": (a.hidden, a.hidden), "k_proj.weight": (key, a.hidden), "v_proj.weight": (key, a.hidden),
              "o_proj.weight": (a.hidden, a.hidden)},
        "-": {"up_proj.weight": (a.ffn, a.hidden), "down_proj.weight": (a.hidden, a.ffn)}}
    out = {"backbone.embeddings.weight": (a.vocabulary, a.hidden)}
    for i, letter in enumerate(a.pattern):
        out[f"backbone.layers.{i}.norm.weight"] = (a.hidden,)
        out |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in mixers[letter].items()}
    return out | {"backbone.norm_f.weight": (a.hidden,), "lm_head.weight": (a.vocabulary, a.hidden)}


def shapes():
    a = ARGUMENTS
    if a.pattern:
        return hybrid_shapes()
    head = a.hidden // a.heads
    out = {"model.embed_tokens.weight": (a.vocabulary, a.hidden)}
    for i in range(a.layers):
        out |= {f"model.layers.{i}.{name}": shape for name, shape in {
            "input_layernorm.weight": (a.hidden,), "self_attn.q_proj.weight": (a.hidden, a.hidden),
            "self_attn.k_proj.weight": (a.groups * head, a.hidden), "self_attn.v_proj.weight": (a.groups * head, a.hidden),
            "self_attn.o_proj.weight": (a.hidden, a.hidden), "post_attention_layernorm.weight": (a.hidden,),
            "mlp.gate_proj.weight": (a.ffn, a.hidden), "mlp.up_proj.weight": (a.ffn, a.hidden),
            "mlp.down_proj.weight": (a.hidden, a.ffn)}.items()}
    return out | {"model.norm.weight": (a.hidden,), "lm_head.weight": (a.vocabulary, a.hidden)}


def draw_weights():
    """Normal with deviation 0.02, smaller before the residual stream; bf16 numbers in fp32, so that no program rounds them differently."""
    torch.manual_seed(ARGUMENTS.seed)
    weights = {}
    for name, shape in shapes().items():
        scale = 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            scale /= math.sqrt(2 * ARGUMENTS.layers)
        if name.endswith("conv1d.weight"):
            scale = 0.3
        weight = torch.ones(shape) if len(shape) == 1 else scale * torch.randn(shape)
        if name.endswith("A_log"):
            weight = torch.linspace(1, 16, *shape).log()
        elif name.endswith("dt_bias"):  # time steps from 0.001 to 0.1
            weight = torch.expm1(torch.logspace(-3, -1, *shape)).log()
        elif name.endswith("conv1d.bias"):
            weight = torch.zeros(shape)
        weights[name] = weight.bfloat16().float()
    return weights


def config():
    a = ARGUMENTS
    both = {"vocab_size": a.vocabulary, "hidden_size": a.hidden, "intermediate_size": a.ffn, "num_attention_heads": a.heads,
            "num_key_value_heads": a.groups, "max_position_embeddings": a.sequence, "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"}
    if not a.pattern:
        return both | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": a.layers, "hidden_act": "silu",
                       "rms_norm_eps": EPSILON, "rope_theta": ROTARY_BASE}
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return both | {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "layers_block_type": [kinds[c] for c in a.pattern],
                   "head_dim": a.hidden // a.heads, "mlp_hidden_act": "relu2", "layer_norm_epsilon": EPSILON, "expand": 2,
                   "ssm_state_size": a.states, "mamba_num_heads": 2 * a.hidden // a.mamba_head, "mamba_head_dim": a.mamba_head,
                   "n_groups": a.mamba_groups, "conv_kernel": CONVOLUTION, "chunk_size": CHUNK, "use_conv_bias": True,
                   "mamba_proj_bias": False, "use_bias": False}


def write_folder(weights):
    folder = path("initial")
    os.makedirs(folder, exist_ok=True)
    head, begin = {}, 0
    for name, weight in weights.items():
        head[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [begin, begin + 4 * weight.numel()]}
        begin += 4 * weight.numel()
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for weight in weights.values():
            out.write(weight.numpy().tobytes())
    with open(os.path.join(folder, "config.json"), "w") as out:
        json.dump(config(), out)


# -- ours


def train_here(name):
    a, folder = ARGUMENTS, path("ours_" + name)
    shutil.rmtree(folder, ignore_errors=True)  # a run appends to its metrics.jsonl
    megatron("pretrain", "--load", path("initial"), "--run-dir", folder, "--tokenizer-type", "HuggingFaceTokenizer",
             "--tokenizer-model", path("tokenizer.json"), "--train-data-path", path("data_text_document"), "--data-cache-path",
             path("cache"), "--seq-length", a.sequence, "--micro-batch-size", a.micro_batch, "--global-batch-size", a.batch,
             "--train-iters", a.steps, "--lr", a.lr, "--min-lr", a.lr / 10, "--lr-decay-style", "cosine", "--lr-warmup-iters", a.warmup,
             "--weight-decay", WEIGHT_DECAY, "--adam-beta1", BETAS[0], "--adam-beta2", BETAS[1], "--clip-grad", CLIP, "--eval-iters", 0,
             "--hidden-dropout", 0, "--attention-dropout", 0, "--log-interval", 1, "--device", a.device, *OURS[name], *a.flags)
    with open(os.path.join(folder, "metrics.jsonl")) as lines:
        return [r["lm loss"] for r in map(json.loads, lines) if r["type"] == "train"]


# -- the peer


class Peer(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = torch.nn.ParameterDict({n.replace(".", "/"): torch.nn.Parameter(w.clone()) for n, w in weights.items()})
        size = ARGUMENTS.hidden // ARGUMENTS.heads
        frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.outer(torch.arange(ARGUMENTS.sequence).double(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def weight(self, name):
        return self.weights[name.replace(".", "/")]

    def rotate(self, x):
        """[b, heads, s, size], by halves as Llama does."""
        low, high = x.chunk(2, -1)
        return (x * self.cos + torch.cat((-high, low), -1) * self.sin).to(x.dtype)

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weight(name), EPSILON)

    def attention(self, x, layer):
        b, s, _ = x.shape
        q, k, v = (F.linear(x, self.weight(f"{layer}.{c}_proj.weight")).view(b, s, heads, -1).transpose(1, 2)
                   for c, heads in (("q", ARGUMENTS.heads), ("k", ARGUMENTS.groups), ("v", ARGUMENTS.groups)))
        k, v = (t.repeat_interleave(ARGUMENTS.heads // ARGUMENTS.groups, 1) for t in (self.rotate(k), v))
        y = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(b, s, -1), self.weight(f"{layer}.o_proj.weight"))

    def mlp(self, x, layer):
        gate, up = (F.linear(x, self.weight(f"{layer}.mlp.{name}_proj.weight")) for name in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.weight(f"{layer}.mlp.down_proj.weight"))

    def forward(self, tokens, labels):
        x = F.embedding(tokens, self.weight("model.embed_tokens.weight"))
        for i in range(ARGUMENTS.layers):
            layer = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, layer + ".input_layernorm.weight"), layer + ".self_attn")
            x = x + self.mlp(self.norm(x, layer + ".post_attention_layernorm.weight"), layer)
        logits = F.linear(self.norm(x, "model.norm.weight"), self.weight("lm_head.weight"))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class HybridPeer(Peer):
    """Layers by letters; attention has no positions, states and time steps are fp32."""

    def rotate(self, x):
        return x

    def norm(self, x, name):
        # In fp32, and back to the type of the products
        return super().norm(x.float(), name).to(x.dtype)

    def mamba(self, x, layer):
        a, (inner, mixed) = ARGUMENTS, mamba_widths()
        z, x, dt = F.linear(x, self.weight(layer + ".in_proj.weight")).split([inner, mixed, inner // a.mamba_head], -1)
        with torch.autocast(a.device, enabled=False):
            x = F.pad(x.float().transpose(1, 2), (CONVOLUTION - 1, 0))
            x = F.conv1d(x, self.weight(layer + ".conv1d.weight"), self.weight(layer + ".conv1d.bias"), groups=mixed)
            x, keys, queries = F.silu(x.transpose(1, 2)).split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
            y = scan(x.unflatten(-1, (-1, a.mamba_head)), F.softplus(dt.float() + self.weight(layer + ".dt_bias")),
                     -self.weight(layer + ".A_log").exp(), keys.unflatten(-1, (a.mamba_groups, -1)),
                     queries.unflatten(-1, (a.mamba_groups, -1)), self.weight(layer + ".D"))
            y = (y.flatten(-2) * F.silu(z.float())).unflatten(-1, (a.mamba_groups, -1))
            y = F.rms_norm(y, y.shape[-1:], eps=EPSILON).flatten(-2) * self.weight(layer + ".norm.weight")
        return F.linear(y.to(z.dtype), self.weight(layer + ".out_proj.weight"))

    def forward(self, tokens, labels):
        x = F.embedding(tokens, self.weight("backbone.embeddings.weight"))
        for i, letter in enumerate(ARGUMENTS.pattern):
            layer = f"backbone.layers.{i}"
            y = self.norm(x, layer + ".norm.weight")
            layer += ".mixer"
            if letter == "M":
                y = self.mamba(y, layer)
            elif letter == "*":
                y = self.attention(y, layer)
            else:
                y = F.linear(F.relu(F.linear(y, self.weight(layer + ".up_proj.weight"))).square(), self.weight(layer + ".down_proj.weight"))
            x = x + y
        logits = F.linear(self.norm(x, "backbone.norm_f.weight"), self.weight("lm_head.weight"))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def scan(x, dt, a, keys, queries, d):
    """Mamba-2's scan by chunks (Dao and Gu 2024, listing 1): x [b, s, heads, size], dt [b, s, heads], keys and queries [b, s, groups, states]."""
    heads, groups = x.shape[2], keys.shape[2]
    length = min(CHUNK, x.shape[1])
    chunks = (part.unflatten(1, (-1, length)) for part in (x * dt[..., None], dt * a, *(
        part.repeat_interleave(heads // groups, 2) for part in (keys, queries))))
    scaled, decay, keys, queries = (part.transpose(2, 3) for part in chunks)  # [b, chunks, heads, length, ...]
    decay = decay.cumsum(-1)
    within = (decay[..., :, None] - decay[..., None, :]).masked_fill(
        torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), -math.inf).exp()
    y = (queries @ keys.mT * within) @ scaled
    ends = (keys * (decay[..., -1:] - decay).exp()[..., None]).mT @ scaled  # what each chunk adds to the state
    state, before = torch.zeros_like(ends[:, 0]), []
    for i in range(ends.shape[1]):
        before.append(state)
        state = state * decay[:, i, :, -1].exp()[..., None, None] + ends[:, i]
    y = y + (queries * decay.exp()[..., None]) @ torch.stack(before, 1)
    return y.transpose(2, 3).flatten(1, 2) + x * d[:, None]


def learning_rate(step):
    """Of the step with this number, from 0: Megatron's schedule counts the steps that are done."""
    a = ARGUMENTS
    if step <= a.warmup:
        return a.lr * step / a.warmup
    done = (step - a.warmup) / (a.steps - a.warmup)
    return a.lr / 10 + 0.9 * a.lr * 0.5 * (math.cos(math.pi * done) + 1)


def train_there(name, weights, samples):
    a = ARGUMENTS
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    model = (HybridPeer if a.pattern else Peer)(weights).to(a.device)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=BETAS, eps=1e-8)
    losses, begin = [], time.time()
    for step in range(a.steps):
        if time.time() - begin > a.limit:
            raise SystemExit(f"PyTorch in {name} reached step {step} in {a.limit:.0f} s")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        text = torch.from_numpy(numpy.stack([samples[step * a.batch + i] for i in range(a.batch)])).to(a.device)
        total = torch.zeros((), device=a.device)
        for part in text.split(a.micro_batch):
            with torch.autocast(a.device, torch.bfloat16, enabled=name == "bf16"):
                loss = model(part[:, :-1], part[:, 1:]) * (len(part) / a.batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return [loss.item() for loss in losses]


# -- the comparison


def path(name):
    return os.path.join(ARGUMENTS.output, name)


def means(losses):
    size = ARGUMENTS.window
    return [sum(losses[i:i + size]) / len(losses[i:i + size]) for i in range(0, len(losses), size)]


def check_samples(samples):
    """The peer reads what `inspect-dataset` says that a run reads."""
    for i in (0, ARGUMENTS.steps * ARGUMENTS.batch - 1):
        said = json.loads(megatron("inspect-dataset", "--train-data-path", path("data_text_document"), "--data-cache-path", path("cache"),
                                   "--seq-length", ARGUMENTS.sequence, "--num-samples", ARGUMENTS.steps * ARGUMENTS.batch,
                                   "--sample", i, "--json"))
        expected = [*said["sample"]["tokens"], said["sample"]["labels"][-1]]
        if expected != samples[i].tolist():
            raise SystemExit(f"sample {i} begins {samples[i][:8]}, inspect-dataset says {expected[:8]}")



def main():
    a = ARGUMENTS
    os.makedirs(a.output, exist_ok=True)
    prepare_data()
    weights = draw_weights()
    write_folder(weights)
    curves, seconds = {}, {}

    def add(name, run, *arguments):
        begin = time.time()
        curves[name] = run(*arguments)
        seconds[name] = time.time() - begin
        if len(curves[name]) != a.steps:
            raise SystemExit(f"{name} logged {len(curves[name])} of {a.steps} steps")
        with open(path("losses.json"), "w") as out:
            json.dump(curves, out)

    for name in a.ours:
        add("ours " + name, train_here, name)
    samples = Samples(path("data_text_document"), path("cache"))
    check_samples(samples)
    for name in a.peers:
        add("torch " + name, train_there, name, weights, samples)

    count = sum(w.numel() for w in weights.values())
    print(f"{count / 1e6:.1f} M parameters, {a.steps} steps of {a.batch} x {a.sequence} tokens, {len(samples.tokens) / 1e6:.2f} M tokens of text, "
          f"torch {torch.__version__}, {torch.cuda.get_device_name() if a.device == 'cuda' else 'CPU'}")
    reference = "torch " + a.peers[0]
    table = {name: means(curve) for name, curve in curves.items()}
    print(f"{'steps':>9}" + "".join(f"{name:>26}" for name in curves))
    for w, expected in enumerate(table[reference]):
        first, last = w * a.window + 1, min((w + 1) * a.window, a.steps)
        print(f"{first:4}-{last:<4}" + "".join(f"{table[n][w]:16.5f} {100 * (table[n][w] / expected - 1):+8.3f}%" for n in curves))
    failed = False
    for name, curve in curves.items():
        if name == reference:
            print(f"{name}: {seconds[name]:.0f} s")
            continue
        window = max(abs(x / y - 1) for x, y in zip(table[name], table[reference]))
        step = max(abs(x / y - 1) for x, y in zip(curve, curves[reference]))
        tolerance = a.tolerance_fp8 if "fp8" in name else a.tolerance
        bad = not window <= tolerance or not all(map(math.isfinite, curve))
        failed |= bad
        print(f"{name}: largest relative difference to {reference}: window {window:.2e}, single step {step:.2e}; last window "
              f"{table[name][-1] / table[reference][-1] - 1:+.2e}; {seconds[name]:.0f} s{'  ABOVE ' + str(tolerance) if bad else ''}")
    if not table[reference][-1] < 0.95 * curves[reference][0]:
        print(f"{reference} did not learn: {curves[reference][0]:.3f} to {table[reference][-1]:.3f}")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--output", required=True, help="an empty folder")
    parser.add_argument("--ours", nargs="+", choices=OURS, default=["bf16"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["bf16"], help="the first is what all are compared with")
    parser.add_argument("--text", nargs="+", default=[os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")])
    parser.add_argument("--megabytes", type=float, default=200, help="text is taken up to this size")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pattern", help="letters of the layers, M, * and -, in place of --layers")
    parser.add_argument("--states", type=int, default=128, help="of Mamba-2, as the next two")
    parser.add_argument("--mamba-head", type=int, default=64)
    parser.add_argument("--mamba-groups", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--tolerance-fp8", type=float, default=0.03)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a run is ended")
    parser.add_argument("flags", nargs="*", help="more flags of pretrain, behind --")
    ARGUMENTS = parser.parse_args()
    if ARGUMENTS.pattern:
        ARGUMENTS.layers = len(ARGUMENTS.pattern)
        if set(ARGUMENTS.pattern) - set("M*-"):
            parser.error("--pattern has other letters than M, * and -")
        if ARGUMENTS.sequence % min(CHUNK, ARGUMENTS.sequence) != 0 or 2 * ARGUMENTS.hidden % (ARGUMENTS.mamba_head * ARGUMENTS.mamba_groups) != 0:
            parser.error(f"--sequence must be a multiple of {CHUNK} or below, 2 --hidden one of --mamba-head times --mamba-groups")
    if ARGUMENTS.vocabulary % 128 != 0 or ARGUMENTS.batch % ARGUMENTS.micro_batch != 0:
        parser.error("--vocabulary must be a multiple of 128, --batch one of --micro-batch")
    sys.exit(main())
