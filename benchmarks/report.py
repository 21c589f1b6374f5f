"""The tables of a benchmark: its header, rows in Markdown as they are measured, and a plot of them.

    with Report(args, __doc__) as report:
        table = report.table("Decoding", "batch", {args.unit: ".2f", f"tokens/{args.unit}": ".1f"})
        table.add("8", {"tinsmith": (1.2, 427.0), "HF": (4.1, 125.0)}, report.floor(flops=9e10))

A case has a row for each side, the first one ours. The first column is what counts, less of it
being better: the ratio is a side's figure over ours, and % of roofline is the least time in which
the case's flops or bytes can be done over the side's. With --plot the tables are drawn when the
report ends: bars, or curves where the cases are numbers; `plot` names the column to draw, and the
ratio is drawn where none is named."""

import argparse
import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

RATIO, ROOFLINE = "ratio", "% of roofline"
OURS, OTHERS = "#c2410c", ("#3b6ea5", "#7fa7c9", "#8a8f98", "#5f8f6b", "#b9a44c")
NARROW = 12  # characters of a column that is filled up, so that the rows stand under one another


@dataclass(frozen=True)
class Floor:
    """The least time that a case can take, in the first column's unit, and what bounds it."""

    time: float
    bound: str  # "compute" or "memory"


