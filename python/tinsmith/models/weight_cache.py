"""Quantised copies: weights in 8 or 4 bits as they lie in memory, in files of the user's cache.

The first load of a large model with weights int8 or int4 quantises it, writes the copy and uses it;
later loads find it. A copy is mapped read-only: processes share its pages, and what is never
touched, like the embedding's rows of unused ids, takes no memory. It is of use only for the same
files, to the same engine, which its key says:

  of each of the model's files name, size, times of change (mtime and ctime), and its first MiB,
    which has the header. All bytes would take as long to read as to quantise. ctime
    changes even when mtime is restored;
  config, frequencies, and the type of each matrix;
  the code: the engine's (_core.weights_code) and the files of this folder, which read the models.

A file is a head (MARK, key, bytes, a checksum of each PIECE) and the memory. It is written beside
its place, under a lock, and renamed when it is whole. Every load compares all checksums, so nothing
need be synced: what a crash or a failing disk leaves is not read but made anew. A copy that can't
be written costs a warning, no more.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.formats.config import CONFIG_FILE
from tinsmith.models import weight_dtypes
from tinsmith.system import disk, home
from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

SUFFIX = ".weights"
LEAST_BYTES = 1 << 28  # smaller models are quantised in less than a second
SPARE_BYTES = 1 << 30  # that a copy leaves free on the disk
MARK = b"tinsmith weights"
PIECE = 1 << 22
PAGE = 1 << 16  # no machine's pages are larger
TAIL = 4096  # behind the memory: a product may load a whole tile there
HEADER_BYTES = 1 << 20
THREADS_MAX = 4  # more read no faster


@dataclass(frozen=True)
class Copy:
    """Where the copy of a model is, or will be, and what it is of."""

    file: Path
    title: str  # what messages call the weights
    size: int  # of the weights
    sources: tuple[Path, ...]
    facts: str

    def key(self) -> bytes:
        """Of the model's files as they are now, and of all else that decides about the bytes."""
        found = hashlib.sha256(self.facts.encode())
        for source in self.sources:
            stat = source.stat()
            told = (source.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            with source.open("rb") as file:
                header = hashlib.sha256(file.read(HEADER_BYTES)).hexdigest()
            found.update(repr((*told, header)).encode())
        return found.digest()

    @property
    def there(self) -> bool:
        """Whether there seems to be one; its bytes are compared when it is mapped."""
        try:
            with self.file.open("rb") as file:
                return file.read(len(_mark(bytes(32), 0))) == _mark(self.key(), self.size)
        except OSError:
            return False

    def map(self, core: _core.Model, key: bytes, *, checked: bool = False) -> bool:
        """Gives an empty core the copy's weights; False where there is no copy for the key, or it
        is damaged. `checked`: it was written just now."""
        size = core.weight_bytes
        try:
            with self.file.open("rb", buffering=0) as file:
                head = file.read(_head(size))
                if not head.startswith(_mark(key, size)):
                    return False  # of other files, or other code's
                if not checked:
                    _check(file.fileno(), head, size)
                core.map(file.fileno(), _begin(size))
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError, MemoryError) as error:
            why = getattr(error, "strerror", None) or error
            log.warning(
                "the copy %s is not used: %s; the weights are quantised again", self.file, why
            )
            return False

    def keep(self, core: _core.Model, key: bytes, again: Callable[[], _core.Model]) -> _core.Model:
        """Writes the copy of a core that was loaded; returns the core to use, which is one made by
        `again` and has its weights in the copy's file, or the same where there is no copy."""
        core.seal()
        if not self.write(core, key):
            return core
        mapped = again()
        return mapped if self.map(mapped, key, checked=True) else core

    def write(self, core: _core.Model, key: bytes) -> bool:
        """Writes a sealed core's weights; False where another process does, or where it can't be
        done, for which there is a warning."""
        try:
            if key != self.key():
                raise OSError("its files have changed meanwhile")
            with _place(self.file) as file:
                if file is None:
                    return False
                size = _write(file, core.memory(), key)
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in disk.FULL:
                why = f"the disk of {self.file.parent} is full"
            log.warning(
                "no copy of %s is kept in %s: %s; each load quantises them again "
                "(--no-weights-copy asks for none)",
                self.title,
                self.file.parent,
                why,
            )
            return False
        log.warning(
            "a copy of %s is kept in %s (%s), so that later loads take seconds; `tinsmith prune "
            "--copies` deletes copies, --no-weights-copy asks for none",
            self.title,
            self.file,
            readable(size),
        )
        return True


def wanted(
    folder: Path,
    kind: str,
    device: str,
    size: int,
    sources: Iterable[Path],
    facts: Mapping[str, Any],
) -> Copy | None:
    """The copy of a model that is loaded in fewer bits, `size` bytes of memory; None where it is
    not worth one. `facts` are what its weights depend on, beside its files."""
    if not worth(kind, device, size):
        return None
    text = json.dumps([facts, _core.weights_code(), _readers(), sys.byteorder], sort_keys=True)
    name = _name(folder)
    mark = hashlib.sha256(repr((str(folder), facts)).encode()).hexdigest()[:12]
    return Copy(
        home.copies_folder() / f"{name}-{kind}-{mark}{SUFFIX}",
        f"the {kind} weights of {name}",
        size,
        tuple(sorted({folder / CONFIG_FILE, *sources})),  # it says how they are quantised
        text,
    )


