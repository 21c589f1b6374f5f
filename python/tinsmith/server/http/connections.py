"""Connections: how many there may be, and how slow a client may be to ask and to read.

uvicorn serves them; this file adds limits. A request's head must arrive in time (timeout_keep_alive
begins with the first reply) and has a size limit (h11_max_incomplete_event_size is for h11, which
takes twice httptools' time; httptools has no limit). A client that does not read its reply is cut
off. With too many connections, the one that has been idle longest is closed, so many silent ones do
not block new ones: with limit_concurrency, new ones would get 503. If the process has no file
descriptor left, a spare one is used to turn clients away: asyncio would retry at once, and log each
time. Bodies are bodies.py's.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

log = logging.getLogger("tinsmith")

BACKLOG = 2048  # connections that wait to be accepted: the SDK opens many at once
HEAD_BYTES_MAX = 1 << 16  # a request without its body
HEAD_SECONDS = 20.0  # for a head, or for the rest of a body that is no longer read
READ_SECONDS = 60.0  # for a client to read 256 KB
KEEP_ALIVE_SECONDS = 120
STOP_SECONDS = 0.5  # at the end, for requests in flight
SWEEP_TICKS = 5  # ticks of uvicorn, 0.1 s each
FILES = 128  # descriptors reserved for files
FILES_MAX = 1 << 14
LOG_SECONDS = 60.0  # between two log lines about missing descriptors


def allow_files() -> None:
    """Raises this process's limit of descriptors to FILES_MAX, or as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ListeningSocket(socket.socket):
    """A listening socket that turns clients away while the process has no descriptor left."""

    def __init__(self, family: int):
        # With the protocol named, asyncio sets TCP_NODELAY: otherwise each reply takes 40 ms.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._told = -LOG_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """As a socket's. Without a free descriptor, the client is turned away and accept raises
        BlockingIOError."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._spare is None:
                raise
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            os.close(self._accept()[0])  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if time.monotonic() - self._told >= LOG_SECONDS:
            self._told = time.monotonic()
            log.error(
                "this process has all the files and connections open that it may have (%d, "
                "`ulimit -n`): new clients are turned away until some are closed",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
        raise BlockingIOError

    def close(self) -> None:
        """Closes the spare descriptor too."""
        super().close()
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)


class Connection(HttpToolsProtocol):
    """One client's connection. `since` is when its current wait began."""

    server_state: "Connections"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head, self._head_bytes = True, 0
        self._coming = True  # a request is expected or has begun
        self._stuck: float | None = None  # since when the client does not read
        self._answered: RequestResponseCycle | None = None  # the previous one
        self.served, self.since = False, time.monotonic()
        super().connection_made(transport)
        self.server_state.make_room()

    def data_received(self, data: bytes) -> None:
        if self.idle and not self._coming:
            self._coming, self.since = True, time.monotonic()
        before = self._in_head
        super().data_received(data)
        if before and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._coming = True, 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The next request may come before the last reply has quite ended, because the client knows
        the reply's length and has it all. It is queued; a second one is refused."""
        self._in_head = False
        if self.pipeline:
            self.transport.abort()
            raise httptools.HttpParserError("two requests came before the reply to a third")
        self._answered = self.cycle
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._coming = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.served, self.since = True, time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True  # uvicorn tells only the newest one
            self._answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stuck = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def sweep(self, now: float) -> None:
        """Closes the connection if its client takes too long. uvicorn only waits for the next
        request to begin."""
        if self._stuck is None and self.transport.is_closing():
            self._stuck = now  # it closes when its client has read the rest
        unread = self._stuck is not None and now - self._stuck > READ_SECONDS
        unsent = self.idle and self._coming and now - self.since > HEAD_SECONDS
        if unread or unsent:
            self.transport.abort()


class Connections(ServerState):
    """uvicorn's list of connections, with a limit."""

    connections: set[Connection]  # type: ignore[assignment]

    def __init__(self, count_max: int):
        super().__init__()
        self.count_max = count_max

    def make_room(self) -> None:
        """If there are too many, closes idle ones: first those that never sent a request, and of
        these the oldest."""
        if len(self.connections) <= self.count_max:
            return
        here = [one for one in self.connections if not one.transport.is_closing()]
        if len(here) > self.count_max:
            idle = [one for one in here if one.idle]
            idle.sort(key=lambda one: (one.served, one.since))
            for one in idle[: len(idle) // 16 + 1]:
                one.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server of an app, with the limits of this file."""

    def __init__(self, app: Any):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                lifespan="off",
                log_config=None,  # the process configures its own logging
                log_level="error",  # a client's bad request is not logged
                access_log=False,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            files = FILES_MAX
        self.server_state = Connections(max(files - FILES, files // 2))

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.sweep(now)
        return await super().on_tick(counter)
