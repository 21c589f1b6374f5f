"""Arrays in and out of the core: checks a caller's array, and returns results of its own kind."""

import sys
from typing import Any, NamedTuple

import numpy as np

from tinsmith import _core
from tinsmith.ops import tensors

CPU, CUDA = (1, 0), 2  # DLPack's device types; CUDA also has a device number


class Loan:
    """Exports a result of the core to another library's from_dlpack; uint16 becomes bf16 there."""

    def __init__(self, array: Any, shape: tuple[int, ...]):
        self.array, self.shape = array, shape

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The stream does not matter: the work on the array is finished."""
        place = self.__dlpack_device__()
        if stream == 0 and place[0] == CUDA:
            raise ValueError("stream 0 may be either of CUDA's default streams: pass 1 or 2")
        if copy or (dl_device is not None and tuple(dl_device) != place):
            raise BufferError(f"lent as it is and where it lies, on DLPack's device {place}")
        versioned = max_version is not None and max_version[0] >= 1
        return _core.dlpack_lend(self.array, True, versioned, self.shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU if isinstance(self.array, np.ndarray) else (CUDA, _core.array_device(self.array))


def place_of(x: Any, name: str = "the array") -> tuple[int, int]:
    """The device of an array; memory that the CPU can read counts as the CPU's."""
    if x is None:
        raise TypeError(f"{name} must be a NumPy array or have __dlpack__, not None")
    place = tensors.device_of(x, name) if hasattr(x, "__dlpack_device__") else CPU
    return CPU if place[0] in tensors.HOST else place


def result_like(like: Any, array: Any, shape: tuple[int, ...]) -> Any:
    """A result of the core in this shape and in `like`'s kind of array, zero-copy if its library
    supports that."""
    if isinstance(array, np.ndarray):
        array = array.reshape(shape)
        if isinstance(like, np.ndarray):
            return array
    package = type(like).__module__.partition(".")[0]
    library = sys.modules.get({"jaxlib": "jax.numpy"}.get(package, package))
    convert = getattr(library, "from_dlpack", None)
    if convert:
        return convert(Loan(array, shape))
    if isinstance(array, np.ndarray):
        return array
    raise TypeError(f"{package} has no from_dlpack, which is to take results on a GPU")


def scalar_like(like: Any, value: float) -> Any:
    """A sum: a float for NumPy, a 0-dimensional array for the others."""
    if isinstance(like, np.ndarray):
        return value
    array = np.array(value, np.float32)
    return result_like(like, array, ()) if place_of(like) == CPU else tensors.like(like, array)


def shape_of_rows(x: Any, name: str) -> tuple[int, ...]:
    """The shape of rows, which must have at least one dimension."""
    if not hasattr(x, "__dlpack__"):
        kind = type(x).__name__
        raise TypeError(f"{name} must be a NumPy array or have __dlpack__, not {kind}")
    shape = tuple(x.shape)
    if not shape:
        raise ValueError(f"{name} must have at least one dimension: (…, V) or (…, D)")
    return shape


def rows_name(weight: Any) -> str:
    """The name of rows in errors, with or without the head's weight."""
    return "logits" if weight is None else "hidden"


def on_host(x: Any, name: str, dtype: type, rows: Any) -> np.ndarray:
    """A small array (ids, labels, weights) as NumPy's, fetched and converted if necessary."""
    place = place_of(x, name)
    if place not in (CPU, place_of(rows)):
        other = "" if place_of(rows) == CPU else ", nor where the rows are"
        raise ValueError(f"{name} is not in the memory of the CPU{other}")
    x = x if place == CPU else tensors.fetched(x)
    array = np.asarray(x if isinstance(x, np.ndarray | list) else tensors.from_dlpack(x, name))
    whole = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    if np.issubdtype(dtype, np.integer) and not whole:
        raise TypeError(f"{name} must be whole numbers, not {array.dtype}")
    if np.issubdtype(dtype, np.floating) and not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be floating-point numbers, not {array.dtype}")
    return np.asarray(array, dtype, order="C")


class RowIds(NamedTuple):
    """Ids of rows (…,) or (…, K)."""

    flat: np.ndarray
    shape: tuple[int, ...]
    K: int


def floats_near(x: Any, name: str, rows: Any) -> Any:
    """Numbers for the core: zero-copy if they are on the rows' device, otherwise as NumPy's."""
    there = place_of(x, name) != CPU and place_of(x) == place_of(rows)
    return x if there else on_host(x, name, np.float32, rows)


def row_ids(ids: Any, lead: tuple[int, ...], rows: Any, name: str = "ids") -> RowIds:
    """Ids for the core, one or K for each row."""
    array = on_host(ids, name, np.int64, rows)
    if array.shape[: len(lead)] != lead or array.ndim - len(lead) not in (0, 1):
        raise ValueError(f"{name} must be {lead} or {(*lead, 'K')}, not {array.shape}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise IndexError(f"{name} has an id that no vocabulary has: {array.max()}")
    K = array.shape[-1] if array.ndim > len(lead) else 1
    return RowIds(np.ascontiguousarray(array, np.int32).ravel(), array.shape, K)


def gradient_like(like: Any, array: Any) -> Any:
    """A gradient of the core, in its input's type, with its shape and kind of array."""
    return None if array is None else result_like(like, array, tuple(like.shape))
