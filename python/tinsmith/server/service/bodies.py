"""Bodies of requests and replies of any size, without blocking the event loop.

They are received and sent in pieces; the work between (zstd, JSON) is done in threads. The memory
of a body is counted as it arrives (overload.py), packed and unpacked. There are limits for its
bytes, its pace, its unpacked size, and the values in its JSON, whose objects take many times the
text; each is checked before more memory is taken.

JSON is read with the standard library, a stretch at a time. msgspec takes a third to an eighth of
the time, but in one step that holds the GIL: 120 ms for 8 MB of token ids, 400 ms for 63 MB. It
also accepts nested lists up to Python's recursion limit, and for a text that ends with half of a
surrogate pair it says that the input was truncated.
"""

import asyncio
import contextlib
import io
import json
import json.scanner
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from json.decoder import JSONArray
from typing import Any

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tinsmith.checkpoints.meta import is_text
from tinsmith.server.http.overload import Reservation
from tinsmith.server.service.promises import Refusal
from tinsmith.server.service.service import Service
from tinsmith.server.wire.chunking import JSON, PIECE, PROTOBUF, Buffer, Json

BODY_BYTES_MAX = 1 << 30  # after decompression
LARGE_JSON_BYTES_MAX = 1 << 27  # for a sample or images: scores of 4 M cells have 80 MB
JSON_BYTES_MAX = 1 << 23  # for anything else
VALUES_MAX = 10_000_000  # in JSON: more than two lists of 4 M cells
BRACKETS_MAX = 1 << 17  # lists and objects in JSON
DEPTH_MAX = 64  # of nested lists and objects
VALUE_BYTES = 40  # memory of one value, about
WINDOW_BYTES_MAX = 1 << 23  # of zstd, which needs as much memory; RFC 8878 recommends no more
UNPACKED = 1 << 22  # bytes that are unpacked, or scanned, at once
STRETCH = 1 << 16  # characters of a list that are parsed at once

PACE_SECONDS = 10.0  # in which PACE_BYTES must come
PACE_BYTES = 10 << 14
BODY_SECONDS_MAX = 600.0


# ---- requests ----


async def read_body(
    service: Service, request: Request, arrival: Reservation, bytes_max: int
) -> bytes:
    """The body, decompressed."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "zstd"):
        raise Refusal(415, f"the body's Content-Encoding must be zstd or none, {coding!r:.80} came")
    pieces = [piece async for piece in received(request, bytes_max, arrival.take)]
    body = await _joined(service, pieces)
    if coding == "zstd":
        body = await _joined(service, await _unpacked(service, body, arrival, bytes_max))
    arrival.complete()
    return body


async def _joined(service: Service, pieces: Sequence[bytes]) -> bytes:
    if len(pieces) == 1:
        return pieces[0]
    return await service.beside(sum(map(len, pieces)) >> 6, b"".join, pieces)  # copying is quick


def promised(request: Request) -> int | None:
    """The body's length according to its header, if it has one."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() and len(said) < 20 else None


