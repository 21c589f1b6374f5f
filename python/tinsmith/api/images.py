"""Images among tokens: a sequence may be a list of ids, texts, lists of ids, and images."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.api.results import Public
from tinsmith.engine.image_cache import HeldImage, images, look
from tinsmith.models.registry import BaseModel
from tinsmith.ops import tensors

SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


class Image(Public):
    """An image that `Model.image` has made, to stand among tokens.

    It keeps the image's pixels. The vision tower computes its rows when they are first used.

    Examples
    --------
    >>> seeing = tinsmith.Model("path/to/Qwen3.5-0.8B", device="cpu")
    >>> picture = seeing.image("photo.png")
    >>> picture
    <tinsmith.Image: 2 × 3 tokens>
    >>> len(picture)
    6
    """

    def __init__(self, held: HeldImage):
        self.held = held

    def __len__(self) -> int:
        """Its tokens: how many rows it takes in a sequence."""
        return self.held.core.rows

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids of its rows, below 0. They mean the image while this object exists.

        Examples
        --------
        >>> seeing = tinsmith.Model("path/to/Qwen3.5-0.8B", device="cpu")
        >>> seeing.image("photo.png").ids.shape
        (6,)
        """
        return self.held.ids

    def __repr__(self) -> str:
        return f"<tinsmith.Image: {self.held.core.high} × {self.held.core.wide} tokens>"


def read_image(source: Any, model: BaseModel) -> Image:
    """An image of a file, of a file's bytes, or of Pillow, as a model's processor prepares it."""
    if model.processor is None:
        raise ValueError(model.no_images)
    if isinstance(source, str | Path):
        data, where = Path(source).expanduser().read_bytes(), str(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        data, where = bytes(source), "the image"
    elif hasattr(source, "save") and hasattr(source, "getbands"):
        written = io.BytesIO()
        source.save(written, "png")
        data, where = written.getvalue(), "the image"
    else:
        raise TypeError(
            "an image is the path of a PNG or JPEG file, its bytes, or an image of Pillow; "
            f"{type(source).__name__} came"
        )
    name = format_of(data, where)
    return Image(images().hold(look(lambda: data, name, model.processor)))


def format_of(data: bytes, where: str) -> str:
    """The format of an image's file; ValueError for another file, which is named `where`."""
    name = next((name for begin, name in SIGNATURES.items() if data.startswith(begin)), None)
    if name is None:
        raise ValueError(f"{where} is no PNG or JPEG file")
    return name


def has_image(x: Any) -> bool:
    """Whether x is one sequence with an image in it."""
    return isinstance(x, list | tuple) and any(isinstance(part, Image) for part in x)


def is_batch(x: Any) -> bool:
    """Whether x is a list of sequences, not one sequence."""
    return tensors.is_batch(x) and not has_image(x)


def images_of(sequences: Iterable[Any]) -> tuple[HeldImage, ...]:
    """The images in sequences."""
    return tuple(
        part.held for one in sequences if has_image(one) for part in one if isinstance(part, Image)
    )


def ids_of(parts: Any, name: str) -> NDArray[np.int32]:
    """The ids of a sequence with images; its other parts are ids or lists of them."""
    found: list[NDArray[np.int32]] = []
    for index, part in enumerate(parts):
        if isinstance(part, Image):
            found.append(part.ids)
            continue
        whole = isinstance(part, int | np.integer)
        array = tensors.to_ids([part] if whole else part, f"{name}[{index}]")
        if array.size and int(array.min()) < 0:
            raise IndexError(f"{name}[{index}] has id {array.min()}; ids are 0 or more")
        found.append(array.reshape(-1))
    return np.concatenate(found)
