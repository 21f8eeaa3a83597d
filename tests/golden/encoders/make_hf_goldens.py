"""Writes the goldens of encoders of Hugging Face: for each case a folder with a tiny random model as `transformers` saves it (config.json,
model.safetensors, bf16) and golden.safetensors: the batch (input_ids, token_type_ids, attention_mask [b, s], labels [b, s] with -100 where
no token is predicted, next_sentence_label [b]), and what `transformers` computes in fp32 with eager attention:

  logits [b, s, v], order [b, 2]     of the heads; the order where the model has that head
  loss [1]                           mean cross entropy of the labels, plus that of the order
  grad/<name>                        its gradient
  class [b], classes [b, c]          of a model that tells classes, in the place of those: its classes and their logits; the loss is theirs
  classes_first [b, c]               of a ModernBERT, whose logits are those of the mean of a text's hidden states: of the first one
  hidden [b, s, h], pooled [b, h]    of a model without a head, in the place of those; pooled where it has a pooler

Windows of the ModernBERTs are shorter than the sequences.

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_hf_goldens.py [CASE]...
"""
import json
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
             hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, layer_norm_eps=1e-12, hidden_act="gelu")
MODERN = dict(vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=32,
              local_attention=6, embedding_dropout=0.1, attention_dropout=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
              cls_token_id=None, sep_token_id=None,
              rope_parameters={"full_attention": dict(rope_type="default", rope_theta=160.0),
                               "sliding_attention": dict(rope_type="default", rope_theta=10.0)})
BIASES = dict(attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True, tie_word_embeddings=False,
              layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"])
CASES = {
    "megatron_bert": ("MegatronBertForPreTraining", dict(type_vocab_size=3)),
    "bert": ("BertForPreTraining", dict(type_vocab_size=2)),
    "roberta": ("RobertaForMaskedLM", dict(type_vocab_size=1, pad_token_id=1, max_position_embeddings=18, layer_norm_eps=1e-5)),
    "bert_model": ("BertModel", dict(type_vocab_size=2)),
    "modernbert": ("ModernBertForMaskedLM", dict()),
    "modernbert_biases": ("ModernBertForMaskedLM", BIASES),
    "modernbert_model": ("ModernBertModel", dict()),
    "modernbert_classes": ("ModernBertForSequenceClassification", dict(num_labels=3, classifier_pooling="mean", classifier_bias=True)),
    "bert_classes": ("BertForSequenceClassification", dict(type_vocab_size=2, num_labels=3)),
    "megatron_bert_classes": ("MegatronBertForSequenceClassification", dict(type_vocab_size=2, num_labels=3)),
    "roberta_classes": ("RobertaForSequenceClassification",
                        dict(type_vocab_size=1, pad_token_id=1, max_position_embeddings=18, layer_norm_eps=1e-5, num_labels=3)),
}


def make(name, architecture, settings, seed):
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    modern = architecture.startswith("Modern")
    model = cls(cls.config_class(**((MODERN if modern else SMALL) | settings))).eval()
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
    types = torch.randint(0, settings.get("type_vocab_size", 1), (b, s)) * mask
    chosen = (torch.rand(b, s) < 0.4) & (mask == 1)
    labels = torch.where(chosen, torch.randint(0, SMALL["vocab_size"], (b, s)), -100)
    order = torch.randint(0, 2, (b,))
    out = model(input_ids=ids, attention_mask=mask, **({} if modern else dict(token_type_ids=types)))
    tensors = dict(input_ids=ids, token_type_ids=types, attention_mask=mask, labels=labels, next_sentence_label=order)
    tensors = {key: value.int() for key, value in tensors.items()}
    if architecture.endswith("Model"):
        tensors |= dict(hidden=out.last_hidden_state * mask[..., None])
        if not modern:
            tensors |= dict(pooled=out.pooler_output)
        return save(tensors, folder)
    if architecture.endswith("SequenceClassification"):
        tensors["class"] = torch.tensor([2, 0, 1], dtype=torch.int32)
        loss = F.cross_entropy(out.logits, tensors["class"].long())
        loss.backward()
        tensors |= {"grad/" + key: p.grad for key, p in model.named_parameters()}
        tensors |= dict(classes=out.logits, loss=loss.reshape(1))
        if modern:
            model.config.classifier_pooling = "cls"
            tensors["classes_first"] = model(input_ids=ids, attention_mask=mask).logits
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
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        make(case, kind, more, 11 + i)
        for extra in os.listdir(os.path.join(HERE, case)):
            if extra not in ("config.json", "model.safetensors", "golden.safetensors"):
                os.remove(os.path.join(HERE, case, extra))
        print(case, json.load(open(os.path.join(HERE, case, "config.json"))).get("architectures"))
