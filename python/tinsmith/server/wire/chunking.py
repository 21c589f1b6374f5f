"""Protobuf messages in pieces, so that no single protobuf call takes long.

protobuf reads or writes a whole message in one call and holds the GIL meanwhile, in any thread.
That would block the event loop for 280 ms if 200 MB come in datums of 512 tokens, and for 160 ms if
12 MB come in datums of two. On the wire a message is its fields, concatenated, so it can be cut
between two of them, and the parts are messages too. A large byte string, which is an array's
elements, needs no parser: `lift` replaces it by a name, and the remaining message is small; `fill`
is the inverse. An image's file is lifted whatever its size: many small ones are no small fields.
protobuf still interprets and checks the fields; these functions only walk the wire's format, as the
messages' own descriptors define it.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

Buffer = bytes | memoryview

PROTOBUF, JSON = "application/x-protobuf", "application/json"
LARGE = 1 << 16  # bytes of a string that is lifted, and of a message that is searched for these
PIECE = 1 << 18  # about as many bytes are parsed, or sent, at once
# Bytes of one message of a repeated field without its large strings, and of all other fields:
# parsed small fields take some forty times as much.
INNER_BYTES_MAX, OTHERS_BYTES_MAX = 1 << 22, 1 << 20

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
TYPE_MESSAGE, TYPE_BYTES = 11, 12  # of a descriptor's field
IMAGE, FILE = "ImageChunk", "data"  # the message of an image, and its field with the file
PNG, JPEG = b"png", b"jpeg"  # one of these is in each image's message that can be taken


class Json(list[Buffer]):
    """The parts of a JSON text; a plain list has the parts of a protobuf message."""


class Lifted:
    """Large byte strings that were replaced by names in their messages. A name begins with 16
    random bytes, so no other value is mistaken for one."""

    def __init__(self) -> None:
        self._mark = secrets.token_bytes(16)
        self._strings: list[Sequence[Buffer]] = []
        self.images = False  # whether there is one
        self.dense_bytes = 0  # of sparse arrays that were made dense

    def put(self, *parts: Buffer) -> bytes:
        """Stores a string, which may be in parts, and returns its name."""
        self._strings.append(parts)
        return self._mark + len(self._strings).to_bytes(4, "little")

    def get(self, value: bytes) -> Buffer:
        """The string of a field: its value, or the one-part string that its value names."""
        parts = self.parts(value)
        return value if parts is None else parts[0]

    def parts(self, value: Buffer) -> Sequence[Buffer] | None:
        """The parts of a named string; None if the value is no name."""
        if len(value) != 20 or value[:16] != self._mark:
            return None
        return self._strings[int.from_bytes(value[16:], "little") - 1]

    def within(self, message: bytes) -> bool:
        """Whether a message contains names."""
        return self._mark in message


# ---- the wire's format ----


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of the message in [at, end): number, wire type, and where it begins, where its
    value begins, and where it ends. Bytes that are no field are returned whole, as number 0:
    protobuf refuses them."""
    while at < end:
        begin = at
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == BYTES:
            length, at = _varint(data, at, end)
            stop = at + length
        elif kind == VARINT:
            _, stop = _varint(data, at, end)
        elif kind in (FIXED32, FIXED64):
            stop = at + (4 if kind == FIXED32 else 8)
        else:  # a group; our messages have none
            stop = end + 1
        if stop > end:
            yield 0, -1, begin, begin, end
            return
        yield tag >> 3, kind, begin, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint and its end; the end is past `end` if it is truncated or too long."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end + 1


def _number(value: int) -> bytes:
    """A varint's bytes."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _tagged(number: int, length: int) -> bytes:
    """The tag and length in front of a field of `length` bytes."""
    return _number(number << 3 | BYTES) + _number(length)


# ---- reading ----


def lift(data: bytes, at: int, end: int, descriptor: Any, lifted: Lifted) -> bytes:
    """The message in [at, end) with its large byte strings, and images' files, replaced by
    names."""
    known, kept, begin = descriptor.fields_by_number, [], at
    is_image = descriptor.name == IMAGE
    lifted.images |= is_image
    for number, kind, start, value, stop in fields(data, at, end):
        if start - begin > INNER_BYTES_MAX:
            raise ValueError(f"{start - begin} bytes of a message are in small fields")
        field = known.get(number)
        if kind != BYTES or field is None:
            continue
        if field.type == TYPE_MESSAGE and _is_searched(data, value, stop):
            inner = lift(data, value, stop, field.message_type, lifted)
        elif field.type == TYPE_BYTES and (
            stop - value >= LARGE or (is_image and field.name == FILE)
        ):
            inner = lifted.put(memoryview(data)[value:stop])
        else:
            continue
        kept += [data[begin:start], _tagged(number, len(inner)), inner]
        begin = stop
    kept.append(data[begin:end])
    return b"".join(kept)


def _is_searched(data: bytes, at: int, end: int) -> bool:
    """Whether a message may have something to lift."""
    return end - at >= LARGE or data.find(PNG, at, end) >= 0 or data.find(JPEG, at, end) >= 0


def cut(data: bytes, number: int, descriptor: Any, lifted: Lifted) -> Iterator[tuple[int, bytes]]:
    """A message in parts of about PIECE bytes. First the parts of the repeated field `number`, each
    with its count of messages; last, with 0, all other fields in their order. Large byte strings
    are lifted. ValueError if small fields would take too much memory."""
    field = descriptor.fields_by_number[number]
    others, part, size, count, rest = [], [], 0, 0, 0
    for found, kind, start, value, stop in fields(data, 0, len(data)):
        if found != number or kind != BYTES:
            rest += stop - start
            if rest > OTHERS_BYTES_MAX:
                raise ValueError(f"{rest} bytes of it are no {field.name}")
            others.append(data[start:stop])
            continue
        if not _is_searched(data, value, stop):
            part.append(data[start:stop])
        else:
            inner = lift(data, value, stop, field.message_type, lifted)
            if len(inner) > INNER_BYTES_MAX:
                raise ValueError(f"{len(inner)} bytes of a message are in small fields")
            part += [_tagged(number, len(inner)), inner]
        count += 1
        size += len(part[-1])
        if size >= PIECE:
            yield count, b"".join(part)
            part, size, count = [], 0, 0
    if part:
        yield count, b"".join(part)
    yield 0, b"".join(others)


# ---- writing ----


def fill(message: Any, lifted: Lifted) -> list[Buffer]:
    """A message in the wire's format, with its named strings filled in, as parts to send in
    order."""
    data = message.SerializeToString()
    return _fill(data, 0, len(data), message.DESCRIPTOR, lifted) if lifted.within(data) else [data]


def _fill(data: bytes, at: int, end: int, descriptor: Any, lifted: Lifted) -> list[Buffer]:
    known, parts = descriptor.fields_by_number, list[Buffer]()
    for number, kind, start, value, stop in fields(data, at, end):
        field = known.get(number) if kind == BYTES else None
        inner: Sequence[Buffer] | None = None
        if field is not None and field.type == TYPE_MESSAGE:
            inner = _fill(data, value, stop, field.message_type, lifted)
        elif field is not None and field.type == TYPE_BYTES:
            inner = lifted.parts(data[value:stop])
        if inner is None:
            parts.append(data[start:stop])
        else:
            parts += [_tagged(number, sum(map(len, inner))), *inner]
    return parts
