"""Sampling from a model whose layers keep a state: every result is the trainer's, bit for bit, and
what one sequence computed serves others that begin alike."""

from typing import Any

import numpy as np
import pytest
from support.delta_model import core, tokens_of
from support.sampler_loop import finish, run, step_until_interrupted
from support.tiny_models import assert_same, call, datum, loaded, randomize
from tinsmith import _core

PAGE = 64
PHASES = (0, 1, 62, 63, 64, 65, 127, 128, 1000)  # positions of the first token that is drawn


def alone(prompt: np.ndarray, adapter: Any = None, **options: Any) -> Any:
    return run(_core.Sampler(core(), tokens=1408), prompt, adapter, **options)


def trained(adapter: _core.Adapter | None, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The trainer's log-probabilities of the tokens behind the prompt's first."""
    whole = np.concatenate([prompt, tokens])
    used = adapter or _core.Adapter(core(), rank=1)
    (found,), _ = call(used, [datum(whole[:-1], whole[1:])], backward=False)
    return found


def adapter_of(seed: int = 1) -> _core.Adapter:
    return randomize(_core.Adapter(core(), rank=3), seed)


def check_trained(result: Any, prompt: np.ndarray, adapter: Any = None) -> None:
    for sample in result["samples"]:
        wanted = trained(adapter, prompt, sample["tokens"])[len(prompt) - 1 :]
        np.testing.assert_array_equal(sample["logprobs"], wanted)


# ---- bits ----


@pytest.mark.parametrize("length", [max(length, 1) for length in PHASES])
def test_what_is_sampled_has_the_trainers_logprobs(length: int) -> None:
    adapter, prompt = adapter_of(), tokens_of(length)
    for used in (None, adapter):
        asked = {"max_tokens": 70, "prompt_logprobs": True, "num_samples": 2}
        result = run(_core.Sampler(core(), tokens=4096), prompt, used, **asked)
        check_trained(result, prompt, used)
        if length > 1:
            wanted = trained(used, prompt[:-1], prompt[-1:])
            np.testing.assert_array_equal(result["prompt_logprobs"][1:], wanted)


@pytest.mark.usefixtures("on")
def test_a_model_needs_no_layer_of_attention() -> None:
    """A folder may name none. Then nothing is rotated, and a page has no keys."""
    model, prompt = core(alone=True), tokens_of(150)
    adapter = randomize(_core.Adapter(model, rank=3), 1)
    sampler = _core.Sampler(model, tokens=1024)
    first, again = (run(sampler, prompt, adapter, max_tokens=70) for _ in range(2))
    assert_same(first, again)
    whole = np.concatenate([prompt, first["samples"][0]["tokens"]])
    (found,), _ = call(adapter, [datum(whole[:-1], whole[1:])])
    np.testing.assert_array_equal(first["samples"][0]["logprobs"], found[len(prompt) - 1 :])
    gradients = adapter.read("gradients")
    assert np.isfinite(gradients).all() and np.count_nonzero(gradients) > gradients.size // 2


def test_neighbours_chunks_and_threads_change_nothing() -> None:
    """Sequences of every phase join one after the other; a long prompt comes in pieces."""
    adapter = adapter_of()
    lengths = [1, 63, 1000, 64, 65, 128, 700, 62, 127, 129]
    asked = [
        {"prompt": tokens_of(length), "max_tokens": 40, "seed": length, "num_samples": 1 + i % 2}
        | ({"adapter": adapter} if i % 3 == 0 else {})
        for i, length in enumerate(lengths)
    ]
    sampler, results = _core.Sampler(core(), tokens=1 << 14), {}
    for number, options in enumerate(asked):
        sampler.add(number, client=number % 3, **options)
        results |= {done: sampler.take(done) for done in sampler.step()[1]}
    left = [number for number in range(len(asked)) if number not in results]
    results |= dict(zip(left, finish(sampler, *left), strict=True))
    other = _core.Sampler(core(threads=2), tokens=1 << 14)
    for number, options in enumerate(asked):
        assert_same(results[number], run(_core.Sampler(core(), tokens=2048), **options))
        check_trained(results[number], options["prompt"], options.get("adapter"))
        if "adapter" not in options:
            assert_same(results[number], run(other, **options))


def test_a_failed_step_is_repeated_from_nothing() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=2048), tokens_of(200)
    run(sampler, prompt)
    assert sampler.states[1] > 0
    step_until_interrupted(sampler, lambda: sampler.add(0, prompt, max_tokens=900, seed=4))
    assert sampler.states[1] == 0  # what was kept may have been read in the middle of it
    assert_same(*finish(sampler, 0), alone(prompt, max_tokens=900, seed=4))


# ---- where a later request goes on ----


@pytest.mark.parametrize(
    ("length", "reused"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128), (1000, 960)]
)
def test_the_same_prompt_again_goes_on_before_its_last_page(length: int, reused: int) -> None:
    sampler, prompt = _core.Sampler(core(), tokens=4096), tokens_of(length)
    for seed in range(3):
        before = sampler.reused
        result = run(sampler, prompt, seed=seed, max_tokens=3)
        assert sampler.reused - before == (reused if seed else 0)
        assert_same(result, alone(prompt, seed=seed, max_tokens=3))


@pytest.mark.parametrize("drawn", [2, 5, 6, 7, 70])
def test_the_next_turn_goes_on_where_the_last_one_ended(drawn: int) -> None:
    """The last page that is full then, also if its last row is the newest."""
    sampler, prompt = _core.Sampler(core(), tokens=4096), tokens_of(123)
    said = run(sampler, prompt, max_tokens=drawn)["samples"][0]["tokens"]
    more = np.concatenate([prompt, said, tokens_of(20)])
    result = run(sampler, more)
    assert sampler.reused == (123 + drawn - 1) // PAGE * PAGE
    assert_same(result, alone(more))


def test_the_end_of_a_common_beginning_is_kept_when_it_is_seen_twice() -> None:
    stem, sampler = tokens_of(333), _core.Sampler(core(), tokens=1 << 13)
    for seed, reused in enumerate((0, 0, 320, 320)):
        prompt, before = np.concatenate([stem, tokens_of(150, seed)]), sampler.reused
        result = run(sampler, prompt)
        assert sampler.reused - before == reused
        assert_same(result, alone(prompt))


def test_other_weights_have_other_states() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=4096), tokens_of(150)
    one, other = adapter_of(1), adapter_of(2)
    for adapter, reused in ((None, 0), (one, 0), (other, 0), (one, 128), (None, 256)):
        result = run(sampler, prompt, adapter)
        assert sampler.reused == reused
        assert_same(result, alone(prompt, adapter))


def test_scores_that_are_known_are_reused_with_the_state() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=4096), tokens_of(150)
    scores = {"prompt_logprobs": True, "topk_prompt": 3, "max_tokens": 1}
    run(sampler, prompt)
    for reused in (0, 128):  # the first asks what nobody told yet
        result = run(sampler, prompt, **scores)
        assert sampler.reused == reused
        assert_same(result, alone(prompt, **scores))


# ---- sequences that run at the same time ----


@pytest.mark.parametrize("length", [17, 63, 64, 65, 128, 129, 600])
@pytest.mark.parametrize("apart", [False, True])
def test_a_group_computes_its_prompt_once(length: int, apart: bool) -> None:
    sampler, prompt, count = _core.Sampler(core(), tokens=1 << 15), tokens_of(length), 6
    if apart:
        for seed in range(count):
            sampler.add(seed, prompt, max_tokens=9, seed=seed)
        results = finish(sampler, *range(count))
        for seed, result in enumerate(results):
            assert_same(result, alone(prompt, max_tokens=9, seed=seed))
    else:
        asked = {"num_samples": count, "max_tokens": 9}
        assert_same(run(sampler, prompt, **asked), alone(prompt, **asked))
    assert sampler.reused == (count - 1) * (length - 1)


def test_who_waits_is_not_later_than_alone() -> None:
    """Two clients' equal prompts take as many steps as one client's, and one more at the end."""

    def steps(count: int, prompts: list[np.ndarray]) -> int:
        sampler = _core.Sampler(core(), tokens=1 << 14)
        for number in range(count):
            sampler.add(number, prompts[number], max_tokens=1, client=number)
        waiting = set(range(count))
        for step in range(1, 100):
            waiting -= set(sampler.step()[1])
            if not waiting:
                return step
        raise AssertionError("the sampler does not get on")

    prompt = tokens_of(900)
    other = np.concatenate([prompt[:1], tokens_of(899)])
    assert steps(1, [prompt]) == 2
    assert steps(2, [prompt, other]) == 4
    assert steps(2, [prompt, prompt]) <= 5


def test_a_conversation_begins_with_a_running_one() -> None:
    """It has the other's prompt and all but the newest of the tokens that the other drew so far."""
    sampler, prompt = _core.Sampler(core(), tokens=4096), tokens_of(70)
    sampler.add(0, prompt, max_tokens=80, seed=1)
    drawn = [token for _ in range(10) for _, _, token in sampler.step()[0]]
    more = np.concatenate([prompt, np.array(drawn[:9], np.int32), tokens_of(3)])
    sampler.add(1, more, max_tokens=5, seed=2)
    first, second = finish(sampler, 0, 1)
    assert sampler.reused == 79
    assert_same(first, alone(prompt, max_tokens=80, seed=1))
    assert_same(second, alone(more, max_tokens=5, seed=2))


def test_scores_that_are_asked_for_are_computed_beside_a_sequence_that_runs() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=1408), tokens_of(70)
    sampler.add(0, prompt, max_tokens=40, seed=1)
    drawn = [token for _ in range(10) for _, _, token in sampler.step()[0]]
    more = np.concatenate([prompt, np.array(drawn[:9], np.int32), tokens_of(3)])
    asked = {"prompt_logprobs": True, "prompt_from": 72, "max_tokens": 3, "seed": 2}
    sampler.add(1, more, **asked)
    _, scored = finish(sampler, 0, 1)
    assert sampler.reused == 64  # rows 72 to 78 are run again
    assert_same(scored, alone(more, **asked))


