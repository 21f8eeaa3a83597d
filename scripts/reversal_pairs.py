"""Texts of 12 symbols and their reversals, for reversal.sh.

    reversal_pairs.py write DIR           vocab.txt, train.jsonl and unseen.jsonl, which shares no text with it
    reversal_pairs.py told PREDICTIONS    how many of the predictions are the targets; fails below 95%
"""
import json
import os
import random
import sys

SYMBOLS = "abcdefghijklmnop"
LENGTH, TRAINED, UNSEEN, LEAST = 12, 40000, 500, 0.95


def write(folder):
    os.makedirs(folder, exist_ok=True)
    draw = random.Random(1234)
    texts = dict.fromkeys("".join(draw.choices(SYMBOLS, k=LENGTH)) for _ in range(TRAINED + UNSEEN + 100))
    texts = list(texts)[:TRAINED + UNSEEN]
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SYMBOLS]) + "\n")
    for name, part in (("train", texts[UNSEEN:]), ("unseen", texts[:UNSEEN])):
        with open(os.path.join(folder, name + ".jsonl"), "w", encoding="utf-8") as file:
            for text in part:
                file.write(json.dumps({"input": " ".join(text), "target": " ".join(reversed(text))}) + "\n")


def told(path):
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    hits = sum(row["prediction"].split() == row["target"].split() for row in rows)
    print(f"{hits} of {len(rows)} texts of {LENGTH} symbols that it has not seen are reversed exactly: {hits / len(rows):.1%}, "
          f"{LEAST:.0%} are needed")
    if hits < LEAST * len(rows):
        sys.exit(1)


if __name__ == "__main__":
    {"write": write, "told": told}[sys.argv[1]](sys.argv[2])
