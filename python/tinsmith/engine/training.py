"""The two requests of a training step, and their data: forward_backward, or a forward alone, and
optim_step.

A forward_backward is one call of the engine, except for the two requests that the SDK's
forward_backward_custom makes: a forward, and, when the client has evaluated its loss, a
forward_backward of the same datums with cross_entropy's weights set to minus its gradient. The
second one is then a backward from the first one's activations, to the same bits. This shortcut is
taken only if the request is the run's next one and its arrays are the same, so nothing can have
changed the weights.

A loss that the client has uploaded is evaluated between a forward and a backward in the same way.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints.lora import Average
from tinsmith.checkpoints.optimizers import Params, take_step
from tinsmith.custom_losses.custom_loss import evaluate
from tinsmith.custom_losses.graph import CustomLoss
from tinsmith.engine import routing, teachers
from tinsmith.engine.call_log import Call
from tinsmith.engine.devices import say_notes
from tinsmith.engine.engine import Engine
from tinsmith.engine.image_cache import HeldImage, pixel_bytes
from tinsmith.engine.runs import Job, Run, ShortJob
from tinsmith.engine.shared_call import (
    WHOLE_CALL,
    Helpers,
    PartRequest,
    PartResult,
    compute_part,
    kept_forward,
    next_call,
    share,
)
from tinsmith.engine.teachers import LOGPROBS, Teacher
from tinsmith.ops.tensors import split
from tinsmith.system.steps import Steps

log = logging.getLogger("tinsmith")

Ids: TypeAlias = NDArray[np.int32]

# A call's result, and how many of its rows went to each expert of each layer.
_Found: TypeAlias = "tuple[BatchResult, NDArray[np.int32] | None]"

GAP_MAX = 700.0  # of log-probabilities, in a metric: keeps the exponential finite


@dataclass(frozen=True)
class Uploaded:
    """A custom loss, and for each datum the arrays that it takes after logprobs."""

    loss: CustomLoss
    inputs: tuple[tuple[NDArray[Any], ...], ...]


@dataclass(frozen=True)
class Batch:
    """Concatenated datums; see _core.Adapter.forward_backward for the flat layouts."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    targets: NDArray[np.int32]
    counts: NDArray[np.int32]
    loss: str
    inputs: Mapping[str, NDArray[np.float32]]
    config: Mapping[str, float]
    shapes: tuple[tuple[int, ...], ...]  # of each datum's targets: (N,) or (N, K)
    teacher: Teacher | None = None  # if the loss has one
    uploaded: Uploaded | None = None  # if loss is "custom"
    recorded: bool = False  # whether its logprobs are the sampler's, as recorded
    images: tuple[HeldImage, ...] = ()  # whose ids are among the tokens

    @property
    def arrays(self) -> tuple[Ids, Ids, Ids, Ids]:
        """The arrays of the model's input and of its targets."""
        return self.tokens, self.lengths, self.targets, self.counts

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays, and of its images."""
        arrays: list[NDArray[Any]] = [*self.arrays, *self.inputs.values()]
        if self.teacher is not None:
            arrays += [self.teacher.tokens, self.teacher.lengths]
        if self.uploaded is not None:
            arrays += [array for datum in self.uploaded.inputs for array in datum]
        return sum(array.nbytes for array in arrays) + pixel_bytes(self.images)

    def request(self, adapter: _core.Adapter, backward: bool) -> PartRequest:
        """The whole call, as the engine takes it."""
        teacher = self.teacher
        return PartRequest(
            call=next_call(),
            part=WHOLE_CALL,
            arrays=self.arrays,
            loss=self.loss,
            inputs=dict(self.inputs),
            config=dict(self.config),
            backward=backward,
            step_tokens=adapter.step_tokens,
            taught=None if teacher is None else (teacher.tokens, teacher.lengths),
        )

    def parts(self, adapter: _core.Adapter, whole: PartRequest) -> list[PartRequest]:
        """The parts of a call of its datums that are not empty."""
        cuts = enumerate(adapter.parts(self.lengths))
        return [self._part(whole, part, *cut) for part, cut in cuts if cut[0] < cut[1]]

    def _part(self, whole: PartRequest, part: int, first: int, last: int) -> PartRequest:
        tokens, targets = self._bounds
        rows, ids = slice(tokens[first], tokens[last]), slice(targets[first], targets[last])
        taught = whole.taught
        if taught is not None:
            (read, lengths), ends = taught, self._teacher_bounds
            taught = read[ends[first] : ends[last]], lengths[first:last]
        of_tokens, of_targets = self.lengths[first:last], self.counts[first:last]
        return replace(
            whole,
            part=part,
            arrays=(self.tokens[rows], of_tokens, self.targets[ids], of_targets),
            inputs={name: array[ids] for name, array in whole.inputs.items()},
            taught=taught,
        )

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each datum's tokens and targets begin, and where the last ones end."""
        return _bounds(self.lengths), _bounds(self.lengths.astype(np.int64) * self.counts)

    @cached_property
    def _teacher_bounds(self) -> NDArray[np.int64]:
        """The same of the teacher's tokens."""
        assert self.teacher is not None
        return _bounds(self.teacher.lengths)

    def shaped(self, flat: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Flat numbers in the shapes of the datums' targets."""
        return tuple(split(flat, self.shapes))


@dataclass(frozen=True)
class BatchResult:
    """Log-probabilities in each datum's target shape, and the loss's sum. Also the loss's other
    metrics, whose names end in how they are reduced, and its other arrays of N rows, by name."""

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


@dataclass(eq=False)
class TrainJob(Job[BatchResult]):
    """The loss of a batch; adds its gradients unless backward is False."""

    batch: Batch
    backward: bool = True

    @property
    def nbytes(self) -> int:
        return self.batch.nbytes

    def called(self) -> Call:
        kind = "forward_backward" if self.backward else "forward"
        return Call(kind, request=self.batch, tokens=len(self.batch.tokens))

    def steps(self, run: Run, engine: Engine) -> Steps[BatchResult]:
        adapter, batch = engine.adapter(run), self.batch
        if batch.images:
            engine.bases.use(run.base, tower=True)
        engine.limit(run, adapter, batch.lengths)
        kept, run.kept = run.kept, None
        with engine.training(run, adapter):
            if batch.teacher is not None:
                result, counts = yield from self._distilled(batch.teacher, run, adapter, engine)
            elif batch.uploaded is not None:
                result, counts = yield from self._evaluated(batch.uploaded, run, adapter, engine)
            elif self.backward and kept is not None and kept.serves(self.seq, batch):
                result, counts = yield from self._went_back(kept, adapter)
            else:
                result, counts = yield from self._computed(run, adapter, engine)
        if counts is None:
            return result
        return replace(result, metrics=dict(result.metrics) | routing.metrics(counts))

    def _computed(self, run: Run, adapter: _core.Adapter, engine: Engine) -> Steps[_Found]:
        """A call without a teacher. A forward may be kept for the run's next request."""
        batch = self.batch
        whole, helpers = batch.request(adapter, self.backward), self._helpers(run, adapter, engine)
        keeps = engine.keep_forwards and not self.backward and batch.loss == "cross_entropy"
        keep = keeps and helpers is None
        if keep:
            found = yield from kept_forward(adapter, whole)
        else:
            found = yield from self._shared(whole, adapter, engine, helpers)
        run.kept = KeptForward(self.seq, batch, found.logprobs) if keep else None
        shaped = batch.shaped(found.logprobs)
        if LOGPROBS in batch.inputs:
            return _compared(batch, shaped, found.loss), found.routed
        if batch.recorded:
            _warn(run, batch.loss)
            return BatchResult(shaped, found.loss, _off_policy(batch, shaped)), found.routed
        return BatchResult(shaped, found.loss), found.routed

    def _helpers(
        self,
        run: Run,
        adapter: _core.Adapter,
        engine: Engine,
        teacher: _core.Adapter | _core.Model | None = None,
    ) -> Helpers | None:
        """The replicas that share the call; none has the pixels of images."""
        return None if self.batch.images else engine.helpers(run, adapter, teacher)

    def _shared(
        self,
        whole: PartRequest,
        adapter: _core.Adapter,
        engine: Engine,
        helpers: Helpers | None,
        teacher: _core.Adapter | _core.Model | None = None,
    ) -> Steps[PartResult]:
        """The engine's call: here, or with replicas."""
        if helpers is None:
            return (yield from compute_part(adapter, whole, teacher))
        parts = self.batch.parts(adapter, whole)
        wait, repeated = engine.others_wait, engine.crew.repeated_parts
        return (yield from share(adapter, whole, parts, helpers, wait, teacher, repeated))

    def _went_back(self, kept: KeptForward, adapter: _core.Adapter) -> Steps[_Found]:
        """A backward from the previous request's forward."""
        weights = self.batch.inputs.get("weights", np.ones(len(self.batch.targets), np.float32))
        loss = yield from adapter.backward(-weights, stepwise=True)
        return BatchResult(self.batch.shaped(kept.logprobs), loss), adapter.routed

    def _evaluated(
        self, uploaded: Uploaded, run: Run, adapter: _core.Adapter, engine: Engine
    ) -> Steps[_Found]:
        """For an uploaded loss: a forward, torch here, and cross_entropy's backward with minus the
        loss's gradient as weights."""
        batch = self.batch
        whole = replace(batch.request(adapter, False), loss="cross_entropy", inputs={}, config={})
        helpers = self._helpers(run, adapter, engine)
        if helpers is None and self.backward:
            forward = yield from kept_forward(adapter, whole)
        else:
            forward = yield from self._shared(whole, adapter, engine, helpers)
        logprobs = batch.shaped(forward.logprobs)
        found = yield from evaluate(uploaded.loss, logprobs, uploaded.inputs)
        result = BatchResult(logprobs, found.loss, found.metrics)
        if not self.backward:
            return result, forward.routed
        flat = np.concatenate([part.ravel() for part in found.gradients])
        if helpers is None:
            yield from adapter.backward(flat, stepwise=True)
            return result, adapter.routed
        again = replace(whole, call=next_call(), inputs={"weights": -flat}, backward=True)
        backward = yield from self._shared(again, adapter, engine, helpers)
        return result, backward.routed

    def _distilled(
        self, teacher: Teacher, run: Run, adapter: _core.Adapter, engine: Engine
    ) -> Steps[_Found]:
        """For a loss with a teacher; it also gives the divergence at each position."""
        batch = self.batch
        model, average = _taught(teacher, run, adapter, engine)
        whole = batch.request(adapter, self.backward)
        helpers = self._helpers(run, adapter, engine, model)
        found = yield from self._shared(whole, adapter, engine, helpers, model)
        run.average = average
        assert found.divergences is not None
        jsd = batch.shaped(found.divergences)
        told = teachers.metrics(jsd, batch.shaped(batch.inputs["weights"]))
        return BatchResult(
            batch.shaped(found.logprobs), found.loss, told, {"jsd": jsd}
        ), found.routed


@dataclass(eq=False)
class OptimJob(ShortJob[dict[str, float]]):
    """One step of the run's optimizer; its metrics."""

    params: Params

    def called(self) -> Call:
        return Call("optim_step", request=self.params)

    def run(self, run: Run, engine: Engine) -> dict[str, float]:
        adapter = engine.adapter(run)
        say_notes(adapter.model)
        report, self.call.warning = take_step(adapter, self.params, run.name)
        if run.average is not None:
            run.average.ema_update(adapter)
        return report


def _bounds(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Where each of several pieces begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def _taught(
    teacher: Teacher, run: Run, adapter: _core.Adapter, engine: Engine
) -> tuple[_core.Adapter | _core.Model, Average | None]:
    """A batch's teacher, and the moving average that the run keeps from now on. An average begins
    at its first use."""
    if teacher.name == teachers.CURRENT:
        return adapter, run.average
    if teacher.name == teachers.EMA:
        own = run.average.adapter if run.average else adapter.snapshot()
        return own, Average(own, teacher.decay)
    snapshot = engine.snapshots.use(teacher.name)
    run.teacher = snapshot.base.path
    return snapshot.adapter or engine.bases.use(snapshot.base).core, run.average


def _warn(run: Run, loss: str) -> None:
    """Logs, once for a run, that its loss is not the hosted service's."""
    if not run.warned:
        run.warned = True
        log.info(
            "%s trains with %s: Thinking Machines has not published its formula; "
            "tinsmith's own is in csrc/train/losses.c and docs/losses.md",
            run.name,
            loss,
        )


def _compared(batch: Batch, logprobs: tuple[NDArray[np.float32], ...], loss: float) -> BatchResult:
    """The result of a loss with the teacher's log-probabilities in its datums."""
    teacher, weights = (batch.shaped(batch.inputs[key]) for key in (LOGPROBS, "weights"))
    jsd = teachers.divergences(logprobs, teacher, weights, batch.config)
    return BatchResult(logprobs, loss, teachers.metrics(jsd, weights), {"jsd": tuple(jsd)})


def _off_policy(batch: Batch, logprobs: tuple[NDArray[np.float32], ...]) -> dict[str, float]:
    """How far the learner is from the sampler, at targets with an advantage: the largest ratio, and
    the mean over datums of Schulman's estimator of KL(sampler ‖ learner). The first metric says
    that the loss is not the hosted service's, whose formula is not published."""
    past, advantages = (batch.shaped(batch.inputs[key]) for key in ("logprobs", "advantages"))
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
