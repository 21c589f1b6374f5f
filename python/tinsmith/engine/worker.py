"""The one thread that owns the engine: all other code submits to it and gets futures.

Training requests are executed one at a time, in the order of runs.py. Between them, and between the
micro-batches of each, the thread decodes: sampling gets as much time as the micro-batch before it
took, so that neither starves the other. No bit of either depends on it. A request that arrives
while others decode joins them at the next step, and gets its client's share of every step.

An exception of a request is kept on its future as a RequestError. One of the thread itself ends it,
and with it all that waits. It knows no HTTP and no JSON; the server is a translation above it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.bases import NotLoaded
from tinsmith.engine.call_log import Call, Memory, Now, Watch
from tinsmith.engine.decoding import Listener, SampleRequest, SampleResult
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import GO_ON, RequestError
from tinsmith.engine.jobs import CreateJob, ForgetJob, SampleJob, StateSpec
from tinsmith.engine.runs import Job, Run, fail
from tinsmith.models.registry import BaseModel

T = TypeVar("T")

log = logging.getLogger("tinsmith")

SAVE_SECONDS = 1.0  # that the end leaves a save
AGAIN_SECONDS = 0.05  # between two interrupts: the first may come before the engine listens


def devices() -> dict[str, str]:
    """The engine's devices, each with "" or the reason why it can't be opened."""
    return _core.devices()


def plan(
    config: dict[str, Any],
    inv_freq: NDArray[np.float32],
    weights: str,
    *,
    rank: int,
    tokens: int = 0,
    step_bytes: int = 0,
    device: str = "cpu",
) -> dict[str, int]:
    """The bytes that a model of this shape would take on a device; see _core.Model.plan."""
    model = _core.Model(config, inv_freq, weights=weights, device=device)
    return model.plan(rank, tokens, step_bytes)


class Worker:
    """See the file's header. All public methods may be called from any thread."""

    def __init__(
        self,
        models: Mapping[str, BaseModel],
        *,
        watch: Watch = lambda call: None,
        **options: Any,
    ):
        """`watch` is told of each call's end; the other options are Engine's."""
        self._lock = threading.Lock()  # orders put() and close(): nothing is queued after the end
        self._closed, self._reason = False, f"the server is shutting down: once it is back, {GO_ON}"
        self._save_until = math.inf
        self._began = 0.0  # when the micro-batch, or other job, that is executed began
        self._training: Call | None = None
        self._watch = watch
        self._paused: dict[Future[Any], BaseModel] = {}  # they wait for a model to be read
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]]
        self._inbox = queue.SimpleQueue()
        self._engine = Engine(
            models,
            **options,
            between=self._let_others_work,
            going=self._hurry,
            wake=lambda: self._put(lambda: None),
        )
        self._thread = threading.Thread(target=self._loop, name="tinsmith-worker", daemon=True)
        self._thread.start()

    # ---- base models ----

    def preload(self, bases: Iterable[str]) -> Future[None]:
        """Loads base models now rather than on first use."""
        future, left = Future[None](), deque(bases)

        def load() -> None:
            while left:
                self._engine.bases.use(self._engine.models[left[0]])
                left.popleft()
            future.set_result(None)

        return self._start(future, load)

    # ---- runs ----

    def create(self, run: str, base: str, spec: LoraSpec | StateSpec) -> Future[None]:
        """A new run, and its first request. Others of the run may be submitted at once."""
        self._put(lambda: self._engine.runs.add(Run(run, self._engine.models[base])))
        return self.submit(run, 0, CreateJob(spec))

    def submit(self, run: str, seq: int, job: Job[T]) -> Future[T]:
        """Request `seq` of a run."""
        future = job.submitted(run, seq, self._watch)
        self._put(lambda: self._engine.runs.submit(run, job), future)
        return future

    # ---- sampling ----

    def open_base(self, sampler: str, base: str) -> None:
        """Makes a sampling session of a base model."""
        self._put(lambda: self._engine.snapshots.add_base(sampler, self._engine.models[base]))

    def open_checkpoint(self, sampler: str, base: str, folder: Path, created: str) -> None:
        """Makes a sampling session of a checkpoint. The checkpoint is read now, or as soon as its
        model is loaded. An error is reported to its samples."""
        snapshots, model = self._engine.snapshots, self._engine.models[base]
        self._put(lambda: snapshots.add_checkpoint(sampler, model, folder, created))

        def read() -> None:
            try:
                snapshots.use(sampler)
            except NotLoaded as missing:
                self._engine.bases.want(missing.model, read)
            except Exception as error:  # its samples are told
                log.debug("%s: %s", sampler, error)

        self._put(read)

    def sample(
        self,
        sampler: str,
        request: SampleRequest,
        client: int = 0,
        listener: Listener | None = None,
    ) -> Future[SampleResult]:
        """Queues a request on a sampling session; see SampleJob."""
        job = SampleJob(sampler, request, client, listener, self._watch)
        return self._start(job.future, partial(job.run, self._engine))

    def cancel(self, future: Future[SampleResult]) -> None:
        """Stops a sampling request's work; its future fails."""

        def stop() -> None:
            self._engine.decoder.cancel(future)
            if future in self._paused:
                fail(future, RequestError("the request was cancelled"))

        self._put(stop)

    def waits_for(self, future: Future[Any]) -> str | None:
        """Why a request waits, if the wait may be long: its model is being read."""
        model = self._paused.get(future)
        return None if model is None else self._engine.bases.waits_for(model)

    # ---- what it does, for any thread ----

    @property
    def alive(self) -> bool:
        """Whether it executes requests."""
        return self._thread.is_alive() and not self._closed

    @property
    def now(self) -> Now:
        """What is under way, and what waits."""
        waiting = {
            run.name: len(run.ready) + len(run.waiting) for run in list(self._engine.runs.values())
        }
        sampling = {
            self._engine.bases.name(p): n for p, n in self._engine.decoder.under_way.items()
        }
        return Now(self._training, waiting, sampling, list(self._paused))

    @property
    def drawn(self) -> tuple[dict[int, int], float]:
        """How many sampling steps drew so many tokens, and the seconds that all of them took."""
        return dict(self._engine.decoder.steps), self._engine.decoder.seconds

    def memory(self) -> Future[Memory]:
        """What holds memory. The answer comes after the micro-batch or step that is under way."""
        future: Future[Memory] = Future()
        self._put(lambda: future.set_result(self._engine.memory()), future)
        return future

    # ---- the end ----

    def forget(self, runs: list[str], samplers: list[str]) -> None:
        """Frees adapters, after all requests submitted before."""

        def begin() -> None:
            for name in samplers:
                self._engine.snapshots.forget(name)
            for name in runs:
                if run := self._engine.runs.get(name):
                    job = ForgetJob()
                    job.submitted(name, 0, lambda call: None)
                    self._engine.runs.make_ready(run, job)

        self._put(begin)

    def close(self) -> None:
        """Ends the thread; all requests that are not done fail. A call under way ends within a
        layer's time, and nothing of it remains. A save has SAVE_SECONDS, and the time of one more
        file, to be done; else the checkpoint is as it was. Other work is finished first."""
        with self._lock:
            self._closed = True
            self._save_until = min(self._save_until, time.monotonic() + SAVE_SECONDS)
            self._inbox.put((lambda: None, None))  # wakes the thread
        while self._thread.is_alive():
            if (adapter := self._engine.trained) is not None:
                adapter.interrupt()
            self._engine.decoder.interrupt()
            self._thread.join(AGAIN_SECONDS)

    # ---- the thread ----

    def _ending(self) -> RequestError:
        """What all that is not done gets at the end."""
        return RequestError(self._reason, "server")

    def _put(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._inbox.put((command, future))
        if closed and future is not None:
            fail(future, self._ending())

    def _hurry(self) -> None:
        """Ends a save for which the end can't wait any longer."""
        if time.monotonic() > self._save_until:
            raise self._ending()

    def _let_others_work(self, done: int, count: int) -> None:
        """Decodes between two micro-batches, for as long as the one before took."""
        if self._training is not None:
            self._training.progress(done, count)
        self._drain(block=False)
        self._decode(time.monotonic() - self._began)
        if self._closed:
            raise self._ending()
        self._began = time.monotonic()

    def _start(self, future: Future[T], work: Callable[[], None]) -> Future[T]:
        """Has something done that a future is for, and done again where it needs a model that is
        not loaded. The future gets its failure."""

        def begin() -> None:
            if future.done():  # it was cancelled while it waited
                return
            try:
                work()
            except NotLoaded as missing:
                self._pause(future, missing.model, begin)
            except BaseException as error:
                fail(future, error)

        self._put(begin, future)
        return future

    def _pause(self, future: Future[Any], model: BaseModel, again: Callable[[], None]) -> None:
        """Has `again` called when a model that a request needs is loaded."""

        def go_on() -> None:
            self._paused.pop(future, None)
            again()

        self._paused[future] = model
        self._engine.bases.want(model, go_on)

    def _loop(self) -> None:
        try:
            while not self._closed:
                busy = (
                    self._engine.runs.busy or self._engine.decoder.active or self._engine.bases.busy
                )
                self._drain(block=not busy)
                self._engine.runs.give_up_gaps()
                self._engine.runs.trim()
                self._decode(self._train_one())
        except BaseException as error:  # of no request: else all would wait for ever
            log.exception("the engine's thread has failed")
            self._reason = f"the engine has failed ({error!r:.200}): start the server again"
        with self._lock:
            self._closed = True
        self._drain(block=False)
        ending = self._ending()
        self._engine.decoder.fail_all(ending)
        self._engine.bases.close(ending)
        self._engine.runs.close(ending)

    def _drain(self, *, block: bool) -> None:
        """Executes the commands that have arrived, after waiting for one where there is no work."""
        timeout = self._engine.runs.timeout() if block else 0.0
        with contextlib.suppress(queue.Empty):
            command, future = self._inbox.get(block=block, timeout=timeout)
            while True:
                try:
                    if not self._closed:
                        command()
                    elif future is not None:
                        fail(future, self._ending())
                except Exception as error:
                    log.exception("a command of the worker failed")
                    if future is not None:
                        fail(future, error)
                command, future = self._inbox.get_nowait()

    def _train_one(self) -> float:
        """Executes a training request of the run that is next in turn; returns the seconds that
        it, or its last micro-batch, took."""
        if self._closed or not self._engine.runs.busy:
            return 0.0
        self._began = time.monotonic()
        self._execute(self._engine.runs.next())
        return time.monotonic() - self._began

    def _execute(self, run: Run) -> None:
        """Executes a run's next request; then the run goes to the end of the line. A request that
        needs a model that is not loaded keeps its place; until the model is loaded, its run gets no
        turns, and then the next."""
        job = run.ready[0]

        def go_on(model: BaseModel) -> None:
            try:
                self._engine.bases.use(model)
            except Exception:
                self._execute(run)  # it fails, for the same reason
            else:
                self._engine.runs.resume(run)

        job.call.turn(
            self._engine.bases.name(run.base.path), run.adapter.step if run.adapter else 0
        )
        self._training = job.call
        try:
            if not job.future.done():  # it may be cancelled while it waits for a model
                job.future.set_result(job.run(run, self._engine))
        except NotLoaded as missing:
            self._pause(job.future, missing.model, partial(go_on, missing.model))
            return
        except KeyboardInterrupt:  # close() has ended the call
            fail(job.future, self._ending())
        except BaseException as error:
            fail(job.future, error)
        finally:
            self._training = None
        self._engine.runs.over(run)

    def _decode(self, seconds: float) -> None:
        """Decodes while there is nothing else to do, and at least `seconds` otherwise. Between the
        steps, reads a model that is wanted, for as long as the step before took."""
        end = time.monotonic() + seconds
        while (self._engine.decoder.active or self._engine.bases.busy) and not self._closed:
            start = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):  # close() has ended the step
                self._engine.decoder.step()
            self._load(time.monotonic() - start if self._engine.decoder.active else seconds)
            self._drain(block=False)
            if (self._engine.trained or self._engine.runs.busy) and time.monotonic() >= end:
                return

    def _load(self, seconds: float) -> None:
        """Takes in one tensor of a model, and more of them for `seconds`."""
        end = time.monotonic() + seconds
        while self._engine.bases.busy and not self._closed:
            self._engine.bases.load()
            if time.monotonic() >= end:
                return
