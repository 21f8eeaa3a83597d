"""Writes the goldens of masked datasets: python make_masked_goldens.py [--check]

Runs the classes of megatron-core 0.16.1 (with numpy 2.4, torch 2.11) on small synthetic files that cases.json describes:

  vocab.txt, a b c .bin .idx    vocabulary and data sets
  numpy.json                    draws of numpy.random.RandomState
  mapping.json, blocks.json     rows of helpers_cpp.build_mapping and build_blocks_mapping
  bert.json, t5.json            by split: length, the first and last sample, and a digest of all samples

A digest is over the keys of "keys", sample by sample, each value as int64. --check compares with the files that exist.
"""
import json
import os
import shutil
import sys
import tempfile

import numpy
import torch
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

HERE = os.path.dirname(os.path.abspath(__file__))
KEYS = {
    "bert": ["text", "types", "labels", "is_random", "padding_mask", "loss_mask", "truncated"],
    "t5": ["text_enc", "text_dec", "labels", "loss_mask", "truncated", "enc_mask", "dec_mask"],
}


class Vocabulary:
    """What the datasets ask of a tokenizer: BERT's special tokens first, sentinels behind the words."""

    def __init__(self, tokens, sentinels):
        self.tokens = tokens + [f"<extra_id_{i}>" for i in range(sentinels)]
        self.inv_vocab = dict(enumerate(self.tokens))
        self.vocab_size = len(self.tokens)
        self.pad, self.unk, self.cls, self.sep, self.mask = range(5)
        self.bos, self.eos, self.eod = self.cls, self.sep, self.sep
        self.additional_special_tokens_ids = list(range(len(tokens), self.vocab_size))
        self.unique_identifiers = {"class": "Vocabulary", "size": self.vocab_size}


def make_vocabulary(spec):
    random = numpy.random.default_rng(spec["seed"])
    letters = list("abcdefghijklmnopqrstuvwxyz")
    seen = set()

    def draw(count, prefix, longest):
        tokens = []
        while len(tokens) < count:
            token = prefix + "".join(random.choice(letters, random.integers(1, longest)))
            if token not in seen:
                seen.add(token)
                tokens.append(token)
        return tokens

    tokens = draw(spec["words"], "", 8) + draw(spec["pieces"], "##", 5)
    random.shuffle(tokens)
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [str(token) for token in tokens]


def make_data(folder, spec, vocab_size):
    """Documents of sentences, some without any. `long`: every so many documents a sentence of 512 or 513 tokens;
    `specials`: [CLS] or [SEP] in the text."""
    random = numpy.random.default_rng(spec["seed"])
    builder = IndexedDatasetBuilder(f"{folder}/{spec['name']}.bin", dtype={"u16": numpy.uint16, "i32": numpy.int32}[spec["type"]])
    for document in range(spec["documents"]):
        count = int(random.choice(spec["sentences"]))
        lengths = [int(random.integers(spec["length"][0], spec["length"][1] + 1)) for _ in range(count)]
        if spec["long"] and count and document % spec["long"] == spec["long"] - 1:
            lengths[int(random.integers(0, count))] = 512 + int(random.integers(0, 2))
        ids = random.integers(5, vocab_size, sum(lengths))
        if spec.get("specials") and len(ids) > 4:
            ids[random.integers(0, len(ids), 2)] = [2, 3]
        builder.add_document(torch.tensor(ids), lengths)
    builder.finalize(f"{folder}/{spec['name']}.idx")


def numpy_draws(seed):
    r = numpy.random.RandomState(seed)
    weights = 1.0 / (numpy.arange(3) + 1)
    weights /= weights.sum()
    out = {"seed": seed, "randint_1_n": [[n, int(r.randint(low=1, high=n))] for n in (3, 4, 7, 2, 100, 65537)]}
    out["random"] = [r.random() for _ in range(3)]
    out["geometric_0.2"] = [int(r.geometric(0.2)) for _ in range(40)]
    out["choice_123"] = [int(r.choice(numpy.arange(3) + 1, p=weights / weights.sum())) for _ in range(20)]
    shuffled = list(range(11))
    r.shuffle(shuffled)
    out["shuffle_11"] = shuffled
    out["randint_0_n"] = [[n, int(r.randint(0, n))] for n in (1, 2, 300, 30522)]
    out["random_after"] = r.random()
    return out


