"""The replicas of an owner, however they are reached: who joins, who is refused, who is lost.

A replica joins when its identity is the owner's, and computes on a base model once its probe of it
is the owner's too. `wait` is for the start: it raises the reason why one did not join. Base models
that are loaded later are probed at their first use; until then the owner does their work. A lost
replica is started again, and joins in the same way. One that an earlier server has left joins in
the same way too; if it may not, it is started anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError, sentence
from tinsmith.engine.replica import Crew, ReplicaRow, settle
from tinsmith.models.registry import BaseModel, LoadedModel
from tinsmith.replicas import identity
from tinsmith.replicas.channel import Link
from tinsmith.replicas.identity import Identity
from tinsmith.replicas.messages import Start
from tinsmith.replicas.remote import Remote

T = TypeVar("T")

log = logging.getLogger("tinsmith")

# Until a lost replica is started; doubled each time, unless it was there for the longest of these.
AGAIN_SECONDS, AGAIN_SECONDS_MAX = 1.0, 300.0

# What ends a replica's process for good, given whether it may have ended by itself. It returns how
# that ended, or "".
Ender = Callable[[bool], str]
# What starts a replica's process.
Starter = Callable[[], tuple[Link, Ender]]


@dataclass(eq=False)
class _Place:
    """Where a replica is, one after the other."""

    starter: Starter
    start: Start
    title: str  # for people
    remote: Remote
    end: Ender
    facts: Future[Identity]
    since: float = field(default_factory=time.monotonic)  # its start
    wait_seconds: float = AGAIN_SECONDS
    kept: bool = False  # whether its process was there before this one


class RemoteCrew(Crew):
    """See the file's header. `title` is the owner's place, for people; `mixed` accepts replicas
    with other bits."""

    def __init__(self, title: str = "", *, mixed: bool = False):
        super().__init__()
        self._title, self._mixed = title, mixed
        self._places: list[_Place] = []
        self._replaced: set[Remote] = set()  # their end is no loss
        self._own: Identity = {}
        # By base model: the rows of its steps, and the owner's probe. None: it is being computed.
        self._probes: dict[str, tuple[int, Identity] | None] = {}
        self._starting = threading.Lock()  # nothing is started after the end
        self._closed = threading.Event()

    @property
    def all(self) -> list[Remote]:
        """The replica of each place, which may be lost."""
        return [place.remote for place in self._places]

    def add(self, starter: Starter, start: Start, title: str, kept: Starter | None = None) -> None:
        """Starts a replica. `kept` is used at first, and takes over what an earlier server left."""
        link, end = (kept or starter)()
        remote = Remote(start.name, title, link, self._lost)
        place = _Place(starter, start, title, remote, end, remote.begin(start))
        place.kept = kept is not None
        self._places.append(place)

    def wait(
        self,
        models: Mapping[str, BaseModel],
        device: str,
        asks: Iterable[Callable[[], list[Future[None]]]],
    ) -> None:
        """Returns when all replicas have joined, and were probed on the base models that are loaded
        now: each of `asks` calls `ask` for one. RuntimeError says why one was refused or lost."""
        if not self._places:
            return
        self._own, asks = identity.identity(models, device), list(asks)
        try:
            self._join_all(asks)
        except RuntimeError as error:
            if not self._begin_anew(str(error)):
                raise
            self._join_all(asks)
        for number, place in enumerate(self._places, 2):
            text = f"{place.remote.place}, {place.remote.state}{', found again' * place.kept}"
            log.info("replica %d of %d: %s", number, len(self._places) + 1, text)

    def meet(self, engine: Engine, base: str) -> None:
        """See Crew."""
        if base in self._probes or not self._places:
            return
        try:
            self.ask_for(engine, base)
        except Exception as error:
            log.error("replicas do not compute on %s: %s", base, sentence(error))

    def rows(self, steps: Mapping[int, int]) -> list[ReplicaRow]:
        """See Crew."""
        if not self._places:
            return []
        load, drawn = self.load(None), _tokens(steps)
        found = [ReplicaRow("replica 1", self._title, "owner", load, drawn, 0, 0, 0, None)]
        for one in self.all:
            load, drawn = self.load(one), _tokens(one.alive.steps)
            memory = 0 if one.state == "lost" else one.alive.memory
            found.append(
                ReplicaRow(
                    one.name, one.place, one.state, load, drawn,
                    one.weights_bytes, one.parts, one.gradient_bytes, memory,
                )
            )  # fmt: skip
        return found

    def close(self) -> None:
        """Ends all processes. What they compute fails."""
        with self._starting:
            self._closed.set()
        for place in self._places:
            place.end(False)
            place.remote.close()

    # ---- joining ----

    def _join_all(self, asks: Iterable[Callable[[], list[Future[None]]]]) -> None:
        """What `wait` waits for."""
        for place in self._places:
            if place.remote not in self.replicas:
                self._join(place)
        for ask in asks:
            for probed in ask():
                _or_reason(probed)

    def _begin_anew(self, reason: str) -> bool:
        """Starts the replicas anew that an earlier server left; False if there are none."""
        kept = [place for place in self._places if place.kept]
        if kept:
            log.warning("what an earlier server left is started anew: %s", reason)
        for place in kept:
            before, end, place.kept = place.remote, place.end, False
            self._replaced.add(before)
            self._begin(place)  # it waits until the other has ended
            end(False)
            before.close()
        return bool(kept)

    def _begin(self, place: _Place) -> None:
        """Starts a place's replica."""
        link, place.end = place.starter()
        place.since = time.monotonic()
        place.remote = Remote(place.start.name, place.title, link, self._lost)
        place.facts = place.remote.begin(place.start)

    def _join(self, place: _Place) -> None:
        """Waits for a replica's identity. RuntimeError if it is refused or lost."""
        found, remote = _or_reason(place.facts), place.remote
        self._compare(remote, self._own, found)
        self.replicas.append(remote)

    def _joined(self) -> list[Remote]:
        return [one for one in self.all if one in self.replicas]

    def ask_for(self, engine: Engine, base: str) -> list[Future[None]]:
        """Has all replicas probed on a base model that a worker has loaded; in its thread."""
        model = engine.bases.use(engine.models[base])
        what, need = "the probe of replicas", identity.probe_bytes(model)
        return engine.bases.make(need, what, lambda: self.ask(base, model), keep=model.path)

    def ask(self, base: str, model: LoadedModel) -> list[Future[None]]:
        """Has all replicas probed on a base model. The futures have the reasons why not."""
        self._probes[base] = None
        rows = identity.step_tokens(model)
        asked = {one: one.check(base, rows) for one in self._joined()}
        own = identity.probe(model, rows)
        self._probes[base] = rows, own
        late = {one: one.check(base, rows) for one in self._joined() if one not in asked}
        return [self._probed(one, base, own, probe) for one, probe in (asked | late).items()]

    def _probed(
        self, remote: Remote, base: str, own: Identity, probe: Future[Identity]
    ) -> Future[None]:
        """Lets a replica compute on a base model when its probe has come, if that is the owner's.
        The future has the reason why not."""
        done = Future[None]()

        def compare(_: object) -> None:
            try:
                self._compare(remote, own, probe.result())
                remote.bases.add(base)
                settle(done, None)
            except Exception as error:
                if not self._closed.is_set():
                    log.error("%s does not compute on %s: %s", remote.name, base, sentence(error))
                settle(done, error)

        probe.add_done_callback(compare)
        return done

    def _compare(self, remote: Remote, own: Identity, found: Identity) -> None:
        """RuntimeError if a replica is refused."""
        if wrong := identity.differences(own, found, mixed=self._mixed):
            raise RuntimeError(_refusal(remote, wrong[0]))
        if other := identity.differences(own, found):
            log.warning("%s gives other bits, as --mixed allows: %s", remote.name, other[0])
        if other or remote.state == "starting":
            remote.state = "other bits" if other else "same bits"

    # ---- losing, and starting again ----

    def _lost(self, remote: Remote, reason: str) -> None:
        """Gives up a replica; in its thread. Its requests fail after this, so it must be quick."""
        if remote in self.replicas:
            self.replicas.remove(remote)
        place = next((one for one in self._places if one.start.name == remote.name), None)
        if place is not None and remote not in self._replaced and not self._closed.is_set():
            name, arguments = f"tinsmith-again-{remote.name}", (place, remote, reason)
            threading.Thread(target=self._again, args=arguments, name=name, daemon=True).start()

    def _again(self, place: _Place, lost: Remote, reason: str) -> None:
        """Ends a lost replica, and starts it again after a while, if it had joined once. If its
        process can't be started, that is tried again, later each time."""
        how = place.end(True) or reason
        log.error("%s (%s) is lost: %s", lost.name, lost.place, how)
        joined = place.facts.done() and place.facts.exception() is None
        if not self._own or not (joined or place.wait_seconds > AGAIN_SECONDS):
            return
        if time.monotonic() - place.since > AGAIN_SECONDS_MAX:  # it does not fail each time
            place.wait_seconds = AGAIN_SECONDS
        while not self._closed.wait(place.wait_seconds):
            place.wait_seconds = min(2 * place.wait_seconds, AGAIN_SECONDS_MAX)
            try:
                with self._starting:
                    if self._closed.is_set() or place.remote is not lost:
                        return
                    self._begin(place)
            except Exception as error:
                log.error("%s was not started again: %s", place.start.name, sentence(error))
            else:
                self._rejoin(place, place.remote)
                return

    def _rejoin(self, place: _Place, remote: Remote) -> None:
        """Waits until a replica that was started again computes on all that it did before. One that
        is refused ends, and is tried again later."""
        try:
            self._join(place)
        except Exception as error:
            remote.lose(sentence(error))
            return
        probes = [(base, *known) for base, known in list(self._probes.items()) if known is not None]
        for base, rows, own in probes:
            if self._probed(remote, base, own, remote.check(base, rows)).exception() is None:
                log.info("%s: %s, %s again", remote.name, remote.place, remote.state)


def _or_reason(future: Future[T]) -> T:
    """A replica's answer; RuntimeError if it is lost or could not answer."""
    try:
        return future.result()
    except RequestError as error:
        raise RuntimeError(f"a replica can't be used: {error}") from None


def _tokens(steps: Mapping[int, int]) -> int:
    """The tokens drawn in sampling steps."""
    return sum(size * count for size, count in steps.items())


def _refusal(remote: Remote, wrong: str) -> str:
    text = f"{remote.name} ({remote.place}) is refused, because it would give other bits: {wrong}"
    if "instruction set" in wrong:
        text += "; --isa with the narrower of the two makes them equal"
    accepted = any(wrong.startswith(f"its {field} is ") for field in identity.MIXED)
    return f"{text}; --mixed accepts other bits" if accepted else text
