"""The optimizers and their settings: OPTIMIZERS is the table.

An adapter is trained with one of them, from its first step to its last. The steps are in
csrc/model, adamw.c and dimuon.c, with the same settings and the limits of each number. A step's
settings are a dataclass, with the defaults of Tinker's SDK. Requests are read by this table too
(server/wire/fields.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from tinsmith import _core

log = logging.getLogger("tinsmith")

ADAMW, DIMUON = "adamw", "dimuon"


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step, with Tinker's defaults."""

    kind: ClassVar[str] = ADAMW

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    normalization: str | None = None


@dataclass(frozen=True)
class DimuonParams:
    """One Dimuon step, with the defaults of SDK 0.39."""

    kind: ClassVar[str] = DIMUON

    learning_rate: float
    beta1: float = 0.9
    damping: float = 1e-4
    rank_lr_correction_exponent: float = 0.175
    grad_clip_norm: float = 0.0
    normalization: str | None = None


Params = AdamParams | DimuonParams


@dataclass(frozen=True)
class Optimizer:
    """A row: `sent` is the request's field with its settings, `config` how clients choose it,
    `state` the vectors that its next step needs besides the weights."""

    params: type[AdamParams] | type[DimuonParams]
    sent: str
    config: Mapping[str, Any]
    state: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of its numbers."""
        return tuple(one.name for one in fields(self.params) if one.name != "normalization")

    def checked(self, numbers: Mapping[str, float], normalization: str | None = None) -> Params:
        """A step's settings; ValueError for an unknown or a missing one. The engine checks the
        numbers' ranges, before anything else."""
        kind = self.params.kind
        for name in numbers:
            if name not in self.settings:
                raise ValueError(f"{kind} has no {name}; its settings are {list(self.settings)}")
        for one in fields(self.params):
            if one.default is MISSING and one.name not in numbers:
                raise ValueError(f"{kind} needs a {one.name}")
        return self.params(**numbers, normalization=normalization)


OPTIMIZERS: dict[str, Optimizer] = {
    ADAMW: Optimizer(AdamParams, "adam_params", {"type": ADAMW}, ("m", "v")),
    DIMUON: Optimizer(DimuonParams, "optimizer_params", {"type": DIMUON, "version": 1}, ("m",)),
}


def take_step(
    adapter: _core.Adapter, params: Params, whose: str = "an adapter"
) -> tuple[dict[str, float], str]:
    """One step. Returns its metrics, and a sentence about a probable mistake, which is logged too;
    else ""."""
    report: dict[str, Any] = dict(adapter.optim_step(**asdict(params)))
    warning: str = report.pop("warning")
    if warning:
        log.warning("%s: %s", whose, warning)
    return report, warning


def optimizer_of(name: object) -> Optimizer:
    """The row of a name; ValueError if there is none."""
    row = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if row is None:
        known = " and ".join(OPTIMIZERS)
        raise ValueError(f"the optimizer {name!r:.80} is not built; tinsmith has {known}")
    return row
