"""Writes the golden of LoRA adapters of a model that reads images, on each of its modules: a folder as `peft` saves it for
tests/golden/multimodal/llava, and golden.safetensors with what `transformers` and `peft` compute with both from the inputs there, as
make_lora_golden.py stores it: logits at `positions` of its second sample, "loss" (the mean of make_vision_goldens.py) and gradients of
every tensor of the adapter that has one, and 32 greedy tokens behind its prompt. PEFT adapts also the layer of the encoder behind the one whose output is taken.

Made with peft 0.21.2, transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_media_lora_golden.py
"""
import os
import shutil

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from make_lora_golden import HERE, fill, packed, stored_name

BASE, FOLDER = os.path.join(HERE, "..", "multimodal", "llava"), os.path.join(HERE, "llava_modules")
POSITIONS = [0, 3, 9, 13, 17]

if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.makedirs(FOLDER)
    inputs = load_file(os.path.join(BASE, "golden.safetensors"))
    model = LlavaForConditionalGeneration.from_pretrained(BASE, attn_implementation="eager", dtype=torch.float32)
    # Queries and values of both stacks, the encoder's outputs, one linear of the projector.
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "out_proj", "fc1", "linear_2"])).eval()
    fill(model, seed=12)
    model.peft_config["default"].base_model_name_or_path = "llava"
    model.save_pretrained(FOLDER)
    os.remove(os.path.join(FOLDER, "README.md"))
    prompt = inputs["prompt"].long()[None]
    steps = model.generate(input_ids=prompt, pixel_values=inputs["pixels"][-2:], max_new_tokens=32, min_new_tokens=32, do_sample=False,
                           eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    margin = min(float(two[0] - two[1]) for two in (step[0].topk(2).values for step in steps.logits))
    generated = steps.sequences[0, prompt.shape[1]:]
    assert margin > 1e-3 and len(set(generated.tolist())) > 4, (margin, generated)
    model.double()
    tokens = inputs["tokens"].long()
    logits = model(input_ids=tokens, pixel_values=inputs["pixels"].double()).logits
    loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].long().flatten())
    loss.backward()
    with model.disable_adapter():
        base = model(input_ids=tokens, pixel_values=inputs["pixels"].double()).logits
    out = {"positions": torch.tensor(POSITIONS, dtype=torch.int32), "logits": logits[1, POSITIONS].float(),
           "generated": generated.int()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            out["grad/" + stored_name(name)] = parameter.grad.flatten()
    save_file({name: tensor.detach().contiguous() for name, tensor in packed(out).items()}, os.path.join(FOLDER, "golden.safetensors"),
              metadata={"loss": repr(float(loss.detach()))})
    print(len(out) - 3, "gradients, logits moved by", float(((logits - base)[1, POSITIONS].norm() / base[1, POSITIONS].norm()).detach()))
