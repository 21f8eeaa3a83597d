"""Checks that `transformers` loads what `megatron convert-checkpoint` writes: every golden goes there and back through the
binary, and must give the same bits as the golden's folder, since its weights are the same. The golden's stored logits, which another
processor computed, differ by the order of fp32 sums: between 1e-7 and 3e-6 here, of logits up to 10; the limit 1e-4 is that of the
tests. Run: python check_export.py path/to/megatron [case ...]
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


def logits(folder, tokens, positions):
    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(tokens[:, :SHORT]).logits[0], model(tokens).logits[0][positions]])


def check(binary, case):
    golden = load_file(os.path.join(HERE, case, "golden.safetensors"))
    tokens, positions = golden["tokens"].long()[None], golden["positions"].long()
    source = logits(os.path.join(HERE, case), tokens, positions)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
        convert(binary, os.path.join(HERE, case), ours)
        convert(binary, ours, theirs)
        written = logits(theirs, tokens, positions)
    stored = torch.cat([golden["logits_short"], golden["logits_long"]])
    elsewhere = ((source - stored).norm(dim=-1) / stored.norm(dim=-1)).max()
    print(f"{case}: {'equal' if torch.equal(written, source) else 'OTHER'}, {float(elsewhere):.1e} from the golden")
    return torch.equal(written, source) and elsewhere <= 1e-4


if __name__ == "__main__":
    results = [check(sys.argv[1], case) for case in sys.argv[2:] or CASES]
    sys.exit(0 if all(results) else "transformers computes something else with what was written")
