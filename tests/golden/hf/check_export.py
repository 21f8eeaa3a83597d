"""Checks that `transformers` loads what `megatron convert-checkpoint` writes: every golden goes there and back through the
binary, and must give the golden's logits. Run: python check_export.py path/to/megatron
"""
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from make_hf_golden import CASES, EAGER, HERE, SHORT

logging.set_verbosity_error()
logging.disable_progress_bar()


def convert(binary, load, save):
    subprocess.run([binary, "convert-checkpoint", "--load", load, "--save", save, "--max-shard-gb", "6e-6"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def check(binary, case):
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
        convert(binary, os.path.join(HERE, case), ours)
        convert(binary, ours, theirs)
        model = AutoModelForCausalLM.from_pretrained(theirs, **EAGER, dtype=torch.float32).eval()
    golden = load_file(os.path.join(HERE, case, "golden.safetensors"))
    tokens, positions = golden["tokens"].long()[None], golden["positions"].long()
    with torch.no_grad():
        short, long = model(tokens[:, :SHORT]).logits[0], model(tokens).logits[0][positions]
    difference = max((short - golden["logits_short"]).abs().max(), (long - golden["logits_long"]).abs().max())
    print(f"{case}: {float(difference):.1e}")
    return difference <= 1e-6


if __name__ == "__main__":
    results = [check(sys.argv[1], case) for case in CASES]
    sys.exit(0 if all(results) else "transformers computes something else with what was written")
