#!/usr/bin/env python3
"""Writes processors.json: configurations of image processors, and for images of many sizes the checksums of the numbers
that the processors of transformers give, on their PIL backend.

Made with transformers 5.23.0, pillow 12.3.0, numpy 2.4 (torch is not needed). Run: python make_processors.py
"""

import json
import pathlib
import types
import zlib

import numpy as np
import PIL
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

assert (PIL.__version__, transformers.__version__) == ("12.3.0", "5.23.0")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PROCESSORS = [
    CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
    CLIPImageProcessorPil(size={"shortest_edge": 4}, crop_size={"height": 4, "width": 4}),
    CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 25, "width": 31}),
    CLIPImageProcessorPil(size={"height": 30, "width": 40}, do_center_crop=False),
    LlavaImageProcessorPil(do_pad=True, **SMALL),
    LlavaImageProcessorPil(**SMALL),
    SiglipImageProcessorPil(size={"height": 32, "width": 32}),
    LlavaNextImageProcessorPil(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]], **SMALL),
    LlavaNextImageProcessorPil(resample=1, image_grid_pinpoints=[[28, 28], [84, 56]], **SMALL),
    GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=12, **IMAGENET),
    GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=2, max_patches=6),
    GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False),
    Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
    Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=True, pan_and_scan_min_crop_size=16,
                            pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2),
    Qwen2VLImageProcessorPil(),
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=16 * 16, max_pixels=64 * 64),
]
SIZES = [(1, 1), (48, 64), (64, 48), (37, 291), (400, 4), (5, 7), (33, 100), (100, 33), (60, 60), (28, 28), (56, 84), (50, 71), (1, 150), (203, 2)]


def content(height, width):
    """[h, w, 3]: the low bytes of 73 y + 151 x + 59 c + x y."""
    y, x, c = np.ogrid[0:height, 0:width, 0:3]
    return ((73 * y + 151 * x + 59 * c + x * y) & 255).astype(np.uint8)


rows = []
for processor in PROCESSORS:
    config = processor.to_dict()
    images = []
    for height, width in SIZES:
        try:
            made = processor.preprocess(Image.fromarray(content(height, width)), return_tensors="np")["pixel_values"]
        except ValueError as error:
            assert "aspect ratio" in str(error), error
            continue
        numbers = np.ascontiguousarray(made, np.float32)
        images.append([height, width, list(numbers.shape), zlib.crc32(numbers.tobytes())])
    rows.append({"config": config, "images": images})


def sizes(count):
    """Sizes by a linear congruential generator: sides of 1 to 3000, a tenth of them below 40."""
    state = 1
    out = []
    for _ in range(count):
        sides = []
        for _ in range(2):
            state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
            n = state >> 33
            sides.append(1 + n % 40 if n // 3000 % 10 == 0 else 1 + n % 3000)
        out.append(tuple(sides))
    return out


POINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
next_processor = types.SimpleNamespace(image_processor=types.SimpleNamespace(image_grid_pinpoints=POINTS), patch_size=14, num_additional_image_tokens=0)
next_processor._get_unpadded_features = types.MethodType(LlavaNextProcessor._get_unpadded_features, next_processor)
gemma = Gemma3ImageProcessorPil()


def of_sizes(height, width):
    """By function, the integers that transformers gives for a size."""
    best = select_best_resolution((height, width), POINTS)
    blank = np.broadcast_to(np.uint8(0), (3, height, width))
    crops = gemma.pan_and_scan(blank, 256, 4, 1.2)
    smart = (0, 0) if max(height, width) / min(height, width) > 200 else smart_resize(height, width, 28, 3136, 1003520)
    return {
        "best_resolution": best,
        "fitted_size": get_patch_output_size(blank, best, "channels_first"),
        "llava_next_tokens": [LlavaNextProcessor._get_number_of_features(next_processor, height, width, 336, 336)],
        "closest_grid": get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)[::-1],
        "smart_size": smart,
        "pan_and_scan": [len(crops)] + [n for crop in crops for n in crop.shape[1:]],
    }


numbers = {}
for size in sizes(20_000):
    for name, values in of_sizes(*size).items():
        numbers.setdefault(name, []).extend(values)
sums = {name: zlib.crc32(np.array(values, np.int32).tobytes()) for name, values in numbers.items()}
pathlib.Path(__file__).with_name("tilings.json").write_text(json.dumps(sums, indent=1) + "\n")
text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
pathlib.Path(__file__).with_name("processors.json").write_text(f"[\n{text}\n]\n")
print(len(rows), "processors,", sum(len(row["images"]) for row in rows), "results")
