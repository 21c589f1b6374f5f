"""The demonstration's data: tool-use questions, golden answers and the base model's guesses.

Everything comes out of a seeded `random.Random`, with nothing but the standard library, so the
demo and the script that trained the shipped model (make_model.py) agree on every byte.

The base model has mastered one skill (`time`): it answers the bare question with the right call. Of
the other four (`weather`, `route`, `table`, `translation`) it has a vague idea: without a
demonstration it mostly calls `get_help`, sometimes the right tool, sometimes any tool, and its
arguments are often wrong. Shown a demonstration in the SDFT recipe's prompt, it follows the
demonstration. SDFT teaches the student to answer the bare question as the teacher would.

Every call begins with the same three tokens (`Action`, `:`, ` get`), because the recipe puts no
loss on the first three tokens of a completion: what distinguishes the tools comes after them.

Cities, names, words and times are split once: no SDFT question mentions a held-out value. The base
model has met all values, since it must be able to spell them. Days, languages and numbers of seats
are small closed sets, which both sides use.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

SKILLS = ("weather", "route", "table", "translation")
KNOWN_SKILL = "time"
FALLBACK_TOOL = "help"

# Equal to tinker_cookbook.distillation.sdft.DEFAULT_DEMO_TEMPLATE, which this module must not
# import: the base model can be remade without the cookbook.
DEMONSTRATION = (
    "{question}\n\n"
    "This is an example for a response to the question:\n"
    "{golden_answer}\n\n"
    "Now answer with a response of your own, including the thinking process."
)

# The tools' arguments, in the order in which a call names them.
ARGUMENTS = {
    "weather": ("city", "day"),
    "route": ("from", "to"),
    "table": ("seats", "time"),
    "translation": ("text", "to"),
    "time": ("city",),
    "help": ("about",),
}

TEMPLATES = {
    "weather": (
        "What will the weather be in {city} on {day}?",
        "Will it rain in {city} on {day}?",
        "On {day} I am in {city}. Do I need a coat?",
        "{person} asks how warm {city} is on {day}.",
        "How cold does it get on {day} in {city}?",
        "Is {day} a sunny day in {city}?",
    ),
    "route": (
        "How do I get from {from} to {to}?",
        "Which train goes to {to} from {from}?",
        "I am in {from} and must be in {to}. Which way?",
        "{person} travels to {to}, starting in {from}. Which way?",
        "What is the way from {from} to {to}?",
        "Show me the road to {to} if I start in {from}.",
    ),
    "table": (
        "Is there a table for {seats} at {time}?",
        "At {time} we are {seats} people. Can we eat?",
        "We want to eat at {time} with {seats} people.",
        "{person} needs {seats} seats for dinner at {time}.",
        "Book dinner for {seats} at {time}.",
        "Do you have {seats} seats free at {time}?",
    ),
    "translation": (
        'How do you say "{text}" in {language}?',
        'What is the {language} word for "{text}"?',
        'Translate "{text}" to {language}.',
        '{person} wants "{text}" in {language}.',
        'In {language}, what is "{text}"?',
        'I need "{text}" in {language}, please.',
    ),
    "time": (
        "What time is it in {city}?",
        "Tell me the time in {city}.",
        "{person} is in {city}. How late is it there?",
        "How late is it now in {city}?",
    ),
}

DAYS = {
    "Monday": "mon", "Tuesday": "tue", "Wednesday": "wed", "Thursday": "thu",
    "Friday": "fri", "Saturday": "sat", "Sunday": "sun",
}  # fmt: skip
LANGUAGES = {
    "French": "fr", "German": "de", "Spanish": "es", "Italian": "it",
    "Polish": "pl", "Danish": "da", "Greek": "el", "Dutch": "nl",
}  # fmt: skip


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_CITIES = _listed(
    "Oslo Bergen Lima Quito Cairo Tunis Delhi Mumbai Kyoto Osaka Seoul Busan Hanoi Manila Jakarta "
    "Perth Sydney Darwin Boston Denver Dallas Miami Austin Toronto Ottawa Calgary Bogota Santiago "
    "Havana Panama Lagos Accra Dakar Nairobi Kampala Lusaka Harare Maputo Madrid Sevilla Bilbao "
    "Porto Lisbon Paris Lyon Nantes Lille Berlin Hamburg Bremen Dresden Munich Vienna Graz Prague "
    "Brno Warsaw Gdansk Krakow Riga Vilnius Tallinn Helsinki Turku Tampere Malmo Lund Aarhus "
    "Odense Dublin Cork Galway London Leeds Bristol York Cardiff Glasgow Milan Turin Naples Bari "
    "Rome Venice Athens Patras Sofia Varna Zagreb Split Belgrade Skopje Tirana Ankara Izmir Baku "
    "Tbilisi Yerevan Tehran Muscat Doha Amman Beirut"
)
_PEOPLE = _listed(
    "Anna Ben Clara David Elena Farid Greta Hugo Ines Jonas Karim Lena Marco Nadia Oscar Paula "
    "Quinn Rosa Samir Tara Umar Vera Wanda Xenia Yusuf Zoe Adam Bella Carlo Dora Emil Fiona"
)
_WORDS = _listed(
    "apple bread candle door engine flower garden hammer island jacket kettle ladder mirror needle "
    "orange pencil quilt river saddle towel umbrella valley window yellow zipper anchor basket "
    "copper dragon eagle feather glove honey ink jungle knife lemon meadow nest ocean pepper "
    "rabbit silver tiger velvet walnut acorn butter cherry dolphin ember forest ginger harbor "
    "iron jewel kitten lantern marble nutmeg olive parrot ribbon shadow thunder violin whistle "
    "almond beaver camel daisy"
)

# Tools and arguments of the invented calls that teach the base model to follow a demonstration.
_TOOL_WORDS = _listed(
    "weather route table translation time help news music score stock movie recipe flight hotel "
    "song price photo map game book"
)
_KEY_WORDS = _listed(
    "city day from to seats time text about name title item date place team line word color size "
    "room code"
)


@dataclass(frozen=True)
class Call:
    """A tool call: the tool's name without `get_`, and its arguments in order."""

    tool: str
    arguments: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The call as the model writes it."""
        return f"Action: get_{self.tool}\nAction Input: {json.dumps(dict(self.arguments))}"


@dataclass(frozen=True)
class Example:
    """A question of one skill, its golden call, and the values that the question mentions."""

    skill: str
    question: str
    call: Call
    mentioned: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The golden answer as text."""
        return self.call.text()


