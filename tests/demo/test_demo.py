"""The demonstration's parts: its questions and their scoring, the model that is in the package,
what is said of the figures, and a recipe that fails."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinsmith
from tinsmith.demo import data, demo, outcomes, trainings
from tinsmith.demo.outcomes import Outcome
from tokenizers import Tokenizer

ALL = [*data.SKILLS, *data.KNOWN_SKILLS]


# ---- questions ----


@pytest.mark.parametrize("skill", ALL)
def test_a_call_is_right_in_both_notations_and_in_any_order(skill: str) -> None:
    one = data.make_example(random.Random(1), skill, data.all_pools())
    turned = data.GoldenCall(one.call.tool, one.call.arguments[::-1])
    for text in (one.answer, one.demonstration, turned.text(), turned.foreign()):
        assert data.score(text, one.answer) and data.score(f" {text}\n", one.demonstration)
    more = data.GoldenCall(one.call.tool, (*one.call.arguments, ("x", "y")))
    other = data.GoldenCall("other", one.call.arguments)
    for wrong in (more, other, data.GoldenCall(one.call.tool, one.call.arguments[1:])):
        assert not data.score(wrong.text(), one.answer)
        assert not data.score(wrong.foreign(), one.answer)
    for broken in (
        "",
        one.answer[:-1],
        one.demonstration[:-1],
        f"{one.demonstration} {one.answer}",
    ):
        assert not data.score(broken, one.answer)


def test_new_and_known_tools_have_one_two_and_three_arguments() -> None:
    for skills in (data.SKILLS, data.KNOWN_SKILLS):
        assert {len(data.ARGUMENTS[skill]) for skill in skills} == {1, 2, 3}


def test_no_training_question_mentions_a_held_out_value() -> None:
    held = data.split_pools(held_out=True)
    values = {*held.cities, *held.people, *held.words, *held.times}
    asked = data.sdft_examples(400, seed=0)
    assert {one.skill for one in asked} == set(data.SKILLS)
    assert not values & {value for one in asked for value in one.mentioned}
    tested = data.held_out_examples(10, seed=0) + data.known_examples(10, seed=0)
    assert {one.skill for one in tested} == set(ALL)
    small = {*data.DAYS, *data.LANGUAGES, *map(str, range(10))}
    assert {value for one in tested for value in one.mentioned} <= values | small


def test_there_are_questions_for_the_most_steps() -> None:
    from tinsmith.cli.argument_types import DEMO_STEPS_MAX

    count = data.rows_for_steps(DEMO_STEPS_MAX, trainings.BATCH)
    assert len({one.question for one in data.sdft_examples(count, seed=0)}) == count


# ---- the model ----


def test_the_models_known_skills_are_known_and_the_new_ones_wait_for_a_demonstration() -> None:
    model = tinsmith.Model(demo.MODEL, device="cpu")
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    new, known = data.held_out_examples(4, seed=5), data.known_examples(4, seed=5)
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def right(examples: list[data.Example], texts: list[str]) -> float:
        prompts = [tokenizer.encode(chat.format(text)).ids for text in texts]
        answers = model.sampler().sample(prompts, max_tokens=40, temperature=0.0)
        said = tokenizer.decode_batch([answer.tokens.tolist() for [answer] in answers])
        found = [data.score(text, e.answer) for text, e in zip(said, examples, strict=True)]
        return sum(found) / len(found)

    assert right(known, [e.question for e in known]) > 0.9
    assert right(new, [e.question for e in new]) < 0.1
    taught = [data.demonstration_prompt(e.question, e.demonstration) for e in new]
    assert right(new, taught) > 0.9


# ---- what is said of the figures ----


def outcome(method: str, rate: float, learned: float, kept: float) -> Outcome:
    return Outcome(method, rate, {"a": learned, "b": learned}, {"c": 1.0, "d": 2 * kept - 1})


def said(sft: list[float], sdft: list[float]) -> tuple[str, str]:
    """Of trainings that have all learned 90 % and kept so much at the rates 1e-4, 1e-3, …"""
    found = [
        outcome(method, 10.0 ** (place - 4), 0.9, kept)
        for method, figures in (("SFT", sft), ("SDFT", sdft))
        for place, kept in enumerate(figures)
    ]
    at_best, over_all = outcomes.verdict(found, "SDFT", "SFT")
    return at_best, over_all


def test_the_verdict_follows_from_the_figures() -> None:
    at_best, over_all = said([0.8, 0.5], [0.9, 0.95])
    assert "SDFT (learning rate 1e-3) learned 90% and kept 95%" in at_best
    assert "SFT (learning rate 1e-4) learned 90% and kept 80%" in at_best
    assert at_best.endswith("SDFT kept 15 points more than SFT.")
    assert over_all.endswith("kept at least 90% and SFT 50%: SDFT kept 40 points more than SFT.")


def test_the_verdict_says_so_where_sdft_does_not_keep_more() -> None:
    at_best, over_all = said([1.0, 0.5], [0.9, 0.5])
    assert at_best.endswith("SDFT kept 10 points less than SFT, so here it does not keep more.")
    assert over_all.endswith("SDFT kept no more than SFT.")


def test_the_best_rate_is_one_that_learns_and_keeps() -> None:
    found = [
        outcome("SFT", 1e-4, 0.1, 1.0),
        outcome("SFT", 1e-3, 0.5, 0.5),
        outcome("SFT", 2e-3, 0.5, 0.51),
    ]
    assert outcomes.best(found, "SFT").learning_rate == 2e-3


def test_the_table_has_each_skill_and_the_picture_both_sides() -> None:
    before = Outcome("before", 0.0, {"a": 0.0, "b": 0.0}, {"c": 1.0, "d": 1.0})
    found = [outcome("SFT", 1e-3, 0.9, 0.8), outcome("SDFT", 1e-3, 0.7, 1.0)]
    titles, *rows = outcomes.table([before, *found])
    assert titles == ["", "before", "SFT\n1e-3", "SDFT\n1e-3"]
    assert [row[0] for row in rows] == ["a", "b", "learned", "c", "d", "kept"]
    assert rows[2] == ["learned", "0%", "90%", "70%"]
    assert rows[4:] == [["d", "100%", "60%", "100%"], ["kept", "100%", "80%", "100%"]]
    learned, kept = demo.panels(before, found)
    assert learned.curves == {"SFT": {1e-3: 90.0}, "SDFT": {1e-3: 70.0}} and learned.before == 0
    assert kept.curves["SFT"] == {1e-3: 80.0} and kept.before == 100
    assert kept.parts["SFT"] == [{1e-3: 100.0}, {1e-3: pytest.approx(60.0)}]


# ---- trainings ----


def test_each_thread_has_a_tokenizer_of_its_own() -> None:
    from tinker_cookbook.tokenizer_utils import get_tokenizer, unregister_tokenizer

    model = str(trainings.MODEL)
    trainings.own_tokenizers([model])
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(get_tokenizer, model).result()
        mine = get_tokenizer(model)
        assert mine is get_tokenizer(model) and mine is not other
        assert mine.encode("Hello") == other.encode("Hello")
    finally:
        unregister_tokenizer(model)


def test_a_recipe_that_fails_is_told_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trainings.METHODS, "SFT", "chat_sl.no_such_recipe")
    one = trainings.Training("SFT", 1e-3, 2, tmp_path)
    with pytest.raises(RuntimeError, match="no_such_recipe"):
        trainings.run_trainings("http://127.0.0.1:1", [one])
