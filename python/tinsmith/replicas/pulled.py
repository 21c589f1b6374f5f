"""Weights that the owner has sent to a replica, by their name.

They come as flat vectors, which wait here without any work of the engine's. At its first use one
becomes a sampling session under the weights' name, and yields to others as sessions do. The oldest
vectors are dropped when all take too many bytes. What was dropped is sent again when it is needed.
"""

from __future__ import annotations

import contextlib
import threading

from tinsmith import _core
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError
from tinsmith.engine.replica import NoWeights
from tinsmith.replicas.messages import Push

BYTES_MAX = 2 << 30
OWNER = "the owner"  # in place of the run that makes a sampling session


class Pulled:
    """See the file's header. Any thread may use it, unless something else is said."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()  # guards the next two
        self._vectors: dict[str, Push] = {}  # the oldest first
        self._bytes = 0

    def put(self, push: Push) -> None:
        """Keeps weights."""
        self.forget(push.weights)
        with self._lock:
            self._vectors[push.weights] = push
            self._bytes += push.vector.nbytes
            while self._bytes > self._bytes_max and len(self._vectors) > 1:
                self._bytes -= self._vectors.pop(next(iter(self._vectors))).vector.nbytes

    def forget(self, weights: str) -> None:
        """Drops weights, if they are here."""
        with self._lock:
            if (push := self._vectors.pop(weights, None)) is not None:
                self._bytes -= push.vector.nbytes

    def adapter(self, engine: Engine, weights: str) -> _core.Adapter:
        """The adapter of weights, whose sampling session is made on first use; in the engine's
        thread. Raises NoWeights if they are not here."""
        return self._known(engine, weights) or self._install(engine, weights)

    @staticmethod
    def _known(engine: Engine, weights: str) -> _core.Adapter | None:
        """A session's adapter, unless it was dropped to make room."""
        with contextlib.suppress(RequestError):
            return engine.snapshots.use(weights).adapter
        return None

    def _install(self, engine: Engine, weights: str) -> _core.Adapter:
        push = self._vectors.get(weights)
        if push is None:
            raise NoWeights(f"the replica has not the weights {weights}")
        model, shape = engine.models[push.base], push.shape
        base, layout = engine.bases.use(model), f"{push.base} {shape}"

        def make() -> _core.Adapter:
            if (like := self._known(engine, layout)) is None:
                like = shape.spec().adapter(base.core)
                engine.snapshots.add_run(layout, OWNER, model, like)
            made = like.snapshot()  # which draws no random numbers
            made.write("weights", push.vector)
            return made

        need = 3 * push.vector.nbytes
        adapter = engine.bases.make(need, "weights from the owner", make, keep=model.path)
        engine.snapshots.add_run(weights, OWNER, model, adapter)
        self.forget(weights)
        return self._known(engine, weights) or adapter