def test_of_two_that_run_the_longer_common_beginning_is_taken() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=2816), tokens_of(150)
    for number, common in enumerate((149, 100)):
        beginning = np.concatenate([prompt[:common], tokens_of(9, 5 + number)])
        sampler.add(number, beginning, client=number, max_tokens=60, seed=1)
    for _ in range(4):
        sampler.step()
    before = sampler.reused
    sampler.add(2, prompt, client=2, max_tokens=3, seed=2)
    found = finish(sampler, 0, 1, 2)[2]
    assert sampler.reused - before >= 128
    assert_same(found, alone(prompt, max_tokens=3, seed=2))


# ---- too little memory ----


def test_a_small_cache_runs_fewer_at_once_and_changes_nothing() -> None:
    sampler = _core.Sampler(core(), tokens=512)
    assert sampler.states == (4, 0)
    prompt = tokens_of(150)
    asked = [{"num_samples": 7, "max_tokens": 30, "seed": 1}] + [
        {"max_tokens": 20 + seed, "seed": seed} for seed in range(9)
    ]
    for number, options in enumerate(asked):
        sampler.add(number, prompt, client=number % 2, **options)
    for options, result in zip(asked, finish(sampler, *range(len(asked))), strict=True):
        assert_same(result, alone(prompt, **options))
    assert sampler.reused >= 10 * 128  # few had to compute it, though not all could run at once


