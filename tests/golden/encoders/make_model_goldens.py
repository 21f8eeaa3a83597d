"""Writes the goldens of BERT and T5: python make_model_goldens.py [--check] (megatron-core 0.16.1, torch 2.11, on a CPU in fp32)

Runs Megatron-LM's BertModel and T5Model with local layers on the cases of cases.json. A file NAME.safetensors holds "grad/..."
under Megatron's names (gradients of the total loss), "in/..." the batch and "out/..." the results; its metadata the case. The weights are
formula(). Dropout is 0. What needs CUDA there (the current device, its random state) is replaced. --check compares with the files that exist.
"""
import contextlib
import copy
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
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset  # noqa: E402
from megatron.core.models.T5 import t5_spec  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
t5_spec.TENorm = WrappedTorchNorm  # the local specification asks for the norm of Transformer Engine
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


def formula(model):
    """Weights that follow from names and places, so that the file of a golden needs not hold them."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            fused = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            fused = fused.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
            start = 2166136261  # FNV-1a
            for byte in fused.encode():
                start = (start ^ byte) * 16777619 % 2**32
            x = (torch.arange(p.numel()) + start) % 2**32 * 2654435761 % 2**32
            x = (x ^ (x >> 15)) * 2246822519 % 2**32 >> 16
            value = (x.float() / 65536 - 0.5) * (0.75 if p.dim() > 1 else 0.25)
            p.copy_(value.view(p.shape) + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def below(lengths, size):
    return (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()


def bert(case):
    binary = case["binary_head"]
    model = BertModel(
        config_of(case, case["layers"]), 2 if binary else 0, bert_layer_local_spec, vocab_size=case["vocab"],
        max_sequence_length=case["positions"], share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["position"], add_binary_head=binary, parallel_output=True)
    formula(model)
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


def t5(case):
    config = config_of(case, case["decoder_layers"])
    encoder = copy.deepcopy(config)
    encoder.num_layers = case["encoder_layers"]
    model = T5Model(
        config, encoder, t5_spec.get_t5_encoder_with_local_block_spec(case["encoder_layers"]),
        t5_spec.get_t5_decoder_with_local_block_spec(case["decoder_layers"]), vocab_size=case["vocab"],
        max_sequence_length=case["positions"], share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["position"], parallel_output=True)
    formula(model)
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    b, s_e, s_d = case["batch"], case["encoder_seq"], case["decoder_seq"]
    enc_mask, dec_mask = below(case["encoder_lengths"], s_e), below(case["decoder_lengths"], s_d)
    enc = torch.randint(1, case["vocab"], (b, s_e), generator=generator) * enc_mask
    dec = torch.randint(1, case["vocab"], (b, s_d), generator=generator) * dec_mask
    labels = torch.randint(1, case["vocab"], (b, s_d), generator=generator)
    masks = T5MaskedWordPieceDataset.config_attention_mask(enc, dec, enc_mask < 0.5, dec_mask < 0.5, use_local=True)
    token_loss = model(enc, dec, *masks, lm_labels=labels)
    loss = (token_loss * dec_mask).sum() / dec_mask.sum()
    batch = dict(text_enc=enc, text_dec=dec, labels=labels, loss_mask=dec_mask, enc_mask=enc_mask, dec_mask=dec_mask)
    return model, loss, batch, {"lm_loss": loss, "token_loss": token_loss * dec_mask}


def tensors_of(case):
    model, total, batch, out = {"bert": bert, "t5": t5}[case["kind"]](case)
    total.backward()
    tensors = {}
    for name, p in model.named_parameters():
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
