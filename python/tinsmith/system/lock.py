"""The lock of a folder of checkpoints: one server, or several that share it.

A file in the folder is locked (flock) while a server runs; the kernel releases the lock when the
process ends, for any reason. The file names the holder, for the refusal of a second server. Servers
that share a folder, as recipes do and all on the default folder, hold a shared lock: each writes to
its own runs. A forked process closes its copy, so that no child holds its parent's lock. On a file
system without locks there is none, which is logged.

The package filelock has no shared lock over a file that names the holders, and no step from
exclusive to shared: test_store.py, test_runs_share_a_folder_and_clear_nothing_of_each_other.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinsmith.system import disk

log = logging.getLogger("tinsmith")

LOCK_FILE = "server.lock"
LINES_MAX = 1 << 16  # bytes of the file that are read
WAIT_SECONDS = 5.0  # how long to wait for another process that opens the folder too
TURN_SECONDS = 0.02


class FolderInUse(OSError):
    """A folder is used by others, which the sentence names. `addresses` are those of its servers on
    this machine."""

    def __init__(self, sentence: str, addresses: Sequence[str]) -> None:
        super().__init__(sentence)
        self.addresses = list(addresses)


_held: weakref.WeakSet["FolderLock"] = weakref.WeakSet()


class FolderLock:
    """See the file's header. `first` is true if no other held the lock when it was taken."""

    def __init__(self, folder: Path, address: str, *, shared: bool) -> None:
        self.first = True
        self._descriptor: int | None = None
        self._file = folder / LOCK_FILE
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(self._file, flags, disk.FILE_MODE)
            os.fchmod(self._descriptor, disk.FILE_MODE)
            taken = self._take(shared)
        except OSError as error:
            self.close()
            log.warning(
                "%s can't be locked (%s): nothing keeps a second server from using %s",
                self._file,
                error.strerror,
                folder,
            )
            return
        if not taken:
            raise self._refusal()
        _held.add(self)
        self._tell(address)

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a child may have a copy of the descriptor
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """Closes this process's copy of the lock; others keep it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, shared: bool) -> bool:
        """Takes the lock exclusively or, if `shared`, with others; returns whether it could."""
        assert self._descriptor is not None
        end = time.monotonic() + WAIT_SECONDS
        while not _locks(self._descriptor, fcntl.LOCK_EX):
            if shared and _locks(self._descriptor, fcntl.LOCK_SH):
                self.first = False
                break
            if not shared or time.monotonic() > end:
                return False
            time.sleep(TURN_SECONDS)
        return True

    def share(self) -> None:
        """Changes the exclusive lock into a shared one."""
        # For a moment no process holds it.
        if self._descriptor is not None and not _locks(self._descriptor, fcntl.LOCK_SH):
            raise self._refusal()

    def _tell(self, address: str) -> None:
        assert self._descriptor is not None
        line = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": address,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with contextlib.suppress(OSError):  # a full disk: the lock is held anyway
            if self.first:
                os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def _refusal(self) -> FolderInUse:
        holders = list(_holders(self._file))
        self.close()
        who = " and ".join(said for said, _ in holders) or "an unknown process"
        return FolderInUse(
            f"the folder {self._file.parent} is used by another tinsmith server: {who}; stop it, "
            "or choose another folder with --checkpoints",
            [address for _, address in holders if address],
        )


def _locks(descriptor: int, how: int) -> bool:
    """Locks an open file without waiting; returns whether it could."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(file: Path) -> Iterator[tuple[str, str]]:
    """The named holders of a lock that are still alive, each with its address on this machine, if
    it has one."""
    for line in file.read_bytes()[:LINES_MAX].splitlines():
        try:
            told: dict[str, Any] = json.loads(line)
            here = told["host"] == socket.gethostname()
            who = f"process {int(told['pid'])}"
            if told["pid"] == os.getpid():
                who = "this process"
            if not here:
                who += f" on {told['host']:.100}"
            elif not _lives(int(told["pid"])):
                continue
            where = f" at {told['address']:.100}" if told["address"] else ""
            said = f"{who}{where} since {told['since']:.40}"
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        yield said, str(told["address"]) if here else ""


def addresses(folder: Path) -> list[str]:
    """The addresses of the servers on this machine that use a folder now."""
    holders = _holders(folder / LOCK_FILE) if is_held(folder) else ()
    return [address for _, address in holders if address]


def is_held(folder: Path) -> bool:
    """Whether a server uses a folder now. For a moment this process holds the lock, too."""
    with contextlib.suppress(OSError):  # there is no such file, or no locks
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        with os.fdopen(descriptor):
            held = not _locks(descriptor, fcntl.LOCK_EX)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked now may have a copy
            return held
    return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # also if it is another user's
        return not isinstance(error, ProcessLookupError)
    return True


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_all)
