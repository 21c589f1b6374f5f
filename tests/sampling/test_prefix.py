"""Pages of the cache that outlive their sequences: found again, never wrong, given up for others.

Every case compares with the same requests on a sampler of their own, bit for bit.
"""

from typing import Any

import numpy as np
import pytest
from support.sampler_loop import finish, run
from support.tiny_models import assert_same, loaded, randomize, tokens_of
from tinsmith import _core

PAGE = 64


@pytest.fixture(scope="module")
def core() -> _core.Model:
    return loaded("qwen3").core


def alone(core: _core.Model, prompt: np.ndarray, adapter: Any = None, **options: Any) -> Any:
    return run(_core.Sampler(core, tokens=512), prompt, adapter, **options)


def test_a_prompt_that_begins_like_an_earlier_one_begins_with_its_pages(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=2048)
    first = tokens_of("qwen3", 140)
    run(sampler, first)
    assert sampler.reused == 0
    for length, reused in ((140, 128), (129, 128), (128, 64), (100, 64), (64, 0), (65, 64)):
        before = sampler.reused
        other = np.concatenate([first[:length], tokens_of("qwen3", 9, seed=length)])[:length]
        assert_same(run(sampler, other), alone(core, other))
        assert sampler.reused - before == reused, length


def test_the_next_turn_begins_with_what_was_sampled_in_this_one(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=2048)
    prompt = tokens_of("qwen3", 60)
    said = run(sampler, prompt, max_tokens=10)["samples"][0]["tokens"]
    more = np.concatenate([prompt, said, tokens_of("qwen3", 20, seed=8)])
    assert_same(run(sampler, more), alone(core, more))
    assert sampler.reused == PAGE


def test_a_page_in_the_middle_is_not_taken_for_one_at_the_beginning(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=2048)
    page, other = tokens_of("qwen3", PAGE), tokens_of("qwen3", PAGE, seed=1)
    run(sampler, np.concatenate([other, page, page[:3]]))
    for prompt in (np.concatenate([page, page[:3]]), np.concatenate([page, other, page[:3]])):
        assert_same(run(sampler, prompt), alone(core, prompt))
    assert sampler.reused == PAGE  # the third prompt's first page is the second's


def test_the_same_page_behind_others_is_not_found_where_hashes_meet(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=16 * PAGE)  # sixteen buckets: many pages share one
    page, other = (tokens_of("qwen3", PAGE, seed=seed) for seed in (98, 99))
    for seed in range(60):
        first = tokens_of("qwen3", PAGE, seed=seed)
        run(sampler, np.concatenate([other, page, page[:3]]))
        run(sampler, np.concatenate([first, page[:3]]))
        before, prompt = sampler.reused, np.concatenate([first, page, page[:3]])
        assert_same(run(sampler, prompt), alone(core, prompt))
        assert sampler.reused - before == PAGE


def test_weights_that_change_are_other_weights(core: _core.Model) -> None:
    sampler, prompt = _core.Sampler(core, tokens=2048), tokens_of("qwen3", 80)
    adapter = _core.Adapter(core, rank=2)
    randomize(adapter, seed=1)
    run(sampler, prompt)
    expected = run(sampler, prompt, adapter)
    assert sampler.reused == 0
    copy = adapter.snapshot()
    assert_same(run(sampler, prompt, copy), expected)
    assert sampler.reused == PAGE  # a snapshot's weights are the adapter's own
    randomize(adapter, seed=2)
    assert_same(run(sampler, prompt, adapter), alone(core, prompt, adapter))
    assert sampler.reused == PAGE
    assert_same(run(sampler, prompt, copy), expected)
    assert sampler.reused == 2 * PAGE


def test_the_same_page_under_other_weights_is_not_found_where_hashes_meet(
    core: _core.Model,
) -> None:
    sampler = _core.Sampler(core, tokens=16 * PAGE)  # sixteen buckets: many pages share one
    adapter, prompt = _core.Adapter(core, rank=2), tokens_of("qwen3", PAGE + 3)
    for seed in range(40):
        randomize(adapter, seed)
        assert_same(run(sampler, prompt, adapter), alone(core, prompt, adapter))
    assert sampler.reused == 0


