"""Numbers that clients log of their runs, such as rewards: their checks and their storage.

They are stored by the client's own steps, one JSON row for each, in a table beside that of the
server's steps. A number that is sent again for a step replaces the old one. A run with more than
ROWS_MAX rows, or BYTES_MAX bytes, keeps one row for every second step, then for every fourth;
numbers that only the dropped rows had move to the kept row, so a number logged every hundredth step
is not lost. Everything is checked before anything is stored.
"""

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith.server.wire import parse as wire

ROWS_MAX = 2000  # of a run
BYTES_MAX = 1 << 22  # of a run's rows
NAMES_MAX = 512  # of a run
NAME_MAX = 120  # characters
STEP_MAX = 1 << 53  # more than JavaScript counts exactly
REWARD, SPREAD = {"reward", "rewards", "return"}, {"std", "var", "min", "max"}
FIELDS = ("run", "step", "metrics")

Values = dict[str, float | None]  # by name; None: not a number, or infinite


def parse(body: Mapping[str, Any]) -> tuple[str | None, int | None, Values]:
    """The run, the step and the numbers of a request; the first two are optional."""
    for key in body:
        if key not in FIELDS:
            raise ValueError(
                f"unknown field {key!r:.80}; numbers stand in metrics: "
                '{"step": 3, "metrics": {"reward": 0.7}}'
            )
    step = wire.optional(body, "step", int)
    if step is not None and not 0 <= step <= STEP_MAX:
        raise ValueError(f"step must be from 0 to {STEP_MAX}, {step} came")
    metrics = wire.need(body, "metrics", dict)
    if not metrics:
        raise ValueError('metrics is empty; it has numbers by their names: {"reward": 0.7}')
    if len(metrics) > NAMES_MAX:
        raise ValueError(f"metrics has {len(metrics)} names; a run can have {NAMES_MAX}")
    values = {_name(name): _number(name, value) for name, value in metrics.items()}
    return wire.text(body, "run"), step, values


def _name(name: str) -> str:
    if not 0 < len(name) <= NAME_MAX or not name.isprintable():
        raise ValueError(f"a name must have 1 to {NAME_MAX} visible characters, {name!r:.80} came")
    return name


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "true or false" if isinstance(value, bool) else wire.short(value)
        raise ValueError(f"{name!r:.80} must be a number, or null for none, {what} came")
    try:
        number = float(value)
    except OverflowError:  # an integer too large for float
        return None
    return number if math.isfinite(number) else None


def reward_of(names: Iterable[str]) -> str | None:
    """Which of a run's numbers is its reward: the shortest name with that word in it
    ("env/all/reward/total"), without names of its spread (std, min, …)."""
    words = {name: {*re.split(r"[^a-z]+", name.lower())} for name in names}
    found = [name for name, parts in words.items() if parts & REWARD and not parts & SPREAD]
    return min(found, key=lambda name: (len(name), name), default=None)


def write(sql: sqlite3.Connection, run: str, rows: Mapping[int, Values]) -> bool:
    """Stores rows by their steps, in the caller's transaction. Returns whether the run had too
    many, so that all its rows were rewritten."""
    for step, values in rows.items():
        found = sql.execute(
            "SELECT row FROM history_log WHERE run = ? AND step = ?", (run, step)
        ).fetchone()
        _insert(sql, run, {step: (row_of(found[0]) if found else {}) | values})
    count, size = sql.execute(
        "SELECT count(*), coalesce(sum(length(row)), 0) FROM history_log WHERE run = ?", (run,)
    ).fetchone()
    if count <= ROWS_MAX and size <= BYTES_MAX:
        return False
    kept = sql.execute("SELECT step, row FROM history_log WHERE run = ? ORDER BY step", (run,))
    thinned = thin({step: row_of(text) for step, text in kept}, size)
    sql.execute("DELETE FROM history_log WHERE run = ?", (run,))
    _insert(sql, run, thinned)
    return True


def thin(rows: Mapping[int, Values], size: int) -> dict[int, Values]:
    """At most half the allowed rows (and bytes; `size` is what they have now), in the order of
    their steps."""
    found, stride = dict(rows), 1
    while len(found) > ROWS_MAX // 2 or (size > BYTES_MAX // 2 and len(found) > 1):
        stride *= 2
        groups: dict[int, list[int]] = {}
        for step in found:
            groups.setdefault(step // stride, []).append(step)
        found = {
            steps[0]: {key: value for step in steps[::-1] for key, value in found[step].items()}
            for steps in groups.values()
        }
        size = sum(len(json.dumps(row)) for row in found.values())
    return found


def _insert(sql: sqlite3.Connection, run: str, rows: Mapping[int, Values]) -> None:
    sql.executemany(
        "INSERT OR REPLACE INTO history_log (run, step, row) VALUES (?, ?, ?)",
        [(run, step, json.dumps(row)) for step, row in rows.items()],
    )


def row_of(text: Any) -> dict[str, Any]:
    """A stored row; empty if it is damaged."""
    try:
        row = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
