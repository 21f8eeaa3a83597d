#!/usr/bin/env python3
"""Writes metadatasets.json: which samples Megatron-Energon reads of subsets, joins and blends.

`sets` say what lies in folders (a test writes them again: images are files of same/json/media, a text is "FOLDER KEY"). A case names one, a
metadataset, and the samples that a pass over it has, of blends sorted, or that energon refuses it. Of parts of repetitions it draws any samples: their
number alone is kept. Version 7.4.1 looks for the samples that nonmatch "none" lets be missing, which is mended here. Made with Python 3.11,
megatron-energon 7.4.1.
Run: python make_metadatasets.py
"""
import io
import json
import pathlib
import random
import tarfile
import tempfile

import yaml
from megatron.energon import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.metadataset.loader import prepare_metadataset

HERE = pathlib.Path(__file__).resolve().parent
IMAGES = ["0_img1.png", "1_img1.jpg", "3_img1.png"]
FIELDS = {"CaptioningSample": {"image": "png,jpg", "caption": "txt"}, "ImageSample": {"image": "png,jpg"}, "TextSample": {"text": "txt"},
          "VQASample": {"image": "png,jpg", "context": "txt", "answers": "json[a]"}}


def folder(kind, shards, image=0, train=None, exclude=()):
    """`shards`: the keys of each. `train`: numbers of the shards of the part train; the others are of val."""
    return {"type": kind, "image": IMAGES[image], "shards": shards, "train": list(range(len(shards))) if train is None else train, "exclude": list(exclude)}


