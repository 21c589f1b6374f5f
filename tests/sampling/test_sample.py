"""The sampler on every device: against transformers' generate, and bit for bit against the trainer
and itself."""

import functools
import gc
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.emulated_mode import mode_now
from support.op_reference import uniform
from support.sampler_loop import finish
from support.tiny_models import (
    DEVICE,
    SPECS,
    WEIGHTS,
    assert_same,
    call,
    datum,
    error,
    folder,
    in_bf16,
    loaded,
    logprobs,
    randomize,
    reference,
    tokens_of,
    with_peft,
)
from tinsmith import _core
from tinsmith.models import registry

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]
Request = dict[str, Any]  # the arguments of Sampler.add after the request's number
# Of each type of weights, and kind of layer.
NAMES = ("qwen3", "qwen2", "llama", "qwen2-window", "qwen3_moe")


def adapter_of(name: str, seed: int, **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, **{"rank": 4, "alpha": 8.0, **options}), seed)


def request(name: str, length: int, seed: int = 0, **options: Any) -> Request:
    return {"prompt": tokens_of(name, length, seed), "max_tokens": 20, "seed": seed, **options}


def run(
    name: str, requests: list[Request], *, tokens: int = 0, joins: dict[int, int] | None = None
) -> list[dict[str, Any]]:
    """Results of requests decoded together; `joins` says before which step a request comes."""
    sampler = _core.Sampler(loaded(name).core, tokens=tokens)
    waiting = dict(enumerate(requests))
    results: dict[int, dict[str, Any]] = {}
    for step in range(100_000):
        for number in [key for key in waiting if (joins or {}).get(key, 0) <= step]:
            sampler.add(number, **waiting.pop(number))
        _, done = sampler.step()
        results |= {number: sampler.take(number) for number in done}
        if not waiting and len(results) == len(requests):
            assert sampler.active == 0
            return [results[number] for number in range(len(requests))]
    raise AssertionError("the sampler does not get on")


