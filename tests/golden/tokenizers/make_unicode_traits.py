"""Writes megatron/tokenizers/detail/text/unicode_traits.inc and unicode_lowercase.inc: what normalizers and pre-tokenizers of the
`tokenizers` package know about characters.

The traits are read from the package itself, character by character, because its Unicode versions, not the newest one, decide
the ids. Made with tokenizers 0.23.3 and sentencepiece 0.2.3 (which compiles the rules that show grapheme clusters).

    python make_unicode_traits.py ../../../megatron/tokenizers/detail
"""

import pathlib
import sys
import tempfile

import sentencepiece
import tokenizers
from tokenizers import normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
PUNCTUATION, CONTROL, NONSPACING, MARK, EXTENDS, PREPENDS, BREAKS, CANONICAL, COMPATIBLE = (1 << i for i in range(9))


def changed(normalizer):
    """The code points that the normalizer changes, and those that it removes."""
    moved, removed = set(), set()
    for c in CODE_POINTS:
        text = normalizer.normalize_str(chr(c))
        if text != chr(c):
            moved.add(c)
        if not text:
            removed.add(c)
    return moved, removed


def punctuation():
    split = pre_tokenizers.Punctuation("removed")
    found = set()
    for first in range(0, len(CODE_POINTS), 256):
        block = CODE_POINTS[first : first + 256]
        left = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, block))):
            left.update(range(begin, end))
        found.update(c for i, c in enumerate(block) if i not in left)
    return found


def charsmap(rules):
    """A precompiled charsmap that replaces the code points by the strings."""
    with tempfile.TemporaryDirectory() as folder:
        tsv = pathlib.Path(folder) / "rules.tsv"
        tsv.write_text("".join(f"{c:X}\t{' '.join(f'{ord(x):X}' for x in to)}\n" for c, to in rules.items()))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f g"] * 20), model_prefix=f"{folder}/m", vocab_size=11, model_type="char",
            normalization_rule_tsv=str(tsv), minloglevel=2,
        )
        data = pathlib.Path(folder, "m.model").read_bytes()
    at = data.rindex(b"user_defined") + 14 if b"user_defined" in data else 0
    # normalizer_spec (field 3) { name (1) precompiled_charsmap (2) ... }
    at = data.index(b"\x0a\x0cuser_defined\x12") + 15
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return data[at : at + size]


def clusters():
    """Characters that join the one before, the one behind, or none: seen where a whole cluster is replaced by its start."""
    single = [c for c in CODE_POINTS if c != 0 and c < 0x10000]
    rule = normalizers.Precompiled(charsmap({0x61: "x"}))
    extends = {c for c in CODE_POINTS if c > 0 and rule.normalize_str("a" + chr(c)) == "x"}
    everything = normalizers.Precompiled(charsmap({c: "x" for c in single if c not in (0x301, 0x62, 0x78)}))
    breaks = {c for c in single if c not in extends and everything.normalize_str(chr(c) + "\u0301") == "x\u0301"}
    prepends = {c for c in single if c != 0x62 and everything.normalize_str(chr(c) + "b") == "x"}
    return extends, prepends, breaks


def write(path, lines):
    made = f"Made by tests/golden/tokenizers/make_unicode_traits.py with tokenizers {tokenizers.__version__}. Do not edit."
    path.write_text(f"// {made}\n" + "".join(line + "\n" for line in lines))


def rows(entries, per_row=10):
    return [" ".join(entries[first : first + per_row]) for first in range(0, len(entries), per_row)]


def lowercase_runs():
    """(first, last, stride, delta) of characters whose lower case is at the same distance."""
    lower = normalizers.Lowercase()
    runs, long = [], []
    for c in CODE_POINTS:
        text = lower.normalize_str(chr(c))
        if text == chr(c):
            continue
        if len(text) > 1:
            long.append((c, text))
            continue
        delta = ord(text) - c
        if runs and runs[-1][3] == delta and c - runs[-1][1] <= 2 and (
            runs[-1][0] == runs[-1][1] or c - runs[-1][1] == runs[-1][2]
        ):
            first, last, _, _ = runs[-1]
            runs[-1] = (first, c, c - last, delta)
        else:
            runs.append((c, c, 1, delta))
    assert [(c, t) for c, t in long] == [(0x130, "i\u0307")], long
    return runs


def main():
    folder = pathlib.Path(sys.argv[1])
    bert = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    traits = [0] * 0x110000

    def mark(code_points, bit):
        for c in code_points:
            traits[c] |= bit

    mark(punctuation(), PUNCTUATION)
    mark(changed(normalizers.BertNormalizer(**{**bert, "clean_text": True}))[1], CONTROL)
    mark(changed(normalizers.BertNormalizer(**{**bert, "strip_accents": True}))[1], NONSPACING)
    mark(changed(normalizers.StripAccents())[1], MARK)
    for found, bit in zip(clusters(), (EXTENDS, PREPENDS, BREAKS)):
        mark(found, bit)
    mark(changed(normalizers.NFD())[0], CANONICAL)
    mark(changed(normalizers.NFKD())[0], COMPATIBLE)
    starts = [c for c in range(0x110000) if c == 0 or traits[c] != traits[c - 1]]
    lines = ["// Each entry: (first code point << 9) | traits, which hold up to the next entry."]
    write(folder / "unicode_traits.inc", lines + rows([f"0x{(c << 9) | traits[c]:x}," for c in starts]))
    entries = [f"{{0x{a:x}, 0x{b:x}, {s}, {d}}}," for a, b, s, d in lowercase_runs()]
    lines = ["// Each entry: first, last, stride, distance to the lower case. U+0130 is not among them."]
    write(folder / "unicode_lowercase.inc", lines + rows(entries, 4))


if __name__ == "__main__":
    main()
