"""Passes on events of a server: calls that have ended, and requests that were refused.

The console, the metrics and the page's history are called one after the other in a thread of their
own, so the engine's thread and the event loop never wait for them.
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

WAITING_MAX = 1 << 14  # events in the listeners' queue; more are dropped


@dataclass(frozen=True)
class Refused:
    """A request that got a 4xx."""

    route: str  # the method, and the path with its parameters' names
    status: int
    detail: str  # the sentence
    at: float = field(default_factory=time.time)


EventListener = Callable[[Call | Refused], None]


class Notifier:
    """See the file's header. Any thread may call it."""

    def __init__(self, *listeners: EventListener, waiting_max: int = WAITING_MAX) -> None:
        self._listeners = list(listeners)
        self._waiting: queue.Queue[Call | Refused | None] = queue.Queue(waiting_max)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="tinsmith-notifier", daemon=True)
        self._thread.start()

    def listen(self, listener: EventListener) -> None:
        """Adds a listener, which gets all later events."""
        self._listeners.append(listener)

    def forget(self, listener: EventListener) -> None:
        """Removes a listener."""
        self._listeners.remove(listener)

    def __call__(self, happened: Call | Refused) -> None:
        """Queues an event."""
        try:
            self._waiting.put_nowait(happened)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Returns when the listeners have had all events so far."""
        self._waiting.join()

    def close(self) -> None:
        """Ends the thread, after all events so far."""
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
