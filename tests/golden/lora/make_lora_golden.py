"""Writes the goldens of LoRA adapters: for each case a folder as `peft` saves it (adapter_config.json, adapter_model.safetensors)
for a tiny model of tests/golden/hf, and golden.safetensors with what `transformers` and `peft` compute with both:

  tokens, logits [positions, v]      all tokens, at the positions of `positions`
  grad/<name> [elements, 3]          gradient of the summed cross entropy of tokens[1:] given tokens[:-1] (first 40 tokens), of every
                                     tensor of the adapter, packed (../packed_gradients.py). Metadata "loss": that sum

All is computed in fp32, gradients in fp64, with eager attention.
Made with peft 0.21.2, transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_lora_golden.py [case ...]
"""
import os
import shutil
import sys

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

HF = os.path.join(HERE, "..", "hf")
POSITIONS, GRADIENT = [0, 1, 9, 17, 33, 63, 71], 40

# Case: model, settings.
CASES = {
    # An adapter for each part of the fused linears.
    "llama_all": ("llama2", dict(r=4, lora_alpha=6, target_modules="all-linear")),
    # Queries and values alone, grouped, with biases in the base and a tied head; fp32 adapters on a bf16 base.
    "qwen2_qv": ("qwen2", dict(r=3, lora_alpha=16, target_modules=["q_proj", "v_proj"])),
    # The gate alone, and what leads back.
    "llama_gate_down": ("llama3", dict(r=2, lora_alpha=2, target_modules=["gate_proj", "down_proj", "o_proj"])),
    # One adapter for all rows of joined matrices, stored transposed in the base.
    "gpt2_joined": ("gpt2", dict(r=5, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    # Attention, a dense layer and shared experts next to routed experts, which have none.
    "qwen2_moe_shared": ("qwen2_moe", dict(r=3, lora_alpha=6, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "shared_expert.gate_proj",
        "shared_expert.up_proj", "shared_expert.down_proj"])),
    # Latent attention, with and without latents of queries. (Of this family PEFT takes gate, up and down for those of routed experts.)
    "deepseek_v2_attention": ("deepseek_v2", dict(r=2, lora_alpha=5, target_modules=[
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])),
    "deepseek_v2_lite_attention": ("deepseek_v2_lite", dict(r=2, lora_alpha=4, target_modules=["q_proj", "kv_b_proj"])),
    # Layers of Mamba-2 beside attention and MLPs; the outputs of gated delta nets and of gated attention, whose gates are rows of q_proj.
    "bamba_states": ("bamba", dict(r=3, lora_alpha=6, target_modules=["in_proj", "out_proj", "q_proj", "o_proj", "down_proj"])),
    "qwen3_5_outputs": ("qwen3_5_text", dict(r=2, lora_alpha=5, target_modules=["out_proj", "q_proj", "k_proj", "up_proj"])),
    "phi3_joined": ("phi3", dict(r=2, lora_alpha=3.5, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
}


def fill(model, seed):
    """Adapters large enough that each shows in the logits."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=gen))


def stored_name(name):
    return name.replace(".default.", ".")


def make(case):
    base, settings = CASES[case]
    folder = os.path.join(HERE, case)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    model = AutoModelForCausalLM.from_pretrained(os.path.join(HF, base), attn_implementation="eager", experts_implementation="eager",
                                                 dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    fill(model, seed=sum(map(ord, case)))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    tokens = load_file(os.path.join(HF, base, "golden.safetensors"))["tokens"].long()
    out = {"tokens": tokens.to(torch.int32), "positions": torch.tensor(POSITIONS, dtype=torch.int32)}
    with torch.no_grad():
        out["logits"] = model(tokens[None]).logits[0, POSITIONS]
        with model.disable_adapter():
            base_logits = model(tokens[None]).logits[0, POSITIONS]
    changed = float((out["logits"] - base_logits).norm() / base_logits.norm())
    model.double()
    part = tokens[:GRADIENT]
    loss = F.cross_entropy(model(part[None, :-1]).logits[0], part[1:], reduction="sum")
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            out["grad/" + stored_name(name)] = parameter.grad.flatten()
    stored = load_file(os.path.join(folder, "adapter_model.safetensors"))
    assert {"grad/" + name for name in stored} == {name for name in out if name.startswith("grad/")} and set(get_peft_model_state_dict(model)) == set(stored)
    save_file({name: tensor.contiguous() for name, tensor in packed(out).items()}, os.path.join(folder, "golden.safetensors"),
              metadata={"loss": repr(float(loss))})
    print(f"{case}: {len(stored)} tensors, {sum(t.numel() for t in stored.values())} parameters, logits moved by {changed:.2f}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
