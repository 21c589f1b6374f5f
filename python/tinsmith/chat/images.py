"""Images in conversations: the files that clients send in messages, and their rows in the prompt.

A message has an image as a part `{"type": "image", "image": …}` of its content. The template gets
the part alone and writes the model's placeholder for it, one token. The prompt then has that token
once for each row of the image, as transformers' processors write it; the ids of the rows go there
when the image is decoded. Only bytes that came in the message are read: a server that opens what a
client names reads files and networks for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.chat.template import Message
from tinsmith.formats.images import from_base64

PART = "image"  # the type of an image's part, and its key of the image
KINDS = {"image/png": "png", "image/jpeg": "jpeg"}
ROLES = ("user", "tool")  # whose messages can have images
HEAD_MAX = 256  # characters of a data URL before its data
EMBEDDED = "data:image/png;base64,… or data:image/jpeg;base64,…"


@dataclass(frozen=True)
class ImageText:
    """The file of an image as it came in a message: its base64 text, its format, and its name in
    error messages."""

    text: str = field(repr=False)
    name: str
    where: str

    def read(self) -> bytes:
        """The file; ValueError for a text that is no base64."""
        try:
            return from_base64(self.text)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None


def image_text(kind: str, text: str, where: str) -> ImageText:
    """An image of a media type; ValueError for a type that is not read."""
    name = KINDS.get(kind.strip().lower())
    if name is None:
        raise ValueError(
            f"{where}: the image's media type must be {' or '.join(KINDS)}, {kind!r:.60} came"
        )
    return ImageText(text, name, where)


def image_of_url(url: str, where: str) -> ImageText:
    """The image that a data URL carries; ValueError for any other URL."""
    head, comma, _ = url[:HEAD_MAX].partition(",")
    scheme, _, kinds = head.partition(":")
    kind, *settings = kinds.split(";")
    if scheme.strip().lower() != "data":
        raise ValueError(
            f"{where}: the image is at {url[:60]!r}, which is not opened here: send its bytes as "
            f"{EMBEDDED}"
        )
    if not comma or [one.strip().lower() for one in settings[-1:]] != ["base64"]:
        raise ValueError(f"{where}: the image's URL must be {EMBEDDED}, {url[:60]!r} came")
    return image_text(kind, url[len(head) + 1 :], where)


def image_part(image: Any) -> dict[str, Any]:
    """The part of a message that is an image."""
    return {"type": PART, PART: image}


def has_images(message: Message) -> bool:
    """Whether a message has an image."""
    content = message.get("content")
    return isinstance(content, list | tuple) and any(map(is_image, content))


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image, in the form that is used here."""
    return isinstance(part, Mapping) and part.get("type") == PART


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages as templates take them, and the images that were in them, in their order."""
    found: list[Any] = []

    def plain(message: Message) -> Message:
        if not has_images(message):
            return message
        content = message["content"]
        found.extend(part[PART] for part in content if is_image(part))
        parts = [{"type": PART} if is_image(part) else part for part in content]
        return {**message, "content": parts}

    return [plain(message) for message in messages], found


@dataclass(frozen=True)
class ImageRows:
    """How many rows each of a conversation's images has, and the placeholder of the model: the id
    `token`; None if its files do not name one."""

    token: int | None
    counts: Sequence[int]

    def spread(self, ids: Sequence[int]) -> list[int]:
        """Ids with the i-th placeholder once for each row of image i; ValueError if there are not
        as many placeholders as images."""
        places = sum(one == self.token for one in ids)
        if places != len(self.counts):
            raise ValueError(
                f"the model's chat template has written {places} places for images, and there are "
                f"{len(self.counts)}"
            )
        left = iter(self.counts)
        return [one for one in ids for _ in range(next(left) if one == self.token else 1)]


def place_rows(
    prompt: NDArray[np.int32], token: int | None, rows: Sequence[NDArray[np.int32]]
) -> NDArray[np.int32]:
    """A prompt from `spread` with the ids of its images' rows in place of the placeholder."""
    if not rows:
        return prompt
    placed = prompt.copy()
    placed[prompt == token] = np.concatenate(rows)
    return placed


def has_text(value: Any, text: str) -> bool:
    """Whether a text occurs in a value of JSON, its keys included."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(has_text(one, text) for pair in value.items() for one in pair)
    return isinstance(value, list | tuple) and any(has_text(one, text) for one in value)
