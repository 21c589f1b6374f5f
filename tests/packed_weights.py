"""Base weights of 8 and 4 bits for the tests: their numbers, which are exact, and their blocks."""

import numpy as np
from engine import Frozen

BLOCK = 32
# csrc/cpu/packed.c's levels of int4, in sixteenths, and OCP's of MXFP4.
INT4 = (-127, -101, -79, -62, -47, -33, -21, -9, 2, 13, 24, 36, 49, 64, 83, 108)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = {
    "int4": np.array(INT4) / 16,
    "q4_0": np.arange(16.0) - 8,
    "q4_1": np.arange(16.0),
    "mxfp4": np.array([*E2M1, *(-x for x in E2M1)]),
}
LEVELS["mxfp4_pairs"] = LEVELS["mxfp4"]


def make(rng, rows, cols, dtype) -> Frozen:
    """A weight in one of engine.PACKED's types. int8 and int4 are loaded from their numbers, which
    have a largest code in each block, so that the engine finds the same scale; the others from
    their blocks, whose columns are filled up."""
    across = -(-cols // BLOCK)
    shape = (rows, across, BLOCK)
    if dtype in ("int8", "int4"):
        scale = np.float16(rng.uniform(0.01, 0.3, (rows, across, 1)))
        scale = scale * rng.choice([-1, 1], scale.shape) if dtype == "int4" else scale
        least = 0 if dtype == "int4" else -127
        codes = rng.integers(least, 16 if dtype == "int4" else 128, shape)
        codes[..., 0] = least
        value = LEVELS["int4"][codes] if dtype == "int4" else codes
        value = (value * scale.astype(float)).reshape(rows, -1)[:, :cols]
        return Frozen(value, dtype)
    assert cols % BLOCK == 0, f"{dtype}: files have whole blocks"
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    if dtype.startswith("mxfp4"):
        scale = rng.integers(118, 128, (rows, across, 1)).astype(np.uint8)
        value, head = LEVELS[dtype][codes] * 2.0 ** (scale.astype(float) - 127), scale
    else:
        scale = rng.uniform(-0.3, 0.3, (rows, across, 1)).astype(np.float16)
        offset = rng.uniform(-2, 2, scale.shape).astype(np.float16)
        value, head = LEVELS[dtype][codes] * scale.astype(float), scale.view(np.uint8)
        if dtype == "q4_1":  # rounded once, as in float32
            value = np.float32(value + offset.astype(float)).astype(float)
            head = np.concatenate([head, offset.view(np.uint8)], -1)
    first, second = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    if dtype == "mxfp4_pairs":
        first, second = codes[..., ::2], codes[..., 1::2]
    blocks = np.concatenate([head, first | second << 4], -1).reshape(rows, -1)
    return Frozen(value.reshape(rows, cols), dtype, blocks)
