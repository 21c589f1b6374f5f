"""The header of a GGUF file: its metadata, and each tensor's position.

A file is "GGUF", a version, the numbers of tensors and of keys, the keys with their typed values,
the tensors' names, shapes, types and offsets, and their bytes (ggml's docs/gguf.md). The header is
checked before anything in it is trusted, as for a safetensors file: every length against the rest
of the file, the sum of all lists against a bound, and the tensors' bytes against their shapes, the
file's end and each other. So a truncated or forged file is refused in one sentence. The package
gguf knows the types of tensors, their sizes and how they are dequantised.

Its GGUFReader makes an array of each element: 6 s and 460 MB for a tokenizer of 150,000 tokens, for
which this takes 0.2 s. A false length of a list keeps it busy without end (test_gguf.py,
test_a_lie_about_a_length_takes_no_memory).
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.system.install_hints import pip_install

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MAX = 1 << 26
ELEMENTS_MAX = 1 << 22  # of all lists together
COUNT_MAX = 1 << 16  # keys, and tensors
DIMENSIONS_MAX = 4
BYTES_MAX = 1 << 62

# Type numbers of values, with the letter that struct and NumPy use for each, if they have one.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _LIST = 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type, its shape (rows first), and its bytes [begin, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The content of a GGUF header. `types` are the type numbers of its values: one, or for a list
    the list's and the elements'."""

    file: Path
    values: Mapping[str, Any] = field(repr=False)
    types: Mapping[str, tuple[int, ...]] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A key's value, which must have one of these types; `default` if it is missing. With the
        default ..., a missing key is an error."""
        value = self.values.get(key, default)
        if value is ...:
            raise ValueError(f"{self.file} has no {key}")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wrong = type(value) not in kinds and (key in self.values or value is not default)
        if wrong:
            names = " or ".join(one.__name__ for one in kinds)
            raise ValueError(f"{self.file}: {key} should be {names}, found {value!r:.60}")
        return value

    def items(self, key: str, kind: type, default: Any = ...) -> list[Any]:
        """A key's list; its elements must have this type."""
        found = self.get(key, list, default)
        if found and type(found[0]) is not kind:
            raise ValueError(
                f"{self.file}: {key} should list {kind.__name__}, not {found[0]!r:.60}"
            )
        return found


