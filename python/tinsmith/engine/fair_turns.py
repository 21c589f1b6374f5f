"""Whose micro-batch is next: clients share the engine by weight, and a client's runs its part.

It is start-time fair queueing of rows (Goyal et al., 1996), twice: among clients, and among a
client's runs. Each has a clock, which advances by the rows that were computed for it, divided by
its weight. The one whose clock is furthest behind is next. One that was idle begins at the clock of
those that were not, so it can't save up turns. So a call of 131,072 rows holds others for one
micro-batch, as a short one does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

WHOLE_JOB = 256  # rows that a job without rows counts as


@dataclass(eq=False)
class Clocked:
    """Something that takes turns."""

    weight: float = field(default=1.0, kw_only=True)
    clock: float = field(default=0.0, init=False)

    def charge(self, rows: float) -> None:
        """Rows were computed for it."""
        self.clock += rows / self.weight


C = TypeVar("C", bound=Clocked)


class FairQueue(Generic[C]):
    """What waits for a turn."""

    def __init__(self) -> None:
        self._waiting: dict[C, None] = {}
        self._clock = 0.0  # of the one that was last in turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, item: C) -> None:
        """Queues an item, which has not waited."""
        item.clock = max(item.clock, self._clock)
        self._waiting[item] = None

    def take(self) -> C:
        """Takes the item that is next in turn; of equal ones, the first. ValueError if none is
        there."""
        item = min(self._waiting, key=lambda one: one.clock)
        self._clock = item.clock
        del self._waiting[item]
        return item


class Client(Clocked, Generic[C]):
    """Runs that share a part of the engine; `weight` is its size."""

    def __init__(self, weight: float = 1.0):
        super().__init__(weight=weight)
        self.runs: FairQueue[C] = FairQueue()


class FairTurns(Generic[C]):
    """The turns of clients and their runs."""

    def __init__(self) -> None:
        self._clients: FairQueue[Client[C]] = FairQueue()

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, client: Client[C], run: C) -> None:
        """A client's run has something to do."""
        if not client.runs:
            self._clients.add(client)
        client.runs.add(run)

    def take(self) -> C:
        """Takes the run that is next in turn; ValueError if there is none."""
        client = self._clients.take()
        run = client.runs.take()
        if client.runs:
            self._clients.add(client)
        return run
