"""What a checkpoint's tensor gives the engine: its matrices and vectors, in the types that they are
kept in, one at a time. All of their numbers are finite, or it is said which is not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import kept, weights
from tinsmith.files.places import Held, Place

BF16 = np.dtype(np.uint16)


@dataclass(frozen=True)
class Piece:
    """One tensor as the engine takes it, and the bytes of the files: with it so far, and in all."""

    slot: str
    layer: int
    index: int
    array: np.ndarray
    done: int
    total: int
    packed: str | None = None  # the array's type, where it has blocks


def arrays(
    tensors: weights.Tensors,
    name: str,
    parts: Sequence[Held],
    kind: str,
    packed: Mapping[kept.Place, str],
) -> Iterator[tuple[Held, np.ndarray, str | None]]:
    """Each part of a tensor as _core.Model.load takes it, and the type of its blocks, if it has
    any: wide ones in `kind`, those in `packed` as they are stored, or as numbers to quantise."""
    stored, wide, blocks = tensors.stored(name), _Part(tensors, name), _Part(tensors, name)
    for one in parts:
        wanted, place = packed.get((one.slot, one.layer)), one.place
        if wanted is not None and wanted == stored:
            array, found = blocks.blocks(place.matrix)
            yield one, np.ascontiguousarray(array[place.slice]), found
            continue
        array = wide.numbers(place.matrix)
        part = _finite(array, place, tensors.entry(name))
        if wanted is None:
            part = _as_kept(part, array, place, kind, tensors.entry(name))
        yield one, part, None


class _Part:
    """The matrix of a tensor that was read last."""

    def __init__(self, tensors: weights.Tensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        self._matrix: int | None = -1
        self._array = np.empty(0)
        self._kind = ""

    def numbers(self, matrix: int | None) -> np.ndarray:
        """As numbers."""
        if matrix != self._matrix:
            self._matrix, self._array = matrix, self._tensors.part(self._name, matrix)
        return self._array

    def blocks(self, matrix: int | None) -> tuple[np.ndarray, str]:
        """As blocks, and their type."""
        if matrix != self._matrix:
            self._matrix = matrix
            self._array, self._kind = self._tensors.blocks(self._name, matrix)
            if kept.suspect(self._array, self._kind) >= 0:
                self._check()
        return self._array, self._kind

    def _check(self) -> None:
        """ValueError where a number of the blocks is not finite, or a scale is none."""
        entry, array = self._tensors.entry(self._name), self._tensors.part(self._name, self._matrix)
        what, first = f"{entry.file}: {self._name}", (self._matrix or 0) * array.size
        weights.check_finite(array, what, entry.shape, first)
        if self._kind.startswith("mxfp4"):
            whole = self._array.reshape(-1, kept.HEADS["mxfp4"][2])
            if (whole[:, 0] == 255).any():
                raise ValueError(f"{what} has a block whose scale is 255, which is no number")


def _finite(array: np.ndarray, place: Place, entry: weights.Entry) -> np.ndarray:
    """A place in a tensor's matrix; ValueError where not all numbers are finite."""
    part = np.ascontiguousarray(place.view(array))
    if _core.first_bad(part) >= 0:
        first = (place.matrix or 0) * array.size
        weights.check_finite(array, f"{entry.file}: {place.tensor}", entry.shape, first)
    return part


def _as_kept(
    part: np.ndarray, array: np.ndarray, place: Place, kind: str, entry: weights.Entry
) -> NDArray[np.float32] | NDArray[np.uint16]:
    """A part of a matrix in its wide type: matrices in `kind`, vectors in float32."""
    if part.ndim == 1 or kind == "f32":
        return weights.widen(part)
    if part.dtype == BF16:
        return part
    narrowed = weights.convert(part, BF16)
    if _core.first_bad(narrowed) >= 0:  # float32's largest are none of bfloat16's
        what, first = f"{entry.file}: {place.tensor}", (place.matrix or 0) * array.size
        weights.check_finite(
            weights.convert(array, BF16), f"{what}, in bfloat16,", entry.shape, first
        )
    return narrowed
