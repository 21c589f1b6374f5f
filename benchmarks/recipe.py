"""The cookbook's SDFT recipe, unmodified, on a server of ours: where a step's seconds go.

    python benchmarks/recipe.py --plot recipe.svg
    python benchmarks/recipe.py --shape 0.6b --groups 4 --max-tokens 48 --rounds 2

The server runs in this process, and each call of the engine is clocked here, on the thread that
makes it: its wall time, and the CPU time of that thread and of the engine's own. The recipe runs in
a process of its own on the same cores, with the SDK as users have it, and says when each of its
spans has ended, and how much CPU time both processes had used by then. So a phase has the engine's
CPU and wall time, the rest of the server's and the client's CPU time, and all of them; "all" is 1
over the engine's share. Phases follow one another; what the recipe does between two spans counts to
the second.

A round is a step of the recipe; one more, the first, is left out: it loads what later ones find
loaded. With --group-size, --epochs and --document prompts begin alike, as those of real tools do;
the last line says how much of them was found in the cache. Shapes other than demo have random
weights, with the demo model's tokenizer, filled up with words that no text has.

Half a minute with the demo model."""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tinsmith
from peers import SHAPES, checkpoint, hf_model, parse, parser
from report import Report
from tinsmith import _core, launch
from tinsmith.demo import data, demo, trainings
from tinsmith.engine import decoding, runs

CLIENT = "TINSMITH_RECIPE_CLIENT"  # in the recipe's environment: the file that it tells its spans
PHASES = {  # the recipe's spans whose ends are the phases'
    "sample": "rollout",
    "assemble_training_data": "its data",
    "build_topk_distillation_datums": "teacher's top K, datums",
    "train": "forward_backward, optim_step",
    "save_checkpoint": "snapshot",
}
SIDES = ("engine", "the server's rest", "client", "all")


# ---- the client's side ----


def process_clock(pid: int) -> int:
    """The number of a process's CPU clock, as clock_gettime takes it."""
    return (~pid << 3) | 2


def run_client(arguments: Sequence[str]) -> None:
    """The recipe; each end of a span is a line of the file: name, time, CPU times of both."""
    from tinker_cookbook.utils import trace

    server = process_clock(os.getppid())
    record = trace.IterationWindow.record_span

    def record_span(window: Any, name: str, start: float, end: float) -> None:
        if name in PHASES:
            times = end, time.process_time(), time.clock_gettime(server)
            print(json.dumps([name, *times]), file=file, flush=True)
        record(window, name, start, end)

    trace.IterationWindow.record_span = record_span
    with Path(os.environ[CLIENT]).open("w") as file:
        launch.launch(["-m", *arguments])


# ---- the server's side ----


@dataclass(frozen=True)
class Call:
    """One call of the engine."""

    kind: str
    start: float  # perf_counter, which is one clock for all processes
    wall: float
    cpu: float


def tasks() -> set[int]:
    """This process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


class Meter:
    """All calls of the engine, and what the samplers were asked for and found."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.samplers: list[Any] = []
        self.prompt_tokens = 0
        self._before = tasks()
        self._pool: list[int] | None = None

    def cpu(self) -> float:
        """CPU seconds of this thread and of the engine's own."""
        if self._pool is None:
            known = {thread.native_id for thread in threading.enumerate()}
            self._pool = [~tid << 3 | 6 for tid in sorted(tasks() - known - self._before)]
        return time.thread_time() + sum(map(time.clock_gettime, self._pool))

    def run(self, kind: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Calls the engine."""
        cpu, start = self.cpu(), time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            wall = time.perf_counter() - start
            self.calls.append(Call(kind, start, wall, self.cpu() - cpu))


class Metered:
    """Stands for one of the engine's objects."""

    def __init__(self, meter: Meter, target: Any):
        vars(self).update(_meter=meter, _target=target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **named: Any) -> Any:
            if name == "add":
                self._meter.prompt_tokens += len(args[1])
            return self._meter.run(name, value, *args, **named)

        vars(self)[name] = call
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


@contextmanager
def attached(meter: Meter) -> Iterator[None]:
    """A meter between the server and the engine."""
    trained, core = runs.Run.trained, decoding._core

    def sampler(*args: Any, **named: Any) -> Metered:
        meter.samplers.append(_core.Sampler(*args, **named))
        return Metered(meter, meter.samplers[-1])

    runs.Run.trained = lambda run: Metered(meter, trained(run))  # type: ignore
    decoding._core = SimpleNamespace(Sampler=sampler, Adapter=_core.Adapter)  # type: ignore
    try:
        yield
    finally:
        runs.Run.trained, decoding._core = trained, core  # type: ignore[method-assign]


# ---- the model ----


@contextmanager
def model_of(shape: str, dtype: str) -> Iterator[Path]:
    """The folder of a model with the demo model's tokenizer."""
    if shape == "demo":
        yield demo.MODEL
        return
    model = hf_model(shape, dtype)
    with checkpoint(model) as folder:
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo.MODEL / file, folder / file)
        fill_tokenizer(folder / "tokenizer.json", model.config.vocab_size)
        del model
        yield folder


