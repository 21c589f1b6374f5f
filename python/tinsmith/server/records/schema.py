"""The tables of the server's database, and the migrations from older versions.

MIGRATIONS is the table: its row n turns version n into version n + 1; an empty file has version 0.
A new database runs the same migrations, so each table is defined once. All rows run in the caller's
transaction: a process that is killed leaves the old version. A row never changes once a tinsmith
with it was released; tests/server/databases has databases of each.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

MIGRATIONS: tuple[Iterable[str], ...] = (
    (
        """CREATE TABLE session (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            display_name TEXT,
            user_metadata TEXT NOT NULL,
            created TEXT NOT NULL,
            finish TEXT)""",
        "CREATE INDEX session_owner ON session (owner)",
        """CREATE TABLE run (
            id TEXT PRIMARY KEY,
            session TEXT,
            base_model TEXT NOT NULL,
            rank INTEGER NOT NULL,
            user_metadata TEXT NOT NULL,
            created TEXT NOT NULL)""",
        "CREATE INDEX run_session ON run (session)",
        """CREATE TABLE sampler (
            id TEXT PRIMARY KEY,
            session TEXT NOT NULL,
            base_model TEXT NOT NULL,
            path TEXT)""",
        "CREATE INDEX sampler_session ON sampler (session)",
        """CREATE TABLE checkpoint (
            path TEXT PRIMARY KEY,
            run TEXT NOT NULL,
            stamp TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            meta TEXT NOT NULL)""",
        "CREATE INDEX checkpoint_run ON checkpoint (run)",
    ),
    (  # the history of runs; some databases of version 1 have these tables already
        """CREATE TABLE IF NOT EXISTS history_run (
            run TEXT PRIMARY KEY, seen REAL NOT NULL, about TEXT NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS history_step (
            place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, step INTEGER NOT NULL,
            row TEXT NOT NULL, UNIQUE (run, step))""",
        """CREATE TABLE IF NOT EXISTS history_sample (
            run TEXT NOT NULL, place INTEGER NOT NULL, row TEXT NOT NULL,
            PRIMARY KEY (run, place))""",
    ),
    (  # what clients log of their runs
        """CREATE TABLE history_log (
            place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, step INTEGER NOT NULL,
            row TEXT NOT NULL, UNIQUE (run, step))""",
    ),
)


def version_of(sql: sqlite3.Connection, file: Path) -> int:
    """The version of a database. ValueError if it is newer than this program."""
    found = int(sql.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= found <= len(MIGRATIONS):
        raise ValueError(
            f"{file} has version {found}; this tinsmith knows versions up to {len(MIGRATIONS)}: "
            "use the newer one that wrote it, or another folder with --checkpoints"
        )
    return found


def migrate(sql: sqlite3.Connection, file: Path) -> None:
    """Migrates a database to this version, in the caller's transaction. The version is written
    every time, so a read-only disk fails at the start."""
    for statements in MIGRATIONS[version_of(sql, file) :]:
        for statement in statements:
            sql.execute(statement)
    sql.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
