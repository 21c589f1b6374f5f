"""Samples recorded with record_stability_info, and checks of the datums that refer to them.

A session records each sampled sequence: its prompt, its tokens, and the log-probability that the
sampler gave each token. A datum's provenance spans name such sequences, and say which of their
tokens are where in model_input and in target_tokens. All of them are compared, token by token. A
loss that is `recorded` in the engine's table gets the log-probabilities from here, so a client
can't train on numbers that the sampler never gave.

A request's sequences are dropped a day after their last use, or with their session. If all take too
many bytes, the least recently used are evicted first.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.decoding import SampleResult
from tinsmith.server.wire.messages import pb

SECONDS = 86400.0
BYTES_MAX = 1 << 30
SEQUENCE_BYTES = 400  # of a sequence, besides its elements

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Sampled:
    """A sampled sequence: its request's prompt, its tokens, and their log-probabilities."""

    prompt: Ids
    tokens: Ids
    logprobs: NDArray[np.float32]


@dataclass
class _Group:
    """The sequences of one request."""

    session: str
    samples: tuple[Sampled, ...]
    bytes: int
    used: float


Find = Callable[[str], Sampled | None]


class Sequences:
    """See the file's header. Any thread may call it."""

    def __init__(
        self,
        bytes_max: int = BYTES_MAX,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.bytes_max = bytes_max
        self.bytes = 0
        self._seconds = seconds
        self._clock = clock
        self._groups: OrderedDict[str, _Group] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def add(self, session: str, request_id: str, prompt: Ids, result: SampleResult) -> None:
        """Records the sequences of a request, and nothing else of its result; a sequence's id is
        the request's id with its number."""
        samples = tuple(Sampled(prompt, one.tokens, one.logprobs) for one in result.samples)
        size = prompt.nbytes + SEQUENCE_BYTES * len(samples)
        size += sum(one.tokens.nbytes + one.logprobs.nbytes for one in samples)
        with self._lock:
            self._drop(request_id)
            self._groups[request_id] = _Group(session, samples, size, self._clock())
            self.bytes += size
            self._trim()

    def find(self, session: str, name: str) -> Sampled | None:
        """A recorded sequence of a session; None if it is unknown or dropped."""
        request_id, _, number = name.rpartition(":")
        with self._lock:
            self._trim()
            group = self._groups.get(request_id)
            if group is None or group.session != session or not number.isdecimal():
                return None
            if len(number) > 9 or int(number) >= len(group.samples):
                return None
            group.used = self._clock()
            self._groups.move_to_end(request_id)
        return group.samples[int(number)]

    def forget(self, session: str) -> None:
        """Drops the sequences of a session."""
        with self._lock:
            for name in [key for key, group in self._groups.items() if group.session == session]:
                self._drop(name)

    def _trim(self) -> None:
        """Drops sequences that are too old, and the least recently used if there are too many."""
        while self._groups:
            name, oldest = next(iter(self._groups.items()))
            if self.bytes <= self.bytes_max and self._clock() - oldest.used <= self._seconds:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        group = self._groups.pop(name, None)
        self.bytes -= 0 if group is None else group.bytes


# ---- the check of a datum ----


@dataclass(frozen=True)
class _Run:
    """A span's positions in its datum, and its sequence's ids there."""

    where: str
    name: str
    at: slice
    ids: Ids
    before: Ids  # for each sampled token, the one before it
    logprobs: NDArray[np.float32] | None  # of sampled tokens; None: of a prompt

    def compare(self, ids: Ids) -> None:
        """Raises ValueError unless the datum's ids are the sequence's."""
        self._compare(ids, self.ids, "has {0} at position {1}, but", "there")

    def compare_before(self, ids: Ids) -> None:
        """The same for the ids that the targets are predicted from."""
        self._compare(
            ids, self.before, "has the target after {0} at position {1}, but", "before it"
        )

    def _compare(self, ids: Ids, wanted: Ids, has: str, there: str) -> None:
        differ = np.flatnonzero(ids[self.at] != wanted)
        if len(differ):
            first = int(differ[0])
            at = self.at.start + first
            came, recorded = _named(ids[at]), _named(wanted[first])
            recorded = "another image's" if came == recorded else recorded
            raise ValueError(
                f"{self.where} {has.format(came, at)} sequence {self.name} has {recorded} {there}: "
                "what is trained must be what was sampled"
            )


def _named(token: int) -> str:
    return f"id {token}" if token >= 0 else "a row of an image"


def recorded_logprobs(
    datum: pb.Datum,
    where: str,
    tokens: Ids,
    targets: Ids,
    advantages: NDArray[np.float32],
    find: Find,
) -> NDArray[np.float32]:
    """The sampler's log-probability of each target, (N,), 0 if it was not sampled. ValueError if a
    span and its sequence differ, also in the token before a target, or if a target that was not
    sampled has an advantage. A prompt's other targets are not compared: recipes fill them with
    zeros."""
    spans = getattr(datum, "model_input_spans", ()), getattr(datum, "loss_fn_input_spans", ())
    if not any(spans):
        raise ValueError(
            f"{where} has no provenance: the loss takes what was recorded when its tokens were "
            "sampled. Sample with record_stability_info=True, and name the sequences with "
            "Datum.with_provenance (SDK 0.38)"
        )
    for run in _runs(spans[0], f"{where}: model_input_spans", len(tokens), find):
        run.compare(tokens)
    found = np.zeros(len(targets), np.float32)
    for run in _runs(spans[1], f"{where}: loss_fn_input_spans", len(targets), find):
        if run.logprobs is not None:
            run.compare(targets)
            run.compare_before(tokens)
            found[run.at] = run.logprobs
        elif advantages[run.at].any():
            bad = run.at.start + int(np.flatnonzero(advantages[run.at])[0])
            raise ValueError(
                f"{run.where} says that the target at position {bad} is a prompt's, but its "
                f"advantage is {advantages[bad]:g}: only sampled tokens can have one"
            )
    return found


def _runs(spans: Sequence[pb.ProvenanceSpan], where: str, count: int, find: Find) -> Iterator[_Run]:
    """The spans of a field with `count` positions, all of which they must cover."""
    at = 0
    for number, span in enumerate(spans):
        here, kind = f"{where}[{number}]", span.WhichOneof("span")
        if kind is None:
            raise ValueError(f"{here} is neither a prompt's nor a sampled sequence's")
        part, sampled = getattr(span, kind), kind == "sampled_tokens"
        name, first, end = part.sequence_id, part.offset, part.offset + part.length
        known = find(name)
        if known is None:
            raise ValueError(
                f"{here} names sequence {name!r:.200}, of which its session has no record: sample "
                "with record_stability_info=True; a record lasts a day after its last use, and "
                "less where the server has no room for all"
            )
        ids = known.tokens if sampled else known.prompt
        if not 0 <= first <= end <= len(ids):
            what = "sampled tokens" if sampled else "tokens in its prompt"
            raise ValueError(
                f"{here} has offset {first} and length {part.length}, but sequence {name} has "
                f"{len(ids)} {what}"
            )
        if part.length > count - at:
            raise ValueError(f"{where} cover more than the datum's {count} positions")
        logprobs = known.logprobs[first:end] if sampled else None
        before = np.concatenate([known.prompt[-1:], ids])[first:end] if sampled else ids[:0]
        yield _Run(here, name, slice(at, at + part.length), ids[first:end], before, logprobs)
        at += part.length
    if at < count:
        raise ValueError(f"{where} cover {at} of the datum's {count} positions: all must be")
