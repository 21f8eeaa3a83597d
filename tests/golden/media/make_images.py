#!/usr/bin/env python3
"""Writes images.json: small image files with the checksums of the pixels that Pillow reads and resizes.

Made with pillow 12.3.0 and numpy 2.4. Run: python make_images.py
"""

import base64
import io
import json
import pathlib
import struct
import warnings
import zlib

import numpy as np
import PIL
from PIL import Image

import draw_images
import pillow_pixels

warnings.simplefilter("ignore")
assert PIL.__version__ == "12.3.0", PIL.__version__
rng = np.random.default_rng(2026)
FILES = []


def add(name, data):
    entry = {"name": name, "file": base64.b64encode(data).decode()}
    for transparency in ("white", "drop"):
        image = pillow_pixels.pixels(data, transparency)
        entry[transparency] = zlib.crc32(image.tobytes())
    entry["height"], entry["width"] = image.height, image.width
    height, width = (int(n) for n in rng.integers(1, 60, 2))
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    box = [int(rng.integers(1, 6)), height, width, top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))]
    entry["box"] = box
    entry["resized"] = zlib.crc32(pillow_pixels.resized(image, *box).tobytes())
    FILES.append(entry)


def encoded(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


# Quadrants: upper left red, upper right green, lower left blue, lower right white, stored 16x24 (height, width).
quadrants = np.zeros((16, 24, 3), np.uint8)
for y, x, colour in ((0, 0, (255, 0, 0)), (0, 12, (0, 255, 0)), (8, 0, (0, 0, 255)), (8, 12, (255, 255, 255))):
    quadrants[y : y + 8, x : x + 12] = colour
for orientation in range(1, 9):
    image = Image.fromarray(quadrants)
    block = draw_images.exif_block(orientation, rng)
    add(f"quadrants {orientation} jpg", encoded(image, "JPEG", quality=100, subsampling=0, exif=block))
    add(f"quadrants {orientation} webp", encoded(image, "WEBP", lossless=True, exif=block))
    add(f"quadrants {orientation} png", draw_images.png(quadrants.astype(np.uint16), 2, 8, rng, before=[draw_images.chunk(b"eXIf", block[6:])]))
add("quadrants xmp jpg", encoded(Image.fromarray(quadrants), "JPEG", quality=100, xmp=b'<a tiff:Orientation="6"/>'))
xmp = draw_images.chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<a><tiff:Orientation>6</tiff:Orientation></a>")
add("quadrants xmp png", draw_images.png(quadrants.astype(np.uint16), 2, 8, rng, behind=[xmp]))

# Every colour type and depth of PNG, plain and interlaced, with and without transparency.
for colour, depths in draw_images.DEPTHS.items():
    for depth in depths:
        for i in range(4):
            h, w = (int(n) for n in rng.integers(1, 30, 2))
            _, data, text = draw_images.draw_png(rng, h, w, colour, depth)
            add(f"png {i} {text}", data)

# Pixels with alpha of r, g, b, a, and inks: the vectors of the conversions.
alpha = np.array([[(10, 20, 30, 0), (200, 100, 50, 128), (0, 0, 0, 1)]], np.uint8)
add("alpha png", draw_images.png(alpha.astype(np.uint16), 6, 8, rng))
add("alpha webp", encoded(Image.fromarray(alpha, "RGBA"), "WEBP", lossless=True, exact=True))

for i in range(24):
    h, w = (int(n) for n in rng.integers(1, 40, 2))
    extension, data, text = (draw_images.draw_jpeg if i % 3 else draw_images.draw_webp)(rng, h, w)
    add(f"{extension} {i} {text}", data)
add("progressive", encoded(Image.fromarray(draw_images.picture(rng, 24, 24, 3)), "JPEG", progressive=True, quality=50))
tall = Image.fromarray(draw_images.picture(rng, 403, 3, 3))
add("more than 100 times as high as wide", encoded(tall, "PNG"))
FILES[-1] |= {"box": [3, 200, 20, 0, 0, 200, 20], "resized": zlib.crc32(tall.resize((20, 200), 3).tobytes())}
# CLIP's recipe for a wide image: 336x336000, of which 336x336 is kept.
wide = Image.fromarray(np.arange(3000, dtype=np.uint32).astype(np.uint8).reshape(1, 1000, 3) ** 2)
left = (336000 - 336) // 2
add("wide", encoded(wide, "PNG"))
FILES[-1] |= {"box": [3, 336, 336000, 0, left, 336, 336],
              "resized": zlib.crc32(wide.resize((336000, 336), 3).crop((left, 0, left + 336, 336)).tobytes())}

text = ",\n".join(json.dumps(f, separators=(",", ":")) for f in FILES)
pathlib.Path(__file__).with_name("images.json").write_text(f"[\n{text}\n]\n")
print(len(FILES), "files,", sum(len(f["file"]) // 2 for f in FILES), "bytes")