def test_scored_positions_are_run_and_the_others_reused(core: _core.Model) -> None:
    sampler, prompt = _core.Sampler(core, tokens=2048), tokens_of("qwen3", 150)
    run(sampler, prompt)
    scores = {"prompt_logprobs": True, "topk_prompt": 4}
    whole = run(sampler, prompt, **scores)
    assert_same(whole, alone(core, prompt, **scores))
    assert sampler.reused == 0
    for start, reused in ((1, 0), (64, 0), (65, 64), (130, 128), (150, 128)):
        sampler = _core.Sampler(core, tokens=2048)
        run(sampler, prompt)  # tells no scores
        part = run(sampler, prompt, prompt_from=start, **scores)
        assert sampler.reused == reused, start
        for key in ("prompt_logprobs", "topk_ids", "topk_logprobs"):
            np.testing.assert_array_equal(part[key][start:], whole[key][start:])
        assert np.isnan(part["prompt_logprobs"][:start]).all()
        assert (part["topk_ids"][:start] == 0).all()
        assert (part["topk_logprobs"][:start] == -99999).all()
    targets = {"targets": prompt, "target_starts": np.arange(150, dtype=np.int32)}
    targets["targets"] = prompt[1:]
    assert_same(run(sampler, prompt, **targets), alone(core, prompt, **targets))


def test_pages_are_given_up_for_others_and_no_result_changes(core: _core.Model) -> None:
    """Many conversations through a cache that holds two of them."""
    sampler, rng = _core.Sampler(core, tokens=4 * PAGE), np.random.default_rng(0)
    stems = [tokens_of("qwen3", 130, seed=seed) for seed in range(4)]
    for turn in range(40):
        stem = stems[rng.integers(4)][: rng.integers(1, 131)]
        prompt = np.concatenate([stem, tokens_of("qwen3", int(rng.integers(1, 9)), seed=turn)])
        samples = int(rng.integers(1, 4))
        options = {"num_samples": samples, "seed": turn}
        assert_same(run(sampler, prompt, **options), alone(core, prompt, **options))
    assert sampler.reused > 0


def test_the_page_that_was_not_used_for_longest_is_given_up_first(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=4 * PAGE)  # each prompt needs one, and one to go on in
    prompts = [tokens_of("qwen3", PAGE + 3, seed=seed) for seed in range(4)]
    for prompt in prompts:
        run(sampler, prompt)
    for prompt, found in zip(reversed(prompts), (PAGE, PAGE, PAGE, 0), strict=True):
        before = sampler.reused
        run(sampler, prompt)
        assert sampler.reused - before == found


def test_requests_at_the_same_time_share_and_do_not_disturb(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=6 * PAGE)  # too small for all: some are put off
    stem = tokens_of("qwen3", 100)
    prompts = [np.concatenate([stem, tokens_of("qwen3", 5, seed=seed)]) for seed in range(6)]
    for number, prompt in enumerate(prompts):
        sampler.add(number, prompt, num_samples=2, max_tokens=30, seed=number)
    for number, got in enumerate(finish(sampler, *range(6))):
        options = {"num_samples": 2, "max_tokens": 30, "seed": number}
        assert_same(got, alone(core, prompts[number], **options))


def test_a_sequence_that_was_put_off_begins_again_with_its_own_pages(core: _core.Model) -> None:
    sampler = _core.Sampler(core, tokens=4 * PAGE)  # one of the two is put off, and comes again
    asked = [(tokens_of("qwen3", 60), 40), (tokens_of("qwen3", 130), 30)]
    for number, (prompt, most) in enumerate(asked):
        sampler.add(number, prompt, max_tokens=most, seed=number)
    for number, found in enumerate(finish(sampler, 0, 1)):
        prompt, most = asked[number]
        assert_same(found, alone(core, prompt, max_tokens=most, seed=number))
    assert sampler.reused == 2 * PAGE


def test_prompt_from_that_does_not_fit_is_refused(core: _core.Model) -> None:
    sampler, prompt = _core.Sampler(core, tokens=512), tokens_of("qwen3", 10)
    with pytest.raises(ValueError, match="prompt_from must be 0 to the prompt's 10 tokens, not 11"):
        sampler.add(0, prompt, prompt_logprobs=True, prompt_from=11)
    with pytest.raises(ValueError, match="prompt_from can't be used with prompt_draws or targets"):
        sampler.add(0, prompt, prompt_draws=1, prompt_from=3)
