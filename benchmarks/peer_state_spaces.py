"""Times the Triton kernels that those of state-space layers (kernels/ssm) are held against, on one GPU.

Peers: state-spaces' scan of Mamba-2 (mamba_ssm 2.3, ops/triton) and FLA's gated delta rule, convolution and gated norm (fla 0.6).
Both run on torch, triton and einops alone: of mamba_ssm only ops/triton and utils/{torch,determinism}.py, under an empty __init__.py.

  python benchmarks/peer_state_spaces.py --packages DIR   (DIR holds the folders mamba_ssm and fla)

Prints ns a token of each, forward alone and forward with backward. Triton compiles all candidates of its tuning first, in processes
of their own; what is timed is a CUDA graph of four calls in turn over two sets of inputs, larger together than the L2 cache.
"""
import argparse
import functools
import os
import statistics
import subprocess
import sys

import torch

HEADS, HEAD, STATES, GROUPS = 128, 64, 128, 8  # of a Mamba-2 layer of Nemotron-H 8B
KEYS, VALUES, SIZE = 16, 32, 128  # heads of a gated delta net


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def scan(tokens, samples):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    x = randn(samples, tokens, HEADS, HEAD)
    dt = torch.nn.functional.softplus(randn(samples, tokens, HEADS, dtype=torch.float32) - 2)
    a = -torch.linspace(1, 16, HEADS, device="cuda")
    b, c = randn(samples, tokens, GROUPS, STATES), randn(samples, tokens, GROUPS, STATES)
    d = torch.ones(HEADS, device="cuda")
    return lambda *t: mamba_chunk_scan_combined(*t[:5], 128, D=t[5]), (x, dt, a, b, c, d)


def delta(tokens, samples):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    q, k = (torch.nn.functional.normalize(randn(samples, tokens, KEYS, SIZE), dim=-1) for _ in range(2))
    v = randn(samples, tokens, VALUES, SIZE)
    g = -0.1 * randn(samples, tokens, VALUES, dtype=torch.float32).abs()
    beta = randn(samples, tokens, VALUES, dtype=torch.float32).sigmoid()
    return lambda *t: chunk_gated_delta_rule(*t)[0], (q, k, v, g, beta)


def convolution(tokens, samples):
    from fla.modules.causal_conv1d.ops import causal_conv1d
    channels = HEADS * HEAD + 2 * GROUPS * STATES
    return (lambda x, w, b: causal_conv1d(x, w, b, activation="silu")[0],
            (randn(samples, tokens, channels), randn(channels, 4), randn(channels)))


def gate_norm(tokens, samples):  # gate, then norm over groups of 1024: state-spaces'
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    width = HEADS * HEAD
    return (lambda y, z, w: rmsnorm_fn(y, w, None, z=z, eps=1e-5, group_size=width // GROUPS, norm_before_gate=False),
            (randn(samples, tokens, width), randn(samples, tokens, width), randn(width)))


def norm_gate(tokens, samples):  # norm of heads of 128, then gate: FLA's
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    return (lambda y, z, w: rms_norm_gated(y, z, w, None),
            (randn(samples, tokens, VALUES, SIZE), randn(samples, tokens, VALUES, SIZE), randn(SIZE)))


# name, operands, tokens, samples
CASES = [("scan of Mamba-2 (state-spaces)", scan, 8192, 1), ("scan of Mamba-2 (state-spaces)", scan, 8192, 2),
         ("gated delta rule (FLA)", delta, 8192, 1), ("gated delta rule (FLA)", delta, 32768, 1),
         ("convolution and SiLU (FLA)", convolution, 8192, 1), ("gate and norm 8 x 1024 (state-spaces)", gate_norm, 8192, 1),
         ("norm and gate 32 x 128 (FLA)", norm_gate, 8192, 1)]


def forward(function, operands):
    with torch.no_grad():
        return function(*operands)


def both(function, operands, dout):
    return torch.autograd.grad(function(*operands), operands, dout)


def with_gradients(function, operands):
    """Operands to differentiate for, and a gradient of the output."""
    return [t.detach().requires_grad_() for t in operands], torch.randn_like(forward(function, operands))


def lift_refusal():
    """FLA refuses its backward with Triton 3.4 to 3.7.0 on Hopper, whose code for it is wrong; for times it runs (see errors())."""
    import fla.ops.common.chunk_o as chunk_o
    chunk_o.TRITON_ABOVE_3_7_1 = True


def compile_share(rank, count):
    """Compiles every count-th candidate of each tuned kernel into Triton's cache, and launches none."""
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, grid, warmup=False, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        configs = self.prune_configs(kwargs)
        self.best_config = configs[0]
        key = str([(getattr(a, "dtype", None), getattr(a, "shape", a)) for a in (*args, *kwargs.values())])
        seen = self.__dict__.setdefault("shares", set())
        if key in seen:
            return
        seen.add(key)
        for config in configs[rank::count]:
            try:
                self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())
            except Exception:  # too much shared memory and the like: tuning skips it too
                pass

    Autotuner.run = run
    for _, case, tokens, samples in CASES:
        if tokens > 8192:
            continue
        try:
            function, operands = case(tokens, samples)
            both(function, *with_gradients(function, operands))
        except Exception as e:
            print(f"compiling {case.__name__}: {e!r}"[:300], flush=True)


