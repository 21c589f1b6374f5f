"""The one thread that owns the engine: all other code submits to it and gets futures.

Training requests are executed micro-batch by micro-batch, in the order of runs.py. Between two
micro-batches, the thread decodes. Sampling gets as much time as the last micro-batch took, so that
neither starves the other. No result depends on it. A sampling request joins the others at
the next step, and gets its client's share of every step.

A request's exception is set on its future as a RequestError. An exception of the thread itself ends
the thread and fails all requests. This file knows no HTTP and no JSON; the server translates both.
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
from tinsmith.engine.call_log import Call, CallListener, Memory, Now
from tinsmith.engine.decoding import SampleRequest, SampleResult, TokenListener
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import GO_ON, RequestError
from tinsmith.engine.fair_turns import WHOLE_JOB
from tinsmith.engine.jobs import CreateJob, ForgetJob, SampleJob, StateSpec
from tinsmith.engine.replica import ReplicaRow, settle
from tinsmith.engine.runs import Job, Run, fail
from tinsmith.models.registry import BaseModel

T = TypeVar("T")

log = logging.getLogger("tinsmith")

SAVE_SECONDS = 1.0  # that close() gives a running save
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
        on_end: CallListener = lambda call: None,
        **options: Any,
    ):
        """`on_end` is called when a call ends; the other options are Engine's."""
        self._lock = threading.Lock()  # orders put() and close(): nothing is queued after the end
        self._closed, self._reason = False, f"the server is shutting down: once it is back, {GO_ON}"
        self._save_until = math.inf
        self._training: dict[str, Call] = {}  # the calls in flight, by their run
        self._on_end = on_end
        self._paused: dict[Future[Any], NotLoaded] = {}  # requests that wait for it to be read
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]]
        self._inbox = queue.SimpleQueue()
        self._engine = Engine(
            models,
            **options,
            going=self._hurry,
            wake=lambda: self._put(lambda: None),
            start=self.start,
        )
        self._thread = threading.Thread(target=self._loop, name="tinsmith-worker", daemon=True)
        self._thread.start()

    # ---- base models ----

    def preload(self, bases: Iterable[str]) -> Future[None]:
        """Loads base models now rather than on first use."""
        future, left = Future[None](), deque(bases)

        def load(engine: Engine) -> None:
            while left:
                engine.bases.use(engine.models[left[0]])
                left.popleft()
            future.set_result(None)

        return self.start(future, load)

    # ---- any work ----

    def start(self, future: Future[T], work: Callable[[Engine], None]) -> Future[T]:
        """Calls a function in the engine's thread, between micro-batches and steps of sampling, and
        again after loading a model that it needs. It completes the future, which gets its
        failure."""

        def begin() -> None:
            if future.done():  # it was cancelled while it waited
                return
            try:
                work(self._engine)
            except NotLoaded as missing:
                self._pause(future, missing, begin)
            except BaseException as error:
                fail(future, error)

        self._put(begin, future)
        return future

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """The result of a function in the engine's thread; see `start`."""
        future = Future[T]()
        return self.start(future, lambda engine: future.set_result(work(engine)))

    # ---- runs ----

    def create(
        self,
        run: str,
        base: str,
        spec: LoraSpec | StateSpec,
        client: str = "",
        weight: float = 1.0,
    ) -> Future[None]:
        """Adds a run, and its first request. Other requests of the run may be submitted at once.
        Runs of one client share its turns; it gets rows in proportion to `weight`."""

        def add() -> None:
            runs = self._engine.runs
            model, owner = self._engine.models[base], runs.client(client, weight)
            runs.add(Run(run, model, client=owner))

        self._put(add)
        return self.submit(run, 0, CreateJob(spec))

    def submit(self, run: str, seq: int, job: Job[T]) -> Future[T]:
        """Queues request `seq` of a run."""
        future = job.submitted(run, seq, self._on_end)
        self._put(lambda: self._engine.runs.submit(run, job), future)
        return future

    # ---- sampling ----

    def open_base(self, sampler: str, base: str) -> None:
        """Makes a sampling session of a base model."""
        self._put(lambda: self._engine.snapshots.add_base(sampler, self._engine.models[base]))

    def open_checkpoint(self, sampler: str, base: str, folder: Path, created: str) -> None:
        """Makes a sampling session of a checkpoint. The checkpoint is read now, or as soon as its
        model is loaded. Its samples get the error, if any."""
        snapshots, model = self._engine.snapshots, self._engine.models[base]
        self._put(lambda: snapshots.add_checkpoint(sampler, model, folder, created))

        def read() -> None:
            try:
                snapshots.use(sampler)
            except NotLoaded as missing:
                self._engine.bases.want(missing, read)
            except Exception as error:  # its samples get it
                log.debug("%s: %s", sampler, error)

        self._put(read)

    def sample(
        self,
        sampler: str,
        request: SampleRequest,
        client: int = 0,
        listener: TokenListener | None = None,
    ) -> Future[SampleResult]:
        """Queues a request on a sampling session; see SampleJob."""
        job = SampleJob(sampler, request, client, listener, self._on_end)
        return self.start(job.future, job.run)

    def cancel(self, future: Future[SampleResult]) -> None:
        """Stops a sampling request's work; its future fails."""

        def stop() -> None:
            for part in self._engine.crew.parts(future):
                self._engine.decoder.cancel(part)
                self._engine.crew.cancel(part)
                settle(part, RequestError("the request was cancelled"))  # if it has not begun

        self._put(stop)

    def waits_for(self, future: Future[Any]) -> str | None:
        """Why a request waits, if the wait may be long: its model is being read."""
        missing = self._paused.get(future)
        return None if missing is None else self._engine.bases.waits_for(missing)

    # ---- state, for any thread ----

    @property
    def alive(self) -> bool:
        """Whether it executes requests."""
        return self._thread.is_alive() and not self._closed

    @property
    def now(self) -> Now:
        """What is in flight, and what waits."""
        waiting = {
            run.name: len(run.ready) + len(run.waiting) for run in list(self._engine.runs.values())
        }
        sampling = self._engine.crew.under_way
        for path, count in self._engine.decoder.under_way.items():
            sampling[self._engine.bases.name(path)] += count
        # What frees a run is nobody's call.
        calls = [call for call in list(self._training.values()) if call.kind != "forget"]
        return Now(calls, waiting, sampling, list(self._paused))

    @property
    def drawn(self) -> tuple[dict[int, int], float]:
        """(tokens drawn in a step: number of such steps, seconds of all steps)."""
        decoder = self._engine.decoder
        return self._engine.crew.drawn(decoder.steps, decoder.seconds)

    @property
    def replicas(self) -> list[ReplicaRow]:
        """The processes that compute, this one first; empty if it is the only one."""
        return self._engine.crew.rows(dict(self._engine.decoder.steps))

    @property
    def repeated(self) -> tuple[int, int]:
        """(Requests, parts of training calls) that were repeated because their replica was lost."""
        return self._engine.crew.repeated, self._engine.crew.parts_repeated

    def memory(self) -> Future[Memory]:
        """What holds memory. The answer comes after the running micro-batch or step."""
        future: Future[Memory] = Future()
        self._put(lambda: future.set_result(self._engine.memory()), future)
        return future

    # ---- the end ----

    def forget(self, runs: list[str], samplers: list[str]) -> None:
        """Frees adapters, after all requests that were submitted before."""

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
        """Ends the thread; all unfinished requests fail. A running call ends within a layer's time
        and leaves no trace. A running save has SAVE_SECONDS, and the time of one more file;
        otherwise the checkpoint stays as it was. Other work is finished first."""
        with self._lock:
            self._closed = True
            self._save_until = min(self._save_until, time.monotonic() + SAVE_SECONDS)
            self._inbox.put((lambda: None, None))  # wakes the thread
        while self._thread.is_alive():
            for _, adapter in list(self._engine.calls.values()):
                adapter.interrupt()
            self._engine.decoder.interrupt()
            self._thread.join(AGAIN_SECONDS)

    # ---- the thread ----

    def _ending(self) -> RequestError:
        """The error of all unfinished requests at the end."""
        return RequestError(self._reason, "server")

    def _put(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._inbox.put((command, future))
        if closed and future is not None:
            fail(future, self._ending())

    def _hurry(self) -> None:
        """Ends a save when close() can't wait any longer."""
        if time.monotonic() > self._save_until:
            raise self._ending()

    def _pause(self, future: Future[Any], missing: NotLoaded, again: Callable[[], None]) -> None:
        """Calls `again` when a model that a request needs is loaded."""

        def go_on() -> None:
            self._paused.pop(future, None)
            again()

        self._paused[future] = missing
        self._engine.bases.want(missing, go_on)

    def _loop(self) -> None:
        try:
            while not self._closed:
                busy = (
                    self._engine.runs.busy or self._engine.decoder.active or self._engine.bases.busy
                )
                self._drain(block=not busy)
                self._engine.runs.give_up_gaps()
                self._engine.runs.trim()
                self._decode(self._train())
        except BaseException as error:  # not a request's: otherwise all would wait for ever
            log.exception("the engine's thread has failed")
            self._reason = f"the engine has failed ({error!r:.200}): start the server again"
        with self._lock:
            self._closed = True
        self._drain(block=False)
        ending = self._ending()
        self._engine.decoder.fail_all(ending)
        self._engine.crew.fail_all(ending)
        self._engine.bases.close(ending)
        self._engine.runs.close(ending)
        self._engine.close()
        self._training.clear()

    def _drain(self, *, block: bool) -> None:
        """Executes the commands that have arrived; with `block`, waits for one first."""
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

    def _train(self) -> float:
        """Executes a step of the run that is next in turn; returns the seconds that it took."""
        if self._closed or not self._engine.runs.busy:
            return 0.0
        began = time.monotonic()
        self._execute(self._engine.runs.next())
        return time.monotonic() - began

    def _execute(self, run: Run) -> None:
        """Executes a step of a run's next request. A request whose model is not loaded keeps its
        place: its run gets no turns until the model is loaded, and then the next turn."""
        job, runs = run.ready[0], self._engine.runs

        def go_on(missing: NotLoaded) -> None:
            try:
                self._engine.bases.use(missing.model, tower=missing.tower)
            except NotLoaded as other:
                self._pause(job.future, other, partial(go_on, other))
            except Exception:
                self._execute(run)  # it fails, for the same reason
            else:
                runs.resume(run)

        if run.steps is None:
            job.call.turn(self._engine.bases.name(run.base.path), run.step)
            run.steps = job.steps(run, self._engine)
            self._training[run.name] = job.call
        try:
            if not job.future.done():  # it may be cancelled while it waits for a model
                self._continue(run, job.call, next(run.steps))
                return
        except StopIteration as end:
            job.future.set_result(end.value)
        except NotLoaded as missing:
            run.steps = None
            self._training.pop(run.name, None)
            self._pause(job.future, missing, partial(go_on, missing))
            return
        except KeyboardInterrupt:  # close() has ended the call
            fail(job.future, self._ending())
        except BaseException as error:
            fail(job.future, error)
        self._training.pop(run.name, None)
        share = 1 - job.call.done / job.call.count
        runs.over(run, job.call.tokens * share or WHOLE_JOB)

    def _continue(self, run: Run, call: Call, news: tuple[int, int] | Future[None]) -> None:
        """A step of a run's request is done: the run goes to the end of the queue, or waits."""
        runs = self._engine.runs
        if isinstance(news, Future):
            news.add_done_callback(lambda _: self._put(lambda: runs.resume(run)))
            return
        before = call.done / call.count
        call.progress(*news)
        runs.go_on(run, call.tokens * max(0.0, call.done / call.count - before))

    def _decode(self, seconds: float) -> None:
        """Decodes until there is other work, but at least `seconds`. Between the steps, reads a
        wanted model for as long as the last step took."""
        end = time.monotonic() + seconds
        while (self._engine.decoder.active or self._engine.bases.busy) and not self._closed:
            start = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):  # close() has ended the step
                self._engine.decoder.step()
            self._load(time.monotonic() - start if self._engine.decoder.active else seconds)
            self._drain(block=False)
            if self._engine.runs.busy and time.monotonic() >= end:
                return

    def _load(self, seconds: float) -> None:
        """Takes one tensor of a model, and then more for `seconds`."""
        end = time.monotonic() + seconds
        while self._engine.bases.busy and not self._closed:
            self._engine.bases.load()
            if time.monotonic() >= end:
                return
