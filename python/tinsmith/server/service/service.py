"""The server's state: sessions, runs, sampling sessions, and the futures it has promised.

Only the server's event loop uses this module; the worker has the engine's side. A request is
identified by the number that the client gave it. So a retry finds the promise of the first attempt,
and nothing is executed twice. A session belongs to the API key that made it: to another key its
runs and samplers do not exist. Checkpoints are found by their path. database.py keeps the facts
that the server reports after a restart; a session itself does not outlive the server.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from tinsmith.checkpoints import peft
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Kind, Meta
from tinsmith.checkpoints.store import SCHEME, Store
from tinsmith.engine.errors import GO_ON, RequestError
from tinsmith.engine.jobs import RefusedJob
from tinsmith.engine.runs import Job
from tinsmith.engine.teachers import BASE, CURRENT, EMA
from tinsmith.engine.worker import Worker
from tinsmith.losses.graph import CustomLoss
from tinsmith.models.registry import BaseModel, find_model
from tinsmith.server.http.authorisation import Access, given_key
from tinsmith.server.http.error_bodies import SERVERLESS
from tinsmith.server.http.overload import QUEUE_BYTES_MAX, Arrivals, Queue, Reservation
from tinsmith.server.http.thread_pool import Beside
from tinsmith.server.records.database import Busy, Once, RunRow, SessionRow, State
from tinsmith.server.records.history import RunHistory
from tinsmith.server.records.notifier import Listener
from tinsmith.server.records.timeline import Timelines
from tinsmith.server.service.named_samplers import Targets, handle_session
from tinsmith.server.service.promises import (
    Completions,
    Pending,
    Refusal,
    as_failure,
    failed,
    when_done,
)
from tinsmith.server.service.retries import Retries
from tinsmith.server.wire import fireworks_names, parse
from tinsmith.server.wire.chunking import LARGE, Buffer
from tinsmith.server.wire.provenance import Sequences
from tinsmith.system.home import spelled, split_context

P = ParamSpec("P")
T = TypeVar("T")
Found = tuple[Path, Meta]  # a checkpoint: its folder, and what it says of itself

KEPT_READ_SECONDS = 60.0  # a result stays after it was read, for a client that lost the reply
KEPT_UNREAD_SECONDS = 3600.0
SESSION_SECONDS = 3600.0  # without a sign of life; the SDK's heartbeat comes every 10 s
SWEEP_SECONDS = 10.0
CLONES_MAX = 4096  # of a sampling session
RESULT_BYTES = 4096  # that a result takes, beside its arrays
RESULTS_BYTES_MAX = 1 << 30  # of all results that are kept
DISK_THREADS = 4
BUSY_SECONDS, BUSY_TURN_SECONDS = 10.0, 0.05  # for another process that writes to the database


@dataclass
class Session:
    """One ServiceClient, since it came to this server."""

    id: str
    number: int  # of the server's sessions, from 0
    owner: str
    seen: float
    runs: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    made: dict[str, Future[Any]] = field(default_factory=dict)  # of its runs, by their ids
    losses: dict[str, CustomLoss] = field(default_factory=dict)  # uploaded, by their ids
    ended: bool = False
    places: Counter[tuple[str, int]] = field(default_factory=Counter)  # samplers of a run's step


@dataclass(frozen=True)
class RunInfo:
    """One training run: a LoRA adapter on a base model."""

    id: str
    session: Session
    base: str
    model: BaseModel
    lora: LoraSpec
    user_metadata: dict[str, str]
    base_only: bool = False  # it has no gradients: the base model as it is

    def fits(self, meta: Meta) -> bool:
        """Whether a checkpoint has this run's shape."""
        own = self.base, self.lora.rank, self.lora.alpha
        return (meta.base_model, meta.rank, meta.alpha) == own

    def check_trains(self) -> None:
        """ValueError for a run that is the base model alone."""
        if self.base_only:
            raise ValueError(f"{self.id} is the base model alone: it has forward only")

    def meta(self, kind: Kind, step: int, user_metadata: dict[str, str], ttl: int | None) -> Meta:
        """The Meta of a checkpoint of this run, saved now."""
        return Meta(
            base_model=self.base,
            **asdict(self.lora),
            kind=kind,
            step=step,
            user_metadata=user_metadata,
            created=now(),
            ttl_seconds=ttl,
            run_metadata=self.user_metadata,
        )


@dataclass
class SamplerInfo:
    """One sampling session. A session of a run's weights has a place in the run, even if the run is
    resumed in another session. So a server with a seed draws the same tokens again."""

    id: str
    session: Session
    base: str
    model: BaseModel
    path: str | None = None
    place: str = ""  # of what it draws, for fresh_seed
    clones: int = 0
    done: dict[int, Completions] = field(default_factory=dict)  # of each clone's requests

    def completions(self, clone: int) -> Completions:
        """Those of a clone."""
        if clone not in self.done and len(self.done) >= CLONES_MAX:
            raise ValueError(f"a sampling session has at most {CLONES_MAX} clones")
        return self.done.setdefault(clone, Completions())


