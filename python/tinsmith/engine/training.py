"""The data of training requests, and forward_backward on an adapter.

A forward_backward is one call of the engine, except for the two requests that the SDK's
forward_backward_custom makes: a forward, and, when the client has evaluated its loss, a
forward_backward of the same datums with cross_entropy's weights set to minus its gradient. The
second one is then a backward from the first one's activations, to the same bits. This shortcut is
taken only if the request is the run's next one and its arrays are the same, so nothing can have
changed the weights.

A loss that the client has uploaded is evaluated between a forward and a backward in the same way.

`between` is called between two micro-batches of the engine's calls: see _core.pyi.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints import peft
from tinsmith.checkpoints.optimizers import OPTIMIZERS, Params
from tinsmith.engine import routing
from tinsmith.engine.devices import say_notes
from tinsmith.engine.teachers import LOGPROBS, Teacher, divergences, metrics
from tinsmith.losses.custom_loss import evaluate
from tinsmith.losses.graph import CustomLoss
from tinsmith.models.registry import LoadedModel

# Is called with the number of micro-batches that are done, and of all.
Between = Callable[[int, int], None]

GAP_MAX = 700.0  # of log-probabilities, in a metric: its exponential is finite


@dataclass(frozen=True)
class Uploaded:
    """A custom loss, and of each datum the arrays that it takes after logprobs."""

    loss: CustomLoss
    inputs: tuple[tuple[NDArray[Any], ...], ...]


@dataclass(frozen=True)
class StateSpec:
    """An adapter that starts from a checkpoint's folder."""

    folder: Path
    optimizer: bool
    created: str | None = None  # when the checkpoint was saved; another one is refused
    kind: str | None = None  # its optimizer from here on; None: the checkpoint's

    def load(self, base: LoadedModel) -> peft.Loaded:
        """It, on its base model."""
        return peft.load(
            self.folder, base, optimizer=self.optimizer, created=self.created, kind=self.kind
        )


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
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """The arrays of the model's input and of its targets."""
        return self.tokens, self.lengths, self.targets, self.counts


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


def forward_backward(
    adapter: _core.Adapter,
    seq: int,
    batch: Batch,
    kept: KeptForward | None,
    *,
    backward: bool,
    keep: bool,
    between: Between,
) -> tuple[BatchResult, KeptForward | None]:
    """Request `seq` of a run: returns its result, and the kept forward for the run's next request.
    `kept` is the one of the request before."""
    result, kept = _call(adapter, seq, batch, kept, backward=backward, keep=keep, between=between)
    return _routed(adapter, result), kept


def _routed(adapter: _core.Adapter, result: BatchResult) -> BatchResult:
    """The result with what is told of a mixture's experts."""
    if (counts := adapter.routed) is None:
        return result
    return replace(result, metrics=dict(result.metrics) | routing.metrics(counts))


def _call(
    adapter: _core.Adapter,
    seq: int,
    batch: Batch,
    kept: KeptForward | None,
    *,
    backward: bool,
    keep: bool,
    between: Between,
) -> tuple[BatchResult, KeptForward | None]:
    if batch.uploaded is not None:
        return _custom(adapter, batch, batch.uploaded, between, backward=backward), None
    if backward and kept is not None and kept.serves(seq, batch):
        weights = batch.inputs.get("weights", np.ones(len(batch.targets), np.float32))
        loss = adapter.backward(-weights, between=between)
        return BatchResult(_shaped(batch, kept.logprobs), loss), None
    keep = keep and not backward and batch.loss == "cross_entropy"
    logprobs, loss = adapter.forward_backward(
        *batch.arrays,
        batch.loss,
        dict(batch.inputs),
        dict(batch.config),
        backward=backward,
        keep=keep,
        between=between,
    )
    shaped = _shaped(batch, logprobs)
    if LOGPROBS in batch.inputs:
        return _compared(batch, shaped, loss), None
    if batch.recorded:
        return BatchResult(shaped, loss, _off_policy(batch, shaped)), None
    return BatchResult(shaped, loss), KeptForward(seq, batch, logprobs) if keep else None


def _compared(batch: Batch, logprobs: tuple[NDArray[np.float32], ...], loss: float) -> BatchResult:
    """The result of a loss with the teacher's log-probabilities in its datums."""
    teacher, weights = (_shaped(batch, batch.inputs[key]) for key in (LOGPROBS, "weights"))
    jsd = divergences(logprobs, teacher, weights, batch.config)
    return BatchResult(logprobs, loss, metrics(jsd, weights), {"jsd": tuple(jsd)})


def _off_policy(batch: Batch, logprobs: tuple[NDArray[np.float32], ...]) -> dict[str, float]:
    """How far the learner is from the sampler, at targets with an advantage: the largest ratio, and
    the mean over datums of Schulman's estimator of KL(sampler ‖ learner). The first metric says
    that the loss is not the hosted service's, whose formula is not published."""
    past, advantages = (_shaped(batch, batch.inputs[key]) for key in ("logprobs", "advantages"))
    gaps = [
        np.minimum(now.astype(np.float64) - then, GAP_MAX)[advantage != 0]
        for now, then, advantage in zip(logprobs, past, advantages, strict=True)
    ]
    kls = [float(np.mean(np.expm1(gap) - gap)) if gap.size else 0.0 for gap in gaps]
    return {
        f"{batch.loss}_as_tinsmith_defines_it:max": 1.0,
        "sampler_ratio:max": max(
            (float(np.exp(gap.max())) for gap in gaps if gap.size), default=1.0
        ),
        "sampler_kl:mean": sum(kls) / len(kls),
    }


def _custom(
    adapter: _core.Adapter,
    batch: Batch,
    uploaded: Uploaded,
    between: Between,
    *,
    backward: bool,
) -> BatchResult:
    logprobs = _shaped(batch, adapter.forward(*batch.arrays, keep=backward, between=between))
    found = evaluate(uploaded.loss, logprobs, uploaded.inputs, between)
    if backward:
        flat = np.concatenate([part.ravel() for part in found.gradients])
        adapter.backward(flat, between=between)
    return BatchResult(logprobs, found.loss, found.metrics)


def distill(
    adapter: _core.Adapter,
    batch: Batch,
    teacher: _core.Adapter | _core.Model,
    *,
    backward: bool,
    between: Between,
) -> BatchResult:
    """The result of a loss with a teacher, with the divergence at each position."""
    assert batch.teacher is not None
    logprobs, divergences, loss = adapter.distill(
        *batch.arrays,
        batch.loss,
        dict(batch.inputs),
        dict(batch.config),
        batch.teacher.tokens,
        batch.teacher.lengths,
        teacher=teacher,
        backward=backward,
        between=between,
    )
    jsd = _shaped(batch, divergences)
    told = metrics(jsd, _shaped(batch, batch.inputs["weights"]))
    return _routed(adapter, BatchResult(_shaped(batch, logprobs), loss, told, {"jsd": jsd}))


def _shaped(batch: Batch, flat: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Flat numbers in the shapes of the datums' targets."""
    ends = np.cumsum([int(np.prod(shape)) for shape in batch.shapes])
    parts = np.split(flat, ends[:-1])
    return tuple(part.reshape(shape) for part, shape in zip(parts, batch.shapes, strict=True))


def optim_step(adapter: _core.Adapter, params: Params, run: str) -> tuple[dict[str, float], str]:
    """One step of a run's optimizer: its metrics, and a warning or ""."""
    say_notes(adapter.model)
    return OPTIMIZERS[params.kind].step(adapter, params, run)