def require_gguf() -> Any:
    """The package gguf; RuntimeError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise RuntimeError(f"GGUF files need gguf: {pip_install('gguf')}") from None
    return gguf


def read_header(file: Path) -> Header:
    """The header of a file. ValueError if it is inconsistent, RuntimeError if the package gguf is
    not installed."""
    gguf = require_gguf()
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        if size < 24:
            raise ValueError(f"{file}: expected a GGUF file, found {size} bytes")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as bits:
            return _read(gguf, _Reader(file, bits))


class _Reader:
    """Reads a mapped file from its first byte on."""

    def __init__(self, file: Path, bits: mmap.mmap):
        self.file, self.size = file, len(bits)
        self.at = 0
        self._bits = bits
        self._elements = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if end > self.size:
            raise ValueError(
                f"{self.file}: the file ends at byte {self.size}, within its header, which goes on "
                f"to byte {end} at least"
            )
        if end > HEADER_BYTES_MAX:
            raise ValueError(f"{self.file}: the header is longer than {HEADER_BYTES_MAX} bytes")
        found = self._bits[self.at : end]
        self.at = end
        return found

    def number(self, letter: str) -> Any:
        """The next number of a type."""
        size = struct.calcsize("<" + letter)
        return struct.unpack("<" + letter, self.take(size))[0]

    def count(self, what: str) -> int:
        """The next number, a count of things in the header."""
        count = self.number("Q")
        if count > COUNT_MAX:
            raise ValueError(f"{self.file}: {count} {what} are more than {COUNT_MAX}")
        return count

    def string(self) -> str:
        """The next string."""
        text = self.take(self.number("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file}: {text!r:.80} is not UTF-8") from None

    def value(self, key: str) -> tuple[Any, tuple[int, ...]]:
        """The next value, and its type numbers."""
        kind = self.number("I")
        if kind != _LIST:
            return self._single(key, kind), (kind,)
        inner, length = self.number("I"), self.number("Q")
        self._elements += length
        if self._elements > ELEMENTS_MAX:
            raise ValueError(f"{self.file}: lists with more than {ELEMENTS_MAX} elements")
        if inner not in _SCALARS:
            return [self._single(key, inner) for _ in range(length)], (kind, inner)
        dtype = np.dtype("<" + _SCALARS[inner].replace("q", "i8").replace("Q", "u8"))
        bits = self.take(length * dtype.itemsize)
        return np.frombuffer(bits, dtype).tolist(), (kind, inner)

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """The next tensor's shape (rows first), its type number, and its offset."""
        count = self.number("I")
        if not 1 <= count <= DIMENSIONS_MAX:
            raise ValueError(f"{self.file}: {name:.80} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if math.prod(shape) >= BYTES_MAX or offset >= BYTES_MAX:
            raise ValueError(f"{self.file}: {name:.80} has the shape {shape} at byte {offset}")
        return shape, kind, offset

    def _single(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _BOOL:
            raise ValueError(f"{self.file}: {key:.80} has a value of the unknown type {kind}")
        return self.take(1) != b"\0"


def _read(gguf: Any, reader: _Reader) -> Header:
    file, size = reader.file, reader.size
    magic = reader.take(4)
    if magic != MAGIC:
        raise ValueError(f"{file}: a GGUF file begins with GGUF, found {magic!r}")
    version = reader.number("I")
    if version not in VERSIONS:
        raise ValueError(f"{file}: GGUF version {version} is not supported, only 2 and 3 are")
    tensors, keys = reader.count("tensors"), reader.count("keys")
    values: dict[str, Any] = {}
    types: dict[str, tuple[int, ...]] = {}
    for _ in range(keys):
        key = reader.string()
        if key in values:
            raise ValueError(f"{file}: the key {key!r:.80} is there twice")
        values[key], types[key] = reader.value(key)
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name = reader.string()
        if name in infos:
            raise ValueError(f"{file}: the tensor {name!r:.80} is there twice")
        infos[name] = reader.tensor(name)
    unit = values.get("general.alignment", 32)
    if type(unit) is not int or not 1 <= unit <= 1 << 20 or unit & (unit - 1):
        raise ValueError(f"{file}: general.alignment should be a power of two, found {unit!r:.40}")
    base = -(-reader.at // unit) * unit
    found = {name: _place(gguf, file, name, info, base) for name, info in infos.items()}
    _check_places(file, found, size)
    return Header(file, values, types, found)


def _place(
    gguf: Any, file: Path, name: str, info: tuple[tuple[int, ...], int, int], base: int
) -> TensorInfo:
    """A tensor's position, if its type is supported."""
    shape, number, offset = info
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros(block_bytes, np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        known = {one.value: one.name for one in gguf.GGMLQuantizationType}
        raise ValueError(
            f"{file}: {name:.80} has the type {known.get(number, number)}, which the package gguf "
            "can't dequantise"
        ) from None
    if shape[-1] % block:
        raise ValueError(f"{file}: {name:.80} has rows of {shape[-1]}, no multiple of {block}")
    begin = base + offset
    return TensorInfo(kind.name, shape, begin, begin + math.prod(shape) // block * block_bytes)


def _check_places(file: Path, tensors: Mapping[str, TensorInfo], size: int) -> None:
    """Raises ValueError if tensors overlap or exceed the file."""
    last, end = "the header", 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin < end:
            raise ValueError(f"{file}: {name:.80} begins within {last:.80}")
        if info.end > size:
            raise ValueError(
                f"{file}: {name:.80} ends at byte {info.end}, the file at byte {size}: it is "
                "truncated"
            )
        last, end = name, info.end
