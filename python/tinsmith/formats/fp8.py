"""FP8: matrices of a safetensors folder in 8 bits per number, with a scale for each block.

Beside a matrix `x` of E4M3 (a sign, four bits of exponent, three of mantissa) is `x_scale_inv`, its
factors: one for each block of weight_block_size rows and columns, or a single one if that is null.
This is the format of Qwen3's and DeepSeek's published FP8 folders. The hosted service rounds a
layer's inputs to FP8 too; here they are not rounded.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.formats import config, safetensors_io
from tinsmith.formats.quantized_tensors import BLOCK, SCALE_BYTES, Bytes, Folder, Stored

METHOD = "fp8"  # its name in config.json
TYPE, KIND = "FP8", "fp8"
CODES, SCALES = "F8_E4M3", "_scale_inv"
SIZE = "weight_block_size"
ROWS = 64  # that are dequantised at a time


@dataclass(frozen=True)
class Fp8(Stored):
    """A matrix of codes with its scales."""

    size: tuple[int, int]  # rows and columns of a block

    def numbers(self, read: Bytes, matrix: int | None) -> NDArray[np.float32]:
        """In float32, rounded once."""
        codes, scales, table = self._codes(read), self._scales(read), numbers_of_codes()
        found, (tall, wide) = np.empty(codes.shape, np.float32), self.size
        for row in range(0, len(codes), ROWS):
            rows = slice(row, min(row + ROWS, len(codes)))
            each = scales[np.arange(rows.start, rows.stop) // tall]
            found[rows] = table[codes[rows]]
            with np.errstate(over="ignore"):  # infinite results are refused by name later
                found[rows] *= np.repeat(each, wide, axis=1)[:, : codes.shape[1]]
        return found

    def blocks(self, read: Bytes, matrix: int | None) -> tuple[np.ndarray, str]:
        codes, scales = self._codes(read), self._scales(read)
        rows, across = len(codes), codes.shape[1] // BLOCK
        found = np.empty((rows, across, SCALE_BYTES + BLOCK), np.uint8)
        each = np.repeat(scales, self.size[1] // BLOCK, axis=1)[:, :across]
        heads = np.ascontiguousarray(each).view(np.uint8).reshape(len(each), across, SCALE_BYTES)
        found[..., :SCALE_BYTES] = heads[np.arange(rows) // self.size[0]]
        found[..., SCALE_BYTES:] = codes.reshape(rows, across, BLOCK)
        return found.reshape(rows, -1), KIND

    def _codes(self, read: Bytes) -> NDArray[np.uint8]:
        return read(self.sources[0]).reshape(self.entry.shape)

    def _scales(self, read: Bytes) -> NDArray[np.float32]:
        """In float32, one row for each block of rows."""
        scales = self.sources[1]
        array = safetensors_io.widen(read(scales).view(safetensors_io.READ[scales.dtype]))
        return array.reshape(-(-self.entry.shape[0] // self.size[0]), -1)


def find(folder: Folder, said: dict[str, Any]) -> None:
    """Combines each matrix of codes with its scales."""
    _check(said.get(SIZE))
    for name in [name for name in folder if folder.entry(name).dtype == CODES]:
        codes = folder.take(name, CODES, of=name)
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise ValueError(
                f"{codes.file}: {name} is {CODES} of shape {codes.shape}; it should be a matrix"
            )
        scales = folder.take(name + SCALES, "F32", "BF16", of=name)
        size = said[SIZE] if said.get(SIZE) else codes.shape
        wanted = tuple(-(-a // b) for a, b in zip(codes.shape, size, strict=True))
        one = wanted == (1, 1)
        if scales.shape != wanted and not (one and scales.shape in ((), (1,))):
            raise ValueError(
                f"{scales.file}: {name}{SCALES} is {scales.shape}; it should be {wanted}, a number "
                f"for each block of {size[0]} by {size[1]}"
            )
        fits = codes.shape[1] % BLOCK == 0 and (one or size[1] % BLOCK == 0)
        shown = safetensors_io.Entry(codes.file, TYPE, codes.shape, codes.begin, codes.end)
        # A block may be wider than the matrix: its scale is repeated for real columns only.
        across = -(-codes.shape[1] // BLOCK) * BLOCK
        tall, wide = size[0], codes.shape[1] if one else min(size[1], across)
        folder.put(name, Fp8(shown, (codes, scales), KIND if fits else None, (tall, wide)))


def _check(size: object) -> None:
    """Raises ValueError if the size of a block is invalid."""
    counts = size if isinstance(size, list) and len(size) == 2 else [0]
    if size is not None and not all(type(one) is int and one > 0 for one in counts):
        raise ValueError(
            f"{config.CONFIG_FILE}: {config.QUANTIZATION} has {SIZE} {size!r:.60}; it should be "
            "two positive integers, or null"
        )


@functools.cache
def numbers_of_codes() -> NDArray[np.float32]:
    """The numbers of all codes; the largest code is NaN."""
    code = np.arange(128)
    exponent, rest = code >> 3, code & 7
    value = np.where(exponent > 0, (8 + rest) * 2.0 ** (exponent - 10.0), rest * 2.0**-9)
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)
