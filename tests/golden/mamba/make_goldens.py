"""Writes goldens of Mamba-2: weights, input, output and every gradient of transformers' mixers, with autograd.

  mamba2       one group, time steps limited to [0.3, 0.9], of which some are clipped on both sides
  nemotron_h   two groups, no limits (time_step_min, which it clips by in this path alone, is next to 0)

Two sequences of 29 tokens, in chunks of 8. fp32, as transformers computes them whatever the type.
Made with torch 2.11.0, transformers 5.23.0, safetensors. Run: python make_goldens.py
"""
import os

import torch
from safetensors.torch import save_file
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h

HERE = os.path.dirname(os.path.abspath(__file__))
HIDDEN, HEADS, HEAD, STATE, CHUNK, TOKENS, SAMPLES = 12, 6, 4, 5, 8, 29, 2
NAMES = {"conv1d.weight": "conv1d_weight", "conv1d.bias": "conv1d_bias"}


def mixers():
    common = dict(hidden_size=HIDDEN, conv_kernel=4, chunk_size=CHUNK, layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True)
    yield "mamba2", mamba2.Mamba2Mixer(mamba2.Mamba2Config(
        num_heads=HEADS, head_dim=HEAD, state_size=STATE, n_groups=1, expand=2, time_step_limit=(0.3, 0.9), hidden_act="silu", **common), 0)
    yield "nemotron_h", nemotron_h.NemotronHMamba2Mixer(nemotron_h.NemotronHConfig(
        mamba_num_heads=HEADS, mamba_head_dim=HEAD, ssm_state_size=STATE, n_groups=2, time_step_min=1e-30, mamba_proj_bias=False,
        mamba_hidden_act="silu", **common), 0)


def make(name, mixer, seed):
    gen = torch.Generator().manual_seed(seed)
    out = {}
    with torch.no_grad():
        for key, parameter in sorted(mixer.named_parameters()):
            x = 0.4 * torch.randn(parameter.shape, generator=gen)
            if key in ("norm.weight", "D"):
                x += 1
            if key == "dt_bias":
                x -= 0.5
            parameter.copy_(x)
            out[NAMES.get(key, key)] = parameter.detach().clone()
    x = torch.randn(SAMPLES, TOKENS, HIDDEN, generator=gen).requires_grad_()
    dy = torch.randn(SAMPLES, TOKENS, HIDDEN, generator=gen)
    y = mixer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    out.update(x=x.detach(), dy=dy, y=y.detach(), dx=x.grad)
    out.update({"grad/" + NAMES.get(key, key): parameter.grad for key, parameter in mixer.named_parameters()})
    save_file({key: tensor.contiguous() for key, tensor in out.items()}, os.path.join(HERE, name + ".safetensors"))
    print(name, sum(p.numel() for p in mixer.parameters()), float(y.detach().std()))


for i, (name, mixer) in enumerate(mixers()):
    make(name, mixer, i)
