"""Writes the goldens of a gated delta net and of gated attention: output and every gradient of Qwen 3.5's layers, and how far they round in fp32.

The reference is the Qwen3_5GatedDeltaNet and the Qwen3_5Attention of Hugging Face transformers with autograd. Where it computes in fp32 whatever the model's type
(the rule, its decay, norms, softmax), fp64 is put in place. Element i of the tensor u(c), row major from 0, is sin(1.3 c + 0.7 i).

Made with torch 2.11.0, transformers 5.23.0, safetensors. Run: python make_goldens.py
"""
import copy
import os

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENS, SAMPLES, HIDDEN = 150, 2, 8


class Fp64Torch:
    """torch, in which fp32 is fp64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def u(c, *shape):
    n = torch.Size(shape).numel()
    return torch.sin(1.3 * c + 0.7 * torch.arange(n, dtype=torch.float64)).view(shape)


def delta_net():
    config = Qwen3_5TextConfig(hidden_size=HIDDEN, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4,
                               linear_value_head_dim=6, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, num_hidden_layers=1,
                               layer_types=["linear_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).double()
    parts = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
    rows = [part.weight.shape[0] for part in parts]
    with torch.no_grad():
        for part, weight in zip(parts, (0.5 * u(21, sum(rows), HIDDEN)).split(rows)):
            part.weight.copy_(weight)
        layer.conv1d.weight.copy_(0.5 * u(22, *layer.conv1d.weight.shape))
        layer.dt_bias.copy_(u(24, 4))
        layer.A_log.copy_(0.5 + 0.5 * u(25, 4))
        layer.norm.weight.copy_(1 + 0.1 * u(27, 6))
        layer.out_proj.weight.copy_(0.5 * u(28, HIDDEN, 24))
    x = u(30, TOKENS, SAMPLES, HIDDEN).requires_grad_(True)
    y = layer(x.transpose(0, 1)).transpose(0, 1)
    (y * u(40, TOKENS, SAMPLES, HIDDEN)).sum().backward()
    assert y.dtype == torch.float64
    tensors = {
        "y": y.detach(),
        "dx": x.grad,
        "in_proj.weight": torch.cat([part.weight.grad for part in parts]),
        "conv1d.weight": layer.conv1d.weight.grad,
        "dt_bias": layer.dt_bias.grad,
        "A_log": layer.A_log.grad,
        "out_norm.weight": layer.norm.weight.grad,
        "out_proj.weight": layer.out_proj.weight.grad,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, os.path.join(HERE, "qwen3_5.safetensors"))


CASES = 16


def w(c, *shape):
    """Element i is sin(1.3 c + 0.7 i^2), rounded to fp32: matrices of full rank."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(1.3 * c + 0.7 * i * i).to(torch.float32).double().view(shape)


def rounding():
    """Relative errors of output and gradients in fp32, of layers whose outputs before the norm are often near 0."""
    tokens, hidden = 24, 48
    config = Qwen3_5TextConfig(hidden_size=hidden, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6,
                               linear_value_head_dim=4, linear_conv_kernel_dim=4, rms_norm_eps=1e-5, num_hidden_layers=1,
                               layer_types=["linear_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    errors = []
    for case in range(CASES):
        c = 100 * case
        layer = qwen.Qwen3_5GatedDeltaNet(config, 0)
        parts = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
        rows = [part.weight.shape[0] for part in parts]
        with torch.no_grad():
            for part, weight in zip(parts, (0.25 * w(c + 21, sum(rows), hidden)).split(rows)):
                part.weight.copy_(weight)
            layer.conv1d.weight.copy_(0.5 * w(c + 22, *layer.conv1d.weight.shape))
            layer.dt_bias.fill_(1)
            layer.A_log.copy_(1.5 + 1.25 * w(c + 25, 8))
            layer.norm.weight.fill_(1)
            layer.out_proj.weight.copy_(0.25 * w(c + 28, hidden, 32))

        def run(layer):
            dtype = layer.dt_bias.dtype
            x = w(c + 30, tokens, SAMPLES, hidden).to(dtype).requires_grad_(True)
            y = layer(x.transpose(0, 1)).transpose(0, 1)
            assert y.dtype == dtype
            (y * w(c + 40, tokens, SAMPLES, hidden).to(dtype)).sum().backward()
            return y.detach().double(), torch.cat([t.grad.double().flatten() for t in (x, *layer.parameters())])

        rounded = run(layer)
        single = torch.Tensor.float
        qwen.torch, torch.Tensor.float = Fp64Torch(), torch.Tensor.double
        exact = run(copy.deepcopy(layer).double())
        qwen.torch, torch.Tensor.float = torch, single
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(rounded, exact)])
    save_file({"errors": torch.tensor(errors, dtype=torch.float64)}, os.path.join(HERE, "qwen3_5_rounding.safetensors"))


def attention():
    heads, groups, size = 4, 2, 6
    config = Qwen3_5TextConfig(hidden_size=HIDDEN, num_attention_heads=heads, num_key_value_heads=groups, head_dim=size, rms_norm_eps=1e-6,
                               num_hidden_layers=1, layer_types=["full_attention"], attn_implementation="eager")
    layer = qwen.Qwen3_5Attention(config, 0).double()

    def by_group(q, k, v):
        """Rows of ours: of each group its queries, their gates, its key, its value."""
        q, k, v = q.view(groups, heads // groups, 2, size, HIDDEN), k.view(groups, size, HIDDEN), v.view(groups, size, HIDDEN)
        return torch.cat([torch.cat([q[g, :, 0].flatten(0, 1), q[g, :, 1].flatten(0, 1), k[g], v[g]]) for g in range(groups)])

    with torch.no_grad():
        for place, linear in enumerate((layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)):
            linear.weight.copy_(0.5 * u(61 + place, *linear.weight.shape))
        layer.q_norm.weight.copy_(0.1 * u(65, size))
        layer.k_norm.weight.copy_(0.1 * u(66, size))
    x = u(30, 16, SAMPLES, HIDDEN).requires_grad_(True)
    one = torch.ones(SAMPLES, 16, 2, dtype=torch.float64)  # nothing is rotated
    mask = torch.full((16, 16), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    y = layer(x.transpose(0, 1), (one, 0 * one), mask)[0].transpose(0, 1)
    (y * u(40, 16, SAMPLES, HIDDEN)).sum().backward()
    assert y.dtype == torch.float64
    linears = layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight
    tensors = {
        "y": y.detach(),
        "dx": x.grad,
        "values/linear_qkv.weight": by_group(*(weight.detach() for weight in linears)),
        "linear_qkv.weight": by_group(*(weight.grad for weight in linears)),
        "linear_proj.weight": layer.o_proj.weight.grad,
        "q_layernorm.weight": layer.q_norm.weight.grad,
        "k_layernorm.weight": layer.k_norm.weight.grad,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, os.path.join(HERE, "qwen3_5_attention.safetensors"))


if __name__ == "__main__":
    rounding()
    qwen.torch = Fp64Torch()
    torch.Tensor.float = torch.Tensor.double
    delta_net()
    attention()
