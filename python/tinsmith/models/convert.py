"""Reads a checkpoint's tensors for the engine: matrices and vectors as they are stored, one at a
time. The engine converts them, and checks in the same pass that all numbers are finite. Only if one
is not, they are read again here, to say which."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.formats.tensor_files import open_tensors
from tinsmith.models import weight_dtypes
from tinsmith.models.tensor_views import SlotView

BF16 = np.dtype(np.uint16)
MXFP4_BYTES, NO_POWER = 17, 255  # bytes of a block, whose first is a power of 2; the code for none


@dataclass(frozen=True)
class WeightPart:
    """One tensor for the engine, and the bytes of the files: up to and including it, and in all."""

    slot: str
    layer: int
    index: int
    array: np.ndarray
    done: int
    total: int
    packed: str | None = None  # the array's block type, if it has blocks
    refuse: Callable[[], None] = lambda: None  # raises ValueError if a number is not finite
    leave: Callable[[], None] = lambda: None  # its bytes are not needed again soon

    def load(self, core: _core.Model) -> None:
        """Loads it into an engine's model. ValueError names a number that is not finite by its name
        in the file."""
        try:
            core.load(self.slot, self.layer, self.array, self.index, self.packed)
        except ValueError:
            self.refuse()
            raise
        self.leave()


def arrays(
    tensors: safetensors_io.Tensors,
    name: str,
    parts: Sequence[SlotView],
    packed: Mapping[weight_dtypes.Place, str],
) -> Iterator[tuple[SlotView, np.ndarray, str | None]]:
    """Each part of a tensor for _core.Model.load, with its block type, if any: the parts in
    `packed` stay as they are stored; others become numbers, vectors in float32."""
    stored, wide, blocks = (
        tensors.stored(name),
        _LastTensor(tensors, name),
        _LastTensor(tensors, name),
    )
    for one in parts:
        wanted, place = packed.get((one.slot, one.layer)), one.place
        if wanted is not None and wanted == stored:
            array, found = blocks.blocks(place.matrix)
            yield one, np.ascontiguousarray(array[place.slice]), found
            continue
        part = np.ascontiguousarray(place.view(wide.numbers(place.matrix)))
        yield one, safetensors_io.widen(part) if part.ndim == 1 else part, None


def refuse(path: Path, one: SlotView, kind: str, packed: Mapping[weight_dtypes.Place, str]) -> None:
    """Raises ValueError if a number of a model's matrix is not finite, or would not be finite in
    bfloat16 if it is converted to that; or if a scale is NaN."""
    narrow = kind == "bf16" and one.place.rows > 1 and (one.slot, one.layer) not in packed
    refuse_numbers(path, one.place.tensor, narrow, one.place.matrix)


def refuse_numbers(path: Path, name: str, narrow: bool, matrix: int | None = None) -> None:
    """The same for a tensor, or one of its matrices, that is converted if it is `narrow`."""
    with open_tensors(path) as tensors:
        entry, array = tensors.entry(name), tensors.part(name, matrix)
        what, first = f"{entry.file}: {name}", (matrix or 0) * array.size
        safetensors_io.check_finite(array, what, entry.shape, first)
        if narrow:
            array = safetensors_io.convert(array, BF16)
            safetensors_io.check_finite(array, f"{what}, in bfloat16,", entry.shape, first)
        if (tensors.stored(name) or "").startswith("mxfp4"):
            blocks, _ = tensors.blocks(name, matrix)
            if (blocks.reshape(-1, MXFP4_BYTES)[:, 0] == NO_POWER).any():
                raise ValueError(f"{what} has a block whose scale is 255, which is no number")


class _LastTensor:
    """The last matrix of a tensor that was read."""

    def __init__(self, tensors: safetensors_io.Tensors, name: str) -> None:
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
        return self._array, self._kind
