"""A server that is killed in the middle of a recipe: started again and resumed by the recipe's own
resume, the run goes on as if nothing had happened, bit for bit.

The recipe draws its own training data (SDFT: the student's answers), so that not only the weights
and AdamW's moments have to come back but every draw too: that is what a server's seed is for.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tinker
from conftest import sdk_asks
from support.waiting import until
from test_docs import DOCS, FENCE
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.demo import demo, trainings
from tinsmith.models.registry import load_model
from tinsmith.server.records.database import State

STEPS, SAVE_EVERY, KILLED_AFTER = 6, 2, 3
METRICS = ("loss", "loss_tokens", "grad_norm")


# The command, on a disk that takes for ever once there is a file named slow.
SLOW_DISK = """
import os, sys, time
from tinsmith.cli import commands as cli
fsync, slow = os.fsync, sys.argv.pop(1)
os.fsync = lambda file: time.sleep(1000 if os.path.exists(slow) else 0) or fsync(file)
sys.exit(cli.main())
"""


# The command, whose training calls begin, and end, when there is no file named slow.
SLOW_CALLS = """
import os, sys, time
from pathlib import Path
from tinsmith.cli import commands as cli
from tinsmith.engine.training import TrainJob
steps, slow = TrainJob.steps, Path(sys.argv.pop(1))
def slowly(job, lane, engine):
    while slow.exists():
        slow.with_name("begun").touch()
        time.sleep(0.01)
        yield 0, 1
    return (yield from steps(job, lane, engine))
