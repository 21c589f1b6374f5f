"""The runs of a server, and the order in which their requests are executed.

Requests of one run are executed in the order of their sequence numbers, whatever order they arrive
in (the SDK posts the chunks 2..n of a call before chunk 1). A request that arrives early waits for
the earlier ones, for a limited time. Runs take turns, one micro-batch each (fair_turns.py).
Deadlines are kept in the order in which they end, and idle runs in the order in which they became
idle, so that a turn costs the same however many runs there are. All of this belongs to the worker's
thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from tinsmith import _core
from tinsmith.checkpoints.lora import Average
from tinsmith.engine.call_log import Call, CallListener
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.fair_turns import Client, Clocked, FairTurns
from tinsmith.engine.ledger import Hold, Ledger
from tinsmith.models.registry import BaseModel
from tinsmith.system.steps import Steps

if TYPE_CHECKING:
    from tinsmith.engine.engine import Engine
    from tinsmith.engine.offload import Offloaded
    from tinsmith.engine.training import KeptForward

T = TypeVar("T")

# A base model whose runs had no request for this long frees their step's memory.
IDLE_SECONDS = 60.0

BUSY_BYTES = 16  # a parameter of a run with a request: weights, two moments, gradients


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


@dataclass(eq=False)
class Run(Clocked):
    """One adapter in training, and its queued requests."""

    name: str
    base: BaseModel
    adapter: _core.Adapter | None = None
    offloaded: Offloaded | None = None  # its adapter and average, while they are elsewhere
    failure: RequestError | None = None  # why there is no adapter
    average: Average | None = None  # of the adapter, once a loss has used it
    teacher: Path | None = None  # the base model of its teacher, in a call that has one
    next_seq: int = 0  # 0 is the creation; the SDK's requests start at 1
    ready: deque[Job[Any]] = field(default_factory=deque)  # their turn has come
    waiting: dict[int, Job[Any]] = field(default_factory=dict)  # for earlier requests
    waiting_since: float = 0.0
    kept: KeptForward | None = None  # the forward that forward_backward_custom began with
    steps: Steps[Any] | None = None  # of its first request, once it has begun
    client: Client[Run] = field(default_factory=Client)  # whose turns it shares
    sums: int = 0  # bytes of the gradients of its call in flight
    stays: bool = False  # whether it can't be moved elsewhere before its next request
    warned: bool = False  # whether it was logged that its loss is tinsmith's own

    @property
    def bytes(self) -> int:
        """The bytes of its vectors, and of its average's. Weights that two share count twice."""
        held = [self.adapter, self.average.adapter if self.average else None]
        return sum(adapter.bytes for adapter in held if adapter is not None)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        state = self.adapter or self.offloaded
        return state.step if state else 0

    def trained(self) -> _core.Adapter:
        """The adapter; RequestError if there is none."""
        if self.adapter is None:
            reason = self.failure or RequestError("it was never created")
            raise RequestError(f"{self.name} can't be used: {reason}", reason.category)
        return self.adapter

    def fail_waiting(self, error: RequestError) -> None:
        """Fails the requests that wait for earlier ones."""
        for job in self.waiting.values():
            fail(job.future, error)
        self.waiting.clear()


