"""The server's state across restarts: sessions, runs, samplers, and an index of checkpoints.

One SQLite file is beside the checkpoints' folders. The folders remain the truth about checkpoints:
each has its meta.json, and an index row is valid only for the very file that it was read from. So a
folder that was copied in, changed or removed by hand is noticed when it is listed. If the SQLite
file is lost, only the sessions are lost: runs are found again by their checkpoints, or by the
run.json of folders that are older than the database. A row or a folder that is invalid is left out
of the listings, with one warning in the log. Any thread may call. An SQLite failure is raised as an
OSError with a sentence; if another process is writing, Busy is raised at once. The tables are in
schema.py.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from tinsmith.checkpoints.meta import (
    Meta,
    as_meta,
    content_of,
    is_count,
    is_finish,
    is_metadata,
    is_size,
    is_text,
    is_time,
)
from tinsmith.checkpoints.store import Store, StoredCheckpoint, place_of
from tinsmith.formats.folder_version import Version
from tinsmith.server.records import schema
from tinsmith.system import disk

log = logging.getLogger("tinsmith")

STATE_FILE = "state.sqlite"
RUN_FILE = "run.json"  # in folders that are older than the database
WAIT_SECONDS = 10.0  # when the file is opened, for another process that is writing
LOGGED_MAX = 1 << 12
RUN_BYTES_MAX = 1 << 22

T = TypeVar("T")


@dataclass(frozen=True)
class SessionRow:
    """One ServiceClient. `owner` is a hash of the API key."""

    id: str
    owner: str
    display_name: str | None
    user_metadata: dict[str, str]
    created: str
    finish: dict[str, Any] | None = None  # the end that its client reported


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
class CheckpointRow:
    """One checkpoint, as it is listed."""

    path: str
    bytes: int
    meta: Meta


@dataclass(frozen=True)
class Listing:
    """A run's checkpoints, oldest first, and the paths of those that can't be read."""

    entries: list[CheckpointRow]
    unreadable: list[str]


class Busy(OSError):
    """Another process is writing to the database."""


class Once:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Logs a warning, unless it was logged before."""
        if text not in self._said:
            if len(self._said) >= LOGGED_MAX:
                self._said.clear()
            self._said.add(text)
            log.warning("%s", text)