TrainJob.steps = slowly
sys.exit(cli.main())
"""


@contextlib.contextmanager
def serving(
    checkpoints: Path, program: Sequence[str] = ("-m", "tinsmith.cli"), port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tinsmith serve` as a process of its own, and its URL."""
    command = [
        sys.executable, *program, "serve", str(demo.MODEL), "--port", str(port), "--seed",
        "7", "--device", "cpu", "--threads", "1", "--checkpoints", str(checkpoints),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield process, found.group()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def recipe(url: str, log: Path, questions: Path) -> subprocess.Popen[str]:
    """SDFT as its user would start it, and start it again. It draws one answer at a time: the SDK
    numbers requests that come together in any order, and a draw's seed depends on the number."""
    command = [
        sys.executable, "-m", "tinker_cookbook.recipes.sdft.train", f"model_name={demo.MODEL}",
        f"renderer_name={demo.RENDERER}", "dataset=toolalpaca", f"log_path={log}",
        f"toolalpaca_data_path={questions}", "groups_per_batch=1", "max_tokens=16", "topk=10",
        "lora_rank=4", "learning_rate=1e-3", f"max_steps={STEPS}", "eval_every=0",
        f"save_every={SAVE_EVERY}", "behavior_if_log_dir_exists=resume",
    ]  # fmt: skip
    environment = os.environ | {
        "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rows(log: Path) -> list[dict]:
    file = log / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finish(process: subprocess.Popen[str]) -> None:
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told[-4000:]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    trainings.write_dataset(folder, 12, seed=0)
    return folder


@pytest.mark.slow
def test_a_killed_run_is_resumed_bit_for_bit(questions: Path, tmp_path: Path) -> None:
    log, saved = tmp_path / "killed", tmp_path / "killed-saved"
    with serving(tmp_path / "whole-saved") as (_, other_url), serving(saved) as (server, url):
        uninterrupted = recipe(other_url, tmp_path / "whole", questions)
        client = recipe(url, log, questions)
        try:
            until(lambda: len(rows(log)) >= KILLED_AFTER or client.poll() is not None)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            client.kill()
            client.communicate()
        finish(uninterrupted)
    whole = rows(tmp_path / "whole")
    assert len(whole) == STEPS
    assert KILLED_AFTER <= len(rows(log)) < STEPS
    last = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert 0 < last["batch"] <= len(rows(log))
    with serving(saved) as (_, url):
        finish(recipe(url, log, questions))
    resumed = rows(log)[-(STEPS - last["batch"]) :]
    assert [row["progress/batch"] for row in resumed] == list(range(last["batch"], STEPS))
    for one, other in zip(resumed, whole[last["batch"] :], strict=True):
        assert [one[key] for key in METRICS] == [other[key] for key in METRICS]
    assert len({row["loss"] for row in whole}) == STEPS


# ---- the loop of docs/resume.md ----

CUT = 6  # the step after which the server goes, or in the next of which


def run_loop(url: str, folder: Path, after: Callable[[], None], patch: pytest.MonkeyPatch) -> list:
    """What the page's loop prints, in a folder; `after` is called behind step CUT, once."""
    folder.mkdir()
    patch.chdir(folder)
    sdk_asks(url, patch)
    page = (DOCS / "resume.md").read_text()
    [code] = [text for _, text in FENCE.findall(page) if "def last_save" in text]
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if line.startswith(f"step {CUT}:") and len(lines) == CUT:
            after()

    model = '"Qwen/Qwen3-0.6B"'
    assert code.count(model) == 1
    exec(compile(code.replace(model, repr(str(demo.MODEL))), "resume.md", "exec"), {"print": show})
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What it prints where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch, serving(folder / "saved") as (_, url):
        return run_loop(url, folder / "here", lambda: None, patch)


GONE = "there is no model"


@pytest.mark.parametrize(
    ("number", "midway", "told"),
    [
        (signal.SIGKILL, False, GONE),
        (signal.SIGKILL, True, f"there is no request|{GONE}"),
        (signal.SIGTERM, True, f"the server is shutting down: once it is back, go on from|{GONE}"),
    ],
)
def test_the_loop_of_the_page_survives_a_restart(
    number: int,
    midway: bool,
    told: str,
    undisturbed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the same bits, whether the server goes between two calls or in the middle of one. The loop
    sends its step with the batch, so the new server may have been asked for that alone."""
    slow, saved, threads = tmp_path / "slow", tmp_path / "saved", []
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(serving(saved, ["-c", SLOW_CALLS, str(slow)]))

        def restart() -> None:
            until(lambda: not midway or (tmp_path / "begun").exists())
            server.send_signal(number)
            server.wait()
            slow.unlink(missing_ok=True)
            stack.enter_context(serving(saved, port=int(url.rpartition(":")[2])))

        def cut() -> None:
            if not midway:
                return restart()
            slow.touch()
            threads.append(threading.Thread(target=restart))
            threads[0].start()

        lines = run_loop(url, tmp_path / "here", cut, monkeypatch)
        for thread in threads:
            thread.join()
    failed = [line for line in lines if line.startswith("goes on from step 4: ")]
    assert [line for line in lines if line not in failed] == undisturbed[:CUT] + undisturbed[4:]
    assert re.search(told, failed[0])
    for line in failed:  # a server that ends may still take the next client's first request
        assert "create_training_client_from_state_with_optimizer" in line


def test_what_was_answered_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    """Killed or told to end while it writes a checkpoint, over and over: those that were finished
    load, and the database tells of them."""
    paths: list[str] = []
    for killed, number in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)):
        with serving(tmp_path) as (server, url):
            service = tinker.ServiceClient(base_url=url, api_key="tml-local")
            data = {"number": str(killed)}
            make = service.create_lora_training_client
            client = make(str(demo.MODEL), rank=64, user_metadata=data).result()
            paths += [client.save_state(f"s{number}").result().path for number in range(3)]
            client.save_state("late")
            client.save_state("s0", overwrite=True)
            time.sleep(0.05 * killed)
            server.send_signal(number)
            assert server.wait() == (0 if number == signal.SIGTERM else -number)
    store = Store(tmp_path)
    state = State(store)
    assert [row.user_metadata["number"] for row in state.runs()] == ["2", "1", "0"]
    listed = [item for row in state.runs() for item in state.checkpoints(row.id)]
    assert set(paths) <= {item.path for item in listed}
    model = load_model(demo.MODEL, threads=1)
    for item in listed:
        adapter = checkpoint.load_adapter(store.folder(item.path), model, optimizer=True)
        assert adapter.rank == 64
    state.close()


def test_a_save_that_takes_too_long_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    """SIGTERM does not wait for a slow disk. What there is of the save, the next start clears."""
    slow, saved = tmp_path / "slow", tmp_path / "saved"
    with serving(saved, ["-c", SLOW_DISK, str(slow)]) as (server, url):
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        client = service.create_lora_training_client(str(demo.MODEL), rank=4).result()
        path = client.save_state("a").result().path
        folder = Store(saved).folder(path)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        slow.touch()
        client.save_state("a", overwrite=True)
        until(lambda: len(list(folder.parent.iterdir())) >= 2)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0  # the disk takes longer
    assert len(list(folder.parent.iterdir())) == 2
    with serving(saved):
        assert [file.name for file in folder.parent.iterdir()] == ["a"]
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
