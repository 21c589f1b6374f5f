"""The checkpoints in clients' requests, and the threads that read and write the disk."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from tinsmith.checkpoints import peft
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.store import SCHEME, Store
from tinsmith.server.http.thread_pool import Beside
from tinsmith.server.records.database import Busy, Once
from tinsmith.server.wire import fireworks_names
from tinsmith.server.wire.chunking import LARGE

P = ParamSpec("P")
T = TypeVar("T")
Found = tuple[Path, Meta]  # a checkpoint: its folder and its Meta

DISK_THREADS = 4
BUSY_SECONDS, BUSY_TURN_SECONDS = 10.0, 0.05  # for another process that writes to the database


class Disk:
    """Threads that read and write the disk."""

    def __init__(self) -> None:
        self._threads = Beside(DISK_THREADS, "tinsmith-disk")
        self.close = self._threads.close

    async def __call__(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a function that reads or writes the disk, in a thread. While another process writes
        to the database, the call is retried, and no thread waits."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._threads(LARGE, function, *arguments, **named)
            except Busy:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(BUSY_TURN_SECONDS)


class Checkpoints:
    """The checkpoints of a store, and PEFT folders on this machine."""

    def __init__(self, store: Store):
        self._store = store
        self._warned = Once()

    def find(
        self,
        path: str,
        kind: str = "weights",
        runs: Sequence[str] | None = None,
        fits: Callable[[Meta], bool] | None = None,
    ) -> Found:
        """The folder of a checkpoint's path, and its Meta. A path without tinker:// is one of
        Fireworks' names (tinker_path), or a PEFT folder on this machine. For any other folder, a
        client can't learn whether it exists."""
        path = fireworks_names.tinker_path(self._store, path, kind, runs, fits)
        if path.startswith(SCHEME):
            return self._store.folder(path), self._store.meta(path)
        try:
            return Path(path), peft.load_meta(Path(path))
        except Exception as error:
            self._warned.say(f"a client named {path!r:.300}, which can't be loaded: {error!s:.300}")
            raise ValueError(
                f"{path!r:.200} is not a checkpoint's path, tinker://<run>/<kind>/<name>, nor the "
                "folder of a PEFT adapter that can be loaded (the server's log says why)"
            ) from None
