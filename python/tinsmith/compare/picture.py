"""The picture of a comparison: learned against kept, with intervals.

Up is learned, right is kept, so the best corner is the upper right one. A large mark is the mean
over the seeds, with Student's 95 % intervals as bars; small marks are the seeds. A method has a
colour, a learning rate a shape; a line connects a method's rates.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.compare.report import Group, measures_of, title
from tinsmith.demo.picture import COLORS

SHAPES = "osv^PX*hdp"  # of learning rates, in order
AXES = {
    "exact": "answers exactly right, %",
    "score": "score",
    "logprob": "log-probability of a token of the answers",
    "text": "log-probability of a token of plain text",
}


def draw(found: Sequence[Group], path: Path) -> None:
    """Writes the picture as a PNG: the main measure of what was learned, against each measure of
    what was kept.

        draw(groups(folder), folder / "compare.png")
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    first, *_ = measures_of(found, "learned")
    kept = measures_of(found, "kept")
    against = list(dict.fromkeys((kept[0], kept[-1])))
    figure, panels = plt.subplots(
        1, len(against), figsize=(5.4 * len(against), 4.6), layout="constrained", squeeze=False
    )
    for axes, measure in zip(panels[0], against, strict=True):
        _panel(axes, found, first, measure)
    marks = [
        Line2D([], [], linestyle="", label=title(method), **_mark(found, method, None))
        for method in dict.fromkeys(group.method for group in found)
    ]
    marks += [
        Line2D([], [], linestyle="", marker=_shape(found, rate), color="0.5", label=f"lr {rate:g}")
        for rate in _rates(found)
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Any, found: Sequence[Group], learned: str, kept: str) -> None:
    """One pair of measures."""
    for method in dict.fromkeys(group.method for group in found):
        groups = [group for group in found if group.method == method]
        points = [_points(group, learned, kept) for group in groups]
        means = [(sum(x) / len(x), sum(y) / len(y)) for x, y in points]
        color = _mark(found, method, None)["color"]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=1, alpha=0.5, zorder=1)
        for group, (x, y), mean in zip(groups, points, means, strict=True):
            half = [
                (group.estimate(side, name).half or 0) * _scale(name)
                for side, name in (("kept", kept), ("learned", learned))
            ]
            mark = _mark(found, method, group.learning_rate) | {"elinewidth": 1.2, "capsize": 3}
            axes.errorbar(*mean, xerr=half[0], yerr=half[1], zorder=3, **mark)
            if len(x) > 1:
                axes.scatter(x, y, s=20, color=color, edgecolors="white", linewidths=0.6, zorder=2)
    axes.set_xlabel(f"kept: {AXES[kept]}")
    axes.set_ylabel(f"learned: {AXES[learned]}")
    axes.margins(0.08)
    axes.locator_params(axis="x", nbins=6)  # so that the numbers do not overlap
    if learned == "exact":
        axes.set_ylim(-4, 104)  # an interval may exceed the range; a share can't
    if kept == "exact":
        axes.set_xlim(-4, 104)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(found: Sequence[Group], method: str, rate: float | None) -> dict[str, Any]:
    """The style of a method's mark. Each is smaller than the one before, so that marks in one place
    show as rings."""
    methods = list(dict.fromkeys(group.method for group in found if group.learning_rate))
    if method not in methods:
        return {"color": "black", "marker": "D", "markersize": 12, "markeredgecolor": "white"}
    place = methods.index(method)
    return {
        "color": COLORS[place],
        "marker": _shape(found, rate),
        "markersize": 14 - 3 * place,
        "markeredgecolor": "white",
    }


def _rates(found: Sequence[Group]) -> list[float]:
    """The learning rates, in order."""
    return sorted({group.learning_rate for group in found if group.learning_rate is not None})


def _shape(found: Sequence[Group], rate: float | None) -> str:
    return SHAPES[_rates(found).index(rate) % len(SHAPES)] if rate is not None else SHAPES[0]


def _points(group: Group, learned: str, kept: str) -> tuple[list[float], list[float]]:
    """Each run's point: kept to the right, learned up."""
    return (
        [value * _scale(kept) for value in group.values("kept", kept)],
        [value * _scale(learned) for value in group.values("learned", learned)],
    )


def _scale(measure: str) -> float:
    return 100 if measure == "exact" else 1
