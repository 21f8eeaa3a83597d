"""Text that is hard on tokenizers: many scripts, joined emoji, control characters, line ends, long runs, added tokens."""

import random

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]

# (first, last, weight) of stretches of Unicode that words are drawn from.
BLOCKS = [
    (0x00, 0x20, 3), (0x20, 0x7F, 30), (0x80, 0xA0, 1), (0xA0, 0x17F, 8), (0x300, 0x36F, 4), (0x370, 0x3FF, 3),
    (0x400, 0x4FF, 5), (0x590, 0x5FF, 3), (0x600, 0x6FF, 4), (0x660, 0x669, 1), (0x900, 0x97F, 4), (0xE00, 0xE7F, 3),
    (0x1100, 0x11FF, 2), (0x1780, 0x18AF, 1), (0x1E00, 0x1FFF, 2), (0x2000, 0x206F, 4), (0x2460, 0x24FF, 1),
    (0x2E80, 0x303F, 2), (0x3040, 0x30FF, 4), (0x4E00, 0x9FFF, 6), (0xAC00, 0xD7A3, 4), (0xFE00, 0xFE0F, 1),
    (0xFF00, 0xFFEF, 1), (0x10000, 0x10FFFF, 1), (0x1D400, 0x1D7FF, 1), (0x1F300, 0x1FAFF, 5),
]

WORDS = (
    "the of and to in a is it's don't DON'T IT'S we're WE'RE I'll I'LL they've THEY'VE I'm I'M he'd HE'D 's 't 'RE 'Ll"
    " '\u017f don'\u017f l'\u00e9t\u00e9 L'\u00c9T\u00c9 can\u2019t word wordy words <|endoftext|> <|end <|endof <mask>"
    " <r> <lr> caf\u00e9 caf\u00e9s cafe\u0301 cafe\u0301s \u00e9t\u00e9 ete\u0301 12345678 1 12 123 1234 3.14159"
    " \u0661\u0662\u0663\u0664 \u00b2\u00b3 \u00bd \u2167 e=mc\u00b2 \U0001F600 \U0001F600\u200d"
    " \U0001F468\u200d\U0001F469\u200d\U0001F467 \U0001F44D\U0001F3FD \U0001F1E9\U0001F1EA http://example.com/a?b=c&d=%20"
    " foo_bar() {} [] !!! ... ---- ===== //// #include <vector> \t\t \r\n \n\n\n \n\r\n \u3000 \u00a0 \u2003 \u2028"
    " \u0085 \u180e \u200b \ufeff \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    " \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u05e9\u05dc\u05d5\u05dd"
    " \u0645\u0631\u062d\u0628\u0627 \u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u0395\u0399\u0391 \u00df \u017f \ufb01"
    " \u0130 \u0131 \u01c4 \u0958 \u212b A\u030a a\u0323\u0307 a\u0307\u0323 \u0344 \u0f73 \u1100\u1161\u11a8 \u08ca\u0323"
).split(" ")
RUNS = ["a", " ", "\n", "1", "=", "x1", "\u00e9", "\u4f60", "'", "\r\n", "ab", "e\u0301"]
JOINTS = [" ", " ", " ", "", " \n", "\n", "  ", "\t", "\r\n", "   ", ", ", ". "]


def some_word(rng, mode):
    kind = rng.random()
    if mode == 0 or kind < 0.35:
        return rng.choice(WORDS)
    if mode == 1 or kind < 0.5:
        first, last, _ = rng.choices(BLOCKS, [b[2] for b in BLOCKS])[0]
        drawn = (rng.randint(first, last) for _ in range(rng.choice([1, 1, 2, 3, 5, 9, 20])))
        return "".join(chr(c) for c in drawn if not 0xD800 <= c < 0xE000)
    if kind < 0.55:
        return "".join(chr(rng.choice(CODE_POINTS)) for _ in range(rng.randint(1, 4)))
    if kind < 0.6:
        return rng.choice(RUNS) * rng.choice([1, 2, 3, 7, 30, 150])
    if kind < 0.85:
        return "".join(rng.choice("etaoinshrdlucmfwypvbgkjqxzETAOIN'") for _ in range(rng.randint(1, 12)))
    return str(rng.randint(0, 10 ** rng.randint(1, 9)))


def hard_documents(seed, num_bytes):
    """Documents of about num_bytes of UTF-8 in all; the same for the same seed."""
    rng = random.Random(seed)
    documents = []
    while num_bytes > 0:
        mode = rng.randrange(6)
        parts = []
        for _ in range(rng.choice([1, 3, 10, 40, 200])):
            parts += [some_word(rng, mode), rng.choice(JOINTS)]
        documents.append("".join(parts))
        num_bytes -= len(documents[-1].encode())
    return documents
