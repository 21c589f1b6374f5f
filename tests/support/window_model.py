"""Small random models whose layers have a window, or have none, put together slot by slot."""

import functools

import numpy as np
from tinsmith import _core

from support.tiny_models import DEVICE

CONTEXT, VOCAB = 4000, 61
KINDS = {"f": "full_attention", "w": "sliding_attention"}


def core(layers: str = "fw", window: int = 100) -> _core.Model:
    """A model on the device that the test runs on. layers: of each, whether it has the window, as
    in "fw"."""
    return core_on(layers, window, DEVICE.get())


@functools.cache
def core_on(layers: str, window: int, device: str) -> _core.Model:
    config = {
        "layers": len(layers), "width": 32, "heads": 2, "kv_heads": 1, "head_width": 16,
        "rotary": 16, "ffn": 40, "vocab": VOCAB, "context": CONTEXT, "window": window,
        "qkv_bias": 0, "qk_norm": 0, "q_gate": 0, "tied": 0, "norm_eps": 1e-6, "rope_scale": 1.0,
        "mixers": [KINDS[layer] for layer in layers], "feeds": ["mlp"] * len(layers),
    }  # fmt: skip
    inv_freq = (1e4 ** -(np.arange(8) / 8)).astype(np.float32)
    model = _core.Model(config, inv_freq, weights="f32", device=device, threads=1)
    rng = np.random.default_rng(5)
    for slot, layer, index, rows, cols in model.slots:
        matrix = rng.normal(0, 1.3 / cols**0.5, (rows, cols))
        if slot.endswith("norm"):
            matrix = rng.uniform(0.5, 1.5, (rows, cols))
        array = matrix.astype(np.float32)
        model.load(slot, layer, array[0] if rows == 1 else array, index)
    model.seal()
    return model


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens; those of another length begin differently."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).astype(np.int32)
