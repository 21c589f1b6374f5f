"""The demonstration's trainings: the cookbook's own SFT and SDFT recipes, side by side.

They run unmodified, each with the command line that a user would give it, in threads of one process
(`python -m tinsmith.demo.trainings`, this file): importing the SDK and the cookbook takes seconds,
and while one waits for the engine another one works. A thread starts after the first step of the
one before. So each training has the same place among the server's sessions, and the same random
draws, in every demonstration; and no two threads import the same package at once.
"""

import asyncio
import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.demo import data

MODEL = Path(__file__).parent / "model"
RENDERER = "qwen3_disable_thinking"
BATCH, MAX_TOKENS, RANK, TOPK = 8, 32, 32, 20
METHODS = {"SFT": "chat_sl.train", "SDFT": "sdft.train"}


@dataclass(frozen=True)
class Training:
    """A recipe's run: its method, its learning rate, and its folder."""

    method: str
    learning_rate: float
    steps: int
    folder: Path

    @property
    def log(self) -> Path:
        """The folder of the recipe's metrics and its checkpoints' paths."""
        return self.folder / f"{self.method.lower()}-{self.learning_rate:g}"

    @property
    def command(self) -> list[str]:
        """The recipe's module and its arguments."""
        own = {
            "SFT": [f"dataset={self.folder / 'questions.jsonl'}", f"batch_size={BATCH}"],
            "SDFT": [
                "dataset=toolalpaca", f"toolalpaca_data_path={self.folder / 'questions'}",
                f"groups_per_batch={BATCH}", f"max_tokens={MAX_TOKENS}", f"topk={TOPK}",
            ],
        }  # fmt: skip
        return [
            f"tinker_cookbook.recipes.{METHODS[self.method]}", *own[self.method],
            f"model_name={MODEL}", f"renderer_name={RENDERER}", f"lora_rank={RANK}",
            f"learning_rate={self.learning_rate:g}", f"max_steps={self.steps}", "eval_every=0",
            "save_every=0", f"log_path={self.log}", "behavior_if_log_dir_exists=delete",
        ]  # fmt: skip

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics so far, one row a step."""
        return metrics(self.log)

    def sampler_path(self) -> str:
        """The path of the student saved at the end."""
        last = (self.log / "checkpoints.jsonl").read_text().splitlines()[-1]
        return str(json.loads(last)["sampler_path"])


def metrics(log: Path) -> list[dict[str, Any]]:
    """A recipe's metrics so far, one row per step; an unfinished last line is left out."""
    path = log / "metrics.jsonl"
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, complete) if "loss" in row]


def write_dataset(folder: Path, steps: int, seed: int, *, own: bool = False) -> None:
    """The training questions in the format of the SDFT recipe's tool-use data. own: demonstrated in
    the model's own notation."""
    import datasets

    examples = data.sdft_examples(data.rows_for_steps(steps, BATCH), seed)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(data.dataset_columns(examples, own=own)).save_to_disk(str(folder))


def write_questions(folder: Path, steps: int, seed: int, *, own: bool = False) -> None:
    """The same questions and demonstrations for both recipes, each in its format."""
    write_dataset(folder / "questions", steps, seed, own=own)
    examples = data.sdft_examples(data.rows_for_steps(steps, BATCH), seed)
    columns = data.dataset_columns(examples, own=own)
    lines = []
    for question, answer in zip(columns["prompt"], columns["golden_response"], strict=True):
        turns = (("user", question), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines), encoding="utf-8")


# ---- in the demonstration's process ----


def run_trainings(url: str, trainings: Sequence[Training]) -> None:
    """Runs the trainings in a separate process, with a progress bar for each. RuntimeError with the
    end of its output if one of them fails."""
    folder = trainings[0].folder
    output_path = folder / "trainings.log"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "PYTHONWARNINGS": "ignore",
    }
    for training in trainings:
        shutil.rmtree(training.log, ignore_errors=True)
    runs = json.dumps([(str(training.log), training.command) for training in trainings])
    with output_path.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith.demo.trainings"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(runs)
            process.stdin.close()
            _follow(process, trainings)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        tail = output_path.read_text().strip().splitlines()[-5:]
        raise RuntimeError("a recipe failed; the end of its output:\n" + "\n".join(tail))


def _follow(process: "subprocess.Popen[str]", trainings: Sequence[Training]) -> None:
    """Shows a progress bar for each training, from its metrics, until all end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    text = TextColumn("{task.description}")
    with Progress(text, BarColumn(), MofNCompleteColumn()) as progress:
        tasks = [
            progress.add_task(f"{one.method:5}{one.learning_rate:<7g}", total=one.steps)
            for one in trainings
        ]
        running = True
        while running:
            running = process.poll() is None
            for task, training in zip(tasks, trainings, strict=True):
                progress.update(task, completed=len(training.metrics()))
            if running:
                time.sleep(0.5)


# ---- in the trainings' process ----


def main() -> int:
    """Runs the recipes from a JSON list on stdin, each a log and a command line; returns the exit
    code."""
    runs: list[tuple[str, list[str]]] = json.load(sys.stdin)
    failed: list[str] = []
    own_tokenizers(
        word.partition("=")[2]
        for _, command in runs
        for word in command
        if word.startswith("model_name=")
    )
    threads = []
    for log, command in runs:
        module = importlib.import_module(command[0])
        thread = threading.Thread(target=_recipe, args=(module, command, failed), daemon=True)
        thread.start()
        threads.append(thread)
        while thread.is_alive() and not metrics(Path(log)):
            time.sleep(0.05)
    for thread in threads:
        thread.join()
    print("\n".join(failed))
    return 1 if failed else 0


def own_tokenizers(models: Iterable[str]) -> None:
    """Gives each thread its own tokenizer for the models in these folders. The cookbook shares one,
    and using it in two threads at once fails ("Already borrowed")."""
    from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer

    own, copying = threading.local(), threading.Lock()

    def tokenizer(model: str, shared: Any) -> Any:
        if model not in own.__dict__:
            with copying:
                own.__dict__[model] = copy.deepcopy(shared)
        return own.__dict__[model]

    for model in set(models):
        register_tokenizer(model, partial(tokenizer, model, get_tokenizer(model)))


def _recipe(module: Any, command: Sequence[str], failed: list[str]) -> None:
    """One recipe, as `python -m` would run it."""
    import chz

    try:
        config = chz.Blueprint(module.CLIConfig).make_from_argv(list(command[1:]))
        running = module.cli_main(config)
        if running is not None:
            asyncio.run(running)
    except BaseException:
        failed.append(f"{' '.join(command)}\n{traceback.format_exc()}")


if __name__ == "__main__":
    sys.exit(main())
