"""Does the missing runs of a comparison: `python -m tinsmith.compare.runner OUT`.

It only uses the Tinker API: `tinsmith compare` starts it beside a server, as `tinsmith run` starts
a recipe. Its task is in the folder (plan.py).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tinker

from tinsmith.compare.data import Record, hold_out, read_records
from tinsmith.compare.measure import Measured, Scorer, find_scorer, judge, measure
from tinsmith.compare.plan import (
    BASE,
    RESULT,
    Plan,
    PlannedRun,
    making,
    missing,
    read_plan,
    write_json,
)
from tinsmith.compare.prompts import Prompts
from tinsmith.compare.report import SIDES, shown
from tinsmith.compare.training import train

Connect = Callable[[], AbstractContextManager[tinker.ServiceClient]]


@dataclass(frozen=True)
class Bench:
    """What all runs of a comparison share: the plan, prompts, the questions of each side."""

    plan: Plan
    prompts: Prompts
    train: Sequence[Record]
    sides: dict[str, Sequence[Record]]
    scorer: Scorer | None

    def measure(self, sampler: tinker.SamplingClient) -> dict[str, Measured]:
        """Both sides' measures."""
        return {
            side: measure(
                sampler,
                self.prompts,
                records,
                max_tokens=self.plan.max_tokens,
                scorer=self.scorer,
            )
            for side, records in self.sides.items()
        }

    def run(self, service: tinker.ServiceClient, run: PlannedRun, folder: Path) -> dict[str, Any]:
        """Does a run, and writes its outputs into a folder; returns the result."""
        began, trained = time.perf_counter(), None
        if run == BASE:
            sampler = service.create_sampling_client(base_model=self.plan.model).result()
        else:
            trained = train(
                service,
                self.plan,
                run,
                self.prompts,
                self.train,
                partial(judge, self.scorer),
                RunProgress(run, self.plan),
            )
            sampler = trained.sampler
        measured = self.measure(sampler)
        _write_rows(
            folder / "answers.jsonl",
            [{"side": side} | row for side in SIDES for row in measured[side].rows],
        )
        _write_rows(folder / "steps.jsonl", trained.steps if trained else [])
        result = {
            "method": run.method,
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "seconds": round(time.perf_counter() - began, 1),
            "sampler_path": trained.path if trained else None,
        } | {side: measured[side].measures for side in SIDES}
        write_json(folder / RESULT, result)
        return result


class RunProgress:
    """Prints a run's progress, at most every 30 seconds."""

    def __init__(self, run: PlannedRun, plan: Plan):
        self.run, self.steps, self._told = run, plan.steps, time.monotonic()

    def __call__(self, step: int) -> None:
        """`step` steps are done."""
        if time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            print(f"{self.run.told}: step {step} of {self.steps}", flush=True)


def questions(plan: Plan) -> tuple[list[Record], dict[str, Sequence[Record]]]:
    """The training data, and the evaluation questions of each side."""
    train, retain = read_records(Path(plan.data)), read_records(Path(plan.retain), texts=True)
    if plan.test is not None:
        return train, {"learned": read_records(Path(plan.test)), "kept": retain}
    train, test = hold_out(train, plan.hold_out)
    return train, {"learned": test, "kept": retain}


def do(connect: Connect, folder: Path) -> int:
    """Does the missing runs of a folder; returns how many failed. Each has its own session, so that
    the server frees it when it is done."""
    plan = read_plan(folder)
    train_on, sides = questions(plan)
    scorer = find_scorer(plan.scorer) if plan.scorer else None
    prompts = Prompts(plan.model, plan.renderer, plan.demonstration)
    bench, failed = Bench(plan, prompts, train_on, sides, scorer), 0
    todo = missing(folder, plan.runs())
    for number, run in enumerate(todo, 1):
        told = f"[{number}/{len(todo)}] {run.told}"
        try:
            with making(folder, run) as place, connect() as service:
                result = bench.run(service, run, place)
        except (tinker.BadRequestError, tinker.RequestFailedError) as error:
            failed += 1  # for example a loss that is not finite: other runs go on
            print(f"{told} failed: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{told}: {_told(result)}, {result['seconds']:.0f} s", flush=True)
    return failed


def _told(result: dict[str, Any]) -> str:
    """A result in one line."""
    sides = []
    for side in SIDES:
        figures = (f"{name} {shown(name, value)}" for name, value in result[side].items())
        sides.append(f"{side} {', '.join(figures)}")
    return "; ".join(sides)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    """Does the missing runs in the folder from the command line; returns the exit code."""
    try:
        failed = do(tinker.ServiceClient, Path(sys.argv[1]))
        return 1 if failed else 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, tinker.TinkerError) as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
