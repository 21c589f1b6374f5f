"""A session's timeline, for `tinker session export-trace`: its calls in Chrome's trace event
format, which https://ui.perfetto.dev opens.

It receives the calls that have ended (notifier.py), and keeps a few numbers of each, in memory: the
last CALLS_MAX of a session, for the SESSIONS_MAX most recently active sessions. A process of the
trace is a run, or a sampling session that does not use a run's weights. A call is a slice from its
arrival to its end, with two inner slices: its time in the queue, and its work; a sample's work
begins with its prefill. Calls overlap, and slices of a thread may not, so a process has as many
threads for each kind of work as it needs. Times are microseconds since the first call.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tinsmith.engine.call_log import Call
from tinsmith.server.records.notifier import Refused

CALLS_MAX = 20_000  # of a session
SESSIONS_MAX = 16
ERROR_MAX = 200  # characters of a sentence
PIECE_CALLS = 256  # calls in a piece of a download, so that no piece holds the GIL for long

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """The stored data of a call. Times are time.monotonic()'s; 0: it did not get that far."""

    process: str  # the name of a run, or of a sampling session
    kind: str
    arrived: float
    began: float
    first: float
    ended: float
    facts: tuple[Any, ...]  # in the order of FACTS

    @property
    def work(self) -> str:
        """The kind of work, which names its threads."""
        return "sampling" if self.kind == "sample" else "training"


FACTS = ("step", "tokens", "cached", "drawn", "base", "sampler", "error")


def span_of(call: Call) -> Span:
    """The Span of an ended call."""
    facts = (getattr(call, name) for name in FACTS[:-1])
    times = call.arrived, call.began, call.first, call.ended
    process = f"run {call.run}" if call.run else f"sampler {call.sampler}"
    return Span(process, call.kind, *times, (*facts, call.error[:ERROR_MAX]))


@dataclass
class Timeline:
    """The calls of one session."""

    zero: float  # when time.monotonic() was 0, in seconds since 1970
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=CALLS_MAX))
    count: int = 0  # of calls so far


class Timelines:
    """The timelines of a server's sessions, by their ids: a listener of its notifier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Timeline] = {}  # least recently active first
        self._secret = secrets.token_bytes(32)

    def __call__(self, happened: Call | Refused) -> None:
        """Adds an ended call."""
        if isinstance(happened, Refused):
            return
        session, *rest = (happened.sampler or happened.run).split(":", 2)
        if len(rest) < 2:  # of an upload, or of a request without a session
            return
        with self._lock:
            known = self._known.pop(session, None) or Timeline(happened.at - happened.arrived)
            self._known[session] = known
            known.spans.append(span_of(happened))
            known.count += 1
            if len(self._known) > SESSIONS_MAX:
                del self._known[next(iter(self._known))]

    def ticket(self, session: str) -> str:
        """The secret in a trace's URL: only a client with the export right gets the URL."""
        return hashlib.blake2b(session.encode(), key=self._secret, digest_size=16).hexdigest()

    def __contains__(self, session: str) -> bool:
        return session in self._known

    def trace(self, session: str) -> Iterator[bytes] | None:
        """A session's trace in pieces; None if its calls are not known."""
        with self._lock:
            known = self._known.get(session)
            if known is None:
                return None
            spans, count = list(known.spans), known.count
        about = {"session": session, "calls": len(spans), "calls_dropped": count - len(spans)}
        return _written(spans, known.zero, about)


def _written(spans: list[Span], zero: float, about: dict[str, Any]) -> Iterator[bytes]:
    spans.sort(key=lambda span: span.arrived)
    start = spans[0].arrived
    about["began"] = datetime.fromtimestamp(zero + start, UTC).isoformat()
    head = {"displayTimeUnit": "ms", "otherData": about}
    yield json.dumps(head).encode().removesuffix(b"}") + b', "traceEvents": ['
    lanes, end = Lanes(), b""
    for first in range(0, len(spans), PIECE_CALLS):
        calls = spans[first : first + PIECE_CALLS]
        events = [json.dumps(event) for span in calls for event in _events(span, start, lanes)]
        yield end + ",\n".join(events).encode()
        end = b",\n"
    yield b"]}\n"


def _events(span: Span, start: float, lanes: Lanes) -> Iterable[Event]:
    """A call's slice with its inner slices, after the names of a new process or thread."""
    arrived, began, first, ended = (
        max(0, round((moment - start) * 1e6)) if moment else None
        for moment in (span.arrived, span.began, span.first, span.ended)
    )
    assert arrived is not None and ended is not None
    place, named = lanes.take(span, arrived, ended)
    yield from named
    known = dict(zip(FACTS, span.facts, strict=True))
    facts = {name: value for name, value in known.items() if value or name == "step"}
    turn = ended if began is None else began
    times = [(span.kind, arrived, ended, facts), ("queued", arrived, turn, {})]
    if began is not None:
        times.append(("work", began, ended, {}))
        if first is not None:
            times.append(("prefill", began, first, {}))
            times.append(("decode", first, ended, {}))
    for name, since, until, args in times:
        timed = {"ts": since, "dur": until - since}
        yield {"ph": "X", "name": name, "cat": span.work, **place, **timed, "args": args}


class Lanes:
    """The threads of a trace's processes: overlapping calls are on different threads."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._named = self._count = 0
        self._busy: dict[tuple[str, str], list[tuple[int, int]]] = {}  # ends, and threads
        self._free: dict[tuple[str, str], list[int]] = {}

    def take(self, span: Span, arrived: int, ended: int) -> tuple[Event, list[Event]]:
        """The process and thread of the next call, and events that name new ones."""
        key, named = (span.process, span.work), []
        pid = self._processes.setdefault(span.process, len(self._processes) + 1)
        if pid > self._named:
            self._named = pid
            named.append(_name("process_name", span.process, pid))
        busy, free = self._busy.setdefault(key, []), self._free.setdefault(key, [])
        while busy and busy[0][0] <= arrived:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            thread = heapq.heappop(free)
        else:
            self._count += 1
            thread = self._count
            named.append(_name("thread_name", span.work, pid, thread))
        heapq.heappush(busy, (ended, thread))
        return {"pid": pid, "tid": thread}, named


def _name(what: str, name: str, pid: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": {"name": name}}
