"""Writes the golden files of the GPT data path: python make_goldens.py (numpy 2.4.6, torch 2.11.0).

A plain implementation of the rules, written from their description and not for speed: documents are walked one by one,
and all randomness comes from numpy.random.RandomState and torch.randperm themselves.
"""
import json
import math
import os
import re

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))


def digest(values):
    """A hash of integers that is simple in any language: h = (h ^ value) * 0x100000001b3 modulo 2^64."""
    h = 0xCBF29CE484222325
    for value in values:
        h = ((h ^ (int(value) & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def entry(values):
    """Short arrays in full, long ones as length, digest, and their ends."""
    flat = [int(v) for v in np.asarray(values).ravel()]
    if len(flat) <= 40:
        return {"values": flat}
    return {"size": len(flat), "digest": digest(flat), "head": flat[:8], "tail": flat[-8:]}


def sample_index(documents, lengths, s, x, drop_last):
    available = sum(int(lengths[d]) for d in documents) - x
    count = available // s if drop_last else int(math.ceil(np.float32(available) / np.float32(s)))
    rows = [(0, 0)]
    document, offset = 0, 0
    for _ in range(count):
        need = s + x
        while True:
            have = int(lengths[documents[document]]) - offset
            if have >= need:
                offset += need - x  # with an extra token: the last token taken
                break
            need -= have
            if document == len(documents) - 1:
                offset = int(lengths[documents[document]]) - x
                break
            document, offset = document + 1, 0
        rows.append((document, offset))
    return rows


def gpt_index(first, last, lengths, s, x, n, seed, drop_last=True):
    ids = np.arange(first, last)
    tokens = int(np.sum(lengths[first:last], dtype=np.int64))
    epochs = 1
    if n is not None:
        while epochs * tokens < n * s + x:
            epochs += 1
    separate = False
    a = 0
    if epochs > 1:
        a = ((epochs - 1) * tokens - x) // s
        separate = n - a < int(0.80 * ((tokens - x) // s))
    rng = np.random.RandomState(seed)
    if separate:
        head = np.tile(ids, epochs - 1).astype(np.int32)
        tail = ids.astype(np.int32)
        rng.shuffle(head)
        rng.shuffle(tail)
        documents = np.concatenate([head, tail])
    else:
        documents = np.tile(ids, epochs).astype(np.int32)
        rng.shuffle(documents)
    rows = sample_index(documents, lengths, s, x, drop_last)
    k = len(rows) - 1
    m = a if separate else k
    shuffle = np.arange(m, dtype=np.uint32)
    rng.shuffle(shuffle)
    if k > m:
        rest = np.arange(m, k, dtype=np.uint32)
        rng.shuffle(rest)
        shuffle = np.concatenate([shuffle, rest])
    return epochs, separate, documents, rows, shuffle


def lengths_of(case):
    """Lengths that C++ can draw too: RandomState(seed) 32-bit draws modulo a bound, plus a floor."""
    rng = np.random.RandomState(case["lengths_seed"])
    draws = rng.randint(0, 2**32, size=case["num_sequences"], dtype=np.uint32).astype(np.int64)
    return (draws % case["lengths_mod"] + case["lengths_min"]).astype(np.int32)


def text_of(lengths, documents, rows, j, s, x, pad):
    (d0, o0), (d1, o1) = rows[j], rows[j + 1]
    text = []
    for d in range(d0, d1 + 1):
        sequence = int(documents[d])
        begin = o0 if d == d0 else 0
        end = o1 + x if d == d1 else int(lengths[sequence])
        text += [(sequence * 7919 + t * 31) % 1000 for t in range(begin, end)]
    return text + [pad] * (s + x - len(text))


def item(text, s, eod, pad, eod_mask_loss, reset_position, reset_attention):
    tokens, labels = list(text[:s]), list(text[1 : s + 1])
    loss_mask = [0.0 if (labels[i] == pad or (eod_mask_loss and tokens[i] == eod)) else 1.0 for i in range(s)]
    position = list(range(s))
    mask = np.triu(np.ones((s, s), dtype=bool), 1)
    previous = 0
    for i in [i for i in range(s) if tokens[i] == eod]:
        if reset_attention:
            mask[i + 1 :, : i + 1] = True
        if reset_position:
            for k in range(i + 1, s):
                position[k] -= i + 1 - previous
            previous = i + 1
    tokens = [0 if t == pad else t for t in tokens]
    labels = [0 if t == pad else t for t in labels]
    return tokens, labels, loss_mask, position, mask


def gpt_cases():
    cases = []
    specs = [
        # sequences, mod, min, s, x, n, seed, first, last, drop_last
        (50, 40, 1, 16, 1, 30, 1, 0, 50, True),
        (50, 40, 0, 16, 1, 30, 2, 5, 45, True),
        (50, 40, 0, 16, 1, 300, 3, 0, 50, True),
        (50, 40, 0, 16, 0, 300, 4, 0, 50, True),
        (50, 3, 0, 16, 1, 7, 5, 0, 50, True),
        (2000, 500, 1, 128, 1, 20000, 1234, 100, 1939, True),
        (2000, 500, 0, 128, 1, None, 77, 1939, 1998, True),
        (2000, 500, 0, 128, 1, 125, 4294967295, 1000, 1060, False),
        (2000, 500, 0, 128, 0, None, 9, 0, 300, False),
        (20000, 1500, 1, 1024, 1, 14700, 42, 0, 19380, True),
        (20000, 1500, 1, 1024, 1, 28000, 42, 0, 19380, True),
        (3000, 60, 0, 7, 1, 50000, 11, 0, 3000, True),
    ]
    for i, (count, mod, low, s, x, n, seed, first, last, drop_last) in enumerate(specs):
        case = {"lengths_seed": 100 + i, "num_sequences": count, "lengths_mod": mod, "lengths_min": low}
        lengths = lengths_of(case)
        epochs, separate, documents, rows, shuffle = gpt_index(first, last, lengths, s, x, n, seed, drop_last)
        case.update(sequence_length=s, extra=x, num_samples=n, seed=seed, first=first, last=last, drop_last=drop_last)
        case.update(epochs=epochs, separate=bool(separate), document_index=entry(documents))
        case.update(sample_index=entry(rows), shuffle_index=entry(shuffle))
        cases.append(case)
    return cases


def item_cases():
    out = []
    case = {"lengths_seed": 900, "num_sequences": 60, "lengths_mod": 30, "lengths_min": 0}
    lengths = lengths_of(case)
    s, eod, seed, n = 24, 31, 321, 60
    _, _, documents, rows, shuffle = gpt_index(0, 60, lengths, s, 1, n, seed)
    for flags in range(8):
        eod_mask_loss, reset_position, reset_attention = bool(flags & 1), bool(flags & 2), bool(flags & 4)
        for i in (0, 1, 17, len(shuffle) - 1):
            text = text_of(lengths, documents, rows, int(shuffle[i]), s, 1, 62)
            # Token ids below 400 are folded so that the end of document and the pad token occur often.
            text = [t % 100 if t < 400 else t for t in text]
            text = [eod if t % 13 == 5 else t for t in text]
            tokens, labels, loss_mask, position, mask = item(text, s, eod, 62, eod_mask_loss, reset_position, reset_attention)
            out.append({"index": i, "flags": flags, "tokens": tokens, "labels": labels, "loss_mask": loss_mask,
                        "position_ids": position, "mask_digest": digest(mask.ravel())})
    return {"lengths": case, "sequence_length": s, "eod": eod, "pad": 62, "seed": seed, "num_samples": n, "items": out}


def blend(weights, size):
    counts = [0] * len(weights)
    datasets, samples = [], []
    for i in range(size):
        best = 0
        errors = [w * max(i, 1) - c for w, c in zip(weights, counts)]
        for d, error in enumerate(errors):
            if error > errors[best]:
                best = d
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


def blend_exhaustive(sizes):
    weights = [n / sum(sizes) for n in sizes]
    counts = [0] * len(sizes)
    datasets, samples = [], []
    for i in range(sum(sizes)):
        left = [d for d in range(len(sizes)) if counts[d] < sizes[d]]
        best = left[0]
        for d in left:
            if weights[d] * max(i, 1) - counts[d] > weights[best] * max(i, 1) - counts[best]:
                best = d
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


def normalize(weights):
    w = np.array(weights, dtype=np.float64)
    return (w / np.sum(w)).tolist()


def blend_cases():
    cases = []
    rng = np.random.RandomState(5)
    for count, size in ((2, 1000), (5, 5000), (9, 3000), (40, 20000), (300, 3000)):
        weights = [float(w) for w in rng.uniform(0.01, 5.0, size=count)]
        normal = normalize(weights)
        target = [math.ceil(math.ceil(size * w) * 1) for w in normal]
        built = [math.ceil(math.ceil(size * w) * (1 + 0.005)) for w in normal]
        datasets, samples = blend(normalize(normal), sum(target))
        cases.append({"weights": weights, "size": size, "normalized": [w.hex() for w in normal], "member_sizes": built,
                      "total": sum(target), "dataset_index": entry(datasets), "sample_index": entry(samples)})
    exhaustive = []
    for sizes in ([3, 5, 2], [1, 1000], [17, 400, 3, 99, 2000, 1]):
        datasets, samples = blend_exhaustive(sizes)
        exhaustive.append({"sizes": sizes, "dataset_index": entry(datasets), "sample_index": entry(samples)})
    return {"weighted": cases, "exhaustive": exhaustive}


def random_cases():
    rng = np.random.RandomState(777)
    cases = {"uniform": [rng.uniform().hex() for _ in range(5)]}
    cases["interval64"] = [int(v) for v in np.random.RandomState(8).randint(0, 2**40, size=6, dtype=np.int64)]
    shuffles = []
    for seed, n in ((0, 1), (1, 2), (42, 10), (1234, 10), (7, 1000), (4294967295, 100003)):
        values = np.arange(n, dtype=np.int64)
        np.random.RandomState(seed).shuffle(values)
        shuffles.append({"seed": seed, "n": n, "result": entry(values)})
    cases["shuffle"] = shuffles
    permutations = []
    for seed, n in ((0, 1), (0, 5), (3, 10), (1, 1000), (12, 200001)):
        generator = torch.Generator()
        generator.manual_seed(seed)
        permutations.append({"seed": seed, "n": n, "result": entry(torch.randperm(n, generator=generator).numpy())})
    cases["torch_randperm"] = permutations
    return cases


def cyclic_cases():
    cases = []
    for total, mbs, ranks, sharding in ((103, 4, 3, True), (103, 4, 3, False), (64, 2, 2, True), (37, 3, 1, False)):
        active = total - total % (mbs * ranks)
        for consumed in (0, mbs * ranks * 2, active, active * 5 + mbs * ranks):
            epoch, offset = divmod(consumed, active)
            for rank in range(ranks):
                if sharding:
                    bucket = total // (mbs * ranks) * mbs
                    order = [rank * bucket + int(v) for v in torch.randperm(bucket, generator=torch.Generator().manual_seed(epoch))]
                    order = order[offset // ranks :]
                else:
                    bucket = total // mbs * mbs
                    order = [int(v) for v in torch.randperm(bucket, generator=torch.Generator().manual_seed(epoch))]
                    order = order[offset:][rank::ranks]
                cases.append({"total": total, "mbs": mbs, "ranks": ranks, "rank": rank, "sharding": sharding,
                              "consumed": consumed, "ids": order[:mbs]})
    return cases


def split_cases():
    cases = []
    for text, count in (("969, 30, 1", 1000), ("969,30,1", 12345), ("1,1,1", 100), ("90.5,9.5", 77), ("100,0,0", 10),
                        ("0.8 0.2", 5), ("98,2,0", 25), ("1,1", 5)):
        parts = [float(m) for m in re.findall(r"[.0-9]+", text)]
        parts += [0.0] * (3 - len(parts))
        bounds = [0.0]
        for share in normalize(parts):
            bounds.append(bounds[-1] + share)
        ranges = [[round(a * float(count)), round(b * float(count))] if a != b else None for a, b in zip(bounds[:-1], bounds[1:])]
        cases.append({"text": text, "count": count, "ranges": ranges})
    return cases


def main():
    goldens = {"gpt": gpt_cases(), "items": item_cases(), "blend": blend_cases(), "random": random_cases(),
               "cyclic": cyclic_cases(), "split": split_cases()}
    with open(os.path.join(HERE, "goldens.json"), "w") as out:
        json.dump(goldens, out, separators=(",", ":"))
        out.write("\n")


main()