@dataclass
class Table:
    """One table of a report."""

    title: str
    case: str  # what the first column's values are: "batch", "tokens"
    columns: dict[str, str]  # name with its unit -> format of the number
    roofline: bool
    plot: str
    cases: list[tuple[str | float, dict[str, Sequence[float]], Floor | None]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        names = [self.case, "side", *self.columns, RATIO, *([ROOFLINE] if self.roofline else [])]
        print(f"\n## {self.title}\n")
        print(_row(names))
        print("|" + "---|" * len(names), flush=True)

    def add(
        self,
        case: str | float,
        sides: dict[str, Sequence[float] | float],
        floor: Floor | None = None,
    ) -> None:
        """Prints a case: for each side a figure for each column, NaN where it has none."""
        figures = {
            name: tuple(values) if isinstance(values, Sequence) else (values,)
            for name, values in sides.items()
        }
        self.cases.append((case, figures, floor))
        for number, (name, values) in enumerate(figures.items()):
            cells = [format(case) if number == 0 else "", name]
            cells += [_number(v, f) for v, f in zip(values, self.columns.values(), strict=True)]
            cells.append(_number(self.ratio(len(self.cases) - 1, name), ".2f"))
            if self.roofline:
                known = floor and not math.isnan(values[0])
                cells.append(f"{100 * floor.time / values[0]:.0f} {floor.bound}" if known else "–")
            print(_row(cells), flush=True)

    def ratio(self, index: int, side: str) -> float:
        """How many times ours a side's figure of the first column is."""
        figures = self.cases[index][1]
        ours = next(iter(figures.values()))[0]
        return figures[side][0] / ours if ours else math.nan

    @property
    def sides(self) -> list[str]:
        """Every side's name, in the order in which they came."""
        return list(dict.fromkeys(name for _, figures, _ in self.cases for name in figures))

    @property
    def curves(self) -> bool:
        """Whether the cases are numbers, of which there are enough for a curve."""
        return len(self.cases) > 2 and all(isinstance(case, int | float) for case, *_ in self.cases)

    def drawn(self, index: int, side: str) -> float:
        """What is drawn of a case's side: the named column, or the ratio; NaN where it is not."""
        figures = self.cases[index][1]
        if side not in figures:
            return math.nan
        if self.plot == RATIO:
            return self.ratio(index, side)
        return figures[side][list(self.columns).index(self.plot)]

    def limit(self, index: int) -> float:
        """Where the roofline lies in what is drawn; NaN where it does not."""
        figures, floor = self.cases[index][1:]
        ours = next(iter(figures))
        seconds = figures[ours][0]
        if not floor:
            return math.nan
        if self.plot == RATIO or self.plot == next(iter(self.columns)):
            return self.drawn(index, ours) * floor.time / seconds
        return self.drawn(index, ours) * seconds / floor.time  # a rate


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(f"{cell:<{NARROW}}" for cell in cells) + " |"


def _number(value: float, how: str) -> str:
    return "–" if math.isnan(value) else format(value, how)


class Report:
    """A run's header and tables; a context manager."""

    def __init__(self, args: argparse.Namespace, doc: str, roofline: bool = True) -> None:
        self.args, self.tables, self.drawn = args, list[Table](), list[str]()
        self.title = doc.splitlines()[0].rstrip(".")
        self.machine = machine.describe()
        cores = args.threads if args.clock == "wall" else 1  # CPU seconds are those of one core
        found = machine.measure(cores) if roofline else ""
        self.roofline = found if isinstance(found, machine.Roofline) else None
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        print(f"# {self.title}\n\n    python benchmarks/{shlex.join(command)}\n")
        lines = [self.machine, str(found), f"{args.said[0].upper()}{args.said[1:]}"]
        self.note("\n".join(line for line in lines if line))

    def note(self, text: str, drawn: bool = False) -> None:
        """A line of the report that is no table's; it may stand in the plot too."""
        print(text, flush=True)
        if drawn:
            self.drawn.append(text)

    def table(self, title: str, case: str, columns: dict[str, str], plot: str = RATIO) -> Table:
        """Begins a table."""
        self.tables.append(Table(title, case, columns, self.roofline is not None, plot))
        return self.tables[-1]

    def floor(
        self, *, flops: float = 0, bytes: float = 0, dtype: str = "f32", scale: float = 1
    ) -> Floor | None:
        """The least time for so many flops, of products in f32 or bf16, and bytes read from memory,
        in seconds times `scale` (1e3: ms); None without a roofline. A product with a bf16 weight
        may be computed in f32 too."""
        if not self.roofline:
            return None
        most = {"f32": self.roofline.flops["f32"], "bf16": max(self.roofline.flops.values())}
        compute, memory = flops / most[dtype], bytes / self.roofline.bytes
        return Floor(scale * max(compute, memory), "compute" if compute >= memory else "memory")

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.args.plot and kind is None:
            draw(self, self.args.plot)


# ---- plots ----


def draw(report: Report, file: Path) -> None:
    """Writes the report's tables as one SVG, a panel each."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {"font.size": 9, "font.family": "sans-serif", "svg.fonttype": "none"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}
    tables = [table for table in report.tables if table.cases]
    sides = dict.fromkeys(side for table in tables for side in table.sides)
    colours = dict(zip(sides, itertools.chain([OURS], itertools.cycle(OTHERS)), strict=False))
    heights = [3.2 if table.curves else 0.6 + 0.21 * _bars(table) for table in tables]
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(
            len(tables), 1, figsize=(8.5, sum(heights) + 0.95 * len(tables) + 0.8), squeeze=False,
            height_ratios=heights, layout="constrained",
        )  # fmt: skip
        figure.suptitle(report.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axis, table in zip(axes[:, 0], tables, strict=True):
            axis.set_title(table.title, loc="left", pad=6 if table.curves else 20)
            (_curves if table.curves else _bars_of)(axis, table, colours)
        *parts, date = (part.strip() for part in report.machine.split(";"))
        parts += [*report.drawn, f"{date}, {report.args.said}"]
        figure.supxlabel("\n".join(parts), x=0.01, ha="left", fontsize=7, color="#666666")
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": report.title})
        plt.close(figure)
    report.note(f"\nPlot: {file}")


def _bars(table: Table) -> int:
    """Bars of a table, and gaps between its cases."""
    return sum(len(figures) + 1 for _, figures, _ in table.cases)


def _unit(table: Table) -> str:
    """What the drawn figure is."""
    first = next(iter(table.columns))
    return f"{first}, times tinsmith's (less is better)" if table.plot == RATIO else table.plot


def _bars_of(axis: Any, table: Table, colours: dict[str, str]) -> None:
    """Horizontal bars, grouped by case, each with its figure; a tick where the roofline lies."""
    place, ticks, seen = 0.0, [], set[str]()
    first_format = next(iter(table.columns.values()))
    for index, (case, figures, _) in enumerate(table.cases):
        limit, begin = table.limit(index), place
        for side, values in figures.items():
            length = table.drawn(index, side)
            label = side if side not in seen else None
            seen.add(side)
            axis.barh(-place, length, height=0.86, color=colours[side], label=label)
            if table.plot == RATIO:
                unit = next(iter(table.columns))
                text = f"{_number(length, '.2f')}×  ({_number(values[0], first_format)} {unit})"
            else:
                text = _number(length, table.columns[table.plot])
            axis.annotate(
                text, (length, -place), (4, 0), textcoords="offset points", va="center",
                fontsize=8, zorder=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
            place += 1
        if not math.isnan(limit):
            known = "roofline" not in seen
            seen.add("roofline")
            axis.vlines(
                limit, 0.5 - place, 0.5 - begin, color="black", linewidth=1.2,
                linestyle=(0, (2, 1)), label="roofline" if known else None,
            )  # fmt: skip
        ticks.append((-(begin + place - 1) / 2, format(case)))
        place += 0.7
    axis.set_yticks([at for at, _ in ticks], [f"{name}" for _, name in ticks])
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.22, y=0.02)
    axis.set_xlim(left=0)
    axis.set_xlabel(_unit(table))
    axis.set_ylabel(table.case)
    axis.legend(
        frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=6,
        borderaxespad=0, borderpad=0.2, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip


def _curves(axis: Any, table: Table, colours: dict[str, str]) -> None:
    """A curve a side over the cases, with its name at its end."""
    xs = [float(case) for case, *_ in table.cases]
    for side in table.sides:
        ys = [table.drawn(index, side) for index in range(len(xs))]
        axis.plot(xs, ys, color=colours[side], marker="o", markersize=4, label=side)
        last = max((n for n, y in enumerate(ys) if not math.isnan(y)), default=None)
        if last is not None:
            axis.annotate(
                side, (xs[last], ys[last]), (6, 0), textcoords="offset points", va="center",
                color=colours[side],
            )  # fmt: skip
    limits = [table.limit(index) for index in range(len(xs))]
    if not all(map(math.isnan, limits)):
        axis.plot(xs, limits, color="black", linewidth=1, linestyle=(0, (2, 1)))
    if min(xs) > 0 and max(xs) / min(xs) > 6:
        axis.set_xscale("log", base=2)
    axis.set_xticks(xs, [format(case) for case, *_ in table.cases])
    axis.minorticks_off()
    axis.margins(x=0.12)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(table.case)
    axis.set_ylabel(_unit(table))
