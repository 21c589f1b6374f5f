"""One optimizer step of a run, computed from its calls: the data of the page's curves.

A step begins when the one before has ended. Its seconds are split by what the run did. Where these
overlap, the optimizer counts before forward and backward, saving, sampling and waiting; the rest is
the client's own time. Metrics of several calls are reduced as the SDK reduces the chunks of one
call, by the suffix of their names. Where datums have the sampler's log-probabilities, the gap
between sampler and trainer is estimated as in tinker_cookbook's compute_kl_sample_train, over the
targets that have one, or an advantage: v1 is the mean of sampler - trainer, v2 half the mean of its
square, and the entropy minus the mean of the sampler's. The mean loss is the summed loss over the
sum of absolute weights, so it is per token even if a recipe divides its weights by a count; without
weights, it is over the number of trained tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tinsmith.checkpoints.optimizers import Params
from tinsmith.engine.call_log import Call
from tinsmith.engine.training import Batch, BatchResult

Interval = tuple[float, float]  # start, end

# What a run does, in the order in which overlapping time is counted.
KINDS = {
    "optim_step": "optimizer",
    "forward_backward": "forward_backward",
    "forward": "forward_backward",
    "save": "saving",
    "load": "saving",
    "snapshot": "saving",
    "create": "saving",
    "sample": "sampling",
}
PARTS = ("optimizer", "forward_backward", "saving", "sampling", "waiting", "client")
SPANS_MIN = 256  # before touching spans are merged


def joined(spans: Sequence[Interval]) -> list[Interval]:
    """Spans in order, with touching ones merged."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def split(spans: Mapping[str, Sequence[Interval]], start: float, end: float) -> dict[str, float]:
    """The seconds from `start` to `end` by PARTS: a moment counts for the first that has it."""
    covered: list[Interval] = []
    parts, total = {}, 0.0
    for part in PARTS[:-1]:
        covered = joined([*covered, *spans.get(part, ())])
        now = sum(max(0.0, min(b, end) - max(a, start)) for a, b in covered)
        parts[part], total = now - total, now
    return parts | {"client": max(0.0, end - start - total)}


@dataclass
class StepMetrics:
    """Metrics of several calls, reduced to those of one."""

    values: dict[str, float] = field(default_factory=dict)
    datums: int = 0

    def add(self, metrics: Mapping[str, float], datums: int) -> None:
        """Adds the metrics of another call, of `datums` datums."""
        for name, value in metrics.items():
            known, how = self.values.get(name), name.rpartition(":")[2]
            if known is None:
                self.values[name] = value
            elif how == "sum":
                self.values[name] = known + value
            elif how == "mean":
                both = self.datums + datums
                self.values[name] = (known * self.datums + value * datums) / max(both, 1)
            else:
                self.values[name] = {"max": max, "min": min}.get(how, _last)(known, value)
        self.datums += datums


def _last(before: float, after: float) -> float:
    return after


@dataclass
class Gap:
    """The gap between sampler and trainer, as sums over targets."""

    first: float = 0.0
    second: float = 0.0
    sampled: float = 0.0
    count: int = 0

    def add(self, batch: Batch, result: BatchResult) -> None:
        """Adds a call whose datums have the sampler's log-probabilities."""
        past = batch.inputs.get("logprobs")
        if past is None or any(len(shape) != 1 for shape in batch.shapes):
            return
        trained = past != 0
        if (advantages := batch.inputs.get("advantages")) is not None:
            trained |= advantages != 0
        then = past[trained].astype(np.float64)
        now = np.concatenate(result.logprobs)[trained]
        self.first += float((then - now).sum())
        self.second += float(((then - now) ** 2).sum())
        self.sampled += float(then.sum())
        self.count += int(trained.sum())

    @property
    def row(self) -> dict[str, float] | None:
        """The means; None if no datum had any."""
        if not self.count:
            return None
        return {
            "v1": self.first / self.count,
            "v2": self.second / self.count / 2,
            "entropy": -self.sampled / self.count,
        }


