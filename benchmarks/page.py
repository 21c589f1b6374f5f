"""The page at /: what it costs a server that trains and samples, and what the history costs.

    python benchmarks/page.py

The server runs in this process, whose CPU time is measured. A client in a process of its own
trains, samples and logs numbers of its own, and makes, where a side says so, the requests of an
open page: those of static/app.js and of the view that is shown, as often as that does. No browser
runs, for its CPU time is not the server's. The history holds as many runs as it may, as it does on
an old server.

The sides of the first table do the same steps in turn. CPU time of equal work scatters by some
percent, more than the page costs, and it is the engine's that does. So "more" is what the threads
beside the engine's took more than with a closed page in the same round, in percent of all that a
step with a closed page takes. A page asks by the wall's time: where others want the server's core
too, its steps last longer, and the page's share of them is larger.

The second table says what each request takes on a server that has nothing else to do, and what the
history's own threads took in the first table; times its rate, that is its share of a core. An open
view is all that it asks for in a second, of samples the worst: each time all of them are new.

Some minutes with the demo model."""

import argparse
import multiprocessing
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import tinsmith
from peers import CLOCKS, SHAPES, alternate, parse, parser
from recipe import model_of
from report import Report
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine.call_log import Call
from tinsmith.server.dashboard.page import FOLDER
from tinsmith.server.records import history

CLOSED, NO_HISTORY = "page closed", "no history"
RANK, LENGTH, ANSWER = 32, 128, 64  # tokens of a datum, and of a sample
NUMBERS = 20  # that the client logs of a step
TIMES = 20  # that a request is made to be measured
OLD_STEPS = 48  # of each run that the history holds


def seconds(file: str, name: str) -> float:
    """A constant of a file of the page's, which has it in milliseconds."""
    found = re.search(rf"\b{name} = (\d+)", (FOLDER / file).read_text())
    assert found, name
    return int(found[1]) / 1e3


LIVE = seconds("app.js", "LIVE_MS")  # between two looks of a page while something happens
EVERY = {  # seconds between two requests
    "list": seconds("app.js", "LIST_MS"),
    "curves": 0.0,
    "samples": seconds("samples.js", "ASK_MS"),
    "samples, all new": seconds("samples.js", "ASK_MS"),
    "machine": 0.0,
}
# What an answer is asked after by.
NEWS = {"list": ("now",), "curves": ("place", "log_place"), "samples": ("seen",)}
VIEWS = ("curves", "samples", "machine")


# ---- the client's side ----


class Visitor:
    """An open page."""

    def __init__(self, url: str, run: str):
        self.client = httpx.Client(base_url=f"{url}/page/data/")
        self._run = f"runs/{quote(run, safe='')}"
        self._known: dict[str, Any] = {"now": 0.0, "place": 0, "log_place": 0, "seen": ""}

    def ask(self, what: str) -> None:
        """One request; "samples, all new" are those of a page that has none."""
        known = self._known
        path = {
            "list": f"runs?after={int(known['now'])}",
            "curves": f"{self._run}?after={known['place']}&logged={known['log_place']}",
            "samples": f"{self._run}/samples?seen={known['seen']}",
            "samples, all new": f"{self._run}/samples?seen=",
            "machine": "machine",
        }[what]
        told = self.client.get(path).raise_for_status().json()
        known |= {name: told[name] for name in NEWS.get(what, ())}

    def look(self, view: str, end: threading.Event) -> None:
        """Asks as the page does until the end."""
        last = dict.fromkeys(asked(view), 0.0)
        while not end.is_set():
            for what, before in last.items():
                if time.monotonic() - before > EVERY[what]:
                    last[what] = time.monotonic()
                    self.ask(what)
            end.wait(LIVE)


def asked(view: str) -> tuple[str, ...]:
    """What a page asks for that shows a view."""
    return {"samples": ("list", "curves", "samples")}.get(view, ("list", view))


@contextmanager
def opened(visitor: Visitor, view: str) -> Iterator[None]:
    """A page that shows a view, if it is one."""
    end = threading.Event()
    thread = threading.Thread(target=visitor.look, args=(view, end))
    if view in VIEWS:
        thread.start()
    try:
        yield
    finally:
        end.set()
        if view in VIEWS:
            thread.join()


