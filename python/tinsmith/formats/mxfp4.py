"""MXFP4: matrices of a safetensors folder in 4 bits per number, with one scale for each 32.

A tensor `x` of several matrices is stored as two of bytes: `x_blocks` (matrices, rows, cols/32,
16), two numbers a byte, the first in the lower half; and `x_scales` (matrices, rows, cols/32),
powers of two from 2^-127 on. A number is E2M1: a sign, two bits of exponent, one of mantissa.
bfloat16 represents each exactly, as in transformers; larger ones become infinite, and the reader
refuses them. Rows are outputs, so a matrix is the transpose of transformers'.

Numbers are looked up in a table of all bytes and scales.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.formats import safetensors_io
from tinsmith.formats.quantized_tensors import Bytes, Folder, Stored

METHOD = "mxfp4"  # its name in config.json
TYPE = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK, BLOCK_BYTES = 32, 16
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same, negative
BIAS = 127  # of a scale's exponent
ROWS = 64  # that are widened at a time, so that intermediates stay in the cache

Packed = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # (rows, cols/32, 16) and (rows, cols/32)


class Mxfp4(Stored):
    """Matrices of blocks and scales, transposed."""

    def numbers(self, read: Bytes, matrix: int | None) -> np.ndarray:
        """In bfloat16's bits: (cols, rows)."""
        return unpack(*self.packed(read, matrix)).T

    def blocks(self, read: Bytes, matrix: int | None) -> tuple[np.ndarray, str]:
        blocks, scales = self.packed(read, matrix)
        both = np.concatenate([scales[..., None], blocks], -1)
        return both.reshape(len(both), -1), "mxfp4_pairs"

    def packed(self, read: Bytes, matrix: int | None) -> Packed:
        """The bytes of one matrix as in the file: blocks and scales, row by row."""
        assert matrix is not None, "all of a layer's experts are in one tensor"
        blocks, scales = (read(entry).reshape(entry.shape)[matrix] for entry in self.sources)
        return blocks, scales


def find(folder: Folder, said: dict[str, Any]) -> None:
    """Combines a folder's tensors of blocks and scales."""
    for name in _stems(folder):
        blocks, scales = (folder.take(name + end, "U8", of=name) for end in (BLOCKS, SCALES))
        if blocks.shape != (*scales.shape, BLOCK_BYTES) or len(scales.shape) != 3:
            raise ValueError(
                f"{blocks.file}: {name}{BLOCKS} is {blocks.shape}, and {name}{SCALES} is "
                f"{scales.shape}; they should be (matrices, rows, blocks, {BLOCK_BYTES}) and "
                "(matrices, rows, blocks)"
            )
        count, rows, cols = scales.shape[0], scales.shape[1], scales.shape[2] * BLOCK
        shown = safetensors_io.Entry(
            blocks.file, TYPE, (count, cols, rows), blocks.begin, blocks.end
        )
        folder.put(name, Mxfp4(shown, (blocks, scales), METHOD))


def _stems(names: Iterable[str]) -> list[str]:
    """The names of tensors that are stored as blocks or scales."""
    ends = (name.removesuffix(BLOCKS).removesuffix(SCALES) for name in names)
    return sorted({stem for stem, name in zip(ends, names, strict=True) if stem != name})


def unpack(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """(rows, n, 16) blocks with (rows, n) scales as bfloat16's bits (rows, 32·n)."""
    table, pairs = _table(), np.empty(blocks.shape, np.uint32)
    for row in range(0, len(blocks), ROWS):
        rows = slice(row, row + ROWS)
        places = scales[rows, :, None].astype(np.intp) << 8 | blocks[rows]
        np.take(table, places, out=pairs[rows], mode="clip")
    return pairs.view(np.uint16).reshape(len(blocks), BLOCK * scales.shape[1])


@functools.cache
def _table() -> NDArray[np.uint32]:
    """The two numbers of a byte, the first in the lower bits, at index 256·scale + byte."""
    codes = np.array([sign * code for sign in (1, -1) for code in CODES])
    with np.errstate(over="ignore"):
        numbers = np.ldexp(codes, np.arange(256)[:, None] - BIAS).astype(np.float32)
    bits = safetensors_io.narrow(numbers, np.dtype(np.uint16)).astype(np.uint32)
    byte = np.arange(256)
    return (bits[:, byte >> 4] << 16 | bits[:, byte & 15]).ravel()
