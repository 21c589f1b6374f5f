"""OPSD's data: problems with solutions, the prompts of student and teacher, and datums.

A datum for `generalized_jsd` is the student's sequence as every Tinker loss takes it (model_input,
target_tokens one position on, weights that mark the completion) and `teacher_tokens`: the teacher's
prompt and then the same completion. The server compares the rows that predict the same token. It
refuses a datum if its two sequences do not end alike.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
class Prompts:
    """The prompts of student and teacher for a problem, as the user's message."""

    student: str
    teacher: str

    def of(self, row: Problem) -> tuple[str, str]:
        """Both messages."""
        given = {"problem": row.problem, "solution": row.solution}
        return self.student.format(**given), self.teacher.format(**given)


_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{{}}."

PROMPTS = {
    "math": Prompts(
        student="Problem: {problem}\n\n" + _INSTRUCTION,
        teacher="Problem: {problem}\n\n"
        "Here is a reference solution:\n{solution}\n\n"
        "Now that you have understood it, solve the problem yourself, in your own words.\n"
        + _INSTRUCTION,
    ),
    "demonstration": Prompts(  # the two of the cookbook's SDFT recipe
        student="{problem}",
        teacher=DEMONSTRATION.replace("{question}", "{problem}").replace(
            "{golden_answer}", "{solution}"
        ),
    ),
}


def read_problems(path: str | Path) -> list[Problem]:
    """The rows of a JSONL file with the columns problem and solution; others are passed over.

    Raises ValueError with the line's number for a row that has not both as text.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
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
    """Batch `index` of endless epochs, each shuffled by itself, so that a resumed run goes on."""
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
    """A completion, each token of it with one weight, after the student's prompt and the
    teacher's. OPSD's mean over a batch's completion tokens is the weight 1 / their number."""
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
    """The last \\boxed{…} of a solution, or, where there is none, all of it."""
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
    """Whether an answer is the solution's, character by character."""
    return answer_of(answer) == answer_of(row.solution)
