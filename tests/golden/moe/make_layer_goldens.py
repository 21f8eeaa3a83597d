"""Writes goldens of layers of experts: weights, input, output and every gradient of the blocks of Mixtral, Qwen2-MoE and DeepSeek-V3.

The reference is MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock and DeepseekV3MoE of Hugging Face transformers with autograd, in fp64. Their
routers compute in fp32 whatever the model's type; fp64 is put in place, after the block as it is has been compared in fp32. What fp32 holds exactly is stored so.

Made with torch 2.11.0, transformers 5.23.0, safetensors. Run: python make_layer_goldens.py
"""
import contextlib
import json
import math
import os

import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENS, SAMPLES, HIDDEN, FFN, SHARED = 12, 2, 8, 6, 10
CASES = {
    "mixtral": (mixtral.MixtralConfig, mixtral.MixtralSparseMoeBlock, dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=FFN)),
    "qwen2_moe": (qwen.Qwen2MoeConfig, qwen.Qwen2MoeSparseMoeBlock,
                  dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=FFN, shared_expert_intermediate_size=SHARED,
                       norm_topk_prob=False)),
    "deepseek_v3": (deepseek.DeepseekV3Config, deepseek.DeepseekV3MoE,
                    dict(n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=FFN, n_shared_experts=2,
                         norm_topk_prob=True, routed_scaling_factor=2.5)),
}


@contextlib.contextmanager
def double_for_single():
    """What the sources compute in fp32 by name is computed in fp64."""
    kept = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = kept


def ours(named):
    """By the names of our layer: gate and up projections of a shared expert in one."""
    tensors = {}
    for name, tensor in named.items():
        module = name.split(".")[0].replace("shared_experts", "shared_expert")
        kind = name.split(".", 1)[1]
        if module == "shared_expert_gate":
            tensors["shared_experts.gate_weight"] = tensor
        elif module == "gate":
            tensors["router." + kind.replace("e_score_correction_bias", "expert_bias")] = tensor
        elif module == "experts":
            tensors["experts." + {"gate_up_proj": "linear_fc1.weight", "down_proj": "linear_fc2.weight"}[kind]] = tensor
        elif kind == "down_proj.weight":
            tensors["shared_experts.linear_fc2.weight"] = tensor
        elif kind == "gate_proj.weight":
            tensors["shared_experts.linear_fc1.weight"] = torch.cat([tensor, named[name.replace("gate_proj", "up_proj")]])
    return tensors


def make(case):
    make_config, block, sizes = CASES[case]
    config = make_config(hidden_size=HIDDEN, hidden_act="silu", **sizes)
    config._experts_implementation = "eager"
    layer = block(config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_((2 if name == "gate.weight" else 1) * torch.randn_like(p) / math.sqrt(p.shape[-1]))
        for name, bias in layer.named_buffers():
            bias.copy_(0.1 * torch.randn_like(bias))
    x = torch.randn(SAMPLES, TOKENS, HIDDEN)
    dy = torch.randn(SAMPLES, TOKENS, HIDDEN)
    with torch.no_grad():
        single = layer(x)
        chosen = layer.gate(x.view(-1, HIDDEN))[2].sort(-1)[0]
        if case == "deepseek_v3":  # the bias counts in the choice
            bias = layer.gate.e_score_correction_bias.clone()
            layer.gate.e_score_correction_bias.zero_()
            assert (chosen != layer.gate(x.view(-1, HIDDEN))[2].sort(-1)[0]).any()
            layer.gate.e_score_correction_bias.copy_(bias)

    layer = layer.double()
    x64 = x.double().requires_grad_(True)
    with double_for_single():
        y = layer(x64)
        assert (chosen == layer.gate(x64.view(-1, HIDDEN))[2].sort(-1)[0]).all()
        y.backward(dy.double())
    assert y.dtype == torch.float64 and (y - single).abs().max() < 1e-5, (case, (y - single).abs().max())
    assert chosen.flatten().bincount().min() > 0, "an expert without tokens has no gradient"

    tensors = {"x": x.double(), "dy": dy.double(), "y": y.detach(), "dx": x64.grad}
    tensors.update(ours({**{name: p.detach() for name, p in layer.named_parameters()}, **dict(layer.named_buffers())}))
    tensors.update({"grad." + name: grad for name, grad in ours({name: p.grad for name, p in layer.named_parameters()}).items()})
    save_file({k: (v.float() if torch.equal(v.float().double(), v) else v).contiguous() for k, v in tensors.items()}, os.path.join(HERE, case + ".safetensors"), {"config": json.dumps(sizes)})


for case in CASES:
    make(case)
