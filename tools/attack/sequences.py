"""Small random models of every kind of layer for the attack on the sampler's schedule, and what a
request gives that is alone."""

import functools
from typing import Any

import numpy as np
from tinsmith import _core

CONTEXT, VOCAB = 700, 41
KINDS = {"f": "full_attention", "w": "sliding_attention", "l": "linear_attention"}
VECTORS = ("delta_b", "delta_a")  # matrices, though they may have one row


@functools.cache
def core_of(layers: str, window: int, experts: bool) -> _core.Model:
    """A model with these kinds of layers, put together slot by slot."""
    config: dict[str, Any] = {
        "layers": len(layers), "width": 16, "heads": 2, "kv_heads": 1, "head_width": 8,
        "rotary": 8, "ffn": 16, "vocab": VOCAB, "context": CONTEXT, "window": window,
        "qkv_bias": 0, "qk_norm": 0, "q_gate": 0, "tied": 0, "norm_eps": 1e-6, "rope_scale": 1.0,
        "key_heads": 1, "value_heads": 1, "key_width": 32, "value_width": 32, "experts": 4,
        "chosen": 2, "expert_ffn": 16, "norm_shares": 1,
        "mixers": [KINDS[layer] for layer in layers],
        "feeds": ["experts" if experts else "mlp"] * len(layers),
    }  # fmt: skip
    inv_freq = (1e4 ** -(np.arange(4) / 4)).astype(np.float32)
    model = _core.Model(config, inv_freq, weights="f32", threads=1)
    rng = np.random.default_rng(5)
    for slot, layer, index, rows, cols in model.slots:
        matrix = rng.normal(0, 1.3 / cols**0.5, (rows, cols))
        if slot.endswith("norm"):
            matrix = rng.uniform(0.5, 1.5, (rows, cols))
        elif slot == "delta_rate":
            matrix = rng.uniform(-4, -1, (rows, cols))
        array = matrix.astype(np.float32)
        model.load(slot, layer, array[0] if rows == 1 and slot not in VECTORS else array, index)
    model.seal()
    return model


@functools.cache
def adapters_of(layers: str, window: int, experts: bool) -> tuple[_core.Adapter, ...]:
    """Two adapters whose weights are not zero."""
    made, rng = [], np.random.default_rng(6)
    for rank in (1, 3):
        adapter = _core.Adapter(core_of(layers, window, experts), rank=rank, alpha=2.0)
        adapter.write("weights", rng.normal(0, 0.3, adapter.size).astype(np.float32))
        made.append(adapter)
    return tuple(made)


def result_of(model: _core.Model, options: dict[str, Any]) -> Any:
    """What a request gives that is alone, in a cache that holds all of it."""
    sampler = _core.Sampler(model, tokens=1 << 13)
    sampler.add(0, **options)
    while not sampler.step()[1]:
        pass
    return sampler.take(0)
