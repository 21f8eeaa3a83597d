"""Writes the golden of vectors of texts of a ModernBERT: modern_sentence/ with a tiny random model of `transformers` with its head of masked
tokens, and a tokenizer of pairs of bytes with [CLS] and [SEP] around a text, and vectors.json: "texts", and vectors made of the hidden states
of one padded batch: "mean-all" of all tokens, "mean" of those between [CLS] and [SEP], "cls". Some texts are longer than the windows of its
local layers.

Made with transformers 5.23.0, tokenizers 0.23.3, torch 2.11.0 (CPU). Run: python make_modern_sentence_goldens.py
"""
import os
import shutil

import tokenizers
import torch
import transformers

from vectors_file import write_vectors

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modern_sentence")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["The cat sat on the mat.", "A dog ran, and ran!", "r\u00e9sum\u00e9 \u4e2d\u56fd", "small cats " * 6, "b", "the cat and the dog ran to the mat, and sat on it"]
LENGTH = 40


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    torch.manual_seed(7)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator(["the cat sat on the mat and a small dog ran to the cats and dogs"] * 4, tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[(t, inner.token_to_id(t)) for t in ("[CLS]", "[SEP]")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
                                                     sep_token="[SEP]", mask_token="[MASK]")
    config = transformers.ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=64,
        local_attention=6, pad_token_id=0, bos_token_id=None, eos_token_id=None, cls_token_id=2, sep_token_id=3)
    model = transformers.ModernBertForMaskedLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    model.save_pretrained(HERE)
    tokenizer.save_pretrained(HERE)
    model = transformers.ModernBertModel.from_pretrained(HERE, attn_implementation="eager").eval()
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH, return_token_type_ids=False)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    counts = batch["attention_mask"].sum(1).tolist()
    print("tokens", counts)
    assert max(counts) < LENGTH
    rows = {"mean-all": [x[:n].mean(0).tolist() for x, n in zip(hidden, counts)], "mean": [x[1:n - 1].mean(0).tolist() for x, n in zip(hidden, counts)],
            "cls": hidden[:, 0].tolist()}
    for extra in os.listdir(HERE):
        if extra not in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            os.remove(os.path.join(HERE, extra))
    write_vectors(HERE, TEXTS, rows)


if __name__ == "__main__":
    main()
