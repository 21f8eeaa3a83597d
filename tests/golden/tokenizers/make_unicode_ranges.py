"""Writes megatron/tokenizers/detail/text/unicode_ranges.inc: the character classes that the `tokenizers` package uses.

The classes are read from the engines themselves (Oniguruma for \\p{L} and its parts, \\p{M}, \\p{N} and \\s; Rust's regex for \\w; its own tables
for NFC), because their Unicode versions, not the newest one, decide the ids. Made with tokenizers 0.23.3.

    python make_unicode_ranges.py > ../../../megatron/tokenizers/detail/text/unicode_ranges.inc
"""

import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
LETTER, NUMBER, SPACE, NEWLINE, WORD, COMBINING, UPPER_OR_UNCASED, LOWER_OR_UNCASED = 1, 2, 3, 4, 8, 16, 32, 64


def matching(pattern):
    """The code points that a one-character pattern matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for first in range(0, len(CODE_POINTS), 256):
        block = CODE_POINTS[first : first + 256]
        left = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, block))):
            left.update(range(begin, end))
        found.update(c for i, c in enumerate(block) if i not in left)
    return found


def word_characters():
    """A single_word token is not recognised behind a word character."""
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    tokenizer.add_tokens([AddedToken("TOK", single_word=True, normalized=False)])
    found = set()
    for first in range(0, len(CODE_POINTS), 20000):
        block = CODE_POINTS[first : first + 20000]
        encodings = tokenizer.encode_batch([chr(c) + "TOK" for c in block])
        found.update(c for c, e in zip(block, encodings) if not e.ids)
    return found


def combining_characters():
    """Characters that NFC sorts or joins; the package's tables are older than Python's."""
    nfc = normalizers.NFC()

    def moves(text):
        return nfc.normalize_str(text) != text

    candidates = (c for c in CODE_POINTS if unicodedata.combining(chr(c)) != 0)
    return {c for c in candidates if moves("a" + chr(c) + "\u0302") or moves("a" + chr(c) + "\u0323")}


def main():
    classes = bytearray(0x110000)
    for pattern, value in ((r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"[\r\n]", NEWLINE)):
        for c in matching(pattern):
            classes[c] = value
    for c in word_characters():
        classes[c] |= WORD
    for c in combining_characters():
        classes[c] |= COMBINING
    for c in matching(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"):
        classes[c] |= UPPER_OR_UNCASED
    for c in matching(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"):
        classes[c] |= LOWER_OR_UNCASED
    starts = [c for c in range(0x110000) if c == 0 or classes[c] != classes[c - 1]]
    entries = [f"0x{(c << 7) | classes[c]:x}," for c in starts]
    print(f"// Made by tests/golden/tokenizers/make_unicode_ranges.py with tokenizers {tokenizers.__version__}. Do not edit.")
    print("// Each entry: (first code point << 7) | class; the class holds up to the next entry.")
    for first in range(0, len(entries), 10):
        print(" ".join(entries[first : first + 10]))


if __name__ == "__main__":
    main()
