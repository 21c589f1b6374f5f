"""Files and folders that only their owner can read, and changes to them that happen whole or not at
all.

Everything created here has mode 0600 or 0700, whatever the umask. `publish` gives files for others,
such as an exported model, the umask's modes. `put` moves a finished folder to its place; an
existing one is exchanged with it atomically, so at every moment the name is one of the two, whole.
If the file system has no exchange, the old folder is moved aside for a moment, under a name that
folder_version.py knows. `alone` keeps our other threads and processes from changing the same
folder's names meanwhile. Names with a "~" are unfinished. `alone` locks the folder itself: the
package filelock leaves a file beside what it locks (test_checkpoint.py,
test_an_existing_checkpoint_is_kept_unless_overwritten), and `import tinsmith` needs NumPy only.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tinsmith.system.format import readable

FILE_MODE, FOLDER_MODE = 0o600, 0o700
ASIDE = "~old"  # suffix of a folder that is being replaced

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
PRUNE = "`tinsmith prune` frees room"
PROBE_BYTES = 1 << 16  # free space with which anything can be written
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux

_THREADS = threading.Lock()
# A child forked while a thread holds the lock must not wait for that thread.
os.register_at_fork(
    before=_THREADS.acquire, after_in_parent=_THREADS.release, after_in_child=_THREADS.release
)


def create(path: Path | str, folder: int | None = None) -> BinaryIO:
    """A new, empty file to write, in an open folder if one is given."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb", opener=opener))
        os.fchmod(file.fileno(), FILE_MODE)
        stack.pop_all()  # the caller closes it
        return file


def write_json(path: Path | str, content: dict[str, Any], folder: int | None = None) -> None:
    """Writes an object to a new file, on disk when it returns."""
    with create(path, folder) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, each synced to disk in its parent; an existing one keeps its
    mode."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        _make(folder)
    sync(folder.parent)


def _make(folder: Path) -> None:
    folder.mkdir(FOLDER_MODE)
    folder.chmod(FOLDER_MODE)


@contextlib.contextmanager
def unfinished(place: Path, what: str = "checkpoint", size: int = 0) -> Iterator[Path]:
    """A new temporary folder beside a place. It is removed unless it was moved there. The error of
    a full disk says what was to be there, and how large (0: unknown)."""
    folder = place.with_name(f"{place.name}~{secrets.token_hex(4)}")
    try:
        make_folder(place.parent)
        _make(folder)
        yield folder
    except BaseException as error:
        remove(folder)
        if isinstance(error, OSError) and error.errno in FULL:
            raise full(error, f"the {what} {place} was not written", place, size) from None
        raise


def full(error: OSError, what: str, place: Path, size: int = 0) -> OSError:
    """The error of a full disk as a sentence: what was not done, the needed and the free bytes, and
    what frees some."""
    needs = f"it needs {readable(size)}, and " if size else ""
    with contextlib.suppress(OSError, StopIteration):
        disk = os.statvfs(next(folder for folder in place.parents if folder.exists()))
        what += f"; {needs}{readable(disk.f_bavail * disk.f_frsize)} are free"
    return OSError(error.errno, f"{FULL[error.errno or errno.ENOSPC]}: {what}; {PRUNE}")


def check_writes(folder: Path) -> None:
    """Writes a small file without a name; OSError if the folder's disk accepts none."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))  # written to the disk at the latest on closing


def make_open_folder(folder: Path) -> int:
    """Makes a folder with its parents, with the umask's mode, but always accessible to its owner;
    returns the mode."""
    if not folder.is_dir():
        make_open_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(folder.stat().st_mode & 0o777 | FOLDER_MODE)
    return folder.stat().st_mode & 0o777


def publish(path: Path) -> None:
    """Gives a finished file, or a folder with all its content, the umask's modes."""
    probe = path.with_name(f"{path.name}~{secrets.token_hex(4)}")
    mode = make_open_folder(probe)  # the only way to learn the umask without changing it
    probe.rmdir()
    for one in [path, *path.rglob("*")]:
        one.chmod(mode if one.is_dir() else mode & 0o666)


def put(folder: Path, place: Path, *, overwrite: bool) -> None:
    """Moves a finished folder to its place, synced when it returns; what was there is removed.
    FileExistsError if something is there, unless overwrite. After an error nothing has changed."""
    with alone(place.parent) as above:
        move = exchange if os.path.lexists(place) else Path.rename
        if move is exchange and not overwrite:
            raise FileExistsError(f"{place} exists; choose another name")
        move(folder, place)
        try:
            os.fsync(above)
        except BaseException:
            move(place, folder)
            raise
    if move is exchange:
        remove(folder)


def exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two folders, atomically if possible."""
    if _exchange_at_once(one, other):
        return
    aside = other.with_name(other.name + ASIDE)
    remove(aside)
    with contextlib.ExitStack() as undo:
        for source, target in ((other, aside), (one, other), (aside, one)):
            source.rename(target)
            undo.callback(target.rename, source)
        undo.pop_all()


def _exchange_at_once(one: Path, other: Path) -> bool:
    """Linux's renameat2; False if the system or the file system has no exchange."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[int]:
    """A folder's descriptor, while no other thread or process of ours changes the names in it. On a
    file system without locks, other processes may."""
    with _THREADS, _opened(folder) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):  # a forked child may have a copy of it
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def remove(path: Path) -> None:
    """Removes a folder, or anything else at its path, as far as possible, without raising."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync(folder: Path) -> None:
    """Waits until a folder's names are synced to disk."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
