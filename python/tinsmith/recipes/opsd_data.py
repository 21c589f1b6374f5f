"""OPSD's data: problems with solutions, the prompts of student and teacher, and datums.

A datum for `generalized_jsd` is the student's sequence as in every Tinker loss (model_input,
target_tokens shifted by one, weights that mark the completion) and `teacher_tokens`: the teacher's
prompt and then the same completion. The server compares the rows that predict the same token. It
refuses a datum if its two sequences do not end alike.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import numpy as np
import tinker

from tinsmith.demo.data import DEMONSTRATION

Row = TypeVar("Row")


@dataclass(frozen=True)
class Problem:
    """One row of a data file."""

    problem: str
    solution: str


@dataclass(frozen=True)
class PromptPair:
    """The prompts of student and teacher for a problem, as user messages."""

    student: str
    teacher: str

    def of(self, row: Problem) -> tuple[str, str]:
        """Both messages."""
        given = {"problem": row.problem, "solution": row.solution}
        return self.student.format(**given), self.teacher.format(**given)


_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{{}}."

PROMPTS = {
    "math": PromptPair(
        student="Problem: {problem}\n\n" + _INSTRUCTION,
        teacher="Problem: {problem}\n\n"
        "Here is a reference solution:\n{solution}\n\n"
        "Now that you have understood it, solve the problem yourself, in your own words: neither "
        "repeat the solution nor reword it.\n" + _INSTRUCTION,
    ),
    "math-february": PromptPair(
        student="Problem: {problem}\n\n" + _INSTRUCTION,
        teacher="{problem}\n\n"
        "Here is a reference solution:\n{solution}\n\n"
        "Now that you have followed each of its steps, reach the same answer by steps of your "
        "own.\n" + _INSTRUCTION,
    ),
    "plain": PromptPair(
        student="{problem}",
        teacher="{problem}\n\nA reference answer:\n{solution}\n\nNow answer in your own words.",
    ),
    "demonstration": PromptPair(  # both from the cookbook's SDFT recipe
        student="{problem}",
        teacher=DEMONSTRATION.replace("{question}", "{problem}").replace(
            "{golden_answer}", "{solution}"
        ),
    ),
}
_FIELDS = {"student": ("problem",), "teacher": ("problem", "solution")}  # of a template


def read_prompts(prompts: str) -> list[PromptPair]:
    """Pairs of prompts: comma-separated names of PROMPTS, or those in a file. A JSON file is one
    pair or a list of them, a JSONL file one pair per line: {"student": …, "teacher": …}, with
    {problem} in both, {solution} in the teacher's, and {{ for a brace.

    Raises ValueError that names the file, the pair and the invalid key.

        read_prompts("math,plain")
    """
    names = prompts.split(",")
    if all(name in PROMPTS for name in names):
        return [PROMPTS[name] for name in names]
    path = Path(prompts)
    if path.is_file():
        return [_pair(row, f"{path}, pair {at}") for at, row in enumerate(_rows(path), 1)]
    if path.suffix in (".json", ".jsonl"):
        raise ValueError(f"prompts: there is no file {prompts!r}")
    raise ValueError(
        f"prompts must be one of {sorted(PROMPTS)}, several with commas between them, or a JSON "
        f"or JSONL file, not {prompts!r}"
    )


def _rows(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        rows = found if isinstance(found, list) else [found]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is neither JSON nor JSONL: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no pairs of prompts")
    return rows


def _pair(row: Any, where: str) -> PromptPair:
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where} needs the keys student and teacher, and no others; found {found}"
        )
    for key, fields in _FIELDS.items():
        if not isinstance(row[key], str):
            raise ValueError(f"{where}, {key} should be text, not {type(row[key]).__name__}")
        try:
            used = {name for _, name, _, _ in Formatter().parse(row[key]) if name is not None}
        except ValueError as error:
            raise ValueError(f"{where}, {key}: {error}; a brace is written {{{{") from None
        for name in sorted(used.difference(fields)):
            raise ValueError(f"{where}, {key} may not have {{{name}}}; a brace is written {{{{")
        for name in sorted(set(fields) - used):
            raise ValueError(f"{where}, {key} has no {{{name}}}")
    return PromptPair(row["student"], row["teacher"])


def pair_of(pairs: Sequence[PromptPair], row: Problem, seed: int) -> PromptPair:
    """A problem's pair of prompts, drawn by the seed: always the same."""
    return random.Random(f"{seed}-{row.problem}").choice(pairs)


def read_problems(path: str | Path) -> list[Problem]:
    """The rows of a JSONL file with the columns problem and solution; other columns are ignored.

    Raises ValueError with the line's number if a row does not have both as text.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        for key in ("problem", "solution"):
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                found = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{path}, line {number} needs {key} as text; found {found}")
        rows.append(Problem(row["problem"], row["solution"]))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def batch_of(problems: Sequence[Row], index: int, size: int, seed: int) -> list[Row]:
    """Batch `index` of endless epochs, each shuffled by itself, so a resumed run continues."""
    picked, orders = [], {}
    for place in range(index * size, (index + 1) * size):
        epoch, at = divmod(place, len(problems))
        if epoch not in orders:
            orders[epoch] = list(range(len(problems)))
            random.Random(f"{seed}-{epoch}").shuffle(orders[epoch])
        picked.append(problems[orders[epoch][at]])
    return picked


def make_datum(
    student_prompt: Sequence[int],
    teacher_prompt: Sequence[int],
    completion: Sequence[int],
    weight: float,
) -> tinker.Datum:
    """A completion, each token with one weight, after the student's prompt and the teacher's. For
    OPSD's mean over a batch's completion tokens, the weight is 1 / their number."""
    tokens = [*student_prompt, *completion]
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(student_prompt) - 1 :] = weight
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "weights": weights,
            "teacher_tokens": np.asarray([*teacher_prompt, *completion], np.int64),
        },
    )


def answer_of(text: str) -> str:
    """The last \\boxed{…} of a solution, or else all of it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    depth, begin = 0, start + len("\\boxed")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin + 1 : at].strip()
    return text[begin + 1 :].strip()


def is_correct(answer: str, row: Problem) -> bool:
    """Whether an answer equals the solution's, character by character."""
    return answer_of(answer) == answer_of(row.solution)
