"""What `megatron bench` measures on a CPU: steps with their floor, kernels, the machine; and what it refuses."""

import json
import os
import pathlib
import subprocess
import sys

from ports import free_port

MEGATRON = pathlib.Path(sys.argv[1]).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ["--config", ROOT / "recipes/quickstart.yaml", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500", "--seq-length", "64",
         "--max-position-embeddings", "64", "--micro-batch-size", "1", "--global-batch-size", "2", "--num-threads", "1",
         "--device", "cpu"]


def bench(*arguments):
    return subprocess.run([MEGATRON, "bench", *map(str, arguments)], capture_output=True, text=True)


def measured(*arguments):
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EXPERTS = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64", "--max-position-embeddings", "64",
           "--position-embedding-type", "rope", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size", "32", "--micro-batch-size", "1",
           "--global-batch-size", "4", "--num-threads", "1", "--device", "cpu", "--bench-warmup", "1", "--bench-steps", "3"]
ROUTED = "tokens_per_expert_max_over_mean"


def on_ranks(count, *arguments):
    """What the first of these ranks prints."""
    address = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen([MEGATRON, "bench", *map(str, arguments), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]
    outputs = [rank.communicate() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    return json.loads(outputs[0][0])


def experts_and_vocabulary():
    # Without a tokenizer the vocabulary is all of the padded one.
    padded = measured("train", *EXPERTS, "--padded-vocab-size", "512")
    null = measured("train", *EXPERTS, "--tokenizer-type", "NullTokenizer", "--vocab-size", "512")
    same = ("parameters_of_this_rank", "last_loss", "tokens_per_step_and_rank")
    assert ROUTED not in padded and [padded[key] for key in same] == [null[key] for key in same], (padded, null)

    # Of four experts that each token uses all of, and one of; the busiest has a whole number of the 256 tokens.
    experts = ("train", *EXPERTS, "--padded-vocab-size", "512", "--num-experts", "4", "--moe-router-pre-softmax", "--moe-router-topk")
    one = measured(*experts, "1")[ROUTED]
    assert measured(*experts, "4")[ROUTED] == 1 and 1 < one <= 4 and one * 64 == round(one * 64), one
    both = on_ranks(2, *experts, "1", "--expert-model-parallel-size", "2", "--bench-floor", "--bench-seconds", "0.01")
    assert both["ranks"] == 2 and both["floor"]["gemm_ms"] > 0 and 1 < both[ROUTED] <= 4, both
    text = bench(*experts, "4").stdout
    assert " | tokens per expert max/mean 1.00 | loss " in text, text


def main():
    experts_and_vocabulary()
    machine = measured("machine", "--bench-seconds", "0.01")["measured"]
    names = [one["name"] for one in machine]
    assert any("product" in name for name in names) and "copy" in names and any("attention" in name for name in names), names
    assert all(one["microseconds"] > 0 for one in machine), machine
    assert all(one.get("tflops", 0) > 0 or one.get("gigabytes_per_second", 0) > 0 for one in machine), machine

    kernels = {one["name"]: one for one in measured("kernels", *MODEL, "--bench-seconds", "0.005")["measured"]}
    for name in ("linear_fc1 weight gradient", "norm forward", "activation backward", "cross entropy backward", "AdamW"):
        assert name in kernels, list(kernels)
    rows, hidden = 64, 192
    norm = kernels["norm forward"]
    moved = norm["gigabytes_per_second"] * norm["microseconds"] * 1e3
    assert abs(moved - 2 * 4 * rows * hidden) < 1e-6 * moved, (moved, "a norm reads and writes every fp32 element once")
    assert norm["of_copy_rate"] > 0

    some = measured("kernels", *MODEL, "--bench-seconds", "0.005", "--bench-only", "norm ")["measured"]
    assert [one["name"] for one in some] == ["copy", "norm forward", "norm backward with the residual's gradient"], some

    train = measured("train", *MODEL, "--bench-warmup", "1", "--bench-steps", "3", "--bench-floor", "--bench-seconds", "0.02")
    floor = train["floor"]
    def check_sum(floor, *more):
        parts = [floor[part] for part in ("gemm_ms", "attention_ms", *more, "memory_ms", "optimizer_ms")]
        assert all(part > 0 for part in parts) and abs(sum(parts) - floor["total_ms"]) < 1e-6 * floor["total_ms"], floor

    check_sum(floor)
    assert floor["states_ms"] == 0, floor
    hybrid = measured("train", *EXPERTS, "--num-layers", "4", "--hybrid-layer-pattern", "MG*-", "--mamba-num-groups", "2", "--mamba-state-dim", "16",
                      "--mamba-head-dim", "16", "--linear-num-key-heads", "2", "--linear-num-value-heads", "4", "--linear-key-head-dim", "16",
                      "--linear-value-head-dim", "16", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500", "--bench-warmup", "0", "--bench-steps", "1", "--bench-floor", "--bench-seconds", "0.02")
    check_sum(hybrid["floor"], "states_ms")
    assert train["step_ms"] > 0 and train["tokens_per_second_and_rank"] > 0, train

    # Over the optimizer's bytes, which are the same ones, the rate of a copy cancels out.
    def memory(*flags):
        part = measured("train", *MODEL, "--bf16", *flags, "--bench-warmup", "0", "--bench-steps", "1", "--bench-floor",
                        "--bench-seconds", "0.01")["floor"]
        return part["memory_ms"] / part["optimizer_ms"]

    fp8 = ("--fp8-format", "hybrid", "--fp8-recipe")
    plain, delayed, tensorwise = memory(), memory(*fp8, "delayed"), memory(*fp8, "tensorwise")
    layers, tokens, ffn, weights = 4, 2 * 64, 512, 4 * hidden * hidden + 3 * 512 * hidden
    of_delayed = layers * (tokens * 3 * hidden + weights)
    of_tensorwise = layers * (tokens * (12 * hidden + 5 * ffn) + 2 * weights)
    assert 0 < plain < delayed, (plain, delayed)
    got = (tensorwise - plain) / (delayed - plain)
    assert abs(got - of_tensorwise / of_delayed) < 1e-6 * got, (got, of_tensorwise / of_delayed)

    # Samples of the task, whose texts are counted without padding, computed or not.
    lengths = ("--mock-lengths", "8", "40")
    bert = [measured("train", "--task", "bert", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64",
                     "--max-position-embeddings", "64", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500", "--micro-batch-size", "8",
                     "--global-batch-size", "8", "--num-threads", "1", "--device", "cpu", "--bench-warmup", "1", "--bench-steps", "3",
                     "--bench-floor", "--bench-seconds", "0.05", *lengths, "--remove-padding", padding) for padding in ("true", "false")]
    texts = [one["text_tokens_per_step_and_rank"] for one in bert]
    assert texts[0] == texts[1] and 8 * 11 < texts[0] < 8 * 43, texts
    assert all(one["text_tokens_per_second_and_rank"] > 0 and one["tokens_per_step_and_rank"] == 8 * 64 for one in bert), bert
    assert abs(bert[0]["last_loss"] - bert[1]["last_loss"]) < 1e-4, bert
    # The lower bound of a step without padding is that of its texts, 8 to 43 of 64 tokens; the bytes of the optimizer are the same ones.
    texts_only, padded = (one["floor"]["memory_ms"] / one["floor"]["optimizer_ms"] for one in bert)
    assert 0.2 * padded < texts_only < 0.95 * padded, (texts_only, padded)

    # A model that reads made-up neighbours: its own parameters, operations, lower bound.
    sizes = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64", "--max-position-embeddings", "64",
             "--tokenizer-type", "NullTokenizer", "--vocab-size", "500", "--micro-batch-size", "1", "--global-batch-size", "1",
             "--num-threads", "1", "--device", "cpu", "--bench-warmup", "0", "--bench-steps", "2", "--bench-floor", "--bench-seconds", "0.02")
    # Times of two runs: what else this machine does may slow down one of them, but hardly the same one again and again.
    for _ in range(4):
        plain = measured("train", *sizes)
        retro = measured("train", *sizes, "--task", "retro", "--retro-layers", "1", "2", "--retro-chunk-length", "16")
        cross, encoder = 4 * 64 * 64 + 6 * 64, 12 * 64 * 64 + 13 * 64
        assert retro["parameters_of_this_rank"] - plain["parameters_of_this_rank"] == 3 * cross + 2 * encoder, (plain, retro)
        assert retro["tflops"] * retro["step_ms"] > 3 * plain["tflops"] * plain["step_ms"], (plain, retro)
        longer = {part: retro["floor"][part] / plain["floor"][part] for part in ("gemm_ms", "attention_ms")}
        if longer["gemm_ms"] > 1.5 and longer["attention_ms"] > 1.2:
            break
    else:
        assert False, (longer, plain, retro)

    for arguments, words in ((["train", *EXPERTS], "--tokenizer-type is not given"),
                             (["train", *EXPERTS, "--padded-vocab-size", "512", "--vocab-size", "513"], "--padded-vocab-size 512 is smaller than"),
                             (["train", *MODEL, "--mock-lengths", "8", "40"], "--mock-lengths has no effect with --task gpt"),
                             (["kernels", "--bench-floor", *MODEL], "--bench-floor belongs to megatron bench train"),
                             (["kernels", "--bench-timeline", "t.json", *MODEL], "--bench-timeline belongs to megatron bench train"),
                             ([], "megatron bench needs to know what to measure"),
                             (["machine", "--bench-seconds", "0"], "--bench-seconds 0 must be positive"),
                             (["train", *MODEL, "--bench-only", "norm"], "--bench-only belongs to megatron bench kernels"),
                             (["kernels", *MODEL, "--bench-seconds", "0.005", "--bench-only", "convolution"], 'no kernel of this model has "convolution" in its name'),
                             (["train", *MODEL, "--cuda-graph-impl", "local"], "--cuda-graph-impl local needs a GPU")):
        done = bench(*arguments)
        assert done.returncode != 0 and words in done.stderr, (arguments, done.stderr)


main()
