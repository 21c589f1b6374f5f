"""The optimizers, and what each is set to: OPTIMIZERS is the table.

An adapter is trained with one of them, from its first step to its last. What a step does is in
csrc/model: adamw.c and dimuon.c, each with the same settings. A step's settings are a dataclass,
with the defaults of Tinker's SDK; a Setting says what a number may be. Requests' fields are read by
this table too (server/wire/fields.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar

from tinsmith import _core

log = logging.getLogger("tinsmith")

ADAMW, DIMUON = "adamw", "dimuon"


@dataclass(frozen=True)
class OptimizerSetting:
    """What a number may be: at least, and below; `words` say so."""

    least: float
    below: float
    words: str

    def check(self, name: str, value: float) -> None:
        """ValueError for a number that may not be."""
        if not (math.isfinite(value) and self.least <= value < self.below):
            raise ValueError(f"{name} must be {self.words}, {value} came")


SIZE = OptimizerSetting(0.0, math.inf, "at least 0")
SHARE = OptimizerSetting(0.0, 1.0, "in [0, 1)")
ABOVE = OptimizerSetting(math.ulp(0.0), math.inf, "above 0")
ANY = OptimizerSetting(-math.inf, math.inf, "a finite number")


def _number(setting: OptimizerSetting, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step, with Tinker's defaults."""

    kind: ClassVar[str] = ADAMW

    learning_rate: float = _number(SIZE, 1e-4)
    beta1: float = _number(SHARE, 0.9)
    beta2: float = _number(SHARE, 0.95)
    eps: float = _number(SIZE, 1e-12)
    weight_decay: float = _number(SIZE, 0.0)
    grad_clip_norm: float = _number(SIZE, 0.0)
    normalization: str | None = None


@dataclass(frozen=True)
class DimuonParams:
    """One Dimuon step, with the defaults of SDK 0.39."""

    kind: ClassVar[str] = DIMUON

    learning_rate: float = _number(SIZE)
    beta1: float = _number(SHARE, 0.9)
    damping: float = _number(ABOVE, 1e-4)
    rank_lr_correction_exponent: float = _number(ANY, 0.175)
    grad_clip_norm: float = _number(ANY, 0.0)
    normalization: str | None = None


Params = AdamParams | DimuonParams


@dataclass(frozen=True)
class Optimizer:
    """A row: `sent` is the field of a request that has its settings, `config` how clients choose
    it, `state` the vectors that its next step needs beside the weights."""

    params: type[AdamParams] | type[DimuonParams]
    sent: str
    config: Mapping[str, Any]
    state: tuple[str, ...]

    @property
    def settings(self) -> dict[str, OptimizerSetting]:
        """What its numbers are called, and may be."""
        return {one.name: one.metadata["setting"] for one in fields(self.params) if one.metadata}

    def step(
        self, adapter: _core.Adapter, params: Params, whose: str = "an adapter"
    ) -> tuple[dict[str, float], str]:
        """One step: its metrics, and a sentence about one that nobody can have wanted, which the
        log has too; else ""."""
        report: dict[str, Any] = dict(adapter.optim_step(**asdict(params)))
        warning: str = report.pop("warning")
        if warning:
            log.warning("%s: %s", whose, warning)
        return report, warning

    def checked(self, numbers: Mapping[str, float], normalization: str | None = None) -> Params:
        """A step's settings; ValueError for one that it has not, that may not be, or that lacks."""
        settings, kind = self.settings, self.params.kind
        for name, value in numbers.items():
            if name not in settings:
                raise ValueError(f"{kind} has no {name}; its settings are {list(settings)}")
            settings[name].check(name, value)
        for one in fields(self.params):
            if one.default is MISSING and one.name not in numbers:
                raise ValueError(f"{kind} needs a {one.name}")
        return self.params(**numbers, normalization=normalization)


OPTIMIZERS: dict[str, Optimizer] = {
    ADAMW: Optimizer(AdamParams, "adam_params", {"type": ADAMW}, ("m", "v")),
    DIMUON: Optimizer(DimuonParams, "optimizer_params", {"type": DIMUON, "version": 1}, ("m",)),
}


def optimizer_of(name: object) -> Optimizer:
    """The row of a name; ValueError where there is none."""
    row = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if row is None:
        known = " and ".join(OPTIMIZERS)
        raise ValueError(f"the optimizer {name!r:.80} is not built; tinsmith has {known}")
    return row
