"""`tinsmith demo --real`: SFT and SDFT on a real language model, and what each learns and keeps.

SmolLM2-135M-Instruct learns three notations (real_data.py) from the same demonstrations by SFT and
by SDFT. This module writes the questions, gets the base model's answers to the instructions that it
should keep following, and passes all of it to `tinsmith compare`, whose command it prints. The
conclusions are computed from the figures.
"""

import argparse
import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinsmith.cli import argument_types
from tinsmith.compare import command, real_data, report
from tinsmith.compare.data import digest, read_records
from tinsmith.compare.plan import PlannedRun, write_json
from tinsmith.compare.report import Estimate, Group
from tinsmith.models.registry import find_model
from tinsmith.server.clients import require_server

FILES = ("new.jsonl", "test.jsonl", "old.jsonl")
TEACHER_FILE = "teacher.json"
# In answers this short, the first tokens are the ones to learn.
CHANGES = {"sdft": ("--set", "sdft.skip_first_tokens=0")}
Machine = Mapping[str, Any]  # device and threads, from the command line
KEPT = {"score": ("instructions", 100, " points"), "text": ("text", 1, " nats a token")}


@dataclass(frozen=True)
class Setup:
    """What is trained, and with what. The defaults were chosen on questions of another seed than
    the demonstration's.

    model: the name. folder: of the model, if the name does not give it. renderer: the cookbook's
    for ChatML without thinking, which is the model's form. per_skill: held-out questions of each
    skill. Each demonstration is trained on once. rates: each method's own, because SFT on the
    demonstrations needs lower ones than SDFT on the student's answers. The others are options of
    `tinsmith compare`.
    """

    model: str = "smollm2"
    folder: Path | None = None
    renderer: str = "qwen3_instruct"
    per_skill: int = 8
    steps: int = argument_types.REAL_STEPS
    batch: int = 4
    rank: int = 16
    max_tokens: int = 18
    rates: Mapping[str, Sequence[float]] = field(
        default_factory=lambda: {"sft": (1e-4, 3e-4), "sdft": (1e-3, 2e-3)}
    )


SETUP = Setup()


def run(options: argparse.Namespace) -> int:
    """The command `tinsmith demo --real`; returns the exit code."""
    steps = options.steps or SETUP.steps
    rates = SETUP.rates if options.lr is None else dict.fromkeys(SETUP.rates, options.lr)
    return demonstrate(
        options.out or Path(argument_types.REAL_OUT),
        replace(SETUP, steps=steps, rates=rates),
        seed=options.seed,
        seeds=options.seeds or 1,
        device=options.device,
        threads=options.threads,
    )


def demonstrate(
    out: Path,
    setup: Setup = SETUP,
    *,
    seed: int = 0,
    seeds: int = 1,
    device: str = "auto",
    threads: int = 0,
) -> int:
    """Runs the demonstration, or the missing part of it in its folder; returns the exit code.

    seed: of the questions. seeds: trainings of each method at each rate.

        demonstrate(Path("tinsmith-demo-real"), seeds=3)
    """
    require_server()
    command.require_cookbook()
    find_model(setup.model, {setup.model: setup.folder} if setup.folder else {})
    machine, out = {"device": device, "threads": threads}, out.resolve()
    prepare(out, setup, seed, machine)
    parser, code = argument_types.Parser(prog="tinsmith compare"), 0
    command.add_options(parser)
    for rates in dict.fromkeys(map(tuple, setup.rates.values())):
        arguments = compare_arguments(out, setup, rates, seeds, machine)
        print(f"Running: tinsmith compare {shlex.join(arguments)}\n", flush=True)
        if code := command.run(parser.parse_args(arguments)):
            return code
    found = report.groups(out)
    table = report.markdown(skills_table(out, found))
    told = "\n".join(verdict(found))
    print(f"\nHeld-out questions answered right, by skill:\n\n{table}\n{told}")
    with (out / "report.md").open("a", encoding="utf-8") as file:
        file.write(f"\n{table}\n{told}\n")
    return code


