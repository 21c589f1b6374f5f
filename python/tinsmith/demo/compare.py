"""SDFT compared with OPSD: `python -m tinsmith.demo.compare`, on the model that is in the package.

The cookbook's SDFT recipe (cross-entropy to the teacher's 20 likeliest tokens) and OPSD's (the
divergence from the teacher over the whole vocabulary, computed on the server) train on the same
questions, with the same prompts, batches and learning rate. Each saves its student now and then,
and all of them answer the demo's held-out questions. Ends with a table and a picture of both
curves.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith import usage
from tinsmith.demo import data, demo

Curve = dict[int, float]  # held-out accuracy after so many steps
TITLES = {"sdft": "SDFT, top 20", "opsd": "OPSD, whole vocabulary"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _parser().parse_args(arguments)
    demo.require_cookbook()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    held_out = data.held_out_examples(demo.PER_SKILL, options.seed)
    held_out += data.known_examples(demo.PER_SKILL, options.seed)
    start = time.perf_counter()
    curves, losses = {}, {}
    with demo.serve_model(options, out) as backend:
        client = backend.service_client()
        base = client.create_sampling_client(base_model=str(demo.MODEL)).result()
        before = demo.evaluate(base, held_out).overall
        every = max(1, options.steps // 5)
        for name, run in (("sdft", demo.run_sdft), ("opsd", run_opsd)):
            log = run(backend.url, out, options.steps, options.seed, save_every=every)
            curves[name] = {0: before} | accuracies(client, log, held_out)
            losses[name] = [row["loss"] / row["loss_tokens"] for row in demo.metrics(log)]
        losses["opsd"] = [row["loss"] for row in demo.metrics(log)]  # which is a mean already
    print_table(curves, time.perf_counter() - start)
    draw(curves, losses, out / "compare.png")
    print(f"The picture is {out / 'compare.png'}; the recipes' own logs are in {out}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = usage.Parser(
        prog="python -m tinsmith.demo.compare",
        description="SDFT and OPSD on the same questions, on this machine.",
        epilog=usage.epilog(["python -m tinsmith.demo.compare --steps 20 --out compare"]),
    )
    usage.add_demo(parser, steps=40, out="tinsmith-compare")
    return parser


def write_problems(path: Path, examples: Sequence[data.Example]) -> None:
    """Questions in the OPSD recipe's format."""
    rows = ({"problem": one.question, "solution": one.answer} for one in examples)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_opsd(url: str, out: Path, steps: int, seed: int, *, save_every: int = 0) -> Path:
    """The OPSD recipe on the questions that SDFT has; returns its folder."""
    log, problems = out / "opsd", out / "problems.jsonl"
    write_problems(problems, data.sdft_examples(data.rows_for_steps(steps, demo.BATCH), seed))
    arguments = [
        "tinsmith.recipes.opsd", f"data_path={problems}", "prompts=demonstration",
        "defaults=february-2026", "bare_student=False", "student_thinking=False",
        "teacher_thinking=False", "temperature=1.0", "top_p=1.0", "top_k=-1", f"seed={seed}",
        *demo.settings(log, steps), f"save_every={save_every}",
    ]  # fmt: skip
    demo.run_recipe(url, arguments, log, steps, lambda row: row["loss"])
    return log


def accuracies(client: Any, log: Path, held_out: Sequence[data.Example]) -> Curve:
    """The share of right answers of a recipe's saved students, by steps."""
    found = {}
    for line in (log / "checkpoints.jsonl").read_text().splitlines():
        saved = json.loads(line)
        sampler = client.create_sampling_client(model_path=saved["sampler_path"]).result()
        found[saved["batch"]] = demo.evaluate(sampler, held_out).overall
    return found


def print_table(curves: dict[str, Curve], seconds: float) -> None:
    """Both curves as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Held-out questions answered right (greedy)")
    table.add_column("after steps", justify="right")
    for name in curves:
        table.add_column(TITLES[name], justify="right")
    for step in sorted(set().union(*curves.values())):
        cells = (f"{curve[step]:.0%}" if step in curve else "" for curve in curves.values())
        table.add_row(str(step), *cells)
    console = Console()
    console.print(table)
    console.print(f"measured and trained in {seconds:.0f} s")


def draw(curves: dict[str, Curve], losses: dict[str, list[float]], path: Path) -> None:
    """Accuracy of both, and each one's loss as a share of its first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, curve), color in zip(curves.items(), ("#e9a23b", "#2a6f97"), strict=True):
        steps = sorted(curve)
        heights = [100 * curve[step] for step in steps]
        left.plot(steps, heights, "o-", label=TITLES[name], color=color)
        share = [loss / losses[name][0] for loss in losses[name]]
        right.plot(range(1, len(share) + 1), share, label=TITLES[name], color=color)
    left.set_ylabel("held-out questions right, %")
    left.set_ylim(-2, 105)
    left.legend(frameon=False)
    right.set_ylabel("loss a token, of the first step's")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
