"""Distillation in this process: losses that compare an adapter with a teacher's distributions.

`generalized_jsd` runs the teacher; `generalized_jsd_topk` takes the teacher's log-probabilities of
K ids per token. Both return the loss and the divergence at each token.
"""

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, overload

from tinsmith import _core
from tinsmith.api import datums
from tinsmith.api.call_thread import run_in_all
from tinsmith.api.kinds import Ids, Numbers, SomeIds, Targets
from tinsmith.api.model_thread import Handle
from tinsmith.api.progress import Progress, last_report, reporting
from tinsmith.api.results import DistillOutput
from tinsmith.engine import teachers
from tinsmith.system.steps import Steps, finish

T = TypeVar("T")

JSD = "generalized_jsd"  # the engine's loss with a teacher


class Distillation(Handle[_core.Adapter]):
    """The part of an Adapter that takes turns of the engine, and that has a teacher."""

    @overload
    def generalized_jsd(
        self,
        tokens: Ids,
        targets: Ids,
        weights: Numbers,
        teacher_tokens: Ids,
        *,
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
        targets: Sequence[Ids],
        weights: Sequence[Numbers],
        teacher_tokens: Sequence[Ids],
        *,
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
        teacher_tokens: Any,
        *,
        teacher: Handle[Any] | None = None,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex | None = None,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[Any]:
        """OPSD's loss: Σ weights · JSD_β(teacher ‖ student) over the vocabulary, and its gradient.

        Where a weight is not 0, the student's distribution is compared with the teacher's for the
        same token. The teacher gets no gradient.

        Parameters
        ----------
        tokens, targets : ids (N,), or lists of them
            As in `forward_backward`.
        weights : floats (N,), or a list of them
            The completion begins at the first target whose weight is not 0.
        teacher_tokens : ids (M,), or a list of them
            The teacher's prompt, and then the completion.
        teacher : Adapter or Model, optional
            This adapter, a snapshot or another adapter, or a model of the same vocabulary. None:
            the base model.
        beta : float
            From 0, KL(teacher ‖ student), to 1, KL(student ‖ teacher).
        temperature : float
            Divides both sides' logits.
        top_k : int, optional
            Only the teacher's top_k likeliest ids count; both sides are renormalized over them.
        token_clip : float, optional
            An upper limit of each id's term.
        progress
            As in `forward_backward`; so are the errors.

        Returns
        -------
        DistillOutput
            The loss, log-probabilities of the targets, and the divergence at each.

        See Also
        --------
        generalized_jsd_topk : With the teacher's log-probabilities in place of the teacher.

        References
        ----------
        OPSD: Zhao et al., Self-Distilled Reasoner, arXiv:2601.18734. GKD: Agarwal et al.,
        arXiv:2306.13649.

        Examples
        --------
        >>> answer = [327, 310, 1159]  # after a prompt, and after one that has the solution
        >>> tokens, read = [55, 73, *answer], [55, 420, 438, 73, *answer]
        >>> out = adapter.generalized_jsd(tokens[:-1], tokens[1:], [0, 1, 1, 1], read)
        >>> out.divergences.shape
        (4,)
        """
        given = datums.gather(tokens, targets)
        read, lengths = datums.teachers(teacher_tokens, given)
        options = {"beta": beta, "temperature": temperature, "top_k": top_k}
        options |= {"token_clip": token_clip}
        inputs, config = datums.checked(JSD, {"weights": weights}, options, given)
        if teacher is not None and not isinstance(teacher, Handle):
            found = type(teacher).__name__
            raise TypeError(f"teacher must be a tinsmith Adapter or Model, or None; {found} came")
        core = None if teacher is None else teacher.core

        batch = given.as_batch(JSD, inputs, config, (read, lengths))
        found = self._step(
            lambda: self.engine.train(self.core, batch, core or self.core.model),
            JSD,
            progress,
            teacher,
        )
        assert found.divergences is not None
        return DistillOutput(
            found.loss, given.shaped(found.logprobs), given.shaped(found.divergences)
        )

    @overload
    def generalized_jsd_topk(
        self,
        tokens: Ids,
        targets: Targets,
        weights: Numbers,
        teacher_logprobs: Numbers,
        *,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[Any]: ...
    @overload
    def generalized_jsd_topk(
        self,
        tokens: list[SomeIds] | tuple[SomeIds, ...],
        targets: Sequence[Targets],
        weights: Sequence[Numbers],
        teacher_logprobs: Sequence[Numbers],
        *,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[list[Any]]: ...
    def generalized_jsd_topk(
        self,
        tokens: Any,
        targets: Any,
        weights: Any,
        teacher_logprobs: Any,
        *,
        beta: SupportsFloat = 0.5,
        temperature: SupportsFloat = 1.0,
        token_clip: SupportsFloat | None = None,
        progress: Progress = False,
    ) -> DistillOutput[Any]:
        """`generalized_jsd` over K ids per token, with the teacher's log-probabilities of them.

        Both sides are renormalized over the ids. No teacher runs.

        Parameters
        ----------
        tokens : ids (N,), or a list of them
            As in `forward_backward`.
        targets : ids (N, K), or a list of them
            -99999 stands for no id.
        weights : floats (N,) or (N, K), or a list of them
            One for each token, or for each id.
        teacher_logprobs : floats (N, K), or a list of them
            In nats, up to a constant for each token. `Model.topk_logprobs` returns ids and these.
        beta, temperature, token_clip, progress
            As in `generalized_jsd`; so are the errors.

        Returns
        -------
        DistillOutput
            The loss, log-probabilities of the ids (N, K), and the divergence at each token.

        Examples
        --------
        >>> answer = [327, 310, 1159]
        >>> tokens, read = [55, 73, *answer], [55, 420, 438, 73, *answer]
        >>> top = model.topk_logprobs(read, 5)
        >>> ids, scores, mask = top.ids[-4:], top.logprobs[-4:], [0, 1, 1, 1]
        >>> adapter.generalized_jsd_topk(tokens[:-1], ids, mask, scores).logprobs.shape
        (4, 5)
        """
        if teacher_logprobs is None:
            raise TypeError(f"{JSD}_topk needs teacher_logprobs")
        given = datums.gather(tokens, targets)
        for index, shape in enumerate(given.shapes):
            if len(shape) == 1:
                where = f"targets[{index}]" if given.batch else "targets"
                raise ValueError(f"{where} has shape {shape}; it must be ({shape[0]}, K)")
        arrays = {"weights": weights, teachers.LOGPROBS: teacher_logprobs}
        options = {"beta": beta, "temperature": temperature, "token_clip": token_clip}
        inputs, config = datums.checked(JSD, arrays, options, given)
        batch = given.as_batch(JSD, inputs, config)
        found = self._step(lambda: self.engine.train(self.core, batch), JSD, progress)
        own, teacher, of_ids = (
            given.split(part)
            for part in (found.logprobs, inputs[teachers.LOGPROBS], inputs["weights"])
        )
        divergences = teachers.divergences(own, teacher, of_ids, config)
        return DistillOutput(found.loss, given.as_given(own), given.as_given(divergences))

    def _step(
        self,
        begin: Callable[[], Steps[T]],
        title: str,
        progress: Progress,
        other: Handle[Any] | None = None,
    ) -> T:
        """Runs a training call. The engine's thread begins it."""
        if not progress:
            return self._run(lambda: finish(begin()), other)
        now = [0, 1]

        def told(done: int, total: int) -> None:
            now[:] = done, total

        with reporting(progress, title, unit=" micro-batches") as report:
            result = self._run(lambda: finish(begin(), told), other, lambda: report(*now))
            last_report(report, now[1], title)
        return result

    def _run(
        self,
        work: Callable[[], T],
        other: Handle[Any] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Runs `work` on this model, and on another one that it reads, locked in a fixed order."""
        engines = sorted({self.engine, (other or self).engine}, key=id)
        threads = [engine.thread for engine in engines]

        def interrupt() -> None:
            self.engine.stop_waiting()
            self.core.interrupt()

        return run_in_all(threads, work, interrupt=interrupt, tick=tick)
