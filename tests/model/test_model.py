"""Whole models against transformers and PEFT, on every device: log-probabilities, and what may not
change them."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import (
    SPECS,
    Datum,
    assert_near,
    assert_rows_near,
    call,
    cpu_only,
    datum,
    error,
    loaded,
    logprobs,
    randomize,
    reference,
    targets_of,
    tokens_of,
    with_peft,
)
from tinsmith import _core

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]
LENGTHS = (1, 2, 17, 64, 150)  # 150 is beyond the length that llama3's scaling starts from


def adapter_of(name: str, **options: Any) -> _core.Adapter:
    return _core.Adapter(loaded(name).core, **{"rank": 5, **options})


def whole_vocabulary(name: str, length: int) -> Datum:
    """A datum that asks for the log-probability of every token at every position."""
    vocab = SPECS[name].config["vocab_size"]
    return datum(tokens_of(name, length), np.tile(np.arange(vocab), (length, 1)))


@torch.no_grad()
def table(name: str, adapter: _core.Adapter | None, one: Datum, dtype: torch.dtype) -> np.ndarray:
    """torch's log-probabilities of a datum's targets, with PEFT's adapter or without."""
    model = with_peft(name, adapter, dtype) if adapter else reference(name, dtype)
    return targets_of(logprobs(model, one.tokens), one).numpy()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SPECS)
def test_logprobs_equal_transformers(name: str, length: int) -> None:
    one = whole_vocabulary(name, length)
    (found,), _ = call(adapter_of(name), [one], backward=False)
    assert_rows_near(name, found, functools.partial(table, name, None, one))


@pytest.mark.parametrize("rank", (1, 8))
@pytest.mark.parametrize("name", SPECS)
def test_logprobs_with_lora_equal_peft(name: str, rank: int) -> None:
    adapter = randomize(adapter_of(name, rank=rank, alpha=16.0))
    one = whole_vocabulary(name, 70)
    (found,), _ = call(adapter, [one], backward=False)
    assert_rows_near(name, found, functools.partial(table, name, adapter, one))
    assert error(found, table(name, None, one, torch.float64)) > 0.05  # the adapter matters


@pytest.mark.parametrize("name", SPECS)
def test_packed_equals_one_by_one_bit_for_bit(name: str) -> None:
    adapter = randomize(adapter_of(name))
    data = [datum(tokens_of(name, length, seed=3)) for length in (5, 1, 40, 17, 2, 33)]
    together, total = call(adapter, data, backward=False)
    alone = [call(adapter, [one], backward=False) for one in data]
    for found, ((wanted,), _) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert total == pytest.approx(sum(loss for _, loss in alone), rel=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_a_prefix_has_the_same_logprobs_in_a_longer_sequence(name: str) -> None:
    tokens = tokens_of(name, 60)
    (long,), _ = call(adapter_of(name), [datum(tokens, np.roll(tokens, -1))], backward=False)
    (short,), _ = call(adapter_of(name), [datum(tokens[:23], tokens[1:24])], backward=False)
    np.testing.assert_array_equal(long[:23], short)


@cpu_only
def test_a_model_that_lacks_a_tensor_is_not_sealed() -> None:
    base = loaded("qwen3")
    for missing in base.core.slots:
        core = _core.Model(base.core.config, base.inv_freq, weights="f32", threads=1)
        for one in core.slots:
            slot, layer, index, rows, cols = one
            shape = (rows, cols) if rows > 1 else (cols,)
            if one != missing:
                core.load(slot, layer, np.zeros(shape, np.float32), index)
        with pytest.raises(ValueError, match=r"was not loaded"):
            core.seal()


def test_a_new_adapter_changes_nothing() -> None:
    one = datum(tokens_of("qwen3", 30))
    (found,), _ = call(adapter_of("qwen3", seed=5), [one], backward=False)
    assert_near(found, functools.partial(table, "qwen3", None, one))


def test_a_is_drawn_as_peft_draws_it_and_b_is_zero() -> None:
    adapter = adapter_of("qwen3", rank=32, seed=1)
    flat = adapter.read("weights")
    other = adapter_of("qwen3", rank=32, seed=2).read("weights")
    again = adapter_of("qwen3", rank=32, seed=1).read("weights")
    np.testing.assert_array_equal(flat, again)
    assert not np.array_equal(flat, other)
    for slot, layer, _, letter, offset, rows, cols in adapter.layout:
        matrix = flat[offset : offset + rows * cols]
        if letter == "B":
            assert not matrix.any(), (slot, layer)
        else:
            bound = 1 / rows**0.5
            assert np.abs(matrix).max() <= bound, (slot, layer)
            assert matrix.std() == pytest.approx(bound / 3**0.5, rel=0.1), (slot, layer)
            assert abs(matrix.mean()) < bound * 0.1, (slot, layer)
