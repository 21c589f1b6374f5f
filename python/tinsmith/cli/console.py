"""What `tinsmith serve` and `tinsmith run` show while they run: a log, and a status line.

All of it goes to stderr. With -v each ended call is a line. The status line shows the current
state. A terminal shows it in its last row, which is excluded from the scroll region, so that a
recipe's output and progress bars do not disturb it. Elsewhere it is printed every STATUS_SECONDS,
if something is new. `--log-format json` makes every line an object. (rich's Live draws at the
cursor, which a recipe, a process of its own, may move at any time.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tinsmith.engine.call_log import Call, Memory
from tinsmith.server.records.notifier import Refused
from tinsmith.server.records.steps import loss_per_token

if TYPE_CHECKING:
    from tinsmith.engine.worker import Worker
    from tinsmith.server.backend import Backend

log = logging.getLogger("tinsmith")
calls = logging.getLogger("tinsmith.calls")

LEVELS = ("debug", "info", "warning", "error")
DRAW_SECONDS = 0.5
STATUS_SECONDS = 30.0
RATE_SECONDS = 10.0  # the window of tokens per second
WAIT_SECONDS = 0.01  # a shorter wait is not shown
WARNINGS_MAX = 1000  # distinct ones that are remembered


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the console's options to a command."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show each call: what, whose, tokens, seconds"
    )
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="show the log's lines from this level on (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="the log's lines as text, or each as a JSON object (default: %(default)s)",
    )
    parser.add_argument(
        "--status",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show in one line what happens now: live on a terminal, else twice a minute",
    )


# ---- the log ----


class _Json(logging.Formatter):
    """Formats a record as a JSON line, with the fields of its `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Once(logging.Filter):
    """Lets each warning through once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show the record."""
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        if text in self._said:
            return False
        if len(self._said) < WARNINGS_MAX:
            self._said.add(text)
        return True


@contextlib.contextmanager
def log_to_stderr(options: argparse.Namespace) -> Iterator[None]:
    """Sends tinsmith's log to stderr while a command runs, formatted as its options say."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_Json() if options.log_format == "json" else text)
    handler.addFilter(_Once())
    levels = [(logger, logger.level) for logger in (log, calls)]
    log.addHandler(handler)
    log.setLevel(options.log_level.upper())
    calls.setLevel(logging.INFO if options.verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        for logger, level in levels:
            logger.setLevel(level)


# ---- status line ----


class Status:
    """A listener that describes a server's current state."""

    def __init__(self, worker: Worker, progress: Callable[[], float | None] = lambda: None):
        self._worker = worker
        self._progress = progress  # the recipe's progress, from 0 to 1
        self._shown: tuple[float, float] | None = None  # when progress was first seen, and it
        self._last: Call | None = None  # the newest optim_step
        self._losses: dict[str, float] = {}
        self._failed = self._refused = 0
        self._heard = self._said = 0
        self._rates: list[tuple[float, int, int]] = []  # time, tokens trained, tokens drawn
        self._trained = 0
        self._memory: Future[Memory] | None = None
        self._held: Memory | None = None

    def __call__(self, happened: Call | Refused) -> None:
        """Counts an ended call or a refusal."""
        self._heard += 1
        if isinstance(happened, Refused):
            self._refused += 1
            calls.info(
                "refused: %s %s", happened.route, happened.detail,
                extra={"facts": {"kind": "refused", "status": happened.status}},
            )  # fmt: skip
            return
        self._failed += bool(happened.error)
        if happened.kind == "optim_step" and not happened.error:
            self._last = happened
        if happened.kind == "forward_backward" and not happened.error:
            self._trained += happened.tokens
            self._losses[happened.run] = loss_per_token(happened)
        calls.info("%s", told(happened), extra={"facts": facts(happened)})

    def news(self) -> bool:
        """Whether anything has ended since the last call of this, or a training call is running."""
        before, self._said = self._said, self._heard
        return before != self._heard or bool(self._worker.now.training)

    def line(self) -> str:
        """The current state, in one line."""
        from tinsmith.system.format import readable

        now, parts = self._worker.now, []
        if (last := self._last) is not None:
            rest = f" of {len(self._losses)} runs" if len(self._losses) > 1 else ""
            parts.append(f"step {last.step + 1}{rest}")
            if last.run in self._losses:
                parts.append(f"loss {self._losses[last.run]:.4g}")
        if now.training:
            training = now.training[0]
            share = f" {training.done}/{training.count}" if training.count > 1 else ""
            parts.append(f"{training.kind}{share}, {training.tokens:,} tokens")
        if sampling := sum(now.sampling.values()):
            parts.append(f"sampling {sampling} request{'s' * (sampling > 1)}")
        if rows := self._worker.replicas:
            lost = sum(row.state == "lost" for row in rows)
            parts.append(f"{len(rows) - lost} of {len(rows)} replicas")
        trained, drawn = self._speeds()
        parts += [f"{trained:,.0f} tokens/s trained"] * (trained > 0)
        parts += [f"{drawn:,.0f} tokens/s drawn"] * (drawn > 0)
        waiting = sum(now.waiting.values()) - len(now.training)
        parts += [f"{waiting} waiting"] * (waiting > 0)
        parts += [f"{self._failed} failed"] * (self._failed > 0)
        parts += [f"{self._refused} refused"] * (self._refused > 0)
        if (held := self._memory_held()) is not None:
            most = "" if held.limit is None else f" of {readable(held.limit)}"
            parts.append(f"memory {readable(held.used)}{most}")
        share = self._progress()
        if share is not None and 0 < share < 1:
            moment = time.monotonic()
            since, first = self._shown = self._shown or (moment, share)  # above 0 if it was resumed
            parts.append(f"{share:.0%} done")
            if share > first:
                left = (moment - since) * (1 - share) / (share - first)
                parts[-1] += f", {duration(left)} to go"
        return " · ".join(parts)

    def _speeds(self) -> tuple[float, float]:
        """Recent tokens per second, trained and drawn."""
        steps, _ = self._worker.drawn
        drawn, now = sum(size * count for size, count in steps.items()), time.monotonic()
        self._rates.append((now, self._trained, drawn))
        while len(self._rates) > 2 and now - self._rates[1][0] > RATE_SECONDS:
            self._rates.pop(0)
        since, *before = self._rates[0]
        seconds = max(now - since, DRAW_SECONDS)
        return (self._trained - before[0]) / seconds, (drawn - before[1]) / seconds

    def _memory_held(self) -> Memory | None:
        """What held memory at the engine's last reply."""
        if self._memory is None or self._memory.done():
            if self._memory is not None and self._memory.exception() is None:
                self._held = self._memory.result()
            self._memory = self._worker.memory()
        return self._held


def facts(call: Call) -> dict[str, Any]:
    """A call as a dict, for programs."""
    found = {
        "kind": call.kind, "run": call.run, "base": call.base, "sampler": call.sampler,
        "step": call.step, "tokens": call.tokens, "cached": call.cached, "drawn": call.drawn,
        "queued_seconds": round(call.queued, 4), "seconds": round(call.seconds, 4),
        "error": call.error,
    }  # fmt: skip
    if call.kind == "forward_backward" and not call.error:
        found["loss"] = float(call.result.loss)
    return {key: value for key, value in found.items() if value != ""}


def told(call: Call) -> str:
    """A call as a line for people: kind, run, tokens, time, and outcome."""
    parts = [f"{call.kind:16}", short(call.run or call.sampler)]
    if call.tokens or call.drawn:
        drawn = f" + {call.drawn:,} drawn" if call.drawn else ""
        cached = f" ({call.cached:,} cached)" if call.cached else ""
        parts.append(f"{call.tokens:,} tokens{cached}{drawn}")
    parts.append(duration(call.seconds))
    amount = call.drawn or call.tokens
    if amount and call.seconds > 0 and not call.error:
        parts.append(f"{amount / call.seconds:,.0f} tokens/s")
    if call.queued >= WAIT_SECONDS:
        parts.append(f"waited {duration(call.queued)}")
    if call.error:
        parts.append(f"failed: {call.error}")
    elif call.kind == "forward_backward":
        parts.append(f"loss {loss_per_token(call):.4g} a token")
    elif call.kind == "optim_step":
        parts.append(f"step {call.step + 1}, learning rate {call.request.learning_rate:g}")
    return "  ".join(parts)


def short(name: str) -> str:
    """A run's or sampler's id, with its session's shortened."""
    session, colon, rest = name.partition(":")
    return f"{session[:8]}{colon}{rest}"


def duration(seconds: float) -> str:
    """Seconds, formatted for people."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- where it is shown ----


class _LastRow:
    """The last row of a terminal, excluded from the scroll region."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._rows = 0

    def show(self, text: str) -> None:
        """Shows a text there."""
        columns, rows = shutil.get_terminal_size()
        if rows != self._rows:
            # A line up first, so that the last row's text scrolls; then the region without it.
            self._write(f"\n\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
            self._rows = rows
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")

    def close(self) -> None:
        """Clears the row and restores the scroll region."""
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def console(
    options: argparse.Namespace, backend: Backend, process: int | None = None
) -> Iterator[Callable[[], None]]:
    """Shows what a backend does while the context is open: from time to time, and whenever the
    yielded function is called; `process` is a recipe's."""
    status = Status(backend.worker, lambda: None if process is None else recipe_share(process))
    live = (
        sys.stderr.isatty()
        and options.log_format == "text"
        and os.environ.get("TERM") not in (None, "dumb")
    )
    ended, row = threading.Event(), _LastRow(sys.stderr)

    def draw() -> None:
        if live:
            row.show(status.line())
        elif status.news():
            log.info("%s", status.line(), extra={"facts": {"kind": "status"}})

    def draw_on() -> None:
        while not ended.wait(DRAW_SECONDS if live else STATUS_SECONDS):
            draw()

    thread = threading.Thread(target=draw_on, name="tinsmith-status", daemon=True)
    backend.notifier.listen(status)
    if options.status:
        status.line()  # requests the memory, and starts the speeds
        thread.start()
    try:
        yield draw
    finally:
        backend.notifier.forget(status)
        ended.set()
        if options.status:
            thread.join()
        row.close()


# ---- how far a recipe is ----

PROGRESS = ("progress/done_frac", "progress")  # the cookbook's metrics for the finished fraction


def recipe_share(process: int) -> float | None:
    """A recipe's finished fraction, from its own file: the cookbook appends its metrics to a file
    beside its log, and keeps the log open, also when the process starts another recipe. None if
    unknown."""
    with contextlib.suppress(OSError):
        logs = []
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # the process has closed it meanwhile
                if (path := entry.readlink()).name == "logs.log":
                    logs.append(path)
        if logs:
            newest = max(logs, key=lambda log: log.stat().st_mtime)
            return _share(newest.with_name("metrics.jsonl"))
    return None


def _share(path: Path) -> float | None:
    """The progress in the last line of metrics."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            last = json.loads(file.read().splitlines()[-1])
        share = next((last[key] for key in PROGRESS if key in last), None)
        return float(share) if share is not None else None
    except (OSError, ValueError, IndexError, TypeError):
        return None
