"""What Pillow makes of an image file: the reference of decoding and resizing."""

import io

import numpy as np
from PIL import Image, ImageOps

FILTERS = {1: Image.LANCZOS, 2: Image.BILINEAR, 3: Image.BICUBIC, 4: Image.BOX, 5: Image.HAMMING}


def is_gray16(data):
    """The one declared difference: PNG of 16-bit gray, of which we keep the high byte."""
    return data[:4] == b"\x89PNG" and data[24] == 16 and data[25] == 0


def pixels(data, transparency):
    """[h, w, 3], as transformers 5 makes it of an image object ("white") or of a path ("drop")."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if is_gray16(data):
        gray = np.array(image)
        rgb = np.repeat((gray >> 8).astype(np.uint8)[..., None], 3, axis=2)
        if transparency == "white" and (key := image.info.get("transparency")) is not None:
            rgb[gray == key] = 255
        return Image.fromarray(rgb)
    if transparency == "white" and ("A" in image.getbands() or image.info.get("transparency") is not None):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def resized(image, filter, height, width, top, left, kept_height, kept_width):
    return image.resize((width, height), FILTERS[filter]).crop((left, top, left + kept_width, top + kept_height))
