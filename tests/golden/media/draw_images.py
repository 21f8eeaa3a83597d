"""Draws image files of every kind that is read: modes, depths, orientations, transparency, coding, sizes.

PNG is written here, for Pillow writes neither 16-bit colours, interlaced files nor colour keys of every depth.
Pinned: pillow==12.3.0, numpy.
"""

import io
import math
import struct
import zlib

import numpy as np
from PIL import Image, ImageFile

ImageFile.MAXBLOCK = 1 << 24  # Pillow's room for a file that is not written in pieces
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def chunk(name, content=b""):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def packed_rows(samples, depth):
    """[h, w, channels] to rows of bytes."""
    h = samples.shape[0]
    flat = samples.reshape(h, -1)
    if depth == 16:
        return [row.astype(">u2").tobytes() for row in flat]
    if depth == 8:
        return [row.astype(np.uint8).tobytes() for row in flat]
    bits = ((flat[:, :, None] >> np.arange(depth - 1, -1, -1)) & 1).astype(np.uint8).reshape(h, -1)
    return [np.packbits(row).tobytes() for row in bits]


def paeth(a, b, c):
    p = a + b - c
    pa, pb, pc = np.abs(p - a), np.abs(p - b), np.abs(p - c)
    return np.where((pa <= pb) & (pa <= pc), a, np.where(pb <= pc, b, c))


def filtered(rows, bytes_per_pixel, rng):
    """Each row with a filter drawn for it."""
    out = []
    above = np.zeros(len(rows[0]), np.int64)
    for row in rows:
        now = np.frombuffer(row, np.uint8).astype(np.int64)
        left = np.concatenate([np.zeros(bytes_per_pixel, np.int64), now])[: len(now)]
        corner = np.concatenate([np.zeros(bytes_per_pixel, np.int64), above])[: len(now)]
        kind = int(rng.integers(0, 5))
        guess = (0, left, above, (left + above) // 2, paeth(left, above, corner))[kind]
        out.append(bytes([kind]) + ((now - guess) & 255).astype(np.uint8).tobytes())
        above = now
    return b"".join(out)


def png(samples, colour, depth, rng, interlaced=False, before=(), behind=()):
    """A PNG file of samples [h, w, channels]; `before` and `behind` are chunks around the data."""
    h, w = samples.shape[:2]
    per_pixel = max(1, CHANNELS[colour] * depth // 8)
    if interlaced:
        parts = [samples[y::dy, x::dx] for y, x, dy, dx in ADAM7]
        data = b"".join(filtered(packed_rows(p, depth), per_pixel, rng) for p in parts if p.size)
    else:
        data = filtered(packed_rows(samples, depth), per_pixel, rng)
    data = zlib.compress(data, int(rng.integers(1, 10)))
    cut = int(rng.integers(1, len(data) + 1))
    pieces = [data] if rng.random() < 0.5 else [data[:cut], data[cut:]]
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, int(interlaced)))
        + b"".join(before)
        + b"".join(chunk(b"IDAT", p) for p in pieces)
        + b"".join(behind)
        + chunk(b"IEND")
    )


def exif_block(orientation, rng, prefix=True):
    """An EXIF block in either byte order, the orientation among other tags."""
    order = "<" if rng.random() < 0.5 else ">"
    entries = [(0x010F, 2, 4, b"abc\0"), (0x0112, 3, 1, struct.pack(order + "HH", orientation, 0)), (0x0213, 3, 1, struct.pack(order + "HH", 1, 0))]
    block = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8) + struct.pack(order + "H", len(entries))
    for tag, kind, count, value in entries:
        block += struct.pack(order + "HHI", tag, kind, count) + value
    return (b"Exif\0\0" if prefix else b"") + block + struct.pack(order + "I", 0)


