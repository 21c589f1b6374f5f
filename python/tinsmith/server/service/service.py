"""The server's state, in parts: sessions, samplers, checkpoints, promises.

Only the server's event loop uses this module; the worker has the engine's state.
"""

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from tinsmith.checkpoints.store import Store
from tinsmith.engine import image_cache
from tinsmith.engine.image_cache import ImageCache
from tinsmith.engine.jobs import RefusedJob
from tinsmith.engine.runs import Job
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import BaseModel
from tinsmith.server.http.authorisation import Access, client_of
from tinsmith.server.http.overload import Arrivals, Overloaded, Queue
from tinsmith.server.http.thread_pool import Beside
from tinsmith.server.records.database import State
from tinsmith.server.records.history import RunHistory
from tinsmith.server.records.notifier import EventListener
from tinsmith.server.records.timeline import Timelines
from tinsmith.server.service.base_models import BaseModels
from tinsmith.server.service.checkpoints import Checkpoints, Disk
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.promises import Promises, Refusal, as_failure
from tinsmith.server.service.retries import Retries
from tinsmith.server.service.samplers import Samplers
from tinsmith.server.service.sessions import RunInfo, Session, Sessions, now
from tinsmith.server.wire.chunking import Buffer

T = TypeVar("T")

SWEEP_SECONDS = 10.0


class Service:
    """See the file's header."""

    def __init__(
        self,
        config: ServerConfig,
        bases: Mapping[str, BaseModel],
        worker: Worker,
        store: Store,
        state: State,
        *,
        history: RunHistory,
        notify: EventListener = lambda happened: None,
        access: Access | None = None,
    ):
        self.config, self.worker, self.state = config, worker, state
        self.bases = BaseModels(bases)
        self.store, self.disk = store, Disk()
        self.checkpoints = Checkpoints(store)
        self.sessions = Sessions(state, self.disk)
        self.samplers = Samplers(
            self.bases, self.checkpoints, worker, state, self.disk, config.results_bytes
        )
        self.promises = Promises(config.results_bytes)
        self.retries = Retries()
        self.queue = config.queue or Queue(bytes_max=config.queue_bytes)
        self.arrivals = Arrivals(bytes_max=config.queue_bytes // 2)
        self.access = access or Access()
        self._weights = {client_of(key): weight for key, weight in self.access.keys.items()}
        self.beside = Beside()
        self.history, self.notify, self.timelines = history, notify, Timelines()
        self.started = now()
        self._swept = time.monotonic()

    @property
    def images(self) -> ImageCache:
        """The images of this process."""
        return image_cache.images()

    def fresh_seed(self, place: str) -> int:
        """The seed of a request without one: random, or, if the server has a seed, a hash of it and
        the request's place, so that the same run draws the same again."""
        if self.config.seed is None:
            return secrets.randbits(63)
        key = f"{self.config.seed}:{place}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")

    def weight(self, owner: str) -> float:
        """The weight of a client's key."""
        return self._weights.get(owner, 1.0)

    async def turn(
        self,
        request: Request,
        model_id: str,
        seq: int,
        prepare: Callable[[RunInfo], Awaitable[Job[T]]],
        encode: Callable[[T], dict[str, Any] | list[Buffer]],
        weigh: Callable[[T], int] = lambda _: 0,
        trains: bool = True,
        begin: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """The promise of a request with turn `seq` of a run. A request that `prepare` refuses still
        takes its turn. A run that is only the base model refuses a request that `trains`. `begin`
        is called before the job is submitted, unless it is a retry."""
        if seq < 1:
            raise Refusal(400, f"seq_id must be at least 1, {seq} came")
        name = turn_id(model_id, seq)
        if (known := self.promises.find(request, name)) is not None:
            return known.promise
        job: Job[Any]
        try:
            run = self.sessions.run(request, model_id)
            if trains:
                run.check_trains()
            job = await prepare(run)
        except Overloaded:  # it is to come again
            raise
        except Exception as error:
            job = RefusedJob(as_failure(error))

        def start() -> Future[Any]:
            self.sessions.run(request, model_id)  # raises if it is another's, or has ended
            begin()
            return self.worker.submit(model_id, seq, job)

        promise = partial(self.promises.make, request, name, start, encode, weigh=weigh)
        if not (held := job.nbytes):
            return promise(model_id=model_id)
        with await self.queue.enter(held) as queued:
            return promise(queued=queued, model_id=model_id)

    def end_session(self, session: Session) -> None:
        """Cancels a session's samples, and frees its adapters once its training is done."""
        for item in self.promises.of(session.samplers):
            self.worker.cancel(item.future)
        self.worker.forget(session.runs, session.samplers)
        self.sessions.end(session)
        self.samplers.end(session)

    def sweep(self) -> None:
        """Drops results that were read or never fetched, and sessions whose client is gone."""
        moment = time.monotonic()
        if moment - self._swept < SWEEP_SECONDS:
            return
        self._swept = moment
        self.promises.sweep()
        for session in self.sessions.silent():
            self.end_session(session)


def turn_id(model_id: str, seq: int) -> str:
    """The id of the request with turn `seq` of a run."""
    return f"{model_id}:seq:{seq}"
