"""What an owner and its replica say to each other. All of it is pickled: both run the same code.

`number` is a request's; its reply has the same. Weights are sent once, before their first use. A
replica may drop them when memory is short: its reply is then NoWeights, and they are sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.decoding import SampleDelta, SampleRequest
from tinsmith.engine.shared_call import PartRequest

# ---- to the replica ----


@dataclass(frozen=True)
class Start:
    """The first message: what a replica computes with. Its reply is its identity."""

    number: int
    models: Mapping[str, Path]
    dtype: str | None
    weights: str
    weights_copy: bool
    name: str = ""
    device: str = "cpu"
    threads: int = 0
    memory: int | None = None


@dataclass(frozen=True)
class Check:
    """Asks for a base model's fingerprint; it is loaded for it. The steps of its adapters are those
    of the owner's, `step_tokens` rows at most."""

    number: int
    base: str
    step_tokens: int


@dataclass(frozen=True)
class AdapterShape:
    """What is needed for an adapter whose flat vectors are laid out like another one's."""

    rank: int
    alpha: float
    attn: bool
    mlp: bool
    unembed: bool

    @classmethod
    def of(cls, adapter: _core.Adapter) -> AdapterShape:
        """An adapter's."""
        groups = _core.slot_groups()
        trained = {groups[slot] for slot, *_ in adapter.layout}
        switches = (name in trained for name in ("attn", "mlp", "unembed"))
        return cls(adapter.rank, adapter.alpha, *switches)

    def spec(self) -> LoraSpec:
        """A new adapter of this shape. Its weights are still random."""
        return LoraSpec(self.rank, 0, self.attn, self.mlp, self.unembed, self.alpha)


@dataclass(frozen=True)
class Push:
    """An adapter's weights, under their name."""

    weights: str
    base: str
    shape: AdapterShape
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class Follow:
    """Requests of a run's inflight sessions use these weights from their next token."""

    run: str
    weights: str


@dataclass(frozen=True)
class Draw:
    """A sampling request. `weights` are the base model's if they are ""."""

    number: int
    weights: str
    base: str
    request: SampleRequest
    client: int
    follows: tuple[str | None, int]
    streams: bool  # whether its tokens are wanted as they come


@dataclass(frozen=True)
class Compute:
    """Asks for a part of a training call. `teacher` is the name of its weights and its base model,
    if there is one."""

    number: int
    weights: str
    base: str
    part: PartRequest
    teacher: tuple[str, str]


@dataclass(frozen=True)
class Take:
    """Asks for sums of a call's parts, by their nodes."""

    number: int
    weights: str
    call: int
    nodes: Sequence[int]


@dataclass(frozen=True)
class Drop:
    """Ends a call's parts, and forgets their sums."""

    weights: str
    call: int


@dataclass(frozen=True)
class Cancel:
    """Stops a sampling request, or a part."""

    number: int


@dataclass(frozen=True)
class Forget:
    """Weights that are not needed any more."""

    weights: str


# ---- to the owner ----


@dataclass(frozen=True)
class Reply:
    """The outcome of a request: a result, or a RequestError. `extra` are a sample's tokens drawn,
    prompt tokens found cached, and seconds since its first token."""

    number: int
    outcome: Any
    extra: tuple[int, int, float] = (0, 0, 0.0)


@dataclass(frozen=True)
class Tokens:
    """What requests have drawn since the last such message, by their number."""

    parts: Mapping[int, Sequence[SampleDelta]]


@dataclass(frozen=True)
class LogLine:
    """A line of the replica's log."""

    level: int
    text: str


@dataclass(frozen=True)
class Located:
    """Where the replica is, for people; sent if its owner did not choose it."""

    place: str


@dataclass(frozen=True)
class Alive:
    """Sent every second: a replica that says nothing hangs. Worker.drawn, the bytes that it holds,
    and its process."""

    steps: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    memory: int = 0
    process: int = 0
