"""Matrices that are filled with a block of numbers on the GPU: as if the same had been loaded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.op_devices import emulated_library, to_bf16
from support.tiny_models import call, datum
from tinsmith import _core

CONFIG = {
    **{"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_width": 16, "rotary": 16},
    **{"ffn": 96, "vocab": 200, "context": 256, "norm_eps": 1e-6, "rope_scale": 1.0, "qk_norm": 1},
    **{"mixers": ["full_attention"] * 2, "feeds": ["mlp"] * 2},
}
INV_FREQ = 10000.0 ** -(np.arange(8, dtype=np.float32) / 8)
TOKENS = np.arange(3, 40, dtype=np.int32)
LOADED = ("wo", 1)  # a matrix that is there before the block


@pytest.fixture(autouse=True)
def emulated() -> None:
    emulated_library()


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """Random bf16 bits."""
    return to_bf16(0.3 * np.random.default_rng(seed).standard_normal(count))


def model(device: str = "cuda-emulated", weights: str = "bf16", **config: Any) -> _core.Model:
    """A model without its matrices, but for one."""
    core = _core.Model({**CONFIG, **config}, INV_FREQ, weights=weights, device=device)
    for slot, layer, index, rows, cols in core.slots:
        if rows == 1:
            core.load(slot, layer, np.ones(cols, np.float32), index)
        if (slot, layer) == LOADED:
            core.load(slot, layer, numbers(rows * cols, 1).reshape(rows, cols), index)
    return core


def given(core: _core.Model, block: np.ndarray) -> None:
    """Loads what fill makes of the block: the numbers run on from matrix to matrix."""
    left = [one for one in core.slots if one[3] > 1 and one[:2] != LOADED]
    sizes = [rows * cols for *_, rows, cols in left]
    parts = np.split(np.resize(block, sum(sizes)), np.cumsum(sizes)[:-1])
    for (slot, layer, index, rows, cols), part in zip(left, parts, strict=True):
        core.load(slot, layer, part.reshape(rows, cols), index)


def logits(make: Callable[[_core.Model], object], **config: Any) -> np.ndarray:
    """Log-probabilities of the whole vocabulary behind every token."""
    core = model(**config)
    make(core)
    core.seal()
    every = np.tile(np.arange(CONFIG["vocab"]), (len(TOKENS), 1))
    (found,), _ = call(_core.Adapter(core, rank=4), [datum(TOKENS, every)], backward=False)
    return found


@pytest.mark.parametrize("count", (1001, 4104, 1 << 20))
@pytest.mark.parametrize("tied", (0, 1))
def test_a_filled_model_is_one_that_was_loaded(count: int, tied: int) -> None:
    block = numbers(count)
    filled = logits(lambda core: core.fill(block), tied=tied)
    loaded = logits(lambda core: given(core, block), tied=tied)
    np.testing.assert_array_equal(filled, loaded)
    assert np.isfinite(filled).all() and filled.std() > 0.1


def test_experts_are_filled_one_by_one() -> None:
    block = numbers(5000)
    mixture = {"feeds": ["experts", "mlp"], "experts": 4, "chosen": 2, "expert_ffn": 32}
    filled = logits(lambda core: core.fill(block), **mixture)
    np.testing.assert_array_equal(filled, logits(lambda core: given(core, block), **mixture))


@pytest.mark.parametrize(
    ("options", "sentence"),
    (
        ({"device": "cpu"}, "the device cpu keeps weights in an order of its own"),
        ({"weights": "f32"}, "embed is kept in f32: a block fills matrices in bf16"),
        ({"ffn": 100}, "layer 0 w_down has rows of 100 numbers: a block fills rows of a multiple"),
    ),
)
def test_what_a_block_can_not_fill_is_refused(options: dict[str, Any], sentence: str) -> None:
    core = model(**options)
    with pytest.raises(ValueError, match=sentence):
        core.fill(numbers(64))
    with pytest.raises(ValueError, match="was not loaded"):  # nothing was filled
        core.seal()


def test_a_block_is_refused_that_is_empty_or_not_finite() -> None:
    core, infinite = model(), numbers(64)
    infinite[40] = 0x7F80
    for block, sentence in ((infinite, "not finite"), (numbers(0), "the block has no numbers")):
        with pytest.raises(ValueError, match=sentence):
            core.fill(block)
    with pytest.raises(TypeError, match="block"):
        core.fill(np.ones(8, np.float32))
    core.fill(numbers(64))
    core.seal()
    with pytest.raises(ValueError, match="the model is sealed"):
        core.fill(numbers(64))
