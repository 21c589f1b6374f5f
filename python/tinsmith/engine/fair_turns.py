"""Whose micro-batch is next: accounts share the engine by weight, the runs of one take turns.

It is start-time fair queueing of rows: an account's clock advances by the rows that were computed
for it, divided by its weight, and the account whose clock is furthest behind is next. An account
that was idle begins at the clock of those that were not, so it can't save up time. So a call of
131,072 rows holds another account for one micro-batch, as a short one would.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

WHOLE_JOB = 256  # rows that a job without rows counts as


@dataclass(eq=False)
class Account(Generic[T]):
    """Runs that share a part of the engine; `weight` is its part's size."""

    weight: float = 1.0
    clock: float = 0.0
    turns: deque[T] = field(default_factory=deque)


class FairTurns(Generic[T]):
    """See the file's header. Only accounts with something to do are held."""

    def __init__(self) -> None:
        self._busy: dict[Account[T], None] = {}
        self._clock = 0.0  # of the account that was last in turn

    def __bool__(self) -> bool:
        return bool(self._busy)

    def add(self, account: Account[T], item: T, *, first: bool = False) -> None:
        """Queues an item after the others of its account, or before them."""
        if not account.turns:
            account.clock = max(account.clock, self._clock)
            self._busy[account] = None
        if first:
            account.turns.appendleft(item)
        else:
            account.turns.append(item)

    def take(self) -> T:
        """Takes the item that is next in turn; IndexError if there is none."""
        account = min(self._busy, key=lambda one: one.clock)
        self._clock = account.clock
        item = account.turns.popleft()
        if not account.turns:
            del self._busy[account]
        return item


def charge(account: Account[T], rows: float) -> None:
    """Rows were computed for an account."""
    account.clock += rows / account.weight
