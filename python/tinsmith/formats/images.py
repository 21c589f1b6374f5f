"""PNG and JPEG files: their size from the header, and their pixels as RGB, resized.

Files come from clients, so nothing here trusts them. The header is read first, in a walk over the
file's parts that copies the ones which make pixels: texts, colour profiles, Exif data and further
frames never reach a decoder. Then Pillow decodes the copy, as the one format that was claimed.
Transformers' processors for Qwen's towers do the same: transparency is composited on white, Exif's
orientation is not applied, an animation is its first frame, and Pillow's bicubic filter resizes. A
failure is a sentence that begins with "the image"; Pillow's own texts are in none.
"""

import binascii
import io
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from PIL.Image import Image

BYTES_MAX = 1 << 25  # of a file
PIXELS_MAX = 1 << 25
# Memory of one pixel while a file is decoded: Pillow takes four bytes for RGB, and three times that
# for transparency, or the coefficients of a progressive JPEG beside it.
DECODING_BYTES = 12
PARTS_MAX = 1 << 16  # chunks of a PNG file, segments before the first scan of a JPEG file
PIECE = 1 << 20  # characters of base64 that are read at once
SCANS_MAX = 64  # of a JPEG file: each is a pass over all pixels; the most common number is ten

SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTES = (b"PLTE", b"tRNS")
GREY_16 = b"\x10\x00"  # bits and colours: as RGB, Pillow would cut all that is above 255
SOI, SOS, EOI = 0xD8, 0xDA, 0xD9  # JPEG's markers, after 0xFF
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of a header with a size
ALONE = {0x01, *range(0xD0, 0xD8)}  # markers without a segment
JFIF, ADOBE, COMMENT = 0xE0, 0xEE, 0xFE
LEFT_OUT = {COMMENT, *range(0xE0, 0xF0)} - {JFIF, ADOBE}  # these two say which colours it has

Data = bytes | memoryview
Size = tuple[int, int]  # height, width


def check_format(name: str) -> None:
    """Raises ValueError for a format that is not read."""
    if name not in ("png", "jpeg"):
        raise ValueError(f"the image's format must be png or jpeg, {name!r:.40} came")


def from_base64(text: str) -> bytes:
    """A file from its base64 text, a piece at a time: each holds the GIL."""
    parts = (text[at : at + PIECE].encode("ascii") for at in range(0, len(text), PIECE))
    try:
        return b"".join(binascii.a2b_base64(part, strict_mode=True) for part in parts)
    except ValueError:  # binascii's error and UnicodeEncodeError are such
        raise ValueError("the image's data is no base64") from None


def read_size(data: Data, name: str) -> Size:
    """The height and width of a file that is claimed to be "png" or "jpeg"; ValueError for any
    other file, and for one that is damaged or too large."""
    return _walk(data, name)[0]


def decode(data: Data, name: str, to: Size) -> NDArray[np.uint8]:
    """A file's pixels, (height, width, 3) of the size `to`; ValueError as from read_size."""
    size, parts = _walk(data, name)
    kind = _decoder(name)
    # Pillow raises many kinds of errors for a damaged file, more than it documents.
    try:
        with kind(io.BytesIO(b"".join(parts))) as image:
            if image.size != size[::-1]:
                raise _damaged()
            image.load()
            rgb = _to_rgb(image)
    except MemoryError:
        raise
    except Exception:
        raise _damaged() from None
    return _resized(rgb, to)


def _damaged() -> ValueError:
    return ValueError("the image ends early or is damaged")


def _decoder(name: str) -> Callable[[Any], "Image"]:
    """Pillow's class for files of a format: its `open` would also look for other formats."""
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        raise RuntimeError(f"images need Pillow: {pip_install('images')}") from None
    return PngImageFile if name == "png" else JpegImageFile


def _to_rgb(image: "Image") -> "Image":
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _resized(image: "Image", to: Size) -> NDArray[np.uint8]:
    from PIL.Image import Resampling

    height, width = to
    resized = image.resize((width, height), Resampling.BICUBIC)
    return np.frombuffer(resized.tobytes(), np.uint8).reshape(height, width, 3)


