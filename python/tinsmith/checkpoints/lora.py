"""The description of a new LoRA adapter, from a client, a checkpoint, or a PEFT folder; and the
positions of its matrices in its flat vectors."""

from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core


@dataclass(frozen=True)
class LoraSpec:
    """A new adapter. alpha is not in Tinker's requests: 32, as all open implementations assume."""

    rank: int
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = True
    alpha: float = 32.0
    optimizer: str = "adamw"

    def adapter(self, core: _core.Model, step_tokens: int = 0) -> _core.Adapter:
        """A new adapter on that model. 0: the engine's default."""
        return _core.Adapter(core, **asdict(self), step_tokens=step_tokens)


def spec_of(adapter: _core.Adapter) -> LoraSpec:
    """A description that gives an adapter of the same layout and optimizer."""
    groups = _core.slot_groups()
    trained = {groups[slot] for slot, *_ in adapter.layout}
    return LoraSpec(
        adapter.rank,
        0,
        *(name in trained for name in ("attn", "mlp", "unembed")),
        adapter.alpha,
        adapter.optimizer,
    )


@dataclass(frozen=True)
class Average:
    """An exponential moving average of an adapter's weights: the teacher EMA."""

    adapter: _core.Adapter
    decay: float

    def ema_update(self, leader: _core.Adapter) -> None:
        """One step of the average, after one of the optimizer's."""
        self.adapter.ema_update(leader, self.decay)


@dataclass(frozen=True)
class Factor:
    """A module's matrix A or B in an adapter's flat vectors, from a row of its layout. If a layer's
    experts share A or B, the `count` matrices of the other, one for each expert, are one Factor;
    the shared one has count 1. All others have count 0."""

    slot: str
    layer: int
    index: int
    letter: str
    offset: int
    rows: int
    cols: int
    count: int

    def view(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """A view in PEFT's shape, the transpose of the engine's: (rank, in) for A, (out, rank) for
        B; with a first axis of `count`, if that is not 0."""
        shape = (self.count, self.rows, self.cols) if self.count else (self.rows, self.cols)
        size = max(self.count, 1) * self.rows * self.cols
        return flat[self.offset : self.offset + size].reshape(shape).swapaxes(-1, -2)


def factors(adapter: _core.Adapter) -> list[Factor]:
    """All of an adapter's factors, in the order of its layout."""
    layout = adapter.layout
    sharing = {(slot, layer) for slot, layer, index, *_ in layout if index < 0}
    found: dict[tuple[str, int, int, str], Factor] = {}
    for slot, layer, index, letter, *place in layout:
        stacked = (slot, layer) in sharing
        key = (slot, layer, -1 if stacked else index, letter)
        one = found.get(key) or Factor(*key, *place, 0)
        found[key] = replace(one, count=one.count + stacked)
    return list(found.values())
