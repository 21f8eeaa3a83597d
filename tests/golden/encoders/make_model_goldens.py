"""Writes the goldens of BERT: python make_model_goldens.py [--check] (megatron-core 0.16.1, torch 2.11, on a CPU in fp32)

Runs Megatron-LM's BertModel with local layers on the cases of cases.json. A file NAME.safetensors holds "weight/..." and
"grad/..." under Megatron's names (gradients of the total loss), "in/..." the batch and "out/..." the results; its metadata the case.
Dropout is 0. What needs CUDA there (the current device, its random state) is replaced. --check compares with the files that exist.
"""
import contextlib
import json
import os
import sys
import types
import warnings

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state  # noqa: E402

parallel_state.initialize_model_parallel(1, 1)
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
TRACKER = types.SimpleNamespace(fork=lambda *_, **__: contextlib.nullcontext(), is_initialized=lambda: True)
for module in list(sys.modules.values()):
    if getattr(module, "get_cuda_rng_tracker", None):
        module.get_cuda_rng_tracker = lambda *_, **__: TRACKER


def config_of(case, layers):
    return TransformerConfig(
        num_layers=layers, hidden_size=case["hidden"], num_attention_heads=case["heads"], ffn_hidden_size=case["ffn"],
        kv_channels=case.get("kv_channels"), layernorm_epsilon=1e-5, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=True, bias_dropout_fusion=False, masked_softmax_fusion=False,
        init_method_std=0.2, params_dtype=torch.float32)


def spread(model, seed):
    """Weights without special values, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator) * (0.2 if p.dim() > 1 else 0.1)
            p.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def below(lengths, size):
    return (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()


def bert(case):
    binary = case["binary_head"]
    model = BertModel(
        config_of(case, case["layers"]), 2 if binary else 0, bert_layer_local_spec, vocab_size=case["vocab"],
        max_sequence_length=case["positions"], share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["position"], add_binary_head=binary, parallel_output=True)
    spread(model, case["seed"])
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    b, s = case["batch"], case["seq"]
    tokens = torch.randint(1, case["vocab"], (b, s), generator=generator)
    labels = torch.randint(1, case["vocab"], (b, s), generator=generator)
    text = below(case["lengths"], s)
    padding_mask = text.clone()
    if case.get("hole"):
        padding_mask[0, case["hole"]] = 0  # a token of the text that is the padding token
    tokens = tokens * padding_mask
    # What padded positions predict is not compared: Megatron's local layers let them attend to everything.
    loss_mask = (torch.rand((b, s), generator=generator) < 0.3).long() * text * padding_mask
    halves = (torch.arange(s)[None] >= (torch.tensor(case["lengths"]) // 2)[:, None]).long() * text
    order = torch.randint(0, 2, (b,), generator=generator)
    token_loss, logits = model(tokens, padding_mask, tokentype_ids=halves if binary else None, lm_labels=labels)
    total = lm = (token_loss.float() * loss_mask).sum() / loss_mask.sum()
    out = {"lm_loss": lm, "token_loss": token_loss * loss_mask}
    if binary:
        out["binary_logits"], out["sop_loss"] = logits, F.cross_entropy(logits.float(), order)
        total = lm + out["sop_loss"]
    return model, total, dict(tokens=tokens, types=halves, padding_mask=padding_mask, labels=labels, loss_mask=loss_mask, is_random=order), out


def tensors_of(case):
    model, total, batch, out = bert(case)
    total.backward()
    tensors = {}
    for name, p in model.named_parameters():
        tensors["weight/" + name] = p.detach().clone()
        tensors["grad/" + name] = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
    tensors |= {"in/" + name: value.to(torch.int32).contiguous() for name, value in batch.items()}
    return tensors | {"out/" + name: value.detach().float().contiguous().clone() for name, value in out.items()}


def main():
    with open(f"{HERE}/cases.json") as file:
        cases = json.load(file)
    for case in cases:
        tensors, path = tensors_of(case), f"{HERE}/{case['name']}.safetensors"
        if "--check" in sys.argv:
            old = load_file(path)
            assert old.keys() == tensors.keys(), case["name"]
            largest = max(float((old[name].double() - value.double()).abs().max()) for name, value in tensors.items())
            print(case["name"], "largest difference", largest)
            assert largest < 1e-5
        else:
            save_file(tensors, path, metadata={"case": json.dumps(case)})


if __name__ == "__main__":
    main()
