#!/usr/bin/env python3
"""Writes archives.json, tar archives with what Python's tarfile and webdataset read in them, and same/, the same samples as two tar
shards, as LLaVA's JSON with files, as JSON lines of messages and as Parquet.

Made with Python 3.11, webdataset 1.0.2, pillow 12.3.0, pyarrow 26.0.1. Run: python make_archives.py
"""
import base64
import io
import json
import pathlib
import shutil
import struct
import tarfile
import wave
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_iterator

HERE = pathlib.Path(__file__).resolve().parent


def member(name, content, **settings):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in settings.items():
        setattr(info, key, value)
    return info, content


def archive(members, form):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def before_posix(data):
    """Headers as they were before POSIX: without a magic, the type of a file a zero byte."""
    data = bytearray(data)
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        offsets = [info.offset for info in tar]
    for at in offsets:
        data[at + 156] = 0
        data[at + 257:at + 512] = bytes(255)
        data[at + 148:at + 156] = b" " * 8
        data[at + 148:at + 156] = b"%06o\0 " % sum(data[at:at + 512])
    return bytes(data)


def base_256(data):
    """The size of the first member as a number of base 256, as GNU tar writes those from 8 GiB on."""
    data = bytearray(data)
    size = int(data[124:135], 8)
    data[124:136] = b"\x80" + size.to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[0:512])
    return bytes(data)


def facts(name, data):
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as tar:
        files = [info for info in tar if info.isreg()]
    members = [{"name": info.name, "offset": info.offset_data, "size": info.size} for info in files]
    rows = [{**row, "__url__": ""} for row in tar_file_iterator(io.BytesIO(data))]
    samples = [{"key": s["__key__"], "extensions": [k for k in s if not k.startswith("__")]} for s in group_by_keys(rows)]
    return {"name": name, "file": zlib.compress(data, 9).hex(), "members": members, "samples": samples}


def archives():
    plain = [member("a/000.jpg", b"x" * 700), member("a/000.txt", b"one"), member("b/000.PNG", b"y" * 512), member("b/000.Txt", b"two"),
             member("b/1.left.png", b""), member("b/1.json", b"{}")]
    long = [member("f" * 40 + "/" + "g" * 90 + "/" + "k" * 60 + f"{i}.{e}", b"z" * i) for i in range(3) for e in ("jpg", "txt")]
    signs = [member("dir\u00e9/\u56fe\u50cf.jpg", b"1"), member("dir\u00e9/\u56fe\u50cf.txt", b"2")]
    folder = [member("d/", b"", type=tarfile.DIRTYPE), member("d/1.jpg", b"12"), member("__note__", b"no sample"), member("d/2.jpg", b"3")]
    fraction = [member("t.jpg", b"1", mtime=1.5), member("t.txt", b"caption", mtime=2.25)]
    out = []
    for name, members in (("plain", plain), ("long", long), ("signs", signs), ("folder", folder)):
        for form, word in ((tarfile.USTAR_FORMAT, "ustar"), (tarfile.GNU_FORMAT, "gnu"), (tarfile.PAX_FORMAT, "pax")):
            try:
                out.append(facts(f"{name}_{word}", archive(members, form)))
            except ValueError as error:  # ustar has no names of more than 256 bytes
                print(name, word, error)
    out.append(facts("fraction_pax", archive(fraction, tarfile.PAX_FORMAT)))
    out.append(facts("before_posix", before_posix(archive(plain, tarfile.USTAR_FORMAT))))
    out.append(facts("base_256", base_256(archive(plain, tarfile.GNU_FORMAT))))
    out.append(facts("empty", archive([], tarfile.USTAR_FORMAT)))
    return out


def picture(height, width, form, seed):
    image = Image.new("RGB", (width, height))
    image.putdata([((seed + 7 * i) % 256, (3 * i) % 256, (seed * i) % 256) for i in range(height * width)])
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def sound(samples):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(struct.pack(f"<{samples}h", *[(17 * i) % 2000 - 1000 for i in range(samples)]))
    return out.getvalue()


