"""Writes multichoice.safetensors: what BertForMultipleChoice of `transformers` makes of the model in bert/ with a random head.

  input_ids, token_type_ids, attention_mask [q, c, s]   questions and their choices, with padding
  labels [q], scores [q, c], loss [1]                   in fp32 with eager attention
  accuracy [1]                                          of the highest scores, by scikit-learn
  head.weight [1, h], head.bias [1]                     the head
  grad/<name>                                           gradients of the head, the pooler and the word embeddings

Made with transformers 5.23.0, torch 2.11.0 (CPU), scikit-learn 1.9.1. Run: python make_multichoice_golden.py
"""
import os

import torch
import transformers
from safetensors.torch import save_file
from sklearn.metrics import accuracy_score

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    torch.manual_seed(5)
    model = transformers.BertForMultipleChoice.from_pretrained(os.path.join(HERE, "bert"), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        model.classifier.weight.normal_(0, 2)
        model.classifier.bias.fill_(0.25)
    questions, choices, s = 5, 4, 12
    ids = torch.randint(1, model.config.vocab_size, (questions, choices, s))
    lengths = torch.randint(4, s + 1, (questions, choices, 1))
    mask = (torch.arange(s) < lengths).long()
    types = (torch.arange(s) >= lengths // 2).long() * mask
    labels = torch.randint(0, choices, (questions,))
    out = model(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels)
    out.loss.backward()
    tensors = dict(input_ids=ids.int(), token_type_ids=types.int(), attention_mask=mask.int(), labels=labels.int(), scores=out.logits,
                   loss=out.loss.reshape(1), accuracy=torch.tensor([accuracy_score(labels, out.logits.argmax(1))], dtype=torch.float32))
    tensors |= {"head.weight": model.classifier.weight, "head.bias": model.classifier.bias}
    tensors |= {"grad/multichoice_head.weight": model.classifier.weight.grad, "grad/multichoice_head.bias": model.classifier.bias.grad,
                "grad/pooler.dense.weight": model.bert.pooler.dense.weight.grad,
                "grad/embedding.word_embeddings.weight": model.bert.embeddings.word_embeddings.weight.grad}
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, os.path.join(HERE, "multichoice.safetensors"))


if __name__ == "__main__":
    main()
