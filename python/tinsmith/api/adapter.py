"""tinsmith.Adapter: LoRA matrices on a base model, trained in this process.

`forward_backward` adds a loss's gradients; `optim_step` uses them. For a loss of your own, take the
log-probabilities of `forward`, and pass their gradient to `backward`: no second forward is run. If
a call raises, even KeyboardInterrupt, the adapter is as it was before the call.
"""

import dataclasses
import sys
from array import array
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.api import datums
from tinsmith.api.kinds import Ids, Loss, Normalization, Numbers, SomeIds, Targets, Threshold
from tinsmith.api.model_thread import Handle, ModelThread
from tinsmith.api.progress import Progress, last_report, reporting
from tinsmith.api.results import DistillOutput, ForwardBackwardOutput, History, OptimStepOutput
from tinsmith.api.turns import take_all
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.engine import teachers
from tinsmith.engine.bases import parse_bytes
from tinsmith.ops import tensors

T = TypeVar("T")
Between: TypeAlias = Callable[[int, int], None] | None

JSD = "generalized_jsd"  # the engine's loss with a teacher


def core_of(adapter: "Adapter | None") -> _core.Adapter | None:
    """The engine's adapter behind ours, or None for the base model."""
    if adapter is not None and not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a tinsmith.Adapter, {type(adapter).__name__} came")
    return None if adapter is None else adapter.core


