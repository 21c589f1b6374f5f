"""The sampling sessions of a server's clients, and of teachers and inference requests.

The worker samples from sampling sessions. A client creates one for a base model, a checkpoint, or a
run's weights at some step. A loss's teacher gets one here, and so does a request of an inference
API, which names a model or a checkpoint. Only the server's event loop uses this module.
"""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.store import SCHEME
from tinsmith.engine.teachers import BASE, CURRENT, EMA
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import BaseModel
from tinsmith.server.records.database import State
from tinsmith.server.service.base_models import BaseModels
from tinsmith.server.service.checkpoints import Checkpoints, Disk
from tinsmith.server.service.promises import Completions, Refusal, owner
from tinsmith.server.service.sessions import RunInfo, Session
from tinsmith.server.wire import parse
from tinsmith.server.wire.provenance import Sequences

CLONES_MAX = 4096  # of a sampling session


@dataclass
class SamplerInfo:
    """One sampling session. A session of a run's weights has a place in the run, even if the run is
    resumed in another session, so a server with a seed draws the same tokens again."""

    id: str
    session: Session
    base: str
    model: BaseModel
    path: str | None = None
    place: str = ""  # what it draws from, for fresh_seed
    clones: int = 0
    done: dict[int, Completions] = field(default_factory=dict)  # by clone

    def completions(self, clone: int) -> Completions:
        """The completed requests of a clone."""
        if clone not in self.done and len(self.done) >= CLONES_MAX:
            raise ValueError(f"a sampling session has at most {CLONES_MAX} clones")
        return self.done.setdefault(clone, Completions())


class Samplers(dict[str, SamplerInfo]):
    """See the file's header. `sequences` are the recorded samples; `named` are the weights for
    requests without a session."""

    def __init__(
        self,
        bases: BaseModels,
        checkpoints: Checkpoints,
        worker: Worker,
        state: State,
        disk: Disk,
        sequences_bytes_max: int,
    ):
        super().__init__()
        self._bases, self._checkpoints, self._worker = bases, checkpoints, worker
        self._state, self._disk = state, disk
        self.sequences = Sequences(sequences_bytes_max)
        self.named = Targets(worker)

    def find(self, request: Request, name: str) -> SamplerInfo:
        """A sampling session of the requesting client."""
        sampler = self.get(name)
        if sampler is None or sampler.session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no sampling session {name}: its session has ended, or the server was "
                "started again since; create a new sampling client",
            )
        sampler.session.seen = time.monotonic()
        return sampler

    async def keep(self, sampler: SamplerInfo) -> None:
        """Stores a client's sampling session on disk."""
        row = sampler.id, sampler.session.id, sampler.base, sampler.path
        await self._disk(self._state.add_sampler, *row)

    def add(self, sampler: SamplerInfo) -> None:
        """Registers a sampling session."""
        session = sampler.session
        sampler.place = f"{session.number}{sampler.id.removeprefix(session.id)}"
        self[sampler.id] = sampler
        sampler.session.samplers.append(sampler.id)

    def locate(self, sampler: SamplerInfo, run: str, step: int) -> None:
        """Sets which weights a sampling session draws from: a run's, after some steps."""
        run = run.partition(":")[2]  # the run's number in its session, if any
        sampler.place = f"{run}:step:{step}:{sampler.session.places[run, step]}"
        sampler.session.places[run, step] += 1

    async def teacher(self, request: Request, run: RunInfo, name: str) -> str:
        """The worker's name for a loss's teacher: a sampling session, which is created here for a
        base model or a checkpoint, or the given name if the run itself is the teacher."""
        if name in (CURRENT, EMA):
            return name
        known = handle_session(name) or name
        if known in self:
            return self.find(request, known).id
        session = f"{run.session.id}:teacher:{name}"
        found = await self._disk(self._checkpoints.find, name) if name.startswith(SCHEME) else None
        run.session.check()
        if found is not None:
            folder, meta = found
            base, model = self._bases.name(meta.base_model), self._bases.model(meta.base_model)
            self._worker.open_checkpoint(session, base, folder, meta.created)
        else:
            try:
                base = run.base if name == BASE else self._bases.name(name)
            except ValueError:
                raise ValueError(
                    f"the teacher {parse.short(name)} is neither {BASE!r}, {CURRENT!r} nor "
                    f"{EMA!r}, no tinker:// path, no sampler's handle, and no model of this "
                    f"server, which has {sorted(self._bases)}"
                ) from None
            model = run.model if name == BASE else self._bases.model(name)
            self._worker.open_base(session, base)
        if session not in self:
            self.add(SamplerInfo(session, run.session, base, model))
        return session

    def end(self, session: Session) -> None:
        """Ends a session's sampling sessions."""
        self.sequences.forget(session.id)
        for name in session.samplers:
            self.pop(name, None)


class Targets:
    """The weights for requests without a session: each key is a base model or a checkpoint, and
    gets a sampling session with its first request. A checkpoint's adapter is read then, and evicted
    like every snapshot. `requests` counts the requests, for the seeds of those without one."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._open: dict[str, tuple[str, str]] = {}  # the session, and the checkpoint's creation
        self._count = 0
        self.requests = 0

    def base(self, base: str) -> str:
        """The key of a base model."""
        return self._begin(base, "", lambda name: self._worker.open_base(name, base))

    def checkpoint(self, path: str, base: str, folder: Path, meta: Meta) -> str:
        """The key of a checkpoint; if it was saved again, it gets a new session."""
        return self._begin(
            f"{base};{path}",
            meta.created,
            lambda name: self._worker.open_checkpoint(name, base, folder, meta.created),
        )

    def session(self, key: str) -> str:
        """A key's current session: a new one if the checkpoint was saved again while a request
        waited for its turn."""
        return self._open[key][0]

    def _begin(self, key: str, created: str, begin: Callable[[str], None]) -> str:
        known = self._open.get(key)
        if known is None or known[1] != created:
            if known is not None:
                self._worker.forget([], [known[0]])
            name, self._count = f"inference:{self._count}", self._count + 1
            begin(name)
            self._open[key] = name, created
        return key


def handle_session(handle: str) -> str | None:
    """The sampling session in a SamplingClient's handle; None if the text is no handle."""
    try:
        content = json.loads(base64.urlsafe_b64decode(handle))
    except ValueError:
        return None
    session = content.get("sampling_session_id") if isinstance(content, dict) else None
    return session if isinstance(session, str) else None
