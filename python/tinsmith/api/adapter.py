"""tinsmith.Adapter: LoRA matrices on a base model, trained in this process.

`forward_backward` adds a loss's gradients; `optim_step` uses them. For a loss of your own, take the
log-probabilities of `forward`, and pass their gradient to `backward`: no second forward is run. If
a call raises, even KeyboardInterrupt, the adapter is as it was before the call.
"""

import dataclasses
import sys
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat, overload

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.api import datums
from tinsmith.api.distillation import JSD, Distillation
from tinsmith.api.kinds import Config, Ids, LossFn, Normalization, Numbers, SomeIds, Targets
from tinsmith.api.model_thread import ModelThread
from tinsmith.api.progress import Progress
from tinsmith.api.results import ForwardBackwardOutput, History, OptimStepOutput
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import OPTIMIZERS, take_step
from tinsmith.engine.bases import parse_bytes
from tinsmith.ops import tensors
from tinsmith.system.steps import Steps


def core_of(adapter: "Adapter | None") -> _core.Adapter | None:
    """The engine's adapter behind ours, or None for the base model."""
    if adapter is not None and not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a tinsmith.Adapter, {type(adapter).__name__} came")
    return None if adapter is None else adapter.core


class Adapter(Distillation):
    """LoRA matrices on a base model, with their gradients and optimizer. Made by Model.lora and
    Model.load_lora.

    If a call raises, even KeyboardInterrupt, the adapter is as it was before the call.

    Examples
    --------
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
        self._steps = array("d")  # the fields of each OptimStepOutput, concatenated
        self._kept: datums.Datums | None = None  # of the newest forward with keep=True

    @property
    def rank(self) -> int:
        """LoRA's rank.

        Examples
        --------
        >>> model.lora(rank=8).rank
        8
        """
        return self.core.rank

    @property
    def alpha(self) -> float:
        """LoRA's alpha; the scale is alpha / rank.

        Examples
        --------
        >>> model.lora(rank=8, alpha=16).alpha
        16.0
        """
        return self.core.alpha

    @property
    def size(self) -> int:
        """Number of trained parameters.

        Examples
        --------
        >>> adapter.size == sum(matrix.size for matrix in adapter.state_dict().values())
        True
        """
        return self.core.size

    @property
    def step(self) -> int:
        """Optimizer steps taken.

        Examples
        --------
        >>> adapter.step
        0
        """
        return self.core.step

    @property
    def history(self) -> History:
        """The steps that this object has taken; a notebook shows their loss and gradient norm.

        Examples
        --------
        >>> len(adapter.history)
        0
        """
        count = len(dataclasses.fields(OptimStepOutput))
        rows = zip(*[iter(self._steps)] * count, strict=True)
        return History([OptimStepOutput(*row) for row in rows])

    @property
    def step_memory(self) -> int:
        """Bytes that a training step may take; by default half of what remains beside the weights.

        You may set it, to bytes or to text like "6G"; 0 restores the default. No result depends on
        it. If a step's activations do not fit, as many layers as possible keep theirs and backward
        recomputes the others. A step that does not fit even then raises MemoryError.

        Examples
        --------
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
        self.engine.thread.run(lambda: setattr(self.core, "step_bytes", size))

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
        loss_fn: LossFn = "cross_entropy",
        *,
        loss_fn_inputs: Mapping[str, Numbers | None] | None = None,
        loss_fn_config: Config | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[Any]: ...
    @overload
    def forward_backward(
        self,
        tokens: list[SomeIds] | tuple[SomeIds, ...],
        targets: Sequence[Targets],
        weights: Sequence[Numbers] | None = None,
        loss_fn: LossFn = "cross_entropy",
        *,
        loss_fn_inputs: Mapping[str, Sequence[Numbers] | None] | None = None,
        loss_fn_config: Config | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[list[Any]]: ...
    def forward_backward(
        self,
        tokens: Any,
        targets: Any,
        weights: Any | None = None,
        loss_fn: LossFn = "cross_entropy",
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        loss_fn_config: Config | None = None,
        progress: Progress = False,
    ) -> ForwardBackwardOutput[Any]:
        """Evaluates a loss on sequences, and adds its gradient to the accumulated gradients.

        A loss is a sum, in nats. Names are Tinker's:

        | loss_fn | loss_fn_inputs | loss_fn_config |
        |---|---|---|
        | cross_entropy | weights, 1 where left out | |
        | importance_sampling | logprobs, advantages | |
        | ppo, dapo, cispo | logprobs, advantages | clip_low_threshold, clip_high_threshold |
        | gspo | logprobs, advantages, sequence_ratio_mask |clip_low_threshold, clip_high_threshold|
        | dro | logprobs, advantages | beta |
        | dppo | logprobs, advantages | delta |
        | stable_reinforce | logprobs, advantages | kl_coeff |

        Parameters
        ----------
        tokens : ids (N,), or a list of them
            One sequence, or several, each of its own length.
        targets : ids (N,) or (N, K), or a list of them
            Those at position i are predicted from tokens[: i + 1]. A list of sequences needs a list
            of targets; (N, K) is for cross_entropy.
        weights : floats of the targets' shape, or a list of them, optional
            Short for ``loss_fn_inputs={"weights": weights}``.
        loss_fn : str
            A name from the table.
        loss_fn_inputs : dict of float arrays, or of lists of them, optional
            Each in the targets' shape. logprobs are the sampler's, from when it drew the targets. A
            clip threshold may also be one number for each target.
        loss_fn_config : dict of float, optional
            Defaults are Tinker's; dro's beta has none.
        progress : bool or function
            True draws a bar with tqdm. A function is called with (micro-batches done, all).

        Returns
        -------
        ForwardBackwardOutput
            The loss, and log-probabilities of the targets, in their shape and kind of array.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong type or shape, or the loss does not take it.
        IndexError
            If an id is not in the model's vocabulary.
        FloatingPointError
            If a result is not finite.
        MemoryError
            If a step does not fit: see `step_memory`.

        Notes
        -----
        Arrays are NumPy's, lists, or anything with __dlpack__; int32 and float32 are zero-copy.

        References
        ----------
        ppo: Schulman et al., arXiv:1707.06347. dapo: Yu et al., arXiv:2503.14476. cispo: MiniMax,
        arXiv:2506.13585. gspo: Zheng et al., arXiv:2507.18071. dro: Richemond et al.,
        arXiv:2405.19107.

        Examples
        --------
        >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310], [0, 1, 1])
        >>> out.logprobs.shape, adapter.optim_step(learning_rate=1e-4).loss == out.loss
        ((3,), True)
        >>> rows, answers = [[55, 73], [55]], [[73, 327], [73]]
        >>> drawn = {"logprobs": adapter.forward(rows, answers), "advantages": [[1.0, -1.0], [0.5]]}
        >>> adapter.forward_backward(rows, answers, loss_fn="ppo", loss_fn_inputs=drawn)
        ForwardBackwardOutput(loss=-0.5, logprobs=[float32[2], float32[1]])
        """
        if loss_fn == JSD:
            raise ValueError(f"{JSD} has a teacher: call adapter.{JSD}(…)")
        inputs = loss_fn_inputs
        if weights is not None and isinstance(inputs, Mapping | None):
            if (inputs or {}).get("weights") is not None:
                raise TypeError("weights came twice: as an argument, and in loss_fn_inputs")
            inputs = {**(inputs or {}), "weights": weights}
        given = datums.gather(tokens, targets)
        arrays, config = datums.checked(loss_fn, inputs, loss_fn_config, given)
        batch = given.as_batch(loss_fn, arrays, config)
        found = self._step(
            lambda: self.engine.train(self.core, batch), "forward_backward", progress
        )
        return ForwardBackwardOutput(found.loss, given.shaped(found.logprobs))

    def ema_update(self, leader: "Adapter", decay: float) -> None:
        """Moves the weights towards another adapter's: an exponential moving average.

        weights = decay · weights + (1 - decay) · leader's. Call it on a snapshot after each step,
        for example for a teacher.

        Parameters
        ----------
        leader : Adapter
            Of the same layout and model; otherwise ValueError.
        decay : float
            In [0, 1).

        Examples
        --------
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
        """Log-probabilities of the targets.

        Parameters
        ----------
        tokens, targets, progress
            As in `forward_backward`.
        keep : bool
            True if `backward` may follow. Activations stay in memory until another call needs the
            memory; `backward` recomputes the missing ones. A snapshot keeps nothing.

        Returns
        -------
        float32 array of the targets' shape and kind, or a list of them
            In nats.

        Examples
        --------
        >>> logprobs = adapter.forward([55, 73, 327], [73, 327, 310])
        >>> adapter.backward(2 * logprobs)  # the loss is the sum of their squares
        """
        given = datums.gather(tokens, targets)
        keep = keep and self._trained

        def work() -> Steps[NDArray[np.float32]]:
            flat = yield from self.core.forward(*given.arrays, keep=keep, stepwise=True)
            if keep:
                self._kept = given
            return flat

        return given.shaped(self._step(work, "forward", progress))

    def backward(
        self, dlogprobs: Numbers | Sequence[Numbers], *, progress: Progress = False
    ) -> None:
        """Adds the gradient of a loss of your own.

        It equals, bit for bit, what forward_backward adds for a loss with this derivative. An
        adapter keeps one forward, the newest from any thread. Threads that share an adapter must
        hold a lock around each pair of forward and backward.

        Parameters
        ----------
        dlogprobs : float array of the targets' shape, or a list of them
            The loss's derivative with respect to the newest kept forward's log-probabilities, in
            the form that forward returned.
        progress : bool or function
            As in `forward_backward`.

        Raises
        ------
        ValueError
            If there was no forward, the weights have changed since, a backward has used it, or a
            number is not finite.

        Examples
        --------
        >>> logprobs = adapter.forward([55, 73, 327], [73, 327, 310])
        >>> adapter.backward(np.full(3, -1.0))  # cross-entropy's
        """

        def work() -> Steps[None]:
            if self._kept is None:
                raise ValueError(
                    "there is no forward to go back from: none was kept, or backward has used it"
                )
            flat = self._kept.flat(dlogprobs, "dlogprobs")
            yield from self.core.backward(flat, stepwise=True)
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
        """One step with the accumulated gradients, which are then cleared.

        The step is short; Ctrl-C takes effect after it. A step without a gradient is logged as a
        warning, and so is a step that makes the weights' norm a thousand times larger.

        Parameters
        ----------
        learning_rate : float, optional
            AdamW's default is 1e-4. Dimuon needs one.
        beta1, beta2 : float, optional
            AdamW: 0.9 and 0.95. Dimuon: beta1 0.9.
        eps, weight_decay : float, optional
            AdamW: 1e-12 (0 is allowed) and 0.
        damping, rank_lr_correction_exponent : float, optional
            Dimuon: 1e-4 and 0.175.
        grad_clip_norm : float, optional
            Upper limit of the gradient's norm; 0: no clipping.
        grad_accumulation_normalization : {"num_loss_tokens", "num_sequences"}, optional
            What the gradient is divided by before it is clipped.

        Raises
        ------
        FloatingPointError
            If the step would give numbers that are not finite. No step is taken, and nothing
            changes.
        TypeError, ValueError
            If the optimizer does not take an argument.

        References
        ----------
        AdamW: Loshchilov and Hutter, arXiv:1711.05101.

        Examples
        --------
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
        report, _ = self.engine.thread.run(lambda: take_step(self.core, params))
        step = OptimStepOutput(**report)
        self._steps.extend(dataclasses.astuple(step))
        return step

    def zero_grad(self) -> None:
        """Drops the accumulated gradients.

        Examples
        --------
        >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
        >>> adapter.zero_grad()
        >>> any(gradient.any() for gradient in adapter.gradients().values())
        False
        """
        self.engine.thread.run(self.core.clear_gradients)

    # ---- its numbers ----

    def state_dict(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the matrices by PEFT's names.

        Returns
        -------
        dict of float32 arrays
            A (rank, in) and B (out, rank).

        Examples
        --------
        >>> name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        >>> adapter.state_dict()[name].shape
        (4, 160)
        """
        return self._read("weights")

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the accumulated gradients, with the names and shapes of `state_dict`.

        Examples
        --------
        >>> adapter.gradients().keys() == adapter.state_dict().keys()
        True
        """
        return self._read("gradients")

    def _read(self, what: str) -> dict[str, NDArray[np.float32]]:
        flat = self.engine.thread.run(lambda: self.core.read(what))
        return dict(checkpoint.matrices(self.engine.loaded.family, self.core, flat))

    def snapshot(self) -> "Adapter":
        """A copy of the current weights, to sample from and to score with; it can't be trained.

        Examples
        --------
        >>> before = adapter.snapshot()
        >>> [answer] = model.sampler().sample([55, 73, 327], adapter=before, max_tokens=5)
        """
        core = self.engine.thread.run(self.core.snapshot)
        return Adapter(self.engine, core, self._meta, trained=False)

    def save(self, path: str | Path, *, optimizer: bool = True, overwrite: bool = False) -> None:
        """Writes a folder that PEFT can load. It appears whole or not at all.

        Parameters
        ----------
        path : str or Path
            The folder.
        optimizer : bool
            Also save the optimizer: Model.load_lora(path, optimizer=True) continues bit for bit.
        overwrite : bool
            Replace an existing folder; otherwise FileExistsError.

        Examples
        --------
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

        self.engine.thread.run(work)
