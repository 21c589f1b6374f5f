"""tinsmith.log: a training loop's own numbers, shown on the server's page beside its curves.

A call checks its arguments and puts the numbers into a queue. A thread sends them, so the loop
never waits for the server. While the server can't be reached, the queue is kept and sending is
retried; at the program's end the thread has END_SECONDS to send the rest. A failure is logged once
as a warning in the log "tinsmith", and the loop goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import logging
import math
import operator
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

WAITING_MAX = 4096  # calls in the queue; more are dropped
SAID_MAX = 256  # warnings that a process logs
REPLY_SECONDS = 10.0
END_SECONDS = 3.0
AGAIN_SECONDS = 1.0, 30.0  # before a retry, if the server did not answer: the first, the longest
LATER = (408, 429, 503)  # statuses that are retried

warnings = logging.getLogger("tinsmith")


def log(
    metrics: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    run: Any = None,
    base_url: str | None = None,
    api_key: str | None = None,
    **more: Any,
) -> None:
    """Shows numbers of a training run on the server's page, as curves beside the server's own.

    It returns at once; a thread sends the numbers. A failure is logged as one warning; it raises
    nothing.

    Parameters
    ----------
    metrics : dict, optional
        Numbers whose names are not Python names, such as "env/reward".
    step : int, optional
        The loop's own step, from 0; None: the one after the last. Several calls for a step add to
        it.
    run : TrainingClient or str, optional
        A client or its model_id. None: the newest run of the same API key, unless another run of
        that key is in use too.
    base_url, api_key : str, optional
        The server; None: the SDK's, TINKER_BASE_URL and TINKER_API_KEY.
    **more
        Numbers by their names: floats, ints, bools, or NumPy's and torch's of one element. NaN and
        infinities are gaps in the curve.

    Raises
    ------
    TypeError, ValueError
        If step or run is invalid, or no number is given.

    Examples
    --------
    >>> for step in range(3):
    ...     tinsmith.log(step=step, reward=0.1 * step)
    """
    if not isinstance(metrics, Mapping | None):
        raise TypeError(
            f"numbers are given by their names, log(reward=0.7) or log({{'reward': 0.7}}); "
            f"{_short(metrics)} came"
        )
    given = {**(metrics or {}), **more}
    if not given:
        raise TypeError("there is nothing to show: log(step=3, reward=0.7)")
    body: dict[str, Any] = {"metrics": _numbers(given)}
    if step is not None:
        body["step"] = _step(step)
    if run is not None:
        body["run"] = _run(run)
    address = base_url or os.environ.get("TINKER_BASE_URL")
    if not address:
        _sender.warn(
            "TINKER_BASE_URL is not set, so there is no server to show numbers on: set it to "
            "tinsmith's address, say http://127.0.0.1:8000"
        )
    elif body["metrics"]:
        key = api_key or os.environ.get("TINKER_API_KEY") or ""
        _sender.put(f"{str(address).rstrip('/')}/api/v1/log", key, body)


def _numbers(given: Mapping[Any, Any]) -> dict[str, float | None]:
    """The values that are numbers. Each other name is logged once as a warning."""
    found = {}
    for name, value in given.items():
        try:
            item = getattr(value, "item", None)  # NumPy's and torch's
            number = item() if callable(item) else value
            if isinstance(number, str | bytes):
                raise TypeError
            number = float(number)
        except Exception:  # a foreign object may raise anything
            said = f"{name!s:.80} must be one number, {_short(value)} came; it is left out"
            _sender.warn(said, f"{name!s:.80}")
            continue
        found[str(name)] = number if math.isfinite(number) else None
    return found


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, {_short(step)} came") from None
    if number < 0:
        raise ValueError(f"step must be at least 0, {number} came")
    return number


def _run(run: Any) -> str:
    name = getattr(run, "model_id", run)
    if not isinstance(name, str):
        raise TypeError(f"run must be a TrainingClient or its model_id, {_short(run)} came")
    return name


def _short(value: Any) -> str:
    with contextlib.suppress(Exception):
        if (shape := getattr(value, "shape", None)) is not None:
            return f"an array of shape {tuple(shape)}"
        return f"{type(value).__name__} {str(value)[:60]!r}"
    return type(value).__name__


class Sender:
    """Sends queued calls in order, in a thread that the first call starts."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, str, dict[str, Any]]] = queue.Queue(WAITING_MAX)
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._down = False  # the last request got no answer

    def put(self, url: str, key: str, body: dict[str, Any]) -> None:
        """Queues one call to be sent."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tinsmith-log", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the program is ending, or no thread can be started
                    self.warn(f"numbers can't be sent: {error}")
                    return
                self._thread = thread
        try:
            self._waiting.put_nowait((url, key, body))
        except queue.Full:
            self.warn(f"{WAITING_MAX} calls wait for {url}; further ones are not shown")

    def warn(self, text: str, of: str = "") -> None:
        """Logs a warning once: once for each `of` if given, else once for each text."""
        if (of or text) not in self._said and len(self._said) < SAID_MAX:
            self._said.add(of or text)
            warnings.warning("tinsmith.log: %s", text)

    def flush(self, seconds: float) -> bool:
        """Waits until all is sent, for at most `seconds`, unless the server does not answer.
        Returns whether all was sent."""
        end = time.monotonic() + seconds
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks and not self._down:
                if not self._waiting.all_tasks_done.wait(end - time.monotonic()):
                    return False
        return not self._down

    def _run(self) -> None:
        while True:
            url, key, body = self._waiting.get()
            pause, most = AGAIN_SECONDS
            while self._send(url, key, body):
                time.sleep(pause)
                pause = min(2 * pause, most)
            self._waiting.task_done()

    def _send(self, url: str, key: str, body: dict[str, Any]) -> bool:
        """Sends one call; returns whether to retry it."""
        down = ""
        headers = {"Content-Type": "application/json", "X-API-Key": key}
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=REPLY_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code not in LATER:
                self.warn(f"{url} shows nothing of this: {_sentence(error)}")
            else:
                down = _sentence(error)
        except (ValueError, http.client.InvalidURL) as error:  # a bad URL, or a key of two lines
            self.warn(f"{url} is asked for nothing: {error}")
        except (OSError, http.client.HTTPException) as error:
            down = str(getattr(error, "reason", error))  # urllib wraps it
            if down.startswith("unknown url type"):
                self.warn(f"{url} is no address: it must begin with http:// or https://")
                down = ""
        if down:
            self.warn(f"{url} does not answer ({down}); numbers wait until it does")
        with self._waiting.all_tasks_done:  # wakes flush
            self._down = bool(down)
            self._waiting.all_tasks_done.notify_all()
        return bool(down)


def _sentence(error: urllib.error.HTTPError) -> str:
    """The server's reason for refusing a request."""
    try:
        return str(json.loads(error.read(1 << 16))["detail"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return f"status {error.code}"


_sender = Sender()


def _afresh() -> None:
    """A forked child starts with no thread and an empty queue."""
    global _sender
    _sender = Sender()


def end() -> None:
    """Waits at the program's end for unsent calls, at most END_SECONDS."""
    _sender.flush(END_SECONDS)


atexit.register(end)
os.register_at_fork(after_in_child=_afresh)
