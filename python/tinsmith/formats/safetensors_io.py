"""Safetensors files: read by mmap, and written, without the safetensors package.

A file is a 64-bit header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes. The header is checked before anything in it is trusted: the offsets must cover the
file to its end without holes, and each tensor's bytes must be its shape times its element's size.
So a truncated or altered file is refused here, in one sentence, and never read beyond its end.
bfloat16 has no NumPy type: its bits are a uint16 array, when read and when written. Tensors are
read-only views of the mapped file: memory is touched on use.
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tinsmith import _core
from tinsmith.system import disk

Opener = Callable[[Path], BinaryIO]
Fetch = Callable[["Entry", mmap.mmap], None]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100 * 1000 * 1000
TENSORS_MAX = 1 << 16
BYTES_MAX = 1 << 62
FETCH_BYTES = 1 << 22  # a multiple of every page size
NAME_BYTES = 255  # of a file's name

# The sizes of all types are needed to check a file's offsets; only the first three are read.
_BITS = {
    "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16,
    "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
READ = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
# Types whose numbers bfloat16 represents, or that are widened to it; quantization.py reads the last
# three.
IN_BF16 = {"BF16", "MXFP4", "FP8", "NF4"}
_WRITTEN = {
    "float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64",
    "int32": "I32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The position of one tensor: bytes [begin, end) of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of one or several files, by name; a context manager that unmaps them."""

    def __init__(self, files: list[Path], opener: Opener | None = None) -> None:
        self._entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.metadata: dict[str, str] = {}  # of all files together
        for file in files:
            self._maps[file], entries, metadata = _open_file(file, opener)
            self.metadata |= metadata
            for name, entry in entries.items():
                if name in self._entries:
                    first = self._entries[name].file
                    raise ValueError(f"{file}: {name} is also in {first.name}")
                self._entries[name] = entry

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name, self._entries[name])

    def _read(self, name: str, entry: Entry) -> np.ndarray:
        """The numbers at an entry, which is a tensor or a part of one."""
        if entry.dtype not in READ:
            known = ", ".join(READ)
            raise ValueError(f"{entry.file}: {name} is {entry.dtype}; tinsmith reads {known}")
        dtype = np.dtype(READ[entry.dtype])
        bits = self._maps[entry.file]
        count = math.prod(entry.shape)
        begin = entry.begin if count else 0  # NumPy refuses an empty view at the buffer's end
        array = np.frombuffer(bits, dtype, count, begin).reshape(entry.shape)
        if not array.flags.aligned:  # a header of odd length; the engine needs aligned loads
            array = array.copy()
            array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's would build the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        for bits in self._maps.values():
            with contextlib.suppress(BufferError):  # a view is still alive and keeps its map
                bits.close()

    def stored(self, name: str) -> str | None:
        """The tensor's block type (csrc/device/dtype.c), if it is stored in blocks."""
        return None

    def blocks(self, name: str, matrix: int | None) -> tuple[np.ndarray, str]:
        """The blocks of a stored tensor, or of one of its matrices: uint8, one row for each output;
        and the array's type (csrc/device/dtype.c)."""
        raise KeyError(name)

    def entry(self, name: str) -> Entry:
        """A tensor's entry in the header; its bytes are not touched."""
        return self._entries[name]

    def leave(self, name: str) -> None:
        """Says that a tensor is not needed again soon: it leaves this process's memory. A later use
        reads it from the system's page cache, or from disk. Any thread may call it."""
        for entry in self.sources(name):
            begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(ValueError):  # closed: nothing is mapped any more
                self._maps[entry.file].madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)

    def bits(self, entry: Entry) -> mmap.mmap:
        """The map of an entry's file."""
        return self._maps[entry.file]

    def sources(self, name: str) -> tuple[Entry, ...]:
        """The entries of all bytes of a tensor."""
        return (self.entry(name),)

    def widened(self) -> dict[str, int]:
        """The bytes of types that no device computes from, by type name: they are widened when they
        are read."""
        found: dict[str, int] = {}
        for name, entry in self._entries.items():
            if entry.dtype not in READ:
                size = sum(one.size for one in self.sources(name))
                found[entry.dtype] = found.get(entry.dtype, 0) + size
        return dict(sorted(found.items()))

    def part(self, name: str, matrix: int | None) -> np.ndarray:
        """One matrix of a tensor that has several; None: the whole tensor."""
        return self[name] if matrix is None else self[name][matrix]


def open_file(path: Path | str, opener: Opener | None = None) -> Tensors:
    """The tensors of one safetensors file, which `opener` opens if one is given."""
    return Tensors([Path(path)], opener)


def open_folder(path: Path | str) -> Tensors:
    """The tensors of a model's folder: model.safetensors, or the files in its index."""
    folder = Path(path)
    if (folder / SINGLE_FILE).is_file():
        return Tensors([folder / SINGLE_FILE])
    index = folder / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    shards = _read_index(index)
    tensors = Tensors([folder / shard for shard in dict.fromkeys(shards.values())])
    for name, shard in shards.items():
        if name not in tensors or tensors.entry(name).file.name != shard:
            raise ValueError(f"{index}: {name} should be in {shard}, which does not have it")
    return tensors


def fetch(entry: Entry, bits: mmap.mmap) -> None:
    """Touches a tensor's pages in its mapped file, so that a later use does not wait for the disk:
    each part is requested while the one before is read. Other threads continue meanwhile."""
    if not entry.size:
        return
    pages = np.frombuffer(bits, np.uint8, entry.size, entry.begin)
    before = entry.begin % mmap.PAGESIZE
    for at in range(-before, entry.size, FETCH_BYTES):
        ahead = entry.begin + at + FETCH_BYTES
        if ahead < entry.end:
            bits.madvise(mmap.MADV_WILLNEED, ahead, min(FETCH_BYTES, entry.end - ahead))
        pages[max(at, 0) : at + FETCH_BYTES : mmap.PAGESIZE].max()