class Runs(dict[str, Run]):
    """Runs by name, and the order of their turns. A request waits at most `gap_seconds` for an
    earlier one that has not arrived. `release` is called with a base model's path when its runs had
    no request for `idle_seconds`. `ledger` has the runs' memory. `moves`: whether idle runs can be
    moved elsewhere."""

    def __init__(
        self,
        gap_seconds: float,
        idle_seconds: float = IDLE_SECONDS,
        ledger: Ledger | None = None,
        release: Callable[[Path], object] = lambda base: None,
        moves: bool = False,
    ):
        super().__init__()
        self._gap_seconds = gap_seconds
        self._idle_seconds = idle_seconds
        self._ledger = Ledger() if ledger is None else ledger
        self._release = release
        self._moves = moves
        self._turns: FairTurns[Run] = FairTurns()  # the runs that have something ready
        self._clients: WeakValueDictionary[str, Client[Run]] = WeakValueDictionary()
        self._gaps: dict[str, Run] = {}  # those that wait for an earlier request, longest first
        self._used: dict[Path, float] = {}  # when a run of a base was last used, longest ago first
        self.idle: dict[str, Run] = {}  # those that may be moved elsewhere, idle for longest first

    @property
    def busy(self) -> bool:
        """Whether a request's turn has come."""
        return bool(self._turns)

    def add(self, run: Run) -> None:
        """A new run."""
        self[run.name] = run

    def client(self, name: str, weight: float) -> Client[Run]:
        """A client's part of the turns; "" is a client of its own."""
        if not name:
            return Client(weight)
        return self._clients.setdefault(name, Client(weight))

    def remove(self, run: Run) -> None:
        """Forgets a run and its memory; requests that wait for earlier ones fail."""
        self.pop(run.name, None)
        run.adapter, run.average = None, None
        run.failure = RequestError("its session has ended")
        self._fail_waiting(run, RequestError(f"{run.name} can't be used: {run.failure}"))
        self.count(run)

    def count(self, run: Run) -> None:
        """Writes down what memory a run holds; called after whatever changes it."""
        self.idle.pop(run.name, None)
        if run.adapter is None:
            self._ledger.drop(("run", run.name))
            return
        moves = self._moves and not run.ready and not run.stays
        if moves:
            self.idle[run.name] = run
        held, what = run.bytes, f"the run {run.name}"
        if run.ready:  # a request may add gradients
            held = max(held, BUSY_BYTES * run.adapter.size)
        hold = Hold(run.base.path, held, what, pins=True, moves=moves, trains=True)
        self._ledger.set(("run", run.name), hold)

    def keep(self, run: Run) -> None:
        """An idle run can't be moved elsewhere before its next request."""
        run.stays = True
        self.count(run)

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
            self._begin_gap(run)
        run.waiting[seq] = job
        while run.next_seq in run.waiting:
            self.make_ready(run, run.waiting.pop(run.next_seq))
            run.next_seq += 1
            self._begin_gap(run)
        if not run.waiting:
            del self._gaps[run.name]

    def _begin_gap(self, run: Run) -> None:
        """A run waits for an earlier request from now on."""
        run.waiting_since = time.monotonic()
        self._gaps.pop(run.name, None)
        self._gaps[run.name] = run

    def make_ready(self, run: Run, job: Job[Any]) -> None:
        """Queues a request after all that are ready, whatever its number."""
        if not run.ready:
            self._turns.add(run.client, run)
        run.ready.append(job)
        if run.adapter is not None and len(run.ready) == 1:
            self.count(run)

    def next(self) -> Run:
        """Takes the run that is next in turn; it gets no other turn before `resume`, `go_on` or
        `over`."""
        return self._turns.take()

    def resume(self, run: Run) -> None:
        """Gives a run its turn again: its first request could not be executed yet."""
        self._turns.add(run.client, run)

    def go_on(self, run: Run, rows: float) -> None:
        """A step of a run's first request is done: the run goes to the end of the queue."""
        run.charge(rows)
        run.client.charge(rows)
        self._turns.add(run.client, run)

    def over(self, run: Run, rows: float) -> None:
        """A run's first request is done: the run goes to the end of the queue."""
        run.charge(rows)
        run.client.charge(rows)
        run.ready.popleft()
        run.steps, run.stays = None, False
        self._used.pop(run.base.path, None)
        self._used[run.base.path] = time.monotonic()
        self.count(run)
        if run.ready:
            self._turns.add(run.client, run)

    def timeout(self) -> float | None:
        """Seconds until a request has waited long enough, or a step's memory is to be freed; None
        if there is neither."""
        ends = [run.waiting_since + self._gap_seconds for run in islice(self._gaps.values(), 1)]
        ends += [used + self._idle_seconds for used in islice(self._used.values(), 1)]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def trim(self) -> None:
        """Frees a step's memory of the base models whose runs were idle for `idle_seconds`."""
        now = time.monotonic()
        while self._used:
            base, used = next(iter(self._used.items()))
            if now - used < self._idle_seconds:
                return
            del self._used[base]
            self._release(base)

    def give_up_gaps(self) -> None:
        """Fails the requests that have waited too long for an earlier one."""
        now = time.monotonic()
        while self._gaps:
            run = next(iter(self._gaps.values()))
            if now - run.waiting_since < self._gap_seconds:
                return
            missing, held = run.next_seq, sorted(run.waiting)
            run.next_seq = held[-1] + 1
            error = RequestError(
                f"request {held[0]} of {run.name} waited {self._gap_seconds:g} s for request "
                f"{missing}, which never came; requests {held} were not executed"
            )
            self._fail_waiting(run, error)

    def _fail_waiting(self, run: Run, error: RequestError) -> None:
        self._gaps.pop(run.name, None)
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