def picture(rng, h, w, channels):
    """Content [h, w, channels] of bytes: noise, waves, edges or flat."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return rng.integers(0, 256, (h, w, channels), dtype=np.uint8)
    y, x = np.mgrid[0:h, 0:w]
    out = np.empty((h, w, channels), np.uint8)
    for c in range(channels):
        if kind == 1:
            f, g, p = rng.random(3) * (0.3, 0.3, 6)
            out[..., c] = 127.5 + 127 * np.sin(f * y + g * x + p)
        elif kind == 2:
            a, b = rng.integers(1, 12, 2)
            out[..., c] = np.where((y // a + x // b) % 2, 255, int(rng.integers(0, 255)))
        else:
            out[..., c] = int(rng.integers(0, 256))
    return out


def draw_size(rng, most_pixels):
    while True:
        h, w = (int(round(math.exp(rng.random() * math.log(4000)))) for _ in range(2))
        if h * w <= most_pixels:
            return h, w


def draw_orientation(rng):
    """None: no block."""
    return None if rng.random() < 0.5 else int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]))


def draw_jpeg(rng, h, w):
    mode = str(rng.choice(["L", "RGB", "RGB", "RGB", "CMYK"]))
    image = Image.fromarray(picture(rng, h, w, {"L": 1, "RGB": 3, "CMYK": 4}[mode]).squeeze(-1) if mode == "L" else picture(rng, h, w, len(mode)), mode)
    options = {"quality": int(rng.integers(1, 101)), "progressive": bool(rng.random() < 0.4), "optimize": bool(rng.random() < 0.3)}
    if mode == "RGB":
        options["subsampling"] = int(rng.integers(0, 3))
        if rng.random() < 0.1:
            options |= {"keep_rgb": True, "subsampling": 0}
    if rng.random() < 0.2:
        options["restart_marker_blocks"] = int(rng.integers(1, 9))
    orientation = draw_orientation(rng)
    if orientation is not None:
        options["exif"] = exif_block(orientation, rng)
    elif rng.random() < 0.1:
        kind = rng.choice(['="', ">"])
        options["xmp"] = f'<x:xmpmeta tiff:Orientation{kind}{rng.integers(0, 10)}"/>'.encode()
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return "jpg", out.getvalue(), f"{mode} {options}"


def draw_png(rng, h, w, colour=None, depth=None):
    colour = int(rng.choice([0, 2, 3, 4, 6])) if colour is None else colour
    depth = int(rng.choice(DEPTHS[colour])) if depth is None else depth
    channels = CHANNELS[colour]
    samples = picture(rng, h, w, channels).astype(np.uint16)
    if depth == 16:
        samples = samples * 256 + rng.integers(0, 256, samples.shape, dtype=np.uint16)
    elif depth < 8:
        samples >>= 8 - depth
    before, behind = [], []
    if rng.random() < 0.3:
        before.append(chunk(b"gAMA", struct.pack(">I", 45455)))
    text = f"colour {colour} depth {depth}"
    if colour == 3:
        entries = int(rng.integers(1, 2**depth + 1))
        samples = (samples % entries).astype(np.uint16)
        before.append(chunk(b"PLTE", rng.integers(0, 256, 3 * entries, dtype=np.uint8).tobytes()))
    keyed = rng.random() < 0.5
    if keyed and colour == 3:
        alphas = rng.integers(0, 256, int(rng.integers(1, entries + 1)), dtype=np.uint8)
        if rng.random() < 0.3:
            alphas[:] = 255
            alphas[rng.integers(0, len(alphas))] = 0
        before.append(chunk(b"tRNS", alphas.tobytes()))
    elif keyed and colour in (0, 2):
        key = samples[rng.integers(0, h), rng.integers(0, w)] if rng.random() < 0.8 else rng.integers(0, 2**depth, channels)
        before.append(chunk(b"tRNS", np.asarray(key).astype(">u2").tobytes()))
    if keyed:
        text += " tRNS"
    orientation = draw_orientation(rng)
    if orientation is not None:
        (before if rng.random() < 0.5 else behind).append(chunk(b"eXIf", exif_block(orientation, rng, prefix=False)))
        text += f" orientation {orientation}"
    interlaced = bool(rng.random() < 0.4)
    return "png", png(samples, colour, depth, rng, interlaced, before, behind), text + (" interlaced" if interlaced else "")


def draw_webp(rng, h, w):
    mode = str(rng.choice(["RGB", "RGBA"]))
    image = Image.fromarray(picture(rng, h, w, len(mode)), mode)
    options = {"lossless": bool(rng.random() < 0.4), "quality": int(rng.integers(0, 101)), "method": int(rng.integers(0, 5)), "exact": bool(rng.random() < 0.5)}
    if mode == "RGBA":
        options["alpha_quality"] = int(rng.integers(0, 101))
    orientation = draw_orientation(rng)
    if orientation is not None:
        options["exif"] = exif_block(orientation, rng, prefix=bool(rng.random() < 0.5))
    out = io.BytesIO()
    image.save(out, "WEBP", **options)
    return "webp", out.getvalue(), f"{mode} {options}"


def draw(rng, most_pixels=400_000):
    """(extension, bytes, what it is)"""
    h, w = draw_size(rng, most_pixels)
    extension, data, text = (draw_jpeg, draw_png, draw_webp)[rng.choice([0, 0, 1, 1, 2])](rng, h, w)
    return extension, data, f"{h}x{w} {extension} {text}"