def write(
    path: Path | str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file and syncs it to disk; uint16 arrays are written as BF16."""
    forms = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_each(path, forms, tensors.__getitem__, metadata)


def write_each(
    path: Path | str,
    forms: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    make: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Like write(), but each tensor of the given type and shape is made when its turn comes."""
    names, text, _ = _header(forms, metadata)
    with disk.create(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            array = make(name)
            assert (array.dtype, array.shape) == forms[name], name
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())


def size(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> int:
    """The bytes of the file that write() would write."""
    forms = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    _, text, size = _header(forms, metadata)
    return 8 + len(text) + size


def _header(
    forms: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[list[str], bytes, int]:
    """The names of tensors in the file's order, its header, and the tensors' bytes."""
    # The widest elements first, so that every tensor is aligned to its own element.
    names = sorted(forms, key=lambda name: -forms[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        dtype, shape = forms[name]
        if dtype.name not in _WRITTEN:
            raise ValueError(f"{name}: {dtype} can't be written to a safetensors file")
        size = dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": _WRITTEN[dtype.name],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return names, text + b" " * (-len(text) % 8), offset


def widen(array: np.ndarray) -> np.ndarray:
    """The same numbers in float32, exactly; uint16 is bfloat16's bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def narrow(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """float32 numbers in another type, rounded to the nearest, ties to even."""
    if dtype != np.uint16:
        return array.astype(dtype)
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def convert(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """A copy in another type, rounded once."""
    return np.array(array) if array.dtype == dtype else narrow(widen(array), dtype)


def check_finite(
    array: np.ndarray, what: str, shape: tuple[int, ...] | None = None, first: int = 0
) -> None:
    """Raises ValueError if an array has a NaN or an infinity, which is never a weight; `what` names
    it. An array may be a part of a larger one of another shape, from its number `first` on."""
    bad = _core.first_bad(np.ascontiguousarray(array))
    if bad >= 0:
        place = ", ".join(map(str, np.unravel_index(first + bad, shape or array.shape)))
        found = widen(array.reshape(-1)[bad : bad + 1])[0]
        raise ValueError(f"{what} has {found} at [{place}]: all of its numbers must be finite")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's object_pairs_hook that refuses duplicate keys."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r:.80} is there twice")
        found[name] = value
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON: {error}") from None
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no weight_map of tensor names to files")
    for name, shard in shards.items():
        named = isinstance(shard, str) and 0 < len(shard.encode("utf-8", "replace")) <= NAME_BYTES
        if not named or Path(shard).name != shard:
            raise ValueError(
                f"{index}: {name:.200} names the file {shard!r:.200}, not one beside the index"
            )
        if not (index.parent / shard).is_file():
            raise FileNotFoundError(f"{index}: {name} is in {shard}, which is missing")
    return shards


def _open_file(
    path: Path, opener: Opener | None
) -> tuple[mmap.mmap, dict[str, Entry], dict[str, str]]:
    with opener(path) if opener else path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size < 10:
            raise ValueError(f"{path}: expected a safetensors file, found {size} bytes")
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES_MAX:
            limit = HEADER_BYTES_MAX
            raise ValueError(f"{path}: the header is {length} bytes long; the limit is {limit}")
        if length > size - 8:
            found = size - 8
            raise ValueError(f"{path}: the header should be {length} bytes, the file has {found}")
        entries, metadata = _read_header(path, file.read(length), size - 8 - length)
        return _map(file), entries, metadata


def _map(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(
    path: Path, text: bytes, data_bytes: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: the header should begin with '{{', found {text[:1]!r}")
    if text.count(b"{") > TENSORS_MAX:  # before the parser builds them
        raise ValueError(f"{path}: the header has more than {TENSORS_MAX} entries")
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the header is not JSON: {error}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(item) is not str for item in metadata.values()):
        raise ValueError(f"{path}: __metadata__ should map strings to strings")
    base = 8 + len(text)
    entries = {name: _read_entry(path, name, item, base) for name, item in header.items()}
    expected = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            at, due = entry.begin - base, expected - base
            raise ValueError(f"{path}: {name} should begin at byte {due}, its offset is {at}")
        expected = entry.end
    if expected != base + data_bytes:
        due = expected - base
        raise ValueError(f"{path}: the tensors need {due} bytes, the file has {data_bytes}")
    return entries, metadata


def _read_entry(path: Path, name: str, item: object, base: int) -> Entry:
    if not isinstance(item, dict):
        raise ValueError(f"{path}: the header's {name} should be an object, found {item!r:.40}")
    dtype, shape, offsets = (item.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{path}: {name} has the unknown dtype {dtype!r:.40}")
    if not _are_counts(shape):
        raise ValueError(f"{path}: {name} has the shape {shape!r:.40}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: {name} has the data_offsets {offsets!r:.40}")
    bits = math.prod(shape) * _BITS[dtype]
    found = offsets[1] - offsets[0]
    if bits != found * 8:
        sizes = f"needs {bits // 8} bytes, its data_offsets hold {found}"
        raise ValueError(f"{path}: {name} {dtype} {tuple(shape)} {sizes}")
    return Entry(path, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_counts(values: object) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < BYTES_MAX for value in values)
    )