def test_any_requests_give_what_they_give_alone() -> None:
    """Conversations, groups, scores and adapters, in caches of several sizes, preempted often."""
    rng, adapter = np.random.default_rng(0), adapter_of()
    for tokens in (384, 640, 1500):
        sampler, asked, open_ = _core.Sampler(core(), tokens=tokens), {}, set()
        stems = [tokens_of(length, 7) for length in (150, 64, 191, 129)]
        for number in range(40):
            stem = stems[rng.integers(4)]
            prompt = stem[: rng.integers(1, len(stem) + 1)] if rng.random() < 0.5 else stem
            if rng.random() < 0.6:
                prompt = np.concatenate([prompt, tokens_of(int(rng.integers(1, 90)), 1)])
            options = {
                "prompt": prompt, "adapter": adapter if rng.random() < 0.3 else None,
                "max_tokens": int(rng.integers(1, 80)), "seed": number,
                "num_samples": int(rng.integers(1, 4)),
            }  # fmt: skip
            if rng.random() < 0.2:
                options |= {"prompt_logprobs": True, "prompt_from": int(rng.integers(len(prompt)))}
            asked[number] = options
            sampler.add(number, client=int(rng.integers(3)), **options)
            open_.add(number)
            for _ in range(int(rng.integers(25))):
                for done in sampler.step()[1]:
                    check_same(sampler.take(done), asked[done], stems, rng)
                    open_.discard(done)
        for number, result in zip(sorted(open_), finish(sampler, *sorted(open_)), strict=True):
            check_same(result, asked[number], stems, rng)
        assert sampler.reused > 0


