"""Arrays in and out of Python: NumPy's, and those of any library that supports DLPack.

Input is zero-copy if it is in this machine's memory, contiguous, and of the engine's element type.
Output has the input's kind and device: a tensor of torch (CPU or CUDA), CuPy or JAX for such a
tensor, a NumPy array for NumPy's and for lists. This module imports no such library: a caller that
passes its tensor has already imported it.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinsmith import _core

CPU = 1  # kDLCPU
HOST = (CPU, 3, 11, 13)  # memory that the CPU can read: also pinned (CUDA, ROCm) and managed (CUDA)
INT32 = np.iinfo(np.int32)


class Tensor(Protocol):
    """An array of NumPy, torch, CuPy, JAX: what DLPack can read."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


Array: TypeAlias = Tensor | NDArray[Any]  # of bools too, which numpy does not type as a Tensor


def split(flat: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Flat numbers split into arrays of these shapes, zero-copy."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def to_ids(x: Any, name: str) -> NDArray[np.int32]:
    """Token ids as C-contiguous int32 of x's shape.

    TypeError if x is no array or has no integers, IndexError for ids beyond int32. The engine
    checks that the model has the ids.
    """
    array = _borrow(x, name, "integers")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, {array.dtype} came")
    if array.dtype != np.int32 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < INT32.min or high > INT32.max:
            bad = high if high > INT32.max else low
            raise IndexError(f"{name} has id {bad}, which no model has")
    return np.ascontiguousarray(array, np.int32)


def to_floats(x: Any, name: str) -> NDArray[np.float32]:
    """Numbers as C-contiguous float32 of x's shape; float64 is rounded, integers and bools pass.

    TypeError if x is no array or has no real numbers. The engine checks that all are finite.
    """
    array = _borrow(x, name, "numbers")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be real numbers, {array.dtype} came")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float32)


def like(x: Any, array: NDArray[Any]) -> Any:
    """`array` in x's kind of array and on its device, zero-copy on the CPU."""
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
        return array
    namespace = _namespace(x)
    if x.__dlpack_device__()[0] == CPU:
        return namespace.asarray(array)
    try:
        return namespace.asarray(array, device=x.device)
    except TypeError:  # CuPy's asarray uses the current device
        return namespace.asarray(array)


def device_of(x: Any, name: str) -> tuple[int, int]:
    """The device of an array with __dlpack__, as DLPack's (type, number)."""
    place = x.__dlpack_device__()
    try:
        kind, number = map(operator.index, place) if isinstance(place, tuple) else ()
        if max(abs(kind), abs(number)) <= INT32.max:
            return kind, number
    except (TypeError, ValueError):
        pass
    raise TypeError(f"__dlpack_device__ of {name} must give a pair of whole numbers")


class _Checked:
    """A DLPack producer for NumPy. NumPy trusts a capsule, so the engine checks it first."""

    def __init__(self, x: Any, name: str):
        self._x, self._name, self._device = x, name, device_of(x, name)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._x.__dlpack__(**options)
        _core.dlpack_check(capsule, self._name, self._device[0])
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def fetched(x: Any) -> Any:
    """A copy in host memory; each library has its own name for that."""
    for word in ("cpu", "get"):  # torch's, CuPy's
        if hasattr(x, word):
            return getattr(x, word)()
    return np.asarray(x)  # JAX's


def to_integer(x: Any, name: str) -> int:
    """An integer, or a tensor of one; TypeError names it. A bool is refused."""
    try:
        if not isinstance(x, bool):
            return operator.index(x)
    except (TypeError, RuntimeError):
        pass
    raise TypeError(f"{name} must be an integer, {_short(x)} came")


def to_number(x: Any, name: str) -> float:
    """A real number, or a tensor of one; TypeError names it. A bool is refused."""
    try:
        if not isinstance(x, bool | str | bytes):
            return float(x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise TypeError(f"{name} must be a number, {_short(x)} came")


def is_batch(x: Any) -> bool:
    """Whether x is a list of sequences, not one sequence."""
    return isinstance(x, list | tuple) and len(x) > 0 and _dimensions(x[0]) > 0


def _dimensions(x: Any) -> int:
    if hasattr(x, "ndim"):
        return int(x.ndim)
    return 1 if isinstance(x, Sequence) else 0


def _borrow(x: Any, name: str, what: str) -> NDArray[Any]:
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__dlpack__"):
        return from_dlpack(x, name)
    if isinstance(x, list | tuple | range):
        return _from_list(x, name, what)
    raise TypeError(f"{name} must be an array, a tensor or a list of {what}, {_kind(x)} came")


def _from_list(x: ArrayLike, name: str, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(x)
    except (ValueError, OverflowError):
        array = np.asarray(None)
    if array.dtype.kind == "O":
        raise TypeError(f"{name} must be a list of {what} of one shape, {_short(x)} came")
    return array


def from_dlpack(x: Any, name: str) -> NDArray[Any]:
    """A view of a tensor's memory. A tensor on another device is copied to the host."""
    if getattr(x, "requires_grad", False):
        raise ValueError(
            f"{name} requires a gradient, but none flows through tinsmith: pass {name}.detach()"
        )
    try:
        if device_of(x, name)[0] not in HOST:
            x = fetched(x)
        return x if isinstance(x, np.ndarray) else np.from_dlpack(_Checked(x, name))
    except (BufferError, RuntimeError, TypeError) as error:
        found = getattr(x, "dtype", None)
        raise TypeError(
            f"{name} can't be read as a NumPy array: a {_kind(x)} of {found} ({error})"
        ) from None


def _namespace(x: Any) -> Any:
    """The module of x's library, for `asarray`."""
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    for kind in type(x).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        if hasattr(module, "asarray"):
            return module
    raise TypeError(f"no library of {_kind(x)} with an asarray function is loaded")


def _kind(x: Any) -> str:
    return type(x).__name__


def _short(x: Any) -> str:
    try:
        text = repr(x)
    except ValueError:  # Python refuses to print an integer of some thousand digits
        text = f"a very long {_kind(x)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
