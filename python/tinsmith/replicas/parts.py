"""A replica's side of training: parts of calls, computed on snapshots of the owner's weights.

The sums of a call's parts wait in the weights' own adapter until the owner takes them. Weights have
a run of this worker each, so that their parts are computed one after the other, and take turns with
those of other weights.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tinsmith import _core
from tinsmith.engine.call_log import Call
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError
from tinsmith.engine.runs import Job, Run, ShortJob
from tinsmith.engine.shared_call import PartResult, Sum, compute_part
from tinsmith.engine.worker import Worker
from tinsmith.replicas.messages import Compute, Drop, Take
from tinsmith.replicas.pulled import Pulled
from tinsmith.system.steps import Steps

T = TypeVar("T")

STOPPED = "the part was stopped"


@dataclass(eq=False)
class _Summing:
    """Weights whose parts are computed here."""

    run: str
    turns: itertools.count[int] = field(default_factory=itertools.count)
    jobs: list[PartJob] = field(default_factory=list)  # of the newest call
    call: int = 0  # whose sums the adapter has; in the engine's thread
    adapter: _core.Adapter | None = None


class Parts:
    """See the file's header. Only the thread that receives may use it."""

    def __init__(self, worker: Worker, pulled: Pulled):
        self._worker, self._pulled = worker, pulled
        self._weights: dict[str, _Summing] = {}
        self._names = itertools.count()  # of runs: weights of one name may follow each other

    def begin(self, ask: Compute) -> PartJob:
        """Begins with a part."""
        summing = self._weights.get(ask.weights)
        if summing is None:
            run = f"{next(self._names)}: parts on weights {ask.weights}"
            summing = self._weights[ask.weights] = _Summing(run)
            self._worker.call(lambda engine: engine.runs.add(Run(run, engine.models[ask.base])))
        job = PartJob(ask, summing, self._pulled)
        summing.jobs = [one for one in summing.jobs if not one.future.done()]
        summing.jobs.append(job)
        self._submit(summing, job)
        return job

    def take(self, take: Take) -> Future[list[Sum]]:
        """Some sums of a call, which are no longer here then."""
        summing = self._weights.get(take.weights)
        if summing is None:
            gone = Future[list[Sum]]()
            gone.set_exception(RequestError("the replica has no such sums", "server"))
            return gone
        return self._submit(summing, TakeJob(take, summing))

    def drop(self, drop: Drop) -> None:
        """Ends a call's parts under way, and forgets its sums."""
        summing = self._weights.get(drop.weights)
        if summing is not None:
            for job in summing.jobs:
                if job.ask.part.call == drop.call:
                    job.stop()
            self._submit(summing, DropJob(drop, summing))

    def forget(self, weights: str) -> None:
        """Ends with weights, after what was asked of them before."""
        if (summing := self._weights.pop(weights, None)) is not None:
            self._worker.forget([summing.run], [])

    def _submit(self, summing: _Summing, job: Job[T]) -> Future[T]:
        return self._worker.submit(summing.run, next(summing.turns), job)


@dataclass(eq=False)
class PartJob(Job[PartResult]):
    """Computes a part."""

    ask: Compute
    summing: _Summing
    pulled: Pulled
    stopped: bool = False
    adapter: _core.Adapter | None = None  # while it is computing

    def called(self) -> Call:
        return Call("forward_backward", tokens=self.ask.part.rows)

    def stop(self) -> None:
        """Ends it within a layer's time, from any thread. Its future fails."""
        self.stopped = True
        if (adapter := self.adapter) is not None:
            adapter.interrupt()

    def steps(self, run: Run, engine: Engine) -> Steps[PartResult]:
        if self.stopped:
            raise RequestError(STOPPED)
        adapter, part, summing = self._prepared(run, engine), self.ask.part, self.summing
        if summing.call != part.call:
            adapter.drop_parts()
        summing.call, summing.adapter = part.call, adapter
        with engine.training(run, adapter):
            work = compute_part(adapter, part, self._teacher(run, engine))
            try:
                self.adapter = adapter
                while not self.stopped:
                    try:
                        progress = next(work)
                    except StopIteration as end:
                        result: PartResult = end.value
                        return result
                    yield progress
                raise RequestError(STOPPED)
            except KeyboardInterrupt:
                raise RequestError(STOPPED) from None
            finally:
                self.adapter = None
                work.close()

    def _prepared(self, run: Run, engine: Engine) -> _core.Adapter:
        """The weights' adapter."""
        adapter = self.pulled.adapter(engine, self.ask.weights)
        engine.bases.use(run.base)
        engine.limit(run, adapter, self.ask.part.arrays[1])
        return adapter

    def _teacher(self, run: Run, engine: Engine) -> _core.Adapter | _core.Model | None:
        if self.ask.part.taught is None:
            return None
        weights, base = self.ask.teacher
        model = engine.models[base]
        run.teacher = model.path
        return self.pulled.adapter(engine, weights) if weights else engine.bases.use(model).core


@dataclass(eq=False)
class TakeJob(ShortJob[list[Sum]]):
    """Takes sums."""

    take: Take
    summing: _Summing

    def called(self) -> Call:
        return Call("take")

    def run(self, run: Run, engine: Engine) -> list[Sum]:
        adapter = self.summing.adapter
        if adapter is None or self.summing.call != self.take.call:
            raise RequestError("the replica has no such sums", "server")
        return [adapter.take_part(node) for node in self.take.nodes]


@dataclass(eq=False)
class DropJob(ShortJob[None]):
    """Drops a call's sums."""

    drop: Drop
    summing: _Summing

    def called(self) -> Call:
        return Call("drop")

    def run(self, run: Run, engine: Engine) -> None:
        if self.summing.adapter is not None and self.summing.call == self.drop.call:
            self.summing.adapter.drop_parts()
            self.summing.adapter = None