def write_folder(path, given):
    names = ["s%d.tar" % i for i in range(len(given["shards"]))]
    path.mkdir(parents=True)
    for name, keys in zip(names, given["shards"]):
        with tarfile.open(path / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key in keys:
                members = {"png" if given["image"].endswith("png") else "jpg": (HERE / "same/json/media" / given["image"]).read_bytes(),
                           "txt": ("%s %s" % (path.name, key)).encode(), "json": json.dumps({"a": "answer %s" % key}).encode()}
                for extension, data in members.items():
                    info = tarfile.TarInfo(key + "." + extension)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    WebdatasetPreparator.prepare_dataset(path, names, split_parts_ratio=[("train", 1)], workers=1)
    (path / ".nv-meta/dataset.yaml").write_text(yaml.dump({"sample_type": {"__module__": "megatron.energon", "__class__": given["type"]},
                                                           "field_map": FIELDS[given["type"]]}))
    parts = {"train": [names[i] for i in given["train"]], "val": [n for i, n in enumerate(names) if i not in given["train"]]}
    (path / ".nv-meta/split.yaml").write_text(yaml.dump({"exclude": given["exclude"], "split_parts": parts}))


def shown(sample):
    values = (getattr(sample, name, None) for name in ("caption", "context", "answers", "text"))
    texts = [value.decode() if isinstance(value, bytes) else value for value in values if value is not None]
    return "%s: %dx%d %s" % (sample.__key__, *sample.image.shape[1:], ", ".join(texts))


def read_or_none(self, pointer, *more, read=ITarReader._get_item_by_sample_pointer, **named):
    return None if pointer.tar_file_id < 0 else read(self, pointer, *more, **named)


ITarReader._get_item_by_sample_pointer = read_or_none


def samples(root, folders, entry, in_order):
    for name, given in folders.items():
        write_folder(root / name, given)
    (root / "m.yaml").write_text(yaml.dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": entry}}))
    prepare_metadataset(EPath(root / "m.yaml"))
    options = {"split_part": "train", "batch_size": None, "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0)}
    if "blend_epochized" in entry:
        data = get_train_dataset(root / "m.yaml", repeat=False, shuffle_buffer_size=None, max_samples_per_sequence=None, **options)
    else:
        data = get_val_dataset(root / "m.yaml", **options)
    rows = [shown(sample) for sample in get_loader(data)]
    return rows if in_order else sorted(rows)


def cases():
    plain = {"a": folder("CaptioningSample", [["0", "1", "2"], ["3", "4"], ["5", "6", "7", "8"]], train=[0, 2], exclude=["s2.tar/6"])}
    path = {"path": "./a"}
    for subset in ([10, 20], ["0%", "50%"], ["50%", "100%"], ["33%", "67.5%"], [2, 5], [4, "end"], [3, 8], ["10%", "end"], [5, 4], ["60%", "40%"], ["0%", "101%"]):
        yield "range %s" % subset, plain, dict(path, subset={"range": subset}), True
    draw = random.Random(5)
    for i in range(6):
        def share():
            first, last = sorted(draw.sample(range(0, 101, 5), 2))
            return {"range": ["%d%%" % first, "%d%%" % last]}
        many = {"a": folder("CaptioningSample", [["%d_%d" % (s, k) for k in range(draw.randint(1, 5))] for s in range(4)])}
        own = {"range": [1, draw.randint(4, 6)]} if i % 3 == 2 else share()
        if i % 3 == 2:
            many["a"]["shards"][0] = ["0_%d" % k for k in range(6)]
        yield "nested %d" % i, many, {"subset": share(), "blend": [dict(path, subset=own)]}, True
    two = {"a": folder("CaptioningSample", [["0", "1", "2"]]), "b": folder("CaptioningSample", [["7", "8"], ["9"]], image=1)}
    yield "weights", two, {"blend": [dict(path, weight=3, subset={"range": [1, "end"]}), {"path": "./b", "weight": 1}]}, False
    yield "repetitions", two, {"blend_epochized": [dict(path, repetitions=2), {"path": "./b", "repetitions": 3, "subset": {"range": ["0%", "70%"]}}]}, False
    yield "part of a repetition", two, {"blend_epochized": [dict(path, repetitions=1.7), {"path": "./b", "repetitions": 0.4}]}, False
    joiner = {"__module__": "megatron.energon", "__class__": "OCRSample"}
    pair = {"a": folder("ImageSample", [["0", "1", "2"], ["3", "4"], ["9"]], image=1, train=[1, 0]), "b": folder("TextSample", [["4", "2"], ["1", "0", "3", "x"]])}
    lacks = dict(pair, b=folder("TextSample", [["4"], ["1", "0", "x"]], exclude=["s1.tar/0"]))
    for name, folders, nonmatch in (("all", pair, "error"), ("lacks", lacks, "error"), ("skip", lacks, "skip")):
        yield "join " + name, folders, {"join": [path, {"path": "./b", "nonmatch": nonmatch}], "joiner": joiner}, True
    yield "join of a range", pair, {"join": [path, {"path": "./b"}], "joiner": joiner, "subset": {"range": ["21%", "81%"]}}, True
    yield "join of samples", pair, {"join": [path, {"path": "./b"}], "joiner": joiner, "subset": {"range": [1, 3]}}, True
    other = {"a": folder("VQASample", [["0", "1", "2", "3"]]), "b": folder("ImageSample", [["3", "1"], ["0"]], image=2)}
    asks = dict(joiner, __class__="VQASample")
    yield "join of other images", other, {"join": [path, {"path": "./b", "nonmatch": "none"}], "joiner": asks}, True
    yield "join of three", dict(other, c=folder("ImageSample", [["0", "2"]], image=1)), {"join": [
        path, {"path": "./b", "nonmatch": "skip"}, {"path": "./c", "nonmatch": "none"}], "joiner": asks}, True
    yield "join of a field that is none", pair, {"join": [path, {"path": "./b"}], "joiner": dict(joiner, __class__="CaptioningSample")}, True
    yield "join without the first", pair, {"join": [dict(path, nonmatch="skip"), {"path": "./b"}], "joiner": joiner}, True


def main():
    out, sets = [], []
    for name, folders, entry, in_order in cases():
        with tempfile.TemporaryDirectory() as root:
            try:
                rows = samples(pathlib.Path(root), folders, entry, in_order)
            except Exception as error:
                print(name, "refused:", type(error).__name__, str(error)[:100].replace("\n", " "))
                rows = None
        if name.startswith("part"):
            rows = {folder: sum(" %s " % folder in row for row in rows) for folder in folders}
        sets += [folders] if folders not in sets else []
        out.append({"name": name, "set": sets.index(folders), "train": entry, "samples": rows})
    lists = (",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) for rows in (sets, out))
    (HERE / "metadatasets.json").write_text('{"sets": [%s],\n"cases": [%s]}\n' % tuple(lists))


if __name__ == "__main__":
    main()
