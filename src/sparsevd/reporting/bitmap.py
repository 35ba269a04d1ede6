"""Small pictures as PNG inside a page: an image of the data, or a map of what is kept.

A map is one colour, as opaque as there is something: it reads on a light and on a dark page.
"""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

INK = (47, 127, 196)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # channels → grey, RGB, RGBA, as PNG numbers them


def picture(values: NDArray[np.floating]) -> str:
    """The address of an image [1 or 3, height, width], stretched from its darkest to its lightest value."""
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    return _address(np.rint(255 * scaled).astype(np.uint8).transpose(1, 2, 0))


def density(shares: NDArray[np.floating]) -> str:
    """The address of a map [height, width] of shares from 0 to 1: invisible to full ink."""
    pixels = np.empty((*shares.shape, 4), np.uint8)
    pixels[..., :3] = INK
    # The least that is there must be seen.
    pixels[..., 3] = np.where(shares > 0, np.rint(55 + 200 * np.clip(shares, 0, 1)), 0)
    return _address(pixels)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """The file of an image [height, width, channels] with 1 (grey), 3 (RGB) or 4 (RGBA) channels."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _address(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
