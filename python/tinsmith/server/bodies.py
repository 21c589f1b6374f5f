"""Bodies of requests and of replies, however large, without the event loop standing still.

They are received and sent piece by piece; the work between (zstd, JSON) is done beside the loop. A
limit holds for a body's unpacked size, and is checked before more is unpacked.
"""

import io
import json
import json.scanner
import re
from collections.abc import AsyncIterator, Callable, Sequence
from json.decoder import JSONArray
from typing import Any

import zstandard
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.server.pieces import PIECE, Buffer
from tinsmith.server.service import Refusal, Service

PROTOBUF = "application/x-protobuf"
BODY_BYTES_MAX = 1 << 30  # after decompression
JSON_BYTES_MAX = 1 << 27  # the largest that anything needs are scores of 4 M cells, of 80 MB
STRETCH = 1 << 16  # characters of a list that are parsed at once


# ---- requests ----


async def read_body(service: Service, request: Request) -> bytes:
    """The body, decompressed."""
    pieces = [piece async for piece in request.stream()]
    size = sum(map(len, pieces))
    if request.headers.get("content-encoding", "identity") == "zstd":
        return await service.beside(BODY_BYTES_MAX, _unpacked, pieces)
    return await service.beside(size >> 6, b"".join, pieces)  # copying is quick


def _unpacked(pieces: Sequence[bytes]) -> bytes:
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(b"".join(pieces)))
        plain = reader.read(BODY_BYTES_MAX + 1)
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not zstd: {error}") from None
    if len(plain) > BODY_BYTES_MAX:
        raise Refusal(413, f"the body has more than {BODY_BYTES_MAX} bytes")
    return plain


async def read_json(service: Service, request: Request) -> dict[str, Any]:
    """The body's JSON object."""
    body = await read_body(service, request)
    return await service.beside(len(body), parse_json, body)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    if len(body) > JSON_BYTES_MAX:
        raise Refusal(413, f"the body is JSON of more than {JSON_BYTES_MAX} bytes")
    try:
        content = json.loads(body, cls=_Decoder if len(body) > STRETCH else None)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body must be a JSON object, {type(content).__name__} came")
    return content


class _Decoder(json.JSONDecoder):
    """json's own decoder in Python, which lets other threads run between its steps; the one in C is
    a single step. The C decoder still reads a list of plain numbers, a stretch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_array = _array
        self.scan_once = json.scanner.py_make_scanner(self)


_PLAIN = re.compile(r'[^][{}"]*,')


def _array(begin: tuple[str, int], scan_once: Callable[..., Any]) -> tuple[list[Any], int]:
    """json.decoder's JSONArray: the values of a list that begins there, and where it ends."""
    text, at = begin
    values: list[Any] = []
    while plain := _PLAIN.match(text, at, at + STRETCH):
        try:
            part = json.loads(f"[{plain[0][:-1]}]")
        except ValueError:  # told below, with its place in the text
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
    """A protobuf message's reply."""
    size = sum(map(len, parts))
    if size <= PIECE:
        return Response(b"".join(parts), media_type=PROTOBUF)
    headers = {"content-length": str(size)}
    return StreamingResponse(_sent(parts), headers=headers, media_type=PROTOBUF)


async def _sent(parts: Sequence[Buffer]) -> AsyncIterator[bytes]:
    """Pieces of about the same size."""
    piece = bytearray()
    for part in map(memoryview, parts):
        for at in range(0, len(part), PIECE):
            piece += part[at : at + PIECE]
            if len(piece) >= PIECE:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)
