"""Tensors of a safetensors folder that are stored as several: codes, and their scales. `Folder`
shows each as one tensor; quantization.py has the methods."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.formats import safetensors_io

# The engine's blocks (csrc/device/dtype.c): numbers per block, and bytes of a float32 scale.
BLOCK, SCALE_BYTES = 32, 4

Bytes = Callable[[safetensors_io.Entry], NDArray[np.uint8]]  # of an entry, as in the file


@dataclass(frozen=True)
class Stored(ABC):
    """One tensor: its visible entry, the entries of its parts, and its block type."""

    entry: safetensors_io.Entry
    sources: tuple[safetensors_io.Entry, ...]
    kind: str | None  # csrc/device/dtype.c's; None: the engine does not have its blocks

    @abstractmethod
    def numbers(self, read: Bytes, matrix: int | None) -> np.ndarray:
        """Its numbers, or those of one of its matrices."""

    @abstractmethod
    def blocks(self, read: Bytes, matrix: int | None) -> tuple[np.ndarray, str]:
        """safetensors_io.Tensors.blocks."""


class Folder(safetensors_io.Tensors):
    """The tensors of a folder; those that are stored as several appear as one each."""

    def __init__(self, plain: safetensors_io.Tensors) -> None:
        super().__init__([])
        self.metadata = plain.metadata
        self._maps = plain._maps
        self._entries = dict(plain._entries)
        self._stored: dict[str, Stored] = {}

    def take(self, name: str, *types: str, of: str) -> safetensors_io.Entry:
        """An entry that is a part of the tensor `of`; it is no longer listed as a tensor."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise ValueError(f"the files have no {name}, which belongs to {of}")
        if entry.dtype not in types:
            wanted = " or ".join(types)
            raise ValueError(f"{entry.file}: {name} is {entry.dtype}; it should be {wanted}")
        return entry

    def put(self, name: str, stored: Stored) -> None:
        """Adds the tensor that those parts form."""
        if name in self._entries:
            raise ValueError(f"{stored.entry.file}: {name} is there beside the parts of it")
        self._entries[name], self._stored[name] = stored.entry, stored

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._stored:
            return super().__getitem__(name)
        shape = self.entry(name).shape
        if len(shape) == 2:
            return self.part(name, None)
        return np.stack([self.part(name, matrix) for matrix in range(shape[0])])

    def sources(self, name: str) -> tuple[safetensors_io.Entry, ...]:
        return self._stored[name].sources if name in self._stored else super().sources(name)

    def part(self, name: str, matrix: int | None) -> np.ndarray:
        found = self._stored.get(name)
        if found is None or (matrix is None) != (len(found.entry.shape) == 2):
            return super().part(name, matrix)
        return found.numbers(self.bytes, matrix)

    def stored(self, name: str) -> str | None:
        return self._stored[name].kind if name in self._stored else super().stored(name)

    def blocks(self, name: str, matrix: int | None) -> tuple[np.ndarray, str]:
        return self._stored[name].blocks(self.bytes, matrix)

    def bytes(self, entry: safetensors_io.Entry) -> NDArray[np.uint8]:
        """All of an entry's bytes."""
        return np.frombuffer(self._maps[entry.file], np.uint8, entry.size, entry.begin)
