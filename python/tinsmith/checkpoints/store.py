"""The checkpoints of tinker:// paths: <root>/<run>/<kind>/<name>.

Reading needs only the folder. A server claims it first: it takes the folder's lock, and clears
what killed processes left. Every change happens whole or not at all (disk.py) and is on
disk before the reply; every reader sees one version (folder_version.py). Folders that no path can
name are ignored. A checkpoint's own folder and its files are never links. A ttl is only recorded,
unless the store is told to let checkpoints expire.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args
from urllib.parse import quote, unquote

from tinsmith.checkpoints.meta import META_FILE, Kind, Meta, as_meta, content_of, is_text
from tinsmith.checkpoints.quota import Quota
from tinsmith.formats.folder_version import Version, read
from tinsmith.system import disk
from tinsmith.system.lock import FolderLock

log = logging.getLogger("tinsmith")

T = TypeVar("T")

SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RUN_BYTES_MAX = 200
_IDLE_RUNS = "+idle-runs-"  # no run's folder begins so: "+" is encoded
CHANGED_BYTES = 1 << 10  # by which a copy's meta.json may grow


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint in a listing, with a stamp of its version."""

    path: str
    stamp: str
    changed: int  # nanoseconds


class Store:
    """See the file's header."""

    def __init__(
        self, root: Path | str, *, expire: bool = False, bytes_max: int | None = None
    ) -> None:
        self.root = Path(root).resolve()
        self.expire = expire
        self.quota = Quota(self.root, bytes_max, lambda: expire and self.delete_expired())
        # For the runs that a server moves out of memory: they count as checkpoints do, and go with
        # the server.
        self.idle_runs = self.root / f"{_IDLE_RUNS}{secrets.token_hex(4)}"
        self._lock: FolderLock | None = None

    def claim(self, address: str = "", *, shared: bool = False) -> None:
        """Takes the folder for this process until `close`, alone or with others that share it.
        OSError says which process holds it."""
        with contextlib.suppress(OSError):  # a later write reports the error
            disk.make_folder(self.root)
        self._lock = FolderLock(self.root, address, shared=shared)
        if self._lock.first:
            for left in self._left():
                _recover(left)
        if shared:
            self._lock.share()
        mode = self.root.stat().st_mode & 0o777 if self.root.is_dir() else 0
        if mode & 0o077:
            log.warning(
                "%s is open to other users of this machine (mode %o); chmod 700 keeps it yours",
                self.root,
                mode,
            )

    def unfinished(self) -> list[Path]:
        """What `claim` removes: the rest of saves, and the idle runs, of a process that was killed.
        If a server has the folder, also what it is writing now."""
        return [left for left in self._left() if not _goes_back(left)]

    def _left(self) -> list[Path]:
        saves = [left for kind in get_args(Kind) for left in self.root.glob(f"*/{kind}/*~*")]
        return sorted([*saves, *self.root.glob(f"{_IDLE_RUNS}*")])

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            self._lock.close()

    # ---- names ----

    def path(self, run: str, kind: str, name: str) -> str:
        """The tinker:// path of a checkpoint, checked."""
        path = f"{SCHEME}{run}/{kind}/{name}"
        _parse(path)
        return path

    def folder(self, tinker_path: str) -> Path:
        """The folder of a checkpoint, existing or not."""
        run, kind, name = _parse(tinker_path)
        return self.run_folder(run) / kind / name

    def run_folder(self, run: str) -> Path:
        """The folder of a run's checkpoints, existing or not."""
        encoded = quote(run, safe="", errors="replace")  # ':' and characters special in paths
        if run in ("", ".", "..") or len(encoded) > _RUN_BYTES_MAX or not is_text(run):
            raise ValueError(f"{run!r:.60} can't be the id of a training run")
        return self.root / encoded

    # ---- listings ----

    def runs(self) -> list[str]:
        """Ids of the runs that have a folder."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                run = unquote(entry.name)
                with contextlib.suppress(OSError, ValueError):  # no run's name, or gone meanwhile
                    if self.run_folder(run).name == entry.name and entry.is_dir():
                        found.append(run)
        return sorted(found)

    def checkpoints(self, run: str) -> list[str]:
        """The tinker:// paths of a run's checkpoints, oldest first."""
        return [place.path for place in self.places(run)]

    def places(self, run: str) -> list[StoredCheckpoint]:
        """A run's checkpoints, oldest first, readable or not."""
        found = []
        for kind in get_args(Kind):
            for name in _names(self.run_folder(run) / kind):
                path = self.path(run, kind, name)
                try:
                    found.append(self.place(path))
                except FileNotFoundError:  # deleted meanwhile
                    continue
                except OSError:
                    found.append(StoredCheckpoint(path, "", 0))
        return sorted(found, key=lambda place: (place.changed, place.path))

    # ---- one checkpoint ----

    def place(self, tinker_path: str) -> StoredCheckpoint:
        """A checkpoint's entry in a listing; FileNotFoundError if there is none."""
        return self.read(tinker_path, lambda version: place_of(tinker_path, version))

    def read(self, tinker_path: str, work: Callable[[Version], T]) -> T:
        """The result of `work` on one version of a checkpoint. FileNotFoundError if none exists."""
        folder = self.folder(tinker_path)
        try:
            return read(folder, work, links=False)
        except FileNotFoundError:
            if (folder / META_FILE).is_file() and not folder.is_symlink():
                raise  # another file is missing
            raise FileNotFoundError(f"there is no checkpoint {tinker_path}") from None

    def meta(self, tinker_path: str) -> Meta:
        """A checkpoint's Meta; FileNotFoundError if there is none, or it has expired."""
        return as_meta(self.read(tinker_path, self._alive(tinker_path)))

    def has_ended(self, meta: Meta) -> bool:
        """Whether a checkpoint counts as gone: its ttl is over, and this store lets it expire."""
        return self.expire and meta.expired

    def _alive(self, tinker_path: str) -> Callable[[Version], dict[str, Any]]:
        """content_of, for a checkpoint that has not expired."""

        def read_alive(version: Version) -> dict[str, Any]:
            content = content_of(version)
            if self.has_ended(as_meta(content)):
                raise FileNotFoundError(
                    f"there is no checkpoint {tinker_path} any more: its ttl is over"
                )
            return content

        return read_alive

    def delete(self, tinker_path: str, stamp: str | None = None) -> None:
        """Removes a checkpoint, readable or not; with a StoredCheckpoint's stamp, only that
        version. FileNotFoundError if there is none."""
        folder = self.folder(tinker_path)

        def wanted() -> bool:
            return stamp is None or self.place(tinker_path).stamp == stamp

        if not folder.is_dir() or not self._remove(folder, wanted):
            raise FileNotFoundError(f"there is no checkpoint {tinker_path}")

    def delete_expired(self) -> list[str]:
        """Removes checkpoints whose ttl is over; returns their paths, which are logged too."""
        gone = []
        for path in [path for run in self.runs() for path in self.checkpoints(run)]:
            with contextlib.suppress(OSError, ValueError):  # damaged, or deleted meanwhile
                if self.read(path, self._remove_expired):
                    log.info("the checkpoint %s has expired", path)
                    gone.append(path)
        return gone

    def _remove_expired(self, version: Version) -> bool:
        """Removes an expired version, but not one that has replaced it since."""
        if not as_meta(content_of(version)).expired:
            return False
        return self._remove(version.folder, lambda: not version.replaced())

    def _remove(self, folder: Path, wanted: Callable[[], bool]) -> bool:
        gone = folder.with_name(f"{folder.name}~{secrets.token_hex(4)}")
        with disk.alone(folder.parent) as above:
            if not wanted():
                return False
            try:
                folder.rename(gone)
            except FileNotFoundError:
                return False
            os.fsync(above)
        disk.remove(gone)
        return True

    def update(self, tinker_path: str, **changes: Any) -> None:
        """Changes only a checkpoint's Meta; its position among its run's checkpoints stays."""
        self.change(tinker_path, lambda meta: changes)

    def change(self, tinker_path: str, changes: Callable[[Meta], dict[str, Any]]) -> None:
        """Updates a checkpoint with the changes that a function makes from its Meta."""

        def change(version: Version) -> None:
            with disk.alone(version.folder.parent):
                if version.replaced():
                    raise FileNotFoundError(f"{version.folder / META_FILE} was replaced")
                content = self._alive(tinker_path)(version)
                content |= changes(as_meta(content))
                as_meta(content)
                version.replace_json(META_FILE, content)

        self.read(tinker_path, change)

    def copy(self, tinker_path: str, run: str, **changes: Any) -> str:
        """Copies a checkpoint to another run under the same name, with changes in its Meta. The
        files are shared: finished ones are never written to. OSError if the limit is exceeded."""
        _, kind, name = _parse(tinker_path)
        path = self.path(run, kind, name)
        folder = self.folder(path)
        if folder.exists():
            raise FileExistsError(f"the checkpoint {path} exists")
        check = partial(self.quota.check, place=folder)
        with self.quota.reserve(0, folder), disk.unfinished(folder) as temporary:

            def share(version: Version) -> None:
                for file in temporary.iterdir():  # from a version that was replaced meanwhile
                    file.unlink()
                content = self._alive(tinker_path)(version) | changes
                as_meta(content)
                check(version.stat(META_FILE).st_size + CHANGED_BYTES)
                for file in content["files"]:
                    _check_size(version, content, file)
                    version.share(file, temporary / file, check)
                disk.write_json(temporary / META_FILE, content)

            self.read(tinker_path, share)
            disk.sync(temporary)
            disk.put(temporary, folder, overwrite=False)
        return path

    def files(self, tinker_path: str) -> tuple[str, list[str]]:
        """A name for a checkpoint's version, and the names of its files, without those for tinsmith
        only."""
        content = self.read(tinker_path, self._alive(tinker_path))
        return _version(content), sorted(content["files"])

    def open(self, tinker_path: str) -> tuple[str, dict[str, BinaryIO]]:
        """The same with the files opened, all from one version; the caller closes them."""

        def take(version: Version) -> tuple[str, dict[str, BinaryIO]]:
            content = self._alive(tinker_path)(version)
            with contextlib.ExitStack() as undo:
                found = {}
                for name in sorted(content["files"]):
                    _check_size(version, content, name)
                    found[name] = undo.enter_context(version.open(name))
                undo.pop_all()
            return _version(content), found

        return self.read(tinker_path, take)


