"""The description of a new LoRA adapter, from a client, a checkpoint, or a PEFT folder."""

from dataclasses import asdict, dataclass

from tinsmith import _core


@dataclass(frozen=True)
class LoraSpec:
    """A new adapter. alpha is not on Tinker's wire: 32, as every open peer assumes."""

    rank: int
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = True
    alpha: float = 32.0

    def adapter(self, core: _core.Model) -> _core.Adapter:
        """One on that model."""
        return _core.Adapter(core, **asdict(self))


@dataclass(frozen=True)
class Average:
    """An exponential moving average of an adapter's weights: the teacher EMA."""

    adapter: _core.Adapter
    decay: float

    def follow(self, leader: _core.Adapter) -> None:
        """One step of the average, after one of the optimizer's."""
        self.adapter.follow(leader, self.decay)
