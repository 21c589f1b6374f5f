"""The promises of a server: results that come later, and the clients that wait for them.

If a client waits for a promise, its refused request also gets one: of a failure. Only the server's
event loop uses this module.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from tinsmith.engine.errors import RequestError, explain
from tinsmith.server.http.authorisation import client_of, given_key
from tinsmith.server.http.overload import Reservation
from tinsmith.server.wire.chunking import Buffer

KEPT_READ_SECONDS = 60.0  # a result is kept after it was read, for a client that lost the reply
KEPT_UNREAD_SECONDS = 3600.0
RESULT_BYTES = 4096  # of a result, besides its arrays

COMPLETIONS_MAX = 1 << 14  # of one client, which has at most 2,000 requests in flight


class Refusal(Exception):
    """A request that gets a status and a sentence, without a future."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


@dataclass
class Completions:
    """Completed requests in order of completion, numbered from 1; a poll for all requests reads
    them. Only the event loop uses this. If no client polls, the oldest are dropped."""

    events: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=COMPLETIONS_MAX))
    last: int = 0
    waiting: set[asyncio.Event] = field(default_factory=set)

    def add(self, request_id: str) -> None:
        """Adds a completed request."""
        self.last += 1
        self.events.append((self.last, request_id))
        for event in self.waiting:
            event.set()

    async def after(self, cursor: int, seconds: float) -> list[str]:
        """Waits for requests after a cursor and returns them; those before it are dropped."""
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
    """A promised result, and its encoding for the wire."""

    future: Future[Any]
    encode: Callable[[Any], dict[str, Any] | list[Buffer]]
    text: Callable[[Any], list[Buffer]] | None  # for a client that does not accept protobuf
    weigh: Callable[[Any], int]  # bytes of the result
    promise: dict[str, Any]
    created: float
    read: float | None = None
    bytes: int = 0  # counted for the result, once it is done
    here: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is done


class Promises:
    """The promises, by owner and request id. The client's own number identifies a request, so a
    retry finds the promise of the first attempt, and nothing is executed twice. Stored results take
    at most `bytes_max`."""

    def __init__(self, bytes_max: int):
        self.bytes_max = bytes_max
        self.bytes = 0
        self.pending: dict[tuple[str, str], Pending] = {}
        self._done: dict[tuple[str, str], Pending] = {}  # the completed, in order of completion

    def find(self, request: Request, request_id: str) -> Pending | None:
        """The earlier promise for a client's request, if there is one."""
        return self.pending.get((owner(request), request_id))

    def make(
        self,
        request: Request,
        request_id: str,
        start: Callable[[], Future[Any]],
        encode: Callable[[Any], dict[str, Any] | list[Buffer]],
        queued: Reservation | None = None,
        weigh: Callable[[Any], int] = lambda _: 0,
        text: Callable[[Any], list[Buffer]] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The UntypedAPIFuture of a request, which is started unless it is a retry. It stays in the
        queue's count until it is done."""
        known = self.find(request, request_id)
        if known is None:
            try:
                future = start()
            except Exception as error:
                future = failed(error)
            if queued is not None:
                queued.keep()
                when_done(future, queued.leave)
            promise = {"request_id": request_id, **fields}
            key = owner(request), request_id
            known = self.pending[key] = Pending(
                future, encode, text, weigh, promise, time.monotonic()
            )
            when_done(future, partial(self._keep, key, known))
        return known.promise

    def of(self, samplers: Iterable[str]) -> list[Pending]:
        """The unfinished promises of sampling sessions."""
        names = set(samplers)
        return [
            item
            for (_, name), item in self.pending.items()
            if name.rpartition(":seq:")[0] in names and not item.future.done()
        ]

    def _keep(self, key: tuple[str, str], item: Pending) -> None:
        """Counts a completed result. If all of them take too many bytes, the oldest are dropped; a
        large one is replaced by a small failure, for a client that comes too late."""
        item.here.set()
        failed = item.future.exception() is not None
        self._count(key, item, RESULT_BYTES + (0 if failed else item.weigh(item.future.result())))
        while self.bytes > self.bytes_max:
            oldest, dropped = next(iter(self._done.items()))
            if oldest == key:
                return
            size = dropped.bytes
            self._forget(oldest)
            if size > RESULT_BYTES:
                dropped.future = Future()
                dropped.future.set_exception(
                    RequestError(
                        f"the result of {oldest[1]}, of {size} bytes, came too long ago: the "
                        f"server keeps {self.bytes_max} bytes of results and drops the oldest; "
                        "read results as they come"
                    )
                )
                self.pending[oldest] = dropped
                self._count(oldest, dropped, RESULT_BYTES)

    def _count(self, key: tuple[str, str], item: Pending, size: int) -> None:
        item.bytes = size
        self._done[key] = item
        self.bytes += size

    def _forget(self, key: tuple[str, str]) -> None:
        """Drops a completed promise."""
        del self.pending[key]
        self.bytes -= self._done.pop(key).bytes

    def sweep(self) -> None:
        """Drops results that were read or never fetched."""
        moment = time.monotonic()
        for key, item in list(self.pending.items()):
            unread = item.read is None
            since = item.created if item.read is None else item.read
            kept = KEPT_UNREAD_SECONDS if unread else KEPT_READ_SECONDS
            if key in self._done and moment - since > kept:
                self._forget(key)


def when_done(future: Future[Any], call: Callable[[], None]) -> None:
    """Calls something in this event loop once a future is done."""
    loop = asyncio.get_running_loop()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(call)

    future.add_done_callback(tell)


def failed(error: Exception) -> Future[Any]:
    """A failed future with a refusal."""
    future = Future[Any]()
    future.set_exception(as_failure(error))
    return future


def as_failure(error: BaseException) -> RequestError:
    """A refusal or any other exception as a future stores it: without its traceback, which would
    keep all the request's data alive."""
    failure = RequestError(str(error)) if isinstance(error, Refusal) else explain(error)
    return failure.with_traceback(None)


def owner(request: Request) -> str:
    """The client, as a hash of its API key. A local server accepts any key and never stores it."""
    return client_of(given_key(request.headers))