def client(url: str, model: str, datums: int, pipe: Connection) -> None:
    """Does what comes through the pipe, (a view, steps) or (a request, 0), and says when."""
    import numpy as np
    import tinker

    if hasattr(os, "sched_setaffinity"):  # the server's core need not be the client's too
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    params = tinker.SamplingParams(max_tokens=ANSWER, temperature=1.0)
    adam = tinker.AdamParams(learning_rate=1e-4)
    draw = np.random.default_rng(0)
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        trained = service.create_lora_training_client(model, rank=RANK, seed=0).result()
        logs = {"run": trained, "base_url": url, "api_key": "tml-local"}
        visitor = Visitor(url, trained.model_id)

        def step() -> None:
            tokens = draw.integers(5, 500, (datums, LENGTH + 1))
            batch = [
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(row[:-1].tolist()),
                    loss_fn_inputs={"target_tokens": row[1:], "weights": np.ones(LENGTH)},
                )
                for row in tokens
            ]
            trained.forward_backward(batch, "cross_entropy")
            trained.optim_step(adam).result()
            sampler = trained.save_weights_and_get_sampling_client().result()
            prompts = [tinker.ModelInput.from_ints(row[:32].tolist()) for row in tokens]
            for future in [sampler.sample(prompt, 1, params) for prompt in prompts]:
                future.result()
            tinsmith.log({f"env/part_{part}": draw.random() for part in range(NUMBERS)}, **logs)

        pipe.send(None)
        while told := pipe.recv():
            what, steps = told
            with opened(visitor, what if steps else ""):
                for _ in range(steps):
                    step()
            if not steps:
                visitor.ask(what)
            pipe.send(None)


# ---- the server's side ----


class Metered:
    """Listens for the history, and knows the CPU seconds that this took and its thread."""

    def __init__(self, target: Any):
        self._target, self._heard = target, 0.0
        self._clock = ~target._thread.native_id << 3 | 6  # of that thread, for clock_gettime

    def __call__(self, happened: Any) -> None:
        """Something has happened."""
        start = time.thread_time()
        self._target(happened)
        self._heard += time.thread_time() - start

    @property
    def seconds(self) -> float:
        """So far."""
        return self._heard + time.clock_gettime(self._clock)


@dataclass(frozen=True)
class Round:
    """Seconds of a step: by the clock, on the wall, and CPU seconds of the history and of all of
    the server beside the engine's thread."""

    seconds: float
    wall: float
    history: float
    rest: float


def python_threads(but: int | None) -> dict[int, float]:
    """CPU seconds of the interpreter's threads; the engine's own are none of them."""
    ids = (thread.native_id for thread in threading.enumerate())
    return {one: time.clock_gettime(~one << 3 | 6) for one in ids if one and one != but}


def fill(kept: history.RunHistory, runs: int) -> None:
    """Runs of a server that is old."""
    report = {"loss_tokens": 900.0, "grad_norm": 1.0, "weight_norm": 3.0, "update_norm": 0.1}
    for run in range(runs):
        for step in range(OLD_STEPS):
            began = 10.0 * step
            facts = {"arrived": began, "began": began + 2, "ended": began + 6, "at": 1e9 + run}
            result = {**report, "loss": 4000.0 / (step + 100)}
            request = AdamParams()
            name = f"{run:08x}-0000-0000-0000-000000000000:train:0"
            kept(Call("optim_step", name, request=request, step=step, result=result, **facts))
        kept.flush()


def show_requests(
    report: Report, ask: Callable[[str, int], object], metered: float, pace: float
) -> None:
    """The second table. `metered` is what the history took of a step, and `pace` steps a second."""
    columns = {"cpu-ms": ".3f", "a second": ".2f", "% of a core": ".3f"}
    table = report.table("What each part takes", "part", columns, plot="% of a core")

    def row(name: str, seconds: float, often: float) -> float:
        table.add(name, {"tinsmith": (1e3 * seconds, often, 100 * seconds * often)})
        return seconds * often

    row("history, of a step", metered, pace)
    often = {what: 1 / max(seconds, LIVE) for what, seconds in EVERY.items()}
    cost = {}
    for what in often:
        ask(what, 0)
        found = []
        for _ in range(TIMES):
            start = time.process_time()
            ask(what, 0)
            found.append(time.process_time() - start)
        cost[what] = row(what, statistics.median(found), often[what])
    cost["samples"] = cost.pop("samples, all new")
    for view in VIEWS:
        row(f"{view} open", sum(cost[what] for what in asked(view)), 1.0)


