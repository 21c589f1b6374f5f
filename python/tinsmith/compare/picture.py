"""The picture of a comparison: what was learned against what was kept, with intervals.

Up is learned, right is kept, so the best corner is the upper right one. A large mark is the mean
over the seeds, its bars Student's 95 % intervals, and the small marks are the seeds. A method has a
colour; its learning rates are joined by a line and written beside the marks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.compare.report import Group, measures_of, title

COLORS = ("#2a6f97", "#e9a23b", "#4f9d69", "#a23b72", "#6c757d")
AXES = {
    "exact": "answers exactly right, %",
    "score": "score",
    "logprob": "log-probability of a token of the answers",
}


def draw(found: Sequence[Group], path: Path) -> None:
    """Writes the picture as a PNG: against each measure of what was kept, that which counts for
    what was learned.

        draw(groups(folder), folder / "compare.png")
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, *_ = measures = measures_of(found)
    against = [first, "logprob"] if first != "logprob" else measures
    figure, panels = plt.subplots(
        1, len(against), figsize=(5.4 * len(against), 4.6), layout="constrained", squeeze=False
    )
    for axes, measure in zip(panels[0], against, strict=True):
        _panel(axes, found, first, measure)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Any, found: Sequence[Group], learned: str, kept: str) -> None:
    """One pair of measures."""
    methods = [group.method for group in found if group.learning_rate is not None]
    colors = dict(zip(dict.fromkeys(methods), COLORS, strict=False))
    for method in dict.fromkeys(group.method for group in found):
        groups = [group for group in found if group.method == method]
        points = [_points(group, learned, kept) for group in groups]
        color = colors.get(method, "black")
        means = [(sum(x) / len(x), sum(y) / len(y)) for x, y in points]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=1, alpha=0.5, zorder=1)
        for group, (x, y), mean in zip(groups, points, means, strict=True):
            half = [
                (group.estimate(side, name).half or 0) * _scale(name)
                for side, name in (("kept", kept), ("learned", learned))
            ]
            first = group is groups[0]
            axes.errorbar(
                *mean, xerr=half[0], yerr=half[1], color=color, zorder=3, capsize=3,
                marker="D" if group.learning_rate is None else "o", markersize=8,
                label=title(method) if first else None,
            )  # fmt: skip
            if len(x) > 1:
                axes.scatter(x, y, s=14, color=color, alpha=0.45, linewidths=0, zorder=2)
            if group.learning_rate is not None:
                axes.annotate(
                    f"{group.learning_rate:g}", mean, xytext=(7, 6), textcoords="offset points",
                    fontsize=8, color=color,
                )  # fmt: skip
    axes.set_xlabel(f"kept: {AXES[kept]}")
    axes.set_ylabel(f"learned: {AXES[learned]}")
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _points(group: Group, learned: str, kept: str) -> tuple[list[float], list[float]]:
    """Each run's place: kept to the right, learned up."""
    return (
        [value * _scale(kept) for value in group.values("kept", kept)],
        [value * _scale(learned) for value in group.values("learned", learned)],
    )


def _scale(measure: str) -> float:
    return 100 if measure == "exact" else 1
