"""NF4: matrices of a folder from bitsandbytes, in 4 bits per number.

A matrix `x` is stored as bytes of two codes each, the first in the upper half, in the order of its
numbers. `x.quant_state.bitsandbytes__nf4` is JSON with its shape, and the size of the blocks that
share a scale. A code is one of 16 levels, which `x.quant_map` repeats. The scales are `x.absmax`:
in float32, or quantised again to 8 bits (double quantisation), as the levels `x.nested_quant_map`
times `x.nested_absmax`, one for each block of scales, plus an offset.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.formats import safetensors_io
from tinsmith.formats.quantized_tensors import BLOCK, SCALE_BYTES, Bytes, Folder, Stored

METHOD = "bitsandbytes"  # its name in config.json
TYPE, KIND = "NF4", "nf4"
STATE = ".quant_state.bitsandbytes__nf4"
SCALES, LEVELS, OUTER, OUTER_LEVELS = (
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
)  # fmt: skip
STATE_MOST = 1 << 16  # bytes

# The 16 levels from bitsandbytes (csrc/device/levels.h has them too).
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


@dataclass(frozen=True)
class Nf4(Stored):
    """A matrix of codes: `sources` are the codes, their scales, and the scales' own scales if they
    are quantised too."""

    span: int  # numbers that share a scale
    outer: int  # scales that share one; 0: scales are float32
    offset: float

    def numbers(self, read: Bytes, matrix: int | None) -> NDArray[np.float32]:
        """In float32, rounded once."""
        count = self.entry.shape[0] * self.entry.shape[1]
        codes = read(self.sources[0])
        pairs = np.stack([codes >> 4, codes & 15], -1).reshape(-1)[:count]
        scales = np.repeat(self.scales(read), min(self.span, count))[:count]
        return (NF4[pairs] * scales).reshape(self.entry.shape)

    def blocks(self, read: Bytes, matrix: int | None) -> tuple[np.ndarray, str]:
        (rows, cols), codes = self.entry.shape, read(self.sources[0])
        found = np.empty((rows, cols // BLOCK, SCALE_BYTES + BLOCK // 2), np.uint8)
        scales = np.repeat(self.scales(read), self.span // BLOCK).view(np.uint8)
        found[..., :SCALE_BYTES] = scales.reshape(rows, cols // BLOCK, SCALE_BYTES)
        found[..., SCALE_BYTES:] = (codes >> 4 | codes << 4).reshape(rows, -1, BLOCK // 2)
        return found.reshape(rows, -1), KIND

    def scales(self, read: Bytes) -> NDArray[np.float32]:
        """The scales of all blocks, in float32."""
        scales = read(self.sources[1])
        if not self.outer:
            return scales.view(np.float32)
        outer, levels = (read(entry).view(np.float32) for entry in self.sources[2:])
        each = np.repeat(outer, min(self.outer, len(scales)))[: len(scales)]
        return levels[scales] * each + np.float32(self.offset)


def find(folder: Folder, said: dict[str, Any]) -> None:
    """Combines each matrix of codes with its other parts."""
    for name in [name.removesuffix(STATE) for name in folder if name.endswith(STATE)]:
        state = _state(folder, name)
        (rows, cols), span, outer = state["shape"], state["blocksize"], state["nested_blocksize"]
        codes = folder.take(name, "U8", of=name)
        scales = folder.take(name + SCALES, "U8" if outer else "F32", of=name)
        levels = folder.take(name + LEVELS, "F32", of=name)
        if not np.array_equal(folder.bytes(levels).view(np.float32), NF4):
            raise ValueError(f"{levels.file}: {name}{LEVELS} should have NF4's 16 levels")
        blocks = -(-rows * cols // span)
        sized = [(codes, -(-rows * cols // 2), name), (scales, blocks, name + SCALES)]
        parts = [codes, scales]
        if outer:
            for end, count in ((OUTER, -(-blocks // outer)), (OUTER_LEVELS, 256)):
                parts.append(folder.take(name + end, "F32", of=name))
                sized.append((parts[-1], count, name + end))
        for entry, count, what in sized:
            found = math.prod(entry.shape)
            if found != count:
                raise ValueError(
                    f"{entry.file}: {what} has {found} numbers; it should have {count}"
                )
        fits = cols % span == 0 and span % BLOCK == 0
        shown = safetensors_io.Entry(codes.file, TYPE, (rows, cols), codes.begin, codes.end)
        kind = KIND if fits else None
        folder.put(name, Nf4(shown, tuple(parts), kind, span, outer, state["nested_offset"]))


def _state(folder: Folder, name: str) -> dict[str, Any]:
    """The needed part of a matrix's JSON."""
    entry = folder.take(name + STATE, "U8", of=name)
    what = f"{entry.file}: {name}{STATE}"
    try:
        said = json.loads(
            folder.bytes(entry)[:STATE_MOST].tobytes(),
            object_pairs_hook=safetensors_io.unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(said, dict) or said.get("quant_type") != KIND:
        raise ValueError(f"{what} should be of the quant_type {KIND}")
    shape, nested = said.get("shape"), "nested_blocksize" in said
    counts = [*(shape if isinstance(shape, list) else []), said.get("blocksize")]
    counts += [said.get("nested_blocksize")] if nested else []
    if len(counts) != 3 + nested or not all(
        type(one) is int and 0 < one < 1 << 31 for one in counts
    ):
        raise ValueError(f"{what} should have a shape of two numbers, and sizes of blocks")
    offset = said.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or not abs(offset) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{what} has the nested_offset {offset!r:.40}")
    return {
        "shape": tuple(counts[:2]),
        "blocksize": counts[2],
        "nested_blocksize": counts[3] if nested else 0,
        "nested_offset": float(offset),
    }
