"""Writes the golden of vectors of texts of a T5's encoder: t5_sentence/ with a tiny random T5EncoderModel of `transformers` and a tokenizer
of pairs of bytes with </s> behind a text, and vectors.json: "texts", and vectors made of the hidden states of one padded batch: "mean-all" of
all tokens, "mean" of those before </s>, "cls" of the first. Some texts reach beyond the last bucket of distances.

Made with transformers 5.23.0, tokenizers 0.23.3, torch 2.11.0 (CPU). Run: python make_t5_sentence_goldens.py
"""
import os
import shutil

import tokenizers
import torch
import transformers

from vectors_file import write_vectors

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "t5_sentence")
TEXTS = ["The cat sat on the mat.", "A dog ran, and ran!", "r\u00e9sum\u00e9 \u4e2d\u56fd", "small cats " * 6, "b", "the cat and the dog ran to the mat, and sat on it"]
LENGTH, FARTHEST = 40, 12


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    torch.manual_seed(11)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator(["the cat sat on the mat and a small dog ran to the cats and dogs"] * 4, tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=8, d_kv=6, d_ff=12, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=FARTHEST)
    model = transformers.T5EncoderModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.4 + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(HERE)
    tokenizer.save_pretrained(HERE)
    model = transformers.T5EncoderModel.from_pretrained(HERE).eval()
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH, return_token_type_ids=False)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    counts = batch["attention_mask"].sum(1).tolist()
    print("tokens", counts)
    assert FARTHEST < max(counts) < LENGTH
    rows = {"mean-all": [x[:n].mean(0).tolist() for x, n in zip(hidden, counts)], "mean": [x[:n - 1].mean(0).tolist() for x, n in zip(hidden, counts)],
            "cls": hidden[:, 0].tolist()}
    for extra in os.listdir(HERE):
        if extra not in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            os.remove(os.path.join(HERE, extra))
    write_vectors(HERE, TEXTS, rows)


if __name__ == "__main__":
    main()
