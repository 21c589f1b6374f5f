"""What a forward_backward request does with an adapter.

It is one call of the engine, but for the two requests that the SDK's forward_backward_custom
makes: a forward, and, when the client has evaluated its loss, a forward_backward of the same datums
with cross_entropy's weights set to minus its gradient. The second one then is a backward from the
first one's activations, to the same bits. A request is taken for such a second one only where it is
the run's next and its arrays are the same, so nothing can have changed the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core


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

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """What the model sees, and what it is asked for."""
        return self.tokens, self.lengths, self.targets, self.counts


@dataclass(frozen=True)
class BatchResult:
    """Log-probabilities in each datum's target shape, and the loss's sum."""

    logprobs: tuple[NDArray[np.float32], ...]
    loss: float


@dataclass(frozen=True)
class Kept:
    """A forward whose activations the engine holds: request `seq` of its run."""

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


def forward_backward(
    adapter: _core.Adapter,
    seq: int,
    batch: Batch,
    kept: Kept | None,
    *,
    backward: bool,
    keep: bool,
) -> tuple[BatchResult, Kept | None]:
    """Request `seq` of a run: its result, and what the run's next request may go on from. `kept` is
    what the request before left."""
    if backward and kept is not None and kept.serves(seq, batch):
        weights = batch.inputs.get("weights", np.ones(len(batch.targets), np.float32))
        loss = adapter.backward(-weights)
        return _result(batch, kept.logprobs, loss), None
    keep = keep and not backward and batch.loss == "cross_entropy"
    logprobs, loss = adapter.forward_backward(
        *batch.arrays,
        batch.loss,
        dict(batch.inputs),
        dict(batch.config),
        backward=backward,
        keep=keep,
    )
    return _result(batch, logprobs, loss), Kept(seq, batch, logprobs) if keep else None


def _result(batch: Batch, flat: NDArray[np.float32], loss: float) -> BatchResult:
    ends = np.cumsum([int(np.prod(shape)) for shape in batch.shapes])
    parts = np.split(flat, ends[:-1])
    shaped = zip(parts, batch.shapes, strict=True)
    return BatchResult(tuple(part.reshape(shape) for part, shape in shaped), loss)
