"""What runs have done: their steps, last samples and settings, kept across restarts.

It receives the calls that have ended (notifier.py), and the numbers that clients log
(metric_logs.py). Every FLUSH_SECONDS, new data is written to the server's database in one
transaction, in a thread of its own, so that neither the engine nor the event loop waits. All of it
is bounded: a run with more than STEPS_MAX steps keeps every second one, then every fourth; the
oldest runs are dropped for new ones. If the tables are lost, only curves are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from tinsmith.engine.call_log import Call
from tinsmith.server.records import metric_logs
from tinsmith.server.records.database import Busy, State
from tinsmith.server.records.last_samples import Row, datum_of, key_of, samples_of, taught
from tinsmith.server.records.notifier import Refused
from tinsmith.server.records.steps import Step, finite

log = logging.getLogger("tinsmith")

FLUSH_SECONDS = 2.0
FORGET_FLUSHES = 50  # between two deletions of old data
STEPS_MAX = 2000  # of a run
RUNS_MAX = 200
ROWS_MAX = 100_000  # steps of all runs, and rows that clients have logged
SAMPLES_MAX = 24  # of a run
DATUMS_MAX = 6
SPARK_MAX = 48  # points of the small curve in the list of runs
REFUSED_MAX = 100
OPEN_MAX = 256  # runs whose current step is in memory
SCORED_MAX = 4096  # samples that a teacher may still score

COUNT = "SELECT count(*) FROM history_step"


@dataclass
class Track:
    """A run as this server has seen it. `about` is stored in addition to its rows."""

    about: dict[str, Any]
    step: Step
    seen: float = 0.0  # seconds since 1970
    changed: bool = True
    rows: dict[int, Row] = field(default_factory=dict)  # not written yet
    samples: dict[int, Row] = field(default_factory=dict)  # the same, by position
    logs: dict[int, metric_logs.Values] = field(
        default_factory=dict
    )  # the same, by the client's steps
    drawn: int = 0  # samples so far
    trained: int = 0  # datums so far
    stride: int = 1  # between stored steps

    @property
    def unwritten(self) -> bool:
        """Whether there is something besides `about` to write."""
        return bool(self.rows or self.samples or self.logs)

    def copy(self) -> Track:
        """A copy of the current state."""
        rows, samples, kept = dict(self.rows), dict(self.samples), dict(self.logs)
        about = {key: [*of] if isinstance(of, list) else of for key, of in self.about.items()}
        return replace(self, rows=rows, samples=samples, logs=kept, about=about)

    def forget(self, written: Track) -> None:
        """Drops what was written."""
        for mine, theirs in (
            (self.rows, written.rows),
            (self.samples, written.samples),
            (self.logs, written.logs),
        ):
            for key, row in theirs.items():
                if mine.get(key) is row:
                    del mine[key]
        self.changed = self.unwritten or self.seen != written.seen

    def spark(self, value: float | None, count: int, key: str = "spark") -> None:
        """Adds a point to a small curve of bounded length; `count` is the point's number."""
        points = self.about.setdefault(key, [])
        stride = self.about.setdefault(f"{key}_stride", 1)
        if value is not None and count % stride == 0:
            points.append(value)
            if len(points) > SPARK_MAX:
                del points[1::2]
                self.about[f"{key}_stride"] = 2 * stride

    def log(self, step: int, values: metric_logs.Values) -> None:
        """Adds a client's numbers of a step."""
        about, last = self.about, self.about.get("log_step", -1)
        self.logs[step] = self.logs.get(step, {}) | values
        about["logged"] = about.get("logged", {}) | values
        about["reward"] = metric_logs.reward_of(about["logged"])
        if step > last:
            about |= {"log_step": step, "log_count": about.get("log_count", 0) + 1}
            self.spark(values.get(about["reward"]), about["log_count"], "reward_spark")


