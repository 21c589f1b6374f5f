"""Arrays on the wire: protobuf's tensors as NumPy arrays, checked, and arrays as bytes.

Large arrays are zero-copy, both read and sent: see chunking.py.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.server.wire.chunking import LARGE, Buffer, Lifted
from tinsmith.server.wire.messages import pb

DTYPES = {
    pb.DTYPE_FLOAT32: ("float32", np.dtype("<f4")),
    pb.DTYPE_INT64: ("int64", np.dtype("<i8")),
    pb.DTYPE_INT32: ("int32", np.dtype("<i4")),
    pb.DTYPE_BFLOAT16: ("bfloat16", np.dtype("<u2")),
}
TOGETHER = 1024  # arrays that NumPy concatenates in one call
AXES_MAX = 8
IGNORED = -100  # the id by which Hugging Face masks a target
DENSE_BYTES_MAX = 1 << 29  # for a request's sparse arrays, made dense


# ---- read ----


def check_ids(ids: NDArray[Any], vocab: int, where: str) -> None:
    """Raises ValueError with the first id that is not in [0, vocab)."""
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(bad):
        value = int(ids.ravel()[bad[0]])
        hint = "; to mask a position, give it any id and the weight 0" if value == IGNORED else ""
        raise ValueError(f"{where} has id {value}; ids must be from 0 to {vocab - 1}{hint}")


def elements(data: Buffer, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Bytes as an array."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where}: {len(data)} bytes are no whole number of {dtype} elements")
    return np.frombuffer(data, dtype)


def array_of(tensor: pb.Tensor, lifted: Lifted, where: str) -> NDArray[Any]:
    """A dense array, from either encoding."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{where}: unknown dtype {tensor.dtype}")
    label, dtype = DTYPES[tensor.dtype]
    if len(tensor.shape) > AXES_MAX:
        raise ValueError(f"{where} has {len(tensor.shape)} axes; at most {AXES_MAX} are read")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"{where}: shape {shape} has a negative size")
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        values = _widened(elements(lifted.get(csr.values), dtype, where), label)
        return _dense(csr, values, shape, lifted, where)
    values = _widened(elements(lifted.get(tensor.dense), dtype, where), label)
    shape = shape or values.shape
    if math.prod(shape) != values.size:
        raise ValueError(f"{where}: shape {shape} does not fit {values.size} elements")
    if math.prod(filter(None, shape)) >= 1 << 62:  # even if it is empty
        raise ValueError(f"{where}: shape {shape} is too large")
    return values.reshape(shape)


def _widened(values: NDArray[Any], label: str) -> NDArray[Any]:
    """bfloat16 bits as float32; any other array unchanged."""
    if label != "bfloat16":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def _dense(
    csr: Any, values: NDArray[Any], shape: tuple[int, ...], lifted: Lifted, where: str
) -> NDArray[Any]:
    """Compressed sparse rows as a dense array; entries that are not listed are 0."""
    crow = elements(lifted.get(csr.crow_indices), np.dtype("<i8"), where)
    cols = elements(lifted.get(csr.col_indices), np.dtype("<i8"), where)
    check_csr(crow, cols, len(values), shape, where)
    lifted.dense_bytes += math.prod(shape) * values.itemsize
    if lifted.dense_bytes > DENSE_BYTES_MAX:
        raise ValueError(
            f"{where}: with its sparse rows of shape {shape} the call's arrays would have "
            f"{lifted.dense_bytes} bytes when dense, at most {DENSE_BYTES_MAX} are made; send its "
            "datums in several calls"
        )
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), cols] = values
    return dense


def check_csr(
    crow: NDArray[Any], cols: NDArray[Any], values: int, shape: tuple[int, ...], where: str
) -> None:
    """Raises ValueError unless `values` compressed sparse rows fit an array of a shape."""
    fits = (
        len(shape) == 2
        and math.prod(shape) < 1 << 31
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == values == len(cols)
        and bool(np.all(np.diff(crow) >= 0))
        and bool(np.all((cols >= 0) & (cols < shape[1])))
    )
    if not fits:
        raise ValueError(f"{where}: its sparse rows do not make up an array of shape {shape}")


class Column:
    """Flat arrays of one type, concatenated. They are concatenated as they arrive, some at a time,
    and then freed: all at once would take long."""

    def __init__(self, dtype: type[np.generic]):
        self.last: NDArray[Any] = np.empty(0, dtype)
        self._joined = [self.last]
        self._new: list[NDArray[Any]] = []

    def add(self, array: NDArray[Any]) -> None:
        """Adds the next array."""
        self.last = array
        self._new.append(array)
        if len(self._new) == TOGETHER:
            self._join()

    def whole(self) -> NDArray[Any]:
        """All of them, concatenated."""
        self._join()
        return np.concatenate(self._joined)

    def _join(self) -> None:
        empty = self._joined[0]
        self._joined.append(np.concatenate([empty, *self._new], dtype=empty.dtype))
        self._new.clear()


# ---- written ----


def buffer_of(array: NDArray[Any], dtype: str) -> memoryview:
    """An array's elements in the wire's format."""
    return np.ascontiguousarray(array, np.dtype(dtype)).reshape(-1).view(np.uint8).data


def field_of(arrays: Iterable[NDArray[Any]], dtype: str, lifted: Lifted) -> bytes:
    """The bytes of a field for consecutive arrays: their elements, or their name in `lifted`."""
    parts, small, size = list[Buffer](), list[Buffer](), 0
    for array in arrays:
        buffer = buffer_of(array, dtype)
        if len(buffer) >= LARGE:
            parts += [b"".join(small), buffer]
            small, size = [], 0
            continue
        small.append(buffer)
        size += len(buffer)
        if size >= LARGE:
            parts.append(b"".join(small))
            small, size = [], 0
    parts.append(b"".join(small))
    return lifted.put(*parts) if len(parts) > 1 else parts[0]
