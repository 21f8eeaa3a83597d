"""A reader of the checkpoint format, written from docs/formats/checkpoint.md alone.

python read_checkpoint.py DIR prints every tensor with a sum of its elements; checksums are compared when the xxhash
package is there. Run with Python 3.11, numpy 2.4.
"""

import json
import sys
from pathlib import Path

import numpy

try:
    import xxhash
except ImportError:
    xxhash = None

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
          "I8": "i1", "U8": "u1", "BOOL": "?"}


def check(data, digest, what):
    if xxhash and xxhash.xxh3_64_hexdigest(data) != digest:
        raise SystemExit(f"{what}: checksum mismatch")


def read_checkpoint(directory):
    """Returns (manifest, {key: array}); BF16 comes as its bits."""
    text = (directory / "manifest.json").read_bytes()
    body = text[: text.rindex(b'"manifest_xxh3_128"')]
    manifest = json.loads(text)
    if xxhash and xxhash.xxh3_128_hexdigest(body) != manifest["manifest_xxh3_128"]:
        raise SystemExit("manifest.json: checksum mismatch")
    assert manifest["format"] == "megatron-checkpoint" and manifest["format_version"] == 1
    data, block = [], manifest["block_bytes"]
    for file in manifest["files"]:
        content = (directory / file["name"]).read_bytes()
        assert len(content) == file["bytes"], file["name"]
        header = file["header_bytes"]
        if header:
            check(content[:header], file["header_xxh3"], file["name"])
        data.append(content[header:])
        for i in range(0, len(data[-1]), block):
            n = i // block * 16
            check(data[-1][i : i + block], file["block_xxh3"][n : n + 16], file["name"])
    tensors = {}
    for key, tensor in manifest["tensors"].items():
        out = numpy.zeros(tensor["shape"], DTYPES[tensor["dtype"]])
        for fragment in tensor["fragments"]:
            offset, shape = fragment["box"]
            box = numpy.s_[tuple(slice(o, o + n) for o, n in zip(offset, shape))]
            flat = out[box].flatten()
            begin, end = fragment.get("flat", (0, flat.size))
            flat[begin:end] = numpy.frombuffer(data[fragment["file"]], out.dtype, end - begin, fragment["offset"])
            out[box] = flat.reshape(shape)
        tensors[key] = out
    return manifest, tensors


if __name__ == "__main__":
    manifest, tensors = read_checkpoint(Path(sys.argv[1]))
    print("iteration", manifest["iteration"], "state", manifest["state"], "" if xxhash else "(checksums not compared)")
    for key, value in tensors.items():
        print(key, value.dtype, list(value.shape), value.astype(float).sum())
