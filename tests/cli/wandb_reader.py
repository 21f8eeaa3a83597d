"""Reads the offline run file of Weights & Biases, without it: framing, checksums, and the fields of its protobuf messages."""
import json
import struct
import zlib

BLOCK = 32768
MAGIC = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
RECORD = {1: "num", 2: "history", 3: "summary", 5: "config", 17: "run", 18: "exit", 21: "header"}


def log_records(data):
    """The records of the log in LevelDB's format. What a killed writer left unfinished at the end is left out."""
    assert data[:7] == MAGIC, data[:7]
    at, whole, inside = 7, b"", False
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            assert data[at:at + left].strip(b"\0") == b"", "a block's end holds no zeros"
            at += left
            continue
        if at + 7 > len(data):
            return
        crc, size, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7:at + 7 + size]
        if len(piece) < size:
            return
        assert 7 + size <= left, "a piece crosses a block"
        assert crc == zlib.crc32(bytes([kind]) + piece), "checksum at %d" % at
        assert inside == (kind in (3, 4)), "order of pieces at %d" % at
        whole += piece
        inside = kind in (2, 3)
        at += 7 + size
        if not inside:
            yield whole
            whole = b""


def fields(message):
    """[(number, value)]: integers for varints, bytes for the rest."""
    out, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            out.append((tag >> 3, varint()))
        else:
            size = {1: 8, 5: 4}[tag & 7] if tag & 7 != 2 else varint()
            assert at + size <= len(message)
            out.append((tag >> 3, message[at:at + size]))
            at += size
    return out


def items(message, container, key):
    """{key: value} of the items of a message."""
    out = {}
    for number, item in fields(message):
        if number == container:
            parts = dict(fields(item))
            out[parts[key].decode()] = json.loads(parts[16])
    return out


def read(path):
    """[(kind, content)] in order."""
    out = []
    with open(path, "rb") as file:
        data = file.read()
    for count, record in enumerate(log_records(data), 1):
        (_, num), (number, message) = fields(record)
        assert num == count, (num, count)
        kind = RECORD[number]
        if kind == "history":
            step = dict(fields(dict(fields(message))[2]))[1]
            content = items(message, 1, 2)
            assert content["_step"] == step
        elif kind in ("summary", "config"):
            content = items(message, 1, 1)
        elif kind == "run":
            parts = dict(fields(message))
            content = {name: parts[n].decode() for n, name in
                       ((1, "id"), (2, "entity"), (3, "project"), (8, "name"), (13, "host")) if n in parts}
            content.update(config=items(parts[4], 1, 1), time=dict(fields(parts[17]))[1], resume=parts[24])
        else:
            content = dict(fields(message))
        out.append((kind, content))
    return out