def compare_arguments(
    out: Path, setup: Setup, rates: Sequence[float], seeds: int, machine: Machine
) -> list[str]:
    """The arguments of `tinsmith compare` for the methods with these rates."""
    methods = [method for method, theirs in setup.rates.items() if tuple(theirs) == tuple(rates)]
    changes = [change for method in methods for change in CHANGES.get(method, ())]
    model = setup.model if setup.folder is None else f"{setup.model}={setup.folder}"
    new, test, old = (str(out / "questions" / name) for name in FILES)
    return [
        "--model", model, "--renderer", setup.renderer, "--data", new, "--test", test,
        "--retain", old, "--scorer", "tinsmith.compare.real_data:score", "--methods",
        ",".join(methods), "--demonstration", "turn", *changes,
        "--lr", ",".join(f"{rate:g}" for rate in rates), "--seeds", str(seeds),
        "--steps", str(setup.steps), "--batch", str(setup.batch), "--rank", str(setup.rank),
        "--max-tokens", str(setup.max_tokens), "--checkpoints", str(out / "checkpoints"),
        *(f"--{name}={value}" for name, value in machine.items()), "--out", str(out),
    ]  # fmt: skip


# ---- before the trainings ----


def prepare(out: Path, setup: Setup, seed: int, machine: Machine) -> None:
    """Writes the questions, the base model's answers to those it should keep, and for each skill
    the share of held-out questions that the teacher, who has read the answer, gets right."""
    place = out / "questions"
    place.mkdir(parents=True, exist_ok=True)
    train = real_data.training_rows(setup.steps * setup.batch, seed)
    real_data.write_rows(place / "new.jsonl", train)
    real_data.write_rows(place / "test.jsonl", real_data.held_out_rows(setup.per_skill, seed))
    mark = digest(place / "test.jsonl")
    if (place / TEACHER_FILE).exists() and _read(place / TEACHER_FILE)["of"] == mark:
        return
    print("Asking the base model what it should keep, and the teacher what is to be learned.")
    said, right = ask_base(out, setup, machine)
    if not (place / "old.jsonl").exists():
        real_data.write_rows(place / "old.jsonl", real_data.kept_rows(said))
    write_json(place / TEACHER_FILE, {"of": mark, "right": right})


def ask_base(out: Path, setup: Setup, machine: Machine) -> tuple[list[str], dict[str, float]]:
    """The base model's greedy answers to the instructions, and the teacher's share of right answers
    for each skill."""
    import tinsmith
    from tinsmith.compare.prompts import Prompts

    folder = setup.folder or find_model(setup.model, {})
    prompts = Prompts(folder, setup.renderer, "turn")
    records = read_records(out / "questions" / "test.jsonl")
    asked = [real_data.chat(text, "?")["messages"][:1] for text in real_data.CHECKS]
    inputs = [prompts.renderer.build_generation_prompt(messages) for messages in asked]
    inputs += [prompts.teacher(record) for record in records]
    params = prompts.sampling(setup.max_tokens, temperature=0.0)
    with (
        tinsmith.serve(
            {setup.model: folder}, checkpoints=out / "checkpoints", **machine
        ) as backend,
        backend.service_client() as client,
    ):
        base = client.create_sampling_client(base_model=setup.model).result()
        drawn = [base.sample(one, 1, params) for one in inputs]
        texts = [prompts.text(list(one.result().sequences[0].tokens)) for one in drawn]
    right = defaultdict(list)
    for record, text in zip(records, texts[len(asked) :], strict=True):
        right[record.row["skill"]].append(real_data.score(text, record.answer, record.row))
    return texts[: len(asked)], {skill: sum(some) / len(some) for skill, some in right.items()}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- after them ----


