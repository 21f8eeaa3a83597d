"""Documents of two random passages each, for retrieval.sh: every passage stands in two documents.

    retrieval_texts.py write DIR                train.jsonl, held_out.jsonl, whose passages each stand in a training document, and the vocabulary
                                                of the embedder
    retrieval_texts.py exchange PROJECT OTHER   a project in which each chunk of a validation sample has the neighbours of a chunk of another one
    retrieval_texts.py gain GPT RETRO OTHER     from the logs of three runs: fails unless the loss with retrieval on the held-out documents is at
                                                most half of the plain model's, and with neighbours of other chunks at least nine tenths of it
"""
import json
import os
import pathlib
import random
import re
import shutil
import sys

LETTERS, CHUNK, CHUNKS = "abcdefghijklmnop", 8, 8
TRAINED, HELD_OUT, MOST, LEAST = 3000, 100, 0.5, 0.9


def write(folder):
    os.makedirs(folder, exist_ok=True)
    draw = random.Random(1234)
    passage = lambda: "".join(draw.choices(LETTERS, k=CHUNK * CHUNKS))
    once = [passage() for _ in range(2 * HELD_OUT)]  # in one training document, and in one that is held out
    twice = [passage() for _ in range(TRAINED - HELD_OUT)]
    places = once + twice + twice
    draw.shuffle(places)
    draw.shuffle(once)
    for name, passages in (("train", places), ("held_out", once)):
        with open(os.path.join(folder, name + ".jsonl"), "w", encoding="utf-8") as file:
            for first, second in zip(passages[::2], passages[1::2]):
                # With the token that ends it, a document is as long as a sample.
                file.write(json.dumps({"text": (first + second)[:-1]}) + "\n")
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + letter for letter in LETTERS)]) + "\n")


def exchange(project, other):
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(project, other)
    for path in pathlib.Path(other).glob("query/valid-*/*.npy"):
        data = path.read_bytes()
        begin = data.index(b"\n") + 1
        half = begin + (len(data) - begin) // 8 * 4  # one int32 for each chunk
        path.write_bytes(data[:begin] + data[half:] + data[begin:half])


def loss(path):
    with open(path, encoding="utf-8") as file:
        return float(re.findall(r"on validation set \| lm loss value: (\S+)", file.read())[-1])


def gain(plain, retro, other):
    plain, retro, other = loss(plain), loss(retro), loss(other)
    print(f"loss on passages that stand in a training document, too: {plain:.3f} without retrieval, {retro:.3f} with it ({retro / plain:.2f} of "
          f"that, at most {MOST} is needed), {other:.3f} with neighbours of other chunks ({other / plain:.2f}, at least {LEAST})")
    if retro > MOST * plain or other < LEAST * plain:
        sys.exit(1)


if __name__ == "__main__":
    {"write": write, "exchange": exchange, "gain": gain}[sys.argv[1]](*sys.argv[2:])
