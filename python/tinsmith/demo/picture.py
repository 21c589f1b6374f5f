"""The picture of learned and kept over learning rates: a panel of equal size for each measure.

A method has the same colour in all panels. A thick line with dots is the measure over the learning
rates; thin lines are its parts (each skill's). A dashed line is the model before training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.demo.outcomes import shown_rate

COLORS = ("#2a6f97", "#e9a23b", "#4f9d69", "#a23b72")
THIN = {"linewidth": 0.8, "alpha": 0.45}
Curve = Mapping[float, float]  # a figure at each learning rate


@dataclass(frozen=True)
class Panel:
    """A measure: its title, its axis, its value before training, and each method's curve.

    parts: the curves whose mean is the method's, drawn thin. limits: of the axis, if they are
    known, such as (0, 100) for percent.
    """

    title: str
    axis: str
    before: float
    curves: Mapping[str, Curve]
    parts: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    limits: tuple[float, float] | None = None


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Writes the picture as a PNG.

    draw([Panel("learned", "right, %", 0.0, {"SDFT": {1e-4: 61.0, 1e-3: 97.0}})], folder / "a.png")
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names = list(panels[0].curves)
    figure, row = plt.subplots(
        1, len(panels), figsize=(5.4 * len(panels), 4.4), layout="constrained", squeeze=False
    )
    for axes, panel in zip(row[0], panels, strict=True):
        _panel(axes, panel, names)
    handles, labels = row[0][0].get_legend_handles_labels()
    if any(panel.parts for panel in panels):
        handles.append(Line2D([], [], color="black", **THIN))
        labels.append("each skill")
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Any, panel: Panel, names: Sequence[str]) -> None:
    """One measure over the learning rates. Later methods have smaller dots, so that all are visible
    where curves meet."""
    axes.axhline(panel.before, color="0.45", linestyle="--", linewidth=1.2, label="before")
    rates: set[float] = set()
    for place, name in enumerate(names):
        color = COLORS[place % len(COLORS)]
        for part in panel.parts.get(name, ()):
            axes.plot(*_line(part), color=color, **THIN)
        marks = {"marker": "o", "markersize": 11 - 3 * place, "markeredgecolor": "white"}
        axes.plot(*_line(panel.curves[name]), color=color, linewidth=2.4, label=name, **marks)
        rates |= set(panel.curves[name])
    axes.set_xscale("log")
    axes.set_xticks(sorted(rates), [shown_rate(rate) for rate in sorted(rates)])
    axes.minorticks_off()
    if panel.limits is not None:
        room = 0.04 * (panel.limits[1] - panel.limits[0])
        axes.set_ylim(panel.limits[0] - room, panel.limits[1] + room)
    axes.set_title(panel.title)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(panel.axis)
    axes.spines[["top", "right"]].set_visible(False)


def _line(curve: Curve) -> tuple[list[float], list[float]]:
    """A curve's points, by learning rate."""
    rates = sorted(curve)
    return rates, [curve[rate] for rate in rates]
