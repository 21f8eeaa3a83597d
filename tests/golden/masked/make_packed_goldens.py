"""Writes packed.json, the golden of masked samples of packed text: python make_packed_goldens.py (numpy 2.4)

Written from the description of the format alone, with numpy.random.RandomState, over the data sets a and b beside it: documents between [CLS]
and [SEP] in the order of Megatron-LM's GPT data sets, cut every `seq_length` tokens, masked as Megatron-LM masks BERT's samples. By split: the
number of samples, the first and last sample in full with the beginnings of its documents, and a digest of all (make_masked_goldens.py).
"""
import json
import math
import os
import struct

import numpy

HERE = os.path.dirname(os.path.abspath(__file__))
CLS, SEP, MASK = 2, 3, 4
KEYS = ["text", "labels", "loss_mask", "position_ids", "starts"]
DEFAULTS = dict(seed=1234, seq_length=64, mask_prob=0.15, max_ngram=3, full_word=True, longer=False, geometric=False, replace=[0.8, 0.1, 0.1])
CASES = [
    dict(data="a", split=[70, 20, 10], samples=[150, 20, None]),
    dict(data="b", split=[100, 0, 0], samples=[400, None, None], seed=77, seq_length=48, mask_prob=0.3, geometric=True, max_ngram=6),
    dict(data="b", split=[50, 50, 0], samples=[None, 30, None], seed=4000000000, seq_length=200, longer=True, replace=[0.5, 0.25, 0.25]),
    dict(data="a", split=[100, 0, 0], samples=[130, None, None], seed=3, seq_length=33, full_word=False, mask_prob=0.4),
]


def read_documents(name):
    with open(f"{HERE}/{name}.idx", "rb") as file:
        raw = file.read()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    code, sequences, documents = struct.unpack("<BQQ", raw[17:34])
    dtype = {4: numpy.int32, 8: numpy.uint16}[code]
    lengths = numpy.frombuffer(raw, numpy.int32, sequences, 34)
    starts = numpy.frombuffer(raw, numpy.int64, sequences, 34 + 4 * sequences)
    ends = numpy.frombuffer(raw, numpy.int64, documents, 34 + 12 * sequences)
    tokens = numpy.fromfile(f"{HERE}/{name}.bin", dtype)
    sentences = [tokens[at // tokens.itemsize:][:size].tolist() for at, size in zip(starts, lengths)]
    return [sum(sentences[a:b], []) for a, b in zip(ends[:-1], ends[1:])]


def shuffled(random, values):
    values = numpy.array(values)
    random.shuffle(values)
    return values.tolist()


def cut(case, documents, ids, target):
    """The samples as (text, beginnings of documents)."""
    s, random = case["seq_length"], numpy.random.RandomState(case["seed"])
    per_epoch = sum(len(documents[d]) for d in ids)
    epochs = 1 if target is None else max(1, math.ceil(target * s / per_epoch))
    before = (epochs - 1) * per_epoch // s
    separate = epochs > 1 and target - before < int(0.80 * (per_epoch // s))
    order = shuffled(random, ids * (epochs - 1)) + shuffled(random, ids) if separate else shuffled(random, ids * epochs)
    stream = [(token, at == 0) for d in order for at, token in enumerate(documents[d])]
    count = len(stream) // s
    rows = [stream[k * s:(k + 1) * s] for k in range(count)]
    samples = [([token for token, _ in row], [0] + [at for at, (_, begins) in enumerate(row) if begins and at > 0]) for row in rows]
    places = list(range(count))
    head = before if separate else count
    places = shuffled(random, places[:head]) + (shuffled(random, places[head:]) if head < count else [])
    return [samples[k] for k in places]


def mask(case, index, text, vocabulary):
    random = numpy.random.RandomState((case["seed"] + index) % 2**32)
    words = []
    for at, token in enumerate(text):
        if token in (CLS, SEP):
            continue
        if case["full_word"] and words and vocabulary[token].startswith("##"):
            words[-1].append(at)
        else:
            words.append([at])
    p, most = case["mask_prob"], case["max_ngram"]
    budget = min(p * len(text), max(1, round(len(text) * p)))
    weights = 1.0 / (numpy.arange(most) + 1)
    weights /= weights.sum()
    if case["longer"]:
        weights = weights[::-1]
    masks, other, kept = case["replace"]
    out, labels = list(text), [-1] * len(text)
    order = list(range(len(words)))
    random.shuffle(order)
    masked = 0
    for word in order:
        if masked >= budget:
            break
        if case["geometric"]:
            n = min(int(random.geometric(0.2)), most)
        else:
            n = int(random.choice(numpy.arange(most) + 1, p=weights / weights.sum()))
        span = sum(words[word:word + n], [])
        while n > 0 and masked + len(span) > budget:
            n -= 1
            span = sum(words[word:word + n], [])
        if n == 0 or any(labels[at] >= 0 for at in span):
            continue
        for at in span:
            labels[at] = text[at]
            if random.random_sample() < masks:
                out[at] = MASK
            elif random.random_sample() >= kept / (other + kept):
                out[at] = int(random.randint(0, len(vocabulary)))
        masked += len(span)
    return out, labels


def digest(values):
    h = 0xCBF29CE484222325
    for value in values:
        h = ((h ^ (int(value) & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def sample_of(case, index, text, starts, vocabulary):
    out, labels = mask(case, index, text, vocabulary)
    positions = [at - max(start for start in starts if start <= at) for at in range(len(text))]
    return dict(text=out, labels=labels, loss_mask=[int(label >= 0) for label in labels], position_ids=positions, starts=starts)


def make(case, vocabulary):
    plain = read_documents(case["data"])
    documents = [[CLS, *tokens, SEP] if tokens else [] for tokens in plain]
    sums = numpy.cumsum([0, *case["split"]]) / sum(case["split"])
    splits = {}
    for k, (name, target) in enumerate(zip(("train", "valid", "test"), case["samples"])):
        if case["split"][k] == 0:
            continue
        first, last = (round(bound * len(documents)) for bound in sums[k:k + 2])
        samples = cut(case, documents, list(range(first, last)), target)
        count = len(samples) if target is None else target
        items = [sample_of(case, i, *samples[i], vocabulary) for i in range(count)]
        splits[name] = dict(length=len(samples), samples=count, digest=digest(v for item in items for key in KEYS for v in item[key]),
                            ends={i: items[i] for i in (0, count - 1)})
    return case | dict(splits=splits)


def main():
    with open(f"{HERE}/vocab.txt", encoding="utf-8") as file:
        vocabulary = file.read().split("\n")[:-1]
    cases = [make(DEFAULTS | case, vocabulary) for case in CASES]
    for case in cases:
        print(case["data"], {name: (split["length"], split["samples"]) for name, split in case["splits"].items()})
    with open(f"{HERE}/packed.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(cases, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")


if __name__ == "__main__":
    main()
