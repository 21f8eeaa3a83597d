"""Makes small tokenizers and what the `tokenizers` package encodes and decodes hard text to.

Made with tokenizers 0.23.3, sentencepiece 0.2.3, tiktoken 0.14.0, Python 3.11.   python make_goldens.py    (writes beside itself)

  documents.jsonl   {"text": ...} per line
  NAME.json         a tokenizer.json; gpt2/ holds vocab.json and merges.txt
  NAME.hashes       per document: number of ids, FNV-1a 64 of the ids (little-endian int32), FNV-1a 64 of the decoded text;
                    "-" where the text has characters that are newer than Unicode 14, whose class depends on PCRE2
  kinds/            the same for the tokenizers of kinds.py, whose text has no characters newer than Unicode 14 where that matters
  learn.*           a corpus and the merges that BpeTrainer learns from it
"""

import json
import pathlib
import unicodedata

import kinds
from hard_text import hard_documents
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

HERE = pathlib.Path(__file__).parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern, behavior="isolated", invert=False):
    return Split(Regex(pattern), behavior, invert)


def last(prefix_space=False, use_regex=False):
    return ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex)


# name: (pre-tokenizer, vocabulary size, needs PCRE2)
TOKENIZERS = {
    "gpt2": (last(False, True), 700, False),
    "llama3": (Sequence([split(LLAMA3), last()]), 700, False),
    "qwen2": (Sequence([split(QWEN2), last()]), 600, False),
    "prefix_space": (last(True, True), 380, False),
    "o200k": (Sequence([split(O200K, "removed", True), last()]), 600, True),
    "deepseek": (
        Sequence([split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(DEEPSEEK), last()]),
        380,
        True,
    ),
    "digits": (Sequence([Digits(individual_digits=True), last(False, True)]), 380, False),
    "digit_runs": (Sequence([Digits(individual_digits=False), last(True, True)]), 380, False),
    "merged_previous": (Sequence([split(r"\s", "merged_with_previous"), last(True)]), 380, True),
    "merged_next": (Sequence([split(r"[\s\p{P}]", "merged_with_next"), last()]), 380, True),
    "contiguous": (Sequence([split(r"\S", "contiguous"), last()]), 380, True),
    "string": (Sequence([Split(" ", "merged_with_next"), Split("\n", "removed"), last(False, True)]), 380, False),
}
ADDED = [
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("<lr>", lstrip=True, rstrip=True, normalized=True),
    AddedToken("caf\u00e9", normalized=True),
    AddedToken("cafe\u0301s", normalized=True),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("wordy", single_word=True, normalized=True),
    AddedToken("<|end", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("\u00e9t\u00e9", normalized=False),
    AddedToken("\U0001f600\u200d", normalized=False),
]


def build(name):
    pre_tokenizer, vocab_size, _ = TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(hard_documents(1, 400_000), trainer)
    if name == "gpt2":
        (HERE / "gpt2").mkdir(exist_ok=True)
        tokenizer.model.save(str(HERE / "gpt2"))
        tokenizer.add_special_tokens([ADDED[0]])
    else:
        tokenizer.add_tokens(ADDED)
        tokenizer.add_special_tokens([token for token in ADDED if token.special])
        (HERE / f"{name}.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return tokenizer


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def hashes(tokenizer, documents, needs_pcre2):
    for text in documents:
        if needs_pcre2 and any(unicodedata.category(c) == "Cn" for c in text):
            yield "-"
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        id_bytes = b"".join(i.to_bytes(4, "little") for i in ids)
        yield f"{len(ids)} {fnv1a(id_bytes):016x} {fnv1a(decoded.encode()):016x}"


def make_kinds(documents):
    folder = HERE / "kinds"
    folder.mkdir(exist_ok=True)
    training = hard_documents(1, 400_000)
    for name in kinds.NAMES:
        kind = kinds.train(name, training, 600, folder, small=True)
        lines = []
        for text in documents:
            if name in kinds.NEEDS_PCRE2 and kinds.assigned(text) != text:
                lines.append("-\n")
                continue
            ids = kind.encode(text)
            id_bytes = b"".join(i.to_bytes(4, "little") for i in ids)
            lines.append(f"{len(ids)} {fnv1a(id_bytes):016x} {fnv1a(kind.decode(ids).encode()):016x}\n")
        (folder / f"{name}.hashes").write_text("".join(lines))


def make_learning_golden():
    documents = hard_documents(3, 30_000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([split(LLAMA3), last()])
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=2, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    with open(HERE / "learn.jsonl", "w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    (HERE / "learn.merges").write_text("".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")


def main():
    documents = hard_documents(2, 70_000) + ["", " ", "'", "a" * 3000, "\u4f60" * 1000]
    with open(HERE / "documents.jsonl", "w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    for name, (_, _, needs_pcre2) in TOKENIZERS.items():
        lines = hashes(build(name), documents, needs_pcre2)
        (HERE / f"{name}.hashes").write_text("".join(line + "\n" for line in lines))
    make_kinds(documents)
    make_learning_golden()


if __name__ == "__main__":
    main()