# Media by name, and turns in LLaVA's form.
SAMPLES = [
    ({"img1.png": picture(5, 9, "PNG", 3)}, ["<image>\nWhat is it?", "A pattern."]),
    ({"img1.jpg": picture(16, 8, "JPEG", 5), "img2.png": picture(3, 4, "PNG", 9)},
     ["First <image> then <image>: which is larger?", "The first.", "Sure?", "Yes."]),
    ({}, ["Only words.", "So be it."]),
    ({"1.wav": sound(160), "img1.png": picture(7, 2, "PNG", 1)}, ["<image> and <audio>", "Both."]),
    ({"img1.webp": picture(6, 6, "WEBP", 2)}, ["Now \"quotes\" \u00e9 <image>", "Fine \\ so."]),
]


def conversation(turns):
    return [{"from": "human" if i % 2 == 0 else "gpt", "value": turn} for i, turn in enumerate(turns)]


def messages(turns):
    out = []
    for i, turn in enumerate(turns):
        parts = []
        for piece in turn.replace("<image>", "\0image\0").replace("<audio>", "\0audio\0").split("\0"):
            if piece in ("image", "audio"):
                parts.append({"type": piece})
            elif piece:
                parts.append({"type": "text", "text": piece})
        out.append({"role": "user" if i % 2 == 0 else "assistant", "content": parts})
    return out


def write_same():
    tarfile.RECORDSIZE = 512  # no more padding than the two blocks at the end
    root = HERE / "same"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("tar", "json", "json/media", "lines", "parquet"):
        (root / folder).mkdir(parents=True)
    rows, lines, table = [], [], []
    shards = [[], []]
    for number, (media, turns) in enumerate(SAMPLES):
        images = [name for name in media if not name.endswith("wav")]
        sounds = [name for name in media if name.endswith("wav")]
        shard = shards[number // 3]
        for name, content in media.items():
            shard.append(member(f"s/{number:03}.{name}", content))
            (root / f"json/media/{number}_{name}").write_bytes(content)
        shard.append(member(f"s/{number:03}.json", json.dumps({"conversations": conversation(turns)}).encode()))
        row = {"id": str(number)}
        if images:
            row["image"] = [f"{number}_{name}" for name in images] if len(images) > 1 else f"{number}_{images[0]}"
        if sounds:
            row["audio"] = f"{number}_{sounds[0]}"
        rows.append({**row, "conversations": conversation(turns)})
        data = {name: "data:application/octet-stream;base64," + base64.b64encode(content).decode() for name, content in media.items()}
        lines.append(json.dumps({"messages": messages(turns), "images": [data[name] for name in images], "audios": [data[name] for name in sounds]}))
        table.append({"images": [{"bytes": media[name], "path": name} for name in images],
                      "audio": {"bytes": media[sounds[0]], "path": None} if sounds else None, "conversations": conversation(turns)})
    for i, shard in enumerate(shards):
        (root / f"tar/shard-{i}.tar").write_bytes(archive(shard, tarfile.USTAR_FORMAT))
    (root / "json/rows.json").write_text(json.dumps(rows, indent=1))
    (root / "lines/rows.jsonl").write_text("\n".join(lines) + "\n")
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("images", pa.list_(medium)), ("audio", medium),
                        ("conversations", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])))])
    pq.write_table(pa.Table.from_pylist(table, schema), root / "parquet/rows.parquet", row_group_size=2)


def write_questions():
    """30 rows of one image and a question: what index_test.cc writes as other kinds of files."""
    names = ["0_img1.png", "1_img1.jpg", "3_img1.png", "4_img1.webp"]
    rows = []
    for i in range(30):
        image = {"bytes": (HERE / "same/json/media" / names[i % 4]).read_bytes(), "path": None}
        answer = chr(ord("a") + i % 26) * (1 + i * 7 % 12)
        rows.append({"image": image, "conversations": [{"from": "human", "value": f"<image>\nq{i}"}, {"from": "gpt", "value": answer}]})
    pq.write_table(pa.Table.from_pylist(rows), HERE / "same/questions.parquet", compression="zstd", write_statistics=False, row_group_size=16)


def main():
    (HERE / "archives.json").write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in archives()) + "\n]\n")
    write_same()
    write_questions()


if __name__ == "__main__":
    main()
