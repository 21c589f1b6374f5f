"""Attacks images: PNG and JPEG files of all kinds, mutated, into what reads them for requests.

Bits are flipped, files are cut and spliced, headers lie about sizes, chunks and segments come twice
or in another order, with good checksums; and a file is claimed to be of the other format. A file is
refused with a sentence that begins with "the image", and has none of Pillow's words in it; or its
pixels have the size that was asked for. Its header alone says as much before, and takes no memory.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from support.images import PROCESSOR
from tinsmith.formats import images

from tools.attack.common import Attempt, Failure, One, changed_bytes, refusal, where

SIZES = (0, 1, 2, 7, 255, 256, 5000, 8192, 60_000, 65_535, 2**31 - 1, 2**31, 2**32 - 1)


def _files() -> list[tuple[str, bytes]]:
    """The format and the content of files of all kinds."""
    rng = np.random.default_rng(0)
    plain = Image.fromarray(rng.integers(0, 256, (23, 37, 4), np.uint8))
    alike = Image.new("RGB", (300, 200), (9, 8, 7))
    palette = plain.convert("RGB").quantize(9)
    made: list[tuple[str, Image.Image, dict[str, Any]]] = [
        *(("png", plain.convert(mode), {}) for mode in ("1", "L", "LA", "RGB", "RGBA")),
        ("png", palette, {"transparency": bytes(range(0, 90, 10))}),
        ("png", palette, {"transparency": 3}),
        ("png", plain.convert("RGB"), {"transparency": (1, 2, 3)}),
        ("png", alike, {"save_all": True, "append_images": [plain.resize((300, 200))]}),
        ("png", Image.fromarray(rng.integers(0, 1 << 16, (9, 9)).astype(np.uint16)), {}),
        *(("jpeg", plain.convert(mode), {}) for mode in ("L", "RGB", "CMYK")),
        ("jpeg", plain.convert("RGB"), {"progressive": True, "comment": b"c" * 99}),
        ("jpeg", alike, {"quality": 95, "subsampling": 0, "exif": b"Exif\0\0MM\0*\0\0\0\10"}),
    ]
    found = []
    for name, image, options in made:
        out = io.BytesIO()
        image.save(out, name, **options)
        found.append((name, out.getvalue()))
    return found


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    files = _files()

    def one(attempt: Attempt) -> str:
        rng = attempt.rng
        name, data = rng.choice(files)
        change = rng.choice((_bytes, _bytes, _parts, _size))
        data = change(rng, name, data)
        if rng.random() < 0.02:
            name = rng.choice(("png", "jpeg", "gif", ""))
        attempt.note(name, change.__name__, data[:3000])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none is to be shown
            return _read(data, name)

    yield one


def _read(data: bytes, name: str) -> str:
    try:
        size = images.read_size(data, name)
        resized = PROCESSOR.resized(*size)
        pixels = images.decode(memoryview(data), name, resized)
    except Exception as error:
        refusal(error, "the image", kinds=(ValueError,))
        if error.__cause__ is not None or not str(error).startswith("the image"):
            raise Failure(f"it says {error}, as {error.__cause__}") from error
        return f"{name or 'none'}: refused by {where(error)}"
    if pixels.shape != (*resized, 3) or pixels.dtype != np.uint8:
        raise Failure(f"{pixels.dtype} of shape {pixels.shape}, not {resized}")
    if size[0] * size[1] > images.PIXELS_MAX:
        raise Failure(f"it has {size} pixels")
    return f"{name}: taken"


# ---- what is changed ----


def _bytes(rng: Random, name: str, data: bytes) -> bytes:
    return changed_bytes(rng, data)


def _split(name: str, data: bytes) -> list[bytes]:
    """A file's chunks or segments, after its signature; the last is the rest."""
    parts, at = list[bytes](), 8 if name == "png" else 2
    while at < len(data):
        if name == "png":
            end = at + 12 + int.from_bytes(data[at : at + 4])
        elif data[at + 1] == images.SOS:
            end = len(data)
        else:
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        parts.append(data[at:end])
        at = end
    return parts


def _joined(name: str, parts: list[bytes]) -> bytes:
    return (images.SIGNATURE if name == "png" else b"\xff\xd8") + b"".join(parts)


def _whole(kind: bytes, content: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    summed = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + summed


def _parts(rng: Random, name: str, data: bytes) -> bytes:
    """A part changed inside, with a good checksum; or missing, twice, elsewhere; or a new one."""
    parts = _split(name, data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, act = rng.randrange(len(parts)), rng.randrange(5)
        if act == 0 and len(parts) > 1:
            del parts[at]
        elif act == 1:
            parts[at:at] = [parts[rng.randrange(len(parts))]] * rng.choice((1, 2, 70, 3000))
        elif act == 2:
            parts.insert(rng.randrange(len(parts)), parts.pop(at))
        elif name == "png" and act == 3:
            parts[at] = _whole(parts[at][4:8], changed_bytes(rng, parts[at][8:-4]))
        elif name == "png":
            kind = rng.choice(
                (b"acTL", b"fcTL", b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"IDAT", b"Xxxx")
            )
            parts.insert(at, _whole(kind, rng.randbytes(rng.choice((0, 1, 6, 26, 300)))))
        elif act == 3:
            parts[at] = parts[at][:4] + changed_bytes(rng, parts[at][4:])
        else:
            content = rng.randbytes(rng.choice((0, 1, 6, 26, 300)))
            head = bytes([0xFF, rng.choice((0xC0, 0xC2, 0xC4, 0xDB, 0xDD, 0xE1, 0xEE, 0xFE))])
            parts.insert(at, head + (len(content) + 2).to_bytes(2) + content)
    return _joined(name, parts)


def _size(rng: Random, name: str, data: bytes) -> bytes:
    """A header that lies."""
    parts = _split(name, data)
    width, height = rng.choice(SIZES), rng.choice(SIZES)
    if name == "png":
        rest = bytearray(parts[0][16:21])
        if rng.random() < 0.5:
            rest[rng.randrange(5)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
        parts[0] = _whole(b"IHDR", struct.pack(">II", width, height) + rest)
        return _joined(name, parts)
    for at, part in enumerate(parts):
        if part[1] in images.FRAMES:
            size = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
            parts[at] = part[:5] + size + part[9:]
    return _joined(name, parts)
