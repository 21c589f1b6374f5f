"""A replica as a Ray actor, and the owner's end of the link to it.

The actor is the process of child.py with another Link: what the owner sends are calls of `tell`,
what the replica sends are results of `hear`, which waits for some (a long poll). Each of the two
has a thread of the actor's own, so a command arrives while the engine computes. One call of each is
under way at a time, with all messages that have come until then: so they stay in order, which Ray
does not promise for actors of several threads. Arrays go through Ray's object store: they are
written once, and read where they are by processes of the same machine.

An actor may outlive its owner, and get another: `adopt` makes one the owner, and calls of any other
fail from then on. It ends itself when nobody has called for a while. An owner that lives calls each
second, because the replica says so often that it is alive.

`tell` and `hear` are pickled by Ray. Whoever reaches a cluster's ports can run code on it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from tinsmith import _core
from tinsmith.engine.devices import GPUS, kind_of
from tinsmith.engine.errors import explain, sentence
from tinsmith.models.registry import find_model
from tinsmith.replicas.child import Child, serve
from tinsmith.replicas.local import SILENT_SECONDS, Share
from tinsmith.replicas.messages import Located, Reply, Start

GROUPS = {"tell": 1, "hear": 1}  # an actor's concurrency groups, with their threads
LOOK_SECONDS = 1.0  # between two looks at whether the link was closed
BATCH_MAX = 256  # messages in one call


class ActorLink:
    """A Link to an actor; see the file's header. Ray may take its time to find a place for it:
    only after its first message its silence is an end."""

    def __init__(self, actor: Any, owner: str, silent_seconds: float = SILENT_SECONDS):
        self._owner = owner
        self._tell = actor.tell.options(concurrency_group="tell")
        self._hear = actor.hear.options(concurrency_group="hear")
        self._silent_seconds = silent_seconds
        self._unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard: deque[Any] = deque()
        self._asked = self._hear.remote(self._owner)
        self._spoke = False  # whether a message has come
        self._ended = ""  # why, if it has
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="tinsmith-ray", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """See Link."""
        self._unsent.put(message)

    def receive(self) -> Any:
        """See Link. Large arrays can't be written to: others may read them."""
        while not self._heard:
            limit = self._silent_seconds if self._spoke else float("inf")
            self._heard.extend(self._result(self._asked, limit))
            self._spoke = True
            self._asked = self._hear.remote(self._owner)
        return self._heard.popleft()

    def close(self) -> None:
        """See Link."""
        self._end("the connection has ended")
        self._unsent.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._closed.set()

    def _send_all(self) -> None:
        try:
            while (message := self._unsent.get()) is not None:
                batch = [message]
                with contextlib.suppress(queue.Empty):
                    while len(batch) < BATCH_MAX and batch[-1] is not None:
                        batch.append(self._unsent.get_nowait())
                told = [one for one in batch if one is not None]
                self._result(self._tell.remote(self._owner, told))
                if batch[-1] is None:
                    return
        except EOFError as error:
            self._end(str(error))
        except Exception as error:  # such as an object store that is full
            self._end(f"a message could not be sent: {sentence(error)}")

    def _result(self, call: Any, limit: float = float("inf")) -> Any:
        """A call's result. EOFError if there will be none, or not within `limit` seconds."""
        began = time.monotonic()
        while not self._closed.is_set():
            try:
                return ray.get(call, timeout=LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() - began > limit:
                    raise EOFError("it has been silent for too long") from None
            except ray.exceptions.RayError as error:  # the actor has died, or an object is lost
                raise EOFError(reason(error)) from None
        raise EOFError(self._ended)


def reason(error: Exception) -> str:
    """Why an actor was lost, of Ray's several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line[:1].strip()]
    return " ".join(lines[1:] or lines)[:500]


# ---- in the actor's process ----


class Actor:
    """A replica's process. `isa` limits the instruction set, as TINSMITH_ISA does the owner's. It
    ends when it was not called for `alone_seconds`."""

    def __init__(self, owner: str, isa: str | None, alone_seconds: float):
        if isa:
            _core.use_isa(isa)
        self._inside = _Inside(owner)
        threading.Thread(target=self._serve, name="tinsmith-replica", daemon=True).start()
        watch = threading.Thread(
            target=self._watch, args=(alone_seconds,), name="tinsmith-alone", daemon=True
        )
        watch.start()

    def adopt(self, owner: str) -> None:
        """Makes `owner` the one whose calls are answered."""
        self._inside.change(owner)

    def tell(self, owner: str, messages: list[Any]) -> None:
        """Takes what the owner sends."""
        self._inside.take(owner, messages)

    def hear(self, owner: str) -> list[Any]:
        """What the replica has sent since the last call; it waits for something."""
        return self._inside.give(owner)

    def _serve(self) -> None:
        serve(self._inside, _Child)
        os._exit(1)  # Ray tells the owner

    def _watch(self, alone_seconds: float) -> None:
        while (left := self._inside.called + alone_seconds - time.monotonic()) > 0:
            time.sleep(left)
        os._exit(0)


class _Inside:
    """The actor's end of the link."""

    def __init__(self, owner: str) -> None:
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next two
        self._owner = owner
        self._sent: deque[Any] = deque()
        self.called = time.monotonic()  # by an owner, last

    def change(self, owner: str) -> None:
        """Has another owner from now on."""
        with self._changed:
            self._owner = owner
            self._sent.clear()
            self._changed.notify_all()
        self.called = time.monotonic()

    def take(self, owner: str, messages: list[Any]) -> None:
        """Has messages received."""
        with self._changed:
            self._check(owner)
            for message in messages:
                self._told.put(message)

    def give(self, owner: str) -> list[Any]:
        """Messages that were sent."""
        with self._changed:
            self._check(owner)
            self._changed.wait_for(lambda: self._sent or self._owner != owner)
            self._check(owner)
            return [self._sent.popleft() for _ in range(min(len(self._sent), BATCH_MAX))]

    def _check(self, owner: str) -> None:
        if owner != self._owner:
            raise RuntimeError("another server has this replica")
        self.called = time.monotonic()

    def send(self, message: Any) -> None:
        """See Link."""
        with self._changed:
            self._sent.append(message)
            self._changed.notify_all()

    def receive(self) -> Any:
        """See Link. The process ends when it has no owner for long, so there is no other end."""
        return self._told.get()

    def close(self) -> None:
        """See Link; the process ends instead."""


class _Child(Child):
    """A replica that says where it is, and finds the models of its own machine."""

    def _start(self, start: Start) -> None:
        device = start.device
        if kind_of(device) in GPUS:  # Ray shows it its own alone, from 0 on
            device = ",".join(f"{kind_of(device)}:{card}" for card in ray.get_gpu_ids()) or device
        share = Share(device, start.threads, start.memory)
        self._link.send(Located(f"{socket.gethostname()} {share}"))
        try:
            models = _here(start.models)
        except Exception as error:
            self._link.send(Reply(start.number, explain(error)))
            return
        super()._start(replace(start, models=models))


def _here(models: Mapping[str, Path]) -> dict[str, Path]:
    """The models' folders on this machine: the owner's, or else those of their names."""
    return {name: path if path.exists() else find_model(name, {}) for name, path in models.items()}
