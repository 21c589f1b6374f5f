"""A replica as its owner sees it: requests become messages, and replies complete their futures.

A thread receives. When the link ends, every future fails with ReplicaLost, at once. Weights are
sent before their first use, and again when the replica has dropped them.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import SampleRequest, SampleResult, TokenListener
from tinsmith.engine.errors import explain
from tinsmith.engine.replica import (
    NoWeights,
    Replica,
    ReplicaLost,
    Weights,
    settle,
)
from tinsmith.engine.shared_call import PartRequest, PartResult, Sum
from tinsmith.replicas.channel import Link
from tinsmith.replicas.messages import (
    AdapterShape,
    Alive,
    Cancel,
    Check,
    Compute,
    Draw,
    Drop,
    Follow,
    Forget,
    Located,
    LogLine,
    Push,
    Reply,
    Start,
    Take,
    Tokens,
)

log = logging.getLogger("tinsmith")


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request that has no reply yet."""

    future: Future[Any]
    call: Call | None = None  # of a sample
    listener: TokenListener | None = None
    weights: tuple[str, ...] = ()  # that it needs


class Remote(Replica):
    """See the file's header. `on_lost` is called once with this and the reason, in its thread."""

    def __init__(self, name: str, place: str, link: Link, on_lost: Callable[[Remote, str], None]):
        super().__init__(name)
        self.place = place  # the device, for people
        self.state = "starting"  # then "same bits", "other bits" or "lost"
        self.weights_bytes = 0  # that were sent to it
        self.parts = 0  # of training calls, that it computed
        self.gradient_bytes = 0  # that it sent
        self.alive = Alive()  # what it said last
        self._link, self._on_lost = link, on_lost
        # A replica that had another owner may still send that one's replies: they have no takers.
        self._numbers = itertools.count(secrets.randbits(48))
        self._lock = threading.Lock()  # guards the next two
        self._gone: ReplicaLost | None = None
        self._asked: dict[int, _Asked] = {}
        self._there: set[str] = set()  # the weights that it has, unless it dropped them
        self._thread = threading.Thread(target=self._receive, name=f"tinsmith-{name}", daemon=True)
        self._thread.start()

    # ---- requests ----

    def begin(self, start: Start) -> Future[Mapping[str, str]]:
        """The replica's identity, once it has looked at its models' files."""
        return self._ask(lambda number: replace(start, number=number))

    def check(self, base: str, step_tokens: int) -> Future[Mapping[str, str]]:
        """Its probe of a base model."""
        return self._ask(lambda number: Check(number, base, step_tokens))

    def sample(
        self,
        weights: Weights,
        request: SampleRequest,
        call: Call,
        client: int,
        follows: tuple[str | None, int],
        listener: TokenListener | None,
    ) -> Future[SampleResult]:
        """See Replica."""
        self._send_weights(weights)
        base, streams = weights.base, listener is not None
        return self._ask(
            lambda number: Draw(number, weights.id, base, request, client, follows, streams),
            call,
            listener,
            (weights.id,),
        )

    def part(
        self, request: PartRequest, weights: Weights, teacher: Weights | None
    ) -> Future[PartResult]:
        """See Replica."""
        self._send_weights(weights)
        if teacher is not None:
            self._send_weights(teacher)
        taught = (teacher.id, teacher.base) if teacher else ("", "")
        return self._ask(
            lambda number: Compute(number, weights.id, weights.base, request, taught),
            weights=(weights.id, taught[0]),
        )

    def take(self, weights: Weights, call: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        """See Replica."""
        return self._ask(lambda number: Take(number, weights.id, call, nodes))

    def drop(self, weights: Weights, call: int) -> None:
        """See Replica."""
        self._link.send(Drop(weights.id, call))

    def forget(self, weights: str) -> None:
        """See Replica."""
        if weights in self._there:
            self._there.discard(weights)
            self._link.send(Forget(weights))

    def cancel(self, future: Future[Any]) -> None:
        """See Replica."""
        with self._lock:
            found = [number for number, one in self._asked.items() if one.future is future]
        for number in found:
            self._link.send(Cancel(number))

    def push(self, run: str, weights: Weights) -> None:
        """See Replica."""
        self._send_weights(weights)
        self._link.send(Follow(run, weights.id))

    @property
    def waiting(self) -> int:
        """See Replica."""
        return len(self._asked)

    @property
    def drawn(self) -> tuple[Mapping[int, int], float]:
        """See Replica."""
        return self.alive.steps, self.alive.seconds

    def lose(self, reason: str) -> None:
        """Gives it up: its requests fail, and it is used no more."""
        with self._lock:
            if self._gone is not None:
                return
            self._gone = ReplicaLost(f"{self.name} is lost: {reason}", "server")
            asked, self._asked = list(self._asked.values()), {}
            self.state = "lost"
        self._on_lost(self, reason)
        for one in asked:
            settle(one.future, self._gone)

    def close(self) -> None:
        """Ends the link. Its requests fail."""
        self.lose("the server is shutting down")
        self._link.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send_weights(self, weights: Weights) -> None:
        """Sends an adapter's weights, unless they are there. In the engine's thread."""
        if weights.adapter is None or weights.id in self._there:
            return
        vector = weights.vector
        self._there.add(weights.id)
        self.weights_bytes += vector.nbytes
        self._link.send(Push(weights.id, weights.base, AdapterShape.of(weights.adapter), vector))

    def _ask(
        self,
        message: Callable[[int], Any],
        call: Call | None = None,
        listener: TokenListener | None = None,
        weights: tuple[str, ...] = (),
    ) -> Future[Any]:
        future, number = Future[Any](), next(self._numbers)
        with self._lock:
            gone = self._gone
            if gone is None:
                self._asked[number] = _Asked(future, call, listener, weights)
        if gone is None:
            self._link.send(message(number))
        else:
            future.set_exception(gone)
        return future

    # ---- replies ----

    def _receive(self) -> None:
        reason = ""
        try:
            while True:
                self._take(self._link.receive())
        except EOFError as error:
            reason = str(error)
        except Exception as error:
            log.exception("what %s sent could not be read", self.name)
            reason = f"what it sent could not be read ({error!r:.200})"
        self.lose(reason)

    def _take(self, message: Any) -> None:
        match message:
            case Reply():
                self._answer(message)
            case Tokens():
                for number, parts in message.parts.items():
                    self._tell(number, parts)
            case LogLine():
                log.log(message.level, "%s: %s", self.name, message.text)
            case Located():
                self.place = message.place
            case Alive():
                self.alive = message

    def _answer(self, reply: Reply) -> None:
        with self._lock:
            one = self._asked.pop(reply.number, None)
        if one is None:
            return
        outcome, call = reply.outcome, one.call
        if isinstance(outcome, NoWeights):
            self._there.difference_update(one.weights)
        if isinstance(outcome, SampleResult) and call is not None:
            call.drawn, call.cached, since = reply.extra
            call.first = time.monotonic() - since
            outcome = replace(outcome, targets=call.request.targets)
        if isinstance(outcome, PartResult):
            self.parts += 1
        if isinstance(outcome, list):  # sums
            self.gradient_bytes += sum(row[0].nbytes for row in outcome if row[0] is not None)
        settle(one.future, outcome)

    def _tell(self, number: int, parts: Any) -> None:
        with self._lock:
            one = self._asked.get(number)
        if one is None or one.call is None or one.listener is None:
            return
        one.call.first = one.call.first or time.monotonic()
        try:
            one.listener(parts)
        except Exception as error:  # its request ends at once
            with self._lock:
                self._asked.pop(number, None)
            self._link.send(Cancel(number))
            settle(one.future, explain(error))
