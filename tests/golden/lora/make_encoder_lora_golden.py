"""Writes the goldens of LoRA adapters of encoders and encoder-decoders: for each case a folder as `peft` saves it (adapter_config.json,
adapter_model.safetensors) for a tiny model of tests/golden/encoders, and golden.safetensors with what `transformers` and `peft` compute
with both on the inputs of that model's golden:

  classes [b, c]             of an encoder that tells classes: their logits
  logits [b, positions, v]   of an encoder-decoder, at the decoder's POSITIONS; zeros where no token is predicted
  loss                       the mean cross entropy, of classes or of the decoder's tokens
  grad/<name>                its gradients, of every tensor of the adapter's file

All is computed in fp32, gradients in fp64 (of ModernBERT in fp32), with eager attention.
Made with peft 0.21.2, transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_encoder_lora_golden.py [case ...]
"""
import os
import shutil
import sys

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "..", "encoders")
POSITIONS = [0, 1, 7, 15]

# Case: model, settings.
CASES = {
    # What PEFT does by default: a head of classes is trained and stored beside the adapters, the pooler is not.
    "bert_classes_qv": ("bert_classes", dict(task_type="SEQ_CLS", r=2, lora_alpha=3)),
    # Every linear of the layers; the head has two.
    "roberta_classes_all": ("roberta_classes", dict(task_type="SEQ_CLS", r=3, lora_alpha=6, target_modules=[
        "query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"])),
    # Joined matrices; the pooler, a linear and a norm, is trained, too.
    "modernbert_classes_joined": ("modernbert_classes", dict(task_type="SEQ_CLS", r=2, lora_alpha=2, target_modules=[
        "Wqkv", "attn.Wo", "Wi", "mlp.Wo"], modules_to_save=["head"])),
    # What PEFT does by default, queries and values of both stacks and of cross attention, and half of a gated MLP.
    "t5_v1_1_qv": ("t5_v1_1", dict(task_type="SEQ_2_SEQ_LM", r=1, lora_alpha=5, target_modules=["q", "v", "wi_1"])),
    "t5_v1_0_others": ("t5_v1_0", dict(task_type="SEQ_2_SEQ_LM", r=1, lora_alpha=2, target_modules=["k", "o", "wi", "wo"])),
}


def make(case):
    base, settings = CASES[case]
    classes = settings["task_type"] == "SEQ_CLS"
    folder = os.path.join(HERE, case)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    kind = AutoModelForSequenceClassification if classes else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(os.path.join(MODELS, base), attn_implementation="eager", dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(**settings)).eval()
    # Adapters and heads that show in the logits.
    gen = torch.Generator().manual_seed(sum(map(ord, case)))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=gen) + (1 if parameter.dim() == 1 else 0))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    given = load_file(os.path.join(MODELS, base, "golden.safetensors"))
    inputs = dict(input_ids=given["input_ids"].long(), attention_mask=given["attention_mask"].long())
    if classes and not base.startswith("modern"):
        inputs["token_type_ids"] = given["token_type_ids"].long()
    if not classes:
        inputs["decoder_input_ids"] = given["decoder_input_ids"].long()
    labels = given["class" if classes else "labels"].long()

    def logits_of():
        return model(**inputs).logits

    out = {}
    with torch.no_grad():
        logits = logits_of()
        with model.disable_adapter():
            changed = float((logits - logits_of()).norm() / logits.norm())
    out["classes" if classes else "logits"] = logits if classes else (logits * (labels >= 0)[..., None])[:, POSITIONS]
    if not base.startswith("modern"):  # whose windows give NaN in fp64
        model.double()
    loss = F.cross_entropy(logits_of().flatten(0, -2), labels.flatten(), ignore_index=-100)
    loss.backward()
    out["loss"] = loss.detach().float().reshape(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            out["grad/" + name.replace("modules_to_save.default.", "").replace(".default.", ".")] = parameter.grad.float()
    stored = load_file(os.path.join(folder, "adapter_model.safetensors"))
    assert {"grad/" + name for name in stored} == {name for name in out if name.startswith("grad/")}, set(stored) ^ {n[5:] for n in out}
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, os.path.join(folder, "golden.safetensors"))
    print(f"{case}: {len(stored)} tensors, {sum(t.numel() for t in stored.values())} parameters, logits moved by {changed:.2f}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