def fill_tokenizer(file: Path, size: int) -> None:
    """Adds words that no text has, so that every id of the model is a token."""
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"\ue000{i}": i for i in range(size) if i not in taken})
    file.write_text(json.dumps(tokenizer))


# ---- the run ----


def questions_of(options: argparse.Namespace, steps: int) -> dict[str, list[str]]:
    """The data set's columns: each question as often as there are epochs (the recipe shuffles),
    behind a document of its own, as the description of a tool is."""
    count = data.rows_for_steps(steps, options.groups)
    columns = data.dataset_columns(data.sdft_examples(-(-count // options.epochs), 0))
    draw = random.Random(0)
    words = sorted({word for text in columns["prompt"] for word in text.split()})
    columns["prompt"] = [
        " ".join([*draw.choices(words, k=options.document), text]) for text in columns["prompt"]
    ]
    return {name: options.epochs * column for name, column in columns.items()}


def run(options: argparse.Namespace, folder: Path, model: Path) -> float:
    """Serves the model and runs the recipe to its end; how long the server took to start."""
    steps = options.rounds + 1
    import datasets

    datasets.disable_progress_bars()
    questions = datasets.Dataset.from_dict(questions_of(options, steps))
    questions.save_to_disk(str(folder / "questions"))
    arguments = [
        "tinker_cookbook.recipes.sdft.train", "dataset=toolalpaca",
        f"toolalpaca_data_path={folder / 'questions'}", "topk=20", f"model_name={model}",
        f"renderer_name={demo.RENDERER}", f"groups_per_batch={options.groups}",
        f"group_size={options.group_size}", f"max_tokens={options.max_tokens}",
        f"lora_rank={options.rank}", "learning_rate=1e-3",
        f"max_steps={steps}", "eval_every=0", "save_every=0", f"log_path={folder / 'log'}",
        "behavior_if_log_dir_exists=delete",
    ]  # fmt: skip
    start = time.perf_counter()
    with tinsmith.serve(
        model, checkpoints=folder / "saved", threads=options.threads, seed=0, device="cpu"
    ) as backend:
        started = time.perf_counter() - start
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_BASE_URL": backend.url,
            "TINKER_API_KEY": "tml-local",
            "PYTHONWARNINGS": "ignore",
            CLIENT: str(folder / "spans"),
        }
        with (folder / "output").open("w") as output:
            code = subprocess.call(
                [sys.executable, __file__, *arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if code:
            raise RuntimeError((folder / "output").read_text()[-3000:])
    return started


# ---- the figures ----

Row = dict[str, dict[str, float]]  # side -> clock -> ms


def phases(spans: list[list[Any]], meter: Meter) -> list[dict[str, Row]]:
    """Of each step but the first, the figures of its phases."""
    steps: list[dict[str, Row]] = []
    step: dict[str, Row] = {}
    for before, span in pairwise(spans):
        name, end, client, server = span
        calls = [call for call in meter.calls if before[1] <= call.start < end]
        engine = sum(call.cpu for call in calls)
        cpu = [engine, server - before[3] - engine, client - before[2]]
        wall = [sum(call.wall for call in calls), math.nan, math.nan, end - before[1]]
        row = step.setdefault(PHASES[name], {side: {"cpu": 0, "wall": 0} for side in SIDES})
        for side, used, passed in zip(SIDES, [*cpu, sum(cpu)], wall, strict=True):
            row[side]["cpu"] += 1e3 * used
            row[side]["wall"] += 1e3 * passed
        if name == "save_checkpoint":
            steps.append(step)
            step = {}
    for step in steps:
        step["a step"] = {side: sum_of(row[side] for row in step.values()) for side in SIDES}
    return steps[1:]


def sum_of(figures: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sum by each clock."""
    found = list(figures)
    return {clock: sum(each[clock] for each in found) for clock in ("cpu", "wall")}


def show(report: Report, steps: list[dict[str, Row]], meter: Meter) -> None:
    """The tables of a step's phases and of the engine's calls."""
    args = report.args
    setting = f"{args.groups}×{args.group_size} answers of {args.max_tokens} tokens"
    if args.document:
        setting += f", {args.document} words before a question"
    if args.epochs > 1:
        setting += f", {args.epochs} epochs"
    formats = {"cpu": "cpu-ms", "wall": "wall ms"}
    clocks = sorted(formats, reverse=args.clock == "wall")
    columns = {formats[clock]: ".1f" for clock in clocks}
    title = f"A step of SDFT, {args.shape}, {setting}, rank {args.rank}"
    table = report.table(title, "phase", columns, plot=formats[args.clock])
    for phase in steps[0]:
        table.add(
            phase,
            {
                side: [
                    statistics.median(step[phase][side][clock] for step in steps)
                    for clock in clocks
                ]
                for side in SIDES
            },
        )
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in meter.calls:
        kinds[call.kind].append(call)
    columns = {"s in all": ".3f", "calls": ".0f", "ms each": ".3f"}
    table = report.table("Calls of the engine, wall time", "call", columns, plot="s in all")
    for kind, calls in kinds.items():
        wall = [call.wall for call in calls]
        table.add(kind, {"engine": (sum(wall), len(wall), 1e3 * statistics.median(wall))})
    minute = statistics.median(6e4 / step["a step"]["all"]["wall"] for step in steps)
    reused = sum(sampler.reused for sampler in meter.samplers)
    report.note(
        f"\n{minute:.1f} steps a minute; of {meter.prompt_tokens} tokens of prompts {reused} were "
        f"found in the cache ({100 * reused / meter.prompt_tokens:.0f} %)"
    )


def main() -> None:
    """Runs the recipe and prints where its time went."""
    options = parser(__doc__, rounds=7, dtype="bf16")
    add = options.add_argument
    add("--shape", choices=("demo", *SHAPES), default="demo", help="demo if not given")
    add("--groups", type=int, default=trainings.BATCH, help="questions in a step")
    add("--group-size", type=int, default=1, help="answers to a question")
    add("--max-tokens", type=int, default=trainings.MAX_TOKENS)
    add("--epochs", type=int, default=1, help="times that each question comes")
    add("--document", type=int, default=0, metavar="WORDS", help="before each question")
    add("--rank", type=int, default=trainings.RANK)
    args = parse(options)
    meter = Meter()
    with Report(args, __doc__, roofline=False) as report, attached(meter):
        with tempfile.TemporaryDirectory() as name, model_of(args.shape, args.dtype) as model:
            folder = Path(name)
            started = run(args, folder, model)
            spans = [json.loads(line) for line in (folder / "spans").read_text().splitlines()]
        report.note(f"The server was ready after {started:.2f} s")
        show(report, phases(spans, meter), meter)


if __name__ == "__main__":
    if CLIENT in os.environ:
        run_client(sys.argv[1:])
    else:
        main()
