"""Back-pressure: limits on the bytes of requests in memory at once, coming in and waiting.

`Arrivals` counts the bytes of bodies that have come, never those that a client has promised. A body
beyond the limit is not read on, which holds its client back. The oldest waiter may exceed the
limit; otherwise partly read bodies could deadlock. So the bytes are never more than the limit and
one body. A body's first bytes are free: small requests always pass.

`Queue` has the requests that are complete and wait for the engine, in the order in which they came.
One request alone is always let in, whatever its size.

A request that waits too long in either gets 429 with a time to come back after. The SDK then tries
again, a sampling request for ever and a training request for some ten minutes, so nothing is lost.
Chunks of a call arrive in order (CLIENT_CONFIG asks the SDK for it), so a waiting chunk never
blocks an accepted one. Only the server's event loop uses this.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

QUEUE_BYTES_MAX = 1 << 30
QUEUE_COUNT_MAX = 1 << 14
FREE_BYTES = 1 << 16  # of each body that comes in; uvicorn reads as many ahead
HOLD_SECONDS = 50.0  # the SDK waits 60 s for an answer
AGAIN_SECONDS = 5


class Overloaded(Exception):
    """There was no room in time; `again_seconds` says when to come again."""

    def __init__(self, message: str, again_seconds: float):
        super().__init__(message)
        self.again_seconds = again_seconds


class _Line:
    """Those that wait for room, the first in front."""

    def __init__(self, hold_seconds: float, again_seconds: float):
        self._hold_seconds = hold_seconds
        self._again_seconds = again_seconds
        self._waiting: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()

    async def enter(
        self, take: Callable[[], bool], give_back: Callable[[], None], full: Callable[[], str]
    ) -> None:
        """Returns when `take`, which is called in turn, has found room; Overloaded with what `full`
        says if there is none in time. `give_back` undoes a `take` that came too late."""
        if not self._waiting and take():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((take, turn))
        self.move()
        try:
            await asyncio.wait_for(turn, self._hold_seconds)
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment
                give_back()
            self.move()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Overloaded(f"{full()}; come again", self._again_seconds) from None

    def move(self) -> None:
        """Lets in all that now find room."""
        while self._waiting:
            take, turn = self._waiting[0]
            if not turn.done():  # it did not give up
                if not take():
                    return
                turn.set_result(None)
            self._waiting.popleft()


# ---- coming in ----


class Arrival:
    """The memory of one request that comes in: a context manager."""

    def __init__(self, arrivals: "Arrivals"):
        self._arrivals = arrivals
        self._came = 0
        self.size = 0  # of what came, the bytes that count

    async def take(self, more: int) -> None:
        """Counts bytes that came, when there is room; Overloaded if there is none in time."""
        self._came += more
        size = max(self._came - FREE_BYTES, 0) - self.size
        if size > 0:
            await self._arrivals.grow(self, size)

    def complete(self) -> None:
        """No more bytes will come."""
        self._arrivals.yield_first(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrivals.change(self, -self.size)
        self._arrivals.yield_first(self)


class Arrivals:
    """See the file's header. `peak` is the most bytes that there were at once."""

    def __init__(
        self,
        *,
        bytes_max: int = QUEUE_BYTES_MAX // 2,
        hold_seconds: float = HOLD_SECONDS,
        again_seconds: float = AGAIN_SECONDS,
    ):
        self.bytes_max = bytes_max
        self.bytes = self.peak = 0
        self._line = _Line(hold_seconds, again_seconds)
        self._first: Arrival | None = None  # may go beyond the limit, and so never waits

    def begin(self) -> Arrival:
        """A request whose body is to be read."""
        return Arrival(self)

    async def grow(self, arrival: Arrival, size: int) -> None:
        """Counts more bytes of an arrival, when there is room."""
        if self._first is arrival:
            self.change(arrival, size)
            return
        await self._line.enter(
            lambda: self._take(arrival, size), lambda: self.change(arrival, -size), self._full
        )

    def change(self, arrival: Arrival, size: int) -> None:
        """Counts what came or went."""
        arrival.size += size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        if size < 0:
            self._line.move()

    def yield_first(self, arrival: Arrival) -> None:
        """An arrival that needs no more room lets another be the first."""
        if self._first is arrival:
            self._first = None
            self._line.move()

    def _take(self, arrival: Arrival, size: int) -> bool:
        fits = self.bytes + size <= self.bytes_max
        if not fits and self._first is None and self.bytes - arrival.size <= self.bytes_max:
            self._first = arrival
        if fits or self._first is arrival:
            self.change(arrival, size)
            return True
        return False

    def _full(self) -> str:
        return (
            f"the server has {self.bytes} bytes of requests coming in, and takes {self.bytes_max}"
        )


# ---- waiting for the engine ----


class QueueEntry:
    """The memory that one request takes, until it is done. Leaving it as a context manager gives it
    back, unless `keep` was called: then you must call `leave`."""

    def __init__(self, queue: "Queue", size: int):
        self._queue = queue
        self._size = size
        self._kept = self._left = False

    def keep(self) -> None:
        """The place outlives the handler."""
        self._kept = True

    def leave(self) -> None:
        """Gives the place back, once."""
        if not self._left:
            self._left = True
            self._queue.change(-self._size, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self.leave()


class Queue:
    """See the file's header. `peak` is the most bytes that waited at once."""

    def __init__(
        self,
        *,
        bytes_max: int = QUEUE_BYTES_MAX,
        count_max: int = QUEUE_COUNT_MAX,
        hold_seconds: float = HOLD_SECONDS,
        again_seconds: float = AGAIN_SECONDS,
    ):
        self.bytes_max = bytes_max
        self.count_max = count_max
        self.bytes = self.count = self.peak = 0
        self._line = _Line(hold_seconds, again_seconds)

    async def enter(self, size: int) -> QueueEntry:
        """A place for a request of so many bytes, in the order of arrival; Overloaded if there is
        none in time."""
        await self._line.enter(lambda: self._take(size), lambda: self.change(-size, -1), self._full)
        return QueueEntry(self, size)

    def change(self, size: int, count: int) -> None:
        """Counts what came or went, and lets in requests that now fit."""
        self.bytes += size
        self.count += count
        self.peak = max(self.peak, self.bytes)
        if count < 0:
            self._line.move()

    def _take(self, size: int) -> bool:
        fits = self.bytes + size <= self.bytes_max and self.count < self.count_max
        if not (fits or self.count == 0):
            return False
        self.change(size, 1)
        return True

    def _full(self) -> str:
        return (
            f"the server has {self.count} requests of {self.bytes} bytes in its queue, and takes "
            f"{self.count_max} of {self.bytes_max} at once"
        )
