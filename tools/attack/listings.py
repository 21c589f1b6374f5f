"""Attacks what a server reads of its folder: meta.json of one checkpoint, and rows and bytes of the
database, mutated. Every route that reads them is then asked.

No answer may be a 5xx or a 409, or call itself a bug; a refusal is a sentence. Listings are always
answered, with the checkpoint that nothing was done to, and with nothing that JSON or the SDK can't
read. No route gives away what lies outside of the checkpoint's folder. Expiry deletes nothing else,
and file descriptors come back.
"""

import asyncio
import gc
import io
import json
import logging
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import make_app
from tinsmith.server.records.database import STATE_FILE, RunRow, SessionRow, State
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.service import Service

from tools.attack import common, saves
from tools.attack.common import Attempt, Failure, One

ODD, CLEAN = "tinker://run/weights/odd", "tinker://run/weights/clean"
SECRET = "what lies outside"
TIME = "2026-01-01T00:00:00+00:00"
TABLES = {
    "session": ("id", "owner", "display_name", "user_metadata", "created", "finish"),
    "run": ("id", "session", "base_model", "rank", "user_metadata", "created"),
    "sampler": ("id", "session", "base_model", "path"),
    "checkpoint": ("path", "run", "stamp", "bytes", "meta"),
}
API = "/api/v1"
BASE = f"{API}/training_runs/run/checkpoints/weights/odd"
Ask = tuple[str, str, dict[str, Any] | None]
LISTINGS: tuple[Ask, ...] = (
    ("GET", f"{API}/checkpoints", None),
    ("GET", f"{API}/training_runs", None),
    ("GET", f"{API}/training_runs/run/checkpoints", None),
    ("GET", f"{API}/sessions", None),
    ("POST", f"{API}/sessions/search", {}),
    ("POST", f"{API}/checkpoints/search", {}),
)
SINGLE: tuple[Ask, ...] = (
    ("GET", f"{BASE}/archive.tar", None),
    ("GET", f"{API}/training_runs/run", None),
    ("GET", f"{API}/sessions/s", None),
    ("POST", f"{API}/sessions/search", {"statuses": [{"type": "client_finished"}]}),
    ("POST", f"{API}/checkpoints/search", {"checkpoint_type": "training", "base_models": ["a"]}),
    ("GET", f"{BASE}/archive", None),
    ("GET", f"{BASE}/external_weights_urls", None),
    ("GET", f"{BASE}/files/adapter_config.json", None),
    ("POST", f"{API}/weights_info", {"tinker_path": ODD}),
    ("POST", f"{BASE}/publish", None),
    ("PUT", f"{BASE}/ttl", {"ttl_seconds": 7200}),
    ("POST", f"{API}/copy_weights", {"source_path": ODD, "destination_project_id": "any"}),
)


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace(logging.CRITICAL) as folder:
        template, root = folder / "template", folder / "root"
        (folder / "secret.txt").write_text(SECRET)
        make(Store(template))

        def one(attempt: Attempt) -> str:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(template, root)
            before = _descriptors()
            word = _attempt(attempt, Store(root))
            if _descriptors() > before:
                gc.collect()
                if _descriptors() > before:
                    raise Failure(f"{_descriptors()} descriptors are open, before {before}")
            return word

        yield one


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _service(store: Store, state: State) -> Service:
    config = ServerConfig({}, checkpoints=store.root)
    return Service(config, {}, None, store, state, history=None)  # type: ignore[arg-type]


def make(store: Store) -> None:
    for path in (CLEAN, ODD):
        saves.save(store.folder(path), 1)
    with closing(State(store)) as state:
        service = _service(store, state)
        with closing(service.beside), closing(service.disk):
            asyncio.run(ask(service, [("POST", f"{API}/create_session", {"tags": []})]))
        ((owner,),) = state.read("SELECT owner FROM session")
        state.add_session(SessionRow("s", owner, "a b", {"a": "b"}, TIME))
        state.finish_session("s", {"reason": {"type": "success"}, "detail": None})
        state.add_run(RunRow("run", "s", "tiny", 2, {"a": "b"}, TIME))
        state.add_sampler("s:sample:0", "s", "tiny", ODD)
        state.checkpoints("run")


def _attempt(attempt: Attempt, store: Store) -> str:
    act = attempt.rng.choice(("meta", "meta", "rows", "rows", "bytes"))
    {"meta": _change_meta, "rows": _change_rows, "bytes": _change_bytes}[act](attempt, store)
    try:
        state = State(store)
    except Exception as error:
        return f"{act} {common.refusal(error)} at the start"
    with closing(state):
        service = _service(store, state)
        with closing(service.beside), closing(service.disk):
            return f"{act} {_judge(service, whole=act != 'bytes')}"


