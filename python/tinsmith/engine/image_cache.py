"""The images of a process: which ids stand for them in tokens, and their pixels while in use.

A row of an image is a token id below 0: row i of an image has id first - i, and no other image ever
has it. So whatever compares, counts or slices ids needs to know nothing of images. An image is its
file's bytes as its processor prepares them; the same one always has the same ids, and is decoded
once: its pixels stay while someone holds it, and those of the latest images stay besides, so that a
second epoch decodes nothing. Pixels that went are decoded again and get the same ids. Any thread
may use an ImageCache.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.formats.image_processor import ImageProcessor
from tinsmith.formats.images import DECODING_BYTES, Data, Size, decode, read_size

RECENT_BYTES = 1 << 28  # of pixels that nobody holds
# The most of an image that a server takes if it is not told otherwise: a tower of half a billion
# parameters computes for two minutes on a CPU's core.
IMAGE_TOKENS = 4096
KNOWN_MAX = 1 << 17  # images whose ids are remembered, at some 300 bytes


class Pixels(Protocol):
    """The engine's image: while it exists, so do its pixels."""

    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def wide(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


# Keeps flat pixels of high × wide tokens under new ids (0), or again under those that begin with
# the last argument: _core.Image.
Register: TypeAlias = Callable[[NDArray[np.uint8], int, int, int], Pixels]


@dataclass(frozen=True)
class EncodedImage:
    """An image as it came, with the facts of its header."""

    read: Callable[[], Data]  # its file
    name: str  # its format: "png" or "jpeg"
    key: bytes
    length: int  # bytes of its file
    size: Size
    resized: Size
    tokens: Size  # high and wide

    @property
    def rows(self) -> int:
        """How many tokens it is."""
        high, wide = self.tokens
        return high * wide

    @property
    def pixels(self) -> int:
        """The pixels of its file."""
        height, width = self.size
        return height * width

    @property
    def nbytes(self) -> int:
        """The bytes of its resized pixels."""
        height, width = self.resized
        return 3 * height * width


def look(read: Callable[[], Data], name: str, processor: ImageProcessor) -> EncodedImage:
    """Reads a file's header; ValueError for a file that is no image that can be used."""
    data = read()
    size = read_size(data, name)
    digest = hashlib.sha256(f"{name} {processor}".encode())
    digest.update(data)
    resized, tokens = processor.resized(*size), processor.tokens(*size)
    return EncodedImage(read, name, digest.digest(), len(data), size, resized, tokens)


@dataclass(frozen=True, eq=False)
class HeldImage:
    """An image in use: it keeps the pixels of its ids."""

    core: Pixels

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids of its rows."""
        return np.arange(self.core.first, self.core.first - self.core.rows, -1, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """The bytes of its pixels."""
        return self.core.nbytes


def pixel_bytes(images: Iterable[HeldImage]) -> int:
    """The bytes of the pixels of images, each counted once."""
    return sum(image.nbytes for image in set(images))


class ImageCache:
    """See the file's header."""

    def __init__(self, register: Register, recent_bytes: int = RECENT_BYTES):
        self.decoded = 0  # images, also those that were decoded again
        self.found = 0  # images whose pixels were there
        self._register = register
        self._recent_bytes = recent_bytes
        self._known: OrderedDict[bytes, int] = OrderedDict()  # the first id of each key
        self._held: WeakValueDictionary[bytes, HeldImage] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, HeldImage] = OrderedDict()  # least recently used first
        self.bytes = 0  # of the recent images' pixels
        self._lock = threading.Lock()

    def needs(self, images: Sequence[EncodedImage]) -> int:
        """The bytes that `hold` may take for these, one after the other: the file, its copy and the
        pixels of the largest, and the resized pixels of all. Those whose pixels are there take
        nothing."""
        with self._lock:
            new = {one.key: one for one in images if one.key not in self._held}
        most = max(
            (2 * one.length + DECODING_BYTES * one.pixels for one in new.values()), default=0
        )
        return most + sum(one.nbytes for one in new.values())

    def find(self, image: EncodedImage) -> HeldImage | None:
        """The image, if its pixels are there."""
        with self._lock:
            held = self._use(image.key)
            self.found += held is not None
            return held

    def hold(self, image: EncodedImage) -> HeldImage:
        """The image, decoded if its pixels are not there. ValueError if its file is damaged."""
        if (known := self.find(image)) is not None:
            return known
        pixels = decode(image.read(), image.name, image.resized)
        with self._lock:
            self.decoded += 1
            held = self._use(image.key)  # another thread may have been faster
            if held is None:
                first = self._known.get(image.key, 0)
                held = HeldImage(self._register(pixels.reshape(-1), *image.tokens, first))
                self._keep(image.key, held)
            return held

    def _use(self, key: bytes) -> HeldImage | None:
        """The image of a key, now the most recently used; None if its pixels are gone."""
        held = self._held.get(key)
        if held is not None:
            self._keep(key, held)
        return held

    def _keep(self, key: bytes, held: HeldImage) -> None:
        self._known[key] = held.core.first
        self._known.move_to_end(key)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        self._held[key] = held
        if self._recent.pop(key, None) is None:
            self.bytes += held.nbytes
        self._recent[key] = held
        while self.bytes > self._recent_bytes:
            _, oldest = self._recent.popitem(last=False)
            self.bytes -= oldest.nbytes


_made: list[ImageCache] = []  # the process's, once an image has come
_making = threading.Lock()


def images() -> ImageCache:
    """The process's images: ids must mean the same to all that use its models."""
    with _making:
        if not _made:
            _made.append(ImageCache(_core.Image))
        return _made[0]


def counts() -> tuple[int, int, int]:
    """How many images were decoded so far, how often pixels were found, and the bytes of the recent
    images' pixels."""
    held = _made[0] if _made else None
    return (held.decoded, held.found, held.bytes) if held else (0, 0, 0)
