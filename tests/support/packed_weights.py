"""Base weights of 8 to 4 bits for the tests: their numbers, which are exact, and their blocks."""

import numpy as np

from support.op_devices import Frozen

BLOCK, LARGE = 32, 256
# bitsandbytes' levels of NF4.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# csrc/cpu/weights/packed.c's levels of int4, in sixteenths, and OCP's of MXFP4.
INT4 = (-127, -101, -79, -62, -47, -33, -21, -9, 2, 13, 24, 36, 49, 64, 83, 108)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3() -> np.ndarray:
    """The numbers of all codes: a sign, four bits of exponent, three more; NaN is the largest."""
    code = np.arange(128)
    exponent, rest = code >> 3, code & 7
    value = np.where(exponent, (8 + rest) * 2.0 ** (exponent - 10.0), rest * 2.0**-9)
    value[127] = np.nan
    return np.concatenate([value, -value])


LEVELS = {
    "int4": np.array(INT4) / 16,
    "q4_0": np.arange(16.0) - 8,
    "q4_1": np.arange(16.0),
    "mxfp4": np.array([*E2M1, *(-x for x in E2M1)]),
    "nf4": np.float32(NF4).astype(float),
    "fp8": e4m3(),
}
LEVELS["mxfp4_pairs"] = LEVELS["mxfp4"]


def whole(dtype: str, cols: int) -> int:
    """Files have whole blocks; what is made here may end within one."""
    block = {"int8": 1, "int4": 1}.get(dtype, LARGE if dtype.endswith("_k") else BLOCK)
    return -(-cols // block) * block


def make_large(rng, rows, cols, dtype) -> Frozen:
    """A weight in blocks of 256 numbers, of random codes, scales and leasts."""
    assert cols % LARGE == 0, f"{dtype}: files have whole blocks"
    count = rows * cols // LARGE
    d, dmin = (rng.uniform(-0.01, 0.01, (count, 1)).astype(np.float16) for _ in range(2))
    codes = rng.integers(0, 1 << int(dtype[1]), (count, LARGE))
    if dtype == "q6_k":
        scales, leasts = rng.integers(-128, 128, (count, 16)), np.zeros((count, 1), int)
        value = d.astype(float) * np.repeat(scales, 16, axis=1) * (codes - 32)
    else:
        scales, leasts = rng.integers(0, 64, (2, count, 8))
        value = d.astype(float) * np.repeat(scales, 32, axis=1) * codes
        value -= dmin.astype(float) * np.repeat(leasts, 32, axis=1)
    value = np.float32(value).astype(float)  # rounded once, as in float32
    blocks = pack_large(dtype, codes, d, scales, dmin, leasts).reshape(rows, -1)
    return Frozen(value.reshape(rows, cols), dtype, blocks)


def pack_large(dtype, codes, d, scales, dmin, leasts) -> np.ndarray:
    """The bytes of blocks, number by number, as ggml describes its block_q4_K, block_q5_K and
    block_q6_K: codes (count, 256), d and dmin (count, 1) in float16."""
    count = len(codes)
    low, high = np.zeros((count, 128), int), np.zeros((count, 64), int)
    if dtype == "q6_k":
        for n in range(LARGE):
            half, quarter, i = n // 128, n % 128 // 32, n % 32
            low[:, 64 * half + 32 * (quarter % 2) + i] |= (codes[:, n] & 15) << 4 * (quarter // 2)
            high[:, 32 * half + i] |= codes[:, n] >> 4 << 2 * quarter
        parts = [low, high, scales & 255, d.view(np.uint8)]
    else:
        six = np.zeros((count, 12), int)
        for j in range(4):
            six[:, j] = scales[:, j] | scales[:, j + 4] >> 4 << 6
            six[:, j + 4] = leasts[:, j] | leasts[:, j + 4] >> 4 << 6
            six[:, j + 8] = scales[:, j + 4] & 15 | (leasts[:, j + 4] & 15) << 4
        for n in range(LARGE):
            part, i = n // 32, n % 32
            low[:, 32 * (part // 2) + i] |= (codes[:, n] & 15) << 4 * (part % 2)
            high[:, i] |= codes[:, n] >> 4 << part
        fifth = [high[:, :32]] if dtype == "q5_k" else []
        parts = [d.view(np.uint8), dmin.view(np.uint8), six, *fifth, low]
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=1)


def quantise_large(w: np.ndarray, dtype: str) -> np.ndarray:
    """The blocks of wide numbers (..., cols), which the package gguf does not make: by the largest
    and the least number of each scale's, no better."""
    x, most = w.reshape(-1, LARGE).astype(float), (1 << int(dtype[1])) - 1
    span = 16 if dtype == "q6_k" else 32
    parts = x.reshape(len(x), -1, span)
    least = np.maximum(0, -parts.min(-1)) if span == 32 else np.zeros(parts.shape[:2])
    wanted = np.abs(parts).max(-1) / 31 if span == 16 else (parts.max(-1) + least) / most
    wanted, top = np.maximum(wanted, 1e-9), 127 if span == 16 else 63
    d, dmin = (np.float16(one.max(-1, keepdims=True) / top) for one in (wanted, least))
    scales = np.clip(np.round(wanted / np.maximum(d.astype(float), 1e-9)), 1, top).astype(int)
    leasts = np.round(least / np.maximum(dmin.astype(float), 1e-9)).astype(int)
    step = np.repeat(np.maximum(d.astype(float), 1e-9) * scales, span, axis=1)
    codes = (x + np.repeat(dmin.astype(float) * leasts, span, axis=1)) / step
    codes = np.clip(np.round(codes) + (32 if span == 16 else 0), 0, most).astype(int)
    blocks = pack_large(dtype, codes, d, scales, dmin, np.minimum(leasts, 63))
    return blocks.reshape(*w.shape[:-1], -1)


def make(rng, rows, cols, dtype) -> Frozen:
    """A weight in one of engine.PACKED's types. int8 and int4 are loaded from their numbers, which
    have a largest code in each block, so that the engine finds the same scale; the others from
    their blocks, whose columns are filled up."""
    if dtype.endswith("_k"):
        return make_large(rng, rows, cols, dtype)
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
    if dtype == "fp8":
        codes = rng.choice(np.flatnonzero(np.isfinite(LEVELS["fp8"])), shape).astype(np.uint8)
    if dtype in ("fp8", "nf4"):  # rounded once, as in float32
        scale = np.float32(rng.uniform(-0.3, 0.3, (rows, across, 1)))
        value = np.float32(LEVELS[dtype][codes] * scale.astype(float)).astype(float)
        head = scale.view(np.uint8)
    elif dtype.startswith("mxfp4"):
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
    if dtype in ("mxfp4_pairs", "nf4"):
        first, second = codes[..., ::2], codes[..., 1::2]
    if dtype == "fp8":
        first, second = codes, np.uint8(0)
    blocks = np.concatenate([head, first | second << 4], -1).reshape(rows, -1)
    return Frozen(value.reshape(rows, cols), dtype, blocks)
