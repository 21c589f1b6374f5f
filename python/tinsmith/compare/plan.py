"""A comparison's plan: its settings, as stored in its folder, and which of its runs are complete.

    OUT/settings.json     the settings that all runs share, and each method's own
    OUT/runs/NAME/        a run that is whole: result.json, answers.jsonl, steps.jsonl

A run's folder is renamed to its final name when it is complete, so a folder with that name is
whole. A command that continues in a folder may add methods, learning rates and seeds. Any other
changed setting is refused by name, because the figures would not be comparable.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tinsmith.compare.methods import METHODS, Value

SETTINGS, RESULT, PART = "settings.json", "result.json", "~part"
FILES = ("data", "test", "retain")  # compared by content, not by path
MODEL = "model"  # likewise, in a plan's digests


@dataclass(frozen=True)
class PlannedRun:
    """A training run: a method's name, a learning rate and a seed. The base model has neither."""

    method: str
    learning_rate: float | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        """Its folder's name."""
        if self.learning_rate is None:
            return self.method
        return f"{self.method}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def told(self) -> str:
        """Its name for people."""
        if self.learning_rate is None:
            return "the base model"
        return f"{self.method}, learning rate {self.learning_rate:g}, seed {self.seed}"


BASE = PlannedRun("base")


@dataclass(frozen=True)
class Plan:
    """A comparison's settings. model: its name on the server. test: a file, or None if hold_out
    rows of data are the evaluation questions. steps: of each training. context: the model's, in
    tokens. methods: each one's own settings. digests: of the files, by option. wanted: the methods
    to run now. demonstration: how SDFT's and OPSD's teacher reads the file's answer (prompts.py).
    weights, dtype: how the server stores base weights, and computes."""

    model: str
    data: str
    test: str | None
    retain: str
    hold_out: int | None
    renderer: str
    scorer: str | None
    steps: int
    batch: int
    rank: int
    max_tokens: int
    context: int
    methods: dict[str, dict[str, Value]]
    digests: dict[str, str]
    wanted: list[str] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    seeds: int = 1
    demonstration: str = "words"
    weights: str = "stored"
    dtype: str = "auto"

    def runs(self) -> list[PlannedRun]:
        """All its runs: the base model first, then all runs of a seed, then of the next."""
        made = [
            PlannedRun(method, rate, seed)
            for seed in range(self.seeds)
            for method in self.wanted
            for rate in self.learning_rates
        ]
        return [BASE, *made]


def read_plan(folder: Path) -> Plan:
    """The plan in a folder. ValueError with a sentence if it can't be read."""
    try:
        return Plan(**json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / SETTINGS} is not tinsmith's: {error}") from None


def begin(folder: Path, plan: Plan) -> None:
    """Writes a plan into its folder; the settings of earlier methods there are kept.

    Raises ValueError that names each setting that differs from that of the existing runs.
    """
    missing(folder, plan.runs())  # refuses a folder if something else has a run's name
    if (folder / SETTINGS).exists():
        before = read_plan(folder)
        _refuse_changes(folder, before, plan)
        plan = replace(plan, methods=before.methods | plan.methods)
    write_json(folder / SETTINGS, asdict(plan))


def _refuse_changes(folder: Path, before: Plan, plan: Plan) -> None:
    ran = {result["method"] for result in finished(folder).values()}
    if not ran:
        return
    old, new, changed = asdict(before), asdict(plan), []
    free = {"context", "methods", "digests", "wanted", "learning_rates", "seeds", *FILES}
    for name in sorted(old.keys() - free):
        if old[name] != new[name]:
            changed.append(f"--{name.replace('_', '-')} was {old[name]}, and is {new[name]}")
    for name in FILES:
        if before.digests.get(name) != plan.digests.get(name):
            changed.append(f"--{name} had another content")
    models = {one.digests[MODEL] for one in (before, plan) if MODEL in one.digests}
    if len(models) > 1:
        changed.append(f"the model {plan.model} was another one")
    for method in sorted(ran & before.methods.keys() & plan.methods.keys()):
        for key, value in before.methods[method].items():
            if (now := plan.methods[method].get(key)) != value:
                changed.append(f"{method}.{key} was {value}, and is {now}")
    if changed:
        raise ValueError(
            f"the runs in {folder} have other settings: {'; '.join(changed)}. Choose another "
            "--out, or the settings that they have"
        )


# ---- the folder ----


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the complete runs, by name.

    Raises ValueError with the file's name if a result is damaged.
    """
    found = {}
    for path in sorted((folder / "runs").glob(f"*/{RESULT}")):
        if not path.parent.name.endswith(PART):
            found[path.parent.name] = _read_result(path)
    return found


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError(f"it should be an object; {result!r:.80} came")
        if wrong := [name for name, right in FIELDS.items() if not right(result.get(name))]:
            raise ValueError(f"{wrong[0]} is {result.get(wrong[0])!r:.80}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Remove its folder, and the same command does the run "
            "again"
        ) from None
    return result


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def _are_measures(value: object) -> bool:
    """Whether they are measures of questions, or of plain texts only."""
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        return False
    return {"exact", "logprob"} <= value.keys() or value.keys() == {"text"}


FIELDS: dict[str, Callable[[object], bool]] = {  # of a result; report.py reads them
    "method": lambda value: value in (BASE.method, *METHODS),
    "learning_rate": lambda value: value is None or _is_number(value),
    "seed": lambda value: value is None or type(value) is int,
    "seconds": _is_number,
    "sampler_path": lambda value: value is None or isinstance(value, str),
    "learned": _are_measures,
    "kept": _are_measures,
}


def missing(folder: Path, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs that are not complete yet.

    Raises ValueError if something else has a run's name.
    """
    there = finished(folder)
    left = [run for run in runs if run.name not in there]
    for run in left:
        if os.path.lexists(place := folder / "runs" / run.name):
            raise ValueError(
                f"{place} has no {RESULT}, so it is no run that is whole: move it away, and the "
                "same command does the run"
            )
    return left


@contextlib.contextmanager
def making(folder: Path, run: PlannedRun) -> Iterator[Path]:
    """A new folder for a run's outputs; it gets the run's name on success."""
    place = folder / "runs" / run.name
    part = place.with_name(run.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(place)


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(path.name + PART)
    with part.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks a folder, so that no second command works in it. ValueError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another tinsmith compare works in {folder}") from None
        yield
