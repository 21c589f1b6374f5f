"""The demonstration's data: tool-use questions, golden answers and the base model's guesses.

Everything comes from a seeded `random.Random` and the standard library, so the demo and the script
that trained the shipped model (make_model.py) agree on every byte.

The base model has mastered three skills (KNOWN_SKILLS): it answers the bare question with the right
call. Of four others (SKILLS) it has a vague idea: without a demonstration it mostly calls
`get_help`, sometimes the right tool, sometimes one it knows, and its arguments are often wrong.
Both sets have tools with one, two and three arguments, and share kinds of values (cities, days,
times, words), as old and new skills of a real model do.

Calls have two notations. The model writes `Action: get_time` and a line of JSON. The demonstrations
use another author's notation, `get_time(city="Oslo")`, because real demonstrations are rarely in
the model's own words. The base model has read that notation in its prompts, of tools that it knows
and of invented ones, but has never answered in it; shown a demonstration in it, it makes the same
call in its own. An answer is right in either notation, with its arguments in any order.

Every call of the model begins with the same three tokens (`Action`, `:`, ` get`), because the SDFT
recipe puts no loss on the first three tokens of a completion: what distinguishes the tools comes
after them.

Cities, names, words and times are split once: no training question mentions a held-out value. The
base model has met all values, since it must be able to spell them. Days, languages and numbers of
seats are small closed sets, which both sides use.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

SKILLS = ("meaning", "weather", "translation", "table")  # of 1, 2, 2 and 3 arguments
KNOWN_SKILLS = ("time", "alarm", "message")  # of 1, 2 and 3
FALLBACK_TOOL = "help"

# Equal to tinker_cookbook.distillation.sdft.DEFAULT_DEMO_TEMPLATE. This module must not import it:
# the base model can be rebuilt without the cookbook.
DEMONSTRATION = (
    "{question}\n\n"
    "This is an example for a response to the question:\n"
    "{golden_answer}\n\n"
    "Now answer with a response of your own, including the thinking process."
)

# The tools' arguments, in the order of a call.
ARGUMENTS = {
    "meaning": ("text",),
    "weather": ("city", "day"),
    "translation": ("text", "to"),
    "table": ("seats", "day", "time"),
    "time": ("city",),
    "alarm": ("day", "time"),
    "message": ("name", "text", "time"),
    "help": ("about",),
}

TEMPLATES = {
    "meaning": (
        'What does "{text}" mean?',
        'Explain "{text}" to me.',
        '{person} does not know what "{text}" is.',
        'Look up "{text}", please.',
        'I never heard of "{text}". What is it?',
        'What is meant by "{text}"?',
    ),
    "weather": (
        "What will the weather be in {city} on {day}?",
        "Will it rain in {city} on {day}?",
        "On {day} I am in {city}. Do I need a coat?",
        "{person} asks how warm {city} is on {day}.",
        "How cold does it get on {day} in {city}?",
        "Is {day} a sunny day in {city}?",
    ),
    "translation": (
        'How do you say "{text}" in {language}?',
        'What is the {language} word for "{text}"?',
        'Translate "{text}" to {language}.',
        '{person} wants "{text}" in {language}.',
        'In {language}, what is "{text}"?',
        'I need "{text}" in {language}, please.',
    ),
    "table": (
        "Is there a table for {seats} on {day} at {time}?",
        "At {time} on {day} we are {seats} people. Can we eat?",
        "We want to eat on {day} at {time} with {seats} people.",
        "{person} needs {seats} seats for dinner on {day} at {time}.",
        "Book dinner for {seats} at {time} on {day}.",
        "Do you have {seats} seats free on {day} at {time}?",
    ),
    "time": (
        "What time is it in {city}?",
        "Tell me the time in {city}.",
        "{person} is in {city}. How late is it there?",
        "How late is it now in {city}?",
    ),
    "alarm": (
        "Wake me at {time} on {day}.",
        "On {day} I must get up at {time}.",
        "I want to sleep until {time} on {day}.",
        "Let the clock ring on {day} at {time}.",
    ),
    "message": (
        'Tell {name} "{text}" at {time}.',
        'At {time}, write "{text}" to {name}.',
        'Let {name} know "{text}" at {time}.',
        'Send "{text}" at {time}. It is for {name}.',
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

# Tools and arguments of invented calls, which teach the base model to follow a demonstration.
_TOOL_WORDS = _listed(
    "meaning weather table translation time alarm message help route news music score stock movie "
    "recipe flight hotel song price photo map game book"
)
_KEY_WORDS = _listed(
    "city day from to seats time text about name title item date place team line word color size "
    "room code"
)


@dataclass(frozen=True)
class GoldenCall:
    """A tool call: the tool's name without `get_`, and its arguments in order."""

    tool: str
    arguments: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The call as the model writes it."""
        return f"Action: get_{self.tool}\nAction Input: {json.dumps(dict(self.arguments))}"

    def foreign(self) -> str:
        """The call as the demonstrations' author writes it."""
        arguments = ", ".join(f'{key}="{value}"' for key, value in self.arguments)
        return f"get_{self.tool}({arguments})"


