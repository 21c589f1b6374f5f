"""`tinsmith demo --images`: a small model with a vision tower learns five classes of clothes from
real pictures, by LoRA on its text layers.

The model in the package is a tiny Qwen3.5 that can name five other classes (make_seeing_model.py).
Its tower stays as it is. Two controls show that the answers come from the pictures: the same
training with the pictures shuffled among the names, and the trained model's answers, dealt out
among the held-out pictures. What it answers to pictures of the classes that it knew is measured
too. All draws come from one seed, so the figures are reproducible.
"""

import argparse
import random
import time
from collections.abc import Sequence
from importlib import import_module

from tinsmith.demo import fashion
from tinsmith.demo.classroom import BATCH, MODEL, Answers, Classroom, Lesson
from tinsmith.demo.fashion import KNOWN, NEW, TEST, TRAIN
from tinsmith.demo.seeing_picture import draw
from tinsmith.system.install_hints import pip_install


def run(options: argparse.Namespace) -> None:
    """Runs the demonstration."""
    require_packages()
    import tinsmith

    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tinsmith.Model(MODEL, device=options.device, threads=options.threads) as model:
        room = Classroom(model, fashion.read(TRAIN), fashion.read(TEST))
        print_beginning(room, options)
        before = room.ask(None, fashion.NAMES)
        names, [rate] = room.train.names, options.lr
        shuffled = random.Random(f"shuffled-{options.seed}").sample(names, len(names))
        lesson, control = (
            room.teach(given, options.steps, rate, options.seed) for given in (names, shuffled)
        )
        difference = room.difference(lesson.adapter, options.seed)
    for line in report(before, lesson, control, difference, options.seed):
        print(line)
    draw(room.test, before, lesson, control, out / "images.png")
    print(f"Trained and measured in {time.perf_counter() - start:.0f} s.")
    print(f"The picture is {out / 'images.png'}.")


def require_packages() -> None:
    """Raises ImportError with the fix if the demonstration's packages are not installed."""
    try:
        for name in ("PIL", "tokenizers", "matplotlib"):  # the last one needs the first
            import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the demo needs {error.name}: {pip_install('images,notebook')}", name=error.name
        ) from None


# ---- showing ----


def print_beginning(room: Classroom, options: argparse.Namespace) -> None:
    """What the model is, and what it is about to learn."""
    print(
        "The model was made for this demonstration: a Qwen3.5 of a million parameters. It was "
        f"trained to name pictures of {_listed(KNOWN)}. Of {_listed(NEW)} it can spell the names, "
        "and has seen no picture."
    )
    print(
        f"It learns these from {len(room.train)} real pictures (Fashion-MNIST), by LoRA on its "
        f"text layers: {options.steps} steps of {BATCH}, and again with the pictures shuffled."
    )


def report(
    before: Answers, lesson: Lesson, control: Lesson, difference: tuple[float, int], seed: int
) -> list[str]:
    """The figures, a line each."""
    columns = (before, lesson.answers, control.answers)
    lines = ["", f"{'held-out pictures named right':32}before  trained  shuffled"]
    rows: list[tuple[str, tuple[str, ...]]] = [(name, (name,)) for name in NEW]
    rows += [("the new classes", NEW), ("the classes it knew", KNOWN)]
    for title, classes in rows:
        shares = [f"{one.share(classes):.0%}" for one in columns]
        lines.append("{:32}{:>6}{:>9}{:>10}".format(title, *shares))
    dealt = lesson.answers.dealt(seed).share(NEW)
    most, count = difference
    first, *others = lesson.seen
    return [
        *lines,
        "",
        "shuffled: trained in the same way, with the pictures shuffled among the names. Guessing "
        f"is {1 / len(NEW):.0%}.",
        f"The trained model's answers, dealt out among all held-out pictures: {dealt:.0%}.",
        f"Loss, nats a picture: {lesson.losses[0]:.2f} to {lesson.losses[-1]:.2f}; shuffled "
        f"{control.losses[0]:.2f} to {control.losses[-1]:.2f}.",
        f"Sampler less trainer, behind a picture: at most {most} nats over {count} tokens.",
        f"Pictures through the vision tower: {first} in the first epoch, {sum(others)} in the "
        f"{len(others)} others.",
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
