"""The bytes that checkpoints take on the disk, and the limit that they may have.

A file that several folders share, as copies do, is counted once. A write asks for its bytes before
it begins, and is refused by a sentence where all of them would pass the limit: nothing is deleted
for it but what has expired, where that was asked for. What the write will replace is not counted,
because it goes; what others write at that moment is, as far as it is there. In one process such
writes follow one another; a file that comes in slowly is looked at only when it begins. Several
processes that share a folder each hold what they see to their own limit, so two that save in the
same moment may pass it by what one of them saves. All files are looked at each time, which for
5,000 checkpoints takes less than a second.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

Files = dict[tuple[int, int], int]  # the bytes of each file, by what is the same for all its names


class Room:
    """The limit of a folder of checkpoints; `most` is None where there is none. `clear` deletes
    what may be deleted for it, and says whether there was anything."""

    def __init__(self, root: Path, most: int | None, clear: Callable[[], object]) -> None:
        self._root = root
        self.most = most
        self._clear = clear
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def take(self, size: int, place: Path) -> Iterator[None]:
        """For as long as something of at most `size` bytes is written, which will take the place of
        what is at `place`. OSError with the sum where it would pass the limit. The log says what
        was not written because of the disk."""
        try:
            with self._lock if self.most is not None else contextlib.nullcontext():
                self.check(size, place)
                yield
        except (FileExistsError, FileNotFoundError):  # it is the client that is told
            raise
        except OSError as error:
            told = str(error.strerror or error)
            log.warning("a save failed: %s", told if str(place) in told else f"{place}: {told}")
            raise

    def check(self, size: int, place: Path) -> None:
        """The same for a moment."""
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
        """The bytes of all checkpoints but the one at `place`, whether they are finished or not."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as entries:
            runs = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            return sum(files_in(*runs, without=[place]).values())
        return 0


def bytes_in(*folders: Path) -> int:
    """The bytes of all files in some folders and below."""
    return sum(files_in(*folders).values())


def files_in(*folders: Path, without: Iterable[Path] = ()) -> Files:
    """All files in some folders and below. Those are left out whose only names are among
    `without`, or below."""
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