class State:
    """See the file's header."""

    def __init__(self, store: Store):
        self._store = store
        self.file = store.root / STATE_FILE
        self._lock = threading.RLock()
        self._warned = Once()
        with self._told():
            disk.make_folder(store.root)
            with contextlib.suppress(OSError):  # it exists, or SQLite says why it can't be made
                descriptor = os.open(self.file, os.O_CREAT | os.O_EXCL, disk.FILE_MODE)
                os.fchmod(descriptor, disk.FILE_MODE)
                os.close(descriptor)
            self._sql = sqlite3.connect(
                self.file, timeout=WAIT_SECONDS, check_same_thread=False, isolation_level=None
            )
            try:
                self._open()
            except BaseException:
                self._sql.close()
                raise

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._sql.close()

    def _open(self) -> None:
        """Checks the file, and gives it the tables of this version."""
        found = self._sql.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])
        self._sql.text_factory = lambda text: text.decode(errors="replace")
        schema.version_of(self._sql, self.file)  # a newer version is not touched
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing
        with self.transaction() as sql:
            schema.migrate(sql, self.file)
        self._sql.execute("PRAGMA busy_timeout = 0")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the errors of SQLite and of the folder into a sentence."""
        try:
            with self._lock:
                yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                failure = OSError(
                    errno.ENOSPC,
                    f"the disk is full: {self.file}, where the server keeps its sessions and runs, "
                    f"can't be written; {disk.PRUNE}",
                )
                log.warning("%s", failure.strerror)
                raise failure from None
            busy = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise (Busy if busy else OSError)(
                f"{self.file}, where the server keeps its sessions and runs, can't be read and "
                f"written: {error}"
            ) from None
        except sqlite3.DatabaseError as error:
            raise OSError(
                f"{self.file} is damaged ({error}); move it away and start the server again: the "
                "checkpoints do not depend on it and are found again, sessions are not"
            ) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction; a failure is raised with a sentence."""
        with self._told():
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield self._sql
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise
            self._sql.execute("COMMIT")

    def read(self, query: str, *values: Any) -> list[Any]:
        """The rows of a query; a failure is raised with a sentence."""
        with self._told():
            return self._sql.execute(query, values).fetchall()

    def _rows(self, make: Callable[..., T], query: str, *values: Any) -> list[T]:
        """`make` of each row; rows that it refuses are left out."""
        found = []
        for row in self.read(query, *values):
            try:
                found.append(make(*row))
            except (TypeError, ValueError, RecursionError) as error:
                self._leave_out(f"a row {row[0]!r:.60} of {self.file}", str(error))
        return found

    def _leave_out(self, what: str, why: str) -> None:
        """Warns that something is not listed."""
        self._warned.say(f"{what} is left out: {why}")

    def _insert(self, table: str, row: dict[str, Any], *, known: str = "IGNORE") -> None:
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        values = [json.dumps(v) if isinstance(v, dict) else v for v in row.values()]
        with self.transaction() as sql:
            sql.execute(f"INSERT OR {known} INTO {table} ({columns}) VALUES ({marks})", values)

    # ---- sessions and samplers ----

    def add_session(self, row: SessionRow) -> None:
        """Stores a session."""
        self._insert("session", dataclasses.asdict(row))

    def finish_session(self, name: str, finish: dict[str, Any]) -> None:
        """Stores how a client said that its session ended."""
        with self.transaction() as sql:
            sql.execute("UPDATE session SET finish = ? WHERE id = ?", (json.dumps(finish), name))

    def sessions(self, owner: str) -> list[SessionRow]:
        """An owner's sessions, newest first."""
        columns = ", ".join(field.name for field in dataclasses.fields(SessionRow))
        query = f"SELECT {columns} FROM session WHERE owner = ? ORDER BY rowid DESC"
        return self._rows(_session, query, owner)

    def runs_of(self, session: str) -> list[str]:
        """A session's runs, oldest first."""
        query = "SELECT id FROM run WHERE session = ? ORDER BY rowid"
        return self._rows(self._run_name, query, session)

    def add_sampler(self, name: str, session: str, base_model: str, path: str | None) -> None:
        """Stores a sampling session."""
        row = {"id": name, "session": session, "base_model": base_model, "path": path}
        self._insert("sampler", row)

    def samplers_of(self, session: str) -> list[str]:
        """A session's sampling sessions, oldest first."""
        return self._rows(_text, "SELECT id FROM sampler WHERE session = ? ORDER BY rowid", session)

    # ---- runs ----

    def add_run(self, row: RunRow) -> None:
        """Stores a run; an existing one stays unchanged."""
        self._insert("run", dataclasses.asdict(row))

    def forget_run(self, name: str) -> None:
        """Drops a run that could not be created."""
        with self.transaction() as sql:
            sql.execute("DELETE FROM run WHERE id = ?", (name,))

    def owner_of(self, run: str) -> str | None:
        """The owner of a run's session, if it has one."""
        query = "SELECT owner FROM session JOIN run ON run.session = session.id WHERE run.id = ?"
        return next((_text(owner) for (owner,) in self.read(query, run)), None)

    def runs(self) -> list[RunRow]:
        """All runs, newest first, including those with folders copied in by hand."""
        rows = {row.id: row for row in self._runs("ORDER BY created, rowid")}
        for name in self._store.runs():
            if name not in rows:
                row = self._import(name)
                rows |= {name: row} if row else {}
        return sorted(rows.values(), key=lambda row: row.created)[::-1]

    def run(self, name: str) -> RunRow:
        """A run; FileNotFoundError if there is none."""
        rows = self._runs("WHERE id = ?", name)
        if not rows and self._store.run_folder(name).is_dir():
            rows = [row for row in [self._import(name)] if row]
        if not rows:
            raise FileNotFoundError(f"there is no training run {name!r:.200}")
        return rows[0]

    def _runs(self, which: str, *values: Any) -> list[RunRow]:
        columns = ", ".join(field.name for field in dataclasses.fields(RunRow))
        return self._rows(
            lambda name, *rest: _run(self._run_name(name), *rest),
            f"SELECT {columns} FROM run {which}",
            *values,
        )

    def _run_name(self, name: Any) -> str:
        """Checks a run's id: it must be a valid folder name."""
        self._store.run_folder(_text(name))
        return name

    def _import(self, name: str) -> RunRow | None:
        """A run that is known only from its folder."""
        items, folder = self.checkpoints(name), self._store.run_folder(name)
        first = items[0].meta if items else None
        row = RunRow(
            id=name,
            session=None,
            base_model=first.base_model if first else "",
            rank=first.rank if first else 0,
            user_metadata=first.run_metadata if first else {},
            created=first.created if first else _made(folder),
        )
        file = folder / RUN_FILE
        try:
            with file.open("rb") as opened:
                told = json.loads(opened.read(RUN_BYTES_MAX))
            row = dataclasses.replace(
                row,
                base_model=_text(told["base_model"]),
                rank=_checked("lora_rank", told["lora_rank"], is_count),
                user_metadata=_checked("user_metadata", told["user_metadata"], is_metadata),
                created=told["created"] if is_time(told["created"]) else row.created,
            )
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._leave_out(str(file), str(error))
        if not row.base_model:
            return None
        with contextlib.suppress(OSError):  # the next listing finds it again
            self._insert("run", dataclasses.asdict(row))
        return row

    # ---- checkpoints ----

    def checkpoints(self, run: str) -> list[CheckpointRow]:
        """A run's checkpoints on disk, oldest first, without damaged ones."""
        return self.listing(run).entries

    def listing(self, run: str) -> Listing:
        """A run's checkpoints on disk."""
        rows = self.read("SELECT path, stamp, bytes, meta FROM checkpoint WHERE run = ?", run)
        known = {path: (stamp, size, meta) for path, stamp, size, meta in rows}
        found, changed, unreadable = [], [], []
        for place in self._store.places(run):
            path, kept = place.path, known.pop(place.path, None)
            entry = _indexed(place, *kept) if kept else None
            if entry is None:
                try:
                    place, entry = self._store.read(
                        path, lambda version, path=path: _read(path, version)
                    )
                except FileNotFoundError:  # deleted meanwhile
                    continue
                except (OSError, ValueError) as error:
                    self._leave_out(f"the checkpoint {path!r:.300}", str(error))
                    unreadable.append(path)
                    continue
                meta = json.dumps(dataclasses.asdict(entry.meta))
                changed.append((path, run, place.stamp, entry.bytes, meta))
            found.append(entry)
        if changed or known:
            with contextlib.suppress(OSError), self.transaction() as sql:  # only an index
                sql.executemany("DELETE FROM checkpoint WHERE path = ?", [(k,) for k in known])
                sql.executemany("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?, ?)", changed)
        return Listing(found, unreadable)