async def received(
    request: Request, bytes_max: int, take: Callable[[int], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """The body in pieces. Each is counted by `take` before the next one is read. The client's time
    limit does not run while `take` waits or the consumer works."""
    if (promised(request) or 0) > bytes_max:
        raise too_large(bytes_max)
    clock = asyncio.get_running_loop().time
    begin = mark = clock()
    came, marked, more = 0, 0, True
    last = bytearray()  # arriving pieces, which may be tiny
    while more:
        piece = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(mark + PACE_SECONDS):
                message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece, more = message.get("body", b""), message.get("more_body", False)
        came += len(piece)
        if came > bytes_max:
            raise too_large(bytes_max)
        now = clock()
        if more and now - mark >= PACE_SECONDS:
            if came - marked < PACE_BYTES or now - begin > BODY_SECONDS_MAX:
                raise _too_slow(came, now - begin)
            mark, marked = now, came
        await take(len(piece))
        last += piece
        if len(last) >= PIECE or not more:
            yield bytes(last)
            last.clear()
        waited = clock() - now
        begin, mark = begin + waited, mark + waited


def too_large(bytes_max: int, beside: str = "") -> Refusal:
    """The refusal of a body; `beside` says what is not counted."""
    more = f" {beside}" if beside else ""
    return Refusal(413, f"the body has more than {bytes_max} bytes{more}, the most that this takes")


def _too_slow(came: int, seconds: float) -> Refusal:
    return Refusal(
        408,
        f"the body came too slowly: {came} bytes in {seconds:.0f} s; {PACE_BYTES} bytes must come "
        f"in each {PACE_SECONDS:g} s, and all of it within {BODY_SECONDS_MAX:g} s",
    )


async def _unpacked(
    service: Service, packed: bytes, arrival: Reservation, bytes_max: int
) -> list[bytes]:
    """Decompresses zstd in pieces; each is counted before the next one is unpacked."""
    unpack = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    reader = unpack.stream_reader(io.BytesIO(packed))
    found, size = list[bytes](), 0
    try:
        window = zstandard.get_frame_parameters(packed).window_size
        await arrival.take(min(window, WINDOW_BYTES_MAX))
        # Even a small body can become a large piece.
        while piece := await service.beside(UNPACKED, reader.read, UNPACKED):
            size += len(piece)
            if size > bytes_max:
                raise too_large(bytes_max)
            await arrival.take(len(piece))
            found.append(piece)
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not zstd: {error}") from None
    return found


async def read_json(service: Service, request: Request, empty: bytes = b"") -> dict[str, Any]:
    """The JSON object of a small body; `empty` if the body is empty."""
    with service.arrivals.begin() as arrival:
        body = await read_body(service, request, arrival, JSON_BYTES_MAX)
        return await parsed_json(service, body or empty, arrival)


async def parsed_json(service: Service, body: bytes, arrival: Reservation) -> dict[str, Any]:
    """A body's JSON object; its values are counted as memory."""
    values = await service.beside(len(body) >> 6, count_values, body)
    await arrival.take(VALUE_BYTES * values)
    return await service.beside(len(body), parse_json, body)


def count_values(body: bytes) -> int:
    """An upper bound of the values in a JSON text; a Refusal if they could be too many."""
    brackets, values = 0, 1
    for at in range(0, len(body), UNPACKED):
        part = at, at + UNPACKED
        new = body.count(b"[", *part) + body.count(b"{", *part)
        brackets += new
        values += new + body.count(b",", *part) + body.count(b":", *part)
        if brackets > BRACKETS_MAX or values > VALUES_MAX:
            raise Refusal(
                413,
                f"the body's JSON has up to {values} values in its first {part[1]} bytes, "
                f"{brackets} of them lists and objects; at most {VALUES_MAX} and {BRACKETS_MAX} "
                "are read",
            )
    return values


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Everything in it can be stored and sent again: texts are valid
    Unicode, numbers are finite."""
    large = len(body) > STRETCH
    try:
        text = body.decode()
        content = _Decoder().decode(text) if large else json.loads(text, **_FINITE)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not JSON: byte {error.start} is no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body must be a JSON object, {type(content).__name__} came")
    if body.count(b"[") + body.count(b"{") > DEPTH_MAX:
        _check_depth(content)
    if b"\\u" in body and _ESCAPED_SURROGATE.search(body):
        _check_texts(content)
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is not finite")
    return value


# Infinity and NaN are not JSON, but an exponent can still make a number infinite.
_FINITE: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite}
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _levels(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The lists and objects of JSON, level by level from the outside in."""
    level: list[Any] = [content]
    while level:
        yield level
        inner: list[Any] = []
        for found in level:
            values = found.values() if isinstance(found, dict) else found
            inner += [value for value in values if isinstance(value, dict | list)]
        level = inner


def _check_depth(content: dict[str, Any]) -> None:
    for depth, _ in enumerate(_levels(content)):
        if depth == DEPTH_MAX:
            raise Refusal(
                400, f"the body has more than {DEPTH_MAX} lists and objects in each other"
            )


def _check_texts(content: dict[str, Any]) -> None:
    for level in _levels(content):
        for found in level:
            texts = [*found, *found.values()] if isinstance(found, dict) else found
            for text in texts:
                if isinstance(text, str) and not is_text(text):
                    raise Refusal(
                        400,
                        f"the body has the text {text[:40]!a}, which is no Unicode: half of a "
                        "surrogate pair stands alone in it",
                    )


class _Decoder(json.JSONDecoder):
    """json's own decoder in Python, which lets other threads run between its steps; the C decoder
    is a single step. Lists of plain numbers still go to the C decoder, a stretch at a time."""

    def __init__(self) -> None:
        super().__init__(**_FINITE)
        self.parse_array = _array
        self.scan_once = json.scanner.py_make_scanner(self)


_PLAIN = re.compile(r'[^][{}"]*,')


def _array(begin: tuple[str, int], scan_once: Callable[..., Any]) -> tuple[list[Any], int]:
    """json.decoder's JSONArray: the values of a list that begins at `begin`, and where it ends."""
    text, at = begin
    values: list[Any] = []
    while plain := _PLAIN.match(text, at, at + STRETCH):
        try:
            part = json.loads(f"[{plain[0][:-1]}]", **_FINITE)
        except ValueError:  # reported below, with its position in the text
            break
        if not part:
            break
        values += part
        at = plain.end()
    rest, end = JSONArray((text, at), scan_once)
    if values and not rest:
        raise json.JSONDecodeError("Expecting value", text, end - 1)
    return values + rest, end


# ---- replies ----


def reply_of(parts: Sequence[Buffer]) -> Response:
    """The reply with a protobuf message or a JSON text."""
    size, kind = sum(map(len, parts)), JSON if isinstance(parts, Json) else PROTOBUF
    if size <= PIECE:
        return Response(b"".join(parts), media_type=kind)
    headers = {"content-length": str(size)}
    return StreamingResponse(_sent(parts), headers=headers, media_type=kind)


async def _sent(parts: Sequence[Buffer]) -> AsyncIterator[bytes]:
    """Pieces of roughly equal size."""
    piece = bytearray()
    for part in map(memoryview, parts):
        for at in range(0, len(part), PIECE):
            piece += part[at : at + PIECE]
            if len(piece) >= PIECE:
                yield bytes(piece)
                piece.clear()
                await asyncio.sleep(0)  # lets others run; and the client may have disconnected
    if piece:
        yield bytes(piece)
