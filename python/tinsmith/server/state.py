"""The server's state across restarts: sessions, runs, samplers, and an index of checkpoints.

One SQLite file lies beside the checkpoints' folders. The folders remain the truth about
checkpoints: each has its meta.json, and an index row is valid only for the very file that it was
read from. So a folder that was copied in, changed or removed by hand is noticed when it is listed.
If the SQLite file is lost, only the sessions are lost: runs are found again by their checkpoints,
or by the run.json of folders that are older than the database. Any thread may call. An SQLite
failure is raised as an OSError with a sentence.
"""

import contextlib
import dataclasses
import json
import logging
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinsmith.files import checkpoint
from tinsmith.files.checkpoint import Meta, Store

log = logging.getLogger("tinsmith")

STATE_FILE = "state.sqlite"
RUN_FILE = "run.json"  # in folders that are older than the database
VERSION = 1
WAIT_SECONDS = 10.0  # for another process that writes

SCHEMA = """
CREATE TABLE session (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    display_name TEXT,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL,
    finish TEXT
);
CREATE INDEX session_owner ON session (owner);
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    session TEXT,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL
);
CREATE INDEX run_session ON run (session);
CREATE TABLE sampler (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT
);
CREATE INDEX sampler_session ON sampler (session);
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stamp TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    meta TEXT NOT NULL
);
CREATE INDEX checkpoint_run ON checkpoint (run);
"""


@dataclass(frozen=True)
class SessionRow:
    """One ServiceClient. `owner` stands for the API key and does not reveal it."""

    id: str
    owner: str
    display_name: str | None
    user_metadata: dict[str, str]
    created: str
    finish: dict[str, Any] | None = None  # how its client said that it ended


@dataclass(frozen=True)
class RunRow:
    """One training run."""

    id: str
    session: str | None
    base_model: str
    rank: int
    user_metadata: dict[str, str]
    created: str


@dataclass(frozen=True)
class Entry:
    """One checkpoint, as it is listed."""

    path: str
    bytes: int
    meta: Meta