class Adapter(Handle[_core.Adapter]):
    """LoRA matrices on a base model, with their gradients and optimizer. Made by Model.lora and
    Model.load_lora.

    If a call raises, even KeyboardInterrupt, the adapter is as it was before the call.

        >>> adapter = model.lora(rank=8, seed=0)
        >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
        >>> adapter.optim_step(learning_rate=1e-3).loss == out.loss
        True
        >>> adapter
        <tinsmith.Adapter of Qwen3-0.6B: rank 8, 106,248 parameters, step 1>
    """

    def __init__(
        self, engine: ModelThread, core: _core.Adapter, meta: Meta, *, trained: bool = True
    ):
        super().__init__(engine, core)
        self._meta = meta
        self._trained = trained
        self._steps = array("d")  # their numbers, one step after another
        self._kept: datums.Datums | None = None  # of the newest forward that was kept

    @property
    def rank(self) -> int:
        """LoRA's rank.

        >>> model.lora(rank=8).rank
        8
        """
        return self.core.rank

    @property
    def alpha(self) -> float:
        """LoRA's alpha; the scale is alpha / rank.

        >>> model.lora(rank=8, alpha=16).alpha
        16.0
        """
        return self.core.alpha

    @property
    def size(self) -> int:
        """Number of trained parameters.

        >>> adapter.size == sum(matrix.size for matrix in adapter.state_dict().values())
        True
        """
        return self.core.size

    @property
    def step(self) -> int:
        """Optimizer steps taken.

        >>> adapter.step
        0
        """
        return self.core.step

    @property
    def history(self) -> History:
        """The steps that this object has taken; a notebook shows their loss and gradient norm.

        >>> len(adapter.history)
        0
        """
        count = len(dataclasses.fields(OptimStepOutput))
        rows = zip(*[iter(self._steps)] * count, strict=True)
        return History([OptimStepOutput(*row) for row in rows])

    @property
    def step_memory(self) -> int:
        """Bytes that a training step may take; by default half of what the model's weights leave.

        You may set it, to bytes or to text like "6G"; 0 restores the default. No result depends on
        it. If a step's activations do not fit, those of as many layers as possible are kept and the
        others are computed again (activation recomputation). A step that does not fit even so
        raises MemoryError.

            >>> adapter.step_memory = "2G"
            >>> adapter.step_memory
            2147483648
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

    @overload
    def forward_backward(
        self,
        tokens: Ids,
        targets: Targets,
        weights: Numbers | None = None,
        loss: Loss = "cross_entropy",
        *,
        logprobs: Numbers | None = None,
        advantages: Numbers | None = None,
        sequence_ratio_mask: Numbers | None = None,
        clip_low_threshold: Threshold | None = None,
        clip_high_threshold: Threshold | None = None,
        beta: SupportsFloat | None = None,
        kl_coeff: SupportsFloat | None = None,
        delta: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[Any]: ...
    @overload
    def forward_backward(
        self,
        tokens: list[SomeIds] | tuple[SomeIds, ...],
        targets: Sequence[Targets],
        weights: Sequence[Numbers] | None = None,
        loss: Loss = "cross_entropy",
        *,
        logprobs: Sequence[Numbers] | None = None,
        advantages: Sequence[Numbers] | None = None,
        sequence_ratio_mask: Sequence[Numbers] | None = None,
        clip_low_threshold: SupportsFloat | Sequence[Numbers] | None = None,
        clip_high_threshold: SupportsFloat | Sequence[Numbers] | None = None,
        beta: SupportsFloat | None = None,
        kl_coeff: SupportsFloat | None = None,
        delta: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[list[Any]]: ...
    def forward_backward(
        self,
        tokens: Any,
        targets: Any,
        weights: Any | None = None,
        loss: Loss = "cross_entropy",
        *,
        logprobs: Any | None = None,
        advantages: Any | None = None,
        sequence_ratio_mask: Any | None = None,
        clip_low_threshold: Any | None = None,
        clip_high_threshold: Any | None = None,
        beta: SupportsFloat | None = None,
        kl_coeff: SupportsFloat | None = None,
        delta: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[Any]:
        """Runs sequences forward, evaluates a loss, and adds its gradient to the gradients so far.

        tokens: ids (N,), or a list of sequences, each of its own length. targets: ids (N,) or (N,
        K); those at position i are predicted from tokens[: i + 1]. Pass a list for a list. A loss
        is a sum. Its inputs are float arrays of the targets' shape, and its configuration numbers:

            cross_entropy          weights, or 1 for each target; targets may be (N, K)
            importance_sampling    logprobs, advantages
            ppo, dapo, cispo       logprobs, advantages, clip_low_threshold, clip_high_threshold
            gspo                   the same, and sequence_ratio_mask
            dro, dppo              logprobs, advantages, beta or delta
            stable_reinforce       logprobs, advantages, kl_coeff

        logprobs are those that the sampler drew the targets with, in nats. A clip threshold is one
        number, or an array with one for each target. progress: True draws a bar with tqdm; or pass
        a function, called with (micro-batches done, micro-batches).

            >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310], [0, 1, 1])
            >>> out.logprobs.shape, adapter.optim_step(learning_rate=1e-4).loss == out.loss
            ((3,), True)
            >>> rows, answers = [[55, 73], [55]], [[73, 327], [73]]
            >>> old, good = adapter.forward(rows, answers), [[1.0, -1.0], [0.5]]
            >>> adapter.forward_backward(rows, answers, loss="ppo", logprobs=old, advantages=good)
            ForwardBackwardOutput(loss=-0.5, logprobs=[float32[2], float32[1]])

        Arrays are NumPy's, lists, or anything with __dlpack__; int32 and float32 are zero-copy.
        Errors are TypeError, ValueError, IndexError (an id that the model does not have) and
        FloatingPointError (a result that is not finite). Each says what was expected and what came.
        """
        if loss == JSD:
            raise ValueError(f"{JSD} has a teacher: call adapter.{JSD}(…)")
        given = datums.gather(tokens, targets)
        options = {
            "weights": weights,
            "logprobs": logprobs,
            "advantages": advantages,
            "sequence_ratio_mask": sequence_ratio_mask,
            "clip_low_threshold": clip_low_threshold,
            "clip_high_threshold": clip_high_threshold,
            "beta": beta,
            "kl_coeff": kl_coeff,
            "delta": delta,
        }
        inputs, config = datums.options(loss, options, given)
        flat, total = self._step(
            lambda between: self.core.forward_backward(
                *given.arrays, loss, inputs, config, between=between
            ),
            "forward_backward",
            progress,
        )
        return ForwardBackwardOutput(total, given.shaped(flat))

    @overload
    def generalized_jsd(
        self,
        tokens: Ids,
        targets: Targets,
        weights: Numbers,
        teacher_tokens: Ids | None = None,
        *,
        teacher_logprobs: Numbers | None = None,
        teacher: Handle[Any] | None = None,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex | None = None,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[Any]: ...
    @overload
    def generalized_jsd(
        self,
        tokens: list[SomeIds] | tuple[SomeIds, ...],
        targets: Sequence[Targets],
        weights: Sequence[Numbers],
        teacher_tokens: Sequence[Ids] | None = None,
        *,
        teacher_logprobs: Sequence[Numbers] | None = None,
        teacher: Handle[Any] | None = None,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex | None = None,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[list[Any]]: ...
    def generalized_jsd(
        self,
        tokens: Any,
        targets: Any,
        weights: Any,
        teacher_tokens: Any | None = None,
        *,
        teacher_logprobs: Any | None = None,
        teacher: Handle[Any] | None = None,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex | None = None,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[Any]:
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
        top_k must be left out. progress and errors are forward_backward's.

            >>> answer = [327, 310, 1159]  # after a prompt, and after one that has the solution
            >>> tokens, read = [55, 73, *answer], [55, 420, 438, 73, *answer]
            >>> out = adapter.generalized_jsd(tokens[:-1], tokens[1:], [0, 1, 1, 1], read)
            >>> out.divergences.shape
            (4,)
            >>> top = model.topk_logprobs(read, 5)
            >>> ids, scores, mask = top.ids[-4:], top.logprobs[-4:], [0, 1, 1, 1]
            >>> out = adapter.generalized_jsd(tokens[:-1], ids, mask, teacher_logprobs=scores)
            >>> out.logprobs.shape
            (4, 5)
        """
        options: dict[str, Any] = {
            "beta": beta,
            "temperature": temperature,
            "token_clip": token_clip,
        }
        options |= {"weights": weights, "top_k": top_k}
        given = datums.gather(tokens, targets)
        if teacher_logprobs is not None:
            if teacher_tokens is not None or teacher is not None:
                raise TypeError(f"{JSD} has a teacher or teacher_logprobs, not both")
            options |= {teachers.LOGPROBS: teacher_logprobs}
            return self._jsd_of_targets(given, options, progress)
        if teacher_tokens is None:
            raise TypeError(f"{JSD} needs teacher_tokens or teacher_logprobs")
        read, lengths = datums.teachers(teacher_tokens, given)
        inputs, config = datums.options(JSD, options, given)
        if teacher is not None and not isinstance(teacher, Handle):
            found = type(teacher).__name__
            raise TypeError(f"teacher must be a tinsmith Adapter or Model, or None; {found} came")
        core = None if teacher is None else teacher.core

        logprobs, divergences, total = self._step(
            lambda between: self.core.distill(
                *given.arrays, JSD, inputs, config, read, lengths, teacher=core, between=between
            ),
            JSD,
            progress,
            teacher,
        )
        return DistillOutput(total, given.shaped(logprobs), given.shaped(divergences))

    def _jsd_of_targets(
        self, given: datums.Datums, options: dict[str, Any], progress: Progress
    ) -> DistillOutput[Any]:
        for index, shape in enumerate(given.shapes):
            if len(shape) == 1:
                where = f"targets[{index}]" if given.batch else "targets"
                raise ValueError(
                    f"{where} has shape {shape}; with teacher_logprobs it must be ({shape[0]}, K)"
                )
        inputs, config = datums.options(JSD, options, given)
        flat, total = self._step(
            lambda between: self.core.forward_backward(
                *given.arrays, JSD, inputs, config, between=between
            ),
            JSD,
            progress,
        )
        own, teacher, weights = (
            given.split(part) for part in (flat, inputs[teachers.LOGPROBS], inputs["weights"])
        )
        divergences = teachers.divergences(own, teacher, weights, config)
        return DistillOutput(total, given.as_given(own), given.as_given(divergences))

    def ema_update(self, leader: "Adapter", decay: float) -> None:
        """weights = decay · weights + (1 - decay) · leader's, of the same layout; decay in [0, 1).

        Call it on a snapshot after each step for an exponential moving average, for example as a
        teacher. ValueError for another layout or another model.

            >>> teacher = adapter.snapshot()
            >>> teacher.ema_update(adapter, 0.99)
        """
        decay, core = tensors.to_number(decay, "decay"), core_of(leader)
        if core is None:
            raise TypeError("leader must be a tinsmith.Adapter, None came")
        self._run(lambda: self.core.ema_update(core, decay), leader)

    @overload
    def forward(
        self, tokens: Ids, targets: Targets, *, keep: bool = True, progress: Progress = False
    ) -> Any: ...
    @overload
    def forward(
        self,
        tokens: list[SomeIds] | tuple[SomeIds, ...],
        targets: Sequence[Targets],
        *,
        keep: bool = True,
        progress: Progress = False,
    ) -> list[Any]: ...
    def forward(
        self, tokens: Any, targets: Any, *, keep: bool = True, progress: Progress = False
    ) -> Any:
        """Log-probabilities of the targets, in their shape and kind; float32, in nats.

        tokens, targets and progress are forward_backward's. With keep, `backward` may follow:
        activations stay in memory until another call needs the memory, and `backward` computes the
        missing ones again. A snapshot keeps nothing.

            >>> logprobs = adapter.forward([55, 73, 327], [73, 327, 310])
            >>> adapter.backward(2 * logprobs)  # the loss is the sum of their squares
        """
        given = datums.gather(tokens, targets)
        keep = keep and self._trained

        def work(between: Between) -> NDArray[np.float32]:
            flat = self.core.forward(*given.arrays, keep=keep, between=between)
            if keep:
                self._kept = given
            return flat

        return given.shaped(self._step(work, "forward", progress))

    def backward(
        self, dlogprobs: Numbers | Sequence[Numbers], *, progress: Progress = False
    ) -> None:
        """Adds the gradient of a loss. dlogprobs is the loss's derivative with respect to the
        newest kept forward's log-probabilities, in the form that forward returned; every number is
        finite. progress is forward_backward's.

        The result is, bit for bit, the gradient of forward_backward for a loss with this
        derivative. ValueError if there was no forward, the weights have changed since, or a
        backward has used it. An adapter has one newest forward, whichever thread made it. If your
        threads share an adapter, hold a lock of your own around such a pair.

            >>> logprobs = adapter.forward([55, 73, 327], [73, 327, 310])
            >>> adapter.backward(np.full(3, -1.0))  # cross-entropy's
        """

        def work(between: Between) -> None:
            if self._kept is None:
                raise ValueError(
                    "there is no forward to go back from: none was kept, or backward has used it"
                )
            self.core.backward(self._kept.flat(dlogprobs, "dlogprobs"), between=between)
            self._kept = None

        self._step(work, "backward", progress)

    def optim_step(
        self,
        learning_rate: SupportsFloat | None = None,
        *,
        beta1: SupportsFloat | None = None,
        beta2: SupportsFloat | None = None,
        eps: SupportsFloat | None = None,
        weight_decay: SupportsFloat | None = None,
        damping: SupportsFloat | None = None,
        rank_lr_correction_exponent: SupportsFloat | None = None,
        grad_clip_norm: SupportsFloat | None = None,
        grad_accumulation_normalization: Normalization | None = None,
    ) -> OptimStepOutput:
        """One step with the gradients so far, which are then cleared; None: Tinker's default.

        AdamW has learning_rate 1e-4, beta1 0.9, beta2 0.95, eps 1e-12, weight_decay 0; eps may be
        0. Dimuon has beta1 0.9, damping 1e-4, rank_lr_correction_exponent 0.175, and needs a
        learning_rate. grad_clip_norm 0 clips nothing. grad_accumulation_normalization divides the
        gradient first: "num_loss_tokens", "num_sequences" or None. The step is short; Ctrl-C takes
        effect after it. FloatingPointError for a step that would leave numbers which are not
        finite, as a learning rate of 1e38 does: then no step is taken, and nothing changes. Of a
        step without a gradient, or to a thousand times the weights' norm, the log has a warning.

            >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
            >>> step = adapter.optim_step(learning_rate=1e-3, grad_clip_norm=1.0)
            >>> step.grad_norm_clipped <= 1.0001, step.loss_tokens
            (True, 3.0)
        """
        given = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps}
        given |= {"weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}
        given |= {"damping": damping, "rank_lr_correction_exponent": rank_lr_correction_exponent}
        row = OPTIMIZERS[self.core.optimizer]
        numbers = {k: tensors.to_number(v, k) for k, v in given.items() if v is not None}
        params = row.checked(numbers, grad_accumulation_normalization)
        report, _ = self.engine.turns.take(lambda: row.step(self.core, params))
        step = OptimStepOutput(**report)
        self._steps.extend(dataclasses.astuple(step))
        return step

    def zero_grad(self) -> None:
        """Drops the gradients so far.

        >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
        >>> adapter.zero_grad()
        >>> any(gradient.any() for gradient in adapter.gradients().values())
        False
        """
        self.engine.turns.take(self.core.clear_gradients)

    # ---- its numbers ----

    def state_dict(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the matrices by PEFT's names, in its shapes: A (rank, in), B (out, rank);
        float32.

        >>> name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        >>> adapter.state_dict()[name].shape
        (4, 160)
        """
        return self._read("weights")

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the gradients so far, with the names and shapes of `state_dict`.

        >>> adapter.gradients().keys() == adapter.state_dict().keys()
        True
        """
        return self._read("gradients")

    def _read(self, what: str) -> dict[str, NDArray[np.float32]]:
        flat = self.engine.turns.take(lambda: self.core.read(what))
        return dict(checkpoint.matrices(self.engine.loaded.family, self.core, flat))

    def snapshot(self) -> "Adapter":
        """A copy of the current weights, to sample from and to score with; it can't be trained.

        >>> before = adapter.snapshot()
        >>> [answer] = model.sampler().sample([55, 73, 327], adapter=before, max_tokens=5)
        """
        core = self.engine.turns.take(self.core.snapshot)
        return Adapter(self.engine, core, self._meta, trained=False)

    def save(self, path: str | Path, *, optimizer: bool = True, overwrite: bool = False) -> None:
        """Writes a folder that PEFT loads as it is, whole or not at all.

        With optimizer, the folder also contains the state with which Model.load_lora(path,
        optimizer=True) continues bit for bit. FileExistsError if the folder exists, unless
        overwrite.

            >>> adapter.save("my-adapter")
            >>> model.load_lora("my-adapter").rank
            4
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

    def _step(
        self,
        work: Callable[[Between], T],
        title: str,
        progress: Progress,
        other: Handle[Any] | None = None,
    ) -> T:
        """Takes a turn for work that calls its argument between two micro-batches."""
        if not progress:
            return self._run(lambda: work(None), other)
        now = [0, 1]

        def between(done: int, total: int) -> None:
            now[:] = done, total

        with reporting(progress, title, unit=" micro-batches") as report:
            result = self._run(lambda: work(between), other, lambda: report(*now))
            last_report(report, now[1], title)
        return result

    def _run(
        self,
        work: Callable[[], T],
        other: Handle[Any] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Takes a turn on this model, and on another one that the work reads, in a fixed order."""
        engines = sorted({self.engine, (other or self).engine}, key=id)
        turns = [engine.turns for engine in engines]
        return take_all(turns, work, interrupt=self.core.interrupt, tick=tick)
