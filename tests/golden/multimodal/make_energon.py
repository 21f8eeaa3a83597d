#!/usr/bin/env python3
"""Writes energon/, folders as Megatron-Energon prepares them, and energon.json, the samples that it reads in them.

Made with Python 3.11, megatron-energon 7.4.1. Run: python make_energon.py
"""
import io
import json
import pathlib
import shutil
import tarfile

from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "energon"
IMAGES = [HERE / "same" / "json" / "media" / name for name in ("0_img1.png", "1_img1.jpg", "3_img1.png")]

tarfile.RECORDSIZE = 512  # no more padding than the two blocks at the end


def write_shard(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_meta(folder, shards, files):
    """What energon prepare writes, and these files in the place of its own."""
    WebdatasetPreparator.prepare_dataset(folder, shards, split_parts_ratio=[("train", 1)], workers=1)
    meta = folder / ".nv-meta"
    for path in meta.iterdir():
        if not path.name.startswith("index"):
            path.unlink()
    for name, text in files.items():
        (meta / name).write_text(text)


def image(i):
    path = IMAGES[i % len(IMAGES)]
    return path.suffix, path.read_bytes()


def answering():
    """LLaVA's conversations in JSON; braces, an excluded shard and an excluded sample."""
    folder = ROOT / "answering"
    counts = {}
    for shard in range(4):
        members = []
        for k in range(2):
            i = 2 * shard + k
            suffix, data = image(i)
            turns = [{"from": "human", "value": ("<image>\nWhat is %d?" if k else "What is %d?") % i}, {"from": "gpt", "value": "It is %d." % i}]
            members += [("%03d%s" % (i, suffix), data), ("%03d.json" % i, json.dumps(turns).encode())]
        write_shard(folder / "shards" / ("s_%02d.tar" % shard), members)
        counts["shards/s_%02d.tar" % shard] = 2
    write_meta(folder, list(counts), {
        "dataset.yaml": "sample_type:\n  __module__: megatron.energon\n  __class__: VQASample\n"
                        "field_map:\n  image: jpg,png\n  context: json[0][value]\n  answers: json[1][value]\n",
        "split.yaml": "exclude:\n- shards/s_01.tar\n- shards/s_02.tar/004\nsplit_parts:\n  train:\n  - shards/s_{00..02}.tar\n"
                      "  val:\n  - shards/s_03.tar\n  test: []\n",
        ".info.json": json.dumps({"energon_version": "7.4.1", "shard_counts": counts})})
    return folder


def captions():
    """An older folder: the class of the data set, and counts in YAML."""
    folder = ROOT / "captions"
    members = []
    for i in range(3):
        suffix, data = image(i)
        members += [("%d%s" % (i, suffix), data), ("%d.json" % i, json.dumps({"facts": {"caption": "a caption %d" % i}}).encode())]
    write_shard(folder / "a.tar", members)
    write_meta(folder, ["a.tar"], {
        "dataset.yaml": "__module__: megatron.energon\n__class__: CaptioningWebdataset\n"
                        "field_map:\n  image: png,jpg\n  caption: json[facts][caption]\n",
        "split.yaml": "exclude: []\nsplit_parts:\n  train: ['a.tar']\n  val: ['a.tar']\n",
        ".info.yaml": "shard_counts:\n  a.tar: 3\n"})
    return folder


def samples(folder, part):
    data = get_val_dataset(folder, split_part=part, batch_size=None, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0))
    rows = []
    for sample in get_loader(data):
        row = {"key": sample.__key__, "image": list(sample.image.shape[1:])}
        for name in ("caption", "context", "answers"):
            if hasattr(sample, name):
                value = getattr(sample, name)
                row[name] = value.decode() if isinstance(value, bytes) else value
        rows.append(row)
    return rows


def main():
    shutil.rmtree(ROOT, ignore_errors=True)
    golden = {}
    for folder, parts in ((answering(), ("train", "val")), (captions(), ("train",))):
        for part in parts:
            golden[folder.name + "/" + part] = samples(folder, part)
    (HERE / "energon.json").write_text(json.dumps(golden, indent=1) + "\n")
    for pattern in ("index.*", "*.idx"):
        for path in ROOT.rglob(pattern):
            path.unlink()


if __name__ == "__main__":
    main()
