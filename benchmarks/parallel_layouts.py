#!/usr/bin/env python3
"""Trains one model under many layouts of GPUs and compares losses and speed with one GPU. Python's standard library only.

    parallel_layouts.py --program 'dist/bin/megatron-run megatron' --config recipes/llama3_8b_8layers.yaml --output results \
        [--gpus 4] [--steps 30] [--only dp4,tp2] [-- flags of pretrain for every run]

Each layout runs alone or beside one that uses other GPUs (--pair). Prints a table: tokens/s/GPU (median of the last ten steps), its
ratio to one GPU, the largest relative difference of the loss to one GPU, peak memory; OUTPUT/layouts.json has all of it.
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time

TP, PP, CP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--sequence-parallel"
ZERO1 = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
ZERO3 = ["--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather"]
LONG = ["--seq-length", "32768", "--max-position-embeddings", "32768", "--micro-batch-size", "1", "--global-batch-size", "4"]
# name: (GPUs, flags, the run of one GPU that it is compared with)
LAYOUTS = {
    "one": (1, [], "one"),
    "dp2": (2, ZERO1, "one"),
    "dp4": (4, ZERO1, "one"),
    "fsdp2": (2, ZERO3, "one"),
    "fsdp4": (4, ZERO3, "one"),
    "tp2": (2, [TP, "2", SP], "one"),
    "tp4": (4, [TP, "4", SP], "one"),
    "pp2": (2, [PP, "2", "--pipeline-schedule", "zb-v", "--pipeline-model-parallel-layout", "Ettt|ttt|tt|L"], "one"),
    "pp2_zb_h1": (2, [PP, "2", "--pipeline-schedule", "zb-h1", "--pipeline-model-parallel-layout", "Ettttt|tttL"], "one"),
    "pp2_1f1b": (2, [PP, "2", "--pipeline-model-parallel-layout", "Ettttt|tttL"], "one"),
    "pp4_interleaved": (4, [PP, "4", "--num-virtual-stages-per-pipeline-rank", "2"], "one"),
    "pp4_zb": (4, [PP, "4", "--pipeline-schedule", "zb-v"], "one"),
    "tp2_pp2": (4, [TP, "2", SP, PP, "2", "--pipeline-schedule", "zb-v"], "one"),
    "tp2_dp2": (4, [TP, "2", SP, *ZERO1], "one"),
    "one_32k": (1, LONG, "one_32k"),
    "cp2_32k": (2, [*LONG, CP, "2"], "one_32k"),
    "cp4_32k": (4, [*LONG, CP, "4"], "one_32k"),
}


def without_repeated(command):
    """A flag with one value that is given again replaces the first."""
    out = []
    i = 0
    while i < len(command):
        if command[i].startswith("--") and i + 1 < len(command) and not command[i + 1].startswith("--") and command[i] in command[i + 2:]:
            i += 2
            continue
        out.append(command[i])
        i += 1
    return out


def start(name, arguments, devices):
    ranks, flags, _ = LAYOUTS[name]
    folder = os.path.join(arguments.output, name)
    os.makedirs(folder, exist_ok=True)
    program = shlex.split(arguments.program)
    command = program if ranks == 1 else [*shlex.split(arguments.torchrun), "--no-python", "--nproc-per-node", str(ranks),
                                          "--master-port", str(29500 + devices[0]), *program]
    command += ["pretrain", "--config", arguments.config, "--mock-data", "--train-iters", str(arguments.steps), "--log-interval", "1",
                "--eval-iters", "0", "--run-dir", folder, "--log-memory-interval", str(arguments.steps), *arguments.flags, *flags]
    command = without_repeated(command)
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, devices)))
    log = open(os.path.join(folder, "log"), "w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def wait(process, deadline):
    try:
        return process.wait(max(1, deadline - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)
        time.sleep(3)
        for line in subprocess.run(["pgrep", "-f", f"run-dir {ARGUMENTS.output}"], stdout=subprocess.PIPE, text=True).stdout.split():
            os.kill(int(line), 9)  # torchrun's ranks are sessions of their own
        return "no end"


def result(name):
    ranks, _, reference = LAYOUTS[name]
    folder = os.path.join(ARGUMENTS.output, name)
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        train = [record for record in map(json.loads, file) if record["type"] == "train"]
    times = [b["time"] - a["time"] for a, b in zip(train, train[1:])][-10:]
    tokens = train[-1]["global_batch_size"] * ARGUMENTS.sequence if "32k" not in name else 4 * 32768
    with open(os.path.join(folder, "log")) as file:
        memory = [line.split("max allocated: ")[1].split()[0] for line in file if "max allocated: " in line]
    return {"gpus": ranks, "reference": reference, "losses": [r["lm loss"] for r in train], "grad_norms": [r.get("grad_norm") for r in train],
            "tokens_per_second_per_gpu": tokens / statistics.median(times) / ranks if times else None,
            "peak_gib_of_the_first_rank": float(memory[-1]) / 1024 if memory else None}


def row(name, results):
    r = results[name]
    one = results.get(r["reference"])
    speed, memory = r["tokens_per_second_per_gpu"] or 0, r["peak_gib_of_the_first_rank"] or 0
    text = f"{name:16} {r['gpus']:4} {speed:10.0f}"
    if one is None:
        return text
    worst = max(abs(a / b - 1) for a, b in zip(r["losses"], one["losses"]))
    return text + f" {100 * speed / one['tokens_per_second_per_gpu']:7.1f}% {worst:10.1e} {memory:8.1f}"


def main():
    results = {}
    names = [n for n in ARGUMENTS.only.split(",")] if ARGUMENTS.only else list(LAYOUTS)
    waves, left = [], list(names)
    while left:
        wave = [left.pop(0)]
        if ARGUMENTS.pair:
            used = LAYOUTS[wave[0]][0]
            for other in list(left):
                if used + LAYOUTS[other][0] <= ARGUMENTS.gpus:
                    wave.append(other)
                    left.remove(other)
                    used += LAYOUTS[other][0]
        waves.append(wave)
    for wave in waves:
        begin, device, processes = time.time(), 0, []
        for name in wave:
            processes.append(start(name, ARGUMENTS, list(range(device, device + LAYOUTS[name][0]))))
            device += LAYOUTS[name][0]
        codes = [wait(process, begin + ARGUMENTS.limit) for process in processes]
        for name, code in zip(wave, codes):
            if code == 0:
                results[name] = result(name)
            else:
                with open(os.path.join(ARGUMENTS.output, name, "log")) as file:
                    lines = [line for line in file if "torch/distributed" not in line]
                    print(f"{name} failed with {code}:\n" + "".join(lines[-25:]))
        print(f"{' '.join(wave)}: {time.time() - begin:.0f} s", *(row(name, results) for name in wave if name in results), sep="\n",
              flush=True)
        with open(os.path.join(ARGUMENTS.output, "layouts.json"), "w") as file:
            json.dump(results, file, indent=1)
    print(f"{'layout':16} {'GPUs':>4} {'tok/s/GPU':>10} {'of one':>8} {'loss diff':>10} {'peak GiB':>8}")
    for name in names:
        if name in results:
            print(row(name, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument("--pair", action="store_true", help="run layouts side by side where the GPUs suffice")
    parser.add_argument("--torchrun", default=f"{sys.executable} -m torch.distributed.run")
    parser.add_argument("flags", nargs="*")
    ARGUMENTS = parser.parse_args()
    os.makedirs(ARGUMENTS.output, exist_ok=True)
    main()
