"""`tinsmith demo`: the cookbook's SDFT recipe, unmodified, on the model that is in the package.

A tiny Qwen3 knows the form of a tool call but not which tool a question wants. Shown a
demonstration, it follows it. SDFT makes the student agree, on its own answers, with itself when it
has seen the demonstration. Held-out questions measure the learning; their cities, words and times
are in no question that SDFT trains on. A skill that it had before, and that SDFT does not train,
shows the cost. Everything comes from one seed, so the figures repeat.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.demo import data
from tinsmith.files.extras import pip_install

if TYPE_CHECKING:
    from tinsmith.server.backend import Backend

MODEL = Path(__file__).parent / "model"
RENDERER = "qwen3_disable_thinking"
BATCH, MAX_TOKENS, RANK, LEARNING_RATE, TOPK = 16, 24, 32, 1e-3, 20
PER_SKILL = 25  # held-out questions


@dataclass(frozen=True)
class Scores:
    """Accuracy in [0, 1] of each skill, greedy answers."""

    skills: dict[str, float]

    @property
    def overall(self) -> float:
        """Mean over the skills that SDFT trains."""
        return sum(self.skills[skill] for skill in data.SKILLS) / len(data.SKILLS)


def serve_model(options: argparse.Namespace, out: Path) -> "Backend":
    """A server of the demonstration's model, as its command line wants it."""
    import tinsmith

    return tinsmith.serve(
        MODEL,
        device=options.device,
        checkpoints=out / "checkpoints",
        threads=options.threads,
        seed=options.seed,
    )


def run(options: argparse.Namespace) -> None:
    """Runs the demonstration."""
    require_cookbook()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    held_out = data.held_out_examples(PER_SKILL, options.seed)
    held_out += data.known_examples(PER_SKILL, options.seed)
    with serve_model(options, out) as backend:
        client = backend.service_client()
        base = client.create_sampling_client(base_model=str(MODEL)).result()
        start = time.perf_counter()
        print(f"Asking {len(held_out)} held-out questions, without and with a demonstration.")
        before = evaluate(base, held_out)
        teacher = evaluate(base, held_out, demonstrated=True)
        log = run_sdft(backend.url, out, options.steps, options.seed)
        sampler = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
        student = client.create_sampling_client(model_path=sampler["sampler_path"]).result()
        after = evaluate(student, held_out)
        seconds = time.perf_counter() - start
    losses = [row["loss"] / row["loss_tokens"] for row in metrics(log) if row.get("loss_tokens")]
    print_table(before, after, teacher, losses, seconds)
    draw(before, after, teacher, losses, out / "demo.png")
    print(f"The picture is {out / 'demo.png'}; the recipe's own log is in {log}.")


def require_cookbook() -> None:
    """Raises ImportError with the fix where the demonstration's packages are not installed."""
    try:
        import datasets  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import tinker_cookbook  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the demo needs {error.name}: {pip_install('cookbook')}", name=error.name
        ) from None


# ---- measuring ----


