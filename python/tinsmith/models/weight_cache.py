"""Quantised copies: weights in 8 or 4 bits in their memory format, in files of the user's cache.

The first load of a large model with weights int8 or int4 quantises it, writes the copy and uses it;
later loads find it. A copy is mapped read-only: processes share its pages, and untouched parts,
such as the embedding's rows of unused ids, take no memory. It is valid only for the same files and
the same engine, which its key identifies:

  of each of the model's files name, size, times of change (mtime and ctime), and its first MiB,
    which has the header. All bytes would take as long to read as to quantise. ctime
    changes even when mtime is restored;
  config, frequencies, and the type of each matrix;
  the code: the engine's (_core.weights_code) and the files of this folder, which read the models.

A file is a head (MARK, key, bytes, a checksum of each PIECE) and the memory. It is written to a
temporary name, under a lock, and renamed when it is complete. Every load compares all checksums, so
nothing needs to be synced: a copy damaged by a crash or a failing disk is written again. If a copy
can't be written, that is only a warning.
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
SPARE_BYTES = 1 << 30  # that stay free on the disk beside a copy
MARK = b"tinsmith weights"
PIECE = 1 << 22
PAGE = 1 << 16  # no machine's pages are larger
TAIL = 4096  # after the memory: a product may load a whole tile there
HEADER_BYTES = 1 << 20
THREADS_MAX = 4  # more threads do not read faster


@dataclass(frozen=True)
class Copy:
    """The path of a model's copy, existing or not, and what it depends on."""

    file: Path
    title: str  # the weights' name in messages
    size: int  # of the weights
    sources: tuple[Path, ...]
    facts: str

    def key(self) -> bytes:
        """A hash of the model's current files, and of all else that determines the bytes."""
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
        """Whether a copy seems to exist; its bytes are compared when it is mapped."""
        try:
            with self.file.open("rb") as file:
                return file.read(len(_mark(bytes(32), 0))) == _mark(self.key(), self.size)
        except OSError:
            return False

    def map(self, core: _core.Model, key: bytes, *, checked: bool = False) -> bool:
        """Maps the copy's weights into an empty core; False if there is no copy with this key, or
        it is damaged. `checked`: it was written just now."""
        size = core.weight_bytes
        try:
            with self.file.open("rb", buffering=0) as file:
                head = file.read(_head(size))
                if not head.startswith(_mark(key, size)):
                    return False  # of other files, or of other code
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
        """Writes the copy of a loaded core. Returns the core to use: a new one from `again` whose
        weights are the copy's file, or the same one if there is no copy."""
        core.seal()
        if not self.write(core, key):
            return core
        mapped = again()
        return mapped if self.map(mapped, key, checked=True) else core

    def write(self, core: _core.Model, key: bytes) -> bool:
        """Writes a sealed core's weights; False if another process is writing, or if it fails,
        which is logged as a warning."""
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
    """The copy of a model that is loaded in fewer bits and takes `size` bytes of memory; None if it
    gets none. `facts` are what its weights depend on, besides its files."""
    if not worth(kind, device, size):
        return None
    text = json.dumps([facts, _core.weights_code(), _readers(), sys.byteorder], sort_keys=True)
    name = _name(folder)
    mark = hashlib.sha256(repr((str(folder), facts)).encode()).hexdigest()[:12]
    return Copy(
        home.copies_folder() / f"{name}-{kind}-{mark}{SUFFIX}",
        f"the {kind} weights of {name}",
        size,
        tuple(sorted({folder / CONFIG_FILE, *sources})),  # it has the quantisation
        text,
    )


def worth(kind: str, device: str, size: int) -> bool:
    """Whether a model with such weights and size gets a copy. On a GPU none does: its memory can't
    be mapped from a file. Nor does one with several stages: each has a memory of its own."""
    one = device.startswith("cpu") and "," not in device
    return kind in weight_dtypes.BITS and one and size >= LEAST_BYTES


def copies() -> dict[Path, int]:
    """The bytes of all copies, and of unfinished ones from killed processes."""
    found = {}
    for path in sorted(home.copies_folder().glob(f"*{SUFFIX}*")):
        with contextlib.suppress(OSError):  # gone meanwhile
            found[path] = path.lstat().st_size
    return found


def _name(folder: Path) -> str:
    """A model folder's name; in the hub's cache the folder itself is named after a commit."""
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    return folder.name.rpartition("--")[2] or "model"


@cache
def _readers() -> str:
    """A hash of the code that reads models."""
    found = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted((*package.glob("formats/*.py"), *package.glob("models/*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()


# ---- the file ----


def _pieces(size: int) -> int:
    return -(-size // PIECE)


def _head(size: int) -> int:
    """The bytes of the head of a copy of `size` bytes."""
    return len(MARK) + hashlib.sha256().digest_size + 8 + 8 * _pieces(size)


def _begin(size: int) -> int:
    """The position of the memory in the file."""
    return -(-_head(size) // PAGE) * PAGE


def _in_pieces(size: int, work: Callable[[int, int, int], None]) -> None:
    """Calls work(piece, from, to) for all pieces, in several threads; raises the first error."""
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))

    def run(first: int) -> None:
        for piece in range(first, _pieces(size), threads):
            work(piece, piece * PIECE, min(size, (piece + 1) * PIECE))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def _mark(key: bytes, size: int) -> bytes:
    """The beginning of the head; the checksums follow."""
    return MARK + key + size.to_bytes(8, "little")


def _check(file: int, head: bytes, size: int) -> None:
    """Raises ValueError if a copy is not as it was written. Its bytes are read, not mapped: so they
    take no memory of this process, and a file that is truncated meanwhile can't crash it."""
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
    """A new file, which is moved to its place at the end; None while another process writes the
    same. Unfinished files of killed processes are removed."""
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
    """Locks a file while it is open: False if another process has the lock, None if the file system
    has no locks. NFS needs the file to be open for writing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(place: Path) -> bool:
    """Removes abandoned files; returns whether one for this place is being written."""
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
    """Writes a copy; returns its bytes."""
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
