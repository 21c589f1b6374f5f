"""Recipes of the cookbook that learn, each on a server of its own, and the demonstration.

Each runs as its user would run it: a process of its own (recipe_host.py) that knows nothing but the
SDK's two environment variables. What is checked is what the recipe itself logs, not that it ended.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinsmith
from support.recipe_host import Host, running_host
from tinsmith import launch
from tinsmith.cli import commands
from tinsmith.demo import data, demo, trainings

MODEL = ["model_name=" + str(demo.MODEL), "renderer_name=" + demo.RENDERER]
RECIPES = "tinker_cookbook.recipes."


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Any]:
    """A server of each test's own, with a seed: what a recipe draws, and so learns, repeats."""
    checkpoints = tmp_path / "checkpoints"
    with tinsmith.serve(demo.MODEL, device="cpu", checkpoints=checkpoints, seed=0) as running:
        yield running


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    trainings.write_dataset(folder, 36, seed=0)
    return folder


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with running_host(tmp_path_factory.mktemp("datasets")) as running:
        yield running


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(host: Host, backend: Any, tmp_path: Path) -> Run:
    """Runs a recipe to its end; returns the rows of its metrics.jsonl."""
    log, given, output = (tmp_path / name for name in ("log", "input", "output"))
    given.touch()

    def start(recipe: str, *flags: str) -> list[dict[str, Any]]:
        code = host.run(
            command=["-m", RECIPES + recipe, *MODEL, f"log_path={log}", *flags],
            folder=str(tmp_path),
            input=str(given),
            output=str(output),
            environment={
                "TINKER_BASE_URL": backend.url,
                "TINKER_API_KEY": "tml-local",
                launch.MODELS: "{}",
            },
        )
        assert code == 0, output.read_text()[-4000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    return start


def sdft(run: Run, questions: Path, *flags: str) -> list[dict[str, Any]]:
    return run(
        "sdft.train", "dataset=toolalpaca", f"toolalpaca_data_path={questions}",
        "groups_per_batch=16", "max_tokens=24", "topk=20", "lora_rank=8", "learning_rate=1e-3",
        "max_steps=6", "eval_every=0", "save_every=0", *flags,
    )  # fmt: skip


def test_sdft_with_the_teachers_top_k(run: Run, questions: Path) -> None:
    rows = sdft(run, questions)
    assert len(rows) == 6
    per_token = [row["loss"] / row["loss_tokens"] for row in rows]
    assert all(row["grad_norm"] > 0 and row["sdft/num_datums"] == 16 for row in rows)
    assert sum(per_token[-2:]) < 0.9 * sum(per_token[:2]), per_token


def test_sdft_reverse_through_a_custom_loss(run: Run, questions: Path) -> None:
    rows = sdft(run, questions, "reverse=True", "max_steps=16")
    kl = [row["sdft/reverse_kl_mean"] for row in rows]
    assert sum(kl[-4:]) < sum(kl[:4]), kl
    assert all(row["sdft/reverse_kl_positions"] > 0 for row in rows)


def test_sdft_without_top_k_has_no_weights(run: Run, questions: Path) -> None:
    rows = sdft(run, questions, "topk=0", "max_steps=3")
    for row in rows:  # missing weights are ones: every token counts, the prompt's too
        observed, acted = (row[f"env/all/total_{side}_tokens"] for side in ("ob", "ac"))
        assert row["loss_tokens"] == observed + acted - row["loss_sequences"]
        assert row["sdft/mean_advantage"] == pytest.approx(
            row["sdft/mean_teacher_lp"] - row["sdft/mean_student_lp"], abs=1e-4
        )


def test_supervised_training_learns(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    with file.open("w") as out:
        for example in data.sdft_examples(48, seed=1):
            messages = [
                {"role": "user", "content": example.question},
                {"role": "assistant", "content": example.answer},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    rows = run(
        "chat_sl.train", f"dataset={file}", "batch_size=16",
        "learning_rate=2e-3", "lora_rank=8", "num_epochs=3", "max_steps=6", "eval_every=0",
        "save_every=0",
    )  # fmt: skip
    nll = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(nll) == 6
    assert nll[-1] < 0.7 * nll[0], nll


def test_tinsmith_run_serves_the_recipes_own_model(questions: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "tinsmith.cli", "run", "--checkpoints", str(tmp_path / "saved"), "-m",
        RECIPES + "sdft.train", *MODEL, "dataset=toolalpaca", f"toolalpaca_data_path={questions}",
        "groups_per_batch=4", "max_tokens=8", "max_steps=1", "eval_every=0", "lora_rank=4",
        f"log_path={tmp_path / 'log'}", "behavior_if_log_dir_exists=delete",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert len((tmp_path / "log" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_recipe_that_fails_gives_its_own_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nassert os.environ['TINKER_BASE_URL']\nsys.exit(7)\n")
    model = f"small={demo.MODEL}"
    command = [sys.executable, "-m", "tinsmith.cli", "run", "--model", model, str(script)]
    assert subprocess.run(command, cwd=tmp_path, timeout=120).returncode == 7


@pytest.mark.slow
def test_the_demo_shows_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PER_SKILL", 2)
    out = ["--out", str(tmp_path), "--device", "cpu"]
    assert commands.main(["demo", "--steps", "3", "--lr", "1e-3", *out]) == 0
    for method in ("sft", "sdft"):
        rows = trainings.metrics(tmp_path / f"{method}-0.001")
        assert len({row["loss"] for row in rows}) == 3, rows
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for words in ("before", "teacher", "learned", "kept", "SFT", "SDFT", "at its best rate"):
        assert words in shown