# ---- headers ----


def _walk(data: Data, name: str) -> tuple[Size, list[Data]]:
    """A file's size, and the parts of it that make its pixels."""
    check_format(name)
    if len(data) > BYTES_MAX:
        raise ValueError(f"the image has {len(data)} bytes; at most {BYTES_MAX} are taken")
    begin = SIGNATURE if name == "png" else b"\xff\xd8\xff"
    if bytes(data[: len(begin)]) != begin:
        raise ValueError(f"the image is no {name.upper()} file")
    size, parts = _png(memoryview(data)) if name == "png" else _jpeg(memoryview(data))
    height, width = size
    if not height or not width:
        raise _damaged()
    if height * width > PIXELS_MAX:
        raise ValueError(f"the image has {width} × {height} pixels; at most {PIXELS_MAX} are taken")
    return size, parts


def _png(data: memoryview) -> tuple[Size, list[Data]]:
    header, parts = None, list[Data]([SIGNATURE])
    for kind, whole in _chunks(data):
        content = whole[8:-4]
        if (header is None) != (kind == b"IHDR"):  # it is the first chunk, and there is one
            raise _damaged()
        if kind[0] & 0x20 and kind not in PALETTES:  # a capital begins a critical chunk
            continue
        if zlib.crc32(whole[4:-4]) != int.from_bytes(whole[-4:]):
            raise _damaged()
        if header is None:
            header = bytes(content)
            if len(header) != 13:
                raise _damaged()
            if header[8:10] == GREY_16:
                raise ValueError(
                    "the image is grey with 16 bits a pixel; send it with 8, or as RGB"
                )
        parts.append(whole)
    assert header is not None  # _chunks gives at least one, and the first is the header
    return (int.from_bytes(header[4:8]), int.from_bytes(header[:4])), parts


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The kind of each chunk up to the last, and the chunk with its length and checksum."""
    at = len(SIGNATURE)
    for _ in range(PARTS_MAX):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        if end > len(data):
            raise _damaged()
        kind = bytes(data[at + 4 : at + 8])
        yield kind, data[at:end]
        if kind == b"IEND":
            return
        at = end
    raise ValueError(f"the image has more than {PARTS_MAX} chunks")


def _jpeg(data: memoryview) -> tuple[Size, list[Data]]:
    size, parts = None, list[Data]([data[:2]])
    for marker, whole in _segments(data):
        if marker in FRAMES:
            if size is not None or len(whole) < 10:
                raise _damaged()
            size = int.from_bytes(whole[5:7]), int.from_bytes(whole[7:9])
            if (bits := whole[4]) != 8:
                raise ValueError(f"the image has {bits} bits a channel; JPEG files of 8 are taken")
        if marker not in LEFT_OUT:
            parts.append(whole)
    if size is None:
        raise _damaged()
    scans = bytes(parts[-1]).count(b"\xff\xda")
    if scans > SCANS_MAX:
        raise ValueError(f"the image has {scans} scans; at most {SCANS_MAX} are read")
    return size, parts


def _segments(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The marker of each segment before the first scan, and the segment with its marker; then the
    scan's, with the rest of the file."""
    at = 2
    for _ in range(PARTS_MAX):
        head = bytes(data[at : at + 4])
        if len(head) < 4:
            raise _damaged()
        marker = head[1]
        if head[0] != 0xFF or marker in (0, 0xFF):  # some cameras fill the space between segments
            at += 1
            continue
        if marker == SOS:
            yield marker, data[at:]
            return
        end = at + 2 + (0 if marker in ALONE else int.from_bytes(head[2:]))
        if (marker < 0xC0 and marker not in ALONE) or marker in (SOI, EOI) or end > len(data):
            raise _damaged()
        if marker not in ALONE:
            yield marker, data[at:end]
        at = end
    raise ValueError(f"the image has more than {PARTS_MAX} segments before its first scan")