def trainer(
    name: str, adapter: _core.Adapter | None, prompt: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """The trainer's log-probabilities of sampled tokens."""
    whole = np.concatenate([prompt, tokens])
    used = adapter or _core.Adapter(loaded(name).core, rank=1)
    (found,), _ = call(used, [datum(whole[:-1], whole[1:])], backward=False)
    return found[len(prompt) - 1 :]


def table_of(
    name: str, adapter: _core.Adapter | None, prompt: np.ndarray, tokens: np.ndarray
) -> torch.Tensor:
    """Log-probabilities (n, V) at the positions of sampled tokens: transformers', and in bf16 the
    trainer's own, which test_model.py holds to transformers': where top_k and top_p cut and which
    token is the best hangs there on roundings.
    """
    whole = np.concatenate([prompt, tokens[:-1]])
    if in_bf16():
        vocab = np.arange(SPECS[name].config["vocab_size"])
        used = adapter or _core.Adapter(loaded(name).core, rank=1)
        every = datum(whole, np.tile(vocab, (len(whole), 1)))
        (found,), _ = call(used, [every], backward=False)
        return torch.from_numpy(found.astype(np.float64))[len(prompt) - 1 :]
    model = with_peft(name, adapter) if adapter else reference(name)
    with torch.no_grad():
        return logprobs(model, whole)[len(prompt) - 1 :]


# ---- against transformers ----


@pytest.mark.parametrize("name", SPECS)
def test_greedy_equals_generate(name: str) -> None:
    adapters = [None, adapter_of(name, 1), adapter_of(name, 2, rank=2, mlp=False), None]
    requests = [
        request(name, length, temperature=0.0, adapter=adapter, stop_ids=np.array([7], np.int32))
        for length, adapter in zip((5, 33, 1, 70), adapters, strict=True)
    ]
    for result, asked in zip(run(name, requests), requests, strict=True):
        (sample,) = result["samples"]
        wanted = greedy(name, asked, sample["tokens"])
        np.testing.assert_array_equal(sample["tokens"], wanted)
        ended = sample["tokens"][-1] == 7
        assert sample["stop_reason"] == ("stop" if ended else "length")
        assert ended or len(sample["tokens"]) == 20


@pytest.mark.parametrize("temperature", (1e-45, 1e-40, 1e-38, 1e-33))
def test_the_coldest_samples_are_greedy(temperature: float) -> None:
    """Whatever float32 makes of a logit that is divided by so little."""
    cold, none = (request("qwen3", 9, temperature=t) for t in (temperature, 0.0))
    found, wanted = (result["samples"][0] for result in run("qwen3", [cold, none]))
    np.testing.assert_array_equal(found["tokens"], wanted["tokens"])
    np.testing.assert_array_equal(found["logprobs"], 0)


def greedy(name: str, asked: Request, found: np.ndarray) -> np.ndarray:
    """transformers' greedy tokens; in bf16 the trainer's best one after each prefix of `found`."""
    adapter, prompt = asked["adapter"], asked["prompt"]
    if in_bf16():
        return table_of(name, adapter, prompt, found).argmax(dim=1).numpy()
    model = with_peft(name, adapter) if adapter else reference(name)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    wanted = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=7,
        pad_token_id=0,
    )
    return wanted[0, ids.shape[1] :].numpy()


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    count, prompt = 1500, tokens_of("qwen3", 12)
    likely = np.exp(table_of("qwen3", None, prompt, prompt[:1])[-1].numpy())
    asked = {"prompt": prompt, "max_tokens": 1, "num_samples": count, "seed": 3}
    (result,) = run("qwen3", [asked])
    drawn = np.bincount([s["tokens"][0] for s in result["samples"]], minlength=len(likely))
    common = likely * count >= 5
    found = np.append(drawn[common], drawn[~common].sum())
    wanted = np.append(likely[common], likely[~common].sum()) * count
    chi = ((found - wanted) ** 2 / wanted).sum()
    freedom = len(found) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_a_token_is_drawn_by_its_seed_its_sample_and_its_position() -> None:
    prompt, seed = tokens_of("qwen3", 12), (3 << 32) + 5
    asked = {"prompt": prompt, "max_tokens": 40, "num_samples": 3, "seed": seed}
    (result,) = run("qwen3", [asked])
    for number, sample in enumerate(result["samples"]):
        rows = np.exp(table_of("qwen3", None, prompt, sample["tokens"]).numpy())
        draws = (SimpleNamespace(seed=seed, sample=number, pos=11 + i) for i in range(40))
        wanted = [
            np.searchsorted(np.cumsum(row), uniform(draw) * row.sum(), side="right")
            for row, draw in zip(rows, draws, strict=True)
        ]
        np.testing.assert_array_equal(sample["tokens"], wanted)


# ---- against the trainer ----


@pytest.mark.pairs(False)
@pytest.mark.parametrize("name", (*NAMES, "qwen3-tied", "mistral"))
def test_a_sampled_logprob_is_the_trainers_bit_for_bit(name: str) -> None:
    """All in one batch: greedy samples and others, of three adapters and none."""
    adapters = [None, adapter_of(name, 1), adapter_of(name, 2, rank=1), adapter_of(name, 3)]
    requests = [
        request(
            name, length, adapter=adapter, temperature=temperature, num_samples=2, max_tokens=70
        )
        for length, adapter in zip((3, 66, 1, 20), adapters, strict=True)
        for temperature in (0.0, 1.0)
    ]
    for result, asked in zip(run(name, requests), requests, strict=True):
        for sample in result["samples"]:
            wanted = trainer(name, asked["adapter"], asked["prompt"], sample["tokens"])
            np.testing.assert_array_equal(sample["logprobs"], wanted)


