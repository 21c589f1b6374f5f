"""`tinsmith demo`: what SDFT learns and keeps, compared with SFT, over learning rates.

The model in the package is a tiny Qwen3 with three tool-use skills. It learns four others from
another author's demonstrations. The cookbook's unmodified SFT and SDFT recipes train it, each at
several learning rates. Held-out questions measure both the new skills, whose cities, words and
times are in no training question, and the skills that it had before. Everything comes from one
seed, so the figures are reproducible.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.demo import data
from tinsmith.demo.outcomes import Outcome, methods, of_method, table, verdict
from tinsmith.demo.picture import Panel, draw
from tinsmith.demo.trainings import (
    MAX_TOKENS,
    METHODS,
    MODEL,
    RENDERER,
    Training,
    run_trainings,
    write_questions,
)
from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from tinsmith.server.backend import Backend

PER_SKILL = 16  # held-out questions


def serve_model(options: argparse.Namespace, out: Path) -> "Backend":
    """A server of the demonstration's model, with the command line's options."""
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
    questions = data.held_out_examples(PER_SKILL, options.seed)
    questions += data.known_examples(PER_SKILL, options.seed)
    shown = [demonstrated(one, own=options.own_notation) for one in questions]
    trainings = [
        Training(method, rate, options.steps, out) for method in METHODS for rate in options.lr
    ]
    start = time.perf_counter()
    with serve_model(options, out) as backend:
        write_questions(out, options.steps, options.seed, own=options.own_notation)
        print_commands(trainings)
        run_trainings(backend.url, trainings)
        client = backend.service_client()
        base = client.create_sampling_client(base_model=str(MODEL)).result()
        print(f"Asking {len(questions)} held-out questions before and after.")
        before = Outcome("before", 0.0, *evaluate(base, questions))
        teacher = Outcome("teacher", 0.0, *evaluate(base, shown))
        outcomes = [
            Outcome(one.method, one.learning_rate, *evaluate(sampler, questions))
            for one in trainings
            for sampler in [client.create_sampling_client(model_path=one.sampler_path()).result()]
        ]
    print_table([before, teacher, *outcomes])
    draw(panels(before, outcomes), out / "demo.png")
    print(f"Trained and measured in {time.perf_counter() - start:.0f} s.")
    print(f"The picture is {out / 'demo.png'}; the recipes' own logs are in {out}.")


def require_cookbook() -> None:
    """Raises ImportError with the fix if the demonstration's packages are not installed."""
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


def demonstrated(example: data.Example, *, own: bool) -> data.Example:
    """The example with the question in the form that SDFT's teacher gets."""
    demonstration = example.answer if own else example.demonstration
    question = data.demonstration_prompt(example.question, demonstration)
    return dataclasses.replace(example, question=question)


def evaluate(
    sampler: Any, examples: Sequence[data.Example]
) -> tuple[dict[str, float], dict[str, float]]:
    """The shares of right answers for each skill, of the new and of the known ones: greedy answers
    to the examples' questions, all requested at once through the SDK."""
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
        message = {"role": "user", "content": example.question}
        prompt = renderer.build_generation_prompt([message])
        futures.append(sampler.sample(prompt=prompt, num_samples=1, sampling_params=params))
    right: dict[str, list[bool]] = {}
    for example, future in zip(examples, futures, strict=True):
        tokens = future.result().sequences[0].tokens
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        right.setdefault(example.skill, []).append(data.score(answer, example.answer))
    shares = {skill: sum(values) / len(values) for skill, values in right.items()}
    return (
        {skill: shares[skill] for skill in data.SKILLS},
        {skill: shares[skill] for skill in data.KNOWN_SKILLS},
    )


# ---- showing ----


def print_commands(trainings: Sequence[Training]) -> None:
    """The recipes' command lines, one of each method."""
    for method in dict.fromkeys(one.method for one in trainings):
        mine = [one for one in trainings if one.method == method]
        rates = ", ".join(f"{one.learning_rate:g}" for one in mine)
        print(f"{method} at learning rates {rates}: {' '.join(mine[0].command)}")


def print_table(columns: Sequence[Outcome]) -> None:
    """Prints the figures as a table, and conclusions. columns: the model before, the teacher, and
    each training."""
    from rich.console import Console
    from rich.table import Table

    titles, *rows = table(columns)
    shown = Table(title=f"Held-out questions answered right, of {PER_SKILL} of each skill")
    for place, title in enumerate(titles):
        shown.add_column(title, justify="left" if place == 0 else "right")
    for row in rows:
        mean = row[0] in ("learned", "kept")
        shown.add_row(*row, style="bold" if mean else None, end_section=mean)
    console = Console()
    console.print(shown)
    console.print("teacher: the model before, with a demonstration in its prompt")
    for sentence in verdict(columns[2:], "SDFT", "SFT"):
        console.print(sentence)


def panels(before: Outcome, outcomes: Sequence[Outcome]) -> list[Panel]:
    """The picture's panels: learned and kept, of equal size."""
    sides = (
        ("learned", "learned_skills", "Learned: " + ", ".join(data.SKILLS)),
        ("kept", "kept_skills", "Kept: " + ", ".join(data.KNOWN_SKILLS)),
    )
    found = []
    for side, skills, title in sides:
        curves, parts = {}, {}
        for method in methods(outcomes):
            mine = of_method(outcomes, method)
            curves[method] = {one.learning_rate: 100 * getattr(one, side) for one in mine}
            parts[method] = [
                {one.learning_rate: 100 * getattr(one, skills)[skill] for one in mine}
                for skill in getattr(before, skills)
            ]
        axis = "held-out questions answered right, %"
        found.append(Panel(title, axis, 100 * getattr(before, side), curves, parts, (0, 100)))
    return found
