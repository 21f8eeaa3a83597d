"""Writes qwen3_5/, a folder as Qwen 3.5 is published: the model of qwen3_5_text beside a small tower for pictures, in the names and with
the nested configuration of `transformers`. What it computes from text is what the golden of qwen3_5_text says, to the last bit.

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_golden.py
"""
import json
import os
import shutil
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT, OUT = os.path.join(HERE, "..", "hf", "qwen3_5_text"), os.path.join(HERE, "qwen3_5")
VISION = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, in_channels=3, patch_size=2, spatial_merge_size=2,
              temporal_patch_size=2, out_hidden_size=16, num_position_embeddings=16)

text_config = AutoConfig.from_pretrained(TEXT)
fields = {key: value for key, value in text_config.to_dict().items() if not key.startswith("_")}
config = Qwen3_5Config(text_config=fields, vision_config=VISION, image_token_id=36, video_token_id=37,
                       vision_start_token_id=38, vision_end_token_id=39, tie_word_embeddings=False)
torch.manual_seed(5)
model = Qwen3_5ForConditionalGeneration(config).float().eval()
text = AutoModelForCausalLM.from_pretrained(TEXT, dtype=torch.float32).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.copy_(parameter.bfloat16().float())
    missing, unknown = model.model.language_model.load_state_dict(text.model.state_dict(), strict=True)
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    tokens = load_file(os.path.join(TEXT, "golden.safetensors"))["tokens"].long()[None, :70]
    assert torch.equal(model(tokens).logits, text(tokens).logits)
with tempfile.TemporaryDirectory() as folder:
    model.bfloat16().save_pretrained(folder)
    os.makedirs(OUT, exist_ok=True)
    shutil.copy(os.path.join(folder, "model.safetensors"), OUT)
    with open(os.path.join(folder, "config.json")) as stored:
        written = json.load(stored)
with open(os.path.join(OUT, "config.json"), "w") as out:
    json.dump(written, out, indent=2)
    out.write("\n")
