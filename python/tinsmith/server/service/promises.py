"""What a server has promised: results that come later, and who waits for them.

A request that is refused has a promise too, where its client waits for one: of a failure. Only the
server's event loop uses this module.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tinsmith.engine.errors import RequestError, explain
from tinsmith.server.wire.chunking import Buffer

COMPLETIONS_MAX = 1 << 14  # of one client, which has at most 2,000 requests under way


class Refusal(Exception):
    """A request that is answered with a status and a sentence, without a future."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


@dataclass
class Completions:
    """Completed requests in order of completion, numbered from 1; a poll for all requests reads it.
    Only the event loop uses it. If no client polls, the oldest are forgotten."""

    events: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=COMPLETIONS_MAX))
    last: int = 0
    waiting: set[asyncio.Event] = field(default_factory=set)

    def add(self, request_id: str) -> None:
        """A request is done."""
        self.last += 1
        self.events.append((self.last, request_id))
        for event in self.waiting:
            event.set()

    async def after(self, cursor: int, seconds: float) -> list[str]:
        """Waits for requests after a cursor and returns them; those before it are forgotten."""
        while self.events and self.events[0][0] <= cursor:
            self.events.popleft()
        if not self.events and seconds > 0:
            event = asyncio.Event()
            self.waiting.add(event)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            self.waiting.discard(event)
        return [request_id for number, request_id in self.events if number > cursor]


@dataclass
class Pending:
    """A promised result and how it is written to the wire."""

    future: Future[Any]
    encode: Callable[[Any], dict[str, Any] | list[Buffer]]
    text: Callable[[Any], list[Buffer]] | None  # for a client that does not accept protobuf
    weigh: Callable[[Any], int]  # bytes of the result
    promise: dict[str, Any]
    created: float
    read: float | None = None
    bytes: int = 0  # that it is counted with, once it is done
    here: asyncio.Event = field(default_factory=asyncio.Event)  # it is done


def when_done(future: Future[Any], call: Callable[[], None]) -> None:
    """Calls something in this event loop once a future is done."""
    loop = asyncio.get_running_loop()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(call)

    future.add_done_callback(tell)


def failed(error: Exception) -> Future[Any]:
    """A future with a refusal."""
    future = Future[Any]()
    future.set_exception(as_failure(error))
    return future


def as_failure(error: BaseException) -> RequestError:
    """A refusal or any other exception in the form that a future keeps: without its traceback,
    which would hold all the request's data."""
    failure = RequestError(str(error)) if isinstance(error, Refusal) else explain(error)
    return failure.with_traceback(None)
