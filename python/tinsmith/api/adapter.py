"""tinsmith.Adapter: LoRA matrices on a base model, trained in this process.

`forward_backward` adds a loss's gradients; `optim_step` uses them. For a loss of your own, take the
log-probabilities of `forward`, and pass their gradient to `backward`: no second forward is run. If
a call raises, even KeyboardInterrupt, the adapter is as it was before the call.
"""

import dataclasses
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core, tensors
from tinsmith.api import datums
from tinsmith.api.model_thread import Handle, ModelThread
from tinsmith.api.results import DistillOutput, ForwardBackwardOutput, OptimStepOutput
from tinsmith.engine import teaching
from tinsmith.engine.bases import parse_bytes
from tinsmith.files import checkpoint
from tinsmith.files.meta import Meta

T = TypeVar("T")


JSD = "generalized_jsd"  # the engine's loss with a teacher


def core_of(adapter: "Adapter | None") -> _core.Adapter | None:
    """The engine's adapter behind ours, or None for the base model."""
    if adapter is not None and not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a tinsmith.Adapter, {type(adapter).__name__} came")
    return None if adapter is None else adapter.core


class Adapter(Handle[_core.Adapter]):
    """See the file's header. Made by Model.lora and Model.load_lora."""

    def __init__(
        self,
        engine: ModelThread,
        core: _core.Adapter,
        meta: Meta,
        *,
        trained: bool = True,
    ):
        super().__init__(engine, core)
        self._meta = meta
        self._trained = trained
        self._kept: datums.Datums | None = None  # of the newest forward that was kept

    @property
    def rank(self) -> int:
        """LoRA's rank."""
        return self.core.rank

    @property
    def alpha(self) -> float:
        """LoRA's alpha; the scale is alpha / rank."""
        return self.core.alpha

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return self.core.size

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.core.step

    @property
    def step_memory(self) -> int:
        """Bytes that a training step may take; by default half of what the model's weights leave.

        You may set it, to bytes or to text like "6G"; 0 restores the default. No result depends on
        it. If a step's activations do not fit, those of as many layers as possible are kept and the
        others are computed again (activation recomputation). A step that does not fit even so
        raises MemoryError.
        """
        return self.core.step_bytes

    @step_memory.setter
    def step_memory(self, value: int | str) -> None:
        size = parse_bytes(value) if isinstance(value, str) else value
        size = tensors.to_integer(size, "step_memory")
        if not 0 <= size <= sys.maxsize:
            raise ValueError(f"step_memory must be 0 (the default) or more bytes, {size} came")
        self.engine.turns.take(lambda: setattr(self.core, "step_bytes", size))

    def __repr__(self) -> str:
        if self.closed:
            return "<tinsmith.Adapter, closed>"
        what = f"{'' if self._trained else 'snapshot of '}rank {self.rank}"
        shown = f"{what}, {self.size:,} parameters, step {self.step}"
        return f"<tinsmith.Adapter of {self.engine.title}: {shown}>"

    # ---- training ----

    def forward_backward(
        self,
        tokens: Any,
        targets: Any,
        weights: Any = None,
        loss: str = "cross_entropy",
        **options: Any,
    ) -> ForwardBackwardOutput:
        """Runs sequences forward, evaluates a loss, and adds its gradient to the gradients so far.

        tokens: ids (N,), or a list of sequences, each of its own length. targets: ids (N,) or (N,
        K); those at position i are predicted from tokens[: i + 1]. Pass a list for a list. weights
        and the loss's other inputs are float arrays of the targets' shape. The loss's configuration
        is numbers. Losses: cross_entropy (weights), importance_sampling, ppo, cispo, dro, gspo,
        stable_reinforce (logprobs, advantages, …): tinsmith._core.losses() lists them. A loss is a
        sum.

        Arrays are NumPy's, lists, or anything with __dlpack__; int32 and float32 are zero-copy.
        Errors are TypeError, ValueError, IndexError (an id that the model does not have) and
        FloatingPointError (a result that is not finite). Each says what was expected and what came.
        """
        if loss == JSD:
            raise ValueError(f"{JSD} has a teacher: call adapter.{JSD}(…)")
        given = datums.gather(tokens, targets)
        inputs, config = datums.options(loss, {"weights": weights, **options}, given)
        flat, total = self._run(
            lambda: self.core.forward_backward(*given.arrays, loss, inputs, config)
        )
        return ForwardBackwardOutput(total, given.shaped(flat))

    def generalized_jsd(
        self,
        tokens: Any,
        targets: Any,
        weights: Any,
        teacher_tokens: Any = None,
        *,
        teacher_logprobs: Any = None,
        teacher: Handle[Any] | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
        token_clip: float | None = None,
    ) -> DistillOutput:
        """OPSD's loss and its gradient: Σ weights · JSD_β(teacher ‖ student), over the vocabulary.

        tokens, targets (N,) and weights are forward_backward's. teacher_tokens (M,): the teacher's
        prompt and then the completion. The completion is the targets from the first one with a
        weight that is not 0. Pass a list for a list. Where a weight is not 0, the student's
        distribution is compared with the teacher's for the same token. teacher: None is the base
        model. It may also be an adapter (this one, a snapshot of it or another), or another model
        of the same vocabulary. The teacher gets no gradient.

        β 0 is KL(teacher ‖ student), β 1 is KL(student ‖ teacher). top_k: only the teacher's K
        likeliest ids count, and both sides are renormalized over them. token_clip: an upper limit
        of each id's term.

        Or pass teacher_logprobs (N, K) instead of teacher_tokens: the teacher's log-probabilities
        (up to a constant) of the ids in targets, (N, K) too. Model.topk_logprobs returns both. Both
        sides are renormalized over those ids; no teacher model runs. weights are (N,), or (N, K)
        for one weight an id. -99999 stands for no id. The result's logprobs are (N, K). teacher and
        top_k must be left out. Errors are forward_backward's.
        """
        options = {"beta": beta, "temperature": temperature, "token_clip": token_clip}
        options |= {"weights": weights, "top_k": top_k}
        given = datums.gather(tokens, targets)
        if teacher_logprobs is not None:
            if teacher_tokens is not None or teacher is not None:
                raise TypeError(f"{JSD} has a teacher or teacher_logprobs, not both")
            return self._jsd_of_targets(given, options | {teaching.LOGPROBS: teacher_logprobs})
        if teacher_tokens is None:
            raise TypeError(f"{JSD} needs teacher_tokens or teacher_logprobs")
        batch = tensors.is_batch(teacher_tokens)
        read = datums.sequences(
            teacher_tokens if batch else [teacher_tokens], "teacher_tokens", batch
        )
        if (batch, len(read)) != (given.batch, len(given.lengths)):
            raise ValueError(
                f"tokens has {len(given.lengths)} sequences, teacher_tokens {len(read)}: a list "
                "for a list, of as many"
            )
        lengths = np.asarray([len(row) for row in read], np.int32)
        inputs, config = datums.options(JSD, options, given)
        if teacher is not None and not isinstance(teacher, Handle):
            found = type(teacher).__name__
            raise TypeError(f"teacher must be a tinsmith Adapter or Model, or None; {found} came")
        core = None if teacher is None else teacher.core

        def work() -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
            return self.core.distill(
                *given.arrays, JSD, inputs, config, datums.joined(read), lengths, teacher=core
            )

        logprobs, divergences, total = self._run(work, teacher)
        return DistillOutput(total, given.shaped(logprobs), given.shaped(divergences))

    def _jsd_of_targets(self, given: datums.Datums, options: dict[str, Any]) -> DistillOutput:
        for index, shape in enumerate(given.shapes):
            if len(shape) == 1:
                where = f"targets[{index}]" if given.batch else "targets"
                raise ValueError(
                    f"{where} has shape {shape}; with teacher_logprobs it must be ({shape[0]}, K)"
                )
        inputs, config = datums.options(JSD, options, given)
        flat, total = self._run(
            lambda: self.core.forward_backward(*given.arrays, JSD, inputs, config)
        )
        own, teacher, weights = (
            given.split(part) for part in (flat, inputs[teaching.LOGPROBS], inputs["weights"])
        )
        divergences = teaching.divergences(own, teacher, weights, config)
        return DistillOutput(total, given.as_given(own), given.as_given(divergences))

    def follow(self, leader: "Adapter", decay: float) -> None:
        """weights = decay · weights + (1 - decay) · leader's, of the same layout; decay in [0, 1).

        Call it on a snapshot after each step for an exponential moving average, for example as a
        teacher.
        """
        decay, core = tensors.to_number(decay, "decay"), core_of(leader)
        if core is None:
            raise TypeError("leader must be a tinsmith.Adapter, None came")
        self._run(lambda: self.core.follow(core, decay), leader)

    def forward(self, tokens: Any, targets: Any, *, keep: bool = True) -> Any:
        """Log-probabilities of the targets, in their shape and kind; float32, in nats.

        tokens and targets are forward_backward's. With keep, `backward` may follow: activations
        stay in memory until another call needs the memory, and `backward` computes the missing ones
        again. A snapshot keeps nothing.
        """
        given = datums.gather(tokens, targets)
        keep = keep and self._trained

        def work() -> NDArray[np.float32]:
            flat = self.core.forward(*given.arrays, keep=keep)
            if keep:
                self._kept = given
            return flat

        return given.shaped(self._run(work))

    def backward(self, dlogprobs: Any) -> None:
        """Adds the gradient of a loss. dlogprobs is the loss's derivative with respect to the
        newest kept forward's log-probabilities, in the form that forward returned; every number is
        finite.

        The result is, bit for bit, the gradient of forward_backward for a loss with this
        derivative. ValueError if there was no forward, the weights have changed since, or a
        backward has used it. An adapter has one newest forward, whichever thread made it. If your
        threads share an adapter, hold a lock of your own around such a pair.
        """

        def work() -> None:
            if self._kept is None:
                raise ValueError(
                    "there is no forward to go back from: none was kept, or backward has used it"
                )
            self.core.backward(self._kept.flat(dlogprobs, "dlogprobs"))
            self._kept = None

        self._run(work)

    def optim_step(
        self,
        learning_rate: float = 1e-4,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
        grad_accumulation_normalization: str | None = None,
    ) -> OptimStepOutput:
        """One AdamW step with the gradients so far, which are then cleared; defaults are Tinker's.

        grad_clip_norm 0 clips nothing. grad_accumulation_normalization divides the gradient first:
        "num_loss_tokens", "num_sequences" or None. The step is short; Ctrl-C takes effect after it.
        FloatingPointError for a step that would leave numbers which are not finite, as a learning
        rate of 1e38 does: then no step is taken, and weights, moments and gradients stay as they
        were. eps may be 0: a weight that never had a gradient then stays where it is.
        """
        numbers = {
            "learning_rate": learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_clip_norm": grad_clip_norm,
        }
        numbers = {name: tensors.to_number(value, name) for name, value in numbers.items()}
        report = self.engine.turns.take(
            lambda: self.core.optim_step(**numbers, normalization=grad_accumulation_normalization)
        )
        return OptimStepOutput(**report)

    def zero_grad(self) -> None:
        """Drops the gradients so far."""
        self.engine.turns.take(self.core.clear_gradients)

    # ---- its numbers ----

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the matrices by PEFT's names, in its shapes: A (rank, in), B (out, rank)."""
        return self._read("weights")

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the gradients so far, with the names and shapes of `parameters`."""
        return self._read("gradients")

    def _read(self, what: str) -> dict[str, NDArray[np.float32]]:
        flat = self.engine.turns.take(lambda: self.core.read(what))
        return dict(checkpoint.matrices(self.engine.loaded.family, self.core, flat))

    def snapshot(self) -> "Adapter":
        """A copy of the current weights, to sample from and to score with; it can't be trained."""
        core = self.engine.turns.take(self.core.snapshot)
        return Adapter(self.engine, core, self._meta, trained=False)

    def save(self, path: str | Path, *, optimizer: bool = True, overwrite: bool = False) -> None:
        """Writes a folder that PEFT loads as it is, whole or not at all.

        With optimizer, the folder also contains the state with which Model.load_lora(path,
        optimizer=True) continues bit for bit. FileExistsError if the folder exists, unless
        overwrite.
        """
        folder = Path(path).expanduser()

        def work() -> None:
            meta = dataclasses.replace(
                self._meta, step=self.core.step, created=datetime.now(UTC).isoformat()
            )
            family = self.engine.loaded.family
            checkpoint.save(
                folder, family, self.core, meta, optimizer=optimizer, overwrite=overwrite
            )

        self.engine.turns.take(work)

    def _run(self, work: Callable[[], T], other: Handle[Any] | None = None) -> T:
        """Takes a turn on this model, and on another one that the work reads, in a fixed order."""
        engines = sorted({self.engine, (other or self).engine}, key=id)
        for engine in engines[1:]:
            work = partial(engine.turns.take, work)
        return engines[0].turns.take(work, interrupt=self.core.interrupt)
