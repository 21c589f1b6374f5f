"""Passes on what happens on a server: calls that have ended, and requests that were refused.

The console, the metrics and the page's history are told in one thread of their own, one after the
other, so that the engine's thread and the event loop never wait for them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tinsmith.engine.call_log import Call

log = logging.getLogger("tinsmith")

WAITING_MAX = 1 << 14  # calls that listeners are behind with; more are dropped


@dataclass(frozen=True)
class Refused:
    """A request that was answered with a 4xx."""

    route: str  # the method, and the path with its parameters' names
    status: int
    detail: str  # the sentence
    at: float = field(default_factory=time.time)


Listener = Callable[[Call | Refused], None]


class Watch:
    """See the file's header. Any thread may tell it something."""

    def __init__(self, *listeners: Listener, waiting_max: int = WAITING_MAX) -> None:
        self._listeners = list(listeners)
        self._waiting: queue.Queue[Call | Refused | None] = queue.Queue(waiting_max)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="tinsmith-watch", daemon=True)
        self._thread.start()

    def listen(self, listener: Listener) -> None:
        """Has a listener told of what happens from now on."""
        self._listeners.append(listener)

    def forget(self, listener: Listener) -> None:
        """Ends that."""
        self._listeners.remove(listener)

    def __call__(self, happened: Call | Refused) -> None:
        """Something has happened."""
        try:
            self._waiting.put_nowait(happened)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Returns when the listeners have heard of everything so far."""
        self._waiting.join()

    def close(self) -> None:
        """Ends the thread, after everything so far."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (happened := self._waiting.get()) is not None:
            for listener in tuple(self._listeners):
                try:
                    listener(happened)
                except Exception:
                    log.exception("a call could not be shown")
            self._waiting.task_done()
