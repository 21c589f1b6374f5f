"""The worker's log of calls: those that have ended, and those in flight.

A Call is noted when a request comes, and followed until it ends or fails. Then the worker's watcher
gets it: the console, the metrics and the page are made of these. Nothing here changes the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """A request to the worker. Times are time.monotonic()'s; nothing changes after the end.

    `kind` is create, forward, forward_backward, optim_step, save, load, snapshot, sample, or reject
    for a request that was refused before its turn."""

    kind: str
    run: str = ""  # its id; of a sample, the run whose weights it draws from
    sampler: str = ""  # the sampling session's id
    request: Any = (
        None  # a Batch, an optimizer's Params or a SampleRequest; the folder of a save or load
    )
    tokens: int = 0  # of its datums, or of its prompt
    at: float = field(default_factory=time.time)  # when it came, in seconds since 1970
    arrived: float = field(default_factory=time.monotonic)
    base: str = ""  # the base model's name
    step: int = 0  # optimizer steps of the weights, when its turn comes
    began: float = 0.0  # when its turn came; 0: not yet
    first: float = 0.0  # when its first token was drawn
    ended: float = 0.0
    done: int = 0  # of `count` micro-batches
    count: int = 1
    cached: int = 0  # prompt tokens that were found in the prefix cache
    drawn: int = 0  # tokens
    result: Any = None  # a BatchResult, the optimizer's metrics, or a SampleResult
    error: str = ""  # the error's sentence, if it failed
    warning: str = ""  # a sentence about an optimizer step that is probably a mistake

    @property
    def queued(self) -> float:
        """Seconds until its turn; before its turn, until now or its end."""
        return (self.began or self.ended or time.monotonic()) - self.arrived

    @property
    def seconds(self) -> float:
        """Seconds from its turn to its end, or until now."""
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    def turn(self, base: str, step: int) -> None:
        """Its turn has come. A call that has to wait for its model takes its turn again."""
        self.base, self.step, self.began = base, step, time.monotonic()

    def progress(self, done: int, count: int) -> None:
        """`done` of `count` micro-batches are done."""
        self.done, self.count = done, count

    def follow(self, future: Future[Any], on_end: CallListener) -> None:
        """Calls `on_end` when it ends, in the thread in which it ends."""

        def end(future: Future[Any]) -> None:
            self.ended = time.monotonic()
            failure = future.exception()
            if failure is None:
                self.result = future.result()
            else:
                self.error = str(failure)
            on_end(self)

        future.add_done_callback(end)


# Called with each call that has ended, mostly in the worker's thread. It must be quick.
CallListener = Callable[[Call], None]


@dataclass(frozen=True)
class Now:
    """What a worker does at this moment."""

    training: Sequence[Call]  # the training calls in flight
    waiting: Mapping[str, int]  # requests of each run that wait for their turn
    sampling: Mapping[str, int]  # requests in flight, on each base model
    paused: Sequence[Future[Any]] = ()  # requests that wait for a model that is being read


@dataclass(frozen=True)
class Memory:
    """The bytes that a worker's parts hold."""

    limit: int | None  # of all together; None: unlimited
    weights: int  # of base models
    adapters: int  # of runs, with gradients and the optimizer's moments
    arenas: int  # of training steps
    snapshots: int  # adapters of sampling sessions
    cache: int  # keys and values
    cache_used: int  # of these, what running sequences hold
    offloaded: int  # runs that made room while they are idle, elsewhere; no part of the limit
    evictions: int  # how often something was evicted, so far

    @property
    def used(self) -> int:
        """Of all together."""
        return self.weights + self.adapters + self.arenas + self.snapshots + self.cache
