"""Attacks checkpoints that are read while other processes save over them, without a pause.

Three processes write: two to one folder, where two folders change places in one step, and one to
another folder, as on a file system without such a step. Each input is one reader, over HTTP or
not: it finds the checkpoint, and one whole version of it.
"""

import asyncio
import hashlib
import io
import json
import logging
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from support.archives import unpack
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.server.records.database import State
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.service import Service

from tools.attack import ROOT, common, saves
from tools.attack.common import Attempt, Failure, One
from tools.attack.listings import API, ask

PATH = "tinker://run/weights/a"
BASE = f"{API}/training_runs/run/checkpoints/weights/a"
WRITER = f"""
import select, sys
sys.path.insert(0, {str(ROOT)!r})
from tools.attack import saves
from tinsmith.system import disk
from tinsmith.checkpoints.store import Store
folder, version, at_once = Store(sys.argv[1]).folder({PATH!r}), int(sys.argv[2]), sys.argv[3]
if at_once == "aside":
    disk._exchange_at_once = lambda one, other: False
while not select.select([sys.stdin], [], [], 0.001)[0]:
    saves.save(folder, version % (1 << 20))
    version += 2
print(version // 2)
"""
SECONDS = 60.0


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace(logging.CRITICAL) as folder, ExitStack() as undo:
        stores = {way: Store(folder / way) for way in ("exchange", "aside")}
        services = {}
        for way, store in stores.items():
            saves.save(store.folder(PATH), 1)
            state = undo.enter_context(closing(State(store)))
            config, absent = ServerConfig({}, checkpoints=store.root), cast(Any, None)
            service = services[way] = Service(config, {}, absent, store, state, history=absent)
            undo.callback(service.beside.close)
            undo.callback(service.disk.close)
        writers = [
            _writer(stores[way].root, at, way) for at, way in enumerate((*stores, "exchange"))
        ]
        undo.callback(_end, writers)

        def one(attempt: Attempt) -> str:
            way, use = attempt.rng.choice(sorted(stores)), attempt.rng.choice(sorted(USES))
            attempt.note(way, use)
            if any(writer.poll() is not None for writer in writers):
                raise Failure("a writer has ended")
            USES[use](services[way], attempt.number)
            return use

        yield one


def _writer(root: Path, version: int, way: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(root), str(version), way]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(writers: list["subprocess.Popen[str]"]) -> None:
    counts = [writer.communicate("end\n", SECONDS)[0].strip() for writer in writers]
    print(f"saved {' and '.join(counts)} times meanwhile", file=sys.stderr)


# ---- readers ----


def _read(service: Service, number: int) -> None:
    service.store.read(PATH, saves.version_of)


def _load(service: Service, number: int) -> None:
    adapter = saves.adapter_of(0)
    folder = service.store.folder(PATH)
    checkpoint.load_into(folder, saves.FAMILY, adapter, optimizer=True)
    found = {
        float(item) for what in ("weights", "m", "v") for item in np.unique(adapter.read(what))
    }
    if found != {float(adapter.step)}:
        raise Failure(f"an adapter of step {adapter.step} has the numbers of {sorted(found)}")


def _copy(service: Service, number: int) -> None:
    path = service.store.copy(PATH, f"copy-{number}")
    service.store.read(path, saves.version_of)
    service.store.delete(path)


def _publish(service: Service, number: int) -> None:
    service.store.update(PATH, public=number % 2 == 0)


def _open(service: Service, number: int) -> None:
    version, files = service.store.open(PATH)
    found = {name: file.read() for name, file in files.items()}
    for file in files.values():
        file.close()
    if _name_of(found) != version:
        raise Failure("the files are not those of their version")


def _name_of(files: dict[str, bytes]) -> str:
    """Store.open's name for a version, made of its files."""
    facts = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _list(service: Service, number: int) -> None:
    if PATH not in service.store.checkpoints("run"):
        raise Failure("it is not listed")


def _expire(service: Service, number: int) -> None:
    gone = service.store.delete_expired()
    if gone:
        raise Failure(f"{gone} have expired")


def _http_list(service: Service, number: int) -> None:
    found = _answer(service, "GET", f"{API}/training_runs/run/checkpoints")["checkpoints"]
    if PATH not in [item["tinker_path"] for item in found]:
        raise Failure("it is not listed")


def _http_publish(service: Service, number: int) -> None:
    _answer(service, "POST" if number % 2 else "DELETE", f"{BASE}/publish")


def _http_copy(service: Service, number: int) -> None:
    body = {"source_path": PATH, "destination_project_id": "any"}
    path = _answer(service, "POST", f"{API}/copy_weights", body)["tinker_path"]
    service.store.read(path, saves.version_of)
    service.store.delete(path)


def _http_archive(service: Service, number: int) -> None:
    (reply,) = asyncio.run(ask(service, [("GET", f"{BASE}/archive.tar", None)]))
    if reply.status_code != 200:
        raise Failure(f"{reply.status_code}: {reply.text[:500]}")
    with (
        tarfile.open(fileobj=io.BytesIO(reply.content)) as tar,
        tempfile.TemporaryDirectory() as to,
    ):
        unpack(tar, Path(to))
        found = set()
        for name in (checkpoint.ADAPTER_FILE, checkpoint.OPTIMIZER_FILE):
            with checkpoint.safetensors_io.open_file(Path(to) / name) as tensors:
                found |= {float(item) for key in tensors for item in np.unique(tensors[key])}
    if len(found) != 1:
        raise Failure(f"the archive is of the versions {sorted(found)}")


def _answer(service: Service, method: str, url: str, body: dict[str, str] | None = None) -> dict:
    (reply,) = asyncio.run(ask(service, [(method, url, body)]))
    if reply.status_code != 200:
        raise Failure(f"{reply.status_code}: {reply.text[:500]}")
    return reply.json()


USES: dict[str, Callable[[Service, int], None]] = {
    "read": _read,
    "load": _load,
    "copy": _copy,
    "publish": _publish,
    "open": _open,
    "list": _list,
    "expire": _expire,
    "http list": _http_list,
    "http publish": _http_publish,
    "http copy": _http_copy,
    "http archive": _http_archive,
}
