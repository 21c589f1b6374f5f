"""Gradients against autograd and finite differences, and how batches add up, on every device."""

import itertools

import numpy as np
import pytest
from support.tiny_models import (
    SPECS,
    call,
    cpu_only,
    cut,
    datum,
    error,
    loaded,
    loaded_anew,
    randomize,
    tokens_of,
)
from support.training_cases import ADAM, GROUPS, adapter_of, batch, check, soft
from tinsmith import _core

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]


@pytest.mark.parametrize("name", SPECS)
def test_every_gradient_equals_autograd(name: str) -> None:
    check(name, adapter_of(name), batch(name))


@pytest.mark.parametrize("name", ("llama", "llama-tied", "qwen2-window"))
def test_gradients_at_positions_that_rope_scaling_and_windows_reach(name: str) -> None:
    check(name, adapter_of(name, rank=2), batch(name, (150,)))


@pytest.mark.parametrize("rank", (1, 8, 32))
def test_every_rank(rank: int) -> None:
    check("qwen3", adapter_of("qwen3", rank=rank, alpha=2.0 * rank), batch("qwen3"))


@pytest.mark.parametrize(
    "groups", [one for size in (1, 2) for one in itertools.combinations(GROUPS, size)]
)
@pytest.mark.parametrize("name", ("qwen3", "qwen2-tied"))
def test_groups_of_matrices(name: str, groups: tuple[str, ...]) -> None:
    adapter = adapter_of(name, rank=3, **{group: group in groups for group in GROUPS})
    slots = {
        "attn": {"wq", "wk", "wv", "wo"},
        "mlp": {"w_gate", "w_up", "w_down"},
        "unembed": {"head"},
    }
    assert {slot for slot, *_ in adapter.layout} == set().union(*(slots[one] for one in groups))
    assert sum(rows * cols for *_, rows, cols in adapter.layout) == adapter.size
    check(name, adapter, batch(name))


def test_a_new_adapter_has_gradients_of_b_alone() -> None:
    adapter = _core.Adapter(loaded("qwen3").core, rank=4)
    call(adapter, batch("qwen3"))
    for key, gradient in cut(adapter, adapter.read("gradients")).items():
        assert gradient.any() == ("lora_B" in key), key


@cpu_only
def test_finite_differences() -> None:
    adapter = adapter_of("llama", rank=4)
    data = batch("llama")
    call(adapter, data)
    gradient = adapter.read("gradients").astype(np.float64)
    weights = adapter.read("weights")
    rng = np.random.default_rng(1)
    for _ in range(3):
        direction = rng.normal(size=adapter.size) + 3 * np.sign(gradient)  # not at a right angle
        direction *= 0.002 / np.linalg.norm(direction)
        sides = []
        for sign in (1, -1):
            adapter.write("weights", (weights + sign * direction).astype(np.float32))
            sides.append(call(adapter, data, backward=False)[1])
        slope = (sides[0] - sides[1]) / 2
        assert slope == pytest.approx(gradient @ direction, rel=5e-3)


def test_forward_alone_gives_the_same_and_no_gradients() -> None:
    adapter = adapter_of("qwen3")
    data = batch("qwen3")
    forward, loss = call(adapter, data, backward=False)
    assert not adapter.read("gradients").any()
    both, loss_again = call(adapter, data)
    assert loss == loss_again
    for one, other in zip(forward, both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_the_same_each_time() -> None:
    gradients = []
    for _ in range(2):
        adapter = adapter_of("qwen2")
        call(adapter, batch("qwen2"))
        gradients.append(adapter.read("gradients"))
    np.testing.assert_array_equal(*gradients)


@cpu_only
def test_threads_change_nothing() -> None:
    data = batch("llama", (150, 23, 1, 140, 60))
    results = []
    for threads in (1, 2, 3):
        core = loaded_anew("llama", threads).core
        adapter = randomize(_core.Adapter(core, rank=8, step_tokens=200))
        logp, _ = call(adapter, data)
        adapter.optim_step(**ADAM)
        results.append(np.concatenate([*logp, adapter.read("weights")]))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


# ---- batches ----


@pytest.mark.parametrize("rows", (1, 16, 41, 64))
def test_a_split_batch_equals_a_whole_one(rows: int) -> None:
    data = [*batch("qwen3", (23, 1, 40, 7, 16, 2)), soft("qwen3", 12, 6)]
    whole, split = adapter_of("qwen3"), adapter_of("qwen3", step_tokens=rows)
    wanted, total = call(whole, data)
    found, split_total = call(split, data)
    assert split_total == pytest.approx(total, rel=1e-6)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert error(split.read("gradients"), whole.read("gradients")) < 1e-6
    assert split.pending == pytest.approx(whole.pending, rel=1e-6)


@cpu_only
def test_rows_with_a_gradient_in_the_second_chunk_of_a_head_have_one() -> None:
    """A chunk has 512 rows. 513 of 640 have a weight, so one of them lies in the second chunk."""
    weights = np.random.default_rng(0).permutation(640).reshape(4, 160) < 513
    data = [datum(tokens_of("qwen3", 160, seed), weights=row) for seed, row in enumerate(weights)]
    whole, split = (adapter_of("qwen3", step_tokens=rows) for rows in (640, 160))
    call(whole, data)
    call(split, data)
    assert whole.pending[1:] == split.pending[1:] == (513, 4)
    assert error(whole.read("gradients"), split.read("gradients")) < 1e-6


def test_two_calls_add_up_to_one() -> None:
    data = batch("llama", (23, 1, 40, 7))
    once, twice = adapter_of("llama"), adapter_of("llama")
    call(once, data)
    losses = [call(twice, data[:2])[1], call(twice, data[2:])[1]]
    assert error(twice.read("gradients"), once.read("gradients")) < 1e-6
    for adapter in (once, twice):
        report = adapter.optim_step(**ADAM)
        assert report["loss_tokens"] == sum((one.inputs["weights"] != 0).sum() for one in data)
        assert report["loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert error(twice.read("weights"), once.read("weights")) < 1e-4


def test_two_adapters_of_a_model_do_not_meet() -> None:
    alone, first = adapter_of("qwen3"), adapter_of("qwen3")
    second = adapter_of("qwen3", seed=9, rank=2, mlp=False)
    wanted, _ = call(alone, batch("qwen3"))
    call(second, batch("qwen3", seed=4))
    found, _ = call(first, batch("qwen3"))
    call(second, batch("qwen3", seed=5))
    second.optim_step(**ADAM)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(first.read("gradients"), alone.read("gradients"))
    np.testing.assert_array_equal(first.read("weights"), alone.read("weights"))
