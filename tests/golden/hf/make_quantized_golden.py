"""Writes the goldens of quantised Hugging Face models: for each a folder with a tiny random model whose linear weights are codes with
scales, as they are published, and golden.safetensors with tokens and logits_short [12, v], logits_long [positions, v] at `positions`, which
`transformers` computes in fp32 with the weights of the codes in bf16: of MXFP4 those that it makes itself; of fp8 those of the formula with
which DeepSeek's own program reads its files, since transformers 5.23 divides rows and columns evenly where the last block is incomplete.

  deepseek_v3_fp8   E4M3 with an fp32 scale for each block of 128 x 128 (weight_scale_inv), incomplete blocks included
  gpt_oss_mxfp4     experts as E2M1, two in a byte, with a power of two for every 32 (_blocks, _scales)

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_quantized_golden.py
"""
import os
import shutil
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from make_hf_golden import CASES, EAGER, HERE, POSITIONS, SHORT, as_written, fill, write

BLOCK = 128
DEEPSEEK = {**CASES["deepseek_v3"], "hidden_size": 144, "intermediate_size": 136, "moe_intermediate_size": 24, "num_nextn_predict_layers": 0,
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
GPT_OSS = {**CASES["gpt_oss"], "hidden_size": 32, "intermediate_size": 32,
           "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
                                   "quant_method": "mxfp4"}}


def fp8(tensors):
    out = {}
    for name, value in tensors.items():
        linear = value.dim() == 2 and name.endswith("proj.weight") or ("_proj" in name and value.dim() == 2)
        if not linear:
            out[name] = value
            continue
        rows, columns = value.shape
        scales = torch.zeros((rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK)
        codes = torch.zeros(value.shape, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scales[i, j] = value[block].float().abs().max() / 448 * (1 + 0.1 * i + 0.2 * j)
                codes[block] = (value[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
        out[name], out[name + "_scale_inv"] = codes, scales
    return out


def numbers_of_fp8(tensors):
    out = {}
    for name, value in tensors.items():
        if value.dtype == torch.float8_e4m3fn:
            scales = tensors[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            value = (value.float() * scales[:value.shape[0], :value.shape[1]]).bfloat16()
        if not name.endswith("_scale_inv"):
            out[name] = value
    return out


def mxfp4(tensors):
    out, generator = {}, torch.Generator().manual_seed(4)
    for name, value in tensors.items():
        if not (".experts." in name and value.dim() == 3):
            out[name] = value
            continue
        experts, inputs, outputs = value.shape
        out[name + "_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        out[name + "_scales"] = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return out


def make(case, config_json, quantise, options, dequantise=None):
    folder = os.path.join(HERE, case)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    plain = {key: value for key, value in config_json.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as scratch:
        write(os.path.join(scratch, "config.json"), plain)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scratch), **EAGER, dtype=torch.float32)
        fill(model, 7)
        tensors = {name: (tensor if name.endswith("e_score_correction_bias") else tensor.detach().bfloat16()).contiguous()
                   for name, tensor in as_written(model).items()}
    save_file(quantise(tensors), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    write(os.path.join(folder, "config.json"), config_json)
    with tempfile.TemporaryDirectory() as scratch:
        if dequantise:
            write(os.path.join(scratch, "config.json"), plain)
            save_file(dequantise(quantise(tensors)), os.path.join(scratch, "model.safetensors"), metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(scratch if dequantise else folder, **EAGER, **options, dtype=torch.bfloat16).float().eval()
    tokens = torch.randint(3, config_json["vocab_size"], (72,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        short, long = model(tokens[None, :SHORT]).logits[0], model(tokens[None]).logits[0, POSITIONS]
    save_file({"tokens": tokens.to(torch.int32), "positions": torch.tensor(POSITIONS, dtype=torch.int32), "logits_short": short.contiguous(),
               "logits_long": long.contiguous()}, os.path.join(folder, "golden.safetensors"))
    print(case, {str(tensor.dtype) for tensor in load_file(os.path.join(folder, "model.safetensors")).values()},
          sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    make("deepseek_v3_fp8", DEEPSEEK, fp8, {}, numbers_of_fp8)
    make("gpt_oss_mxfp4", GPT_OSS, mxfp4, {"quantization_config": Mxfp4Config(dequantize=True)})
