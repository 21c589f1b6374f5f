"""The positions of the engine's matrices and vectors in a checkpoint's tensors, by a family's row.

A tensor may contain one matrix, several that are concatenated or interleaved by rows, or those of
all experts, with outputs as rows or, transposed, as columns. A TensorView says which part of it is
a slot's. It is a view, so nothing is copied too early. All names and shapes are checked first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.formats import config as config_file
from tinsmith.formats import safetensors_io
from tinsmith.models.architecture import Family

Slot = tuple[str, int, int, int, int]  # of a core: slot, layer or -1, index, rows, cols
Slots = Sequence[Slot]

FREQUENCIES = "rotary_emb.inv_freq"  # in old Llama files; config.json gives it too


@dataclass(frozen=True)
class TensorView:
    """A slot's part of a tensor: the `lines` of matrix number `matrix` (None: the tensor is one
    matrix), which are its rows, or the columns of a transposed one. A vector is `flat`: over all
    axes, the lines of the last."""

    tensor: str
    matrix: int | None
    lines: range
    turned: bool
    flat: bool
    rows: int
    cols: int

    @property
    def slice(self) -> slice:
        """Its lines."""
        return slice(self.lines.start, self.lines.stop, self.lines.step)

    def view(self, matrix: np.ndarray) -> np.ndarray:
        """Its view of the tensor's matrix: outputs as rows."""
        if self.flat:
            return matrix[..., self.slice].reshape(-1)
        return (matrix.T if self.turned else matrix)[self.slice]

    def view_in(self, tensor: np.ndarray) -> np.ndarray:
        """Its view of the whole tensor."""
        return self.view(tensor if self.matrix is None else tensor[self.matrix])


@dataclass(frozen=True)
class SlotView:
    """A slot's matrix or vector, and its position."""

    slot: str
    layer: int
    index: int
    place: TensorView


def find_slots(
    family: Family, slots: Slots, tensors: safetensors_io.Tensors, sizes: Mapping[str, Any]
) -> dict[str, list[SlotView]]:
    """The content of each tensor, matrix by matrix, after checking that all slots fit and no tensor
    is left over. `sizes` are the engine's."""
    parts: dict[str, list[Slot]] = {}
    for one in slots:
        if one[0] not in family.constants:
            parts.setdefault(family.tensor(*one[:3]), []).append(one)
    held = {}
    for name, some in parts.items():
        some.sort(key=lambda one: one[2])  # all slots of one expert, then those of the next
        slot, layer, index, *_ = some[0]
        what = slot if layer < 0 else f"layer {layer} {slot}"
        what += f" {index}" if index else ""
        if name not in tensors:
            raise ValueError(f"{what}: the file has no {name}")
        shape, needed = tensors.entry(name).shape, _shapes(family, some, sizes)
        if shape not in needed:
            raise ValueError(f"{what}: file has {shape}, the model needs {needed[0]}")
        held[name] = _places(family, name, some, shape)
    # A tied head may be stored anyway (check_tied); old Llama files store their frequencies.
    ignored = {family.tensor("head", -1)} if sizes["tied"] else set()
    surplus = [
        name
        for name in set(tensors) - set(held) - ignored
        if not name.endswith(FREQUENCIES) and not family.is_aside(name)
    ]
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ValueError(f"the file has {min(surplus)}{more}, which {family.name} does not use")
    return held


def _shapes(
    family: Family, parts: Sequence[Slot], sizes: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """The shapes that a tensor with these slots may have; errors show the first."""
    slot, _, _, _, cols = parts[0]
    rows, count = sum(part[3] for part in parts), len({part[2] for part in parts})
    if tail := family.tails.get(slot):
        return [(cols // math.prod(tail), *tail)]
    if slot in family.heads:
        first = int(sizes[family.heads[slot]])
        return [(first, sum(part[4] for part in parts) // first)]
    if family.stacked(slot):
        matrix = (cols, rows // count) if family.turned else (rows // count, cols)
        return [(count, *matrix)]
    return [(rows, cols)] if rows > 1 else [(cols,), (1, cols)]


def _places(
    family: Family, name: str, parts: Sequence[Slot], shape: tuple[int, ...]
) -> list[SlotView]:
    """The parts of a tensor of this shape, in order."""
    stacked, found, begin = family.stacked(parts[0][0]), [], 0
    flat = len(shape) == 1 or parts[0][0] in family.tails or parts[0][0] in family.heads
    several = sum(part[2] == parts[0][2] for part in parts)  # slots of each matrix
    for number, (slot, layer, index, rows, cols) in enumerate(parts):
        begin = 0 if number % several == 0 else begin
        # A vector's lines are numbers of its last axis: all of them, or its slot's.
        length = shape[-1] // several if flat else rows
        lines = range(begin, begin + length)
        if stacked and family.in_turns:
            lines = range(number % several, several * length, several)
        begin += length
        matrix = index if stacked and not flat else None
        place = TensorView(name, matrix, lines, stacked and family.turned, flat, rows, cols)
        found.append(SlotView(slot, layer, index, place))
    return found


def check_count(folder: Path, config: Mapping[str, Any], tensors: safetensors_io.Tensors) -> None:
    """Refuses a config with more matrices than the files have: their table could take gigabytes."""
    sparse = sum(kind != config_file.DENSE for kind in config["feeds"])
    needed = config["layers"] - sparse + sparse * config["experts"]
    shapes = (tensors.entry(name).shape for name in tensors)
    there = sum(shape[0] if len(shape) > 2 else 1 for shape in shapes)
    if needed > there:
        raise ValueError(
            f"{folder / config_file.CONFIG_FILE} asks for at least {needed:,} matrices: of "
            f"{sparse:,} of its {config['layers']:,} layers {config['experts']:,} experts; the "
            f"files have {there:,}"
        )


ROWS = 4096  # of two tensors that are compared at a time


def check_tied(
    family: Family, tensors: safetensors_io.Tensors, config: Mapping[str, Any], folder: Path
) -> None:
    """Raises ValueError if a tied model stores a head that differs from its embedding: transformers
    then uses both."""
    head, embed = family.tensor("head", -1), family.tensor("embed", -1)
    if not config["tied"] or head not in tensors:
        return
    one, other = tensors[head], tensors[embed]
    same = one.shape == other.shape and all(
        np.array_equal(
            safetensors_io.widen(one[row : row + ROWS]),
            safetensors_io.widen(other[row : row + ROWS]),
        )
        for row in range(0, len(one), ROWS)
    )
    if not same:
        raise ValueError(
            f"{folder / config_file.CONFIG_FILE} has {config_file.TIED}, but the file's {head} is "
            f"not {embed}: write false to take both, or leave {head} out"
        )
