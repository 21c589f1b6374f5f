"""Losses with a teacher, such as generalized_jsd: who the teacher is, and what it reads.

A datum names the teacher's tokens, the loss's configuration names the teacher: "base" (the run's
base model), "current" (the student as it is), "ema" (an exponential moving average of the student,
kept beside its run and in its checkpoints), the path of a checkpoint, a sampling client's handle,
or another base model of the same vocabulary. The last three are sampling sessions to the worker.
The distributions are compared in the engine (csrc/distill.c) and never leave it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core

BASE, CURRENT, EMA = "base", "current", "ema"

TOKENS = "teacher_tokens"  # key in loss_fn_inputs

# loss_fn_config keys of every such loss, beside those of its row in the engine's table.
CONFIG: dict[str, float | str] = {"teacher": BASE, "teacher_ema": 0.999}


@dataclass(frozen=True)
class Teacher:
    """A batch's teacher: the tokens that it reads for each datum, one after another, and its
    name, CURRENT, EMA or a sampling session."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    name: str
    decay: float  # of EMA


@dataclass(frozen=True)
class Average:
    """An exponential moving average of an adapter's weights: the teacher EMA."""

    adapter: _core.Adapter
    decay: float

    def follow(self, leader: _core.Adapter) -> None:
        """One step of the average, after one of the optimizer's."""
        self.adapter.follow(leader, self.decay)


def losses() -> list[dict[str, Any]]:
    """The engine's table of losses (_core.LossRow). Those with a teacher also take what says who it
    is, and `tokens`, the key of what it reads, is theirs alone."""
    return [
        {
            **row,
            "tokens": TOKENS if row["taught"] else None,
            "config": {**row["config"], **(CONFIG if row["taught"] else {})},
        }
        for row in _core.losses()
    ]


def metrics(
    divergences: Sequence[NDArray[np.float32]], weights: Iterable[NDArray[np.float32]]
) -> dict[str, float]:
    """What a call says of its divergences, by names that clients reduce over the parts of a call:
    the mean over datums of each one's mean over the positions with a weight, the largest, and the
    number of such positions."""
    compared = [part[weight != 0] for part, weight in zip(divergences, weights, strict=True)]
    means = [float(part.mean(dtype=np.float64)) if part.size else 0.0 for part in compared]
    return {
        "jsd:mean": sum(means) / len(means),
        "jsd:max": max((float(part.max()) for part in compared if part.size), default=0.0),
        "jsd_tokens:sum": float(sum(part.size for part in compared)),
    }