@dataclass(frozen=True)
class Example:
    """A question of one skill, its golden call, and the values in the question."""

    skill: str
    question: str
    call: GoldenCall
    mentioned: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The golden answer in the model's notation."""
        return self.call.text()

    @property
    def demonstration(self) -> str:
        """The golden answer in the other author's notation."""
        return self.call.foreign()


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
    """Values for a skill's templates, as the question writes them."""
    made = {
        "city": lambda: rng.choice(pool.cities),
        "day": lambda: rng.choice(list(DAYS)),
        "language": lambda: rng.choice(list(LANGUAGES)),
        "name": lambda: rng.choice(pool.people),
        "seats": lambda: str(rng.randint(2, 9)),
        "text": lambda: rng.choice(pool.words),
        "time": lambda: rng.choice(pool.times),
    }
    return {slot: made[slot]() for slot in map(_slot, ARGUMENTS[skill])}


def _slot(key: str) -> str:
    """The template slot of an argument."""
    return "language" if key == "to" else key


def _golden(skill: str, slots: dict[str, str]) -> GoldenCall:
    """The right call for a question with these slots."""
    codes = {"day": DAYS, "to": LANGUAGES}
    values = {key: slots[_slot(key)] for key in ARGUMENTS[skill]}
    return GoldenCall(
        skill, tuple((key, codes.get(key, {}).get(v, v)) for key, v in values.items())
    )


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
    """Training questions: the four new skills, values of the training side."""
    return _distinct(random.Random(f"sdft-{seed}"), SKILLS, count, split_pools(held_out=False))


def held_out_examples(per_skill: int, seed: int) -> list[Example]:
    """Questions of the four new skills with values that no training data contains."""
    rng = random.Random(f"held-out-{seed}")
    return _distinct(rng, SKILLS, per_skill * len(SKILLS), split_pools(held_out=True))


def known_examples(per_skill: int, seed: int) -> list[Example]:
    """Held-out questions of the skills that the base model already has."""
    rng = random.Random(f"known-{seed}")
    return _distinct(rng, KNOWN_SKILLS, per_skill * len(KNOWN_SKILLS), split_pools(held_out=True))


def rows_for_steps(steps: int, groups_per_batch: int) -> int:
    """Rows that give the recipe at least `steps` full batches: it keeps a tenth for a test set."""
    return -(-steps * groups_per_batch * 10 // 9) + 1


def dataset_columns(examples: Sequence[Example], *, own: bool = False) -> dict[str, list[str]]:
    """The columns of the recipe's tool-use data set, for `datasets.Dataset.from_dict`. own: the
    answers use the model's own notation."""
    return {
        "prompt": [example.question for example in examples],
        "golden_response": [one.answer if own else one.demonstration for one in examples],
    }


def demonstration_prompt(question: str, golden_answer: str) -> str:
    """The user message for the SDFT teacher."""
    return DEMONSTRATION.format(question=question, golden_answer=golden_answer)


def parse_answer(text: str) -> tuple[str, dict[str, str]] | None:
    """The tool and the arguments of an answer in either notation; None if it is not a call."""
    text = text.strip()
    if found := re.fullmatch(r'(get_\w+)\((\w+="[^"]*"(?:, ?\w+="[^"]*")*)\)', text):
        return found[1], dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
    head, separator, tail = text.partition("\nAction Input: ")
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


def guess_call(rng: random.Random, example: Example) -> GoldenCall:
    """The base model's answer, without a demonstration, for a skill that it has not mastered.

    Half of the time it calls for help; one time in four it tries the right tool, one in four one
    that it knows. An argument of the right tool is right more often than not; otherwise it is any
    value from the question.
    """
    tools = (FALLBACK_TOOL, example.skill, rng.choice(KNOWN_SKILLS))
    tool = rng.choices(tools, weights=(2, 1, 1))[0]
    return GoldenCall(
        tool, tuple((key, _guess(rng, tool, key, example)) for key in ARGUMENTS[tool])
    )


def _guess(rng: random.Random, tool: str, key: str, example: Example) -> str:
    if tool == example.skill and rng.random() < 0.7:
        return dict(example.call.arguments)[key]
    codes = {"day": DAYS, "to": LANGUAGES}.get(key)
    if codes is not None and rng.random() < 0.7:
        return rng.choice(list(codes.values()))
    return rng.choice(example.mentioned)


def slipped_call(rng: random.Random, call: GoldenCall, pool: Pools) -> GoldenCall:
    """`call` with some of its values wrong: a beginning that is partly right."""
    arguments = [
        (key, _any_value(rng, pool) if rng.random() < 0.4 else value)
        for key, value in call.arguments
    ]
    return GoldenCall(call.tool, tuple(arguments))


def invented_call(rng: random.Random, pool: Pools) -> GoldenCall:
    """A call of random words, which the model can only make from a demonstration."""
    keys = rng.sample(_KEY_WORDS, rng.choice((1, 2, 3)))
    return GoldenCall(rng.choice(_TOOL_WORDS), tuple((key, _any_value(rng, pool)) for key in keys))


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
