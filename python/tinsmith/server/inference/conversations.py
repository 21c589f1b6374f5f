"""What OpenAI's and Anthropic's conversations share: bodies that may have images, and the request
for an answer.

Each image is looked at, and the prompt's length is known, before one is decoded; see wire/images.py
and service/images.py. A body without images is as large as any other; images come on top.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from tinsmith.chat.images import ImageRows, ImageText, place_rows, take_images
from tinsmith.engine.decoding import SampleRequest
from tinsmith.server.http.overload import Reservation
from tinsmith.server.inference import serving
from tinsmith.server.inference.serving import Drawing, Target
from tinsmith.server.service import bodies
from tinsmith.server.service.images import hold_images
from tinsmith.server.service.service import Service
from tinsmith.server.wire.images import ImageReader, PlacedImage

COPIES = 3  # of a body, at most: its JSON's texts, the base64 of images, and their files
READ_BYTES = 1 << 15  # of work for any request, which a template's text is


@dataclass(frozen=True)
class Received:
    """A request's JSON and the bytes it came in, for the server's limit of an image's tokens."""

    body: Mapping[str, Any]
    size: int
    image_tokens: int


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation's tokens, with the model's placeholder at each row of an image, and its
    images."""

    ids: list[int]
    images: Sequence[PlacedImage]


class Drawn(Protocol):
    """A checked request for an answer."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def drawing(self) -> Drawing: ...


T = TypeVar("T")
Asked = TypeVar("Asked", bound=Drawn)


async def receive(service: Service, request: Request, arrival: Reservation) -> Received:
    """A request's JSON."""
    text = await bodies.read_body(service, request, arrival, bodies.LARGE_JSON_BYTES_MAX)
    body = await bodies.parsed_json(service, text, arrival)
    await arrival.take(COPIES * len(text))
    return Received(body, len(text), service.config.image_tokens)


async def read(
    service: Service, received: Received, function: Callable[..., T], *arguments: Any
) -> T:
    """What a function makes of a request, in a thread."""
    return await service.beside(max(received.size, READ_BYTES), function, received, *arguments)


async def prepared(
    service: Service,
    request: Request,
    arrival: Reservation,
    asked: Callable[[Received, Target], tuple[Asked, Sequence[PlacedImage]]],
    settings: Collection[str],
    neutral: Mapping[str, Sequence[Any]],
) -> tuple[Asked, SampleRequest]:
    """A checked request, which `asked` reads; its body and its images' files are no longer
    needed."""
    received = await receive(service, request, arrival)
    serving.check_fields(received.body, settings, neutral)
    target = await serving.find_target(service, received.body)
    found, images = await read(service, received, asked, target)
    return found, await sample_request(service, arrival, target, found, images)


def chat_prompt(
    received: Received,
    target: Target,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    prefix: str = "",
) -> ChatPrompt:
    """The prompt of a conversation, whose images are `ImageText`s. ValueError for an image that is
    not taken, and Refusal for a body that is too large."""
    plain, found = take_images(messages)
    _check_size(received, found)
    reader = ImageReader(target.model, received.image_tokens)
    for image in found:
        reader.add(partial(bytes, image.read()), image.name, None, image.where)
    settings = serving.template_settings(received.body, target.chat, tools)
    rows = ImageRows(target.model.image_token, [one.image.rows for one in reader.found])
    ids = target.chat.prompt(plain, tools, settings, prefix=prefix, images=rows)
    return ChatPrompt(ids, reader.found)


def _check_size(received: Received, images: Sequence[ImageText]) -> None:
    rest = received.size - sum(len(image.text) for image in images)
    if rest > bodies.JSON_BYTES_MAX:
        raise bodies.too_large(bodies.JSON_BYTES_MAX, beside="beside its images" if images else "")


async def sample_request(
    service: Service,
    arrival: Reservation,
    target: Target,
    asked: Drawn,
    images: Sequence[PlacedImage],
) -> SampleRequest:
    """The SDK's request for this answer, with its images decoded."""
    [wanted] = await serving.sample_requests(service, target, [asked.prompt], asked.drawing)
    held = await hold_images(service, arrival, images)
    prompt = place_rows(wanted.prompt, target.model.image_token, [one.ids for one in held])
    return replace(wanted, prompt=prompt, images=tuple(held))
