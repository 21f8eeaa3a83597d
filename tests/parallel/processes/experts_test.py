#!/usr/bin/env python3
"""Experts on ranks that are processes over Gloo: losses and gradient norms of each row against one rank.

Usage: experts_test.py MEGATRON [unittest arguments]. Python's standard library only; this script sets the variables that torchrun sets.
With MEGATRON_MATRIX=whole `megatron prove` compares every row too, which takes minutes, and two ranks train under each of the loads of
expert_loads_test.cc. MEGATRON_DEVICE=cuda trains under those loads on two GPUs, with a wider model, and compares their peak of memory with what
`megatron check` said. MEGATRON_LOADS=zipf,even takes some of them, MEGATRON_RANKS=4 takes four ranks.
"""
import json
import os
import random
import struct
import tempfile
import unittest

import training

TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
ETP, SP = "--expert-tensor-parallel-size", "--sequence-parallel"
A2A = ["--moe-token-dispatcher-type", "alltoall"]
ROWS = {
    "ep2": (2, [EP, "2", *A2A, "--moe-expert-rank-capacity-factor", "1"]),
    "etp2": (2, [ETP, "2", *A2A]),
    "ep2_tp2_sp": (4, [EP, "2", TP, "2", SP, "--use-distributed-optimizer"]),
    "ep2_pp2": (4, [EP, "2", PP, "2", *A2A]),
}
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--position-embedding-type", "rope",
         "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--attention-dropout",
         "0", "--ffn-hidden-size", "32", "--num-experts", "8", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid",
         "--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01",
         "--micro-batch-size", "1", "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1", "--distributed-timeout-minutes", "1"]


class Training(training.Training):
    MODEL = MODEL


class Experts(Training):
    def test_rows_train_what_one_rank_trains(self):
        self.compare(ROWS, self.train(1), ("lm loss", "seq_load_balancing_loss", "grad_norm", "tokens per expert max/mean"))

    def test_choices_are_imposed_on_another_layout(self):
        with tempfile.TemporaryDirectory() as folder:
            record, again = os.path.join(folder, "record"), os.path.join(folder, "again")
            one = self.train(1, "--moe-routing-record", record, "--moe-enable-routing-replay")
            self.assertEqual(sorted(os.listdir(record)), [f"iter_{i:07}" for i in range(1, 5)])
            other = ["--moe-routing-replay", record, "--moe-routing-record", again, "--seed", "7"]
            replayed = self.train(2, EP, "2", *A2A, *other)
            for ours, theirs in zip(replayed, one):
                self.assertEqual(ours["tokens per expert max/mean"], theirs["tokens per expert max/mean"])
            self.assertNotAlmostEqual(replayed[0]["lm loss"], one[0]["lm loss"], places=4, msg="other weights")
            self.assertEqual(sorted(os.listdir(os.path.join(again, "iter_0000004"))), ["rank_00000.safetensors", "rank_00001.safetensors"])
            self.train(1, "--moe-routing-replay", again)
            codes, out, err = training.run(1, ["pretrain", *MODEL, *training.RUN, "--moe-routing-replay", again, "--train-iters", "5"])
            self.assertNotEqual(codes, [0])
            self.assertIn("has no choices of iteration 5", err)

    @unittest.skipUnless(os.environ.get("MEGATRON_MATRIX") == "whole", "part of `make matrix`")
    def test_rows_are_proved(self):
        for name, (ranks, flags) in ROWS.items():
            with self.subTest(row=name):
                codes, out, err = training.run(ranks, ["prove", "--steps", "2", *MODEL, *flags])
                self.assertEqual(codes, [0] * ranks, out + err)
                self.assertIn(f"{ranks} ranks as processes against one", out)
                self.assertIn("the layout changes nothing but rounding", out)


EXPERTS, RANKS, STEPS = 8, int(os.environ.get("MEGATRON_RANKS", "2")), 3
ON_GPUS = os.environ.get("MEGATRON_DEVICE") == "cuda"
LENGTH, BATCH = (1024, 16) if ON_GPUS else (16, 8)
# On GPUs rows of experts are most of what a step allocates.
WIDE = ["--device", "cuda", "--hidden-size", "512", "--ffn-hidden-size", "2048", "--seq-length", str(LENGTH), "--micro-batch-size", "4",
        "--global-batch-size", str(BATCH), "--log-memory-interval", "1"] if ON_GPUS else []
PER_RANK = EXPERTS // RANKS


def in_turn(first, count):
    return lambda sample, token: (first + token % count, first + (token + 1) % count)