@dataclass(frozen=True)
class Pools:
    """The values that questions may mention."""

    cities: tuple[str, ...]
    people: tuple[str, ...]
    words: tuple[str, ...]
    times: tuple[str, ...]


def _times() -> list[str]:
    """The times from 11:00 to 23:55 in steps of five minutes, in a fixed shuffled order."""
    times = [f"{hour}:{minute:02d}" for hour in range(11, 24) for minute in range(0, 60, 5)]
    random.Random(0).shuffle(times)
    return times


def _side(values: Sequence[str], held_out: bool) -> tuple[str, ...]:
    """Every fourth value is held out; the order of `values` is part of the data's definition."""
    return tuple(value for i, value in enumerate(values) if (i % 4 == 3) == held_out)


def split_pools(held_out: bool) -> Pools:
    """The values of the SDFT questions, or the held-out values."""
    lists = (_CITIES, _PEOPLE, _WORDS, _times())
    return Pools(*(_side(values, held_out) for values in lists))


def all_pools() -> Pools:
    """Every value, the base model's training data."""
    return Pools(_CITIES, _PEOPLE, _WORDS, tuple(_times()))


def _slots(rng: random.Random, skill: str, pool: Pools) -> dict[str, str]:
    """Values for the templates of a skill, as the question writes them."""
    if skill == "weather":
        return {"city": rng.choice(pool.cities), "day": rng.choice(list(DAYS))}
    if skill == "route":
        start, end = rng.sample(pool.cities, 2)
        return {"from": start, "to": end}
    if skill == "table":
        return {"seats": str(rng.randint(2, 9)), "time": rng.choice(pool.times)}
    if skill == "translation":
        return {"text": rng.choice(pool.words), "language": rng.choice(list(LANGUAGES))}
    return {"city": rng.choice(pool.cities)}


def _golden(skill: str, slots: dict[str, str]) -> Call:
    """The right call for a question that was made from these slots."""
    values = dict(slots)
    if skill == "weather":
        values["day"] = DAYS[slots["day"]]
    if skill == "translation":
        values["to"] = LANGUAGES[slots["language"]]
    return Call(skill, tuple((key, values[key]) for key in ARGUMENTS[skill]))


def make_example(rng: random.Random, skill: str, pool: Pools) -> Example:
    """One random question of a skill."""
    slots = _slots(rng, skill, pool)
    slots["person"] = rng.choice(pool.people)
    template = rng.choice(TEMPLATES[skill])
    mentioned = tuple(value for key, value in slots.items() if "{" + key + "}" in template)
    return Example(skill, template.format(**slots), _golden(skill, slots), mentioned)


