"""Databases that older versions of tinsmith wrote (databases/make.py): each opens with all that is
in it, a kill on the way leaves it as it was, and one that is newer is not touched."""

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tinsmith.checkpoints.store import Store, StoredCheckpoint
from tinsmith.server.records import database as state_file
from tinsmith.server.records import schema
from tinsmith.server.records.database import STATE_FILE, State
from tinsmith.server.records.history import RunHistory

COPIES = sorted((Path(__file__).parent / "databases").glob("*.sql"))
FIRST = COPIES[0].with_name("4ba09b3.sql")  # which lacks most
SECOND = "bd00a10"  # the copy of version 2
OF_HISTORY = ("00b24dd", "35a2453", SECOND)  # the copies that have its tables
NEWEST = len(schema.MIGRATIONS)
Tables = dict[str, list[tuple[Any, ...]]]


def restore(copy: Path, folder: Path) -> Path:
    """A copy as the file that it was made of."""
    file = folder / STATE_FILE
    with closing(sqlite3.connect(file)) as sql:
        sql.executescript(copy.read_text())
        sql.execute("PRAGMA journal_mode = WAL")
    return file


def content(file: Path) -> tuple[int, Tables]:
    """A database's version, and all rows of its tables."""
    with closing(sqlite3.connect(file)) as sql:
        names = [
            name for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        rows = {name: sql.execute(f"SELECT * FROM {name}").fetchall() for name in names}
        return sql.execute("PRAGMA user_version").fetchone()[0], rows


def columns(file: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The columns of a database's tables, and its indexes."""
    with closing(sqlite3.connect(file)) as sql:
        found = sql.execute("SELECT name, type FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        return {
            name: sql.execute(f"PRAGMA {kind}_info({name})").fetchall()
            for name, kind in found
            if name != "sqlite_sequence"
        }


def test_there_is_a_database_of_each_older_version() -> None:
    assert {path.stem for path in COPIES} == {"4ba09b3", "ee11e36", *OF_HISTORY}
    versions = {path.read_text().splitlines()[-1] for path in COPIES}
    assert versions == {f"PRAGMA user_version = {number};" for number in range(1, NEWEST)}


@pytest.mark.parametrize("copy", COPIES, ids=lambda path: path.stem)
def test_an_older_database_opens_with_all_that_is_in_it(copy: Path, tmp_path: Path) -> None:
    file = restore(copy, tmp_path)
    version, before = content(file)
    assert version == (2 if copy.stem == SECOND else 1)
    assert all(len(rows) for rows in before.values())
    assert ("history_step" in before) == (copy.stem in OF_HISTORY)
    state = State(Store(tmp_path))
    try:
        sessions = {row.id: row for row in state.sessions(before["session"][0][1])}
        first, second = (row[0] for row in before["session"])
        assert set(sessions) == {first, second}
        assert sessions[first].user_metadata == {"who": "me", "note": "größer 🙂"}
        assert sessions[first].display_name == "red bird" and sessions[second].finish is None
        runs = {row.id: row for row in state.runs()}
        assert {row.rank for row in runs.values()} == {2, 4} and len(runs) == 2
        (run,) = state.runs_of(first)
        assert runs[run].user_metadata == {"renderer_name": "qwen3"}
        assert len(state.samplers_of(first)) == 1
        for path, _, stamp, size, meta in before["checkpoint"]:  # the index is understood too
            entry = state_file._indexed(StoredCheckpoint(path, stamp, 0), stamp, size, meta)
            assert entry is not None and entry.meta.step == 3
        check_history(state, run, before.get("history_step", []))
    finally:
        state.close()
    version, after = content(file)
    assert version == NEWEST
    for table, rows in before.items():
        assert after[table] == rows, table


def check_history(state: State, run: str, rows: list[tuple[Any, ...]]) -> None:
    """The history has the steps that were kept; a new one goes behind them."""
    history = RunHistory(state)
    try:
        found, place = history.steps(run)
        assert found == [json.loads(row) for *_, row in rows]
        assert (place, len(found)) == ((3, 3) if rows else (0, 0))
        assert bool(history.samples(run)) == bool(rows)
    finally:
        history.close()


def test_an_older_database_becomes_what_a_new_one_is(tmp_path: Path) -> None:
    for name in ("new", *(path.stem for path in COPIES)):
        (tmp_path / name).mkdir()
    for copy in COPIES:
        restore(copy, tmp_path / copy.stem)
    found = []
    for folder in sorted(tmp_path.iterdir()):
        State(Store(folder)).close()
        found.append(columns(folder / STATE_FILE))
    assert all(one == found[0] for one in found) and len(found[0]) == 12
    for folder in tmp_path.iterdir():
        before = content(folder / STATE_FILE)
        State(Store(folder)).close()  # a second time there is nothing to do
        assert content(folder / STATE_FILE) == before


KILLED = """
import os, signal, sys
from tinsmith.checkpoints.store import Store
from tinsmith.server.records import schema
from tinsmith.server.records.database import State

def until(statements, count):
    yield from statements[:count]
    os.kill(os.getpid(), signal.SIGKILL)

first, second, _ = schema.MIGRATIONS
schema.MIGRATIONS = first, until(second, int(sys.argv[2]))
State(Store(sys.argv[1]))
"""


@pytest.mark.parametrize("statements", range(len(schema.MIGRATIONS[1]) + 1))
def test_a_kill_on_the_way_leaves_the_older_version(statements: int, tmp_path: Path) -> None:
    file = restore(FIRST, tmp_path)
    before = content(file)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(statements)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert content(file) == before and before[0] == 1
    State(Store(tmp_path)).close()
    version, after = content(file)
    assert version == NEWEST and {**after, **before[1]} == after


def test_a_migration_that_fails_leaves_the_older_version(tmp_path, monkeypatch) -> None:
    file = restore(FIRST, tmp_path)
    before = content(file)
    rows = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", (*rows, ("DROP TABLE run", "DROP TABLE nobodys")))
    with pytest.raises(OSError, match="can't be read and written: no such table: nobodys"):
        State(Store(tmp_path))
    assert content(file) == before


@pytest.mark.parametrize("mode", ("delete", "wal"))
@pytest.mark.parametrize("version", (NEWEST + 1, 99, -1))
def test_a_newer_database_is_not_touched(version: int, mode: str, tmp_path: Path) -> None:
    file = restore(COPIES[-1], tmp_path)
    with closing(sqlite3.connect(file)) as sql:
        sql.execute(f"PRAGMA journal_mode = {mode}")
        sql.execute("CREATE TABLE later (what TEXT)")
        sql.execute(f"PRAGMA user_version = {version}")
    before = file.read_bytes()
    with pytest.raises(ValueError, match=f"has version {version}; this tinsmith knows versions up"):
        State(Store(tmp_path))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def test_two_that_open_an_older_database_at_once_migrate_it_once(tmp_path: Path) -> None:
    file = restore(FIRST, tmp_path)
    before = content(file)[1]
    code = "import sys; from tinsmith.checkpoints.store import Store; "
    code += "from tinsmith.server.records.database import State; State(Store(sys.argv[1])).close()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for process in ran:
        assert process.wait(timeout=60) == 0, process.stderr.read().decode()
        process.stderr.close()
    version, after = content(file)
    assert version == NEWEST and {**after, **before} == after
