"""`python -m tinsmith.replicas.child FD`: a replica's process, which answers its owner on a socket.

Its engine is a Worker like the owner's: base models are read on first use and evicted, sampling
goes on between micro-batches, and weights are sampling sessions under their own name. This thread
only receives, so a command arrives while the engine computes. Nothing here can be lost: when the
owner's end closes, the process exits at once. A second Start is another owner's: what the first one
has sent is forgotten, and the base models stay loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleDelta, SampleResult
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.jobs import SampleJob
from tinsmith.engine.worker import Worker
from tinsmith.replicas import identity
from tinsmith.replicas.channel import Channel, Link
from tinsmith.replicas.messages import (
    Alive,
    Cancel,
    Check,
    Compute,
    Draw,
    Drop,
    Follow,
    Forget,
    LogLine,
    Push,
    Reply,
    Start,
    Take,
    Tokens,
)
from tinsmith.replicas.parts import PartJob, Parts
from tinsmith.replicas.pulled import Pulled

log = logging.getLogger("tinsmith")

BUNDLE_SECONDS = 0.05  # between two messages with tokens
ALIVE_SECONDS = 1.0


class Child:
    """The replica behind a link."""

    def __init__(self, link: Link):
        self._link = link
        self._bundles = Bundles(link)
        self._pulled = Pulled()
        self._started: tuple[Start, identity.Identity] | None = None
        self._pushed: set[str] = set()  # the weights that the owner has sent
        self._newest: dict[str, str] = {}  # the weights of each run's inflight sessions
        self._drawing: dict[int, Future[SampleResult]] = {}
        self._computing: dict[int, PartJob] = {}

    def serve(self) -> None:
        """Answers until the owner is gone."""
        handlers: dict[type, Callable[[Any], None]] = {
            Start: self._start, Check: self._check, Push: self._push, Follow: self._follow,
            Draw: self._draw, Cancel: self._cancel, Forget: self._forget,
            Compute: self._compute, Take: self._take, Drop: self._drop,
        }  # fmt: skip
        while True:
            message = self._link.receive()
            handlers[type(message)](message)

    # ---- commands ----

    def _start(self, start: Start) -> None:
        if self._started is not None:
            self._start_again(start, *self._started)
            return
        try:
            models = inspect_models(
                start.models,
                device=start.device,
                dtype=start.dtype,
                weights=start.weights,
                weights_copy=start.weights_copy,
            )
            facts = identity.identity(models, start.device)
            self._worker = Worker(
                models, device=start.device, threads=start.threads, memory=start.memory
            )
        except Exception as error:
            self._link.send(Reply(start.number, explain(error)))
            return
        self._started = start, facts
        self._parts = Parts(self._worker, self._pulled)
        for base in models:
            self._worker.open_base(f"base:{base}", base)
        threading.Thread(target=self._stay_alive, name="tinsmith-alive", daemon=True).start()
        self._link.send(Reply(start.number, facts))

    def _start_again(self, start: Start, before: Start, facts: identity.Identity) -> None:
        for number in [*self._drawing, *self._computing]:
            self._cancel(Cancel(number))
        for weights in list(self._pushed):
            self._forget(Forget(weights))
        self._newest.clear()
        same = replace(start, number=before.number, name=before.name) == before
        other = RequestError("it was started with other settings", "server")
        self._link.send(Reply(start.number, facts if same else other))

    def _check(self, check: Check) -> None:
        def probe(engine: Engine) -> identity.Identity:
            model = engine.bases.use(engine.models[check.base])
            return engine.bases.make(
                identity.probe_bytes(model),
                "a probe",
                lambda: identity.probe(model, check.step_tokens),
                keep=model.path,
            )

        future = self._worker.call(probe)
        future.add_done_callback(lambda _: self._reply(check.number, future))

    def _push(self, push: Push) -> None:
        self._pushed.add(push.weights)
        self._pulled.put(push)

    def _follow(self, follow: Follow) -> None:
        self._newest[follow.run] = follow.weights

        def change(engine: Engine) -> None:
            engine.decoder.set_weights(follow.run, self._pulled.adapter(engine, follow.weights))

        self._worker.call(change)

    def _draw(self, draw: Draw) -> None:
        run, _ = draw.follows
        if run is not None:
            self._newest[run] = draw.weights
        listener = self._bundles.listener(draw.number) if draw.streams else None
        job = SampleJob(
            draw.weights or f"base:{draw.base}",
            draw.request,
            draw.client,
            listener,
            lambda call: None,
            draw.follows,
        )

        def begin(engine: Engine) -> None:
            if run is not None:  # other weights may have come while its model was read
                job.call.sampler = self._newest[run]
            if draw.weights:
                self._pulled.adapter(engine, job.call.sampler)
            job.run(engine)

        def answer(future: Future[SampleResult]) -> None:
            del self._drawing[draw.number]
            self._bundles.flush(draw.number)
            call, now = job.call, time.monotonic()
            self._reply(draw.number, future, (call.drawn, call.cached, now - (call.first or now)))

        self._drawing[draw.number] = job.future
        job.future.add_done_callback(answer)
        self._worker.start(job.future, begin)

    def _cancel(self, cancel: Cancel) -> None:
        if (future := self._drawing.get(cancel.number)) is not None:
            self._worker.cancel(future)
        if (job := self._computing.get(cancel.number)) is not None:
            job.stop()

    def _forget(self, forget: Forget) -> None:
        self._pushed.discard(forget.weights)
        self._parts.forget(forget.weights)
        self._pulled.forget(forget.weights)
        self._worker.forget([], [forget.weights])

    def _compute(self, compute: Compute) -> None:
        job = self._parts.begin(compute)

        def answer(_: object) -> None:
            del self._computing[compute.number]
            self._reply(compute.number, job.future)

        self._computing[compute.number] = job
        job.future.add_done_callback(answer)

    def _take(self, take: Take) -> None:
        future = self._parts.take(take)
        future.add_done_callback(lambda _: self._reply(take.number, future))

    def _drop(self, drop: Drop) -> None:
        self._parts.drop(drop)

    # ---- helpers ----

    def _reply(
        self, number: int, future: Future[Any], extra: tuple[int, int, float] = (0, 0, 0.0)
    ) -> None:
        error = future.exception()
        if error is not None:
            self._link.send(Reply(number, explain(error), extra))
            return
        result = future.result()
        if isinstance(result, SampleResult):  # the owner has the targets
            result = SampleResult(**(vars(result) | {"targets": None}))
        self._link.send(Reply(number, result, extra))

    def _stay_alive(self) -> None:
        asked, held = self._worker.memory(), 0
        while True:
            with contextlib.suppress(TimeoutError):  # a step is under way
                held = asked.result(ALIVE_SECONDS).used
                asked = self._worker.memory()
            steps, seconds = self._worker.drawn
            self._link.send(Alive(steps, seconds, held, os.getpid()))
            time.sleep(ALIVE_SECONDS)


class Bundles:
    """Tokens on their way to the owner: the first are sent at once, the next BUNDLE_SECONDS later,
    in one message for all requests."""

    def __init__(self, link: Link):
        self._link = link
        self._lock = threading.Lock()  # guards the next one, and the order of messages
        self._held: dict[int, list[SampleDelta]] = {}
        self._some = threading.Event()
        threading.Thread(target=self._run, name="tinsmith-bundles", daemon=True).start()

    def listener(self, number: int) -> Callable[[Sequence[SampleDelta]], None]:
        """A request's listener."""

        def hear(parts: Sequence[SampleDelta]) -> None:
            with self._lock:
                self._held.setdefault(number, []).extend(parts)
            self._some.set()

        return hear

    def flush(self, number: int) -> None:
        """Sends a request's tokens now."""
        with self._lock:
            if parts := self._held.pop(number, None):
                self._link.send(Tokens({number: parts}))

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            with self._lock:
                held, self._held = self._held, {}
                if held:
                    self._link.send(Tokens(held))
            time.sleep(BUNDLE_SECONDS)


class _ToOwner(logging.Handler):
    """Sends the log's lines to the owner, whose log has them under this replica's name."""

    def __init__(self, link: Link):
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a line."""
        self._link.send(LogLine(record.levelno, self.format(record)))


def serve(link: Link, make: Callable[[Link], Child] = Child) -> None:
    """Answers until the owner is gone, or something fails. The log goes to the owner."""
    log.addHandler(_ToOwner(link))
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        make(link).serve()
    except EOFError:
        pass
    except Exception:
        log.exception("the replica has failed")


def main() -> None:
    """Serves on the socket whose descriptor is the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner ends it
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)


if __name__ == "__main__":
    main()
