"""Back-pressure: a limit on the requests that wait in memory at once.

A request's body is read when it fits beside those that wait already. Until then its connection is
not read, which also holds the client's next request back. A request that waits too long gets 429
with a time to come back after. The SDK then tries again, a sampling request for ever and a training
request for some ten minutes, so nothing is lost. One request alone is always let in, whatever its
size. The SDK is told to send the pieces of a call in order (see routes.CLIENT_CONFIG), so a request
that is held back never has to come before one that is inside. Only the server's event loop uses
this.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

QUEUE_BYTES_MAX = 1 << 30
QUEUE_COUNT_MAX = 1 << 14
HOLD_SECONDS = 50.0  # the SDK waits 60 s for an answer
AGAIN_SECONDS = 5


class Overloaded(Exception):
    """There was no room in time; `again_seconds` says when to come again."""

    def __init__(self, message: str, again_seconds: float):
        super().__init__(message)
        self.again_seconds = again_seconds


class Place:
    """The memory that one request takes, until it is done. Leaving it as a context manager gives it
    back, unless `keep` was called: then you must call `leave`."""

    def __init__(self, queue: "Queue", size: int):
        self._queue = queue
        self.size = size
        self._kept = self._left = False

    def grow(self, size: int) -> None:
        """Takes more than was known at first, if there is room at once; Overloaded if not."""
        more = max(size - self.size, 0)
        if not self._queue.fits(more, 0) and self._queue.count > 1:
            raise self._queue.overloaded()
        self._queue.change(more, 0)
        self.size += more

    def keep(self) -> None:
        """The place outlives the handler."""
        self._kept = True

    def leave(self) -> None:
        """Gives the place back, once."""
        if not self._left:
            self._left = True
            self._queue.change(-self.size, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._hold_seconds = hold_seconds
        self._again_seconds = again_seconds
        self.bytes = self.count = self.peak = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> Place:
        """A place for a request of so many bytes, in the order of arrival; Overloaded if there is
        none in time."""
        if self._waiting or not (self.count == 0 or self.fits(size, 1)):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await asyncio.wait_for(turn, self._hold_seconds)
            except (TimeoutError, asyncio.CancelledError) as error:
                if turn.done() and not turn.cancelled():  # its place came at the same moment
                    self.change(-size, -1)
                self._let_in()
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise self.overloaded() from None
        else:
            self.change(size, 1)
        return Place(self, size)

    def fits(self, size: int, count: int) -> bool:
        """Whether there is room for more."""
        return self.bytes + size <= self.bytes_max and self.count + count <= self.count_max

    def change(self, size: int, count: int) -> None:
        """Counts what came or went, and lets in requests that now fit."""
        self.bytes += size
        self.count += count
        self.peak = max(self.peak, self.bytes)
        if count < 0 or size < 0:
            self._let_in()

    def overloaded(self) -> Overloaded:
        """The error for a client if there is no room."""
        return Overloaded(
            f"the server has {self.count} requests of {self.bytes} bytes in its queue, and takes "
            f"{self.count_max} of {self.bytes_max} at once; come again",
            self._again_seconds,
        )

    def _let_in(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.done():  # it gave up
                self._waiting.popleft()
                continue
            if self.count and not self.fits(size, 1):
                return
            self._waiting.popleft()
            self.change(size, 1)
            turn.set_result(None)
