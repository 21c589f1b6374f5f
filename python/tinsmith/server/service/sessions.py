"""The sessions of a server's clients, and their runs.

A session belongs to the API key that created it: for another key its runs do not exist. database.py
stores the facts that the server reports after a restart; a session itself does not outlive the
server. Only the server's event loop uses this module.
"""

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Kind, Meta
from tinsmith.custom_losses.graph import CustomLoss
from tinsmith.engine.errors import GO_ON
from tinsmith.models.registry import BaseModel
from tinsmith.server.http.error_bodies import SERVERLESS
from tinsmith.server.records.database import RunRow, SessionRow, State
from tinsmith.server.service.checkpoints import Disk
from tinsmith.server.service.promises import Refusal, owner
from tinsmith.server.wire import parse

SESSION_SECONDS = 3600.0  # without a request; the SDK's heartbeat comes every 10 s


@dataclass
class Session:
    """One ServiceClient, since it connected to this server."""

    id: str
    number: int  # of the server's sessions, from 0
    owner: str
    seen: float
    runs: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    made: dict[str, Future[Any]] = field(default_factory=dict)  # of its runs, by id
    losses: dict[str, CustomLoss] = field(default_factory=dict)  # uploaded, by id
    ended: bool = False
    places: Counter[tuple[str, int]] = field(default_factory=Counter)  # samplers of a run's step

    def check(self) -> None:
        """Refuses a request to a session that has ended."""
        if self.ended:
            raise Refusal(410, f"session {self.id} has ended")


@dataclass(frozen=True)
class RunInfo:
    """One training run: a LoRA adapter on a base model."""

    id: str
    session: Session
    base: str
    model: BaseModel
    lora: LoraSpec
    user_metadata: dict[str, str]
    base_only: bool = False  # no gradients: only the base model

    def fits(self, meta: Meta) -> bool:
        """Whether a checkpoint has this run's shape."""
        own = self.base, self.lora.rank, self.lora.alpha
        return (meta.base_model, meta.rank, meta.alpha) == own

    def check_trains(self) -> None:
        """Raises ValueError if the run is only the base model."""
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


class Sessions(dict[str, Session]):
    """See the file's header. `runs` has the runs of all sessions."""

    def __init__(self, state: State, disk: Disk):
        super().__init__()
        self._state = state
        self._disk = disk
        self._count = 0  # so far
        self.runs: dict[str, RunInfo] = {}

    async def add(self, request: Request, body: Mapping[str, Any]) -> Session:
        """Creates a session for the requesting client."""
        kind = "ts" if request.scope["path"].startswith(SERVERLESS) else "s"
        row = SessionRow(
            id=f"{kind}-{uuid.uuid4().hex}",
            owner=owner(request),
            display_name=parse.text(body, "display_name"),
            user_metadata=parse.metadata(body),
            created=now(),
        )
        await self._disk(self._state.add_session, row)
        session = Session(row.id, self._count, row.owner, time.monotonic())
        self[session.id] = session
        self._count += 1
        return session

    def find(self, request: Request, name: str) -> Session:
        """A session of the requesting client."""
        session = self.get(name)
        if session is None or session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no session {name}: if the server was started again since, make a new "
                f"ServiceClient, and {GO_ON}",
            )
        session.check()
        session.seen = time.monotonic()
        return session

    def run(self, request: Request, name: str) -> RunInfo:
        """A run of the requesting client."""
        run = self.runs.get(name)
        if run is None or run.session.owner != owner(request):
            raise Refusal(
                404,
                f"there is no model {name}: its session has ended, or the server was started again "
                f"since: {GO_ON}",
            )
        run.session.seen = time.monotonic()
        return run

    async def keep_run(self, run: RunInfo) -> None:
        """Stores a run on disk, so that the server can report it after a restart."""
        row = RunRow(run.id, run.session.id, run.base, run.lora.rank, run.user_metadata, now())
        await self._disk(self._state.add_run, row)

    def add_run(self, run: RunInfo) -> None:
        """Registers a run."""
        self.runs[run.id] = run
        run.session.runs.append(run.id)

    def made_run(self, name: str, future: Future[Any]) -> None:
        """A run was created, or failed: then its name is free again."""
        if future.exception() is not None:
            with contextlib.suppress(OSError):
                self._state.forget_run(name)

    def end(self, session: Session) -> None:
        """Ends a session, which then has no runs."""
        session.ended = True
        session.losses.clear()
        session.made.clear()
        for name in session.runs:
            self.runs.pop(name, None)

    def silent(self) -> list[Session]:
        """Sessions whose client is gone."""
        since = time.monotonic() - SESSION_SECONDS
        return [one for one in self.values() if not one.ended and one.seen < since]


def now() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat()
