"""Attacks what changes the folder of checkpoints: at each write in turn the process is killed, or
the disk is full, broken, or takes half of what it gets.

A process with faults.c loaded forks a child for each input. The child does one of OPERATIONS with
the fault at its write number n, and says how that ended, unless it was killed. Then whoever looks
finds one whole version: the old one, or the new one if the operation was answered (or came as far).
After a restart nothing unfinished is left, and the operation succeeds. Inputs are all pairs of a
write and a fault, of all operations mixed, and then the same again.
"""

import contextlib
import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tinsmith.checkpoints.store import Store
from tinsmith.server.records.database import RunRow, SessionRow, State
from tinsmith.system import disk

from tools.attack import ROOT, common, saves
from tools.attack.common import Attempt, Failure, One

HERE = Path(__file__).parent
FORKER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tools.attack import kills
kills.fork_children()
"""
FAULTS = ("count", "kill before", "kill after", "full once", "full", "broken", "short")
PATH, COPY = "tinker://run:1/weights/a", "tinker://copy/weights/a"
TIME = "2026-01-01T00:00:00+00:00"
STRIDE = 7919  # a prime: any few inputs in a row are of all operations
SECONDS = 60.0  # for an operation of milliseconds

# What is at each path before, and after: a version, or None.
Content = tuple[int | None, int | None]


@dataclass(frozen=True)
class Operation:
    """One change, with what is at PATH and COPY before and after it."""

    before: Content
    after: Content
    work: Callable[[Store], None]


def _no_exchange(store: Store) -> None:
    with patch.object(disk, "_exchange_at_once", lambda one, other: False):
        saves.save(store.folder(PATH), 2)


def _serve(store: Store) -> None:
    """What a server does to its folder between its start and its end."""
    store.claim("http://here")
    state = State(store)
    state.add_session(SessionRow("s", "o", "name", {"a": "b"}, TIME))
    state.add_run(RunRow("s:train:0", "s", "tiny", 2, {}, TIME))
    state.checkpoints("run:1")
    state.finish_session("s", {"reason": {"type": "success"}, "detail": None})
    state.close()
    store.close()


def _expire(store: Store) -> None:
    if store.delete_expired() != [PATH]:
        raise OSError("the checkpoint that has expired was not deleted")


OPERATIONS = {
    "save": Operation((None, None), (2, None), lambda store: saves.save(store.folder(PATH), 2)),
    "overwrite": Operation((1, None), (2, None), lambda store: saves.save(store.folder(PATH), 2)),
    "overwrite without exchange": Operation((1, None), (2, None), _no_exchange),
    "copy": Operation((1, None), (1, 1), lambda store: store.copy(PATH, "copy") and None),
    "publish": Operation((1, None), (1, None), lambda store: store.update(PATH, public=True)),
    "delete": Operation((1, None), (None, None), lambda store: store.delete(PATH)),
    "expire": Operation((1, None), (None, None), _expire),
    "serve": Operation((1, None), (1, None), _serve),
}  # fmt: skip


# ---- the process that forks ----


def fork_children() -> None:
    """Answers each line, [folder, operation, fault, number], with how a child ended: what it said,
    and how many writes it counted."""
    logging.getLogger("tinsmith").setLevel(logging.ERROR)
    library = ctypes.CDLL(None)
    for line in sys.stdin:
        root, name, fault, number = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                store = Store(root)
                library.faults_arm(os.fsencode(str(store.root)), number, FAULTS.index(fault))
                said = _ended(lambda: OPERATIONS[name].work(store))  # noqa: B023
                os.write(writing, json.dumps([said, library.faults_seen()]).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([said.decode(), status]), flush=True)


def _ended(work: Callable[[], None]) -> list[str]:
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error), traceback.format_exc()]
    return []


# ---- the program ----


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace(logging.ERROR) as folder, _forker(folder) as ask:
        templates = folder / "templates"
        inputs = []
        for key, operation in OPERATIONS.items():
            template = Store(templates / key)
            template.root.mkdir(parents=True)
            ttl = 0 if key == "expire" else None
            if operation.before[0] is not None:
                saves.save(template.folder(PATH), operation.before[0], ttl_seconds=ttl)
            place = _fresh(template.root, folder / "place")
            said, _ = ask(place, key, "count", 0)
            count = json.loads(said)[1]
            faults = FAULTS[1:]
            inputs += [(key, fault, at) for at in range(1, count + 1) for fault in faults]

        def one(attempt: Attempt) -> str:
            key, fault, at = inputs[attempt.number * STRIDE % len(inputs)]
            attempt.note(f"{key}: {fault} at write {at}")
            place = _fresh(templates / key, folder / "place")
            said, status = ask(place, key, fault, at)
            return _judge(Store(place), key, fault, said, status)

        yield one


def _fresh(template: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place)
    return place


@contextmanager
def _forker(folder: Path) -> Iterator[Callable[[Path, str, str, int], tuple[str, int]]]:
    library = folder / "faults.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "faults.c"), "-ldl"]
    subprocess.run(command, check=True)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": paths}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def ask(root: Path, name: str, fault: str, number: int) -> tuple[str, int]:
        asked.write(json.dumps([str(root), name, fault, number]) + "\n")
        asked.flush()
        said, status = json.loads(answers.readline())
        return said, status

    try:
        yield ask
    finally:
        asked.close()
        process.wait(SECONDS)
        answers.close()


def _judge(store: Store, key: str, fault: str, said: str, status: int) -> str:
    """What came of an operation; Failure where anything was lost."""
    operation = OPERATIONS[key]
    killed, failed = status != 0, bool(said) and bool(json.loads(said)[0])
    if killed and not fault.startswith("kill"):
        raise Failure(f"the process ended with status {status}")
    if failed:
        kind, sentence, trace = json.loads(said)[0]
        if kind not in ("OSError", "FileNotFoundError", "ValueError") or len(sentence) < 20:
            raise Failure(f"no sentence: {trace}")
    allowed = {operation.before, operation.after} if killed or failed else {operation.after}
    if failed and key in ("save", "overwrite", "overwrite without exchange", "copy"):
        allowed = {operation.before}
    _check(store, allowed, "before a restart")
    store.claim()
    store.close()
    _check(store, allowed, "after a restart")
    left = [file.name for file in store.root.glob("*/*/*~*")]
    if left:
        raise Failure(f"{left} are left")
    _check_state(store, key, answered=not killed and not failed)
    if _contents(store) != operation.after or key in ("publish", "serve"):
        operation.work(store)
        _check(store, {operation.after}, "done again")
    return "killed" if killed else "failed" if failed else "done"


def _check(store: Store, allowed: set[Content], when: str) -> None:
    found = _contents(store)
    if found not in allowed:
        raise Failure(f"{when} there are {found}, not one of {allowed}")


def _contents(store: Store) -> Content:
    found: list[int | None] = []
    for path in (PATH, COPY):
        run = path.split("/")[2]
        listed = path in store.checkpoints(run)
        try:
            found.append(store.read(path, saves.version_of))
        except FileNotFoundError:
            found.append(None)
        if listed != (found[-1] is not None):
            raise Failure(f"{path} is {'' if listed else 'not '}listed, and holds {found[-1]}")
    return found[0], found[1]


def _check_state(store: Store, key: str, *, answered: bool) -> None:
    """The database can be used, and knows what was answered."""
    if key == "publish" and answered and not store.meta(PATH).public:
        raise Failure("it is not published")
    if key != "serve":
        return
    with contextlib.closing(State(store)) as state:
        sessions, runs = state.sessions("o"), state.runs_of("s")
        if answered and (len(sessions), runs) != (1, ["s:train:0"]):
            raise Failure(f"the database knows {sessions} and {runs}")
        if answered and sessions[0].finish is None:
            raise Failure("the session's end is lost")
