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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.lora import Average, LoraSpec
from tinsmith.checkpoints.optimizers import Params
from tinsmith.engine import snapshots, teachers
from tinsmith.engine.bases import Bases, NotLoaded
from tinsmith.engine.call_log import Call, Memory, Now, Watch
from tinsmith.engine.decoding import Decoder, Listener, SampleRequest, SampleResult
from tinsmith.engine.errors import GO_ON, RequestError, explain
from tinsmith.engine.memory_users import Uses
from tinsmith.engine.runs import IDLE_SECONDS, Job, Run, Runs, fail
from tinsmith.engine.teachers import Teacher
from tinsmith.engine.training import (
    Batch,
    BatchResult,
    Between,
    StateSpec,
    distill,
    forward_backward,
    optim_step,
)
from tinsmith.models.registry import BaseModel

log = logging.getLogger("tinsmith")

GAP_SECONDS = 60.0  # for an earlier request; the SDK's chunks of one call take a few
SAVE_SECONDS = 1.0  # that the end leaves a save
AGAIN_SECONDS = 0.05  # between two interrupts: the first may come before the engine listens


def losses() -> list[dict[str, Any]]:
    """The table of losses, with all their inputs and configuration."""
    return teachers.losses()


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
        bases: Mapping[str, BaseModel],
        *,
        device: str = "cpu",
        threads: int = 0,
        memory: int | None = None,  # bytes; None: most of the machine's or the card's
        gap_seconds: float = GAP_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        snapshot_bytes_max: int = snapshots.BYTES_MAX,
        keep_forwards: bool = True,
        watch: Watch = lambda call: None,
        room: checkpoint.Room = checkpoint.anywhere,  # for what is saved
    ):
        self._known = dict(bases)
        self._runs = Runs(gap_seconds, idle_seconds)
        self._decoder = Decoder()
        self._uses = Uses(self._runs, self._decoder, snapshot_bytes_max)
        self._bases = Bases(
            bases,
            device=device,
            threads=threads,
            memory=memory,
            holds=self._uses.holds,
            release=self._uses.release,
            drop=self._uses.drop,
            wake=lambda: self._put(lambda: None),
        )
        self._snapshots = self._uses.open(self._bases)
        self._paused: dict[Future[Any], BaseModel] = {}  # they wait for a model to be read
        self._keep_forwards = keep_forwards
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]]
        self._inbox = queue.SimpleQueue()
        self._lock = threading.Lock()  # orders put() and close(): nothing is queued after the end
        self._closed, self._reason = False, f"the server is shutting down: once it is back, {GO_ON}"
        self._save_until = math.inf
        self._began = 0.0  # when the micro-batch, or other job, that is executed began
        self._trained: _core.Adapter | None = None  # it is in a training call
        self._training: Call | None = None
        self._watch = watch
        self._room = room
        self._thread = threading.Thread(target=self._loop, name="tinsmith-worker", daemon=True)
        self._thread.start()

    def preload(self, bases: Iterable[str]) -> Future[None]:
        """Loads base models now rather than on first use."""
        future: Future[None] = Future()
        left = deque(bases)

        def begin() -> None:
            try:
                while left:
                    self._bases.use(self._known[left[0]])
                    left.popleft()
                future.set_result(None)
            except NotLoaded as missing:
                self._pause(future, missing.model, begin)
            except BaseException as error:
                fail(future, error)

        return self._put(begin, future)

    # ---- training: each request takes its run's turn `seq` ----

    def create(self, run: str, base: str, spec: LoraSpec | StateSpec) -> Future[None]:
        """Makes a run's adapter. Requests of the run may be submitted at once."""

        def work(run: Run) -> None:
            try:
                run.adapter = self._make_adapter(run, spec)
            except NotLoaded:
                raise
            except BaseException as error:
                run.failure = explain(error)
                raise

        def begin() -> None:
            self._runs[run] = Run(run, self._known[base])

        return self._submit(run, 0, Call("create", run, request=spec), work, begin)

    def reject(self, run: str, seq: int, error: BaseException) -> Future[None]:
        """Uses up the turn of a refused request, so that the next requests don't wait for it."""

        def work(run: Run) -> None:
            raise error

        return self._submit(run, seq, Call("reject", run), work)

    def forward_backward(
        self, run: str, seq: int, batch: Batch, *, backward: bool = True
    ) -> Future[BatchResult]:
        """The loss of a batch, and its gradients unless backward is False."""

        def work(run: Run) -> BatchResult:
            adapter = run.trained()
            self._uses.limit(run, adapter, int(batch.lengths.max(initial=1)))
            kept, run.kept = run.kept, None
            with self._call(run, adapter) as between:
                if batch.teacher is not None:
                    who, average = self._teacher(run, adapter, batch.teacher)
                    result = distill(adapter, batch, who, backward=backward, between=between)
                    run.average = average
                    return result
                if batch.recorded and not run.warned:
                    run.warned = True
                    log.info(
                        "%s trains with %s: Thinking Machines has not published its formula; "
                        "tinsmith's own is in csrc/train/losses.c and docs/losses.md",
                        run.name,
                        batch.loss,
                    )
                keep = self._keep_forwards
                result, run.kept = forward_backward(
                    adapter, seq, batch, kept, backward=backward, keep=keep, between=between
                )
                return result

        kind = "forward_backward" if backward else "forward"
        call = Call(kind, run, request=batch, tokens=len(batch.tokens))
        return self._submit(run, seq, call, work)

    def optim_step(self, run: str, seq: int, params: Params) -> Future[dict[str, float]]:
        """One step of the run's optimizer; returns its metrics."""
        call = Call("optim_step", run, request=params)

        def work(run: Run) -> dict[str, float]:
            adapter = run.trained()
            report, call.warning = optim_step(adapter, params, run.name)
            if run.average is not None:
                run.average.ema_update(adapter)
            return report

        return self._submit(run, seq, call, work)

    def save(
        self,
        run: str,
        seq: int,
        folder: Path,
        describe: Callable[[int], checkpoint.Meta],
        *,
        optimizer: bool,
        overwrite: bool = False,
    ) -> Future[None]:
        """Writes a checkpoint. `describe` turns the number of steps taken into its Meta."""

        def work(run: Run) -> None:
            adapter = run.trained()
            checkpoint.save(
                folder,
                run.base.family,
                adapter,
                describe(adapter.step),
                optimizer=optimizer,
                average=run.average,
                overwrite=overwrite,
                going=self._hurry,
                room=self._room,
            )

        return self._submit(run, seq, Call("save", run, request=folder), work)

    def load(self, run: str, seq: int, folder: Path, *, optimizer: bool) -> Future[None]:
        """Replaces a run's weights and, with optimizer, the whole state of the next step."""

        def work(run: Run) -> None:
            adapter = run.trained()
            family = run.base.family
            run.average = peft.load_into(folder, family, adapter, optimizer=optimizer)

        return self._submit(run, seq, Call("load", run, request=folder), work)

    def snapshot(self, run: str, seq: int, sampler: str, *, inflight: bool = False) -> Future[int]:
        """Makes a sampling session with the run's weights as they are at its turn; gives the number
        of steps that the run has taken. The run's inflight sessions go on with these weights."""

        def work(run: Run) -> int:
            adapter = run.trained()
            if inflight:
                weights = self._snapshots.add_inflight(sampler, run.name, run.base, adapter)
                self._decoder.set_weights(run.name, weights)
            else:
                self._snapshots.add_run(sampler, run.name, run.base, adapter)
            return adapter.step

        return self._submit(run, seq, Call("snapshot", run, sampler), work)

    # ---- sampling ----

    def open_base(self, sampler: str, base: str) -> None:
        """Makes a sampling session of a base model."""
        self._put(lambda: self._snapshots.add_base(sampler, self._known[base]))

    def open_checkpoint(self, sampler: str, base: str, folder: Path, created: str) -> None:
        """Makes a sampling session of a checkpoint. The checkpoint is read now, or as soon as its
        model is loaded. An error is reported to its samples."""
        known = self._known[base]

        def begin() -> None:
            self._snapshots.add_checkpoint(sampler, known, folder, created)
            read()

        def read() -> None:
            try:
                self._snapshots.use(sampler)
            except NotLoaded as missing:
                self._bases.want(missing.model, read)
            except Exception:
                return

        self._put(begin)

    def sample(
        self,
        sampler: str,
        request: SampleRequest,
        client: int = 0,
        listener: Listener | None = None,
    ) -> Future[SampleResult]:
        """Queues a request on a sampling session; it decodes together with all others. The clients
        share each step, however many requests one has. The listener hears of each token."""
        future: Future[SampleResult] = Future()
        call = Call("sample", sampler=sampler, request=request, tokens=len(request.prompt))
        call.follow(future, self._watch)

        def begin() -> None:
            if future.done():  # it was cancelled while it waited
                return
            try:
                snapshot = self._snapshots.use(sampler)
                call.run, call.base = snapshot.run, self._bases.name(snapshot.base.path)
                base = self._bases.use(snapshot.base)
                self._uses.open_cache(base)
                follows = (snapshot.run if snapshot.number else None, snapshot.number)
                call.turn(call.base, snapshot.step)
                self._decoder.add(
                    base, snapshot.adapter, request, future, client, follows, listener, call
                )
            except NotLoaded as missing:
                self._pause(future, missing.model, begin)
            except BaseException as error:
                fail(future, error)

        return self._put(begin, future)

    def cancel(self, future: Future[SampleResult]) -> None:
        """Stops a sampling request's work; its future fails."""

        def stop() -> None:
            self._decoder.cancel(future)
            if future in self._paused:
                fail(future, RequestError("the request was cancelled"))

        self._put(stop)

    def waits_for(self, future: Future[Any]) -> str | None:
        """Why a request waits, if the wait may be long: its model is being read."""
        model = self._paused.get(future)
        return None if model is None else self._bases.waits_for(model)

    # ---- what it does, for any thread ----

    @property
    def alive(self) -> bool:
        """Whether it executes requests."""
        return self._thread.is_alive() and not self._closed

    @property
    def now(self) -> Now:
        """What is under way, and what waits."""
        waiting = {run.name: len(run.ready) + len(run.waiting) for run in list(self._runs.values())}
        sampling = {self._bases.name(p): n for p, n in self._decoder.under_way.items()}
        return Now(self._training, waiting, sampling, list(self._paused))

    @property
    def drawn(self) -> tuple[dict[int, int], float]:
        """How many sampling steps drew so many tokens, and the seconds that all of them took."""
        return dict(self._decoder.steps), self._decoder.seconds

    def memory(self) -> Future[Memory]:
        """What holds memory. The answer comes after the micro-batch or step that is under way."""
        future: Future[Memory] = Future()
        return self._put(lambda: future.set_result(self._uses.memory()), future)

    # ---- the end ----

    def forget(self, runs: list[str], samplers: list[str]) -> None:
        """Frees adapters, after all requests submitted before."""

        def release(run: Run) -> None:
            self._runs.pop(run.name, None)
            self._snapshots.end(run.name)
            run.adapter, run.average = None, None
            run.failure = RequestError("its session has ended")
            run.fail_waiting(RequestError(f"{run.name} can't be used: {run.failure}"))

        def begin() -> None:
            for name in samplers:
                self._snapshots.forget(name)
            for name in runs:
                if run := self._runs.get(name):
                    self._runs.make_ready(run, Job(Future(), release, Call("forget", name)))

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
            if (adapter := self._trained) is not None:
                adapter.interrupt()
            self._decoder.interrupt()
            self._thread.join(AGAIN_SECONDS)

    # ---- the thread ----

    def _ending(self) -> RequestError:
        """What all that is not done gets at the end."""
        return RequestError(self._reason, "server")

    def _put(self, command: Callable[[], None], future: Future[Any] | None = None) -> Any:
        with self._lock:
            closed = self._closed
            if not closed:
                self._inbox.put((command, future))
        if closed and future is not None:
            fail(future, self._ending())
        return future

    def _hurry(self) -> None:
        """Ends a save for which the end can't wait any longer."""
        if time.monotonic() > self._save_until:
            raise self._ending()

    @contextlib.contextmanager
    def _call(self, run: Run, adapter: _core.Adapter) -> Iterator[Between]:
        """Around a training call of a run; gives what is to be called between micro-batches."""
        self._trained, run.training = adapter, True
        try:
            yield self._let_others_work
        except KeyboardInterrupt:
            raise self._ending() from None
        finally:
            self._trained, run.teacher, run.training = None, None, False

    def _let_others_work(self, done: int, count: int) -> None:
        """Decodes between two micro-batches, for as long as the one before took."""
        if self._training is not None:
            self._training.progress(done, count)
        self._drain(block=False)
        self._decode(time.monotonic() - self._began)
        if self._closed:
            raise self._ending()
        self._began = time.monotonic()

    def _submit(
        self,
        run: str,
        seq: int,
        call: Call,
        work: Callable[[Run], Any],
        before: Callable[[], None] = lambda: None,
    ) -> Future[Any]:
        future: Future[Any] = Future()
        call.follow(future, self._watch)

        def submit() -> None:
            before()
            self._runs.submit(run, seq, Job(future, work, call))

        return self._put(submit, future)

    def _pause(self, future: Future[Any], model: BaseModel, again: Callable[[], None]) -> None:
        """Has `again` called when a model that a request needs is loaded."""

        def go_on() -> None:
            self._paused.pop(future, None)
            again()

        self._paused[future] = model
        self._bases.want(model, go_on)

    def _teacher(
        self, run: Run, adapter: _core.Adapter, teacher: Teacher
    ) -> tuple[_core.Adapter | _core.Model, Average | None]:
        """A batch's teacher, and the average that the run then keeps. An average begins at its
        first use."""
        if teacher.name == teachers.CURRENT:
            return adapter, run.average
        if teacher.name == teachers.EMA:
            own = run.average.adapter if run.average else adapter.snapshot()
            return own, Average(own, teacher.decay)
        snapshot = self._snapshots.use(teacher.name)
        run.teacher = snapshot.base.path
        return snapshot.adapter or self._bases.use(snapshot.base).core, run.average

    def _make_adapter(self, run: Run, spec: LoraSpec | StateSpec) -> _core.Adapter:
        base = self._bases.use(run.base)
        saved = isinstance(spec, StateSpec)
        rank = peft.load_meta(spec.folder).rank if saved else spec.rank

        def make() -> _core.Adapter:
            if isinstance(spec, StateSpec):
                found = spec.load(base)
                run.average = found.average
                return found.adapter
            return spec.adapter(base.core)

        need, least = self._bases.run_bytes(base, rank)
        what = f"a run of rank {rank}"
        adapter = self._bases.make(need, what, make, keep=base.path, least=least)
        run.reserved, run.vectors = self._bases.room(need), adapter.bytes
        return adapter

    def _loop(self) -> None:
        try:
            while not self._closed:
                busy = self._runs.busy or self._decoder.active or self._bases.busy
                self._drain(block=not busy)
                self._runs.give_up_gaps()
                self._runs.trim()
                self._decode(self._train_one())
        except BaseException as error:  # of no request: else all would wait for ever
            log.exception("the engine's thread has failed")
            self._reason = f"the engine has failed ({error!r:.200}): start the server again"
        with self._lock:
            self._closed = True
        self._drain(block=False)
        ending = self._ending()
        self._decoder.fail_all(ending)
        self._bases.close(ending)
        self._runs.close(ending)

    def _drain(self, *, block: bool) -> None:
        """Executes the commands that have arrived, after waiting for one where there is no work."""
        timeout = self._runs.timeout() if block else 0.0
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
        if self._closed or not self._runs.busy:
            return 0.0
        self._began = time.monotonic()
        self._execute(self._runs.next())
        return time.monotonic() - self._began

    def _execute(self, run: Run) -> None:
        """Executes a run's next request; then the run goes to the end of the line. A request that
        needs a model that is not loaded keeps its place; until the model is loaded, its run gets no
        turns, and then the next."""
        job = run.ready[0]

        def go_on(model: BaseModel) -> None:
            try:
                self._bases.use(model)
            except Exception:
                self._execute(run)  # it fails, for the same reason
            else:
                self._runs.resume(run)

        job.call.turn(self._bases.name(run.base.path), run.adapter.step if run.adapter else 0)
        self._training = job.call
        try:
            if not job.future.done():  # it may be cancelled while it waits for a model
                job.future.set_result(job.work(run))
        except NotLoaded as missing:
            self._pause(job.future, missing.model, partial(go_on, missing.model))
            return
        except BaseException as error:
            fail(job.future, error)
        finally:
            self._training = None
        self._runs.over(run)

    def _decode(self, seconds: float) -> None:
        """Decodes while there is nothing else to do, and at least `seconds` otherwise. Between the
        steps, reads a model that is wanted, for as long as the step before took."""
        end = time.monotonic() + seconds
        while (self._decoder.active or self._bases.busy) and not self._closed:
            start = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):  # close() has ended the step
                self._decoder.step()
            self._load(time.monotonic() - start if self._decoder.active else seconds)
            self._drain(block=False)
            if (self._trained or self._runs.busy) and time.monotonic() >= end:
                return

    def _load(self, seconds: float) -> None:
        """Takes in one tensor of a model, and more of them for `seconds`."""
        end = time.monotonic() + seconds
        while self._bases.busy and not self._closed:
            self._bases.load()
            if time.monotonic() >= end:
                return
