"""The bytes of checkpoints on disk, and their limit.

A file that several folders share, such as copies, is counted once. A write reserves its bytes
before it begins, and is refused with a sentence if the total would exceed the limit: nothing is
deleted for it except expired checkpoints, if the store expires them. The checkpoint that the write
replaces is not counted; other writes in progress are, as far as they are on disk. In one process
such writes run one after the other; a file that arrives slowly is checked only at its start.
Several processes with one folder each check their own limit, so two that save at the same time may
exceed it by one save. All files are looked at each time, which takes less than a second for 5,000
checkpoints.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

Files = dict[tuple[int, int], int]  # the bytes of each file, by its device and inode


class Quota:
    """The limit of a folder of checkpoints; `most` None: no limit. `clear` deletes what may be
    deleted for it, and returns whether it deleted anything."""

    def __init__(self, root: Path, most: int | None, clear: Callable[[], object]) -> None:
        self._root = root
        self.most = most
        self._clear = clear
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def reserve(self, size: int, place: Path) -> Iterator[None]:
        """A context for writing at most `size` bytes, which will replace what is at `place`.
        OSError with the sum if that would exceed the limit. Failures of the disk are logged."""
        try:
            with self._lock if self.most is not None else contextlib.nullcontext():
                self.check(size, place)
                yield
        except (FileExistsError, FileNotFoundError):  # reported to the client only
            raise
        except OSError as error:
            told = str(error.strerror or error)
            log.warning("a save failed: %s", told if str(place) in told else f"{place}: {told}")
            raise

    def check(self, size: int, place: Path) -> None:
        """Checks the limit once."""
        if self.most is None:
            return
        with self._lock:
            kept = self._kept(place)
            if kept + size > self.most and self._clear():
                kept = self._kept(place)
        if kept + size > self.most:
            raise OSError(
                f"nothing was written, because the checkpoints in {self._root} may take "
                f"{readable(self.most)} (--checkpoints-max): {readable(kept)} are kept, and this "
                f"needs {readable(size)}; `tinsmith prune` frees room, and so does deleting "
                "checkpoints through the server"
            )

    def _kept(self, place: Path) -> int:
        """The bytes of all checkpoints except the one at `place`, finished or not."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as entries:
            runs = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            return sum(files_in(*runs, without=[place]).values())
        return 0


def bytes_in(*folders: Path) -> int:
    """The bytes of all files in folders and their subfolders."""
    return sum(files_in(*folders).values())


def files_in(*folders: Path, without: Iterable[Path] = ()) -> Files:
    """All files in folders and their subfolders, except files whose only names are in or below
    `without`."""
    found: Files = {}
    others = {str(path) for path in without}
    for folder in folders:
        for above, below, names in os.walk(folder):
            below[:] = [name for name in below if f"{above}/{name}" not in others]
            for place in (f"{above}/{name}" for name in names):
                with contextlib.suppress(OSError):  # gone meanwhile
                    stat = os.lstat(place)
                    if place not in others:
                        found[stat.st_dev, stat.st_ino] = stat.st_size
    return found
