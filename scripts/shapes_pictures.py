"""Pictures of one shape with captions, for shapes.sh; the standard library alone.

    shapes_pictures.py write DIR            train.tar, unseen.jsonl and media/ with pictures that are not in it, and model/, which says what
                                            the model reads
    shapes_pictures.py forget HF            draws the projector of a model of Hugging Face anew
    shapes_pictures.py told DIR PREDICTIONS LEAST
                                            how many captions are exact; fails below LEAST, or if more than 5% are those of the neighbour
"""
import io
import json
import os
import random
import struct
import sys
import tarfile
import zlib

SIDE, PATCH, TRAINED, UNSEEN = 40, 8, 32000, 256
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 215, 60), "purple": (150, 60, 180),
           "black": (20, 20, 20)}
INSIDE = {
    "circle": lambda x, y, r: x * x + y * y <= r * r,
    "square": lambda x, y, r: True,
    "triangle": lambda x, y, r: 2 * abs(x) <= y + r,
    "cross": lambda x, y, r: abs(x) <= r // 3 or abs(y) <= r // 3,
    "ring": lambda x, y, r: (r - max(2, r // 3)) ** 2 < x * x + y * y <= r * r,
}
IMAGE, END = "<image>", "<|endoftext|>"


def draw_one(draw):
    """What a picture shows: shape, colour, half its side, place and background."""
    radius = draw.choice((8, 9) if draw.random() < 0.5 else (4, 5))
    return (draw.choice(list(INSIDE)), draw.choice(list(COLOURS)), radius, draw.choice((11, 29)) + draw.randint(-1, 1),
            draw.choice((11, 29)) + draw.randint(-1, 1), draw.randint(225, 255))


def caption(shown):
    shape, colour, radius, x, y, _ = shown
    return f"a {'large' if radius > 6 else 'small'} {colour} {shape}, {'top' if y < 20 else 'bottom'} {'left' if x < 20 else 'right'}."


def png(shown):
    shape, colour, radius, x, y, background = shown
    rows = [bytearray([background] * 3 * SIDE) for _ in range(SIDE)]
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if INSIDE[shape](dx, dy, radius):
                rows[y + dy][3 * (x + dx):3 * (x + dx) + 3] = bytes(COLOURS[colour])

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def byte_letters():
    """The letter that stands for each byte in tokenizers of bytes."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xad), *range(0xae, 0x100)]
    letters = {byte: chr(byte) for byte in own}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_model(folder):
    os.makedirs(folder, exist_ok=True)
    letters = byte_letters()
    added = [{"id": 256 + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, token in enumerate((END, IMAGE))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    files = {
        "config.json": {"model_type": "llava", "image_token_index": 257, "vision_feature_select_strategy": "default",
                        "vision_config": {"patch_size": PATCH, "image_size": SIDE}},
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE},
                                     "crop_size": {"height": SIDE, "width": SIDE}},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END},
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                           "pre_tokenizer": level, "post_processor": None, "decoder": level,
                           "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                                     "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                                     "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}},
    }
    for name, content in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file)


def write(folder):
    os.makedirs(os.path.join(folder, "media"), exist_ok=True)
    write_model(os.path.join(folder, "model"))
    draw = random.Random(1234)
    unseen = list(dict.fromkeys(draw_one(draw) for _ in range(UNSEEN + 50)))[:UNSEEN]
    with open(os.path.join(folder, "prompts.jsonl"), "w") as prompts:
        for i, shown in enumerate(unseen):
            with open(os.path.join(folder, "media", f"{i}.png"), "wb") as file:
                file.write(png(shown))
            prompts.write(json.dumps({"prompt": "", "images": [f"{i}.png"]}) + "\n")
    with open(os.path.join(folder, "captions.json"), "w") as file:
        json.dump([caption(shown) for shown in unseen], file)
    held_out = set(unseen)
    with tarfile.open(os.path.join(folder, "train.tar.part"), "w", format=tarfile.USTAR_FORMAT) as archive:
        for i in range(TRAINED):
            while (shown := draw_one(draw)) in held_out:
                pass
            for extension, data in (("png", png(shown)), ("txt", caption(shown).encode())):
                member = tarfile.TarInfo(f"{i:05d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    os.rename(os.path.join(folder, "train.tar.part"), os.path.join(folder, "train.tar"))


def forget(folder):
    draw, path = random.Random(5), os.path.join(folder, "model.safetensors")
    with open(path, "rb") as file:
        data = bytearray(file.read())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    drawn = 0
    for name, entry in header.items():
        if not name.startswith("multi_modal_projector."):
            continue
        assert entry["dtype"] == "F32", entry
        first, last = entry["data_offsets"]
        spread = entry["shape"][-1] ** -0.5 if len(entry["shape"]) > 1 else 0
        count = (last - first) // 4
        data[begin + first:begin + last] = struct.pack(f"<{count}f", *(draw.uniform(-spread, spread) for _ in range(count)))
        drawn += 1
    assert drawn == 4, drawn
    with open(path, "wb") as file:
        file.write(data)


def told(folder, predictions, least):
    with open(os.path.join(folder, "captions.json")) as file:
        captions = json.load(file)
    with open(predictions) as file:
        said = [row["text"] for row in json.load(file)]
    assert len(said) == len(captions) == UNSEEN
    exact = sum(a == b for a, b in zip(said, captions)) / UNSEEN
    neighbour = sum(a == b for a, b in zip(said[1:] + said[:1], captions)) / UNSEEN
    print(f"{exact:.1%} of {UNSEEN} captions of pictures that it has not seen are exact, {float(least):.0%} are needed; "
          f"{neighbour:.1%} when each has its neighbour's picture, at most 5% may be")
    if exact < float(least) or neighbour > 0.05:
        sys.exit(1)


if __name__ == "__main__":
    {"write": write, "forget": forget, "told": told}[sys.argv[1]](*sys.argv[2:])
