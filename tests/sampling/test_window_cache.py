"""The cache of models whose layers have a window: their pages are given back when the window has
passed, and no result shows it. Memory that nobody holds is filled with NaN here, so a row that read
it would show too."""

from typing import Any

import numpy as np
import pytest
from support.sampler_loop import finish, step_until_interrupted
from support.tiny_models import assert_same, call, datum, randomize
from support.window_model import core, tokens_of
from tinsmith import _core

pytestmark = pytest.mark.pairs

PAGE, STEP_ROWS, WINDOW = 64, 512, 100
BEFORE = -(-(WINDOW - 1) // PAGE)  # pages that the first row of a page reads before it
MOST = BEFORE + 1 + STEP_ROWS // PAGE  # of a sequence, in a step


def alone(model: _core.Model | str, prompt: np.ndarray, adapter: Any = None, **options: Any) -> Any:
    model = core(model) if isinstance(model, str) else model
    sampler = _core.Sampler(model, tokens=1 << 13)
    sampler.add(0, prompt, adapter, **{"max_tokens": 5, "seed": 3} | options)
    return finish(sampler, 0)[0]


def run(sampler: _core.Sampler, prompt: np.ndarray, adapter: Any = None, **options: Any) -> Any:
    """The result of one request, whose every step begins with NaN in all memory that is free."""
    sampler.add(0, prompt, adapter, **{"max_tokens": 5, "seed": 3} | options)
    for _ in range(2000):
        sampler.spoil()
        if sampler.step()[1]:
            break
    return sampler.take(0)


def check_trained(layers: str, result: Any, prompt: np.ndarray, adapter: Any = None) -> None:
    used = adapter or _core.Adapter(core(layers), rank=1)
    for sample in result["samples"]:
        whole = np.concatenate([prompt, sample["tokens"]])
        (wanted,), _ = call(used, [datum(whole[:-1], whole[1:])], backward=False)
        np.testing.assert_array_equal(sample["logprobs"], wanted[len(prompt) - 1 :])


def check_idle(sampler: _core.Sampler) -> None:
    """No sequence holds anything, and every frame is free or a known page's."""
    cache = sampler.cache
    assert cache["held"] == cache["windows"] == 0
    used = cache["known"] * cache["full"] + cache["kept"] * cache["windowed"]
    assert cache["free"] + used == cache["frames"]


# ---- bits ----


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("layers", ["fw", "ww"])
def test_what_is_sampled_has_the_trainers_bits(layers: str) -> None:
    """Prompts in pieces, groups, recorded steps, and the same again from what is known."""
    adapter = randomize(_core.Adapter(core(layers), rank=2), seed=1)
    sampler = _core.Sampler(core(layers), tokens=1536)
    asked = [
        {"prompt": tokens_of(n), "max_tokens": 4 + n % 70, "seed": n, "num_samples": 1 + n % 3}
        | ({"adapter": adapter} if n % 2 else {})
        for n in (1, 63, 64, 129, 300, 700)
    ]
    for again in range(2):
        for number, options in enumerate(asked):
            sampler.add(number, **options)
        waiting, results = set(range(len(asked))), {}
        while waiting:
            sampler.spoil()
            done = sampler.step()[1]
            results |= {number: sampler.take(number) for number in done}
            waiting -= set(done)
        for number, options in enumerate(asked):
            result, used = results[number], options.get("adapter")
            check_trained(layers, result, options["prompt"], used)
            assert again or number or result["prompt_reused"] == 0
        check_idle(sampler)
    assert sampler.reused > 200


@pytest.mark.parametrize(
    ("layers", "window"), [("fw", 100), ("fw", 66), ("ww", 130), ("fwwfw", 1), ("f" * 12 + "w", 65)]
)
def test_any_requests_give_what_they_give_alone(layers: str, window: int) -> None:
    """Conversations, groups, scores, sessions and adapters, in small caches, often preempted."""
    rng = np.random.default_rng(0)
    model = core(layers, window)
    adapter = randomize(_core.Adapter(model, rank=3), seed=1)
    for tokens in (384, 1100):
        sampler, asked, open_ = _core.Sampler(model, tokens=tokens), {}, set()
        stems = [tokens_of(length, 7) for length in (150, 64, 330, 129)]
        for number in range(20):
            stem = stems[rng.integers(4)]
            prompt = stem[: rng.integers(1, len(stem) + 1)] if rng.random() < 0.5 else stem
            if rng.random() < 0.6:
                prompt = np.concatenate([prompt, tokens_of(int(rng.integers(1, 90)), 1)])
            prompt = prompt[:300]
            options = {
                "prompt": prompt, "adapter": adapter if rng.random() < 0.3 else None,
                "max_tokens": int(rng.integers(1, 80)), "seed": number,
                "num_samples": int(rng.integers(1, 4)),
            }  # fmt: skip
            if rng.random() < 0.3:
                options |= {"prompt_logprobs": True, "prompt_from": int(rng.integers(len(prompt)))}
            if rng.random() < 0.1:
                options["session"] = 5 if options["adapter"] else 6
            asked[number] = options
            sampler.add(number, client=int(rng.integers(3)), **options)
            open_.add(number)
            if rng.random() < 0.1:
                gone = int(rng.choice(sorted(open_)))
                sampler.cancel(gone)
                open_.discard(gone)
            for _ in range(int(rng.integers(25))):
                sampler.spoil()
                for done in sampler.step()[1]:
                    result = sampler.take(done)
                    check_same(model, result, asked[done])
                    said = np.concatenate([asked[done]["prompt"], result["samples"][0]["tokens"]])
                    stems[rng.integers(4)] = said
                    open_.discard(done)
        for number, result in zip(sorted(open_), finish(sampler, *sorted(open_)), strict=True):
            check_same(model, result, asked[number])
        assert sampler.reused > 0
        check_idle(sampler)


def check_same(model: _core.Model, result: Any, options: Any) -> None:
    assert_same(result, alone(model, **options))
    assert np.isfinite(result["samples"][0]["logprobs"]).all()


def test_a_failed_step_is_repeated_from_nothing() -> None:
    sampler, prompt = _core.Sampler(core(), tokens=2048), tokens_of(200)
    run(sampler, prompt)
    step_until_interrupted(sampler, lambda: sampler.add(0, prompt, max_tokens=900, seed=4))
    cache = sampler.cache
    assert cache["free"] == cache["frames"]
    assert_same(*finish(sampler, 0), alone("fw", prompt, max_tokens=900, seed=4))
    check_idle(sampler)


# ---- memory ----


@pytest.mark.parametrize("layers", ["fw", "ww"])
def test_a_long_sequence_keeps_its_window_alone(layers: str) -> None:
    sampler, prompt = _core.Sampler(core(layers), tokens=3072), tokens_of(1500)
    sampler.add(0, prompt, max_tokens=1300, seed=1)
    drawn = False
    for _ in range(2000):
        sampler.spoil()
        tokens, done = sampler.step()
        if done:
            break
        cache = sampler.cache
        assert cache["windows"] <= (BEFORE + 2 if drawn else MOST)
        drawn |= bool(tokens)
    assert cache["held"] == (1500 + 1299 + PAGE - 1) // PAGE
    check_trained(layers, sampler.take(0), prompt)
    check_idle(sampler)


def test_where_all_layers_have_a_window_a_sequence_may_be_longer_than_the_cache() -> None:
    sampler = _core.Sampler(core("ww"), tokens=MOST * PAGE)
    assert sampler.cache["frames"] == MOST
    prompt = tokens_of(2000)
    for number in range(3):
        sampler.add(number, prompt[number:], max_tokens=900, seed=number)
    for number, result in enumerate(finish(sampler, 0, 1, 2)):
        assert_same(result, alone("ww", prompt[number:], max_tokens=900, seed=number))
    check_idle(sampler)
    smaller = _core.Sampler(core("ww"), tokens=(MOST - 1) * PAGE)
    with pytest.raises(MemoryError, match=f"the sampler's holds {(MOST - 1) * PAGE}"):
        smaller.add(0, prompt, max_tokens=1)


def test_a_cache_of_a_sequences_length_runs_it() -> None:
    for layers in ("fw", "fwwfw"):
        sampler, prompt = _core.Sampler(core(layers), tokens=1280), tokens_of(1270)
        sampler.add(0, prompt, max_tokens=11, num_samples=2)
        (result,) = finish(sampler, 0)
        assert_same(result, alone(layers, prompt, max_tokens=11, num_samples=2, seed=0))
        with pytest.raises(MemoryError):
            sampler.add(1, prompt, max_tokens=12)


@pytest.mark.parametrize(
    ("layers", "full", "windowed", "layers_of_a_list"),
    [("ff", 1, 0, 2), ("ww", 0, 1, 2), ("fw", 1, 1, 1), ("wfwfwf", 1, 1, 3), ("fwwfw", 1, 2, 2),
     ("wfffffw", 3, 1, 2), ("f" * 12 + "w", 6, 1, 2), ("w" * 29 + "f", 1, 6, 5)],
)  # fmt: skip
def test_layers_are_dealt_to_few_lists(
    layers: str, full: int, windowed: int, layers_of_a_list: int
) -> None:
    model, token = core(layers), 2 * 16 * 4  # bytes of a token in a layer
    sampler = _core.Sampler(model, tokens=64 * PAGE)
    cache, plan = sampler.cache, model.plan(1, 1)
    assert (cache["full"], cache["windowed"]) == (full, windowed)
    assert plan["kv_token"] == full * layers_of_a_list * token
    assert plan["kv_window"] == (BEFORE + 2) * PAGE * windowed * layers_of_a_list * token
    pages = 64 * full + (MOST if full else 64) * windowed
    assert cache["frames"] == pages
    assert model.cache_bytes(64 * PAGE) == pages * PAGE * layers_of_a_list * token


def test_a_cache_is_half_of_what_it_would_be() -> None:
    half, whole = core("fw").cache_bytes(1 << 20), core("ff").cache_bytes(1 << 20)
    assert whole / 2 < half < 0.501 * whole


def test_a_window_that_the_context_does_not_fill_is_none() -> None:
    assert _core.Sampler(core("fw", 4000), tokens=640).cache["windowed"] == 0
    assert _core.Sampler(core("fw", 3999), tokens=640).cache["windowed"] == 1


# ---- what is remembered ----


def fill(sampler: _core.Sampler) -> None:
    """Other requests, until everything is remembered for one of them."""
    for seed in range(40):
        sampler.add(seed, tokens_of(70, seed), max_tokens=1)
    finish(sampler, *range(40))


@pytest.mark.parametrize("layers", ["fw", "ww"])
def test_the_same_prompt_goes_on_at_its_last_page_though_memory_is_short(layers: str) -> None:
    """What a sequence left behind is given up before what the prompt's next request reads."""
    sampler, prompt = _core.Sampler(core(layers), tokens=1600), tokens_of(600)
    fill(sampler)
    run(sampler, prompt, max_tokens=200)
    result = run(sampler, prompt)
    assert result["prompt_reused"] == 9 * PAGE
    assert_same(result, alone(layers, prompt))
    check_idle(sampler)


@pytest.mark.parametrize("layers", ["fw", "ww"])
@pytest.mark.parametrize("drawn", [170, 190])
def test_the_next_turn_goes_on_where_the_last_one_ended(layers: str, drawn: int) -> None:
    sampler, prompt = _core.Sampler(core(layers), tokens=1600), tokens_of(300)
    fill(sampler)
    said = run(sampler, prompt, max_tokens=drawn)["samples"][0]["tokens"]
    more = np.concatenate([prompt, said, tokens_of(20)])
    result = run(sampler, more)
    assert result["prompt_reused"] == (300 + drawn - 1) // PAGE * PAGE
    assert_same(result, alone(layers, more))


def test_the_end_of_a_common_beginning_is_kept_when_it_is_seen_twice() -> None:
    """Its window was given up, so the second request computes it, and the third does not."""
    stem, sampler = tokens_of(600), _core.Sampler(core(), tokens=1344)
    for seed, reused in enumerate((0, 192, 576, 576)):
        prompt = np.concatenate([stem, tokens_of(700, seed)])
        result = run(sampler, prompt, max_tokens=1)
        assert result["prompt_reused"] == reused
        assert_same(result, alone("fw", prompt, max_tokens=1))


def test_pages_whose_window_is_gone_are_remembered_anew() -> None:
    """They are computed once more, and from then on found, as those behind them still are."""
    sampler, long = _core.Sampler(core(), tokens=2048), tokens_of(1900)
    run(sampler, long, max_tokens=1)
    for length, reused in ((460, 256), (460, 448), (1900, 1856)):
        result = run(sampler, long[:length])
        assert result["prompt_reused"] == reused
        assert_same(result, alone("fw", long[:length]))
    check_idle(sampler)


def test_a_session_goes_on_with_other_weights() -> None:
    """What it has computed stays, and is another's of the session that begins alike."""
    first, second = (randomize(_core.Adapter(core(), rank=2), seed) for seed in (1, 2))
    results = []
    for tokens in (1 << 13, 1280):
        sampler, prompt = _core.Sampler(core(), tokens=tokens), tokens_of(700)
        sampler.add(0, prompt, first, max_tokens=300, seed=1, session=9)
        for step in range(200):
            sampler.spoil()
            sampler.step()
            if step == 100:
                sampler.set_adapter(0, second)
        results += finish(sampler, 0)
        check_idle(sampler)
    assert_same(results[1], results[0])


# ---- in models without windows too ----


def test_a_page_behind_one_that_was_given_up_is_remembered_anew() -> None:
    """A scored prompt has a page of its own beside the one that is known. That one is given up, and
    a sample of the prompt remembers its pages once more: behind another page. (Every page was in
    two lists then, which went in a circle.)"""
    for tail in range(12):
        sampler = _core.Sampler(core("ff"), tokens=16 * PAGE)
        run(sampler, tokens_of(900)[:70], max_tokens=1)
        sampler.add(0, tokens_of(900), prompt_logprobs=True, num_samples=2, max_tokens=40)
        (found,) = finish(sampler, 0)
        for seed in range(12):
            run(sampler, tokens_of(200 + tail, seed), max_tokens=1)
        assert_same(found, alone("ff", tokens_of(900), prompt_logprobs=True, num_samples=2,
                                 max_tokens=40, seed=0))  # fmt: skip
        check_idle(sampler)