def skills_table(out: Path, found: Sequence[Group]) -> list[list[str]]:
    """The share of right answers for each skill: the base model's, the teacher's, and each method's
    at each rate, as the mean over its seeds."""
    rows = [["", "learning rate", *real_data.SKILLS]]
    lines = (out / "questions" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    skills = [json.loads(line)["skill"] for line in lines]
    teacher = _read(out / "questions" / TEACHER_FILE)["right"]
    for group in found:
        shares = [_by_skill(out, run, skills) for run in group.runs]
        means = {skill: sum(one[skill] for one in shares) / len(shares) for skill in teacher}
        rate = "" if group.learning_rate is None else f"{group.learning_rate:g}"
        rows.append([report.title(group.method), rate, *_percents(means)])
    rows.insert(2, ["teacher, has read the answer", "", *_percents(teacher)])
    return rows


def answers(out: Path, run: report.ResultRow) -> dict[str, list[dict[str, Any]]]:
    """A run's answers: its rows of answers.jsonl, by the sides "learned" and "kept".

    answers(folder, group.runs[0])["kept"][0]["answer"]
    """
    place = out / "runs" / PlannedRun(run["method"], run["learning_rate"], run["seed"]).name
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in report.SIDES}
    for line in (place / "answers.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        sides[row["side"]].append(row)
    return sides


def _by_skill(out: Path, run: report.ResultRow, skills: Sequence[str]) -> dict[str, float]:
    """A run's share of right answers for each skill."""
    right = defaultdict(list)
    for row in answers(out, run)["learned"]:
        right[skills[row["line"] - 1]].append(row["score"])
    return {skill: sum(some) / len(some) for skill, some in right.items()}


def _percents(shares: dict[str, float]) -> list[str]:
    return [f"{shares[skill]:.0%}" for skill in real_data.SKILLS]


def verdict(found: Sequence[Group]) -> list[str]:
    """Conclusions from the figures, a sentence each: about the base model, about SFT and SDFT at
    their best rates, and whether SDFT keeps more there.

        verdict(report.groups(folder))[-1]
    """
    base = next(group for group in found if group.method == "base")
    sft, sdft = (best(found, method) for method in ("sft", "sdft"))
    lines = [f"Before training: {_figures(base)}."]
    lines += [
        f"{report.title(group.method)} is best at the learning rate {group.learning_rate:g}: "
        f"{_figures(group)}."
        for group in (sft, sdft)
    ]
    told = {name: gain(sdft, sft, "kept", name) for name in KEPT}
    more = [KEPT[name][0] for name, one in told.items() if one.mean - (one.half or 0) > 0]
    if len(more) == len(told):
        what = "SDFT keeps more than SFT, each at its best rate"
    elif more:
        what = f"SDFT keeps more of the {' and the '.join(more)} than SFT, and no more of the rest"
    else:
        what = "SDFT does NOT keep more than SFT, each at its best rate"
    seeds = len(_seeds(sft) & _seeds(sdft))
    differences = [_difference(*KEPT[name], one) for name, one in told.items()]
    learned = gain(sdft, sft, "learned", "score")
    differences.append(_difference("new skills", 100, " points", learned))
    over = "one seed" if seeds == 1 else f"{seeds} seeds"
    return [*lines, f"{what} ({over}, SDFT less SFT): {', '.join(differences)}."]


def best(found: Sequence[Group], method: str) -> Group:
    """A method's group at its best rate: the one with the largest sum of the share of new skills
    learned and the share of instructions kept."""
    mine = [group for group in found if group.method == method]
    return max(mine, key=lambda group: sum(group.estimate(s, "score").mean for s in report.SIDES))


def gain(group: Group, other: Group, side: str, measure: str) -> Estimate:
    """How much more a group has than another: the mean over the seeds that both have, which saw the
    same questions in the same order, and half its 95 % interval."""
    mine, theirs = (
        {run["seed"]: float(run[side][measure]) for run in one.runs} for one in (group, other)
    )
    return report.estimate([mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()])


def _seeds(group: Group) -> set[int]:
    return {run["seed"] for run in group.runs}


def _figures(group: Group) -> str:
    learned, kept = (group.estimate(side, "score").mean for side in report.SIDES)
    text = group.estimate("kept", "text").mean
    return (
        f"{learned:.0%} of the held-out questions right, {kept:.0%} of the instructions followed, "
        f"text at {text:.3f} nats a token"
    )


def _difference(title: str, scale: int, unit: str, one: Estimate) -> str:
    digits = 0 if scale == 100 else 3
    half = "" if one.half is None else f" ± {scale * one.half:.{digits}f}"
    return f"{title} {scale * one.mean:+.{digits}f}{half}{unit}"
