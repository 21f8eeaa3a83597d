"""Writes goldens of multi-latent attention: weights, input, output and every gradient of DeepSeek's attention layers.

The reference is the DeepseekV3Attention and DeepseekV2Attention of Hugging Face transformers with autograd, in fp64. Where transformers
computes in fp32 whatever the model's type (norms of latents, frequencies, cosines, softmax), fp64 is put in place, after the layer as it is
has been compared in fp32. What fp32 holds exactly is stored so.

Made with torch 2.8.0, transformers 5.23.0, safetensors. Run: python make_goldens.py
"""
import json
import math
import os

import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENS, SAMPLES = 12, 2
BASE = dict(hidden_size=16, num_attention_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10)
CASES = {
    "v3": (v3, "DeepseekV3", dict(BASE, q_lora_rank=12), dict(factor=40.0, mscale=1.0, mscale_all_dim=1.0)),
    "v2": (v2, "DeepseekV2", dict(BASE, q_lora_rank=None, v_head_dim=14), dict(factor=4.0, mscale=0.7, mscale_all_dim=0.5)),
    "v3_plain": (v3, "DeepseekV3", dict(BASE, q_lora_rank=None, v_head_dim=18), None),
}
NAMES = {"q_proj": "linear_q_proj", "q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj",
         "kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj", "o_proj": "linear_proj"}
NORMS = {"q_a_layernorm": "linear_q_up_proj", "kv_a_layernorm": "linear_kv_up_proj"}


def our_name(name):
    module, kind = name.rsplit(".", 1)
    return NORMS[module] + ".layer_norm_weight" if module in NORMS else f"{NAMES[module]}.{kind}"


def frequencies(width, yarn, base=10000.0, original=16):
    """Of each rotated pair, fp64, and the factor of cosines and sines (DeepSeek's yarn)."""
    powers = base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    if yarn is None:
        return 1 / powers, 1.0
    low, high = (width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32.0, 1.0))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    magnitude = [0.1 * yarn[m] * math.log(yarn["factor"]) + 1 for m in ("mscale", "mscale_all_dim")]
    return ramp / (yarn["factor"] * powers) + (1 - ramp) / powers, magnitude[0] / magnitude[1]


def make(case):
    module, prefix, sizes, yarn = CASES[case]
    rope = dict(rope_type="default", rope_theta=10000.0)
    if yarn is not None:
        rope = dict(rope_type="yarn", rope_theta=10000.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, **yarn)
    config = getattr(module, prefix + "Config")(
        **sizes, num_key_value_heads=sizes["num_attention_heads"], num_hidden_layers=1, intermediate_size=16, max_position_embeddings=640,
        rope_parameters=rope, attention_bias=False, attention_dropout=0.0, attn_implementation="eager")
    layer = getattr(module, prefix + "Attention")(config, 0)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) / math.sqrt(p.shape[1]))
    x = torch.randn(SAMPLES, TOKENS, sizes["hidden_size"])
    dy = torch.randn(SAMPLES, TOKENS, sizes["hidden_size"])
    positions = torch.arange(TOKENS).expand(SAMPLES, TOKENS)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1).expand(SAMPLES, 1, TOKENS, TOKENS)

    f, factor = frequencies(sizes["qk_rope_head_dim"], yarn)
    angles = positions[..., None].double() * f
    cos, sin = angles.cos() * factor, angles.sin() * factor
    tables = (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if module is v3 else torch.polar(torch.full_like(angles, factor), angles)
    as_it_is = getattr(module, prefix + "RotaryEmbedding")(config)(x, positions)
    for mine, theirs in zip(tables, as_it_is) if module is v3 else [(tables, as_it_is)]:
        assert (mine - theirs).abs().max() < 2e-6, (case, "tables")
    with torch.no_grad():
        single = layer(x, attention_mask=mask, position_embeddings=as_it_is)[0]

    def norm(self, t):
        return self.weight * (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6))

    def softmax(scores, dim=-1, dtype=None):
        return torch.softmax(scores, dim)

    getattr(module, prefix + "RMSNorm").forward = norm
    module.nn.functional.softmax, kept = softmax, module.nn.functional.softmax
    rotate = v2.apply_rotary_emb
    if module is v2:  # it rotates in fp32
        def in_double(q, k, freqs):
            turn = lambda t: torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2).contiguous()) * freqs.unsqueeze(1)).flatten(3)
            return turn(q), turn(k)
        v2.apply_rotary_emb = in_double
    layer = layer.double()
    x64 = x.double().requires_grad_(True)
    y = layer(x64, attention_mask=mask.double(), position_embeddings=tables)[0]
    y.backward(dy.double())
    module.nn.functional.softmax, v2.apply_rotary_emb = kept, rotate
    assert (y - single).abs().max() < 1e-5, (case, (y - single).abs().max())

    tensors = {"x": x.double(), "dy": dy.double(), "y": y.detach(), "dx": x64.grad}
    for name, p in layer.named_parameters():
        tensors[our_name(name)] = p.detach()
        tensors["grad." + our_name(name)] = p.grad
    settings = dict(sizes, rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    if yarn is not None:
        settings.update(rotary_scaling_factor=yarn["factor"], mscale=yarn["mscale"], mscale_all_dim=yarn["mscale_all_dim"])
    settings["q_lora_rank"] = sizes["q_lora_rank"] or 0
    save_file({k: (v.float() if torch.equal(v.float().double(), v) else v).contiguous() for k, v in tensors.items()}, os.path.join(HERE, case + ".safetensors"), {"config": json.dumps(settings)})


for case in CASES:
    make(case)