def evaluate(
    sampler: Any, examples: Sequence[data.Example], *, demonstrated: bool = False
) -> Scores:
    """Greedy answers to the examples' questions, all asked at once through the SDK.

    With demonstrated, the prompt is the one that the recipe's teacher sees.
    """
    import tinker
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tokenizer = get_tokenizer(str(MODEL))
    renderer = get_renderer(RENDERER, tokenizer)
    params = tinker.SamplingParams(
        max_tokens=MAX_TOKENS + 8, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    futures = []
    for example in examples:
        text = example.question
        if demonstrated:
            text = data.demonstration_prompt(example.question, example.answer)
        prompt = renderer.build_generation_prompt([{"role": "user", "content": text}])
        futures.append(sampler.sample(prompt=prompt, num_samples=1, sampling_params=params))
    right: dict[str, list[bool]] = {skill: [] for skill in (*data.SKILLS, data.KNOWN_SKILL)}
    for example, future in zip(examples, futures, strict=True):
        tokens = future.result().sequences[0].tokens
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        right[example.skill].append(data.score(answer, example.answer))
    return Scores({skill: sum(values) / len(values) for skill, values in right.items()})


# ---- training ----


def write_dataset(folder: Path, steps: int, seed: int) -> None:
    """The training questions in the recipe's own format."""
    import datasets

    examples = data.sdft_examples(data.rows_for_steps(steps, BATCH), seed)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(data.dataset_columns(examples)).save_to_disk(str(folder))


def run_sdft(url: str, out: Path, steps: int, seed: int, *, save_every: int = 0) -> Path:
    """The unmodified SDFT recipe; returns its folder."""
    log = out / "sdft"
    write_dataset(out / "questions", steps, seed)
    arguments = [
        "tinker_cookbook.recipes.sdft.train", "dataset=toolalpaca",
        f"toolalpaca_data_path={out / 'questions'}", f"topk={TOPK}", *settings(log, steps),
        f"save_every={save_every}",
    ]  # fmt: skip
    run_recipe(url, arguments, log, steps, lambda row: row["loss"] / row["loss_tokens"])
    return log


def settings(log: Path, steps: int) -> list[str]:
    """The arguments that every recipe gets here."""
    return [
        f"model_name={MODEL}", f"renderer_name={RENDERER}", f"groups_per_batch={BATCH}",
        f"max_tokens={MAX_TOKENS}", f"lora_rank={RANK}", f"learning_rate={LEARNING_RATE}",
        f"max_steps={steps}", "eval_every=0", f"log_path={log}",
        "behavior_if_log_dir_exists=delete",
    ]  # fmt: skip


def run_recipe(
    url: str, arguments: Sequence[str], log: Path, steps: int, loss: Callable[[Any], float]
) -> None:
    """A recipe's module with its arguments, in a process of its own, with a progress bar that shows
    the loss of a row of its metrics."""
    command = [sys.executable, "-m", *arguments]
    output_path = log.with_suffix(".log")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "PYTHONWARNINGS": "ignore",
    }
    print("Running:", " ".join(command[1:]))
    with output_path.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            follow(process, log, steps, loss)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        tail = output_path.read_text().strip().splitlines()[-5:]
        raise RuntimeError("the recipe failed; the end of its output:\n" + "\n".join(tail))


def follow(
    process: "subprocess.Popen[bytes]", log: Path, steps: int, loss: Callable[[Any], float]
) -> None:
    """A progress bar of the recipe's steps, read off its metrics, until it ends."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(log.name.upper()),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, loss="")
        while process.poll() is None:
            rows = metrics(log)
            known = bool(rows and rows[-1].get("loss_tokens"))
            shown = f"loss {loss(rows[-1]):.3f} a token" if known else ""
            progress.update(task, completed=len(rows), loss=shown)
            time.sleep(0.5)
        progress.update(task, completed=len(metrics(log)))


def metrics(log: Path) -> list[dict[str, Any]]:
    """The recipe's metrics so far, one row a step; a last line still being written is left out."""
    path = log / "metrics.jsonl"
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, complete) if "loss" in row]


# ---- showing ----


def print_table(
    before: Scores, after: Scores, teacher: Scores, losses: Sequence[float], seconds: float
) -> None:
    """The changes, as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Held-out questions answered right ({PER_SKILL} of each skill, greedy)")
    table.add_column("skill")
    for title in ("student before", "student after", "teacher, sees the demonstration"):
        table.add_column(title, justify="right")
    for skill in data.SKILLS:
        row = (scores.skills[skill] for scores in (before, after, teacher))
        table.add_row(skill, *(f"{value:.0%}" for value in row))
    overall = (f"{scores.overall:.0%}" for scores in (before, after, teacher))
    table.add_row("all", *overall, style="bold", end_section=True)
    row = (scores.skills[data.KNOWN_SKILL] for scores in (before, after, teacher))
    table.add_row(f"{data.KNOWN_SKILL} (known before)", *(f"{value:.0%}" for value in row))
    console = Console()
    console.print(table)
    if losses:
        console.print(f"loss a token: {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
    console.print(f"measured and trained in {seconds:.0f} s")


def draw(
    before: Scores, after: Scores, teacher: Scores, losses: Sequence[float], path: Path
) -> None:
    """The same as a picture: accuracy of each skill, and the loss of each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    labels = [*data.SKILLS, "all"]
    sides = {"student before": before, "student after": after, "teacher (sees it)": teacher}
    colors = ("#b8b8b8", "#2a6f97", "#e9c46a")
    for i, ((name, scores), color) in enumerate(zip(sides.items(), colors, strict=True)):
        heights = [100 * scores.skills[skill] for skill in data.SKILLS] + [100 * scores.overall]
        places = [x + (i - 1) * 0.27 for x in range(len(labels))]
        left.bar(places, heights, 0.25, label=name, color=color)
    left.set_xticks(range(len(labels)), labels)
    left.set_ylabel("held-out questions right, %")
    left.set_ylim(0, 105)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    right.plot(range(1, len(losses) + 1), losses, color=colors[1])
    right.set_xlabel("SDFT step")
    right.set_ylabel("cross-entropy to the teacher, a token")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
