"""Text that is hard to divide into sentences, and what NLTK makes of it (nltk 3.9.1).

    python mixed_text.py FOLDER MEGABYTES SEED

Writes FOLDER/text.txt, FOLDER/english (parameters that NLTK learned from the text), and for both kinds of parameters and both
ways with newlines FOLDER/{learned,none}_{plain,keep}: the sentences, each after its length in bytes and a space. Prints for the
same four how many bytes of text NLTK divides in a second of processor time.
"""
import os
import random
import sys
import time

import nltk.tokenize.punkt as punkt
from make_punkt_goldens import KeepNewlines, learn

WORDS = """the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other into has more
her two like him see time could no make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know""".split()
NAMES = ["Smith", "Jones", "Bach", "Miller", "Berlin", "Paris", "Washington", "Monday", "October", "Kim", "O'Neil", "McDonald",
         "\u00c9lise", "\u00c5ngstr\u00f6m", "\u03a9mega", "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2", "\u0130zmir", "stra\u00dfe"]
SHORT = """Mr. Mrs. Dr. Prof. St. etc. e.g. i.e. cf. vs. No. Inc. Ltd. Co. Jr. U.S. U.K. D.C. Ph.D. p.m. a.m. Jan. Oct. approx. fig. pp.
vol. ca. ex-Gov.""".split()
CJK = ["\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002", "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff01", "\u65e5\u672c\u8a9e\u306e\u6587\u3067\u3059\u3002",
       "\u3053\u308c\u306f\u4f55\u3067\u3059\u304b\uff1f", "\ud55c\uad6d\uc5b4", "\ubb38\uc7a5\uc785\ub2c8\ub2e4.", "\u4e2d\u6587", "and", "English",
       "\u6df7\u6392.", ""]
ENDS = [". ", ". ", ". ", ". ", "? ", "! ", "... ", ".\n", ".\n\n", ". . . ", "?! ", "!!! ", ".... ", '." ', ".' ", ".) ", '?" ', ".] ",
        ".}) ", '."--', ". -- ", "; ", ".\u00a0", ".\u3000", "!\u2028", ".\t", ".\r\n", ".  ", ".\x1c", ". , ", '.") ', ".''  ", ". ( "]
ODD = ["--", "---", "(", ")", "[", "]", "{", "}", '"', "'", "`", "``", "''", ":", ";", ",", "@", "#", "&", "*", "-", ".", "..", "...",
       ". . .", ". .", "?", "!", "\u2026", "\u201c", "\u201d", "\u00ab", "\u00bb", "_", "$", "3.5", "1,000.00", "-7.", ".5", "12.",
       "12..", "\u0663.", "No.12", "v1.2.3", "a.b.c.", "x.", "X.", "\u00c9.", "\u00df.", "_.", "A.B.", "http://a.b/c.d?e!f",
       "me@x.org.", "\u00a0", "\u2009", "\x1f", "\x85", "a\u0301.", "\u01c5.", "\u02b0.", "\u0391\u03a3.", "\u0391\u03a3'.", "\u03a3.",
       "'s", "can't.", "end.So", 'end."So', "!a", "?.", ".!", ",.", "-.", ".-", "a--b.", "a..b", "a. . . b"]


def draw_word(rng):
    kind = rng.random()
    if kind >= 0.97:
        return rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + "."
    return rng.choice(WORDS if kind < 0.7 else NAMES if kind < 0.8 else SHORT if kind < 0.87 else ODD)


def sentence(rng):
    out = []
    for i in range(rng.randint(1, 16)):
        word = draw_word(rng)
        if i == 0 and rng.random() < 0.8:
            word = word[:1].upper() + word[1:]
        out.append(word + rng.choice(["", "", "", "", "", ",", ":", ";", ")"]))
    joined = "".join(word + (" " if rng.random() < 0.93 else rng.choice(["", "\n", "\t", "\u3000", "--", "  "])) for word in out)
    return joined.rstrip(" ") + rng.choice(ENDS)


def mixed_text(rng, size):
    parts, length = [], 0
    while length < size:
        kind = rng.random()
        if kind < 0.93:
            part = sentence(rng)
        elif kind < 0.96:
            part = rng.choice(CJK) * rng.randint(1, 4)
        elif kind < 0.99:
            part = "".join(rng.choice(ODD + ENDS) for _ in range(rng.randint(1, 30)))
        else:
            part = rng.choice(['."', "!", ". ", '"', ".)", "? ", "\n", "  ", "..", "-"]) * rng.randint(1, 60)
        parts.append(part)
        length += len(part.encode())
    return "".join(parts)


def main():
    folder, size, rng = sys.argv[1], int(float(sys.argv[2]) * 1e6), random.Random(int(sys.argv[3]))
    text = mixed_text(rng, size)
    with open(f"{folder}/text.txt", "wb") as file:
        file.write(text.encode())
    learned = learn([text], f"{folder}/english")
    for name, parameters in (("learned", learned), ("none", None)):
        for way in ("plain", "keep"):
            splitter = punkt.PunktSentenceTokenizer(parameters, lang_vars=KeepNewlines() if way == "keep" else None)
            pieces = [text[i:i + 1_000_000] for i in range(0, len(text), 1_000_000)]
            start = time.process_time()
            sentences = [s for piece in pieces for s in splitter.tokenize(piece)]
            seconds = time.process_time() - start
            with open(f"{folder}/{name}_{way}", "wb") as file:
                for s in sentences:
                    encoded = s.encode()
                    file.write(b"%d " % len(encoded) + encoded)
            print(f"{name}_{way} {len(text.encode()) / seconds:.0f}")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