@pytest.mark.parametrize("temperature", (0.3, 0.7, 2.0))
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_of_the_distribution_at_the_temperature(name: str, temperature: float) -> None:
    asked = request(name, 9, adapter=adapter_of(name, 1), temperature=temperature, max_tokens=40)
    (result,) = run(name, [asked])
    (sample,) = result["samples"]
    table = table_of(name, asked["adapter"], asked["prompt"], sample["tokens"])
    wanted = torch.log_softmax(table / temperature, dim=-1).numpy()
    assert error(sample["logprobs"], wanted[np.arange(40), sample["tokens"]]) < 1e-5


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 10, "top_p": 0.5}, {"top_k": 1}], ids=str
)
def test_top_k_and_top_p_cut_and_renormalise(options: dict[str, Any]) -> None:
    asked = request("llama", 9, max_tokens=60, temperature=1.3, num_samples=3, **options)
    (result,) = run("llama", [asked])
    for sample in result["samples"]:
        table = table_of("llama", None, asked["prompt"], sample["tokens"]) / 1.3
        likely = torch.softmax(table, dim=-1).numpy()
        for row, token, logp in zip(likely, sample["tokens"], sample["logprobs"], strict=True):
            order = np.argsort(-row, kind="stable")[: options.get("top_k", row.size)]
            mass = np.cumsum(row[order]) / row[order].sum()
            kept = order[: 1 + np.searchsorted(mass, options.get("top_p", 1.0))]
            assert token in kept
            assert logp == pytest.approx(np.log(row[token] / row[kept].sum()), abs=1e-5)


@pytest.mark.pairs(False)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_logprobs_are_the_trainers_bit_for_bit(name: str) -> None:
    lengths = (1, 2, 65, 140)
    requests = [
        request(name, length, adapter=adapter, prompt_logprobs=True, max_tokens=1, temperature=0.5)
        for length in lengths
        for adapter in (None, adapter_of(name, 1))
    ]
    for result, asked in zip(run(name, requests), requests, strict=True):
        prompt, found = asked["prompt"], result["prompt_logprobs"]
        assert found.shape == prompt.shape and np.isnan(found[0])
        if len(prompt) > 1:
            wanted = trainer(name, asked["adapter"], prompt[:1], prompt[1:])
            np.testing.assert_array_equal(found[1:], wanted)


@pytest.mark.parametrize("count", (1, 5, 107))
def test_top_prompt_logprobs(count: int) -> None:
    adapter = adapter_of("llama", 1)
    asked = request("llama", 100, adapter=adapter, topk_prompt=count, max_tokens=1)
    (result,) = run("llama", [asked])
    ids, found = result["topk_ids"], result["topk_logprobs"]
    assert ids.shape == found.shape == (100, count)
    assert (ids[0] == 0).all() and (found[0] == -99999).all()
    assert (np.diff(found[1:], axis=1) <= 0).all()
    table = table_of("llama", adapter, asked["prompt"][:1], asked["prompt"][1:])
    best = table.topk(count, dim=-1)
    assert error(found[1:], best.values) < 1e-5
    assert error(found[1:], np.take_along_axis(table.numpy(), ids[1:].astype(int), 1)) < 1e-5
    assert all(len(set(row)) == count for row in ids[1:].tolist())
    assert result["prompt_logprobs"] is None


def test_top_sample_logprobs() -> None:
    asked = request("qwen3", 11, topk_sample=6, max_tokens=30, num_samples=2)
    (result,) = run("qwen3", [asked])
    for sample in result["samples"]:
        ids, found = sample["topk_ids"], sample["topk_logprobs"]
        table = table_of("qwen3", None, asked["prompt"], sample["tokens"])
        best = table.topk(6, dim=-1)
        assert ids.shape == found.shape == (30, 6)
        np.testing.assert_array_equal(ids, best.indices.numpy())
        assert error(found, best.values) < 1e-5
        drawn = ids == sample["tokens"][:, None]
        assert drawn.any()
        np.testing.assert_array_equal(found[drawn], sample["logprobs"][drawn.any(axis=1)])


def test_requests_that_ask_for_different_tops_do_not_meet() -> None:
    requests = [
        request("qwen3", 20, seed, topk_prompt=top, topk_sample=sample, prompt_logprobs=asked)
        for seed, (top, sample, asked) in enumerate([(3, 0, True), (0, 7, False), (9, 1, False)])
    ]
    together = run("qwen3", requests)
    for result, asked in zip(together, requests, strict=True):
        (alone,) = run("qwen3", [asked])
        assert_same(result, alone)
    assert together[0]["topk_ids"].shape == (20, 3) and together[1]["topk_ids"] is None
    assert together[0]["samples"][0]["topk_ids"] is None
    assert together[1]["samples"][0]["topk_ids"].shape == (20, 7)


