"""Gradients of goldens in three bytes an element. tests/unit/golden_tensors.h reads them."""
import torch


def packed(tensors):
    """With gradients (names that hold "grad/") as 24-bit integers, two's complement, the low byte first, uint8 [..., 3], and "scales" fp64: by the order
    of their names, what the integers of each are to be multiplied with."""
    out, scales = dict(tensors), []
    for name in sorted(name for name in tensors if "grad/" in name):
        scales.append(max(float(tensors[name].abs().max()), 1e-30) / (2 ** 23 - 1))
        value = (tensors[name].double() / scales[-1]).round().to(torch.int64)
        out[name] = torch.stack([(value >> shift & 0xFF).to(torch.uint8) for shift in (0, 8, 16)], -1)
    return out | {"scales": torch.tensor(scales, dtype=torch.float64)}
