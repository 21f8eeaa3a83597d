"""Linear layers in 8-bit integers by PyTorch, for tests/unit/tensor/int8_weight_test.cc.

Made with torch 2.15.0 (CPU), safetensors 0.8, Python 3.11:
    python tests/golden/int8/make_int8_golden.py tests/golden/int8

A scale for each output of the weight and for each row of the input (as CTranslate2's int8 and torchao's
Int8DynamicActivationInt8Weight have them, symmetric, codes -127 to 127), sums in int32, fp32 results.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file


def codes(t):
    scale = t.float().abs().amax(-1, keepdim=True) / 127
    return torch.round(t.float() / scale).clamp(-127, 127).to(torch.int8), scale


def main(folder):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 72, generator=g)
    x[:, 3] *= 20.0  # an outlier channel
    w, bias = torch.randn(20, 72, generator=g) * 0.05, torch.randn(20, generator=g)
    (xc, xs), (wc, ws) = codes(x), codes(w)
    sums = xc.to(torch.int32) @ wc.to(torch.int32).T
    y = sums.float() * xs * ws.T + bias
    save_file({"x": x, "w": w, "bias": bias, "y": y}, str(pathlib.Path(folder) / "int8.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
