"""The console of serve and run: a line a call, a status line in a terminal's last row, the log."""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from support.tiny_models import folder
from tinker import types
from tinsmith.cli import console
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

IDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with Backend(
        ServerConfig({"tiny": folder("qwen3")}, checkpoints=checkpoints, device="cpu")
    ) as backend:
        yield backend


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    console.add_options(parser)
    return parser.parse_args(given)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins the log as a command does; gives a function that returns the lines of stderr."""
    stream = io.StringIO()
    monkeypatch.setattr(console.log, "propagate", False)  # others' handlers may be closed
    with contextlib.ExitStack() as stack:

        def begin(*given: str) -> Any:
            monkeypatch.setattr(sys, "stderr", stream)
            stack.enter_context(console.log_to_stderr(options(*given)))
            return lambda: stream.getvalue().splitlines()

        yield begin


def work(backend: Backend, steps: int = 1) -> float:
    """Some steps and a sample; returns the last step's loss, of 8 targets."""
    inputs = {"target_tokens": types.TensorData(data=IDS, dtype="int64")}
    datum = types.Datum(model_input=types.ModelInput.from_ints(IDS), loss_fn_inputs=inputs)
    with backend.service_client() as client:
        run = client.create_lora_training_client("tiny", rank=2).result()
        for _ in range(steps):
            done = run.forward_backward([datum, datum], "cross_entropy").result()
            run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=1)
        sampler.sample(types.ModelInput.from_ints(IDS), 2, params).result()
        with pytest.raises(tinker.TinkerError):
            run.forward([datum], "nothing").result()
    backend.notifier.flush()
    return float(done.metrics["loss:sum"])


def test_verbose_is_a_line_for_each_call(backend: Backend, logged: Any) -> None:
    lines = logged("-v", "--no-status")
    with console.console(options("-v", "--no-status"), backend):
        loss = work(backend)
    found = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines()]
    kinds = ["create", "forward_backward", "optim_step", "snapshot", "sample", "reject"]
    shown = [line for line in found if line.split()[0] in kinds]
    assert [line.split()[0] for line in shown] == kinds
    run = shown[0].split()[1]
    assert re.fullmatch(r"s-[0-9a-f]{6}:train:\d+", run) and all(run in line for line in shown)
    _, train, step, _, sample, reject = shown
    assert "8 tokens" in train and f"loss {loss / 8:.4g} a token" in train and "tokens/s" in train
    assert "step 1, learning rate 0.001" in step
    assert re.search(r"4 tokens \+ \d+ drawn", sample)
    assert "failed: " in reject and "nothing" in reject


def test_without_verbose_calls_are_silent(backend: Backend, logged: Any) -> None:
    lines = logged("--no-status")
    with console.console(options("--no-status"), backend):
        work(backend)
    assert not [line for line in lines() if "forward_backward" in line]


def test_json_lines_have_the_facts(backend: Backend, logged: Any) -> None:
    given = ("-v", "--log-format", "json", "--no-status")
    lines = logged(*given)
    with console.console(options(*given), backend):
        loss = work(backend)
    found = [json.loads(line) for line in lines()]
    train = next(line for line in found if line.get("kind") == "forward_backward")
    assert (train["tokens"], train["base"], train["step"]) == (8, "tiny", 0)
    assert train["loss"] == loss and train["seconds"] > 0 and train["level"] == "info"


def test_a_warning_is_said_once(logged: Any) -> None:
    lines = logged()
    for _ in range(3):
        console.log.warning("the disk is nearly full")
        console.log.info("saved")
    assert sum("nearly full" in line for line in lines()) == 1
    assert sum("saved" in line for line in lines()) == 3


def test_a_log_ends_with_its_command() -> None:
    before = [(log.level, *log.handlers) for log in (console.log, console.calls)]
    with console.log_to_stderr(options("-v", "--log-level", "error")):
        pass
    assert [(log.level, *log.handlers) for log in (console.log, console.calls)] == before


def test_log_level_hides_what_is_below(logged: Any) -> None:
    lines = logged("--log-level", "error")
    console.log.warning("hidden")
    console.log.error("shown")
    assert [line.split(" ", 1)[1] for line in lines()] == ["shown"]


class Terminal(io.StringIO):
    """`written` is set when something is."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes stderr a terminal of 200 by 30."""
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn but what a test asks for."""
    monkeypatch.setattr(console, "DRAW_SECONDS", threading.TIMEOUT_MAX)
    monkeypatch.setattr(console, "STATUS_SECONDS", threading.TIMEOUT_MAX)


def test_a_terminals_last_row_shows_what_happens(
    backend: Backend, unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    with console.console(options(), backend) as draw:
        loss = work(backend, steps=3)
        draw()
        backend.worker.memory().result()  # which comes behind what `draw` has asked for
        draw()
        shown = terminal.getvalue().rpartition("\x1b[30;1H\x1b[2K")[2]
    text = terminal.getvalue()
    assert text.count("\x1b[1;29r") == 1  # the rest scrolls
    assert f"step 3 · loss {loss / 8:.4g}" in shown and "1 failed" in shown
    assert re.search(r"memory [\d.]+ \w+ of [\d.]+ \w+", shown)
    assert text.endswith("\x1b7\x1b[r\x1b[30;1H\x1b[2K\x1b8")  # the row is given back


def test_a_terminal_is_drawn_to_by_itself(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(console, "DRAW_SECONDS", 0.001)
    with console.console(options(), backend):
        terminal.written.wait()


def test_where_there_is_no_terminal_news_are_plain_lines(
    backend: Backend, logged: Any, unasked: None
) -> None:
    lines = logged()
    with console.console(options(), backend) as draw:
        work(backend, steps=2)
        draw()
        assert any("step 2 · loss" in line for line in lines())
        before = lines()
        draw()
        assert lines() == before  # nothing is new
    assert "\x1b" not in "".join(lines())


@contextlib.contextmanager
def process(**files: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], **files) as made:
        try:
            yield made
        finally:
            made.kill()


def test_a_recipes_own_metrics_say_how_far_it_is(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    first, second = tmp_path / "first", tmp_path / "second"
    for at in (first, second):
        at.mkdir()
    with (first / "logs.log").open("w") as log, (second / "logs.log").open("w") as later:
        # A process of its own: this one holds logs of recipes that other tests ran.
        with process() as without:
            assert console.recipe_share(without.pid) is None
        with process(stdout=log, stderr=later) as recipe:
            os.utime(second / "logs.log", (0, 0))  # the first one is written to
            assert console.recipe_share(recipe.pid) is None
            rows = [{"step": 1, "progress/done_frac": 0.25}, {"step": 2, "progress/done_frac": 0.5}]
            (first / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            assert console.recipe_share(recipe.pid) == 0.5
            status = console.Status(backend.worker, lambda: console.recipe_share(recipe.pid))
            assert "50% done" in status.line() and "to go" not in status.line()
            now = 160.0
            (first / "metrics.jsonl").write_text(json.dumps(rows[0] | {"progress/done_frac": 0.75}))
            assert "75% done, 60 s to go" in status.line() and status._shown == (100.0, 0.5)
            (first / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            (second / "metrics.jsonl").write_text('{"step": 0, "progress/done_frac": 0.125}\n')
            assert console.recipe_share(recipe.pid) == 0.5
            os.utime(first / "logs.log", (0, 0))
            os.utime(second / "logs.log", (1, 1))  # the process runs its second recipe
            assert console.recipe_share(recipe.pid) == 0.125
            (second / "metrics.jsonl").write_text('{"step": 3, "prog')
            assert console.recipe_share(recipe.pid) is None
