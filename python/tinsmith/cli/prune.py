"""`tinsmith prune`: frees disk space: checkpoints of a folder, or copies of quantised weights.

It deletes the checkpoints that match all given options, after it has listed them with sizes and
ages and the user has agreed. A checkpoint that was saved again meanwhile stays, and so does one
that can't be read. A folder without a server is locked, and the rest of killed saves is deleted
too. Otherwise a server of the folder is asked to delete, so that its clients see one order.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.quota import bytes_in, files_in
from tinsmith.checkpoints.store import SCHEME, Store, StoredCheckpoint
from tinsmith.cli.run import API_KEY
from tinsmith.engine.errors import sentence
from tinsmith.models.weight_cache import copies
from tinsmith.system.format import counted, readable
from tinsmith.system.home import checkpoints_folder, copies_folder
from tinsmith.system.lock import FolderInUse, is_held

ASK_SECONDS = 60.0  # timeout of a server for one checkpoint
HINT = (
    "say which checkpoints: --older-than, --expired, --run and --keep; `tinsmith list` shows them"
)


@dataclass(frozen=True)
class Item:
    """A readable checkpoint."""

    place: StoredCheckpoint
    run: str
    meta: Meta

    @property
    def created(self) -> float:
        """When it was saved, in seconds since 1970."""
        return datetime.fromisoformat(self.meta.created).timestamp()


def run(options: argparse.Namespace) -> int:
    """Lists, asks and deletes; returns the exit code."""
    if options.copies:
        return _prune_copies(options)
    store = Store(checkpoints_folder(options.checkpoints))
    saved, odd = items(store)
    chosen = _chosen(saved, options)
    left = [] if is_held(store.root) else store.unfinished()
    for item in chosen:
        print(line(store.folder(item.place.path), item.created, item.place.path))
    for folder in left:
        print(line(folder, folder.lstat().st_mtime, f"{folder}, which was never finished"))
    if odd:
        print(f"{len(odd)} that can't be read stay: {', '.join(odd)}", file=sys.stderr)
    told = f"{counted(len(saved), 'checkpoint')}, {readable(_bytes(store))}, in {store.root}"
    if not chosen and not left:
        print(f"nothing to delete: {told}" if _given(options) else f"{told}; {HINT}")
        return 0
    gone = [*(store.folder(item.place.path) for item in chosen), *left]
    room = readable(_freed(store, gone))
    if options.dry_run:
        print(f"{room} would be freed; of {told}")
        return 0
    if not options.yes and not _agreed(f"delete them, and free {room}? [y/N] "):
        print("nothing was deleted")
        return 1
    before = files_in(*gone)
    _delete(store, [item.place for item in chosen])
    after = files_in(*_runs(store))
    freed = sum(size for file, size in before.items() if file not in after)
    saved, _ = items(store)
    told = f"{counted(len(saved), 'checkpoint')}, {readable(_bytes(store))}"
    print(f"{readable(freed)} ({freed} bytes) freed; {told} are left in {store.root}")
    return 0


def _prune_copies(options: argparse.Namespace) -> int:
    """The same for all copies of quantised weights. A model that has mapped one keeps its pages."""
    if _given(options) or options.checkpoints is not None:
        raise ValueError(
            "--copies is about weights, not checkpoints: give --dry-run or --yes alone"
        )
    found = copies()
    for path, size in found.items():
        print(f"{readable(size):>12}  {path.name}")
    told = f"{readable(sum(found.values()))} in {counted(len(found), 'copy', 'copies')}"
    told += f" of quantised weights in {copies_folder()}"
    if not found or options.dry_run:
        print(f"nothing to delete: {told}" if not found else f"{told} would be deleted")
        return 0
    if not options.yes and not _agreed(f"delete them? {told}; a later load makes one anew [y/N] "):
        print("nothing was deleted")
        return 1
    for path in found:
        path.unlink(missing_ok=True)
    print(f"deleted: {told}")
    return 0


# ---- checkpoints ----


def items(store: Store) -> tuple[list[Item], list[str]]:
    """All checkpoints, a run's oldest first, and the paths of those that can't be read."""
    found, odd = [], []
    for name in store.runs():
        for place in store.places(name):
            try:
                found.append(Item(place, name, store.meta(place.path)))
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (OSError, ValueError):
                odd.append(place.path)
    return sorted(found, key=lambda item: (item.run, item.created, item.place.path)), odd


def _chosen(items: Sequence[Item], options: argparse.Namespace) -> list[Item]:
    """The checkpoints that match all given options; none if no option is given."""
    if missing := set(options.runs) - {item.run for item in items}:
        raise FileNotFoundError(f"no checkpoint is of a run {sorted(missing)[0]!r:.200}")
    found = list(items)
    if options.runs:
        found = [item for item in found if item.run in options.runs]
    if options.expired:
        found = [item for item in found if item.meta.expired]
    if options.older_than is not None:
        end = time.time() - options.older_than
        found = [item for item in found if item.created < end]
    if options.keep is not None:
        newest = _newest(items, options.keep)
        found = [item for item in found if item.place.path not in newest]
    return found if _given(options) else []


def _given(options: argparse.Namespace) -> bool:
    """Whether any option selects checkpoints."""
    return any((options.older_than, options.expired, options.runs, options.keep))


def _newest(items: Iterable[Item], count: int) -> set[str]:
    """The paths of the newest checkpoints of each kind of each run."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:  # a run's oldest first
        groups.setdefault((item.run, item.meta.kind), []).append(item.place.path)
    return {path for paths in groups.values() for path in paths[-count:]}


