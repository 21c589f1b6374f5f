"""RECIPES.md: the cookbook's recipes, their commands, and the calls that the server saw.

The document is the table's: an entry for each row of recipes.RECIPES, and one for each recipe that
does not run. test_recipes.py compares every entry with what it has just seen.
"""

import re
from collections.abc import Iterable

from support.recipe_table import BESIDE, RECIPES, REFUSED, Recipe

VERSION = "0.6.1"  # of tinker_cookbook, whose calls the document shows

HEADER = f"""\
# Recipes

Every recipe of `tinker_cookbook` {VERSION} runs here, unmodified, unless it needs sound or
somebody's service. This file is written by `tests/recipes/test_recipes.py`, which runs each of
these commands with that version and compares the calls that the server saw; where a recipe's
packages are not installed, its test is skipped. With 0.5.8 the tests run the same commands, whose
calls may differ a little. To write it again, with the extras `math-rl`, `multiplayer-rl` and
`inspect` of tinker-cookbook: `TINSMITH_UPDATE_RECIPES=1 pytest tests/recipes/test_recipes.py`.

`MODEL` is the folder of a Hugging Face model. `--model NAME=MODEL` serves it under a name, and the
recipe finds its tokenizer under that name: some recipes have a model's name in their code, others
look a name up to choose the chat format (`Qwen/Qwen3-8B` stands for all of Qwen3). Where a recipe's
own default is a Qwen3.5, `MODEL` is a small one of that family in the tests, otherwise the
demonstration's. Sizes (`batch_size`, `max_tokens`, `max_steps` …) are the test's: leave them out
for the recipe's own.

What comes from the hub is downloaded by the recipe. Without a network, make a folder of that name
with files of the same columns in the current one (`openai/gsm8k/train.jsonl`), as the tests do,
and set `HF_HUB_OFFLINE=1`.

`forecasting.train` and `rl_numerics_check.train` render in threads that share a tokenizer. With
transformers 5.5 that can end in `RuntimeError: Already borrowed` in the recipe, whatever the
server: the tests run them with one episode at a time.

A model that uses its embedding as its head, and whose unembedding was trained (`train_unembed`, the
SDK's default), has an adapter that the cookbook's `build_hf_model` can't merge: it looks for a head
among the model's tensors and says that `lm_head.weight` does not exist. With
`merge_strategy="full"`, or under the hosted service's name for the head, it says nothing and adds
the adapter to the embedding too, which is another model: in two trials its log-probabilities were 5
and 15 nats off. No adapter helps, since the cookbook adds only to tensors that the model has, and
this one has one matrix for both. `tinsmith export MODEL ADAPTER OUT` writes a head of its own; or
train with `train_unembed=False`. PEFT takes the adapter as it is, for models that are not Qwen3.5.

Under "Calls" is left out what every client does: it makes a session, sends it signs of life, asks
for results, and sends telemetry.
"""


# The cookbook repository's own tests of its recipes, run by hand, and their seconds.
OWN = {
    "test_chat_sl": 60,
    "test_chat_sl_resume": 21,
    "test_dpo": 172,
    "test_forecasting": 59,
    "test_guess_number": 1135,
    "test_math_rl_async": 55,
    "test_math_rl_stream_minibatch": 181,
    "test_math_rl_sync": 363,
    "test_off_policy_reasoning": 177,
    "test_on_policy_distillation": 1122,
    "test_on_policy_multi_teacher": 163,
    "test_rlhf_pipeline": 246,
    "test_rolling_checkpoint_train": 72,
    "test_rolling_checkpoint_resume": 18,
    "test_shorter": 63,
    "test_text_arena, test_text_arena_random_opponent": 117,
    "test_twenty_questions": 1773,
}
OWN_TESTS = f"""\
## The cookbook's own tests

The cookbook's repository has tests of its recipes, in `tests/recipes`, which run against any
server, unmodified and at sizes of their own. These passed with tinker_cookbook {VERSION}, with the
demonstration's model under the names that they ask for, and with data of ours in the hub's formats.
test_rlhf_pipeline and test_twenty_questions had a random model of Qwen3.5's family with 2 layers,
which ends an answer at one token in thirty, and at two in three. The second draws 88,320 samples;
three quarters of its client's time are its own rendering of prompts. test_forecasting downloads a
file that it knows by its checksum, so it had one argument more: data_path, of our data. Only
test_vlm_classifier is missing. The seconds are of two cores on which a dozen
other programs computed.

| test | seconds |
|---|---|
"""


def recipe_entry(recipe: Recipe, calls: str) -> str:
    """The section of a recipe that runs."""
    extra = f" Needs `pip install 'tinker-cookbook[{recipe.extra}]'`." if recipe.extra else ""
    return (
        f"### {recipe.name}\n\n    {recipe.command}\n\n"
        f"Data: {recipe.data}.{extra}\nCalls: {calls or 'none'}.\n"
    )


def entries(text: str) -> dict[str, str]:
    """The sections by their titles."""
    found = re.findall(r"^### (.*)\n(?:(?!#).*\n)*", text, re.MULTILINE)
    sections = re.findall(r"^(### .*\n(?:(?!#).*\n)*)", text, re.MULTILINE)
    return dict(zip(found, (section.rstrip("\n") + "\n" for section in sections), strict=True))


def document(text: str) -> str:
    """The whole file, with the calls that `text`, its last version, has."""
    known = entries(text)
    out = [HEADER, "## What runs\n"]
    for recipe in RECIPES:
        section = known.get(recipe.name, "")
        calls = re.search(r"^Calls: (.*)\.$", section, re.MULTILINE)
        out.append(recipe_entry(recipe, calls.group(1) if calls else ""))
    out += ["## What does not\n", "| recipe | why |\n|---|---|"]
    text = "\n".join(out) + "\n" + _lines(REFUSED)
    text += "\n## What else starts\n\n| module | |\n|---|---|\n" + _lines(BESIDE)
    return text + "\n" + OWN_TESTS + _lines(OWN.items())


def _lines(rows: Iterable[tuple[str, object]]) -> str:
    return "".join(f"| {name} | {value} |\n" for name, value in rows)


def with_entry(text: str, entry: str) -> str:
    """The file with a section replaced."""
    title = entry.partition("\n")[0].removeprefix("### ")
    return text.replace(entries(text)[title], entry)
