"""A small random model of gated delta networks and gated attention, put together slot by slot.

It has what a checkpoint's model has, and a context that is long enough for every phase of a page.
"""

import functools

import numpy as np
from tinsmith import _core

from support.tiny_models import DEVICE

CONTEXT, VOCAB = 1408, 61
CONFIG = {
    "layers": 3, "width": 40, "heads": 2, "kv_heads": 1, "head_width": 32, "rotary": 8, "ffn": 48,
    "vocab": VOCAB, "context": CONTEXT, "window": 0, "qkv_bias": 0, "qk_norm": 1, "q_gate": 1,
    "tied": 0, "key_heads": 1, "value_heads": 2, "key_width": 32, "value_width": 32,
    "norm_eps": 1e-6, "rope_scale": 1.0,
    "mixers": ["linear_attention", "full_attention", "linear_attention"], "feeds": ["mlp"] * 3,
}  # fmt: skip


def core(threads: int = 1, *, alone: bool = False) -> _core.Model:
    """The model on the device that the test runs on; `alone`: without a layer of attention."""
    return _core_on(DEVICE.get(), threads, alone)


@functools.cache
def _core_on(device: str, threads: int, alone: bool) -> _core.Model:
    inv_freq = (1e4 ** -(np.arange(4) / 4)).astype(np.float32)
    config = CONFIG | ({"mixers": ["linear_attention"] * 3} if alone else {})
    model = _core.Model(config, inv_freq, weights="f32", device=device, threads=threads)
    rng = np.random.default_rng(5)
    for slot, layer, index, rows, cols in model.slots:
        matrix = rng.normal(0, 1.3 / cols**0.5, (rows, cols))
        if slot.endswith("norm"):
            matrix = rng.uniform(0.5, 1.5, (rows, cols))
        elif slot == "delta_rate":
            matrix = rng.uniform(-4, -1, (rows, cols))  # decays of 0.7 to 0.99 a token
        elif slot == "delta_conv":
            matrix = rng.normal(0, 0.5, (rows, cols))
        array = matrix.astype(np.float32)
        model.load(slot, layer, array[0] if rows == 1 and slot not in MATRICES else array, index)
    model.seal()
    return model


MATRICES = ("delta_b", "delta_a")


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens; those of another length begin differently."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).astype(np.int32)