def _runs(store: Store) -> list[Path]:
    return [store.run_folder(name) for name in store.runs()]


def _bytes(store: Store) -> int:
    return bytes_in(*_runs(store))


def _freed(store: Store, gone: Sequence[Path]) -> int:
    """The bytes that deleting folders frees: files that others share stay."""
    kept = files_in(*_runs(store), without=gone)
    return sum(size for file, size in files_in(*gone).items() if file not in kept)


# ---- deleting ----


def _delete(store: Store, places: Sequence[StoredCheckpoint]) -> None:
    try:
        store.claim()  # also clears the rest of killed saves
    except FolderInUse as held:
        if not held.addresses:
            raise
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                if store.place(place.path).stamp == place.stamp:
                    _ask(held.addresses[0], place.path)
        return
    try:
        for place in places:
            with contextlib.suppress(FileNotFoundError):  # deleted or saved again meanwhile
                store.delete(place.path, place.stamp)
    finally:
        store.close()


def _ask(address: str, path: str) -> None:
    """Asks a server to delete a checkpoint; OSError with a sentence if it does not."""
    name, kind, checkpoint = path.removeprefix(SCHEME).split("/")
    run = f"/api/v1/training_runs/{quote(name, safe='')}"
    try:
        send(address, f"{run}/checkpoints/{kind}/{checkpoint}", "DELETE")
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise OSError(f"the server at {address} did not delete {path}: {error}") from None


def send(address: str, path: str, method: str = "GET") -> bytes:
    """The reply of a server on this machine, with the key in TINKER_API_KEY. FileNotFoundError for
    a 404, PermissionError with the sentence of another refusal, OSError if it does not answer."""
    headers = {"X-API-Key": os.environ.get("TINKER_API_KEY", API_KEY)}
    request = urllib.request.Request(address + path, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ASK_SECONDS) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        kind = FileNotFoundError if error.code == 404 else PermissionError
        raise kind(_detail(error.read())) from None
    except OSError as error:
        reason = getattr(error, "reason", error)  # urllib wraps it
        told = sentence(reason) if isinstance(reason, OSError) else reason
        raise OSError(f"the server at {address} has the folder, and is silent: {told}") from None


def _detail(body: bytes) -> str:
    """The sentence in a refusal."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return "it gave no reason"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError("nothing was deleted: say --yes, where nobody can be asked")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


# ---- words ----


def line(path: Path, made: float, what: str) -> str:
    """A line for a folder or a file: its bytes, its age and what it is."""
    size = path.stat().st_size if path.is_file() else bytes_in(path)
    return f"{readable(size):>12}  {_age(time.time() - made):>8}  {what}"


def _age(seconds: float) -> str:
    """An age in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds / size)} {unit}"
    return f"{max(0, int(seconds))} s"