def worth(kind: str, device: str, size: int) -> bool:
    """Whether a model in such weights, of so many bytes, gets a copy. On a GPU none does: its
    memory is no file's."""
    return kind in weight_dtypes.BITS and device.startswith("cpu") and size >= LEAST_BYTES


def copies() -> dict[Path, int]:
    """The bytes of all copies, and of what killed processes have left of one."""
    found = {}
    for path in sorted(home.copies_folder().glob(f"*{SUFFIX}*")):
        with contextlib.suppress(OSError):  # gone meanwhile
            found[path] = path.lstat().st_size
    return found


def _name(folder: Path) -> str:
    """What a model's folder is called; a folder of the hub's cache is called a commit."""
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    return folder.name.rpartition("--")[2] or "model"


@cache
def _readers() -> str:
    """Of the code that reads models."""
    found = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted((*package.glob("formats/*.py"), *package.glob("models/*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()


# ---- the file ----


def _pieces(size: int) -> int:
    return -(-size // PIECE)


def _head(size: int) -> int:
    """The bytes of the head of a copy of so much memory."""
    return len(MARK) + hashlib.sha256().digest_size + 8 + 8 * _pieces(size)


def _begin(size: int) -> int:
    """Where the memory begins in the file."""
    return -(-_head(size) // PAGE) * PAGE


def _in_pieces(size: int, work: Callable[[int, int, int], None]) -> None:
    """Calls work(piece, from, to) for all pieces, in several threads; the first error is raised."""
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))

    def run(first: int) -> None:
        for piece in range(first, _pieces(size), threads):
            work(piece, piece * PIECE, min(size, (piece + 1) * PIECE))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def _mark(key: bytes, size: int) -> bytes:
    """What the head begins with; behind it are the checksums."""
    return MARK + key + size.to_bytes(8, "little")


def _check(file: int, head: bytes, size: int) -> None:
    """ValueError for a copy that is not as it was written. Its bytes are read, not mapped, so that
    they take no memory of this process, and a file that gets shorter is no error of the machine."""
    if os.fstat(file).st_size != _begin(size) + size + TAIL:
        raise ValueError("it has not the size that it was written with")
    sums = np.frombuffer(head, np.uint64, offset=len(_mark(bytes(32), 0)))
    buffers: dict[int, NDArray[np.uint8]] = {}

    def check(piece: int, begin: int, end: int) -> None:
        buffer = buffers.setdefault(threading.get_ident(), np.empty(PIECE, np.uint8))
        part = buffer[: end - begin]
        count = os.preadv(file, [part.data], _begin(size) + begin)
        if count < part.size or _core.checksum(part) != sums[piece]:
            raise ValueError(f"byte {_begin(size) + begin} or one behind it has changed")

    _in_pieces(size, check)


@contextlib.contextmanager
def _place(place: Path) -> Iterator[BinaryIO | None]:
    """A new file, which gets its place at the end; None while another process writes the same.
    What killed processes have left is removed."""
    disk.make_folder(place.parent)
    temporary = place.with_name(f"{place.name}~{secrets.token_hex(4)}")
    with disk.alone(place.parent):
        if _sweep(place):
            yield None
            return
        file = disk.create(temporary)
        _lock(file)
    try:
        with file:
            yield file
            temporary.rename(place)
    except BaseException:
        disk.remove(temporary)
        raise


def _lock(file: BinaryIO) -> bool | None:
    """Takes a file's lock for as long as it is open: False where somebody else has it, None where
    the file system has no locks. NFS wants the file to be open for writing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(place: Path) -> bool:
    """Removes unfinished files that nobody writes; whether somebody writes one for this place."""
    busy = False
    for path in place.parent.glob(f"*{SUFFIX}~*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            ours = _lock(file)
            if ours:
                path.unlink()
            elif ours is False:
                busy |= path.name.startswith(f"{place.name}~")
    return busy


def _write(file: BinaryIO, memory: NDArray[np.uint8], key: bytes) -> int:
    """Writes a copy; its bytes."""
    size, sums = memory.size, np.zeros(_pieces(memory.size), np.uint64)
    begin, whole = _begin(size), _begin(size) + size + TAIL
    if shutil.disk_usage(file.name).free < whole + SPARE_BYTES:
        need = f"{readable(whole)} and {readable(SPARE_BYTES)} to spare"
        raise OSError(f"its disk has not {need}")

    def put(piece: int, first: int, end: int) -> None:
        sums[piece] = _core.checksum(memory[first:end])
        while first < end:
            first += os.pwrite(file.fileno(), memory[first:end].data, begin + first)

    file.truncate(whole)
    _in_pieces(size, put)
    os.pwrite(file.fileno(), _mark(key, size) + sums.tobytes(), 0)
    return whole
