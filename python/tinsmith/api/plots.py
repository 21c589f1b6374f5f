"""Results as a notebook shows them: curves drawn by matplotlib, and texts shaded by probability.

Without matplotlib a result is shown as its repr. Every text is escaped: a model may write markup.
"""

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tinsmith.ops import tensors

CURVES_MAX = 8  # sequences whose curves are drawn in one plot
WIDTH, HEIGHT = 4.2, 2.2  # of a plot, in inches
SHADE = 0.75  # of a token with probability 0


def curves(title: str, plots: Mapping[str, Sequence[Any]], x: str) -> str | None:
    """Plots side by side as HTML, below a title. `plots` maps a y axis to arrays (N,). None if
    nothing is a curve, or matplotlib is not installed."""
    rows = {
        name: [tensors.to_floats(one, name) for one in some[:CURVES_MAX]]
        for name, some in plots.items()
    }
    if not all(one.ndim == 1 and one.size > 1 for some in rows.values() for one in some):
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(WIDTH * len(rows), HEIGHT), layout="constrained")
    for axes, (name, some) in zip(
        figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True
    ):
        for one in some:
            axes.plot(range(len(one)), one, linewidth=1)
        axes.set(xlabel=x, ylabel=name)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return f"<pre>{escape(title)}</pre>{svg[svg.index('<svg') :]}"


def shaded(title: str, pieces: Sequence[str], logprobs: Any) -> str:
    """A text as HTML: the less probable a piece, the darker it is. Hovering shows its
    log-probability."""
    numbers = tensors.to_floats(logprobs, "logprobs")
    spans = [
        f'<span title="{number:.2f}" '
        f'style="background:rgba(214,96,77,{SHADE * (1 - math.exp(min(number, 0.0))):.2f})">'
        f"{escape(piece)}</span>"
        for piece, number in zip(pieces, numbers.tolist(), strict=True)
    ]
    text = "".join(spans)
    return f'<pre>{escape(title)}</pre><div style="white-space:pre-wrap">{text}</div>'