def scored(rows: list[list[int]]) -> Request:
    """The arguments that ask for the scores of lists of ids."""
    starts = np.cumsum([0, *map(len, rows)])
    flat = [token for row in rows for token in row]
    return {"targets": np.array(flat, np.int32), "target_starts": starts.astype(np.int32)}


def rows_of(name: str, length: int) -> list[list[int]]:
    """Lists of 0 to 4 ids for each position after the first; a third of them empty."""
    rng = np.random.default_rng(length)
    vocab = SPECS[name].config["vocab_size"]
    counts = rng.integers(0, 5, length - 1) * (rng.random(length - 1) > 1 / 3)
    return [rng.integers(0, vocab, count).tolist() for count in counts]


@pytest.mark.parametrize("asks", ({}, {"prompt_logprobs": True, "topk_prompt": 3}))
@pytest.mark.parametrize("name", NAMES)
def test_scores_of_target_lists_are_the_trainers_bit_for_bit(name: str, asks: Request) -> None:
    adapter, length = adapter_of(name, 1), 140
    rows = rows_of(name, length)
    asked = request(name, length, adapter=adapter, temperature=0.5, max_tokens=1, **asks)
    (result,) = run(name, [asked | scored(rows)])
    width = max(map(len, rows))
    padded = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    (wanted,), _ = call(adapter, [datum(asked["prompt"][:-1], padded)], backward=False)
    named = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    np.testing.assert_array_equal(result["target_logprobs"], wanted[named])
    (plain,) = run(name, [asked])
    assert_same(result | {"target_logprobs": None}, plain)


@pytest.mark.parametrize("temperature", (1.0, 0.6, 0.0))
def test_draws_at_prompt_positions_are_as_often_as_they_are_likely(temperature: float) -> None:
    count, length = 200, 70
    asked = request("qwen3", length, prompt_draws=count, max_tokens=1, temperature=temperature)
    (result,) = run("qwen3", [asked])
    ids, found = result["drawn_ids"], result["drawn_logprobs"]
    assert ids.shape == found.shape == (length - 1, count)
    table = table_of("qwen3", None, asked["prompt"][:1], asked["prompt"][1:]).numpy()
    assert error(found, np.take_along_axis(table, ids.astype(int), 1)) < 1e-5  # at temperature 1
    if temperature == 0:
        np.testing.assert_array_equal(ids, table.argmax(1)[:, None].repeat(count, 1))
        return
    likely = np.exp(table / temperature)
    likely /= likely.sum(1, keepdims=True)
    drawn = np.stack([np.bincount(row, minlength=likely.shape[1]) for row in ids])
    total, wanted = drawn.sum(0), likely.sum(0) * count  # over all positions
    spread = np.sqrt((likely * (1 - likely)).sum(0) * count)
    assert (np.abs(total - wanted) < 5 * spread + 1).all()


def test_draws_are_new_at_each_position_and_the_same_each_time() -> None:
    repeated = {"prompt": np.full(60, 9, np.int32), "max_tokens": 1, "prompt_draws": 40}
    one, two, other = run("qwen3", [repeated | {"seed": seed} for seed in (1, 1, 2)])
    assert_same(one, two)
    assert not np.array_equal(one["drawn_ids"], other["drawn_ids"])
    assert len({tuple(row) for row in one["drawn_ids"].tolist()}) == 59
    (short,) = run("qwen3", [repeated | {"seed": 1, "prompt_draws": 3}])
    np.testing.assert_array_equal(short["drawn_ids"], one["drawn_ids"][:, :3])
    np.testing.assert_array_equal(short["drawn_logprobs"], one["drawn_logprobs"][:, :3])


# ---- whatever else is in the batch ----


