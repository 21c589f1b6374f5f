"""Images in conversations of this process: parts of messages become `Image`s.

A part is transformers' {"type": "image", "image": …}, of an `Image` or of what `Model.image` takes,
or OpenAI's image_url with a data URL, which is the only URL that is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.api.images import Image
from tinsmith.chat.chat import Chat, Tools
from tinsmith.chat.images import (
    PART,
    ImageRows,
    image_of_url,
    image_part,
    place_rows,
    take_images,
)
from tinsmith.chat.template import Message
from tinsmith.engine.image_cache import HeldImage


def _message(message: Message, where: str, make: Callable[[Any], Image]) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [_part(part, f"{where}.content[{row}]", make) for row, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, where: str, make: Callable[[Any], Image]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in (PART, "image_url"):
        return part
    given = part.get(kind)
    if kind == "image_url":
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise TypeError(f"{where}.image_url must have a url, which is a text")
        given = image_of_url(url, where).read()
    if isinstance(given, Image):
        return image_part(given)
    try:
        return image_part(make(given))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


@dataclass(frozen=True)
class SeenPrompt:
    """A conversation's prompt: `ids` have the placeholder `token` at each row of an image."""

    ids: NDArray[np.int32]
    token: int | None
    images: Sequence[Image]

    @property
    def rows(self) -> NDArray[np.int32]:
        """The ids with those of the images' rows."""
        return place_rows(self.ids, self.token, [one.ids for one in self.images])

    @property
    def held(self) -> tuple[HeldImage, ...]:
        """What keeps the images."""
        return tuple(one.held for one in self.images)

    @property
    def parts(self) -> NDArray[np.int32] | list[int | Image]:
        """The ids; if there are images, a list with each in place of its rows."""
        if not self.images:
            return self.ids
        left, found = iter(self.images), list[int | Image]()
        for is_image, run in groupby(self.ids.tolist(), lambda one: one == self.token):
            rows = list(run)
            while is_image and rows:
                found.append(image := next(left))
                del rows[: len(image)]
            found += rows
        return found


def read_prompt(
    chat: Chat,
    messages: Sequence[Message],
    token: int | None,
    make: Callable[[Any], Image],
    tools: Tools | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SeenPrompt:
    """A conversation's prompt, up to the assistant's answer. `token` is the model's placeholder of
    an image, `make` is `Model.image`."""
    parts = [_message(one, f"messages[{row}]", make) for row, one in enumerate(messages)]
    plain, images = take_images(parts)
    rows = ImageRows(token, list(map(len, images)))
    ids = chat.prompt(plain, tools, settings, images=rows)
    return SeenPrompt(np.asarray(ids, np.int32), token, images)