class Step:
    """A step that is not over. `add` takes its calls; `row` is the data so far."""

    def __init__(self, number: int, start: float | None = None):
        self.number = number
        self.start = start  # the last step's end; None: its first call's arrival
        self.end = 0.0
        self.calls: Counter[str] = Counter()
        self.failed = 0
        self._at = 0.0
        self._spans: dict[str, list[Interval]] = {part: [] for part in PARTS}
        self._spans_max = dict.fromkeys(PARTS, SPANS_MIN)
        self._trained, self._scored = StepMetrics(), StepMetrics()
        self._gap = Gap()
        self._tokens: Counter[str] = Counter()
        self._weight = 0.0
        self._facts: dict[str, Any] = {}

    def add(self, call: Call) -> None:
        """Adds a call that has ended."""
        part = KINDS.get(call.kind, "client")
        self.start = call.arrived if self.start is None else self.start
        self.end = max(self.end, call.ended)
        self._at = call.at + call.ended - call.arrived
        self._span("waiting", (call.arrived, call.began or call.ended))
        if call.began:
            self._span(part, (call.began, call.ended))
        self.calls[call.kind] += 1
        if call.error:
            self.failed += 1
        elif call.kind in ("forward", "forward_backward"):
            self._add_batch(call, call.request, call.result)
        elif call.kind == "optim_step":
            self._facts |= {"optimizer": call.result, "adam": _settings(call.request)}
            self._facts |= {"warning": call.warning} if call.warning else {}
        elif call.kind == "sample":
            self._tokens["drawn"] += call.drawn
            self._tokens["prompt"] += call.tokens
            self._tokens["cached"] += call.cached

    def _span(self, part: str, span: Interval) -> None:
        spans = self._spans[part]
        spans.append(span)
        if len(spans) > self._spans_max[part]:
            spans[:] = joined(spans)
            # If few touch, merging them at each call would take quadratic time: a step of 40,000
            # samples would take minutes.
            self._spans_max[part] = max(SPANS_MIN, 2 * len(spans))

    def _add_batch(self, call: Call, batch: Batch, result: BatchResult) -> None:
        trains = call.kind == "forward_backward"
        metrics = {"loss:sum": result.loss, **result.metrics}
        (self._trained if trains else self._scored).add(metrics, len(batch.lengths))
        self._tokens["tokens" if trains else "scored"] += call.tokens
        if trains:
            self._facts["loss"] = batch.loss
            self._weight += float(np.abs(batch.inputs.get("weights", ())).sum())
            self._gap.add(batch, result)

    @property
    def _mean(self) -> float | None:
        report = self._facts.get("optimizer") or {}
        loss, over = report.get("loss"), self._weight or report.get("loss_tokens")
        return None if loss is None else loss / (over or 1.0)

    @property
    def row(self) -> dict[str, Any]:
        """The page's data of the step. Numbers that are not finite are None."""
        start = self.end if self.start is None else self.start
        return finite(
            {
                "step": self.number,
                "at": self._at,
                "seconds": self.end - start,
                "split": split(self._spans, start, self.end),
                "calls": dict(self.calls),
                "failed": self.failed,
                "datums": self._trained.datums,
                **{key: self._tokens[key] for key in ("tokens", "scored", "drawn", "prompt")},
                "metrics": self._trained.values,
                "forward": self._scored.values,
                "kl": self._gap.row,
                "loss_mean": self._mean,
                **self._facts,
            }
        )


def _settings(params: Params) -> dict[str, Any]:
    return {"type": params.kind, **asdict(params)}


def loss_per_token(call: Call) -> float:
    """A forward_backward's loss over its summed weights, or else over its number of targets."""
    weights = call.request.inputs.get("weights")
    total = float(abs(weights).sum()) if weights is not None else float(len(call.request.targets))
    return float(call.result.loss / total) if total > 0 else 0.0


def finite(value: Any) -> Any:
    """A value for JSON: floats that are NaN or infinite become None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
