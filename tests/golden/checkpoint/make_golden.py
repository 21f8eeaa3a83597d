"""Writes python.safetensors, or with --read FILE lists what the Python package sees in a file of ours.

Made with safetensors 0.8.0 and torch 2.11.0.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--read":
        for name, value in sorted(load_file(sys.argv[2]).items()):
            print(name, value.dtype, list(value.shape), float(value.double().sum()))
        return
    tensors = {
        "weight": torch.arange(15, dtype=torch.float32).reshape(3, 5) * 0.25 - 1,
        "half": torch.arange(7, dtype=torch.bfloat16),
        "ids": torch.tensor([-1, 2**40]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
    }
    save_file(tensors, str(Path(__file__).parent / "python.safetensors"), {"source": "safetensors"})


main()
