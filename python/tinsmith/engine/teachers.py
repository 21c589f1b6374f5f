"""Losses with a teacher, such as generalized_jsd: which teacher, and the tokens that it reads.

A datum names the teacher's tokens; the loss's configuration names the teacher. The teacher is
"base" (the run's base model), "current" (the student as it is), "ema" (an exponential moving
average of the student, kept beside its run and in its checkpoints), the path of a checkpoint, a
sampling client's handle, or another base model of the same vocabulary. The worker sees the last
three as sampling sessions. The distributions are compared in the engine
(csrc/train/objective_divergence.c) and never leave it.

Or a datum has its teacher's log-probabilities: ids at each position, (N, K), and one for each id.
Then no teacher model runs (csrc/train/losses.c).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core, ops

BASE, CURRENT, EMA = "base", "current", "ema"

TOKENS, LOGPROBS = "teacher_tokens", "teacher_logprobs"  # keys in loss_fn_inputs
NO_LOGPROB = -99999.0  # pads a list of the top K, as in the SDK's topk_prompt_logprobs

# loss_fn_config keys of every such loss, besides those of its row in the engine's table.
CONFIG: dict[str, float | str] = {"teacher": BASE, "teacher_ema": 0.999}


@dataclass(frozen=True)
class Teacher:
    """A batch's teacher: its tokens for each datum, concatenated, and its name: CURRENT, EMA or a
    sampling session."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    name: str
    decay: float  # of EMA


def losses() -> list[dict[str, Any]]:
    """The engine's table of losses (_core.LossRow). Losses with a teacher also take CONFIG's keys;
    only they have `tokens`, the key of the teacher's tokens."""
    return [
        {
            **row,
            "tokens": TOKENS if row["taught"] else None,
            "config": {**row["config"], **(CONFIG if row["taught"] else {})},
        }
        for row in _core.losses()
    ]


def divergences(
    logprobs: Sequence[NDArray[np.float32]],
    teacher: Sequence[NDArray[np.float32]],
    weights: Sequence[NDArray[np.float32]],
    config: Mapping[str, float],
) -> list[NDArray[np.float32]]:
    """The divergence of each row (N,) between datums' log-probabilities (N, K) and the teacher's,
    before weighting; 0 where all weights of a row are 0."""
    found = []
    for own, other, weight in zip(logprobs, teacher, weights, strict=True):
        rows = np.zeros(len(own), np.float32)
        live = np.any(weight != 0, axis=1)
        if live.any():
            none = other[live] <= NO_LOGPROB
            student, taught = (np.where(none, -np.inf, side[live]) for side in (own, other))
            terms = ops.generalized_jsd(
                student.astype(np.float32),
                taught.astype(np.float32),
                reduction="none",
                beta=config.get("beta", 0.5),
                temperature=config.get("temperature", 1.0),
                token_clip=config.get("token_clip"),
            )
            rows[live] = np.asarray(terms).sum(axis=1)
        found.append(rows)
    return found


def metrics(
    divergences: Sequence[NDArray[np.float32]], weights: Sequence[NDArray[np.float32]]
) -> dict[str, float]:
    """Metrics of a call's divergences: the mean over datums of each datum's mean over the positions
    with a weight, the largest, and the number of these positions. The names say how clients reduce
    them over the chunks of a call."""
    compared = [
        part[np.any(weight.reshape(len(part), -1) != 0, axis=1)]
        for part, weight in zip(divergences, weights, strict=True)
    ]
    means = [float(part.mean(dtype=np.float64)) if part.size else 0.0 for part in compared]
    return {
        "jsd:mean": sum(means) / len(means),
        "jsd:max": max((float(part.max()) for part in compared if part.size), default=0.0),
        "jsd_tokens:sum": float(sum(part.size for part in compared)),
    }
