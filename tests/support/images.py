"""Small images, a processor for them, and a stand-in for the engine's registry of images."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tinsmith.formats.image_processor import ImageProcessor

PROCESSOR = ImageProcessor(
    least=1024,
    most=1 << 16,
    patch=16,
    merge=2,
    frames=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale=1 / 255,
)


def array(seed: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """An image's pixels, (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def _saved(seed: int, size: tuple[int, int], name: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array(seed, size)).save(out, name, **options)
    return out.getvalue()


def png(seed: int, size: tuple[int, int]) -> bytes:
    """A PNG file of a height and width."""
    return _saved(seed, size, "png")


def jpeg(seed: int, size: tuple[int, int]) -> bytes:
    """A JPEG file of a height and width."""
    return _saved(seed, size, "jpeg")


class Held:
    """The engine's image, which can be followed by weak references."""

    def __init__(self, first: int, high: int, wide: int, nbytes: int):
        self.first, self.high, self.wide, self.nbytes = first, high, wide, nbytes
        self.rows = high * wide


class Core:
    """Stands for _core.Image. `added` has the `first` of each call, `pixels` the newest by id."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.pixels: dict[int, NDArray[np.uint8]] = {}
        self._next = -1

    def __call__(self, pixels: NDArray[np.uint8], high: int, wide: int, first: int = 0) -> Held:
        assert pixels.flags.c_contiguous and pixels.dtype == np.uint8
        assert pixels.shape == (high * wide * 32 * 32 * 3,)
        self.added.append(first)
        if not first:
            first, self._next = self._next, self._next - high * wide
        self.pixels[first] = pixels.reshape(high * 32, wide * 32, 3)
        return Held(first, high, wide, pixels.nbytes)
