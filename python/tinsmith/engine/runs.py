"""The runs of a server, and the order in which their requests are executed.

Requests of one run are executed in the order of their sequence numbers, whatever order they arrive
in (the SDK posts the chunks 2..n of a call before chunk 1). A request that arrives early waits for
the earlier ones, for a limited time. Runs take turns, one micro-batch each (fair_turns.py). All of
this belongs to the worker's thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinsmith import _core
from tinsmith.checkpoints.lora import Average
from tinsmith.engine.call_log import Call, CallListener
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.fair_turns import Account, FairTurns, charge
from tinsmith.models.registry import BaseModel
from tinsmith.system.steps import Steps

if TYPE_CHECKING:
    from tinsmith.engine.engine import Engine
    from tinsmith.engine.training import KeptForward

T = TypeVar("T")

# A run without a request for this long frees its step's memory.
IDLE_SECONDS = 60.0


@dataclass(eq=False)
class Job(ABC, Generic[T]):
    """A request to a run: its work, and the future that gets the result. Its number in the run and
    its Call are set when it is submitted."""

    future: Future[T] = field(init=False, repr=False, default_factory=Future)
    seq: int = field(init=False, repr=False)
    call: Call = field(init=False, repr=False)

    def submitted(self, run: str, seq: int, on_end: CallListener) -> Future[T]:
        """Makes it request `seq` of a run; `on_end` is called when it ends."""
        self.seq, self.call = seq, self.called()
        self.call.run = run
        self.call.follow(self.future, on_end)
        return self.future

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return 0

    @abstractmethod
    def called(self) -> Call:
        """A new Call for it."""

    @abstractmethod
    def steps(self, run: Run, engine: Engine) -> Steps[T]:
        """Executes it, in the worker's thread; between two steps others may. It begins again after
        it raised NotLoaded."""


class ShortJob(Job[T]):
    """A job of one step."""

    @abstractmethod
    def run(self, run: Run, engine: Engine) -> T:
        """Executes it; it is called again after it raised NotLoaded."""

    def steps(self, run: Run, engine: Engine) -> Steps[T]:
        return self.run(run, engine)
        yield  # makes it a generator


@dataclass
class Run:
    """One adapter in training, and its queued requests."""

    name: str
    base: BaseModel
    adapter: _core.Adapter | None = None
    reserved: int = 0  # bytes for the adapter and its steps
    vectors: int = 0  # bytes for the adapter alone
    failure: RequestError | None = None  # why there is no adapter
    average: Average | None = None  # of the adapter, once a loss has used it
    teacher: Path | None = None  # the base model of its teacher, in a call that has one
    next_seq: int = 0  # 0 is the creation; the SDK's requests start at 1
    ready: deque[Job[Any]] = field(default_factory=deque)  # their turn has come
    waiting: dict[int, Job[Any]] = field(default_factory=dict)  # for earlier requests
    waiting_since: float = 0.0
    kept: KeptForward | None = None  # the forward that forward_backward_custom began with
    steps: Steps[Any] | None = None  # of its first request, once it has begun
    training: bool = False  # whether its training call is in flight
    account: Account[Run] = field(default_factory=Account)  # whose turns it shares
    warned: bool = False  # whether it was logged that its loss is tinsmith's own
    idle_since: float = 0.0  # when its newest request ended; 0: it holds no step's memory

    @property
    def bytes(self) -> int:
        """The bytes that it holds; a step of long datums may have taken more than was reserved."""
        return max(self.reserved, self.adapter.bytes if self.adapter else 0)

    @property
    def spare(self) -> int:
        """The bytes that trim() frees."""
        return 0 if self.training else self.bytes - self.reserved

    def trained(self) -> _core.Adapter:
        """The adapter; RequestError if there is none."""
        if self.adapter is None:
            reason = self.failure or RequestError("it was never created")
            raise RequestError(f"{self.name} can't be used: {reason}", reason.category)
        return self.adapter

    @property
    def idle(self) -> bool:
        """Whether it holds a step's memory, and none of its requests is ready or running."""
        return self.idle_since > 0 and not self.ready

    def trim(self) -> bool:
        """Frees a step's memory until the next step; returns whether there was any. The run's part
        of the memory stays reserved."""
        held, self.idle_since = self.adapter.bytes if self.adapter else 0, 0.0
        if self.adapter is not None:
            self.adapter.model.trim()
        return self.adapter is not None and self.adapter.bytes < held

    def fail_waiting(self, error: RequestError) -> None:
        """Fails the requests that wait for earlier ones."""
        for job in self.waiting.values():
            fail(job.future, error)
        self.waiting.clear()