def _distinct(rng: random.Random, skills: Sequence[str], count: int, pool: Pools) -> list[Example]:
    """`count` examples with different questions, the skills in turn."""
    seen: set[str] = set()
    examples: list[Example] = []
    while len(examples) < count:
        example = make_example(rng, skills[len(examples) % len(skills)], pool)
        if example.question not in seen:
            seen.add(example.question)
            examples.append(example)
    return examples


def sdft_examples(count: int, seed: int) -> list[Example]:
    """Training questions for SDFT: the four new skills, values of the training side."""
    return _distinct(random.Random(f"sdft-{seed}"), SKILLS, count, split_pools(held_out=False))


def held_out_examples(per_skill: int, seed: int) -> list[Example]:
    """Questions of the four new skills with values that no training data contains."""
    rng = random.Random(f"held-out-{seed}")
    return _distinct(rng, SKILLS, per_skill * len(SKILLS), split_pools(held_out=True))


def known_examples(count: int, seed: int) -> list[Example]:
    """Held-out questions of the skill that the base model already has."""
    return _distinct(
        random.Random(f"known-{seed}"), (KNOWN_SKILL,), count, split_pools(held_out=True)
    )


def rows_for_steps(steps: int, groups_per_batch: int) -> int:
    """Rows that give the recipe at least `steps` full batches: it keeps a tenth for a test set."""
    return -(-steps * groups_per_batch * 10 // 9) + 1


def dataset_columns(examples: Sequence[Example]) -> dict[str, list[str]]:
    """The columns of the recipe's tool-use data set, for `datasets.Dataset.from_dict`."""
    return {
        "prompt": [example.question for example in examples],
        "golden_response": [example.answer for example in examples],
    }


def demonstration_prompt(question: str, golden_answer: str) -> str:
    """The user message that the SDFT teacher sees."""
    return DEMONSTRATION.format(question=question, golden_answer=golden_answer)


def parse_answer(text: str) -> tuple[str, dict[str, str]] | None:
    """The tool and the arguments that an answer names, or None if it is not a call."""
    head, separator, tail = text.strip().partition("\nAction Input: ")
    if not separator or not head.startswith("Action: "):
        return None
    try:
        arguments = json.loads(tail)
    except json.JSONDecodeError:
        return None
    if not isinstance(arguments, dict):
        return None
    return head.removeprefix("Action: "), arguments


def score(answer: str, golden: str) -> bool:
    """Whether the answer calls the golden tool with exactly the golden arguments."""
    call = parse_answer(answer)
    return call is not None and call == parse_answer(golden)


def guess_call(rng: random.Random, example: Example) -> Call:
    """The base model's answer, without a demonstration, for a skill that it has not mastered.

    Two times in three it calls for help; one time in six it tries the right tool, one in six any
    tool. An argument of the right tool is right more often than not; else it is whatever the
    question mentions.
    """
    tool = rng.choices(
        (FALLBACK_TOOL, example.skill, rng.choice((*SKILLS, KNOWN_SKILL))), weights=(4, 1, 1)
    )[0]
    return Call(tool, tuple((key, _guess(rng, tool, key, example)) for key in ARGUMENTS[tool]))


def _guess(rng: random.Random, tool: str, key: str, example: Example) -> str:
    if tool == example.skill and rng.random() < 0.6:
        return dict(example.call.arguments)[key]
    codes = {("weather", "day"): DAYS, ("translation", "to"): LANGUAGES}.get((tool, key))
    if codes is not None and rng.random() < 0.7:
        return rng.choice(list(codes.values()))
    return rng.choice(example.mentioned)


def mixed_call(rng: random.Random, call: Call, other: Call) -> Call:
    """`call` with some words of `other`: a beginning that is partly right."""
    tool = rng.choice((call.tool, other.tool))
    arguments = [
        (rng.choice((mine[0], theirs[0])), rng.choice((mine[1], theirs[1])))
        for mine, theirs in zip(call.arguments, other.arguments, strict=False)
    ]
    return Call(tool, tuple(arguments))


def invented_call(rng: random.Random, pool: Pools) -> Call:
    """A call of random words: only a demonstration can tell the model to make it."""
    keys = rng.sample(_KEY_WORDS, rng.choice((1, 2, 2, 2)))
    return Call(rng.choice(_TOOL_WORDS), tuple((key, _any_value(rng, pool)) for key in keys))


def _any_value(rng: random.Random, pool: Pools) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(pool.cities)
    if kind == 1:
        return rng.choice(pool.words)
    if kind == 2:
        return rng.choice(list(DAYS.values()) + list(LANGUAGES.values()))
    if kind == 3:
        return rng.choice(pool.times)
    return str(rng.randint(2, 9))
