"""NVFP4 operands by NumPy, for tests/unit/tensor/quantization_test.cc.

Made with numpy 2.4, safetensors 0.8, Python 3.11:
    python tests/golden/fp4/make_fp4_golden.py tests/golden/fp4

The law is that of Transformer Engine's reference quantiser (tests/pytorch/nvfp4, NVFP4QuantizerRef), written
out here with explicit tables of the values of E2M1 and E4M3 and searches for the nearest one, ties to even.
"""

import pathlib
import sys

import numpy as np
from safetensors.numpy import save_file

F = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1], F)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F)


def nearest(x, table):
    """The nearest value of a table of increasing positive values, at equal distance the one with the even index."""
    a = np.abs(x).astype(np.float64)
    t = table.astype(np.float64)
    high = np.clip(np.searchsorted(t, a), 1, len(t) - 1)
    low = high - 1
    down, up = a - t[low], t[high] - a
    index = np.where(down < up, low, np.where(down > up, high, np.where(low % 2 == 0, low, high)))
    return np.copysign(table[np.where(a >= t[-1], len(t) - 1, index)], x)


def quantize(x, square):
    """[values without the tensor's scale (E2M1 times E4M3), the tensor's encoding scale]"""
    r, c = x.shape
    height = 16 if square else 1
    blocks = x.reshape(r // height, height, c // 16, 16)
    amax = np.abs(x).max()
    encode = F(448 * 6) / amax if amax > 0 else F(1)
    decode = F(1) / encode
    block = nearest(np.minimum(np.abs(blocks).max(axis=(1, 3), keepdims=True) / F(6) * encode, F(448)), E4M3).astype(F)
    with np.errstate(divide="ignore"):
        factor = np.minimum(F(1) / (block * decode), np.finfo(F).max)
    codes = nearest(np.clip(blocks * factor, -6, 6), E2M1)
    return (codes * block).reshape(r, c).astype(F), encode


def hadamard(x):
    """Runs of 16 along the last dimension, with fixed signs, orthonormal."""
    h = np.array([[1]], F)
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    return ((x.reshape(-1, 16) * SIGNS) @ h * F(0.25)).reshape(x.shape).astype(F)


def main(folder):
    rng = np.random.default_rng(1)
    # Multiples of 1/64 of few bits: every sum of a transform is exact, and bf16 holds them.
    x = np.round(np.clip(rng.normal(size=(48, 64)), -3, 3) * 16).astype(F) / F(64)
    x[:, 5] *= F(8)
    x[3] = 0
    x[16:32, 16:32] *= F(2.0**-12)  # blocks whose scale is subnormal or zero in E4M3
    out = {"x": x}
    for name, matrix, square in (("input", x, False), ("weight", x, True), ("input_columns", hadamard(np.ascontiguousarray(x.T)), False)):
        values, encode = quantize(matrix, square)
        out[name], out[name + "_scale"] = values, np.array([encode], F)
    save_file(out, str(pathlib.Path(folder) / "fp4.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
