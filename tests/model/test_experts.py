"""Experts in the engine against torch's float64: log-probabilities, gradients, what the sampler
draws, and how the load of experts is told."""

import numpy as np
import pytest
import torch
from support.expert_oracle import KINDS, VOCAB, Oracle, core
from support.sampler_loop import finish
from support.tiny_models import call, cpu_only, datum, error, randomize
from tinsmith import _core
from tinsmith.engine import routing

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]
LENGTHS = (23, 1, 70, 5)


def tokens_of(length: int) -> np.ndarray:
    return np.random.default_rng([1, length]).integers(0, VOCAB, length).astype(np.int32)


def adapter_of(kind: str, threads: int = 1, **options: int) -> _core.Adapter:
    return randomize(_core.Adapter(core(kind, threads), rank=5, alpha=8.0, **options))


@cpu_only
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_equal_torch(kind: str) -> None:
    adapter = adapter_of(kind)
    data, oracle = [datum(tokens_of(length)) for length in LENGTHS], Oracle(kind, adapter)
    found, loss = call(adapter, data)
    wanted = []
    for one in data:
        targets = torch.from_numpy(one.targets).long()[:, None]
        wanted.append(oracle.logprobs(one.tokens).gather(1, targets).ravel())
    total = -sum(one.sum() for one in wanted)
    for got, exact in zip(found, wanted, strict=True):
        assert np.abs(got - exact.detach().numpy()).max() < 5e-5
    assert abs(loss - total.item()) < 1e-3
    exact, got = oracle.gradient(total, adapter.size), adapter.read("gradients")
    for key, place in oracle.places.items():
        if np.abs(exact[place]).max() > 0:
            assert error(got[place], exact[place]) < 1e-4, key
        else:
            assert not np.any(got[place]), key


@cpu_only
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_without_experts_has_the_same_gradients_elsewhere(kind: str) -> None:
    adapter = adapter_of(kind, mlp=False)
    oracle = Oracle(kind, adapter)
    assert not any(slot.startswith("e_") for slot, *_ in adapter.layout)
    one = datum(tokens_of(23))
    call(adapter, [one])
    targets = torch.from_numpy(one.targets).long()[:, None]
    exact = oracle.gradient(-oracle.logprobs(one.tokens).gather(1, targets).sum(), adapter.size)
    assert error(adapter.read("gradients"), exact) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_one_by_one_and_the_sampler_is_the_trainer(kind: str) -> None:
    adapter = adapter_of(kind, 2)
    data = [datum(tokens_of(length)) for length in LENGTHS]
    together, _ = call(adapter, data, backward=False)
    for one, row in zip(data, together, strict=True):
        (alone,), _ = call(adapter, [one], backward=False)
        np.testing.assert_array_equal(alone, row)
    sampler = _core.Sampler(core(kind, 2), tokens=1024)
    asked = [(tokens_of(length), who) for length in (3, 62, 65) for who in (adapter, None)]
    for number, (prompt, who) in enumerate(asked):
        sampler.add(number, prompt, who, max_tokens=20, seed=number)
    results = finish(sampler, *range(len(asked)))
    base = _core.Adapter(core(kind, 2), rank=1)
    for (prompt, who), result in zip(asked, results, strict=True):
        tokens, logprobs = result["samples"][0]["tokens"], result["samples"][0]["logprobs"]
        drawn = np.concatenate([prompt, tokens]).astype(np.int32)
        (row,), _ = call(who or base, [datum(drawn)], backward=False)
        np.testing.assert_array_equal(row[len(prompt) - 1 : -1], logprobs)


def test_the_load_of_experts_is_counted() -> None:
    adapter = adapter_of("qwen")
    data = [datum(tokens_of(length)) for length in LENGTHS]
    for step_tokens in (0, 24):
        other = randomize(_core.Adapter(core("qwen"), rank=5, alpha=8.0, step_tokens=step_tokens))
        call(other, data[:1])
        call(other, data)  # whose rows alone count
        counts = other.routed
        assert counts.sum(axis=1).tolist() == [3 * sum(LENGTHS), 0, 3 * sum(LENGTHS)]
        if step_tokens:
            np.testing.assert_array_equal(counts, adapter.routed)
        adapter = other
    told = routing.metrics(counts)
    assert told["expert_share:max"] == counts.max() / (3 * sum(LENGTHS))
    assert 0 < told["expert_entropy:mean"] < 1
    even = routing.metrics(np.full((2, 8), 5, np.int32))
    assert even["expert_entropy:mean"] == pytest.approx(1.0)
    assert even["expert_share:min"] == even["expert_share:max"] == 1 / 8
    assert routing.metrics(np.zeros((2, 8), np.int32)) == {}