def check_same(result: Any, options: Any, stems: list[np.ndarray], rng: Any) -> None:
    """As alone; and what was said may become the beginning of another request."""
    assert_same(result, run(_core.Sampler(core(), tokens=1408), **options))
    said = result["samples"][0]["tokens"]
    if len(options["prompt"]) + len(said) < 220:
        stems[rng.integers(4)] = np.concatenate([options["prompt"], said])


def test_a_kept_state_is_given_up_with_its_page_or_for_others() -> None:
    sampler = _core.Sampler(core(), tokens=512)
    for seed in range(12):
        run(sampler, tokens_of(70, seed), max_tokens=2)
        assert sampler.states[1] <= 4
    before = sampler.reused
    for seed, reused in ((11, 64), (10, 64), (0, 0)):
        run(sampler, tokens_of(70, seed), max_tokens=2)
        assert sampler.reused - before == reused
        before = sampler.reused


def test_states_that_are_given_up_with_their_pages_are_free_again() -> None:
    sampler = _core.Sampler(core(), tokens=512)
    for seed in range(12):  # each takes half of the pages, so the page before gives its state up
        run(sampler, tokens_of(200, seed), max_tokens=2)
    for number in range(4):
        sampler.add(number, tokens_of(9, number), max_tokens=4)
    drawn = [len(sampler.step()[0]) for _ in range(4)]
    assert drawn == [4] * 4


def test_a_state_that_is_used_again_is_not_the_next_to_go() -> None:
    sampler = _core.Sampler(core(), tokens=512)
    for seed in (0, 1, 2, 0, 3):  # three are kept beside the one that runs
        run(sampler, tokens_of(70, seed), max_tokens=2)
    before = sampler.reused
    run(sampler, tokens_of(70, 0), max_tokens=2)
    assert sampler.reused - before == 64


def test_a_cache_in_a_plan_has_room_for_its_states() -> None:
    model, tokens = core(), 1024
    states, _ = _core.Sampler(model, tokens=tokens).states
    token = model.plan(1, 1)["kv_token"]
    assert states and model.cache_bytes(tokens) > tokens * token
    more = model.cache_bytes(tokens + PAGE) - model.cache_bytes(tokens)
    assert more >= PAGE * token
    memory = model.weight_bytes + 4 * model.cache_bytes(tokens)
    assert model.cache_bytes(model.cache_tokens(memory, memory)) <= model.cache_bytes(tokens)


def test_models_without_states_have_none() -> None:
    assert _core.Sampler(loaded("qwen3").core, tokens=512).states == (0, 0)