class Runs(dict[str, Run]):
    """Runs by name, and the order of their turns. A request waits at most `gap_seconds` for an
    earlier one that has not arrived. A run without requests is trimmed after `idle_seconds`."""

    def __init__(self, gap_seconds: float, idle_seconds: float = IDLE_SECONDS):
        super().__init__()
        self._gap_seconds = gap_seconds
        self._idle_seconds = idle_seconds
        self._turns: FairTurns[Run] = FairTurns()  # the runs that have something ready

    @property
    def busy(self) -> bool:
        """Whether a request's turn has come."""
        return bool(self._turns)

    def add(self, run: Run) -> None:
        """A new run."""
        self[run.name] = run

    def submit(self, name: str, job: Job[Any]) -> None:
        """Queues a request. It fails if there is no such run, or if its turn is over."""
        run, seq = self.get(name), job.seq
        if run is None:
            gone = f"there is no run {name}: its session has ended, or it was never made"
            fail(job.future, RequestError(gone))
            return
        if seq < run.next_seq or seq in run.waiting:
            late = f"request {seq} of {name} comes after its turn: it was answered or given up"
            fail(job.future, RequestError(late))
            return
        if not run.waiting:
            run.waiting_since = time.monotonic()
        run.waiting[seq] = job
        while run.next_seq in run.waiting:
            self.make_ready(run, run.waiting.pop(run.next_seq))
            run.next_seq += 1
            run.waiting_since = time.monotonic()

    def make_ready(self, run: Run, job: Job[Any]) -> None:
        """Queues a request after all that are ready, whatever its number."""
        if not run.ready:
            self._turns.add(run.account, run)
        run.ready.append(job)

    def next(self) -> Run:
        """Takes the run that is next in turn; it gets no other turn before `resume`, `go_on` or
        `over`."""
        return self._turns.take()

    def resume(self, run: Run) -> None:
        """Gives a run the next turn again: its first request could not be executed yet."""
        self._turns.add(run.account, run, first=True)

    def go_on(self, run: Run, rows: float) -> None:
        """A step of a run's first request is done: the run goes to the end of the queue."""
        charge(run.account, rows)
        self._turns.add(run.account, run)

    def over(self, run: Run, rows: float) -> None:
        """A run's first request is done: the run goes to the end of the queue."""
        charge(run.account, rows)
        run.ready.popleft()
        run.steps = None
        run.idle_since = time.monotonic()
        if run.ready:
            self._turns.add(run.account, run)

    def timeout(self) -> float | None:
        """Seconds until a request has waited long enough, or a run is to be trimmed; None if there
        is neither."""
        ends = [run.waiting_since + self._gap_seconds for run in self.values() if run.waiting]
        ends += [run.idle_since + self._idle_seconds for run in self.values() if run.idle]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def trim(self) -> None:
        """Trims the runs that have been idle for `idle_seconds`."""
        now = time.monotonic()
        for run in self.values():
            if run.idle and now - run.idle_since >= self._idle_seconds:
                run.trim()

    def give_up_gaps(self) -> None:
        """Fails the requests that have waited too long for an earlier one."""
        now = time.monotonic()
        for run in self.values():
            if run.waiting and now - run.waiting_since >= self._gap_seconds:
                missing, held = run.next_seq, sorted(run.waiting)
                run.next_seq = held[-1] + 1
                error = RequestError(
                    f"request {held[0]} of {run.name} waited {self._gap_seconds:g} s for request "
                    f"{missing}, which never came; requests {held} were not executed"
                )
                run.fail_waiting(error)

    def close(self, error: RequestError) -> None:
        """Fails all queued requests, and ends those in flight."""
        for run in self.values():
            if run.steps is not None:
                run.steps.close()
            for job in run.ready:
                fail(job.future, error)
            run.fail_waiting(error)


def fail(future: Future[Any], error: BaseException) -> None:
    """Fails a future with an error, unless it is already done."""
    if not future.done():
        future.set_exception(explain(error))
