"""Linear layers with FP8 operands by PyTorch, for tests/unit/tensor_parallel/quantized_linear_test.cc.

Made with torch 2.11.0 (CPU), safetensors 0.8, Python 3.11:
    python tests/golden/fp8/make_fp8_golden.py tests/golden/fp8

Rounding is that of torch's float8 types, after clamping to the largest finite value; products are fp64.
Scales follow Transformer Engine: transformer_engine/common/recipe/recipe_common.cuh (compute_scale_from_amax)
for the current scale and the blocks' powers of two, transformer_engine/pytorch/fp8.py
(_amax_and_scale_update) for delayed scaling, here once per step.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def largest(dtype):
    return torch.finfo(dtype).max


def cast(x, dtype):
    return torch.clamp(x, -largest(dtype), largest(dtype)).to(dtype)


def current_scale(x, dtype):
    return torch.tensor(largest(dtype), dtype=torch.float32) / x.float().abs().max()


def by_scale(x, dtype, scale):
    """The values that the codes of x stand for, fp64; and the codes."""
    codes = cast(x.float() * scale, dtype)
    return codes.double() * (1.0 / scale).double(), codes


def power_of_two(scale):
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [1/2, 1)
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)


def by_vectors(x, dtype):
    """Blocks of 128 along the last dimension."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = power_of_two(torch.tensor(largest(dtype)) / blocks.abs().amax(-1, keepdim=True))
    codes = cast(blocks * scale, dtype)
    return (codes.double() / scale.double()).flatten(-2), codes.flatten(-2)


def by_squares(w, dtype):
    blocks = w.float().unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = power_of_two(torch.tensor(largest(dtype)) / blocks.abs().amax(dim=(1, 3), keepdim=True))
    codes = cast(blocks * scale, dtype)
    return (codes.double() / scale.double()).flatten(2).flatten(0, 1), codes.flatten(2).flatten(0, 1)


def operands(tokens, k, n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=g)
    x[:, 3] *= 30.0  # an outlier channel
    x[5] = 0.0
    w = torch.randn(n, k, generator=g) * 0.05
    dy = torch.randn(tokens, n, generator=g) * 1e-4 * torch.exp(2 * torch.randn(tokens, 1, generator=g))
    bias = torch.randn(n, generator=g)
    return [t.bfloat16() for t in (x, w, dy, bias)]


def products(x, w, dy, bias, columns=None):
    """y, dx, dw; `columns` are x and dy as they are summed over rows, where that is not x and dy."""
    x_columns, dy_columns = columns or (x, dy)
    return {"y": (x @ w.T + bias.double()).float(), "dx": (dy @ w).float(), "dw": (dy_columns.T @ x_columns).float()}


def thinned(result, every):
    return {name: t[::every] for name, t in result.items()}


def bits(codes):
    return codes.view(torch.uint8)


def main(folder):
    out = {}

    def put(prefix, tensors):
        out.update({f"{prefix}.{name}": t.contiguous() for name, t in tensors.items()})

    def put_products(recipe, name, x_codes, result):
        """Both formats have E4M3 in forward."""
        put(recipe, {"x_codes": bits(x_codes), "y": result.pop("y")})
        put(name, result)

    for name, gradient in (("tensorwise_hybrid", E5M2), ("tensorwise_e4m3", E4M3)):
        x, w, dy, bias = operands(32, 48, 64, 1)
        put("tensorwise", {"in.x": x, "in.w": w, "in.dy": dy, "in.bias": bias})
        x8, xc = by_scale(x, E4M3, current_scale(x, E4M3))
        w8, _ = by_scale(w, E4M3, current_scale(w, E4M3))
        dy8, dyc = by_scale(dy, gradient, current_scale(dy, gradient))
        put_products("tensorwise", name, xc, thinned(products(x8, w8, dy8, bias), 4))
        put(name, {"dy_codes": bits(dyc)})

    for name, gradient in (("blockwise_e4m3", E4M3), ("blockwise_hybrid", E5M2)):
        x, w, dy, bias = operands(128, 128, 256, 2)
        put("blockwise", {"in.x": x, "in.w": w, "in.dy": dy, "in.bias": bias})
        x8, xc = by_vectors(x, E4M3)
        w8, _ = by_squares(w, E4M3)
        dy8, _ = by_vectors(dy, gradient)
        x_columns, dy_columns = by_vectors(x.T, E4M3)[0].T, by_vectors(dy.T, gradient)[0].T
        result = products(x8, w8, dy8, bias, (x_columns, dy_columns))
        put_products("blockwise", name, xc, thinned(result, 8))

    # Six steps whose tensors grow and shrink; the largest of three steps, margin 1.
    x, w, dy, bias = operands(32, 48, 64, 3)
    put("delayed", {"in.x": x, "in.w": w, "in.dy": dy, "in.bias": bias})
    state = {role: {"history": torch.zeros(3), "scale": torch.tensor(0.0)} for role in ("x", "w", "dy")}
    for step, factor in enumerate((1.0, 2.0, 0.25, 0.0625, 4.0, 1.0)):
        tensors = {"x": (x * factor, E4M3), "w": (w, E4M3), "dy": (dy * factor, E5M2)}
        rounded = {}
        for role, (t, dtype) in tensors.items():
            scale = state[role]["scale"] if step > 0 else current_scale(t, dtype)
            rounded[role], _ = by_scale(t, dtype, scale)
        put(f"delayed.{step}", thinned(products(rounded["x"], rounded["w"], rounded["dy"], bias), 4))
        for role, (t, dtype) in tensors.items():
            s = state[role]
            s["history"] = torch.cat([t.float().abs().max()[None], s["history"][:-1]])
            amax = s["history"].max()
            s["scale"] = torch.where(amax > 0, torch.tensor(largest(dtype)) / amax / 2.0, s["scale"])
            put(f"delayed.{step}", {f"{role}_state": torch.cat([s["scale"][None], s["history"]])})

    save_file(out, str(pathlib.Path(folder) / "fp8.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
