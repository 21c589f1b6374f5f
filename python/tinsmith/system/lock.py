"""The lock of a folder of checkpoints: who keeps it, and that nobody else does.

A file in the folder is locked (flock) for as long as a server runs; the kernel releases the lock
when the process ends, however it ends. The file says who holds it, for the refusal of a second
server. Those that share it, as recipes do and all on the default folder, hold the lock together:
each writes to runs of its own. A process that is forked gives its copy up, so that no child holds
a lock of its parent's. On a file system without locks there is none, and the log says so.

The package filelock has no lock that several share over a file that says who they are, nor a step
from alone to shared: test_store.py, test_runs_share_a_folder_and_clear_nothing_of_each_other.
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
WAIT_SECONDS = 5.0  # for one who opens the folder at the same time, to share it
TURN_SECONDS = 0.02


class FolderInUse(OSError):
    """A folder is used by others: the sentence says by whom. `addresses` are those of the servers
    among them that run on this machine."""

    def __init__(self, sentence: str, addresses: Sequence[str]) -> None:
        super().__init__(sentence)
        self.addresses = list(addresses)


_held: weakref.WeakSet["FolderLock"] = weakref.WeakSet()


class FolderLock:
    """See the file's header. `first` says that no other held it when it was taken."""

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
        """Gives the lock back."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a child may have a copy of the descriptor
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """Closes this process's copy of the lock, which others hold further."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, shared: bool) -> bool:
        """Takes the lock alone; or, to share it, becomes one of those who do. Whether it could."""
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
        """Lets others share the lock, which was held alone until now."""
        # For a moment nobody holds it.
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
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
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
    """Locks an open file, without waiting; whether it could."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(file: Path) -> Iterator[tuple[str, str]]:
    """Those who said that they hold a lock and still live; and the address at which this machine
    reaches them, if there is one."""
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
    """Those of the servers on this machine that use a folder now."""
    holders = _holders(folder / LOCK_FILE) if is_held(folder) else ()
    return [address for _, address in holders if address]


def is_held(folder: Path) -> bool:
    """Whether a server uses a folder now. It looks for a moment as if this process did."""
    with contextlib.suppress(OSError):  # there is no such file, or there are no locks
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        with os.fdopen(descriptor):
            held = not _locks(descriptor, fcntl.LOCK_EX)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that is forked now may have a copy
            return held
    return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # also where it is another user's
        return not isinstance(error, ProcessLookupError)
    return True


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_all)