async def ask(service: Service, requests: Iterable[Ask]) -> list[httpx.Response]:
    """The answers to some requests."""
    options: dict[str, Any] = {
        "transport": httpx.ASGITransport(make_app(service)),
        "base_url": "http://here",
        "headers": {"x-api-key": "tml-a"},
        "verify": False,  # nothing is sent, and certificates take long to load
    }
    async with httpx.AsyncClient(**options) as client:
        return [await client.request(method, url, json=body) for method, url, body in requests]


def _change_meta(attempt: Attempt, store: Store) -> None:
    file = store.folder(ODD) / "meta.json"
    content = json.loads(file.read_bytes())
    if attempt.rng.random() < 0.2:
        name = attempt.rng.choice(("../../../../secret.txt", "secret.txt", "meta.json", ".."))
        content["files"][name] = {"bytes": len(SECRET), "sha256": "0" * 64}
        (file.parent / "secret.txt").symlink_to(store.root.parent / "secret.txt")
    changed = common.changed(attempt.rng, content)
    text = common.json_text(attempt.rng, changed)
    attempt.note("meta.json", text)
    stat = file.stat()
    file.write_bytes(text)
    if attempt.rng.random() < 0.2:  # as a tool that keeps times does
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _change_rows(attempt: Attempt, store: Store) -> None:
    rng = attempt.rng
    with closing(sqlite3.connect(store.root / STATE_FILE, isolation_level=None)) as sql:
        for _ in range(rng.choice((1, 1, 2, 5))):
            table = rng.choice(sorted(TABLES))
            column = rng.choice(TABLES[table])
            (value,) = sql.execute(f"SELECT {column} FROM {table}").fetchone() or (None,)
            found = odd(rng, value)
            attempt.note(table, column, found)
            try:
                sql.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (found,))
            except sqlite3.IntegrityError:  # a column that may not be null
                continue


def odd(rng: Any, value: Any) -> Any:
    """Something else for a column; now and then text that is no UTF-8, which SQLite keeps."""
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.7:
        text = common.json_text(rng, common.changed(rng, json.loads(value)))
        return text.decode(errors="replace")
    found = common.hostile(rng)
    if isinstance(found, int) and abs(found) >> 63:
        return float(2**70)
    if isinstance(found, str):
        return found.encode(errors="surrogatepass").decode(errors="replace")
    return json.dumps(found) if isinstance(found, list | dict) else found


def _change_bytes(attempt: Attempt, store: Store) -> None:
    file = store.root / attempt.rng.choice((STATE_FILE, STATE_FILE, f"{STATE_FILE}-wal"))
    before = file.read_bytes() if file.exists() else b""
    after = common.changed_bytes(attempt.rng, before)
    places = [at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    attempt.note(file.name, len(before), len(after), places[:20])
    file.write_bytes(after)


def _judge(service: Service, *, whole: bool) -> str:
    """Asks every route; `whole` says that the database is one."""
    store, words = service.store, []
    replies = asyncio.run(ask(service, (*LISTINGS, *SINGLE)))
    for reply in replies[: len(LISTINGS)]:
        _check(reply)
        if whole and reply.status_code != 200:
            raise Failure(f"{reply.url}: {reply.status_code} {reply.text[:500]}")
        items = reply.json().get("checkpoints")
        if whole and items is not None and CLEAN not in [item["tinker_path"] for item in items]:
            raise Failure(f"{reply.url} does not list the clean checkpoint")
        for item in items or []:
            datetime.fromisoformat(item["time"])
            words.append(item["tinker_path"] == ODD)
    for reply in replies[len(LISTINGS) :]:
        if reply.headers["content-type"] == "application/x-tar":
            _check_archive(reply.content, store.folder(ODD))
        else:
            _check(reply)
    gone = store.delete_expired()
    if set(gone) - {ODD}:
        raise Failure(f"{gone} have expired")
    if store.read(CLEAN, saves.version_of) != 1:
        raise Failure("the clean checkpoint has changed")
    return "listed" if any(words) else "left out"


def _check(reply: Any) -> None:
    text = reply.text
    if reply.status_code >= 500 or reply.status_code == 409:
        raise Failure(f"{reply.url}: {reply.status_code} {text[:500]}")
    if any(word in text for word in common.BUG) or SECRET in text:
        raise Failure(f"{reply.url} says {text[:500]}")
    if reply.headers["content-type"] != "application/json":
        return
    content = json.loads(text, parse_constant=lambda name: _no_number(reply, name))
    if reply.status_code >= 400 and len(content["detail"]) < 8:
        raise Failure(f"{reply.url}: no sentence: {text[:500]}")


def _no_number(reply: Any, name: str) -> None:
    raise Failure(f"{reply.url} has {name}, which is no JSON")


def _check_archive(packed: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar.getmembers():
            file, own = tar.extractfile(member), folder / member.name
            if file is None or own.is_symlink() or file.read() != own.read_bytes():
                raise Failure(f"the archive has {member.name}")
    if SECRET.encode() in packed:
        raise Failure("the archive gives a file away that is not the checkpoint's")
