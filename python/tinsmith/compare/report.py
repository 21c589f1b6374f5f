"""The results of a comparison: a table with intervals, and a CSV with a row for each run.

A figure is the mean over a method's seeds at one learning rate. Its interval is Student's 95 %
interval of that mean, t·s/√n with the seeds' sample standard deviation s. So it covers the
randomness of training (adapter, batches and draws), not that of the questions.
"""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.compare.measure import MEASURES
from tinsmith.compare.methods import METHODS
from tinsmith.compare.plan import BASE, Plan, finished

SIDES = ("learned", "kept")  # what was trained, and what the model knew before
# Student's t for 95 %, both sides, by degrees of freedom from 1 to SEEDS_MAX - 1.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
ResultRow = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """The mean of some runs' figures, and half its 95 % interval (None for one run)."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class Group:
    """A method at a learning rate, or the base model: its runs, in the order of their seeds."""

    method: str
    learning_rate: float | None
    runs: tuple[ResultRow, ...]

    def values(self, side: str, measure: str) -> list[float]:
        """A measure of each run."""
        return [float(run[side][measure]) for run in self.runs]

    def estimate(self, side: str, measure: str) -> Estimate:
        """The measure's mean over the runs."""
        return estimate(self.values(side, measure))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values, and half its 95 % interval.

    estimate([0.8, 0.9, 1.0])  # 0.9 ± 4.303 · 0.1 / √3
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None)
    return Estimate(mean, T95[count - 2] * statistics.stdev(values) / math.sqrt(count))


def groups(folder: Path) -> list[Group]:
    """The complete runs in a folder: the base model, then methods in METHODS' order, each by
    learning rate."""
    found: dict[tuple[int, float], list[ResultRow]] = {}
    order = [BASE.method, *METHODS]
    for result in finished(folder).values():
        key = order.index(result["method"]), result["learning_rate"] or 0.0
        found.setdefault(key, []).append(result)
    return [
        Group(order[key[0]], key[1] or None, tuple(sorted(runs, key=lambda r: r["seed"] or 0)))
        for key, runs in sorted(found.items())
    ]


def measures_of(found: Sequence[Group], side: str) -> list[str]:
    """The measures that all runs have on a side, in order; first the one that counts: a scorer's,
    if there is one."""
    return [name for name in MEASURES if name in found[0].runs[0][side]]


def shown(measure: str, value: float, half: float | None = None) -> str:
    """A figure for people: `exact` in percent, others unchanged, with the interval.

    shown("exact", 0.9, 0.248)  # "90.0 ± 24.8 %"
    """
    if measure == "exact":
        around = "" if half is None else f" ± {100 * half:.1f}"
        return f"{100 * value:.1f}{around} %"
    return f"{value:.3g}" if half is None else f"{value:.3g} ± {half:.2g}"


# ---- output ----


def table(found: Sequence[Group]) -> list[list[str]]:
    """The table's cells, titles first."""
    measures = [(side, name) for side in SIDES for name in measures_of(found, side)]
    titles = ["method", "learning rate", "seeds"]
    titles += [f"{side}: {name}" for side, name in measures]
    rows = [[*titles, "seconds a run"]]
    for group in found:
        rate = "" if group.learning_rate is None else f"{group.learning_rate:g}"
        seeds = "" if group.learning_rate is None else str(len(group.runs))
        cells = [
            shown(name, one.mean, one.half)
            for side, name in measures
            for one in [group.estimate(side, name)]
        ]
        seconds = statistics.fmean(run["seconds"] for run in group.runs)
        rows.append([title(group.method), rate, seeds, *cells, f"{seconds:.0f}"])
    return rows


def title(method: str) -> str:
    """A method's name for people."""
    return METHODS[method].title if method in METHODS else "base model"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table whose columns also align in a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def csv_text(found: Sequence[Group]) -> str:
    """A row for each run: exact as a share from 0 to 1, logprob in nats a token."""
    measures = [(side, name) for side in SIDES for name in measures_of(found, side)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f"{side}_{name}" for side, name in measures]
    writer.writerow(["method", "learning_rate", "seed", *names, "seconds", "sampler_path"])
    for group in found:
        for run in group.runs:
            cells = [run[side][name] for side, name in measures]
            ends = [run["method"], run["learning_rate"], run["seed"]]
            writer.writerow([*ends, *cells, run["seconds"], run["sampler_path"]])
    return out.getvalue()


def settings_text(plan: Plan, train: int, sizes: Mapping[str, int]) -> str:
    """The settings that all runs share, and each method's own, in a few lines. train: the number of
    training rows; sizes: of each side's questions."""
    data, retain = Path(plan.data).name, Path(plan.retain).name
    held = f" of {Path(plan.test).name}" if plan.test else f", held out of {data}"
    lines = [
        f"model {plan.model}, renderer {plan.renderer}, LoRA rank {plan.rank}",
        f"{train} rows of {data}: {plan.steps} steps of {plan.batch}, answers of at most "
        f"{plan.max_tokens} tokens",
        f"learned: {sizes['learned']} rows{held}; kept: {sizes['kept']} rows of {retain}",
    ]
    if plan.demonstration != "words":
        lines.append(f"the teacher reads the answer as an earlier {plan.demonstration}")
    if plan.scorer:
        lines.append(f"score: {plan.scorer}")
    for name, settings in plan.methods.items():
        own = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        lines.append(f"{METHODS[name].title}: {METHODS[name].help}{f' ({own})' if own else ''}")
    return "".join(f"- {line}\n" for line in lines)