class State:
    """See the file's header."""

    def __init__(self, store: Store):
        self._store = store
        self.file = store.root / STATE_FILE
        self._lock = threading.RLock()
        with self._told():
            store.root.mkdir(parents=True, exist_ok=True)
            self._sql = sqlite3.connect(
                self.file, timeout=WAIT_SECONDS, check_same_thread=False, isolation_level=None
            )
            try:
                self._open()
            except BaseException:
                self._sql.close()
                raise

    def close(self) -> None:
        """Ends all use."""
        with self._lock:
            self._sql.close()

    def _open(self) -> None:
        """Checks the file, and makes its tables where it is new."""
        found = self._sql.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing
        with self._transaction():
            version = self._sql.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise ValueError(f"{self.file} has version {version}; this tinsmith has {VERSION}")
            if version == 0:
                for statement in SCHEMA.split(";"):
                    self._sql.execute(statement)
            # Written every time: so a disk that can't be written to fails at the start.
            self._sql.execute(f"PRAGMA user_version = {VERSION}")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the errors of SQLite and of the folder into a sentence."""
        try:
            with self._lock:
                yield
        except sqlite3.OperationalError as error:
            raise OSError(
                f"{self.file}, where the server keeps its sessions and runs, can't be read and "
                f"written: {error}"
            ) from None
        except sqlite3.DatabaseError as error:
            raise OSError(
                f"{self.file} is damaged ({error}); move it away and start the server again: the "
                "checkpoints do not depend on it and are found again, sessions are not"
            ) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; a failure is raised with a sentence."""
        with self._told():
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield self._sql
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise
            self._sql.execute("COMMIT")

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._told():
            return self._sql.execute(query, values).fetchall()

    def _insert(self, table: str, row: dict[str, Any], *, known: str = "REPLACE") -> None:
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        values = [json.dumps(v) if isinstance(v, dict) else v for v in row.values()]
        with self._transaction() as sql:
            sql.execute(f"INSERT OR {known} INTO {table} ({columns}) VALUES ({marks})", values)

    # ---- sessions and samplers ----

    def add_session(self, row: SessionRow) -> None:
        """Keeps a session."""
        self._insert("session", dataclasses.asdict(row))

    def finish_session(self, name: str, finish: dict[str, Any]) -> None:
        """Keeps how a client said that its session ended."""
        with self._transaction() as sql:
            sql.execute("UPDATE session SET finish = ? WHERE id = ?", (json.dumps(finish), name))

    def sessions(self, owner: str) -> list[SessionRow]:
        """An owner's sessions, the newest first."""
        columns = ", ".join(field.name for field in dataclasses.fields(SessionRow))
        query = f"SELECT {columns} FROM session WHERE owner = ? ORDER BY rowid DESC"
        return [
            SessionRow(key, whose, shown, json.loads(data), created, finish and json.loads(finish))
            for key, whose, shown, data, created, finish in self._read(query, owner)
        ]

    def runs_of(self, session: str) -> list[str]:
        """A session's runs, the oldest first."""
        rows = self._read("SELECT id FROM run WHERE session = ? ORDER BY rowid", session)
        return [name for (name,) in rows]

    def add_sampler(self, name: str, session: str, base_model: str, path: str | None) -> None:
        """Keeps a sampling session."""
        row = {"id": name, "session": session, "base_model": base_model, "path": path}
        self._insert("sampler", row)

    def samplers_of(self, session: str) -> list[str]:
        """A session's sampling sessions, the oldest first."""
        rows = self._read("SELECT id FROM sampler WHERE session = ? ORDER BY rowid", session)
        return [name for (name,) in rows]

    # ---- runs ----

    def add_run(self, row: RunRow) -> None:
        """Keeps a run."""
        self._insert("run", dataclasses.asdict(row))

    def runs(self) -> list[RunRow]:
        """All runs, the newest first, including those with folders copied in by hand."""
        known = {name for (name,) in self._read("SELECT id FROM run")}
        for name in self._store.runs():
            if name not in known:
                self._import(name)
        return self._runs("ORDER BY created DESC, rowid DESC")

    def run(self, name: str) -> RunRow:
        """A run. FileNotFoundError where there is none."""
        rows = self._runs("WHERE id = ?", name)
        if not rows and self._store.run_folder(name).is_dir():
            self._import(name)
            rows = self._runs("WHERE id = ?", name)
        if not rows:
            raise FileNotFoundError(f"there is no training run {name!r}")
        return rows[0]

    def _runs(self, which: str, *values: Any) -> list[RunRow]:
        columns = ", ".join(field.name for field in dataclasses.fields(RunRow))
        return [
            RunRow(key, session, base, rank, json.loads(data), created)
            for key, session, base, rank, data, created in self._read(
                f"SELECT {columns} FROM run {which}", *values
            )
        ]

    def _import(self, name: str) -> None:
        """Adds a run that is known only by its folder."""
        items = self.checkpoints(name)
        row = RunRow(
            id=name,
            session=None,
            base_model=items[0].meta.base_model if items else "",
            rank=items[0].meta.rank if items else 0,
            user_metadata=items[0].meta.run_metadata if items else {},
            created=items[0].meta.created if items else "",
        )
        file = self._store.run_folder(name) / RUN_FILE
        try:
            told = json.loads(file.read_bytes())
            row = dataclasses.replace(
                row,
                base_model=str(told["base_model"]),
                rank=int(told["lora_rank"]),
                user_metadata=dict(told["user_metadata"]),
                created=str(told["created"]),
            )
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s can't be read: %s", file, error)
        if row.base_model:
            self._insert("run", dataclasses.asdict(row), known="IGNORE")

    # ---- checkpoints ----

    def checkpoints(self, run: str) -> list[Entry]:
        """A run's checkpoints as they are on disk, the oldest first; damaged ones are left out."""
        rows = self._read("SELECT path, stamp, bytes, meta FROM checkpoint WHERE run = ?", run)
        known = {path: (stamp, size, meta) for path, stamp, size, meta in rows}
        found, changed = [], []
        for path in self._store.checkpoints(run):
            folder = self._store.folder(path)
            try:
                stat = (folder / checkpoint.META_FILE).stat()
                stamp = f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_size}"
                kept = known.get(path)
                if kept is not None and kept[0] == stamp:
                    del known[path]
                    found.append(Entry(path, kept[1], checkpoint.as_meta(json.loads(kept[2]))))
                    continue
                meta = checkpoint.load_meta(folder)
                size = sum(file.stat().st_size for file in folder.iterdir())
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (OSError, ValueError) as error:
                log.warning("the checkpoint %s is left out: %s", path, error)
                continue
            known.pop(path, None)
            found.append(Entry(path, size, meta))
            changed.append((path, run, stamp, size, json.dumps(dataclasses.asdict(meta))))
        if changed or known:
            with self._transaction() as sql:
                sql.executemany("DELETE FROM checkpoint WHERE path = ?", [(k,) for k in known])
                sql.executemany("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?, ?)", changed)
        return found
