"""The picture of `tinsmith demo --images`: held-out pictures with the answers before and after, and
the curves of both trainings.

The pictures are the first of each class in the test set, whatever was said of them. A right answer
is green, a wrong one red.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.demo.classroom import Answers, Lesson
from tinsmith.demo.fashion import KNOWN, NEW, Pictures
from tinsmith.demo.picture import COLORS

SHOWN = {**dict.fromkeys(NEW, 3), **dict.fromkeys(KNOWN, 1)}  # of each class
COLUMNS, ROWS = 5, 4
RIGHT, WRONG = "#2e7d32", "#b3261e"


def draw(test: Pictures, before: Answers, lesson: Lesson, control: Lesson, path: Path) -> None:
    """Writes the picture as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 7.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.45, 1))
    _answers(left, test, before, lesson.answers)
    top, bottom = right.subplots(2, 1)
    _curves(top, bottom, lesson, control, before)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def shown(test: Pictures) -> list[int]:
    """The places of the pictures that are shown: class by class."""
    names = np.array(test.names)
    by_class = [np.flatnonzero(names == name)[:count] for name, count in SHOWN.items()]
    rows = [[places[row] for places in by_class[: len(NEW)]] for row in range(SHOWN[NEW[0]])]
    rows.append([places[0] for places in by_class[len(NEW) :]])
    return [int(place) for row in rows for place in row]


def _answers(figure: Any, test: Pictures, before: Answers, after: Answers) -> None:
    """The pictures with what was said."""
    figure.suptitle("Held-out pictures: the answer before and after. Last row: classes it knew")
    places = shown(test)
    for axes, place in zip(figure.subplots(ROWS, COLUMNS).flat, places, strict=True):
        axes.imshow(255 - test.pixels[place], cmap="gray", vmin=0, vmax=255)
        axes.set_xticks([])
        axes.set_yticks([])
        name = test.names[place]
        axes.set_title(before.said[place][:18] or "–", fontsize=10, **_colour(before, place))
        axes.set_xlabel(after.said[place][:18] or "–", fontsize=10, **_colour(after, place))
        axes.set_ylabel(name, fontsize=8, color="0.45")


def _colour(answers: Answers, place: int) -> dict[str, str]:
    return {"color": RIGHT if answers.said[place] == answers.names[place] else WRONG}


def _curves(top: Any, bottom: Any, lesson: Lesson, control: Lesson, before: Answers) -> None:
    """The shares of right answers over the epochs, and the losses over the steps."""
    for one, label, color in (
        (lesson, "trained", COLORS[0]),
        (control, "pictures shuffled", COLORS[1]),
    ):
        top.plot([100 * share for share in one.shares], color=color, marker="o", label=label)
        bottom.plot(one.losses, color=color, label=label)
    guessing = {"color": "0.45", "linestyle": "--", "linewidth": 1.2, "label": "guessing"}
    top.axhline(100 / len(NEW), **guessing)
    bottom.axhline(math.log(len(NEW)), **guessing)  # of who knows the names, not whose they are
    top.set_title("Held-out pictures of the new classes named right")
    top.set_xlabel("epoch")
    top.set_ylabel("%")
    top.set_ylim(-4, 104)
    top.set_xticks(range(len(lesson.shares)))
    bottom.set_title("Loss of a step")
    bottom.set_xlabel("step")
    bottom.set_ylabel("nats a picture")
    bottom.set_yscale("log")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
