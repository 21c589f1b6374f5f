"""One version of a folder: everything read through it belongs together.

A folder is opened, and its files are opened relative to it. A save puts another folder in its
place, and removes the old one; a reader that has it open reads on in it, as long as its files
exist. When one is gone, `read` retries with the folder that is there now. So every reader sees one
whole version, without a lock, whatever is saved meanwhile. Only regular files are read, so no
reader waits for a pipe; with `links` false, links are refused too.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from tinsmith.formats import safetensors_io
from tinsmith.system import disk

T = TypeVar("T")

TRIES = 4  # to find a folder while another takes its place


class Version:
    """See the file's header. It is a context manager that closes the folder."""

    def __init__(self, folder: Path, *, links: bool = True) -> None:
        self.folder = folder
        self._follow = 0 if links else os.O_NOFOLLOW
        self.descriptor = _open_folder(folder, self._follow)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def replaced(self) -> bool:
        """Whether its path now is another folder, or none."""
        own = os.fstat(self.descriptor)
        try:
            return not os.path.samestat(own, self.folder.stat())
        except FileNotFoundError:
            return True

    @property
    def bytes(self) -> int:
        """The total size of the files in the folder."""
        with os.scandir(self.descriptor) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)

    def has(self, name: str) -> bool:
        """Whether it has an entry of that name."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def stat(self, name: str) -> os.stat_result:
        """The stat of one of its files."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=not self._follow)

    def open(self, name: str) -> BinaryIO:
        """Opens one of its files. FileNotFoundError if there is none; ValueError if it is not a
        regular file in the folder."""
        file = self.folder / name
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"{name!r:.80} can't be the name of a file in {self.folder}")
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | self._follow  # does not wait for a pipe
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            raise FileNotFoundError(f"{file} is missing") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise
            raise ValueError(f"{file} is no regular file") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{file} is no regular file")
        return os.fdopen(descriptor, "rb")

    def tensors(self, name: str) -> safetensors_io.Tensors:
        """The tensors of one of its safetensors files."""
        return safetensors_io.open_file(self.folder / name, lambda path: self.open(path.name))

    def share(self, name: str, target: Path, room: Callable[[int], object]) -> None:
        """Hard-links one of its files, or copies it if that is impossible. `room` is called with a
        copy's bytes before it is written."""
        with self.open(name) as file:
            with contextlib.suppress(OSError):
                os.link(name, target, src_dir_fd=self.descriptor, follow_symlinks=False)
                if os.path.samestat(os.fstat(file.fileno()), os.lstat(target)):
                    return
                target.unlink()
            room(os.fstat(file.fileno()).st_size)
            with disk.create(target) as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())

    def replace_json(self, name: str, content: dict[str, Any]) -> None:
        """Replaces one of its files, whole or not at all; the new one keeps the old one's times."""
        temporary = name + "~"
        times = self.stat(name)
        try:
            disk.write_json(temporary, content, self.descriptor)
            stamps = times.st_atime_ns, times.st_mtime_ns
            os.utime(temporary, ns=stamps, dir_fd=self.descriptor)
            os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise
        os.fsync(self.descriptor)


def read(folder: Path, work: Callable[[Version], T], *, links: bool = True) -> T:
    """The result of `work` on one version of a folder; FileNotFoundError if there is no folder."""
    while True:
        with Version(folder, links=links) as version:
            try:
                return work(version)
            except FileNotFoundError:
                if not version.replaced():
                    raise


def _open_folder(folder: Path, follow: int) -> int:
    places = (folder, Path(f"{folder}{disk.ASIDE}"))
    for place in places * TRIES:
        try:
            return os.open(place, os.O_RDONLY | os.O_DIRECTORY | follow)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            break
    raise FileNotFoundError(f"there is no checkpoint at {folder}")