def mixed(name: str) -> list[Request]:
    """Requests of all kinds, with three adapters and none."""
    first, second = adapter_of(name, 1), adapter_of(name, 2, rank=2)
    third = adapter_of(name, 3, attn=False)
    return [
        request(name, 3, 10, max_tokens=40),
        request(name, 70, 11, adapter=first, num_samples=3, max_tokens=33),
        request(name, 1, 12, adapter=second, temperature=0.0, max_tokens=66, topk_sample=2),
        request(name, 64, 13, adapter=first, top_p=0.8, prompt_logprobs=True),
        request(name, 65, 14, adapter=third, top_k=5, temperature=1.5, num_samples=2),
        request(name, 130, 15, prompt_logprobs=True, topk_prompt=4, num_samples=4),
        request(name, 90, 16, adapter=second, prompt_draws=3, **scored(rows_of(name, 90))),
    ]


@functools.cache
def mixed_alone(device: str, name: str, weights: str, truncating: bool) -> list[dict[str, Any]]:
    """What each of the `mixed` requests gets alone, on the device and the weights that are set."""
    assert (device, weights, truncating) == (DEVICE.get(), WEIGHTS.get(), mode_now().truncating)
    return [run(name, [asked])[0] for asked in mixed(name)]


JOINS = {
    "llama": {},
    "qwen2-window": {0: 12, 1: 0, 3: 5},
    "qwen2": {0: 0, 1: 3, 2: 7, 3: 7, 4: 20, 5: 40},
    "qwen3": {0: 40, 1: 20, 2: 9, 3: 2, 4: 1},
    "qwen3_moe": {0: 3, 2: 1, 4: 8, 6: 30},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_request_gets_what_it_gets_alone(on: str, name: str) -> None:
    """The emulator, which is slow, runs each family with one order of arrival: what a step holds is
    decided by code that all devices share."""
    alone = mixed_alone(on, name, WEIGHTS.get(), mode_now().truncating)
    for joins in [JOINS[name]] if on == "cuda-emulated" else JOINS.values():
        together = run(name, mixed(name), joins=joins)
        for found, wanted in zip(together, alone, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("tokens", (256, 320, 640))
def test_a_cache_that_is_too_small_for_all_changes_nothing(on: str, tokens: int) -> None:
    """The emulator runs the smallest alone: who is put off is decided by code that all share."""
    if on == "cuda-emulated" and tokens > 256:
        pytest.skip("it is long, emulated")
    for joins in ({}, {1: 5, 3: 8, 5: 2}):
        together = run("llama", mixed("llama"), tokens=tokens, joins=joins)
        alone = mixed_alone(on, "llama", WEIGHTS.get(), mode_now().truncating)
        for found, wanted in zip(together, alone, strict=True):
            assert_same(found, wanted)


def test_a_prompt_that_lacks_one_row_of_a_step_is_drawn_from_in_the_next() -> None:
    requests = [request("qwen3", length, length) for length in (128, 127, 126, 132)]
    for found, asked in zip(run("qwen3", requests), requests, strict=True):
        assert_same(found, run("qwen3", [asked])[0])


def test_seeds_and_samples_differ_and_repeat() -> None:
    def tokens(seed: int, count: int) -> list[list[int]]:
        (result,) = run("qwen2", [request("qwen2", 9, num_samples=count) | {"seed": seed}])
        return [sample["tokens"].tolist() for sample in result["samples"]]

    assert tokens(1, 3) == tokens(1, 3)
    assert tokens(1, 1) == tokens(1, 3)[:1]
    assert len({tuple(one) for one in tokens(1, 4) + tokens(2, 4)}) == 8


def test_samples_of_one_seed_may_be_drawn_in_parts() -> None:
    def drawn(first: int, count: int) -> list[list[int]]:
        asked = request("qwen2", 9, num_samples=count, first_sample=first)
        return [sample["tokens"].tolist() for sample in run("qwen2", [asked])[0]["samples"]]

    assert drawn(0, 2) + drawn(2, 1) + drawn(3, 4) == drawn(0, 7)
    for first in (-1, 1 << 16):
        with pytest.raises(ValueError, match="first_sample must be from 0 to"):
            drawn(first, 2)


def test_many_requests_at_once() -> None:
    requests = [request("qwen3-tied", 1 + seed % 40, seed, max_tokens=2) for seed in range(600)]
    together = run("qwen3-tied", requests)
    for number in (0, 17, 255, 256, 511, 599):
        assert_same(together[number], run("qwen3-tied", [requests[number]])[0])


# ---- ends ----


def test_a_sample_ends_at_its_length_or_the_contexts() -> None:
    results = run(
        "qwen3",
        [
            request("qwen3", 150, max_tokens=-1, num_samples=2),
            request("qwen3", 150, max_tokens=10),
            request("qwen3", 159, max_tokens=1),
            request("qwen3", 150, max_tokens=4),
        ],
    )
    for result, length in zip(results, (10, 10, 1, 4), strict=True):
        for sample in result["samples"]:
            assert len(sample["tokens"]) == len(sample["logprobs"]) == length
            assert sample["stop_reason"] == "length"


@pytest.mark.parametrize("length", (1, 60, 63, 64))
def test_a_sample_without_max_tokens_ends_where_the_cache_is_full(length: int) -> None:
    """The last token is never run: a prompt that fills the cache is followed by one."""
    asked = request("qwen3", length, num_samples=2)
    (found,) = run("qwen3", [asked | {"max_tokens": -1}], tokens=64)
    (wanted,) = run("qwen3", [asked | {"max_tokens": 65 - length}])
    assert_same(found, wanted)


def test_a_stop_id_is_the_last_token() -> None:
    asked = request("qwen3", 9, num_samples=3, max_tokens=60)
    (whole,) = run("qwen3", [asked])
    stops = whole["samples"][0]["tokens"][[30, 7]]  # the second one comes first
    (result,) = run("qwen3", [asked | {"stop_ids": stops}])
    for sample, long in zip(result["samples"], whole["samples"], strict=True):
        places = np.flatnonzero(np.isin(long["tokens"], stops))
        length = places[0] + 1 if len(places) else 60
        np.testing.assert_array_equal(sample["tokens"], long["tokens"][:length])
        np.testing.assert_array_equal(sample["logprobs"], long["logprobs"][:length])
        assert sample["stop_reason"] == ("stop" if len(places) else "length")
    assert result["samples"][0]["stop_reason"] == "stop"


def test_stop_ends_a_sample_after_its_newest_token() -> None:
    asked = request("qwen3", 9, num_samples=2)
    (whole,) = run("qwen3", [asked])
    sampler = _core.Sampler(loaded("qwen3").core)
    sampler.add(4, **asked)
    seen: list[int] = []
    done: list[int] = []
    while not done:
        drawn, done = sampler.step()
        seen += [token for _, sample, token in drawn if sample == 1]
        if len(seen) == 5 and (4, 1, seen[-1]) in drawn:
            sampler.stop(4, 1)
    result = sampler.take(4)
    np.testing.assert_array_equal(result["samples"][0]["tokens"], whole["samples"][0]["tokens"])
    np.testing.assert_array_equal(result["samples"][1]["tokens"], whole["samples"][1]["tokens"][:5])
    assert result["samples"][1]["tokens"].tolist() == seen
    assert [sample["stop_reason"] for sample in result["samples"]] == ["length", "stop"]


def test_a_cancelled_request_is_forgotten_and_others_go_on() -> None:
    requests = mixed("qwen3")
    sampler = _core.Sampler(loaded("qwen3").core, tokens=640)
    for number, asked in enumerate(requests):
        sampler.add(number, **asked)
    results = {}
    for step in range(10_000):
        _, done = sampler.step()
        results |= {number: sampler.take(number) for number in done}
        if step == 4:
            sampler.cancel(1)
            sampler.cancel(5)
        if sampler.active == 0:
            break
    assert set(results) == {0, 2, 3, 4, 6}
    for number, result in results.items():
        assert_same(result, run("qwen3", [requests[number]])[0])
    with pytest.raises((ValueError, KeyError), match="1"):
        sampler.take(1)
    sampler.add(1, **requests[1])  # its number is free again
    while not sampler.step()[1]:
        pass
    assert_same(sampler.take(1), run("qwen3", [requests[1]])[0])


def test_cancelled_requests_give_their_pages_back() -> None:
    sampler, asked = _core.Sampler(loaded("qwen3").core, tokens=128), request("qwen3", 100)
    for number in range(3):
        sampler.add(number, **asked)
        sampler.step()
        sampler.cancel(number)
    sampler.add(3, **asked)
    assert any(sampler.step()[1] for _ in range(100))
    assert_same(sampler.take(3), run("qwen3", [asked])[0])


def test_a_result_is_taken_once_and_not_before_it_is_done() -> None:
    sampler = _core.Sampler(loaded("qwen3").core)
    sampler.add(0, **request("qwen3", 9, max_tokens=2))
    with pytest.raises((ValueError, KeyError), match="0"):
        sampler.take(0)
    while not sampler.step()[1]:
        pass
    sampler.take(0)
    with pytest.raises((ValueError, KeyError), match="0"):
        sampler.take(0)
    assert sampler.step() == ([], [])


def test_training_goes_on_while_a_snapshot_is_sampled_from() -> None:
    adapter = adapter_of("qwen3", 1)
    asked = request("qwen3", 30, max_tokens=40)
    (wanted,) = run("qwen3", [asked | {"adapter": adapter.snapshot()}])
    sampler = _core.Sampler(loaded("qwen3").core)
    sampler.add(0, **asked, adapter=adapter.snapshot())
    done: list[int] = []
    for _ in range(1000):
        _, done = sampler.step()
        if done:
            break
        call(adapter, [datum(tokens_of("qwen3", 20))])
        adapter.optim_step(
            learning_rate=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0, grad_clip_norm=0
        )
    assert_same(sampler.take(0), wanted)


def test_what_a_sampler_uses_stays_alive() -> None:
    core = registry.load_model(folder("qwen3"), device=DEVICE.get(), threads=1).core
    sampler = _core.Sampler(core)
    asked = request("qwen3", 30)
    adapter = randomize(_core.Adapter(core, rank=4, alpha=8.0), 1)
    sampler.add(0, **asked, adapter=adapter)
    del core, adapter
    gc.collect()
    while not sampler.step()[1]:
        pass
    (wanted,) = run("qwen3", [asked | {"adapter": adapter_of("qwen3", 1)}])
    assert_same(sampler.take(0), wanted)


# ---- bad requests ----

BAD: dict[str, tuple[Request, type[Exception], str]] = {
    "empty prompt": ({"prompt": np.zeros(0, np.int32)}, ValueError, "prompt is empty"),
    "id too large": ({"prompt": np.array([1, 131], np.int32)}, IndexError, "position 1 is 131"),
    "id negative": ({"prompt": np.array([-1], np.int32)}, IndexError, "position 0 is -1"),
    "prompt too long": ({"prompt": np.ones(160, np.int32)}, ValueError, "160"),
    "more than the context": (
        {"prompt": np.ones(100, np.int32), "max_tokens": 61},
        ValueError,
        "100.*61.*160",
    ),
    "no samples": ({"num_samples": 0}, ValueError, "num_samples"),
    "no tokens": ({"max_tokens": 0}, ValueError, "max_tokens"),
    "negative tokens": ({"max_tokens": -2}, ValueError, "max_tokens"),
    "negative temperature": ({"temperature": -0.5}, ValueError, "temperature"),
    "temperature NaN": ({"temperature": float("nan")}, ValueError, "temperature"),
    "temperature infinite": ({"temperature": float("inf")}, ValueError, "temperature"),
    "top_k of zero": ({"top_k": 0}, ValueError, "top_k"),
    "top_p of zero": ({"top_p": 0.0}, ValueError, "top_p"),
    "top_p too large": ({"top_p": 1.1}, ValueError, "top_p"),
    "topk_prompt too large": ({"topk_prompt": 132}, ValueError, "topk_prompt"),
    "topk_sample negative": ({"topk_sample": -1}, ValueError, "topk_sample"),
    "the same number": ({"request": 7}, ValueError, "7"),
    "too many draws": ({"prompt_draws": 4097}, ValueError, "prompt_draws"),
    "draws negative": ({"prompt_draws": -1}, ValueError, "prompt_draws"),
    "a target too large": (scored([[131]] * 8), IndexError, "target 0 is 131"),
    "the last target too large": (scored([[3]] * 7 + [[131]]), IndexError, "target 7 is 131"),
    "a target negative": (scored([[3, -1]] * 8), IndexError, "target 1 is -1"),
    "rows too few": (scored([[3]] * 7), ValueError, "target_starts must be 9 offsets"),
    "rows that fall": (
        scored([[3]] * 8) | {"target_starts": np.array([0, 2, 1, 3, 4, 5, 6, 7, 8], np.int32)},
        ValueError,
        "target_starts falls at 2",
    ),
    "targets without rows": ({"targets": np.ones(3, np.int32)}, ValueError, "come together"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_and_the_rest_goes_on(case: str) -> None:
    change, kind, sentence = BAD[case]
    sampler = _core.Sampler(loaded("qwen3").core)
    good = request("qwen3", 9)
    sampler.add(7, **good)
    sampler.step()
    with pytest.raises(kind, match=sentence):
        sampler.add(**({"request": 8, **good} | change))
    while not sampler.step()[1]:
        pass
    assert_same(sampler.take(7), run("qwen3", [good])[0])
    assert sampler.active == 0


def test_a_request_larger_than_the_cache_is_refused() -> None:
    sampler = _core.Sampler(loaded("qwen3").core, tokens=64)
    with pytest.raises(MemoryError, match=r"100.*64"):
        sampler.add(0, **request("qwen3", 100, max_tokens=1))
    with pytest.raises(MemoryError, match="needs a cache of 65 tokens; the sampler's holds 64"):
        sampler.add(0, **request("qwen3", 60, max_tokens=6))
    sampler.add(0, **request("qwen3", 60, max_tokens=5))  # the last one is not read again


def test_targets_that_a_step_could_not_count_are_refused() -> None:
    most = (2**31 - 1) // 512 - 1 - 4096  # of a row, so that those of 512 rows fit in 32 bits
    sampler = _core.Sampler(loaded("qwen3").core)
    asked = request("qwen3", 3) | {"targets": np.zeros(most + 1, np.int32)}
    starts = np.array([0, 1, most + 1], np.int32)
    sampler.add(0, **asked, target_starts=starts)
    with pytest.raises(ValueError, match=f"position 2 has {most + 1} targets; it may have {most}"):
        sampler.add(1, **asked, target_starts=starts - np.array([0, 1, 0], np.int32))


@pytest.mark.skipif("TINSMITH_SANITIZE" in os.environ, reason="the sanitizer has limits of its own")
def test_results_that_memory_cant_hold_are_refused_with_their_bytes() -> None:
    sampler = _core.Sampler(loaded("qwen3").core, tokens=640)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), most[1]))
    try:
        with pytest.raises(MemoryError, match=r"results take 9900\.0 MiB"):
            sampler.add(
                0, **request("qwen3", 9, max_tokens=150, num_samples=1 << 16), topk_sample=131
            )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)
    asked = request("qwen3", 9)
    sampler.add(0, **asked)
    while not sampler.step()[1]:
        pass
    assert_same(sampler.take(0), run("qwen3", [asked])[0])


def test_an_adapter_of_another_model_is_refused() -> None:
    sampler = _core.Sampler(loaded("qwen3").core)
    with pytest.raises(ValueError, match="another model"):
        sampler.add(0, **request("qwen3", 9), adapter=adapter_of("llama", 0))


def test_a_bad_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="cache"):
        _core.Sampler(loaded("qwen3").core, tokens=-1)


def test_a_sample_that_has_drawn_nothing_cannot_be_stopped() -> None:
    """The others of its request wait for its prompt: they would have waited for ever."""
    core = loaded("qwen3").core
    sampler = _core.Sampler(core, tokens=512)
    sampler.add(0, tokens_of("qwen3", 9), num_samples=2, max_tokens=3, seed=1)
    with pytest.raises(ValueError, match="sample 0 of request 0 has no token"):
        sampler.stop(0, 0)
    finish(sampler, 0)
