"""Loads a base model into the engine while the engine works for others.

A thread reads the files tensor by tensor, and never calls the engine. The engine's owner takes the
tensors, one at a time, between other work; the engine converts them, and refuses numbers that are
not finite. So the engine never does two things at once, on any device, and other requests wait for
one tensor's copy, not for the disk. The thread is at most AHEAD_BYTES ahead. If there is a
quantised copy (weight_cache.py), the thread maps it instead; the first such load writes it at its
end. The vision tower of a loaded model is read in the same way when the first image comes.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models.registry import (
    BaseModel,
    LoadedModel,
    WeightPart,
    close_core,
    open_core,
    read_tower,
    read_weights,
)
from tinsmith.models.vision import TowerPart
from tinsmith.models.weight_cache import Copy

AHEAD_BYTES = 1 << 28  # of tensors that are read but not taken


def bytes_of(model: BaseModel) -> int:
    """The bytes of memory that loading a model takes."""
    copy = model.copy
    return model.weight_bytes if copy is None or copy.there else copy.size


class Loading:
    """See the file's header. `wake` is called, in the thread, whenever `take` has something to do.
    An exception that a method raises is the reason why the model can't be loaded."""

    def __init__(self, model: BaseModel, *, threads: int, wake: Callable[[], None]):
        self._threads = threads
        core = open_core(model, threads=threads)
        self._slots = core.slots
        self._begin(model, bytes_of(model), core, wake)

    def _begin(
        self, model: BaseModel, size: int, core: _core.Model, wake: Callable[[], None]
    ) -> None:
        self.model = model
        self.bytes = size
        self.share = 0.0  # the part of its bytes that the engine has
        self._core: _core.Model | None = core
        self._wake = wake
        self._changed = threading.Condition()  # guards the next four
        self._read: deque[WeightPart | TowerPart] = deque()
        self._ahead = 0  # bytes in _read
        self._ended: Exception | bool = False  # True: all are read; an Exception: why not
        self._closed = False
        threading.Thread(target=self._run, name="tinsmith-loading", daemon=True).start()

    def _tensors(self) -> Iterator[WeightPart | TowerPart]:
        """What the thread reads."""
        return read_weights(self.model, self._slots, safetensors_io.fetch)

    def _finish(self, core: _core.Model) -> LoadedModel:
        """The model, once the engine has all tensors."""
        return close_core(self.model, core)

    @property
    def ready(self) -> bool:
        """Whether take() would do anything."""
        return bool(self._read) or self._ended is not False

    def take(self) -> LoadedModel | None:
        """Takes one tensor into the engine, or finishes; returns the model when it is complete.
        After a MemoryError, the next call retries the same tensor."""
        assert self._core is not None, "it is closed"
        if not self._read:
            if isinstance(self._ended, Exception):
                raise self._ended
            if not self._ended:
                return None
            return self._finish(self._core)
        piece = self._read[0]
        piece.load(self._core)
        self.share = piece.done / piece.total
        with self._changed:
            self._read.popleft()
            self._ahead -= piece.array.nbytes
            self._changed.notify()
        return None

    def close(self) -> None:
        """Ends the thread, after the tensor that it is reading, and frees the engine's memory."""
        self._core = None
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            if not self._fill():
                return
            self.share = 1.0
            self._ended = True
        except MemoryError as error:  # the host's; take() raises the engine's
            self._ended = RuntimeError(f"no memory to read {self.model.path}: {error}")
        except Exception as error:
            self._ended = error
        self._wake()

    def _fill(self) -> bool:
        """Reads all tensors, or maps them; False if it was closed meanwhile."""
        copy, core = self.model.copy, self._core
        key = copy.key() if copy else b""
        if copy and core is not None and copy.map(core, key):
            return True
        del core
        return self._read_all() and (copy is None or self._keep(copy, key))

    def _read_all(self) -> bool:
        """Reads all tensors; False if it was closed meanwhile."""
        for piece in self._tensors():
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ahead < AHEAD_BYTES)
                if self._closed:
                    return False
                self._read.append(piece)
                self._ahead += piece.array.nbytes
            self._wake()
        return True

    def _keep(self, copy: Copy, key: bytes) -> bool:
        """Writes the copy when the engine has taken all; False if it was closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._read)
            core = self._core
        if core is not None:
            core = copy.keep(core, key, lambda: open_core(self.model, threads=self._threads))
        with self._changed:
            if not self._closed:
                self._core = core
            return not self._closed


class TowerLoading(Loading):
    """The same for the vision tower of a loaded model, which has been opened. The model itself is
    the result."""

    def __init__(self, loaded: LoadedModel, *, wake: Callable[[], None]):
        self._loaded, self._places = loaded, loaded.core.tower_slots
        self._begin(loaded, loaded.core.tower_bytes, loaded.core, wake)

    def _tensors(self) -> Iterator[WeightPart | TowerPart]:
        return read_tower(self.model, self._places, safetensors_io.fetch)

    def _finish(self, core: _core.Model) -> LoadedModel:
        core.tower_seal()
        return self._loaded

    def _fill(self) -> bool:
        return self._read_all()
