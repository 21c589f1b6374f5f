"""Attacks what reads a checkpoint's meta.json and the rows of the database, mutated, straight into
what the listings say of them, some thousand a second. listings.py asks a server's routes, and
changes the bytes of the database too.

What can't be understood is refused with a sentence, or its row is left out; the report says by
which function, or of which table. What is listed can be sent as JSON, and when it expires is known.
"""

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

from tinsmith.checkpoints.meta import FIELDS, META_FILE
from tinsmith.checkpoints.store import Store, StoredCheckpoint
from tinsmith.server.records import database as state_file
from tinsmith.server.records.database import STATE_FILE, State
from tinsmith.server.routes import rest

from tools.attack import common, listings, memory
from tools.attack.common import Attempt, Failure, One

STORED = 0.05  # of the rows go through SQLite and the folders
NOT_UNDERSTOOD = (ValueError, OSError)
PARTS = {*FIELDS, "files", "model", "average"}


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace(logging.CRITICAL) as folder:
        store = Store(folder / "root")
        listings.make(store)
        text = (store.folder(listings.ODD) / META_FILE).read_bytes()
        content = json.loads(text)
        with closing(State(store)) as state, closing(_open(store)) as sql:
            rows = {table: _row(sql, table) for table in sorted(listings.TABLES)}

            def one(attempt: Attempt) -> str:
                rng = attempt.rng
                if rng.random() < 0.6:
                    odd = common.json_text(rng, common.changed(rng, content))
                    attempt.note(odd)
                    memory.put({META_FILE: odd})
                    return _read_meta()
                table = rng.choice(sorted(rows))
                column = rng.choice(sorted(rows[table]))
                odd = listings.odd(rng, rows[table][column])
                attempt.note(table, column, odd)
                if rng.random() < STORED:
                    return _read_stored(state, sql, table, rows[table], column, odd)
                return _read_row(table, rows[table] | {column: odd})

            yield one


def _open(store: Store) -> sqlite3.Connection:
    sql = sqlite3.connect(store.root / STATE_FILE, isolation_level=None)
    sql.execute("PRAGMA synchronous = OFF")
    return sql


def _row(sql: sqlite3.Connection, table: str) -> dict[str, Any]:
    columns = listings.TABLES[table]
    values = sql.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid DESC").fetchone()
    return dict(zip(columns, values, strict=True))


def _read_meta() -> str:
    """What a listing makes of meta.json."""
    try:
        _, entry = state_file._read(listings.ODD, memory.Version())
    except Exception as error:
        common.refusal(error, kinds=NOT_UNDERSTOOD)
        named = str(error).partition(f"{META_FILE}: ")[2].partition(" ")[0]
        return f"meta.json refused for its {named if named in PARTS else 'form'}"
    _told(rest._checkpoint(entry))
    if entry.meta.expired not in (True, False):
        raise Failure("whether it has expired can't be said")
    return "meta.json taken"


def _read_row(table: str, row: dict[str, Any]) -> str:
    """What a listing makes of a row as SQLite gives it."""
    try:
        if table == "checkpoint":
            place = StoredCheckpoint(listings.ODD, "stamp", 1)
            entry = state_file._indexed(place, "stamp", row["bytes"], row["meta"])
            if entry is None:
                return "checkpoint: read again"
            told = rest._checkpoint(entry)
        elif table == "session":
            told = asdict(state_file._session(*row.values()))
        elif table == "run":
            told = asdict(state_file._run(state_file._text(row["id"]), *list(row.values())[1:]))
        else:
            told = {"sampler": state_file._text(row["id"])}
    except Exception as error:
        if not isinstance(error, (TypeError, ValueError, RecursionError)):  # as in State._rows
            raise
        return f"{table}: left out"
    _told(told)
    return f"{table}: listed"


def _told(shown: dict[str, Any]) -> None:
    """Failure for what can't be sent, or is no time."""
    json.dumps(shown, allow_nan=False, ensure_ascii=False).encode()
    for key in ("time", "expires_at", "created"):
        if shown.get(key) is not None:
            datetime.fromisoformat(shown[key])


def _read_stored(
    state: State, sql: sqlite3.Connection, table: str, row: dict[str, Any], column: str, odd: Any
) -> str:
    """Changes a row, and reads the table as the routes do."""
    key = next(iter(listings.TABLES[table]))
    (place,) = sql.execute(f"SELECT rowid FROM {table} WHERE {key} = ?", (row[key],)).fetchone()
    try:
        sql.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (odd, place))
    except sqlite3.IntegrityError:  # a column that may not be null, or must differ
        return f"stored {table}: no row"
    try:
        found = READERS[table](state, row)
    finally:  # reading may have made a row anew
        sql.execute(
            f"UPDATE OR REPLACE {table} SET {column} = ? WHERE rowid = ?", (row[column], place)
        )
    return f"stored {table}: {'listed' if found else 'left out'}"


def _sessions(state: State, row: dict[str, Any]) -> bool:
    found = [one for one in state.sessions(row["owner"]) if one.id == row["id"]]
    for one in found:
        _told(asdict(one))
    return bool(found)


def _runs(state: State, row: dict[str, Any]) -> bool:
    found = [one for one in state.runs() if one.id == row["id"]]
    for one in (*found, state.run(row["id"])):
        _told(asdict(one))
    return bool(found)


def _samplers(state: State, row: dict[str, Any]) -> bool:
    found = state.samplers_of(row["session"])
    _told({"samplers": found})
    return row["id"] in found


def _checkpoints(state: State, row: dict[str, Any]) -> bool:
    listing = state.listing(row["run"])
    if listing.unreadable or len(listing.entries) != 2:
        raise Failure(f"an index that is wrong hides a checkpoint: {listing}")
    for item in listing.entries:
        _told(rest._checkpoint(item))
    return True


# What reads each table. Checkpoints are found on the disk, whatever the index says.
READERS: dict[str, Callable[[State, dict[str, Any]], bool]] = {
    "session": _sessions,
    "run": _runs,
    "sampler": _samplers,
    "checkpoint": _checkpoints,
}
