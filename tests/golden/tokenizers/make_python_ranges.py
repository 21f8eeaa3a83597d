"""Writes megatron/tokenizers/detail/text/python_ranges.inc: character classes of Python's str and re, which sentences are split by.

Made with Python 3.11 (Unicode 14.0).

    python make_python_ranges.py > ../../../megatron/tokenizers/detail/text/python_ranges.inc
"""

import platform
import re
import unicodedata

SPACE, WORD, DIGIT, UPPER, LOWER, SIGMA_CASED, SIGMA_IGNORED = 1, 2, 4, 8, 16, 32, 64


def class_of(c):
    value = 0
    for pattern, bit in ((r"\s", SPACE), (r"\w", WORD), (r"\d", DIGIT)):
        if re.match(pattern, c):
            value |= bit
    value |= UPPER if c.isupper() else 0
    value |= LOWER if c.islower() else 0
    # The lower case of a sigma depends on the characters around it.
    if (c + "\u03a3").lower().endswith("\u03c2"):
        value |= SIGMA_CASED
    elif ("A" + c + "\u03a3").lower().endswith("\u03c2"):
        value |= SIGMA_IGNORED
    return value


def main():
    classes = [0 if 0xD800 <= c < 0xE000 else class_of(chr(c)) for c in range(0x110000)]
    starts = [c for c in range(0x110000) if c == 0 or classes[c] != classes[c - 1]]
    entries = [f"0x{(c << 7) | classes[c]:x}," for c in starts]
    print(f"// Made by tests/golden/tokenizers/make_python_ranges.py with Python {platform.python_version()}, Unicode"
          f" {unicodedata.unidata_version}. Do not edit.")
    print("// Each entry: (first code point << 7) | class; the class holds up to the next entry.")
    for first in range(0, len(entries), 10):
        print(" ".join(entries[first : first + 10]))


if __name__ == "__main__":
    main()
