#!/usr/bin/env python3
"""Writes what the package gguf says that blocks of each type mean, and a model made of such blocks.

  blocks.safetensors       per type: "Q4_K" the bytes of some blocks, at random, and "Q4_K.fp32" their elements
  llama_quantized.gguf     a Llama whose weights are random blocks of ten types
  llama_quantized.safetensors   tokens, and the logits that transformers computes with it (fp32, eager attention)

Made with gguf 0.19.0, numpy 2.4.6, torch 2.11.0 and transformers 5.23.0.
"""
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
# Where the 16-bit scales of a block are.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
# Scales that make weights of about 0.05.
SIZE = {"Q4_0": .012, "Q4_1": .012, "Q5_0": .006, "Q5_1": .006, "Q8_0": .0008, "Q2_K": .004, "Q3_K": .002, "Q4_K": .0003,
        "Q5_K": .00015, "Q6_K": .00004}


def random_blocks(name, count, rng, scale=None):
    """Without `scale`: any finite one, subnormal ones among them."""
    size = gguf.GGML_QUANT_SIZES[T[name]][1]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if name in ("F16", "BF16"):
        blocks = blocks.reshape(-1, 2)
        blocks[:, 1] &= 0xBB if name == "F16" else 0xBF
        return blocks.reshape(count, size)
    for i, at in enumerate(SCALES.get(name, [])):
        if scale is None:
            values = rng.integers(0, 1 << 16, count, dtype=np.uint16)
            values &= 0xBBFF  # not infinite
            values[0] = 5     # subnormal
        else:
            minimum = -{"Q4_1": 7.5, "Q5_1": 15.5}.get(name, -1.5)
            values = (scale * (minimum if i else 1) * rng.uniform(.8, 1.2, count)).astype(np.float16).view(np.uint16)
        blocks[:, at:at + 2] = values.view(np.uint8).reshape(count, 2)
    return blocks


def blocks():
    rng = np.random.default_rng(1)
    out = {}
    for name in TYPES:
        elements = gguf.GGML_QUANT_SIZES[T[name]][0]
        data = random_blocks(name, {1: 64, 32: 6, 256: 3}[elements], rng)
        out[name] = torch.from_numpy(data.reshape(-1).copy())
        out[name + ".fp32"] = torch.from_numpy(dequantize(data.reshape(1, -1), T[name]).reshape(-1).copy())
    save_file(out, HERE / "blocks.safetensors")


def model():
    rng = np.random.default_rng(2)
    path = HERE / "llama_quantized.gguf"
    w = gguf.GGUFWriter(path, "llama")
    hidden, heads, groups, head, ffn, vocab = 256, 4, 2, 16, 32, 40
    w.add_name("llama_quantized")
    w.add_context_length(64)
    w.add_embedding_length(hidden)
    w.add_block_count(1)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(groups)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(head)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(vocab)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    w.add_quantization_version(2)
    w.add_tokenizer_model("none")

    def matrix(name, rows, kind, factor=1.0, columns=hidden):
        elements, size = gguf.GGML_QUANT_SIZES[T[kind]]
        data = random_blocks(kind, rows * columns // elements, rng, SIZE[kind] * factor)
        w.add_tensor(name, data.reshape(rows, -1), raw_dtype=T[kind])

    def norm(name):
        w.add_tensor(name, rng.uniform(.5, 1.5, hidden).astype(np.float32))

    matrix("token_embd.weight", vocab, "Q8_0", 8)
    norm("blk.0.attn_norm.weight")
    matrix("blk.0.attn_q.weight", heads * head, "Q5_K", 2)
    matrix("blk.0.attn_k.weight", groups * head, "Q6_K", 2)
    matrix("blk.0.attn_v.weight", groups * head, "Q4_K")
    matrix("blk.0.attn_output.weight", hidden, "Q4_0", 4, heads * head)
    norm("blk.0.ffn_norm.weight")
    matrix("blk.0.ffn_gate.weight", ffn, "Q2_K")
    matrix("blk.0.ffn_up.weight", ffn, "Q3_K")
    matrix("blk.0.ffn_down.weight", hidden, "Q4_1", 4, ffn)
    norm("output_norm.weight")
    matrix("output.weight", vocab, "Q5_1")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    theirs = AutoModelForCausalLM.from_pretrained(HERE, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(rng.integers(0, vocab, 24).astype(np.int32))
    with torch.no_grad():
        logits = theirs(tokens[None].long()).logits[0]
    save_file({"tokens": tokens, "logits": logits.contiguous()}, HERE / "llama_quantized.safetensors")


if __name__ == "__main__":
    blocks()
    model()
