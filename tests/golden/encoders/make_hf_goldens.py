"""Writes the goldens of encoders of Hugging Face: for each case a folder with a tiny random model as `transformers` saves it (config.json,
model.safetensors, bf16) and golden.safetensors: the batch (input_ids, token_type_ids, attention_mask [b, s], labels [b, s] with -100 where
no token is predicted, next_sentence_label [b]), and what `transformers` computes in fp32 with eager attention:

  logits [b, s, v], order [b, 2]     of the heads; the order where the model has that head
  loss [1]                           mean cross entropy of the labels, plus that of the order
  grad/<name>                        its gradient
  hidden [b, s, h], pooled [b, h]    of a model without a head, in the place of those

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_hf_goldens.py
"""
import json
import os

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
             hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, layer_norm_eps=1e-12, hidden_act="gelu")
CASES = {
    "megatron_bert": ("MegatronBertForPreTraining", dict(type_vocab_size=3)),
    "bert": ("BertForPreTraining", dict(type_vocab_size=2)),
    "roberta": ("RobertaForMaskedLM", dict(type_vocab_size=1, pad_token_id=1, max_position_embeddings=18, layer_norm_eps=1e-5)),
    "bert_model": ("BertModel", dict(type_vocab_size=2)),
}


def make(name, architecture, settings, seed):
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    model = cls(cls.config_class(**(SMALL | settings))).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = key.endswith("weight") and p.dim() == 1
            p.copy_(torch.randn(p.shape) * (0.2 if p.dim() > 1 else 0.1) + (1.0 if norm else 0.0))
    model = model.bfloat16()
    folder = os.path.join(HERE, name)
    model.save_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    b, s, lengths = 3, 12, [12, 7, 9]
    mask = (torch.arange(s)[None] < torch.tensor(lengths)[:, None]).long()
    mask[0, 4] = 0
    ids = torch.randint(1, SMALL["vocab_size"], (b, s))
    if "pad_token_id" in settings:  # positions count the other tokens
        ids = torch.where(torch.arange(s)[None] < torch.tensor(lengths)[:, None], ids.clamp_min(2), 1)
    types = torch.randint(0, settings["type_vocab_size"], (b, s)) * mask
    chosen = (torch.rand(b, s) < 0.4) & (mask == 1)
    labels = torch.where(chosen, torch.randint(0, SMALL["vocab_size"], (b, s)), -100)
    order = torch.randint(0, 2, (b,))
    out = model(input_ids=ids, token_type_ids=types, attention_mask=mask)
    tensors = dict(input_ids=ids, token_type_ids=types, attention_mask=mask, labels=labels, next_sentence_label=order)
    tensors = {key: value.int() for key, value in tensors.items()}
    if architecture.endswith("Model"):
        tensors |= dict(hidden=out.last_hidden_state * mask[..., None], pooled=out.pooler_output)
        return save(tensors, folder)
    logits = out.logits if hasattr(out, "logits") else out.prediction_logits
    loss = F.cross_entropy(logits.view(b * s, -1), labels.view(-1))
    if hasattr(out, "seq_relationship_logits"):
        loss = loss + F.cross_entropy(out.seq_relationship_logits, order)
        tensors["order"] = out.seq_relationship_logits
    loss.backward()
    tensors |= dict(logits=logits * mask[..., None], loss=loss.reshape(1))
    tensors |= {"grad/" + key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    save(tensors, folder)


def save(tensors, folder):
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, os.path.join(folder, "golden.safetensors"))


if __name__ == "__main__":
    for i, (case, (kind, more)) in enumerate(CASES.items()):
        make(case, kind, more, 11 + i)
        for extra in os.listdir(os.path.join(HERE, case)):
            if extra not in ("config.json", "model.safetensors", "golden.safetensors"):
                os.remove(os.path.join(HERE, case, extra))
        print(case, json.load(open(os.path.join(HERE, case, "config.json"))).get("architectures"))
