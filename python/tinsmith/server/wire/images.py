"""Images in requests: each is looked at before one is decoded, and before the request is read.

A look reads an image's header only. It says how many tokens the image is and how much memory
decoding it will take, and refuses what this server or this model does not take. When the images are
decoded (service/images.py), the request is read with their ids in the places of their chunks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.image_cache import EncodedImage, HeldImage, look
from tinsmith.formats.images import Data, check_format, from_base64
from tinsmith.models.registry import BaseModel
from tinsmith.server.wire import fields
from tinsmith.server.wire.parse import need, optional

COUNT_MAX = 1024  # images of a request
PIXELS_MAX = 1 << 27  # of all images of a request
EXPECTED_MAX = (1 << 31) - 1
CHUNK = "image"  # the type of its chunks


@dataclass(frozen=True)
class PlacedImage:
    """An image of a request, and its name in error messages."""

    where: str
    image: EncodedImage


class ImageReader:
    """Looks at the images of one request, for a model, in their order; `found` are those so far.
    `tokens_max` is the most that an image may have."""

    def __init__(self, model: BaseModel, tokens_max: int):
        self.found: list[PlacedImage] = []
        self._model, self._tokens_max = model, tokens_max
        self._pixels = 0

    def add(self, read: Callable[[], Data], name: str, expected: int | None, where: str) -> None:
        """Looks at the next image. `name` is its format, `expected` the tokens that the client
        counts on."""
        try:
            self.found.append(PlacedImage(where, self._look(read, name, expected)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _look(self, read: Callable[[], Data], name: str, expected: int | None) -> EncodedImage:
        processor = self._model.processor
        if processor is None:
            raise ValueError(f"this model takes no images: {self._model.no_images}")
        if len(self.found) == COUNT_MAX:
            raise ValueError(f"the request has more than {COUNT_MAX} images; send it in parts")
        image = look(read, name, processor)
        height, width = image.size
        self._pixels += image.pixels
        if self._pixels > PIXELS_MAX:
            raise ValueError(
                f"the request's images have {self._pixels} pixels up to this one; at most "
                f"{PIXELS_MAX} are taken: send it in parts"
            )
        if image.rows > self._tokens_max:
            raise ValueError(
                f"the image has {image.rows} tokens; this server takes {self._tokens_max} "
                "(--image-tokens)"
            )
        if expected not in (None, image.rows):
            raise ValueError(
                f"expected {expected} tokens, got {image.rows} from image ({width} × {height} "
                "pixels)"
            )
        return image


def json_image(chunk: Mapping[str, Any], where: str) -> tuple[bytes, str, int | None]:
    """The file, the format and the expected tokens of a JSON chunk."""
    fields.check("image_chunk", chunk, where)
    text, name = need(chunk, "data", str, where), need(chunk, "format", str, where)
    expected = optional(chunk, "expected_tokens", int)
    if expected is not None and not 0 <= expected <= EXPECTED_MAX:
        raise ValueError(f"{where}: expected_tokens must be from 0 to {EXPECTED_MAX}")
    try:
        return from_base64(text), name, expected
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def ids_of(held: Iterator[HeldImage], name: str, where: str) -> NDArray[np.int32]:
    """The ids of the next image. Only one whose format is not read was not looked at before."""
    image = next(held, None)
    if image is not None:
        return image.ids
    try:
        check_format(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    raise AssertionError("an image was not looked at")