def mapping(case):
    rows = helpers_cpp.build_mapping(
        numpy.array(case["docs"], numpy.int64), numpy.array(case["sizes"], numpy.int32), case["epochs"], case["max_samples"],
        case["max_length"], case["short_prob"], case["seed"], False, case["min_sentences"])
    return {**case, "rows": rows.tolist()}


def blocks(case):
    rows = helpers_cpp.build_blocks_mapping(
        numpy.array(case["docs"], numpy.int64), numpy.array(case["sizes"], numpy.int32), numpy.array(case["titles"], numpy.int32),
        case["epochs"], case["max_samples"], case["max_length"], case["seed"], False, case["one_sentence"])
    return {**case, "rows": rows.tolist()}


def digest(values):
    """A hash of integers that is simple in any language: h = (h ^ value) * 0x100000001b3 modulo 2^64."""
    h = 0xCBF29CE484222325
    for value in values:
        h = ((h ^ (int(value) & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def datasets(folder, kind, case, tokens):
    names = case["data"]
    blend = ([f"{folder}/{name}" for name in (names if len(names) == 1 else names[1::2])],
             None if len(names) == 1 else [float(weight) for weight in names[0::2]])
    cache = tempfile.mkdtemp()
    common = dict(
        random_seed=case["seed"], sequence_length=case["seq_length"], blend=blend, split=case["split"], path_to_cache=cache,
        tokenizer=Vocabulary(tokens, case["sentinels"]), masking_probability=case["mask_prob"],
        short_sequence_probability=case["short_seq_prob"], masking_max_ngram=case["max_ngram"],
        masking_do_full_word=case["full_word"], masking_do_permutation=False, masking_use_longer_ngrams=case["longer"],
        masking_use_geometric_distribution=case["geometric"])
    if kind == "bert":
        made = BlendedMegatronDatasetBuilder(
            BERTMaskedWordPieceDataset, case["samples"], lambda: True,
            BERTMaskedWordPieceDatasetConfig(classification_head=case["binary_head"], **common)).build()
    else:
        made = BlendedMegatronDatasetBuilder(
            T5MaskedWordPieceDataset, case["samples"], lambda: True,
            T5MaskedWordPieceDatasetConfig(sequence_length_decoder=case["decoder_seq_length"], **common)).build()
    splits = {}
    for name, dataset, asked in zip(("train", "valid", "test"), made, case["samples"]):
        if dataset is None:
            continue
        count = min(len(dataset), max(asked, 1))
        items = [{key: numpy.asarray(dataset[i][key]).ravel() for key in KEYS[kind]} for i in range(count)]
        splits[name] = {
            "length": len(dataset), "samples": count, "digest": digest(v for item in items for key in KEYS[kind] for v in item[key]),
            "ends": {i: {key: items[i][key].tolist() for key in KEYS[kind]} for i in (0, count - 1)}}
    shutil.rmtree(cache)
    return {**case, "splits": splits}


def dump(path, value):
    with open(path, "w") as file:
        file.write(json.dumps(value, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")


def make(folder):
    with open(f"{HERE}/cases.json") as file:
        cases = json.load(file)
    tokens = make_vocabulary(cases["vocab"])
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(tokens) + "\n")
    for spec in cases["data"]:
        make_data(folder, spec, len(tokens))
    dump(f"{folder}/numpy.json", [numpy_draws(seed) for seed in cases["numpy"]])
    dump(f"{folder}/mapping.json", [mapping(case) for case in cases["mapping"]])
    dump(f"{folder}/blocks.json", [blocks(case) for case in cases["blocks"]])
    for kind in KEYS:
        dump(f"{folder}/{kind}.json", [datasets(folder, kind, {**cases["defaults"][kind], **case}, tokens) for case in cases[kind]])


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if "--check" not in sys.argv:
        sys.exit(make(HERE))
    scratch = tempfile.mkdtemp()
    make(scratch)

    def read(folder, name):
        with open(f"{folder}/{name}", "rb") as file:
            return file.read()

    different = [name for name in sorted(os.listdir(scratch)) if read(scratch, name) != read(HERE, name)]
    print(f"different: {different}" if different else "equal")
    sys.exit(bool(different))
