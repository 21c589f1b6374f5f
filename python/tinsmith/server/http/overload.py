"""Back-pressure: limits on the bytes of requests in memory, while they arrive and while they wait.

`Arrivals` counts the bytes of bodies that have arrived, not those that a client has announced. A
body beyond the limit is not read further, which holds its client back. The oldest waiter may exceed
the limit; otherwise partly read bodies could deadlock. So there are at most the limit and one body.
A body's first bytes are free: small requests always pass.

`Queue` has the complete requests that wait for the engine, in order of arrival. A single request is
always let in, whatever its size.

A request that waits too long in either gets 429 with a time after which to retry. The SDK then
retries, a sampling request without end and a training request for some ten minutes, so nothing is
lost. Chunks of a call arrive in order (CLIENT_CONFIG asks the SDK for it), so a waiting chunk never
blocks an accepted one. Only the server's event loop uses this.
"""

import asyncio
from collections import deque
from typing import Self

QUEUE_BYTES_MAX = 1 << 30
QUEUE_COUNT_MAX = 1 << 14
FREE_BYTES = 1 << 16  # of each incoming body; uvicorn reads that much ahead
HOLD_SECONDS = 50.0  # the SDK waits 60 s for an answer
AGAIN_SECONDS = 5


class Overloaded(Exception):
    """The request waited too long; `again_seconds` says when to retry."""

    def __init__(self, message: str, again_seconds: float):
        super().__init__(message)
        self.again_seconds = again_seconds


class Reservation:
    """The bytes that one request takes. Leaving it as a context manager frees them, unless `keep`
    was called: then you must call `leave`."""

    def __init__(self, limit: "ByteSemaphore"):
        self._limit = limit
        self._kept = False
        self._came = 0
        self.size = 0

    async def take(self, more: int) -> None:
        """Counts bytes that arrived, once they fit; Overloaded if they don't fit in time."""
        self._came += more
        size = max(self._came - FREE_BYTES, 0) - self.size
        if size > 0:
            await self._limit.acquire(self, size)

    def complete(self) -> None:
        """No more bytes will arrive."""
        self._limit.yield_first(self)

    def keep(self) -> None:
        """The reservation outlives the handler."""
        self._kept = True

    def leave(self) -> None:
        """Frees the reservation, once."""
        self._limit.change(self, -self.size)
        self._limit.yield_first(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self.leave()


class ByteSemaphore:
    """A semaphore of bytes, first come, first served: asyncio's own counts requests. `count` is how
    many hold bytes, `peak` the most bytes held at once."""

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
        self._hold_seconds = hold_seconds
        self._again_seconds = again_seconds
        self._waiting: deque[tuple[Reservation, int, asyncio.Future[None]]] = deque()
        self._first: Reservation | None = None  # may exceed the limit, so it never waits

    async def acquire(self, entry: Reservation, size: int) -> None:
        """Counts more bytes of an entry when it is first in the queue and they fit; Overloaded if
        that does not happen in time."""
        if (not self._waiting or self._first is entry) and self._take(entry, size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, size, turn))
        self.move()
        try:
            await asyncio.wait_for(turn, self._hold_seconds)
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment
                self.change(entry, -size)
            self.move()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Overloaded(f"{self._full()}; come again", self._again_seconds) from None

    def change(self, entry: Reservation, size: int) -> None:
        """Adds bytes to an entry (or removes them), and lets in what fits now."""
        self.count += (entry.size + size > 0) - (entry.size > 0)
        entry.size += size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        if size < 0:
            self.move()

    def yield_first(self, entry: Reservation) -> None:
        """An entry that needs no more bytes lets another be the first."""
        if self._first is entry:
            self._first = None
            self.move()

    def move(self) -> None:
        """Lets in all waiters that fit now, in order."""
        while self._waiting:
            entry, size, turn = self._waiting[0]
            if not turn.done():  # it did not time out
                if not self._take(entry, size):
                    return
                turn.set_result(None)
            self._waiting.popleft()

    def _take(self, entry: Reservation, size: int) -> bool:
        fits = self._fits(entry, size)
        if fits:
            self.change(entry, size)
        return fits

    def _fits(self, entry: Reservation, size: int) -> bool:
        raise NotImplementedError

    def _full(self) -> str:
        raise NotImplementedError


class Arrivals(ByteSemaphore):
    """The limit of incoming bodies. See the file's header."""

    def begin(self) -> Reservation:
        """A reservation for a request whose body is to be read."""
        return Reservation(self)

    def _fits(self, entry: Reservation, size: int) -> bool:
        fits = self.bytes + size <= self.bytes_max
        if not fits and self._first is None and self.bytes - entry.size <= self.bytes_max:
            self._first = entry
        return fits or self._first is entry

    def _full(self) -> str:
        return (
            f"the server has {self.bytes} bytes of requests coming in, and takes {self.bytes_max}"
        )


class Queue(ByteSemaphore):
    """The limit of requests that wait for the engine. See the file's header."""

    async def enter(self, size: int) -> Reservation:
        """Queues a request of `size` bytes, in the order of arrival; Overloaded if it does not fit
        in time."""
        entry = Reservation(self)
        await self.acquire(entry, size)
        return entry

    def _fits(self, entry: Reservation, size: int) -> bool:
        fits = self.bytes + size <= self.bytes_max and self.count < self.count_max
        return fits or self.count == 0

    def _full(self) -> str:
        return (
            f"the server has {self.count} requests of {self.bytes} bytes in its queue, and takes "
            f"{self.count_max} of {self.bytes_max} at once"
        )
