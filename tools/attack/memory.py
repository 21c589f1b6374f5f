"""Folders in memory, for the programs that try some thousand inputs a second: the code that reads
is the same, but for the opening and mapping of files, and no system call takes its time."""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any, BinaryIO
from unittest import mock

from tinsmith.formats import folder_version, safetensors_io
from tinsmith.models import registry

ROOT = "/memory"
_FILES: dict[str, bytes] = {}


class Memory(PosixPath):
    """A path in the one folder that there is."""

    def __truediv__(self, name: Any) -> "Memory":  # pathlib's own takes long
        return self._from_parsed_parts(self._drv, self._root, [*self._parts, name])

    def resolve(self, strict: bool = False) -> "Memory":
        return self

    def is_file(self) -> bool:
        return self.name in _FILES

    def read_bytes(self) -> bytes:
        return _content(self.name)

    def open(self, *_: Any, **__: Any) -> BinaryIO:  # type: ignore[override]
        return io.BytesIO(self.read_bytes())


class Mapped(bytes):
    """What stands for a file's map."""

    def close(self) -> None:
        """Nothing."""

    def madvise(self, *_: object) -> None:
        """Nothing."""


class Version(folder_version.Version):
    """The folder as one version."""

    def __init__(self) -> None:
        self.folder = Memory(ROOT)

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(_content(name))

    @property
    def bytes(self) -> int:
        return sum(map(len, _FILES.values()))

    def stat(self, name: str) -> os.stat_result:
        return os.stat_result((0o100600, 1, 1, 1, 0, 0, len(_content(name)), 1, 1, 1))


def _content(name: str) -> bytes:
    try:
        return _FILES[name]
    except KeyError:
        raise FileNotFoundError(f"{ROOT}/{name} is missing") from None


@contextmanager
def reading() -> Iterator[None]:
    """Meanwhile the readers of models read in memory."""
    with (
        mock.patch.object(safetensors_io, "_map", lambda file: Mapped(file.getvalue())),
        mock.patch.object(safetensors_io, "Path", Memory),
        mock.patch.object(registry, "Path", Memory),
    ):
        yield


def put(files: Mapping[str, bytes]) -> Path:
    """Fills the folder with these files and no others."""
    _FILES.clear()
    _FILES.update(files)
    return Memory(ROOT)
