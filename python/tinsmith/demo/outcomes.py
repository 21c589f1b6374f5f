"""The results of trainings by several methods and learning rates: a table, and conclusions.

A figure is a share from 0 to 1 of right answers: for what was trained (learned), and for what was
known before and not trained (kept). No conclusion is fixed: each is computed from the figures,
whichever method they favour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """A training's figures for each skill, by name: for the skills to learn, and for those known
    before."""

    method: str
    learning_rate: float
    learned_skills: Mapping[str, float]
    kept_skills: Mapping[str, float]

    @property
    def learned(self) -> float:
        """The mean over the skills to learn."""
        return mean(self.learned_skills)

    @property
    def kept(self) -> float:
        """The mean over the skills known before."""
        return mean(self.kept_skills)


def mean(skills: Mapping[str, float]) -> float:
    """The mean of the skills' figures.

    mean({"time": 1.0, "alarm": 0.5})  # 0.75
    """
    return sum(skills.values()) / len(skills)


def methods(outcomes: Sequence[Outcome]) -> list[str]:
    """The methods, in order of first appearance."""
    return list(dict.fromkeys(outcome.method for outcome in outcomes))


def of_method(outcomes: Sequence[Outcome], method: str) -> list[Outcome]:
    """A method's outcomes, by learning rate."""
    mine = [outcome for outcome in outcomes if outcome.method == method]
    return sorted(mine, key=lambda outcome: outcome.learning_rate)


def best(outcomes: Sequence[Outcome], method: str) -> Outcome:
    """A method's outcome at its best learning rate: the one with the largest minimum of learned and
    kept, because a useful model does both."""
    mine = of_method(outcomes, method)
    return max(mine, key=lambda one: (min(one.learned, one.kept), one.learned + one.kept))


def verdict(outcomes: Sequence[Outcome], ours: str, other: str) -> list[str]:
    """Conclusions about two methods, a sentence each: at their best learning rates, then over all.

    verdict(found, "SDFT", "SFT")
    """
    mine, theirs = best(outcomes, ours), best(outcomes, other)
    at_best = [
        f"{one.method} (learning rate {shown_rate(one.learning_rate)}) learned "
        f"{one.learned:.0%} and kept {one.kept:.0%}"
        for one in (mine, theirs)
    ]
    least = {
        method: min(outcome.kept for outcome in of_method(outcomes, method))
        for method in (ours, other)
    }
    return [
        f"Each at its best rate, {' and '.join(at_best)}: "
        f"{_more(ours, other, mine.kept, theirs.kept)}.",
        f"Over all rates, {ours} kept at least {least[ours]:.0%} and {other} {least[other]:.0%}: "
        f"{_more(ours, other, least[ours], least[other])}.",
    ]


def _more(ours: str, other: str, mine: float, theirs: float) -> str:
    """Which of two figures is larger, and by how many displayed points."""
    points = round(100 * mine) - round(100 * theirs)
    if points > 0:
        return f"{ours} kept {points} points more than {other}"
    if points < 0:
        return f"{ours} kept {-points} points less than {other}, so here it does not keep more"
    return f"{ours} kept no more than {other}"


def shown_rate(rate: float) -> str:
    """A learning rate as recipes write it.

    shown_rate(0.0003)  # "3e-4"
    """
    digits, _, power = f"{rate:e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def table(columns: Sequence[Outcome]) -> list[list[str]]:
    """The table's cells, titles first: a column for each outcome, a row for each skill and one for
    each side's mean. An outcome without training (learning rate 0) has its method as title."""
    first = columns[0]
    titles = [
        f"{one.method}\n{shown_rate(one.learning_rate)}" if one.learning_rate else one.method
        for one in columns
    ]
    rows = [["", *titles]]
    for skill in first.learned_skills:
        rows.append([skill, *(f"{one.learned_skills[skill]:.0%}" for one in columns)])
    rows.append(["learned", *(f"{one.learned:.0%}" for one in columns)])
    for skill in first.kept_skills:
        rows.append([skill, *(f"{one.kept_skills[skill]:.0%}" for one in columns)])
    rows.append(["kept", *(f"{one.kept:.0%}" for one in columns)])
    return rows
