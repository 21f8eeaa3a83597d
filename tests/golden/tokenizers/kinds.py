"""Tokenizers of every kind that the field uses, trained on given text with `tokenizers`, `sentencepiece` and `tiktoken`.

train(name, texts, vocab_size, folder) writes the tokenizer's file into the folder and returns a Kind: the file, how it is given
to `megatron`, and the package's own encode and decode. Shared by make_goldens.py (small) and benchmarks/tokenizer_peers.py (large).
"""

import base64
import collections
import dataclasses
import json
import pathlib
import unicodedata
from typing import Callable

import sentencepiece
import tiktoken
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ADDED = [
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("<lr>", lstrip=True, rstrip=True, normalized=True),
    AddedToken("caf\u00e9", normalized=True),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("Wordy", single_word=True, normalized=True),
    AddedToken("  ", normalized=False),
    AddedToken("\U0001f600\u200d", normalized=False),
]
MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MEGATRON_V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
MEGATRON_V2 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Rules of a small charsmap, with the traps of a large one: a key that starts another, deletion, growth, line ends, marks.
RULES = {
    "\u00e9": "e\u0301", "e\u0301": "E", "\uff21": "A", "\uff42": "b", "\ufb01": "fi", "\u2026": "...", "\u200b": " ", "\u3000": " ",
    "\u00a0": " ", "\t": " ", "\n": " ", "\r": " ", "\u00ad": "", "\u2460": "1", "A\u030a": "\u00c5", "\u0130": "i", "\u1100": "g", "ab": "c",
}


@dataclasses.dataclass
class Kind:
    name: str
    path: pathlib.Path
    flags: list  # of megatron, without --tokenizer-model
    encode: Callable
    decode: Callable
    encode_batch: Callable
    version: str = ""


def charsmap_of(model_bytes):
    """The precompiled_charsmap of a SentencePiece model (normalizer_spec is field 3, the charsmap its field 2)."""

    def fields(data):
        at = 0

        def varint():
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while at < len(data):
            tag = varint()
            kind = tag & 7
            if kind == 0:
                yield tag >> 3, varint()
            else:
                size = {1: 8, 5: 4}.get(kind) or varint()
                yield tag >> 3, data[at : at + size]
                at += size

    for number, value in fields(model_bytes):
        if number == 3:
            return next((v for n, v in fields(value) if n == 2), b"")
    return b""


def common(texts, num_characters):
    """The texts without rare characters, which Unigram's trainers would all put into the vocabulary."""
    counts = collections.Counter(c for text in texts for c in text)
    kept = {c for c, _ in counts.most_common(num_characters)} - {"\0"}
    return ["".join(c for c in text if c in kept) for text in texts]


def train_sentencepiece(texts, vocab_size, prefix, small, **options):
    if options.pop("rules", False):
        if small:
            tsv = pathlib.Path(f"{prefix}.tsv")
            tsv.write_text("".join(
                f"{' '.join(f'{ord(c):X}' for c in a)}\t{' '.join(f'{ord(c):X}' for c in b)}\n" for a, b in RULES.items()
            ))
            options["normalization_rule_tsv"] = str(tsv)
        else:
            options.setdefault("normalization_rule_name", "nmt_nfkc")
    else:
        options.setdefault("normalization_rule_name", "identity")
    lines = [line for text in texts for line in text.split("\n") if line.strip() and len(line.encode()) < 4000]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=vocab_size, hard_vocab_limit=False,
        character_coverage=1.0, minloglevel=2, num_threads=2, max_sentence_length=4192, **options,
    )
    for suffix in (".tsv", ".vocab"):
        pathlib.Path(f"{prefix}{suffix}").unlink(missing_ok=True)
    return pathlib.Path(f"{prefix}.model")


def with_bytes(tokenizer, extra=("<unk>", "<s>", "</s>")):
    """A trained BPE with the byte tokens of byte fallback in front."""
    data = json.loads(tokenizer.to_str())
    head = list(extra) + BYTES
    model = data["model"]
    body = [t for t, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if t not in head]
    model["vocab"] = {token: i for i, token in enumerate(head + body)}
    model["byte_fallback"] = model["fuse_unk"] = True
    model["unk_token"] = "<unk>"
    return Tokenizer.from_str(json.dumps(data))


def train_bpe(texts, vocab_size, normalizer, pre_tokenizer, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    affixes = {k: v for k, v in model.items() if k in ("continuing_subword_prefix", "end_of_word_suffix")}
    specials = [model["unk_token"]] if "unk_token" in model else []
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, limit_alphabet=max(200, vocab_size // 3),
                                  show_progress=False, **affixes)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def llama_decoder(strip):
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if strip else steps)