def compare(args: argparse.Namespace, report: Report, folder: Path, model: Path) -> None:
    """Both tables."""
    with tinsmith.serve(
        {"model": model}, checkpoints=folder, threads=args.threads, device="cpu"
    ) as backend:
        fill(backend.history, args.runs)
        listener = Metered(backend.history)
        backend.notifier.forget(backend.history)
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        arguments = backend.url, "model", args.datums, theirs
        process = spawn.Process(target=client, args=arguments, daemon=True)
        process.start()
        pipe.recv()

        def ask(what: str, steps: int) -> None:
            backend.notifier.flush()
            pipe.send((what, steps))
            pipe.recv()

        def side(what: str) -> Callable[[], None]:
            def call() -> None:
                backend.notifier.listen(listener)
                ask(what, args.steps)
                backend.notifier.flush()
                backend.notifier.forget(listener)

            return (lambda: ask("", args.steps)) if what == NO_HISTORY else call

        def measure(call: Callable[[], object]) -> Round:
            clock = CLOCKS[args.clock][1]
            before, heard = python_threads(worker), listener.seconds
            start, wall = clock(), time.perf_counter()
            call()
            passed, wall = clock() - start, time.perf_counter() - wall
            rest = sum(now - before.get(one, 0.0) for one, now in python_threads(worker).items())
            figures = passed, wall, listener.seconds - heard, rest
            return Round(*(figure / args.steps for figure in figures))

        worker = backend.worker._thread.native_id
        sides = {name: side(name) for name in (CLOSED, *VIEWS, NO_HISTORY)}
        found = alternate(sides, args.rounds, measure)
        show_loop(report, found)
        closed = found[CLOSED]
        metered = statistics.median(each.history for each in closed)
        show_requests(report, ask, metered, 1 / statistics.median(each.wall for each in closed))
        pipe.send(None)
        process.join()


def show_loop(report: Report, found: dict[str, list[Round]]) -> None:
    """The first table."""
    args = report.args
    tokens = args.datums * (LENGTH + ANSWER)
    title = f"A step of {args.datums} datums of {LENGTH} tokens and as many samples of {ANSWER}"
    columns = {
        f"{args.unit} a step": ".4f",
        f"tokens/{args.unit}": ".0f",
        "beside the engine, cpu-ms": ".2f",
        "more, %": ".2f",
    }
    table = report.table(f"{title}, {args.shape}", "loop", columns)
    rows = {}
    for name, rounds in found.items():
        seconds = statistics.median(each.seconds for each in rounds)
        rest = statistics.median(each.rest for each in rounds)
        pairs = zip(rounds, found[CLOSED], strict=True)
        more = statistics.median((mine.rest - shut.rest) / shut.seconds for mine, shut in pairs)
        rows[name] = seconds, tokens / seconds, 1e3 * rest, 100 * more
    table.add("trains and samples", rows)


def main() -> None:
    """Prints what the page and the history cost."""
    options = parser(__doc__, rounds=15, dtype="bf16")
    add = options.add_argument
    add("--shape", choices=("demo", *SHAPES), default="demo", help="demo if not given")
    add("--datums", type=int, default=8, help="and samples, of a step")
    add("--steps", type=int, default=10, help="of a round")
    add("--runs", type=int, default=history.RUNS_MAX - 1, help="that the history holds before")
    args = parse(options)
    with (
        Report(args, __doc__, roofline=False) as report,
        tempfile.TemporaryDirectory() as folder,
        model_of(args.shape, args.dtype) as model,
    ):
        compare(args, report, Path(folder), model)


if __name__ == "__main__":
    main()
