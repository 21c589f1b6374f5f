"""MXFP4: matrices of a safetensors folder in 4 bits a number, with one scale for each 32.

A tensor `x` of several matrices is there as two of bytes: `x_blocks` (matrices, rows, cols/32, 16),
two numbers a byte, the first in the lower half; and `x_scales` (matrices, rows, cols/32), powers of
two from 2^-127 on. A number is E2M1: a sign, two bits of exponent, and one more. bfloat16 has each
of them exactly, as transformers widens them; what exceeds it is infinite, and refused by who reads.
Rows are outputs, so a matrix is what transformers computes with, turned.

`packed` gives the bytes of one matrix, `part` its numbers, from a table of all bytes and scales.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith.files import config, weights

METHOD = "mxfp4"  # config.json's name of it
TYPE = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK, BLOCK_BYTES = 32, 16
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same, negative
BIAS = 127  # of a scale's exponent
ROWS = 64  # that are widened at a time, so that what is between stays in the cache

Packed = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # (rows, cols/32, 16) and (rows, cols/32)


class Mxfp4Tensors(weights.Tensors):
    """The tensors of a folder, those of blocks and scales as one of numbers, turned."""

    def __init__(self, folder: weights.Tensors) -> None:
        super().__init__([])
        self._maps = folder._maps
        self._entries = dict(folder._entries)
        self._pairs: dict[str, tuple[weights.Entry, weights.Entry]] = {}
        for name in _stems(folder):
            blocks, scales = (self._take(folder, name, end) for end in (BLOCKS, SCALES))
            if blocks.shape != (*scales.shape, BLOCK_BYTES) or len(scales.shape) != 3:
                raise ValueError(
                    f"{blocks.file}: {name}{BLOCKS} is {blocks.shape}, and {name}{SCALES} is "
                    f"{scales.shape}; they should be (matrices, rows, blocks, {BLOCK_BYTES}) and "
                    "(matrices, rows, blocks)"
                )
            if name in folder:
                raise ValueError(f"{blocks.file}: {name} is there beside {name}{BLOCKS}")
            count, rows, cols = scales.shape[0], scales.shape[1], scales.shape[2] * BLOCK
            self._pairs[name] = blocks, scales
            self._entries[name] = weights.Entry(
                blocks.file, TYPE, (count, cols, rows), blocks.begin, blocks.end
            )

    def _take(self, folder: weights.Tensors, name: str, end: str) -> weights.Entry:
        """One of a pair, which is no tensor of its own any more."""
        entry = self._entries.pop(name + end, None)
        if entry is None:
            raise ValueError(f"the files have no {name + end}, which belongs to {name}")
        if entry.dtype != "U8":
            raise ValueError(f"{entry.file}: {name + end} is {entry.dtype}; it should be U8")
        return entry

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._pairs:
            return super().__getitem__(name)
        return np.stack([self.part(name, matrix) for matrix in range(self.entry(name).shape[0])])

    def sources(self, name: str) -> tuple[weights.Entry, ...]:
        """Blocks and scales."""
        return self._pairs.get(name) or super().sources(name)

    def part(self, name: str, matrix: int | None) -> np.ndarray:
        """One matrix in bfloat16's bits, turned: (cols, rows)."""
        if name not in self._pairs or matrix is None:
            return super().part(name, matrix)
        return unpack(*self.packed(name, matrix)).T

    def stored(self, name: str) -> str | None:
        return METHOD if name in self._pairs else super().stored(name)

    def blocks(self, name: str, matrix: int | None) -> tuple[np.ndarray, str]:
        assert matrix is not None, "all of a layer's experts are in one tensor"
        blocks, scales = self.packed(name, matrix)
        both = np.concatenate([scales[..., None], blocks], -1)
        return both.reshape(len(both), -1), "mxfp4_pairs"

    def packed(self, name: str, matrix: int) -> Packed:
        """The bytes of one matrix as they lie in the file: blocks and scales, row by row."""
        blocks, scales = (self._bytes(entry)[matrix] for entry in self._pairs[name])
        return blocks, scales

    def _bytes(self, entry: weights.Entry) -> NDArray[np.uint8]:
        bits = np.frombuffer(self._maps[entry.file], np.uint8, entry.size, entry.begin)
        return bits.reshape(entry.shape)


def _stems(names: Iterable[str]) -> list[str]:
    """The names of what is there as blocks or scales."""
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
    """The two numbers of a byte, the first one's bits below, at 256·scale + byte."""
    codes = np.array([sign * code for sign in (1, -1) for code in CODES])
    with np.errstate(over="ignore"):
        numbers = np.ldexp(codes, np.arange(256)[:, None] - BIAS).astype(np.float32)
    bits = weights.narrow(numbers, np.dtype(np.uint16)).astype(np.uint32)
    byte = np.arange(256)
    return (bits[:, byte >> 4] << 16 | bits[:, byte & 15]).ravel()


def open_folder(path: Path | str) -> weights.Tensors:
    """The tensors of a model's folder, whose config.json says whether some are in MXFP4."""
    tensors = weights.open_folder(path)
    file = Path(path) / config.CONFIG_FILE
    said = config.read_json(file).get(config.QUANTIZATION) if file.is_file() else None
    quantized = isinstance(said, dict) and said.get(config.METHOD) == METHOD
    return Mxfp4Tensors(tensors) if quantized else tensors
