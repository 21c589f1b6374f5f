"""What trainings by several methods and learning rates came to: a table, and what follows from it.

A figure is a share from 0 to 1 of answers that are right: of what was trained (learned), and of
what was known before and not trained (kept). No sentence here is fixed: each is computed from the
figures, whoever they favour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """A training's figures for each skill, by the skills' names: of those it was to learn, and of
    those that were known before."""

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
    """The methods, in the order in which they come."""
    return list(dict.fromkeys(outcome.method for outcome in outcomes))


def of_method(outcomes: Sequence[Outcome], method: str) -> list[Outcome]:
    """A method's outcomes, by their learning rates."""
    mine = [outcome for outcome in outcomes if outcome.method == method]
    return sorted(mine, key=lambda outcome: outcome.learning_rate)


def best(outcomes: Sequence[Outcome], method: str) -> Outcome:
    """A method's outcome at its best learning rate: where the lesser of learned and kept is most,
    since a model is of use only if it does both."""
    mine = of_method(outcomes, method)
    return max(mine, key=lambda one: (min(one.learned, one.kept), one.learned + one.kept))


def verdict(outcomes: Sequence[Outcome], ours: str, other: str) -> list[str]:
    """What the figures say of two methods, a sentence each: at their best learning rates, then over
    all of them.

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
    """Which of two figures is more, in points as they are shown."""
    points = round(100 * mine) - round(100 * theirs)
    if points > 0:
        return f"{ours} kept {points} points more than {other}"
    if points < 0:
        return f"{ours} kept {-points} points less than {other}, so here it does not keep more"
    return f"{ours} kept no more than {other}"


def shown_rate(rate: float) -> str:
    """A learning rate as it is written in recipes.

    shown_rate(0.0003)  # "3e-4"
    """
    digits, _, power = f"{rate:e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def table(columns: Sequence[Outcome]) -> list[list[str]]:
    """The table's cells, its titles first: a column for each outcome, a row for each skill and one
    for the mean of each side. What is no training (learning rate 0) has its method as its title.
    """
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