def tune_shortly():
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench
    Autotuner.do_bench = property(lambda self: functools.partial(do_bench, warmup=3, rep=15))


def milliseconds(work, sets):
    """Of one call: the median of seven replays of a graph of calls in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for operands in sets * 2:
            work(operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for operands in sets * 2:
            work(operands)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (2 * len(sets)))
    return statistics.median(times)


def errors():
    """Of FLA's gradients against its own recurrence, token by token, in fp32: a backward that is wrong says so here."""
    from fla.ops.gated_delta_rule import naive_recurrent_gated_delta_rule
    function, operands = delta(512, 1)
    operands, dout = with_gradients(function, operands)
    got = both(function, operands, dout)
    wide = [t.detach().float().requires_grad_() for t in operands]
    repeated = lambda t: t.repeat_interleave(VALUES // KEYS, 2)
    out = naive_recurrent_gated_delta_rule(repeated(wide[0]), repeated(wide[1]), wide[2], wide[4], wide[3])
    out = out[0] if isinstance(out, tuple) else out
    exact = torch.autograd.grad(out, wide, dout.float())
    return " ".join(f"d{n} {(a.float() - b).norm() / b.norm():.1e}" for n, a, b in zip("q k v g beta".split(), got, exact))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--processes", type=int, default=14, help="that compile Triton's candidates")
    parser.add_argument("--share", type=int, help="used for those processes")
    args = parser.parse_args()
    sys.path.insert(0, args.packages)
    torch.manual_seed(3)
    lift_refusal()
    if args.share is not None:
        return compile_share(args.share, args.processes)
    shares = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--packages", args.packages, "--processes",
                                str(args.processes), "--share", str(i)]) for i in range(args.processes)]
    for share in shares:
        share.wait()
    import triton
    tune_shortly()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    for name, case, tokens, samples in CASES:
        line = f"{name}, {samples} x {tokens}:"
        try:
            sets = [case(tokens, samples) for _ in range(2)]
            function = sets[0][0]
            plain = [s[1] for s in sets]
            per_token = 1e6 / tokens / samples
            line += f" forward {milliseconds(lambda o: forward(function, o), plain) * per_token:.1f}"
            grads = [with_gradients(function, o) for o in plain]
            line += f" with backward {milliseconds(lambda o: both(function, *o), grads) * per_token:.1f}"
        except Exception as e:
            line += f" {e!r}"[:300]
        print(line + " ns/token", flush=True)
        torch.cuda.empty_cache()
    try:
        print("errors of FLA's gradients with this Triton:", errors())
    except Exception as e:
        print(f"errors of FLA's gradients: {e!r}"[:300])


if __name__ == "__main__":
    main()