# ---- rows ----


def _checked(name: str, value: T, fits: Callable[[Any], bool]) -> T:
    if not fits(value):
        raise ValueError(f"its {name} is {value!r:.80}")
    return value


def _text(value: Any) -> str:
    return _checked("text", value, is_text)


def _metadata(text: Any) -> dict[str, str]:
    return _checked("user_metadata", json.loads(text), is_metadata)


def _finish(text: Any) -> dict[str, Any]:
    """How a client's session ended, without any other keys of the row."""
    told = _checked("finish", json.loads(text), is_finish)
    return {"reason": told["reason"], "detail": told.get("detail")}


def _session(
    name: Any, owner: Any, shown: Any, metadata: Any, created: Any, finish: Any
) -> SessionRow:
    return SessionRow(
        id=_text(name),
        owner=_text(owner),
        display_name=None if shown is None else _text(shown),
        user_metadata=_metadata(metadata),
        created=_checked("time", created, is_time),
        finish=None if finish is None else _finish(finish),
    )


def _run(name: str, session: Any, base: Any, rank: Any, metadata: Any, created: Any) -> RunRow:
    return RunRow(
        id=name,
        session=None if session is None else _text(session),
        base_model=_text(base),
        rank=_checked("rank", rank, is_count),
        user_metadata=_metadata(metadata),
        created=_checked("time", created, is_time),
    )


def _made(folder: Any) -> str:
    return datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat()


def _read(path: str, version: Version) -> tuple[StoredCheckpoint, CheckpointRow]:
    """A checkpoint read from disk."""
    meta = as_meta(content_of(version))
    return place_of(path, version), CheckpointRow(path, version.bytes, meta)


def _indexed(place: StoredCheckpoint, stamp: Any, size: Any, meta: Any) -> CheckpointRow | None:
    """A checkpoint from its index row, if it has not changed since."""
    if stamp != place.stamp:
        return None
    try:
        return CheckpointRow(place.path, _checked("size", size, is_size), as_meta(json.loads(meta)))
    except (TypeError, ValueError, KeyError, RecursionError):
        return None
