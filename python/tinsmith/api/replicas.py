"""tinsmith.Model(replicas=2): other processes that train and sample for this one, to its bits.

They hold the same base model. A training call's parts and a list of prompts are shared with them;
adapters, optimizers and files stay here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Event

from tinsmith import _core
from tinsmith.engine import groups
from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import Decoder, SampleRequest, SampleResult
from tinsmith.engine.errors import RequestError
from tinsmith.engine.replica import Weights
from tinsmith.engine.shared_call import PartResult, compute_part, share
from tinsmith.engine.training import Batch
from tinsmith.models.registry import LoadedModel
from tinsmith.replicas import local
from tinsmith.replicas.crew import RemoteCrew
from tinsmith.replicas.messages import Start
from tinsmith.system.steps import Steps

WAIT_SECONDS = 0.05  # between two looks at Ctrl-C, while only others compute


class ModelReplicas:
    """The replicas of a model. They are started here, and `join` waits for them."""

    def __init__(
        self,
        folder: Path,
        shares: Sequence[local.Share],
        *,
        dtype: str,
        weights: str,
        weights_copy: bool,
    ):
        own, *others = shares
        self._base = str(folder)
        self._crew = RemoteCrew(str(own))
        self.stopped = Event()  # set when Ctrl-C ends a call
        models = {self._base: folder}
        start = Start(0, models, dtype=dtype, weights=weights, weights_copy=weights_copy)
        local.begin(self._crew, others, start)

    def join(self, loaded: LoadedModel, device: str) -> None:
        """Waits for the replicas. RuntimeError says why one was refused."""
        ask = partial(self._crew.ask, self._base, loaded)
        self._crew.wait({self._base: loaded}, device, [ask])

    def close(self) -> None:
        """Ends their processes."""
        self._crew.close()

    # ---- training ----

    def train(
        self, core: _core.Adapter, batch: Batch, teacher: _core.Adapter | _core.Model | None
    ) -> Steps[PartResult]:
        """A training call, which the replicas share."""
        self.stopped.clear()
        whole, taught = batch.request(core, True), None
        if teacher is not None:
            adapter = teacher if isinstance(teacher, _core.Adapter) else None
            if (adapter.model if adapter else teacher) is not core.model:
                return (yield from compute_part(core, whole, teacher))  # another model's
            taught = Weights(self._base, adapter)
        helpers = self._crew.helpers(str(id(core)), Weights(self._base, core), taught)
        if helpers is None or batch.images:  # only this process has their pixels
            return (yield from compute_part(core, whole, teacher))
        steps = share(core, whole, batch.parts(core, whole), helpers, lambda: False, teacher)
        try:
            while True:
                news = next(steps)
                while isinstance(news, Future) and not wait([news], WAIT_SECONDS).done:
                    if self.stopped.is_set():
                        raise KeyboardInterrupt
                yield news
        except StopIteration as end:
            result: PartResult = end.value
            return result
        finally:
            steps.close()

    # ---- sampling ----

    def decode(
        self,
        decoder: Decoder,
        loaded: LoadedModel,
        adapter: _core.Adapter | None,
        requests: Sequence[SampleRequest],
        futures: Sequence[Future[SampleResult]],
    ) -> None:
        """Samples requests, here and at replicas, until all futures are done or `stopped` is set.
        The decoder is open."""
        self.stopped.clear()
        weights, away = Weights(self._base, adapter), dict[Future[SampleResult], SampleRequest]()
        parts: list[list[Future[SampleResult]]] = []

        def here(request: SampleRequest) -> Future[SampleResult]:
            future = Future[SampleResult]()
            decoder.add(loaded, adapter, request, future)
            self._crew.count(None, future, request.num_samples)
            return future

        for request in requests:
            parts.append([])
            for part in groups.split(request, self._crew.places(self._base)):
                sent = groups.bounded(part, loaded.context, lambda: decoder.cache_tokens(loaded))
                replica = self._crew.choose(weights, sent) if sent else None
                if replica is None or sent is None:
                    parts[-1].append(here(part))
                    continue
                future = replica.sample(weights, sent, _call(sent), 0, (None, 0), None)
                self._crew.count(replica, future, part.num_samples)
                parts[-1].append(future)
                away[future] = part
        try:
            while not self.stopped.is_set() and (decoder.active or away):
                if decoder.active:
                    decoder.step()
                else:
                    wait(away, WAIT_SECONDS, "FIRST_COMPLETED")
                for future in [one for one in away if one.done()]:
                    part = away.pop(future)
                    if _lost(future):
                        _replace(parts, future, here(part))
        finally:
            for future in (one for row in parts for one in row if not one.done()):
                decoder.cancel(future)
                for replica in self._crew.replicas:
                    replica.cancel(future)
        for row, whole in zip(parts, futures, strict=True):
            failures = [error for one in row if one.done() and (error := one.exception())]
            if failures:
                whole.set_exception(failures[0])
            elif all(one.done() for one in row):
                whole.set_result(groups.merge([one.result() for one in row]))


def _call(request: SampleRequest) -> Call:
    return Call("sample", request=request, tokens=len(request.prompt))


def _lost(future: Future[SampleResult]) -> bool:
    """Whether a replica could not do it: it is lost, or has no memory for it."""
    error = future.exception()
    return isinstance(error, RequestError) and error.category == "server"


def _replace(
    rows: list[list[Future[SampleResult]]],
    old: Future[SampleResult],
    new: Future[SampleResult],
) -> None:
    row = next(row for row in rows if old in row)
    row[row.index(old)] = new
