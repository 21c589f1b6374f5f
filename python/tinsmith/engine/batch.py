"""The data of training requests, and their results: flat arrays of datums, one after another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.teachers import Teacher
from tinsmith.losses.graph import CustomLoss

Ids: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True)
class Uploaded:
    """A custom loss, and of each datum the arrays that it takes after logprobs."""

    loss: CustomLoss
    inputs: tuple[tuple[NDArray[Any], ...], ...]


@dataclass(frozen=True)
class Batch:
    """Datums one after another; see _core.Adapter.forward_backward for the flat layouts."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    targets: NDArray[np.int32]
    counts: NDArray[np.int32]
    loss: str
    inputs: Mapping[str, NDArray[np.float32]]
    config: Mapping[str, float]
    shapes: tuple[tuple[int, ...], ...]  # of each datum's targets: (N,) or (N, K)
    teacher: Teacher | None = None  # of a loss that has one
    uploaded: Uploaded | None = None  # where loss is "custom"
    recorded: bool = False  # whether its logprobs are the sampler's, on record

    @property
    def arrays(self) -> tuple[Ids, Ids, Ids, Ids]:
        """The arrays of the model's input and of its targets."""
        return self.tokens, self.lengths, self.targets, self.counts

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        arrays: list[NDArray[Any]] = [*self.arrays, *self.inputs.values()]
        if self.teacher is not None:
            arrays += [self.teacher.tokens, self.teacher.lengths]
        if self.uploaded is not None:
            arrays += [array for datum in self.uploaded.inputs for array in datum]
        return sum(array.nbytes for array in arrays)

    def shaped(self, flat: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Flat numbers in the shapes of the datums' targets."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = np.split(flat, ends[:-1])
        return tuple(part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True))


@dataclass(frozen=True)
class BatchResult:
    """Log-probabilities in each datum's target shape, and the loss's sum. Also the loss's other
    metrics, by names that end in how they add up, and its other arrays of N rows, by name."""

    logprobs: tuple[NDArray[np.float32], ...]
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, tuple[NDArray[np.float32], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptForward:
    """A forward with its activations in the engine: request `seq` of its run."""

    seq: int
    batch: Batch
    logprobs: NDArray[np.float32]

    def serves(self, seq: int, batch: Batch) -> bool:
        """Whether request `seq` is the backward of this forward."""
        return (
            seq == self.seq + 1
            and batch.loss == "cross_entropy"
            and all(map(np.array_equal, batch.arrays, self.batch.arrays))
        )