class Service:
    """See the file's header."""

    def __init__(
        self,
        bases: Mapping[str, BaseModel],
        worker: Worker,
        store: Store,
        state: State,
        *,
        history: RunHistory,
        watch: Listener = lambda happened: None,
        seed: int | None = None,
        poll_seconds: float = 20.0,
        access: Access | None = None,
        queue: Queue | None = None,
        arrivals: Arrivals | None = None,
        results_max: int = RESULTS_BYTES_MAX,
    ):
        self.bases = dict(bases)
        self.worker = worker
        self.targets = Targets(worker)
        self.watch = watch
        self.history = history
        self.timelines = Timelines()
        self.started = now()
        self.store = store
        self.state = state
        self.seed = seed
        self.access = access or Access()
        self.queue = queue or Queue()
        self.arrivals = arrivals or Arrivals(bytes_max=QUEUE_BYTES_MAX // 2)
        self.results_max = results_max
        self.results_bytes = 0
        self.sequences = Sequences(results_max)
        self.beside = Beside()
        self.disk = Beside(DISK_THREADS, "tinsmith-disk")
        self.poll_seconds = poll_seconds  # the SDK gives up a poll after 45 s
        self.sessions: dict[str, Session] = {}
        self.session_count = 0
        self.runs: dict[str, RunInfo] = {}
        self.samplers: dict[str, SamplerInfo] = {}
        self.pending: dict[tuple[str, str], Pending] = {}  # by owner and request id
        self._done: dict[tuple[str, str], Pending] = {}  # of these, in order of completion
        self.retries = Retries()
        self._swept = time.monotonic()
        self._warned = Once()

    # ---- names ----

    def base(self, name: str) -> str:
        """The registered name of a base model that is named, in capitals or not, or given by its
        path; a suffix that says its context is left out."""
        given, (name, _) = name, split_context(name)
        for asked in (given, name):
            if (known := spelled(asked, self.bases)) is not None:
                return known
        paths = {known: model.path for known, model in self.bases.items()}
        try:
            path = find_model(name, paths, make=False).resolve()
        except (OSError, ValueError):
            path = None
        for known, model in self.bases.items():
            if model.path.resolve() == path:
                return known
        raise ValueError(f"unknown base model {given!r:.200}; this server has {sorted(self.bases)}")

    def model(self, name: str) -> BaseModel:
        """A base model that is named, at the context that its name says: "NAME:peft:32768"."""
        model = self.bases[self.base(name)]
        _, context = (name, None) if name in self.bases else split_context(name)
        if context is None:
            return model
        if not 1 <= context <= model.context:
            raise ValueError(
                f"{name!r:.200} asks for a context of {context} tokens; the model's is "
                f"{model.context}"
            )
        return replace(model, context=context)

    def meta(self, path: str, kind: str = "weights", runs: Sequence[str] | None = None) -> Found:
        """The folder of a checkpoint's path, and the checkpoint's Meta. A path that is not
        tinker:// is one of Fireworks' names (tinker_path), or a folder of this machine that PEFT
        wrote. Of another folder a client does not even learn whether it is there."""
        run = self.runs.get(runs[0]) if runs else None
        fits = run.fits if run else None
        path = fireworks_names.tinker_path(self.store, path, kind, runs, fits)
        if path.startswith(SCHEME):
            return self.store.folder(path), self.store.meta(path)
        try:
            return Path(path), peft.load_meta(Path(path))
        except Exception as error:
            self._warned.say(f"a client named {path!r:.300}, which can't be loaded: {error!s:.300}")
            raise ValueError(
                f"{path!r:.200} is not a checkpoint's path, tinker://<run>/<kind>/<name>, nor the "
                "folder of a PEFT adapter that can be loaded (the server's log says why)"
            ) from None

    # ---- the disk ----

    async def stored(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a function that reads or writes the disk, in a thread. While another process writes
        to the database it is called again, and no thread waits."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self.disk(LARGE, function, *arguments, **named)
            except Busy:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(BUSY_TURN_SECONDS)

    # ---- sessions ----

    async def add_session(self, request: Request, body: Mapping[str, Any]) -> Session:
        """A new session of the client that asks."""
        kind = "ts" if request.scope["path"].startswith(SERVERLESS) else "s"
        row = SessionRow(
            id=f"{kind}-{uuid.uuid4().hex}",
            owner=owner(request),
            display_name=parse.text(body, "display_name"),
            user_metadata=parse.metadata(body),
            created=now(),
        )
        await self.stored(self.state.add_session, row)
        session = Session(row.id, self.session_count, row.owner, time.monotonic())
        self.sessions[session.id] = session
        self.session_count += 1
        return session

    def locate(self, sampler: SamplerInfo, run: str, step: int) -> None:
        """Says which weights a sampling session draws from: a run's, after some steps."""
        run = run.partition(":")[2]  # its number in its session, where that is to be had
        sampler.place = f"{run}:step:{step}:{sampler.session.places[run, step]}"
        sampler.session.places[run, step] += 1

    def fresh_seed(self, place: str) -> int:
        """The seed of a request that has none: random, or, where the server has a seed, made of
        that and the request's place, so that the same run draws the same again."""
        if self.seed is None:
            return secrets.randbits(63)
        key = f"{self.seed}:{place}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")

    def session(self, request: Request, name: str) -> Session:
        """A session of the client that asks."""
        session = self.sessions.get(name)
        if session is None or session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no session {name}: if the server was started again since, make a new "
                f"ServiceClient, and {GO_ON}",
            )
        if session.ended:
            raise Refusal(410, f"session {name} has ended")
        session.seen = time.monotonic()
        return session

    def end_session(self, session: Session) -> None:
        """Cancels a session's samples, and frees its adapters once its training is done."""
        session.ended = True
        session.losses.clear()
        session.made.clear()
        self.sequences.forget(session.id)
        samplers = set(session.samplers)
        for (_, name), item in self.pending.items():
            if name.rpartition(":seq:")[0] in samplers and not item.future.done():
                self.worker.cancel(item.future)
        self.worker.forget(session.runs, session.samplers)
        for name in session.runs:
            self.runs.pop(name, None)
        for name in session.samplers:
            self.samplers.pop(name, None)

    def run(self, request: Request, name: str) -> RunInfo:
        """A run of the client that asks."""
        run = self.runs.get(name)
        if run is None or run.session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no model {name}: its session has ended, or the server was started again "
                f"since: {GO_ON}",
            )
        run.session.seen = time.monotonic()
        return run

    def sampler(self, request: Request, name: str) -> SamplerInfo:
        """A sampling session of the client that asks."""
        sampler = self.samplers.get(name)
        if sampler is None or sampler.session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no sampling session {name}: its session has ended, or the server was "
                "started again since; create a new sampling client",
            )
        sampler.session.seen = time.monotonic()
        return sampler

    async def teacher(self, request: Request, run: RunInfo, name: str) -> str:
        """The name that the worker has for a loss's teacher: a sampling session's, which is made
        here for a base model or a checkpoint, or, where it is the run itself, the name it has."""
        if name in (CURRENT, EMA):
            return name
        known = handle_session(name) or name
        if known in self.samplers:
            return self.sampler(request, known).id
        session = f"{run.session.id}:teacher:{name}"
        found = await self.stored(self.meta, name) if name.startswith(SCHEME) else None
        self.run(request, run.id)  # it may have ended meanwhile
        if found is not None:
            folder, meta = found
            base, model = self.base(meta.base_model), self.model(meta.base_model)
            self.worker.open_checkpoint(session, base, folder, meta.created)
        else:
            try:
                base = run.base if name == BASE else self.base(name)
            except ValueError:
                raise ValueError(
                    f"the teacher {parse.short(name)} is neither {BASE!r}, {CURRENT!r} nor "
                    f"{EMA!r}, no tinker:// path, no sampler's handle, and no model of this "
                    f"server, which has {sorted(self.bases)}"
                ) from None
            model = run.model if name == BASE else self.model(name)
            self.worker.open_base(session, base)
        if session not in self.samplers:
            self.add_sampler(SamplerInfo(session, run.session, base, model))
        return session

    async def keep_run(self, run: RunInfo) -> None:
        """Writes a run to the disk, so that the server can report it after a restart."""
        row = RunRow(run.id, run.session.id, run.base, run.lora.rank, run.user_metadata, now())
        await self.stored(self.state.add_run, row)

    def add_run(self, run: RunInfo) -> None:
        """Registers a run."""
        self.runs[run.id] = run
        run.session.runs.append(run.id)

    def made_run(self, name: str, future: Future[Any]) -> None:
        """A run was made, or it can't be: then there is none of its name."""
        if future.exception() is not None:
            with contextlib.suppress(OSError):
                self.state.forget_run(name)

    async def keep_sampler(self, sampler: SamplerInfo) -> None:
        """Writes a sampling session that a client made to the disk."""
        row = sampler.id, sampler.session.id, sampler.base, sampler.path
        await self.stored(self.state.add_sampler, *row)

    def add_sampler(self, sampler: SamplerInfo) -> None:
        """Registers a sampling session."""
        session = sampler.session
        sampler.place = f"{session.number}{sampler.id.removeprefix(session.id)}"
        self.samplers[sampler.id] = sampler
        sampler.session.samplers.append(sampler.id)

    # ---- promises ----

    def promised(self, request: Request, request_id: str) -> Pending | None:
        """The earlier promise for a client's request, if there is one."""
        return self.pending.get((owner(request), request_id))

    def promise(
        self,
        request: Request,
        request_id: str,
        start: Callable[[], Future[Any]],
        encode: Callable[[Any], dict[str, Any] | list[Buffer]],
        queued: Reservation | None = None,
        weigh: Callable[[Any], int] = lambda _: 0,
        text: Callable[[Any], list[Buffer]] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The UntypedAPIFuture of a request, started unless it is a retry. Its place in the queue
        is kept until it is done."""
        self.sweep()
        known = self.promised(request, request_id)
        if known is None:
            try:
                future = start()
            except Exception as error:
                future = failed(error)
            if queued is not None:
                queued.keep()
                when_done(future, queued.leave)
            promise = {"request_id": request_id, **fields}
            key = owner(request), request_id
            known = self.pending[key] = Pending(
                future, encode, text, weigh, promise, time.monotonic()
            )
            when_done(future, partial(self._keep, key, known))
        return known.promise

    def _keep(self, key: tuple[str, str], item: Pending) -> None:
        """Counts a result that has come. If all that are kept are too many, the oldest are dropped:
        of a large one its failure stays, which is small, for a client that comes too late."""
        item.here.set()
        failed = item.future.exception() is not None
        self._count(key, item, RESULT_BYTES + (0 if failed else item.weigh(item.future.result())))
        while self.results_bytes > self.results_max:
            oldest, dropped = next(iter(self._done.items()))
            if oldest == key:
                return
            size = dropped.bytes
            self._forget(oldest)
            if size > RESULT_BYTES:
                dropped.future = Future()
                dropped.future.set_exception(
                    RequestError(
                        f"the result of {oldest[1]}, of {size} bytes, came too long ago: the "
                        f"server keeps {self.results_max} bytes of results and drops the oldest; "
                        "read results as they come"
                    )
                )
                self.pending[oldest] = dropped
                self._count(oldest, dropped, RESULT_BYTES)

    def _count(self, key: tuple[str, str], item: Pending, size: int) -> None:
        item.bytes = size
        self._done[key] = item
        self.results_bytes += size

    def _forget(self, key: tuple[str, str]) -> None:
        """Drops what was promised and is done."""
        del self.pending[key]
        self.results_bytes -= self._done.pop(key).bytes

    async def turn(
        self,
        request: Request,
        model_id: str,
        seq: int,
        prepare: Callable[[RunInfo], Awaitable[Job[T]]],
        encode: Callable[[T], dict[str, Any] | list[Buffer]],
        weigh: Callable[[T], int] = lambda _: 0,
        trains: bool = True,
    ) -> dict[str, Any]:
        """A promise for a request that takes turn `seq` of a run, whatever becomes of it: one that
        `prepare` refuses uses its turn up all the same. What `trains` is refused by a run that is
        the base model alone."""
        if seq < 1:
            raise Refusal(400, f"seq_id must be at least 1, {seq} came")
        name = turn_id(model_id, seq)
        if (known := self.promised(request, name)) is not None:
            return known.promise
        job: Job[Any]
        try:
            run = self.run(request, model_id)
            if trains:
                run.check_trains()
            job = await prepare(run)
        except Exception as error:
            job = RefusedJob(as_failure(error))

        def start() -> Future[Any]:
            self.run(request, model_id)  # only whose run it is, while it is there, has a turn
            return self.worker.submit(model_id, seq, job)

        promise = partial(self.promise, request, name, start, encode, weigh=weigh)
        if not job.nbytes:
            return promise(model_id=model_id)
        with await self.queue.enter(job.nbytes) as queued:
            return promise(queued=queued, model_id=model_id)

    def sweep(self) -> None:
        """Drops results that were read or never fetched, and sessions without a client."""
        moment = time.monotonic()
        if moment - self._swept < SWEEP_SECONDS:
            return
        self._swept = moment
        for key, item in list(self.pending.items()):
            unread = item.read is None
            since = item.created if item.read is None else item.read
            kept = KEPT_UNREAD_SECONDS if unread else KEPT_READ_SECONDS
            if key in self._done and moment - since > kept:
                self._forget(key)
        for session in list(self.sessions.values()):
            if not session.ended and moment - session.seen > SESSION_SECONDS:
                self.end_session(session)


def turn_id(model_id: str, seq: int) -> str:
    """The id of the request that takes turn `seq` of a run."""
    return f"{model_id}:seq:{seq}"


def owner(request: Request) -> str:
    """The client: a stand-in for its API key. A local server accepts any key and never keeps it."""
    key = given_key(request.headers)
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def now() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat()
