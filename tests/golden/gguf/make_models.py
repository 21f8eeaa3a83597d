#!/usr/bin/env python3
"""Writes the models of tests/golden/hf as GGUF files, by llama.cpp's own converter, without tokenizers.

    make_models.py LLAMA_CPP    # a folder of llama.cpp's sources: conversion/ and gguf-py/

Weights keep their values (bf16 matrices, fp32 vectors), so that logits are those of tests/golden/hf. The format has no keys for
some settings of these models, such as windows: where one matters (CHANGED), the model is converted without, and FAMILY.safetensors
has the logits that transformers computes so (fp32, eager attention).

Made with the sources in llama_cpp_python 0.3.36 (vendor/llama.cpp), torch 2.11.0 and transformers 5.23.0.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

HERE = Path(__file__).resolve().parent
HF = HERE.parent / "hf"
LLAMA_CPP = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py"), str(HF)]

import gguf  # noqa: E402
from conversion import get_model_class  # noqa: E402
from conversion.base import ModelBase  # noqa: E402
from make_hf_golden import fill  # noqa: E402

AS_THEY_ARE = ["llama2", "llama3", "qwen3", "phi3", "gpt2", "gpt_neox", "gpt_neox_sequential", "olmo2", "olmoe",
              "deepseek_v2_lite", "deepseek_v3", "glm4_moe"]
# Settings that the format has no keys for, as they are without.
CHANGED = {
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"layer_types": ["sliding_attention"] * 3},
    "starcoder2": {"sliding_window": None},
    "qwen2_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v2": {"rope_parameters": {"mscale_all_dim": 1.0}},
}


def convert(folder, out):
    hparams = ModelBase.load_hparams(folder, False)
    hparams.setdefault("n_ctx", hparams.get("n_positions"))
    hparams.setdefault("rotary_pct", hparams.get("rope_parameters", {}).get("partial_rotary_factor"))
    # Gemma's class looks for the tokens there.
    tokens = {"model": {"vocab": {str(i): i for i in range(hparams["vocab_size"])}}, "added_tokens": []}
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(folder, Path(temporary) / folder.name)
        (copy / "tokenizer.json").write_text(json.dumps(tokens))
        cls = get_model_class(hparams["architectures"][0])
        cls.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
        cls(copy, gguf.LlamaFileType.MOSTLY_BF16, out, hparams=hparams, model_name=out.stem).write()
    print(out.name, out.stat().st_size)


def changed(family, changes):
    config = AutoConfig.from_pretrained(HF / family)
    for key, value in changes.items():
        if key == "layer_types":
            value = value[:1] * config.num_hidden_layers
        if isinstance(value, dict):
            value = {**getattr(config, key), **value}
        setattr(config, key, value)
    if "decoder_sparse_step" in changes:  # there are layers with other weights
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        fill(model, 21)
    else:
        model = AutoModelForCausalLM.from_pretrained(HF / family, config=config, attn_implementation="eager", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / family
        model.to(torch.bfloat16).save_pretrained(folder)
        convert(folder, HERE / f"{family}.gguf")
        # Anew, since .to() has rounded the rotary frequencies, too.
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    write_logits(family, model)


def write_logits(family, model):
    tokens = load_file(HF / family / "golden.safetensors")["tokens"][:24]
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0]
    save_file({"tokens": tokens.contiguous(), "logits": logits.contiguous()}, HERE / f"{family}.safetensors")


def codes():
    """The experts of gpt-oss stay codes of MXFP4, with the limit of activations that the format implies."""
    family = "gpt_oss_mxfp4"
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(HF / family, Path(temporary) / family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "swiglu_limit": 7.0}))
        convert(folder, HERE / f"{family}.gguf")
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
        numbers = {name: value.float() for name, value in model.state_dict().items()}
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        model.load_state_dict(numbers)
    write_logits(family, model)


def main():
    for family in AS_THEY_ARE:
        convert(HF / family, HERE / f"{family}.gguf")
    for family, changes in CHANGED.items():
        changed(family, changes)
    codes()


if __name__ == "__main__":
    main()