def _version(content: dict[str, Any]) -> str:
    """A hash: equal files have equal versions."""
    return hashlib.sha256(json.dumps(content["files"], sort_keys=True).encode()).hexdigest()[:16]


def _check_size(version: Version, content: dict[str, Any], name: str) -> None:
    """Raises ValueError if a file is truncated."""
    size, said = version.stat(name).st_size, content["files"][name]["bytes"]
    if size != said:
        raise ValueError(f"{version.folder / name} should be {said} bytes, found {size}")


def place_of(path: str, version: Version) -> StoredCheckpoint:
    """A checkpoint's entry in a listing."""
    stat = version.stat(META_FILE)
    stamp = f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_size}"
    return StoredCheckpoint(path, stamp, stat.st_mtime_ns)


def _names(folder: Path) -> Iterator[str]:
    """The names of checkpoints in a run's folder. A file system without an atomic exchange moves
    one aside for a moment, under another name."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except OSError:
        return
    yield from {
        name.removesuffix(disk.ASIDE)
        for name in entries
        if _NAME.fullmatch(name.removesuffix(disk.ASIDE)) and name not in (".", "..")
    }


def _parse(tinker_path: str) -> tuple[str, str, str]:
    form = f"{SCHEME}<run>/<kind>/<name>"
    parts = tinker_path.removeprefix(SCHEME).split("/")
    if not tinker_path.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise ValueError(f"{tinker_path!r:.200} is not a checkpoint's path, {form}")
    run, kind, name = parts
    if kind not in get_args(Kind):
        kinds = " or ".join(get_args(Kind))
        raise ValueError(f"{tinker_path!r:.200}: the kind should be {kinds}, found {kind!r:.60}")
    if not _NAME.fullmatch(name) or name in (".", ".."):
        rule = "1 to 128 letters, digits, '.', '_' and '-'"
        raise ValueError(f"{name!r:.200} can't be a checkpoint's name: it should be {rule}")
    return run, kind, name


def _recover(left: Path) -> None:
    """Finishes an interrupted save."""
    if _goes_back(left):
        left.rename(_aim_of(left))
        disk.sync(left.parent)
        return
    disk.remove(left)


def _goes_back(left: Path) -> bool:
    """Whether it is a checkpoint that was moved aside and not replaced."""
    return left.name.endswith(disk.ASIDE) and not _aim_of(left).exists()


def _aim_of(left: Path) -> Path:
    """The place that it was meant for."""
    return left.with_name(left.name.partition("~")[0])