def zipf(sample, token):
    draw = random.Random(sample * LENGTH + token)
    first, second = draw.choices(range(EXPERTS), [1 / (1 + expert) for expert in range(EXPERTS)], k=2)
    return (first, second if second != first else (first + 1) % EXPERTS)


# Two experts for each token of each sample.
LOADS = {
    "even": in_turn(0, EXPERTS),
    "zipf": zipf,
    "one expert": lambda sample, token: (3, token % 3),
    "one rank": in_turn(PER_RANK, PER_RANK),
    "idle rank": in_turn(0, EXPERTS - PER_RANK),
    "idle experts": in_turn(3, 2),
    "wandering rank": lambda sample, token: in_turn(sample // 4 % RANKS * PER_RANK, PER_RANK)(sample, token),
}
TRANSPORTS = {
    "alltoall": A2A,
    "alltoall in rounds": [*A2A, "--moe-expert-rank-capacity-factor", "1.25"],
    "allgather": ["--moe-token-dispatcher-type", "allgather"],
}
if ON_GPUS:  # into the memory of other GPUs
    TRANSPORTS["flex"] = ["--moe-token-dispatcher-type", "flex"]


def write_choices(folder, load):
    """Files as --moe-routing-record writes them."""
    for step in range(STEPS):
        samples = range(step * BATCH, (step + 1) * BATCH)
        experts = [expert for sample in samples for token in range(LENGTH) for expert in load(sample, token)]
        chosen = struct.pack(f"<{len(experts)}h", *experts)
        tensors = {"samples": ("I64", [BATCH], struct.pack(f"<{BATCH}q", *samples))}
        for layer in (1, 2):
            tensors[f"layer_{layer}"] = ("I16", [BATCH, LENGTH, 2], chosen)
        header, data = {}, b""
        for name, (dtype, shape, content) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        path = os.path.join(folder, f"iter_{step + 1:07}")
        os.makedirs(path)
        with open(os.path.join(path, "rank_00000.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)


def rows_of_the_fullest_rank(load):
    """In the fullest micro-batch of all ranks, over a balanced share."""
    most, samples = 0, RANKS * (4 if ON_GPUS else 1)
    for first in range(0, BATCH * STEPS, samples):
        counts = [0] * RANKS
        for sample in range(first, first + samples):
            for token in range(LENGTH):
                for expert in load(sample, token):
                    counts[expert // PER_RANK] += 1
        most = max(most, max(counts) * RANKS / sum(counts))
    return most


@unittest.skipUnless(ON_GPUS or os.environ.get("MEGATRON_MATRIX") == "whole", "part of `make matrix`, and of runs on two GPUs")
class Loads(Training):
    def allocated(self, transport, load):
        """What `check` says for a rank."""
        factor = max(1.0, rows_of_the_fullest_rank(load))
        codes, out, err = training.run(1, ["check", *MODEL, *training.RUN, *WIDE, *transport, EP, str(RANKS), "--world-size", str(RANKS),
                                           "--load-factor", str(factor), "--json"])
        self.assertEqual(codes, [0], out + err)
        name = "--load-factor" if factor > 1 else "balance"
        return next(entry for entry in json.loads(out)["expert_loads"] if entry["name"] == name)["allocated"]

    def test_ranks_train_what_one_rank_trains(self):
        wanted = os.environ.get("MEGATRON_LOADS", ",".join(LOADS)).split(",")
        for name in wanted:
            load = LOADS[name]
            with tempfile.TemporaryDirectory() as folder:
                write_choices(folder, load)
                imposed = [*WIDE, "--train-iters", str(STEPS), "--moe-routing-replay", folder]
                one = self.train(1, *imposed)
                for transport, flags in TRANSPORTS.items():
                    with self.subTest(load=name, transport=transport):
                        records = self.records(RANKS, *imposed, EP, str(RANKS), *flags)
                        steps = [record for record in records if record["type"] == "train"]
                        self.assertEqual(len(steps), STEPS)
                        for ours, theirs in zip(steps, one):
                            for number in ("lm loss", "seq_load_balancing_loss", "grad_norm", "tokens per expert max/mean"):
                                self.assertAlmostEqual(ours[number] / theirs[number], 1, delta=1e-4 if ON_GPUS else 2e-5, msg=number)
                        if ON_GPUS:
                            peak = max(record["max_allocated_bytes"] for record in records if record["type"] == "memory")
                            planned = self.allocated(flags, load)
                            print(f"{name}, {transport}: at most {peak >> 20} MiB allocated, planned {planned >> 20}", flush=True)
                            self.assertLess(peak, 1.02 * planned)


if __name__ == "__main__":
    training.main()