def specials(tokenizer, tokens=("<unk>", "<s>", "</s>")):
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])


def llama2(texts, size, small):
    """Llama 2, Mistral, Phi-3: SentencePiece BPE as a tokenizer.json."""
    normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tokenizer = with_bytes(train_bpe(texts, size, None, pre_tokenizers.Metaspace(prepend_scheme="always")))
    specials(tokenizer)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = llama_decoder(True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def mistral(texts, size, small):
    """The newer form: Metaspace that does not split, a mark only in front of the text."""
    tokenizer = with_bytes(train_bpe(texts, size, None, pre_tokenizers.Metaspace(prepend_scheme="first")))
    specials(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = llama_decoder(True)
    return tokenizer


def gemma(texts, size, small):
    """Gemma 2 and 3: no mark in front, added runs of white space."""
    tokenizer = with_bytes(train_bpe(texts, size, None, pre_tokenizers.Metaspace(prepend_scheme="never")),
                           ("<pad>", "<eos>", "<bos>", "<unk>"))
    specials(tokenizer, ("<pad>", "<eos>", "<bos>", "<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = llama_decoder(False)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n", MARK * 2, MARK * 3, "<h1>")])
    return tokenizer


def train_unigram(texts, size, pre_tokenizer, folder, small, rules):
    normalizer = None
    if rules:
        model = train_sentencepiece(["a b c d e f g"] * 20, 11, folder / "rules", small, rules=True, model_type="char")
        normalizer = normalizers.Precompiled(charsmap_of(model.read_bytes()))
        model.unlink()
    tokenizer = Tokenizer(models.Unigram())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>",
                                      show_progress=False)
    tokenizer.train_from_iterator(common(texts, max(200, size // 3)), trainer)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def t5(texts, size, small, folder):
    tokenizer = train_unigram(texts, size, pre_tokenizers.Metaspace(), folder, small, True)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", tokenizer.token_to_id("</s>"))])
    return tokenizer


def xlmr(texts, size, small, folder):
    tokenizer = train_unigram(texts, size, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
                              folder, small, True)
    tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, normalizers.Replace(Regex(" {2,}"), " ")])
    return tokenizer


def unigram_text(texts, size, small, folder):
    """Unigram over whole texts with byte fallback: the running sum of scores matters."""
    tokenizer = train_unigram(texts, size, pre_tokenizers.Metaspace(prepend_scheme="never"), folder, small, False)
    data = json.loads(tokenizer.to_str())
    data["model"]["vocab"] += [[b, -40.0] for b in BYTES] + [["aaa", -9.0], [MARK * 2, -3.5], [MARK * 3, -5.25], ["a" + MARK, -9.5]]
    seen, vocab = set(), []
    for token, score in data["model"]["vocab"]:
        if token not in seen:
            vocab.append([token, score])
        seen.add(token)
    data["model"]["vocab"] = vocab
    data["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.decoder = llama_decoder(True)
    return tokenizer


def bert(texts, size, small, lowercase=True):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=names, limit_alphabet=max(200, size // 3), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.WordPiece()
    ids = [(n, tokenizer.token_to_id(n)) for n in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    return tokenizer


def bert_cased(texts, size, small):
    return bert(texts, size, small, False)


def word_level(texts, size, small):
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


def bpe_suffix(texts, size, small):
    """GPT and CLIP: a suffix ends each word."""
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", True),
        pre_tokenizers.Digits(individual_digits=True),
    ])
    tokenizer = train_bpe(texts, size, normalizer, pre_tokenizer, unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def bpe_prefix(texts, size, small):
    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKD(), normalizers.Strip()])
    pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.CharDelimiterSplit("="), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("contiguous"),
    ])
    tokenizer = train_bpe(texts, size, normalizer, pre_tokenizer, unk_token="<unk>", continuing_subword_prefix="##", fuse_unk=True)
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def byte_level_characters(texts, size, small):
    """ByteLevel as a normalizer, and Unigram-like decoding of single tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(left=False), normalizers.ByteLevel()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u0120", "merged_with_next")
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


HUGGING_FACE = {
    f.__name__: f
    for f in (llama2, mistral, gemma, t5, xlmr, unigram_text, bert, bert_cased, word_level, bpe_suffix, bpe_prefix, byte_level_characters)
}
SENTENCEPIECE = {
    "sp_llama": dict(model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True),
    "sp_bpe": dict(model_type="bpe", rules=True, user_defined_symbols=["<mask>", "ab", "  x", "\U0001f600"], control_symbols=["<r>"]),
    "sp_unigram": dict(model_type="unigram", rules=True, pad_id=3),
    "sp_unigram_bytes": dict(model_type="unigram", byte_fallback=True, remove_extra_whitespaces=False, add_dummy_prefix=False,
                             allow_whitespace_only_pieces=True, user_defined_symbols=["<mask>", "word", "a" + MARK]),
    "sp_suffix": dict(model_type="unigram", treat_whitespace_as_suffix=True),
    "sp_characters": dict(model_type="char", rules=True),
}
TIKTOKEN = {"tiktoken_v1": MEGATRON_V1, "tiktoken_v2": MEGATRON_V2, "tiktoken_llama3": LLAMA3}
# Kinds whose words PCRE2 cuts: its Unicode tables may be older than the package's.
NEEDS_PCRE2 = {"bpe_suffix", "tiktoken_v1", "tiktoken_v2", "tiktoken_llama3"}
NAMES = [*HUGGING_FACE, *SENTENCEPIECE, *TIKTOKEN]


def assigned(text):
    """The text without characters that are newer than Unicode 14 (Python 3.11)."""
    return "".join(c for c in text if unicodedata.category(c) != "Cn")


def train_hugging_face(name, texts, size, folder, small):
    build = HUGGING_FACE[name]
    tokenizer = build(texts, size, small, folder) if name in ("t5", "xlmr", "unigram_text") else build(texts, size, small)
    tokenizer.add_tokens(ADDED)
    tokenizer.add_special_tokens([token for token in ADDED if token.special])
    path = folder / f"{name}.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path))  # whose scores are those of the file, as its reader rounds them
    return Kind(
        name, path, ["--tokenizer-type", "HuggingFaceTokenizer"],
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)],
    )


def train_sentencepiece_kind(name, texts, size, folder, small):
    texts = common(texts, max(150, size // 4))
    path = train_sentencepiece(texts, size, folder / name, small, **SENTENCEPIECE[name])
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    kind = "Llama2Tokenizer" if name == "sp_llama" else "SentencePieceTokenizer"
    return Kind(name, path, ["--tokenizer-type", kind], model.encode, model.decode, lambda texts: [model.encode(t) for t in texts])


def train_tiktoken(name, texts, size, folder, small):
    pattern = TIKTOKEN[name]
    tokenizer = Tokenizer(models.BPE())
    pre = pre_tokenizers.Split(Regex(pattern.replace("?+", "?").replace("++", "+")), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    letters = {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    for byte in printable:
        letters[chr(byte)] = byte
    for i, byte in enumerate(b for b in range(256) if b not in printable):
        letters[chr(256 + i)] = byte
    learned = [bytes(letters[c] for c in t) for t, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    tokens = [bytes([b]) for b in range(256)] + [t for t in learned if len(t) > 1]
    if name == "tiktoken_llama3":
        path = folder / f"{name}.model"
        path.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens)))
        names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4)),
                 "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
                 *(f"<|reserved_special_token_{i}|>" for i in range(5, 251))]
        special = {n: len(tokens) + i for i, n in enumerate(names)}
        ranks = {t: i for i, t in enumerate(tokens)}
        flags = []
    else:
        path = folder / f"{name}.json"
        entries = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": ""} for i, t in enumerate(tokens)]
        path.write_text(json.dumps(entries))
        count = 40
        names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
        names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
        special = {n: i for i, n in enumerate(names)}
        ranks = {t: i + count for i, t in enumerate(tokens)}
        flags = ["--tiktoken-pattern", name[-2:], "--tiktoken-num-special-tokens", str(count), "--vocab-size", str(len(tokens) + count)]
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return Kind(
        name, path, ["--tokenizer-type", "TikTokenizer", *flags], lambda text: encoding.encode(text, allowed_special="all"), encoding.decode,
        lambda texts: [encoding.encode(t, allowed_special="all") for t in texts],
    )


def train(name, texts, vocab_size, folder, small=False):
    if name in NEEDS_PCRE2:
        texts = [assigned(t) for t in texts]
    folder = pathlib.Path(folder)
    if name in HUGGING_FACE:
        return train_hugging_face(name, texts, vocab_size, folder, small)
    if name in SENTENCEPIECE:
        return train_sentencepiece_kind(name, texts, vocab_size, folder, small)
    return train_tiktoken(name, texts, vocab_size, folder, small)
