"""The cookbook's SDFT recipe, unmodified, on a server of ours: where a step's seconds go.

    python benchmarks/recipe.py --shape demo --steps 8
    python benchmarks/recipe.py --shape 0.6b --groups 4 --max-tokens 48 --steps 3

The server runs in this process, and each call of the engine is clocked here, on the thread that
makes it: its wall time, and the CPU time of that thread and of the engine's own. The recipe runs in
a process of its own, with the SDK as users have it, and says when each of its spans has ended, and
how much CPU time both processes had used by then. So a phase's row has the engine's wall and CPU
seconds, the rest of the server's, the client's, and the engine's share of the phase's wall time.
Phases follow one another; what the recipe does between two spans counts to the second.

Shapes other than demo have random weights, with the demo model's tokenizer, filled up with words
that no text has. The first step is left out: it loads what later ones find loaded."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tinsmith
from peers import SHAPES, checkpoint, hf_model
from tinsmith import _core, decoding, launch, worker
from tinsmith.demo import data, demo

CLIENT = "TINSMITH_RECIPE_CLIENT"  # in the recipe's environment: the file that it tells its spans
PHASES = {  # the recipe's spans whose ends are the phases'
    "sample": "rollout",
    "assemble_training_data": "its data",
    "build_topk_distillation_datums": "teacher's top K, datums",
    "train": "forward_backward, optim_step",
    "save_checkpoint": "snapshot",
}


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


class Meter:
    """All calls of the engine, and what the samplers were asked for and found."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.samplers: list[Any] = []
        self.prompt_tokens = 0
        self._pool: list[int] | None = None

    def cpu(self) -> float:
        """CPU seconds of this thread and of the engine's own."""
        if self._pool is None:
            known = {thread.native_id for thread in threading.enumerate()}
            tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
            self._pool = [~tid << 3 | 6 for tid in sorted(tasks - known)]
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
        self._meter, self._target = meter, target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **named: Any) -> Any:
            if name == "add":
                self._meter.prompt_tokens += len(args[1])
            return self._meter.run(name, value, *args, **named)

        setattr(self, name, call)
        return call


def attach(meter: Meter) -> None:
    """Puts a meter between the server and the engine."""
    adapter_of = worker._adapter

    def sampler(*args: Any, **named: Any) -> Metered:
        meter.samplers.append(_core.Sampler(*args, **named))
        return Metered(meter, meter.samplers[-1])

    worker._adapter = lambda run: Metered(meter, adapter_of(run))  # type: ignore[assignment]
    decoding._core = SimpleNamespace(Sampler=sampler, Adapter=_core.Adapter)  # type: ignore


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


# ---- the figures ----


def run(options: argparse.Namespace, folder: Path, model: Path, meter: Meter) -> float:
    """Serves the model and runs the recipe to its end; how long the server took to start."""
    count = data.rows_for_steps(options.steps, options.groups)
    columns = data.dataset_columns(data.sdft_examples(count, 0))
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "questions"))
    arguments = [
        "tinker_cookbook.recipes.sdft.train", "dataset=toolalpaca",
        f"toolalpaca_data_path={folder / 'questions'}", "topk=20", f"model_name={model}",
        f"renderer_name={demo.RENDERER}", f"groups_per_batch={options.groups}",
        f"group_size={options.group_size}", f"max_tokens={options.max_tokens}",
        f"lora_rank={options.rank}", f"learning_rate={demo.LEARNING_RATE}",
        f"max_steps={options.steps}", "eval_every=0", "save_every=0", f"log_path={folder / 'log'}",
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


Row = dict[str, float]


def phases(spans: list[list[Any]], meter: Meter) -> list[dict[str, Row]]:
    """Of each step but the first, the figures of its phases."""
    steps: list[dict[str, Row]] = []
    step: dict[str, Row] = {}
    for before, span in pairwise(spans):
        name, end, client, server = span
        calls = [call for call in meter.calls if before[1] <= call.start < end]
        row = step.setdefault(PHASES[name], defaultdict(float))
        engine = sum(call.cpu for call in calls)
        row["wall"] += end - before[1]
        row["engine"] += sum(call.wall for call in calls)
        row["engine CPU"] += engine
        row["server CPU"] += server - before[3] - engine
        row["client CPU"] += client - before[2]
        if name == "save_checkpoint":
            steps.append(step)
            step = {}
    return steps[1:]


def median_of(rows: list[Row]) -> Row:
    """The median of each figure."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(steps: list[dict[str, Row]], meter: Meter) -> None:
    """Prints the tables."""
    total = [
        {key: sum(row[key] for row in step.values()) for key in next(iter(step.values()))}
        for step in steps
    ]
    table = {name: median_of([step[name] for step in steps]) for name in steps[0]}
    table["a step"] = median_of(total)
    print(f"median of {len(steps)} steps, ms")
    print(f"{'phase':30} {'wall':>9} {'engine':>9}", end="")
    print(f" {'engine CPU':>11} {'server CPU':>11} {'client CPU':>11} {'engine share':>13}")
    for name, row in table.items():
        ms = {key: 1e3 * value for key, value in row.items()}
        print(f"{name:30} {ms['wall']:9.1f} {ms['engine']:9.1f} {ms['engine CPU']:11.1f}", end="")
        print(f" {ms['server CPU']:11.1f} {ms['client CPU']:11.1f}", end="")
        print(f" {100 * row['engine'] / row['wall']:11.1f} %")
    row = table["a step"]
    cpu = row["engine CPU"] + row["server CPU"] + row["client CPU"]
    print(f"{60 / row['wall']:.1f} steps a minute;", end=" ")
    print(f"the engine's share of the CPU time: {100 * row['engine CPU'] / cpu:.1f} %")
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in meter.calls:
        kinds[call.kind].append(call)
    print(f"\n{'call of the engine':20} {'count':>7} {'median, ms':>11} {'all, s':>9}")
    for kind, calls in kinds.items():
        wall = [call.wall for call in calls]
        print(f"{kind:20} {len(wall):7} {1e3 * statistics.median(wall):11.3f} {sum(wall):9.3f}")
    reused = sum(sampler.reused for sampler in meter.samplers)
    print(f"\nof {meter.prompt_tokens} tokens of prompts {reused} were found in the cache", end=" ")
    print(f"({100 * reused / meter.prompt_tokens:.0f} %)")


def main() -> None:
    """Runs the recipe and prints where its time went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="bf16", help="of the model")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=demo.BATCH, help="questions in a step")
    parser.add_argument("--group-size", type=int, default=1, help="answers to a question")
    parser.add_argument("--max-tokens", type=int, default=demo.MAX_TOKENS)
    parser.add_argument("--rank", type=int, default=demo.RANK)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    meter = Meter()
    attach(meter)
    with tempfile.TemporaryDirectory() as name, model_of(options.shape, options.dtype) as model:
        folder = Path(name)
        started = run(options, folder, model, meter)
        spans = [json.loads(line) for line in (folder / "spans").read_text().splitlines()]
    setting = f"{options.groups}x{options.group_size} answers of {options.max_tokens} tokens"
    print(f"SDFT, {options.shape}, {setting}, rank {options.rank}", end="; ")
    print(f"the server was ready after {started:.2f} s")
    show(phases(spans, meter), meter)


if __name__ == "__main__":
    if CLIENT in os.environ:
        run_client(sys.argv[1:])
    else:
        main()
