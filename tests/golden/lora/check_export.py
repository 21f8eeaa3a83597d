"""Checks that `peft` computes what we computed: adapters trained by `megatron pretrain` over tiny models of tests/golden/hf go through
`megatron convert-checkpoint` into folders of PEFT and, merged, into folders of Hugging Face; both must give the logits that
`megatron logits` gave for the checkpoint. Run: python check_export.py path/to/megatron
"""
import os
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(__file__))
HF = os.path.join(HERE, "..", "hf")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
TRAIN = ["--mock-data", "--seq-length", "32", "--micro-batch-size", "4", "--train-iters", "20", "--lr", "1e-2", "--eval-iters", "0",
         "--device", "cpu", "--num-threads", "1"]
CASES = {  # base, what is adapted
    "llama, all parts": ("llama2", ["--lora-rank", "4", "--lora-alpha", "8"]),
    "llama, whole linears": ("llama2", ["--lora-rank", "4", "--lora-targets", "linear_qkv", "linear_fc1"]),
    "qwen2, queries and values": ("qwen2", ["--lora-rank", "2", "--lora-targets", "q_proj", "v_proj"]),
    "gpt2, joined": ("gpt2", ["--lora-rank", "3", "--lora-targets", "linear_qkv", "linear_proj"]),
    "qwen2_moe, all but routed experts": ("qwen2_moe", ["--lora-rank", "2", "--lora-alpha", "4"]),
    "deepseek_v2, all but routed experts": ("deepseek_v2", ["--lora-rank", "2", "--lora-alpha", "4"]),
    "gemma2, all parts": ("gemma2", ["--lora-rank", "2", "--lora-alpha", "5"]),
}


def run(*arguments):
    result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr


def difference(logits, expected):
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def check(binary, case):
    base, flags = CASES[case]
    model_type = {"llama2": "llama"}.get(base, base)
    base = os.path.join(HF, base)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        run(binary, "pretrain", "--load", base, *TRAIN, *flags, "--save", path("run"))
        tokens = ",".join(map(str, TOKENS))
        run(binary, "logits", "--load", path("run"), "--dtype", "fp32", "--device", "cpu", "--tokens", tokens, "--output", path("logits"))
        run(binary, "convert-checkpoint", "--load", path("run"), "--save", path("peft"), "--hf-model-type", model_type)
        run(binary, "convert-checkpoint", "--load", path("run"), "--save", path("merged"), "--hf-model-type", model_type,
            "--merge-adapter")
        ours = load_file(path("logits"))["logits"]
        ids = torch.tensor([TOKENS])
        load = lambda name: AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            plain = load(base)(ids).logits[0]
            adapted = PeftModel.from_pretrained(load(base), path("peft")).eval()(ids).logits[0]
            merged = load(path("merged"))(ids).logits[0]
    moved, peft, whole = difference(plain, ours), difference(adapted, ours), difference(merged, ours)
    print(f"{case}: training moved the logits by {moved:.2f}; with peft {peft:.1e}, merged {whole:.1e}")
    return moved > 0.01 and peft < 1e-4 and whole < 1e-4


if __name__ == "__main__":
    results = [check(sys.argv[1], case) for case in CASES]
    sys.exit(0 if all(results) else "peft computes something else with what was written")
