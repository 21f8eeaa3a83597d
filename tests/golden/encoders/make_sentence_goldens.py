"""Writes the golden of vectors of texts: sentence/ with a tiny random BERT, its tokenizer and the settings as `sentence-transformers` saves
them, and vectors.json: "texts", and their vectors by it ("auto": mean of all tokens, length 1, at most 16 tokens) and of the same hidden
states by hand ("mean": of the tokens between [CLS] and [SEP], zeros where there is none; "cls"; "pooler").

Made with sentence-transformers 6.2.0, transformers 5.23.0, torch 2.11.0 (CPU). Run: python make_sentence_goldens.py
"""
import os
import shutil

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

from vectors_file import write_vectors

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sentence")
WORDS = "the cat sat on a mat and dog ran to un ##happy ##ly ##s , . ! small re ##s ##u ##m ##e \u4e2d \u56fd b ##c".split()
TEXTS = ["The cat sat on the mat.", "", "A dog ran, and ran!", "unhappily", "r\u00e9sum\u00e9 \u4e2d\u56fd", "small cats " * 12, "zebra", "b"]


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    os.makedirs(HERE)
    torch.manual_seed(5)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + list(dict.fromkeys(WORDS))
    with open("vocab.txt", "w", encoding="utf-8") as file:
        file.write("\n".join(vocabulary) + "\n")
    tokenizer = transformers.BertTokenizerFast(vocab_file="vocab.txt", vocab={t: i for i, t in enumerate(vocabulary)}, do_lower_case=True)
    os.remove("vocab.txt")
    config = transformers.BertConfig(vocab_size=len(vocabulary), hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                                     max_position_embeddings=24)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    model.save_pretrained("plain")
    tokenizer.save_pretrained("plain")
    body = Transformer("plain", max_seq_length=16)
    sentence = SentenceTransformer(modules=[body, Pooling(8, "mean"), Normalize()], device="cpu")
    sentence.save(HERE, create_model_card=False)
    sentence = SentenceTransformer(HERE, device="cpu")
    rows = {"auto": sentence.encode(TEXTS).tolist(), "mean": [], "cls": [], "pooler": []}
    model = transformers.BertModel.from_pretrained("plain").eval()
    for text in TEXTS:
        out = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=16))
        own = out.last_hidden_state[0, 1:-1]
        rows["mean"].append((own.sum(0) / max(1, len(own))).tolist())
        rows["cls"].append(out.last_hidden_state[0, 0].tolist())
        rows["pooler"].append(out.pooler_output[0].tolist())
    shutil.rmtree("plain")
    for extra in os.listdir(HERE):
        if extra not in ("config.json", "model.safetensors", "modules.json", "1_Pooling", "tokenizer.json", "tokenizer_config.json",
                         "sentence_bert_config.json"):
            path = os.path.join(HERE, extra)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    write_vectors(HERE, TEXTS, rows)


if __name__ == "__main__":
    main()