class RunHistory:
    """See the file's header. `describe` gives a new run's settings; `origin` the run whose weights
    a sampling session of a checkpoint has ("" if none)."""

    def __init__(
        self,
        state: State,
        describe: Callable[[str], dict[str, Any]] = lambda run: {},
        origin: Callable[[str], str] = lambda sampler: "",
    ):
        self.refused: deque[dict[str, Any]] = deque(maxlen=REFUSED_MAX)
        self._state = state
        self._describe = describe
        self._origin = origin
        self._lock = threading.Lock()
        self._open: dict[str, Track] = {}  # least recently active first
        self._scored: dict[bytes, tuple[str, int, Row]] = {}  # by key_of prompt and sample
        self._flushes = 0
        self._end = threading.Event()
        self._failed = False  # whether the last write failed
        self._thread = threading.Thread(target=self._run, name="tinsmith-history", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the rest, and ends the thread."""
        self._end.set()
        self._thread.join()

    # ---- what happens ----

    def __call__(self, happened: Call | Refused) -> None:
        """Handles an ended call or a refusal."""
        with self._lock:
            if isinstance(happened, Refused):
                self._refuse(happened.at, happened.route, happened.status, happened.detail)
                return
            if happened.error:
                kind = "request" if happened.kind == "reject" else happened.kind
                what = f"{kind} {happened.run or happened.sampler}".strip()
                self._refuse(happened.at, what, None, happened.error)
            if happened.kind == "sample":
                self._sampled(happened)
            elif happened.run:
                self._trained(happened)

    def _refuse(self, at: float, what: str, status: int | None, detail: str) -> None:
        last = self.refused[-1] if self.refused else None
        if last and (last["what"], last["detail"]) == (what, detail[:500]):
            last["at"], last["count"] = at, last["count"] + 1
            return
        told = {"at": at, "what": what, "status": status, "detail": detail[:500], "count": 1}
        self.refused.append(told)

    def _trained(self, call: Call) -> None:
        if call.kind == "create" and call.error:
            return  # there is no such run
        track = self._track(call.run, call)
        if call.error:
            track.about["error"] = {"at": call.at, "what": call.kind, "detail": call.error[:500]}
        if not call.began or call.kind == "reject":
            return
        if call.step != track.step.number:  # a checkpoint was loaded
            track.step = Step(call.step, track.step.end or None)
        track.step.add(call)
        if call.error:
            return
        if call.kind == "forward_backward":
            datum = datum_of(call, track.step.number)
            track.about["loss"] = call.request.loss
            track.about["loss_config"] = finite(dict(call.request.config))
            if (teacher := call.request.teacher) is not None:
                track.about["teacher"] = teacher.name
            if datum is not None:
                track.samples[SAMPLES_MAX + track.trained % DATUMS_MAX] = datum
                track.trained += 1
        elif call.kind == "optim_step":
            self._stepped(track)

    def _stepped(self, track: Track) -> None:
        """A step is complete."""
        row = track.step.row
        about = track.about
        for key in ("tokens", "drawn", "seconds"):
            about[key] = about.get(key, 0) + row[key]
        about |= {"last": row, "adam": row["adam"], "steps": about.get("steps", 0) + 1}
        track.spark(row["loss_mean"], about["steps"])
        if warning := row.get("warning"):
            about["warning"] = {"at": row["at"], "step": row["step"], "detail": warning}
        if row["step"] % track.stride == 0:
            track.rows[row["step"]] = row
        track.step = Step(row["step"] + 1, track.step.end)

    def _sampled(self, call: Call) -> None:
        if call.error:
            return
        run = call.run or self._origin(call.sampler)
        scores = call.result.prompt_logprobs is not None
        if scores:
            student, place, row = self._scored.get(key_of(call.request.prompt), ("", 0, {}))
            if student and student != run:  # a teacher's call, in the student's step
                run = student
                self._track(run, call).samples[place] = taught(row, call)
        if not run:
            return
        track = self._track(run, call)
        track.step.add(call)
        if scores and call.request.max_tokens == 1:  # compute_logprobs also draws one token
            return
        for key, row in samples_of(call):
            place = track.drawn % SAMPLES_MAX
            track.drawn += 1
            track.samples[place] = row
            self._scored[key] = run, place, row
            if len(self._scored) > SCORED_MAX:
                del self._scored[next(iter(self._scored))]

    def log(self, run: str, step: int | None, values: metric_logs.Values) -> int:
        """Adds a client's numbers; without a step, to the one after the last. Returns the step.
        ValueError if the run would have too many names, OSError if too many rows wait to be
        written."""
        now = time.monotonic()
        with self._lock:
            at = time.time()
            track = self._track(run, Call("log", run, at=at, arrived=now, ended=now))
            names = {**track.about.get("logged", {}), **values}
            if len(names) > metric_logs.NAMES_MAX:
                raise ValueError(
                    f"the run {run} would have {len(names)} numbers by name; it can have "
                    f"{metric_logs.NAMES_MAX}"
                )
            step = track.about.get("log_step", -1) + 1 if step is None else step
            waiting = len(track.logs)
            if self._failed and waiting >= metric_logs.ROWS_MAX and step not in track.logs:
                text = f"numbers of {waiting} steps wait for room on the server's disk"
                raise OSError(errno.ENOSPC, text)
            track.log(step, values)
        return step

    def heard(self, run: str) -> tuple[float, float]:
        """When a run was created and when it was last active, in seconds since 1970; now, if not
        known yet."""
        with self._lock:
            track = self._open.get(run)
            now = time.time()
            return (track.about["created"], track.seen) if track else (now, 0.0)

    def _track(self, run: str, call: Call) -> Track:
        """A run's Track, which becomes the most recent."""
        track = self._open.pop(run, None)
        if track is None:
            about = self._known(run) or {}
            about |= {key: value for key, value in self._describe(run).items() if value is not None}
            about.setdefault("created", call.at)
            after = about.get("last", {}).get("step", -1) + 1
            step = after if call.kind in ("sample", "log") else call.step
            track = Track(about, Step(step), stride=about.get("stride", 1))
        self._open[run] = track
        if len(self._open) > OPEN_MAX:
            first = next(iter(self._open))
            if not self._open[first].unwritten:
                del self._open[first]
        track.seen, track.changed = call.at + call.ended - call.arrived, True
        track.about["base"] = track.about.get("base") or call.base
        return track

    def _known(self, run: str) -> dict[str, Any] | None:
        found = self._state.read("SELECT about FROM history_run WHERE run = ?", run)
        return _json(found[0][0]) if found else None

    # ---- to the disk ----

    def _run(self) -> None:
        while not self._end.wait(FLUSH_SECONDS):
            self._flush_told()
        self._flush_told()

    def _flush_told(self) -> None:
        try:
            self.flush()
            self._failed = False
        except Busy:  # another process is writing: retry next time
            return
        except Exception as error:
            self._failed = True
            log.warning("the history of runs was not written: %s", error)

    def flush(self) -> None:
        """Writes new data. What can't be written is retried next time."""
        with self._lock:
            changed = {name: track for name, track in self._open.items() if track.changed}
            new = {name: track.copy() for name, track in changed.items()}
        if not new:
            return
        with self._state.transaction() as sql:
            for name, track in new.items():
                _write(sql, name, track)
            if self._flushes % FORGET_FLUSHES == 0:
                _forget(sql)
            self._flushes += 1
        with self._lock:
            for name, written in new.items():
                track = changed[name]
                track.forget(written)
                for key in ("stride", "log_thinned"):
                    if key in written.about:
                        track.about[key] = written.about[key]
                track.stride = track.about.get("stride", 1)

    # ---- for the page ----

    def runs(
        self, since: float = 0.0, also: Collection[str] = ()
    ) -> dict[str, tuple[float, dict[str, Any]]]:
        """When each run was last active, and what is known of it, newest first. Only runs that were
        active since a time, and the ones in `also`."""
        self.flush()
        which = f"seen >= ? OR run IN ({', '.join('?' * len(also))})"
        query = f"SELECT run, seen, about FROM history_run WHERE {which} ORDER BY seen DESC"
        rows = self._state.read(query, since, *also)
        return {run: (seen, _json(about) or {}) for run, seen, about in rows}

    def steps(self, run: str, after: int = 0) -> tuple[list[Row], int]:
        """A run's steps that were written after a position, and the position of the last."""
        self.flush()
        query = "SELECT place, row FROM history_step WHERE run = ? AND place > ? ORDER BY step"
        found = self._state.read(query, run, after)
        rows = [row for _, text in found if (row := _json(text))]
        return rows, max((place for place, _ in found), default=after)

    def logged(self, run: str, after: int = 0) -> tuple[list[Row], int]:
        """A client's numbers that were written after a position, {"step", "values"}, in order of
        steps; and the position of the last."""
        self.flush()
        query = "SELECT place, step, row FROM history_log WHERE run = ? AND place > ? ORDER BY step"
        found = self._state.read(query, run, after)
        rows = [{"step": step, "values": metric_logs.row_of(text)} for _, step, text in found]
        return rows, max((place for place, *_ in found), default=after)

    def samples(self, run: str) -> list[Row]:
        """A run's last samples and datums, newest first."""
        self.flush()
        found = self._state.read("SELECT row FROM history_sample WHERE run = ?", run)
        rows = [row for (text,) in found if (row := _json(text))]
        return sorted(rows, key=lambda row: -row.get("at", 0.0))

    def samples_mark(self, run: str) -> str:
        """A hash that changes with a run's samples and datums."""
        self.flush()
        query = "SELECT row FROM history_sample WHERE run = ? ORDER BY place"
        mark = hashlib.blake2b(digest_size=16)
        for (text,) in self._state.read(query, run):
            mark.update(text.encode(errors="replace"))
        return mark.hexdigest()

    def about(self, run: str) -> tuple[float, dict[str, Any]] | None:
        """When a run was last active, and what is known of it."""
        self.flush()
        found = self._state.read("SELECT seen, about FROM history_run WHERE run = ?", run)
        return (found[0][0], _json(found[0][1]) or {}) if found else None

    def under_way(self, run: str) -> Row | None:
        """A run's current step: its number, and its data so far."""
        with self._lock:
            track = self._open.get(run)
            if track is None or not track.step.calls:
                return None
            step = track.step
            return {"step": step.number, "calls": dict(step.calls), "failed": step.failed}

    def refusals(self) -> list[dict[str, Any]]:
        """Requests that were refused or failed since the start, newest first."""
        with self._lock:
            return [dict(item) for item in reversed(self.refused)]


def _write(sql: Any, name: str, track: Track) -> None:
    """Writes a run's new data, and deletes what exceeds its limits."""
    sql.executemany(
        "INSERT OR REPLACE INTO history_step (run, step, row) VALUES (?, ?, ?)",
        [(name, step, json.dumps(row)) for step, row in track.rows.items()],
    )
    sql.executemany(
        "INSERT OR REPLACE INTO history_sample VALUES (?, ?, ?)",
        [(name, place, json.dumps(row)) for place, row in track.samples.items()],
    )
    if track.logs and metric_logs.write(sql, name, track.logs):
        track.about["log_thinned"] = track.about.get("log_thinned", 0) + 1
    if (stride := _thin(sql, name, track.stride)) != track.stride:
        track.about["stride"] = stride
    about = json.dumps(track.about)
    sql.execute("INSERT OR REPLACE INTO history_run VALUES (?, ?, ?)", (name, track.seen, about))


def _thin(sql: Any, run: str, stride: int) -> int:
    """Drops steps of a run that has too many; returns the stride of the remaining ones."""
    (count,) = sql.execute(f"{COUNT} WHERE run = ?", (run,)).fetchone()
    while count > STEPS_MAX:
        stride *= 2
        sql.execute("DELETE FROM history_step WHERE run = ? AND step % ? != 0", (run, stride))
        (count,) = sql.execute(f"{COUNT} WHERE run = ?", (run,)).fetchone()
    return stride


def _forget(sql: Any) -> None:
    """Drops the oldest runs if there are too many runs or steps."""
    counts: Counter[str] = Counter()
    for table in ("history_step", "history_log"):
        counts.update(dict(sql.execute(f"SELECT run, count(*) FROM {table} GROUP BY run")))
    left = 0
    for place, (run,) in enumerate(
        sql.execute("SELECT run FROM history_run ORDER BY seen DESC").fetchall()
    ):
        left += counts[run]
        if place >= RUNS_MAX or (place and left > ROWS_MAX):
            for table in ("history_run", "history_step", "history_sample", "history_log"):
                sql.execute(f"DELETE FROM {table} WHERE run = ?", (run,))


def _json(text: Any) -> dict[str, Any] | None:
    """A row's content; None if it is invalid."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
