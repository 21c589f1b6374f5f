"""The sequences of one training call, flattened for the engine.

A sequence has its tokens (N,), its targets (N,) or (N, K), and the loss's other inputs in the
targets' shape. A call has one sequence, or a list of each of these. Shapes and types are checked
here; the engine checks ids, lengths and numbers before any work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.api.images import has_image, ids_of, images_of, is_batch
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.loss_names import loss_hint
from tinsmith.engine.teachers import Teacher
from tinsmith.engine.training import Batch
from tinsmith.ops import tensors

Ids: TypeAlias = NDArray[np.int32]
LOSSES = {row["name"]: row for row in _core.losses()}


@dataclass(frozen=True)
class Datums:
    """Flat arrays (see _core.Adapter.forward_backward), and the form in which they came."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    targets: NDArray[np.int32]
    counts: NDArray[np.int32]
    shapes: tuple[tuple[int, ...], ...]  # of each sequence's targets
    given: tuple[Any, ...]  # the targets as given: results get the same kind of array
    batch: bool  # whether the arguments were lists
    images: tuple[HeldImage, ...]  # whose ids are among the tokens

    @property
    def arrays(self) -> tuple[Ids, Ids, Ids, Ids]:
        """The arrays of the model's input and of its targets."""
        return self.tokens, self.lengths, self.targets, self.counts

    def as_batch(
        self,
        loss: str,
        inputs: dict[str, NDArray[np.float32]],
        config: dict[str, float],
        taught: tuple[Ids, Ids] | None = None,
    ) -> Batch:
        """A training call of them; `taught` are a teacher's tokens and their lengths."""
        teacher = None if taught is None else Teacher(*taught, "", 0.0)
        return Batch(*self.arrays, loss, inputs, config, self.shapes, teacher, images=self.images)

    def flat(self, values: Any, name: str, *, by_row: bool = False) -> NDArray[np.float32]:
        """Numbers shaped like the targets, concatenated. With by_row also (N,): one number for each
        row of (N, K)."""
        parts = []
        for index, item in enumerate(_items(values, name, self)):
            where = f"{name}[{index}]" if self.batch else name
            array = tensors.to_floats(item, where)
            shape = self.shapes[index]
            if by_row and len(shape) == 2 and array.shape == shape[:1]:
                array = np.broadcast_to(array[:, None], shape)
            if array.shape != shape:
                raise ValueError(
                    f"{where} has shape {array.shape}, its targets have {shape}: they must agree"
                )
            parts.append(array)
        return joined(parts)

    def split(self, flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Flat numbers split into one array for each sequence, shaped like its targets."""
        return tensors.split(flat, self.shapes)

    def as_given(self, arrays: Sequence[NDArray[np.float32]]) -> Any:
        """One array, or a list of them if lists were given, in the targets' kind of array."""
        kinds = [tensors.like(*pair) for pair in zip(self.given, arrays, strict=True)]
        return kinds if self.batch else kinds[0]

    def shaped(self, flat: NDArray[np.float32]) -> Any:
        """`split`, then `as_given`."""
        return self.as_given(self.split(flat))


def gather(tokens: Any, targets: Any) -> Datums:
    """Flattens tokens and targets: one sequence, or a list of as many of each."""
    batch = is_batch(tokens)
    if not batch:
        tokens, targets = [tokens], [targets]
    elif not isinstance(targets, list | tuple) or len(targets) != len(tokens):
        came = len(targets) if isinstance(targets, list | tuple) else type(targets).__name__
        raise ValueError(f"tokens is a list of {len(tokens)}; targets must be one too, {came} came")
    rows = sequences(tokens, "tokens", batch)
    wanted = [
        _targets(target, f"targets[{index}]" if batch else "targets", len(rows[index]))
        for index, target in enumerate(targets)
    ]
    return Datums(
        tokens=joined(rows),
        lengths=np.asarray([len(row) for row in rows], np.int32),
        targets=joined(wanted),
        counts=np.asarray([item.shape[1] if item.ndim == 2 else 1 for item in wanted], np.int32),
        shapes=tuple(item.shape for item in wanted),
        given=tuple(targets),
        batch=batch,
        images=images_of(tokens),
    )


def sequences(tokens: Sequence[Any], name: str, batch: bool) -> list[NDArray[np.int32]]:
    """The ids of each sequence; with `batch`, errors name the sequence's index."""
    return [
        sequence(item, f"{name}[{index}]" if batch else name) for index, item in enumerate(tokens)
    ]


def sequence(tokens: Any, name: str) -> NDArray[np.int32]:
    """The ids of one sequence, (N,)."""
    array = ids_of(tokens, name) if has_image(tokens) else tensors.to_ids(tokens, name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be one sequence, of shape (N,), {array.shape} came; several are a list, "
            "each of its own length, without padding"
        )
    return array


def teachers(tokens: Any, datums: Datums) -> tuple[Ids, Ids]:
    """The teacher's ids, one sequence for each of the student's, and their lengths."""
    batch = tensors.is_batch(tokens)
    read = sequences(tokens if batch else [tokens], "teacher_tokens", batch)
    if (batch, len(read)) != (datums.batch, len(datums.lengths)):
        raise ValueError(
            f"tokens has {len(datums.lengths)} sequences, teacher_tokens {len(read)}: a list for a "
            "list, of as many"
        )
    return joined(read), np.asarray([len(row) for row in read], np.int32)


def _targets(targets: Any, name: str, length: int) -> NDArray[np.int32]:
    array = tensors.to_ids(targets, name)
    if array.ndim not in (1, 2) or len(array) != length:
        raise ValueError(
            f"{name} has shape {array.shape}; for {length} tokens it must be ({length},) or "
            f"({length}, K)"
        )
    return array


INPUTS, CONFIG = "loss_fn_inputs", "loss_fn_config"


def checked(
    loss_fn: str, inputs: Any, config: Any, datums: Datums
) -> tuple[dict[str, NDArray[np.float32]], dict[str, float]]:
    """A loss's checked loss_fn_inputs, flat, and loss_fn_config. A value None means missing."""
    row = LOSSES.get(loss_fn)
    if row is None:
        known = sorted(name for name, row in LOSSES.items() if not row["taught"])
        hint = loss_hint(str(loss_fn), known)
        raise ValueError(f"there is no loss {loss_fn!r}; there are {known}{hint}")
    arrays = {item["name"]: item["required"] for item in row["inputs"]}
    numbers = {name: default is None for name, default in row["config"].items()}
    inputs = _named(inputs, INPUTS, arrays, f"{CONFIG} of {loss_fn}", numbers)
    config = _named(config, CONFIG, numbers, f"{INPUTS} of {loss_fn}", arrays)
    missing = [name for name, needed in arrays.items() if needed and name not in inputs]
    missing += [name for name, needed in numbers.items() if needed and name not in config]
    if missing:
        raise TypeError(f"{loss_fn} needs {', '.join(missing)}")
    flat = {
        name: datums.flat(value, name, by_row=row["taught"] and name == "weights")
        for name, value in inputs.items()
    }
    return flat, {name: tensors.to_number(value, name) for name, value in config.items()}


def _named(
    values: Any, title: str, known: Iterable[str], other: str, others: Iterable[str]
) -> dict[str, Any]:
    """The values that are not None, of a loss's inputs or of its configuration."""
    if not isinstance(values, Mapping | None):
        raise TypeError(f"{title} must be a dict, {type(values).__name__} came")
    given = {name: value for name, value in (values or {}).items() if value is not None}
    for name in sorted(given.keys() - set(known)):
        where = f"it is of the {other}" if name in others else f"this loss takes {sorted(known)}"
        raise TypeError(f"{title} has no {name!r} here: {where}")
    return given


def _items(values: Any, name: str, datums: Datums) -> Sequence[Any]:
    if not datums.batch:
        return [values]
    if not isinstance(values, list | tuple) or len(values) != len(datums.shapes):
        came = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise ValueError(f"{name} must be a list of {len(datums.shapes)} arrays, {came} came")
    return values


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One sequence's array without a copy, or several sequences' arrays concatenated."""
    flat = [part.reshape(-1) for part in parts]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)
