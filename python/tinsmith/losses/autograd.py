"""Tensors in NumPy that remember how they were made, so that a custom loss has a gradient.

An operation is a row of one of three tables; loss_ops.py gives them torch's names and signatures:

- POINTWISE: (forward, gradient). forward takes arrays that broadcast; gradient takes g, the result
  and the arrays, and gives one gradient for each (None: it has none).
- REDUCTIONS: (forward, gradient) over the axes `axis`, which stay with size 1.
- MOVES: functions that only move elements. Called on an array of positions they say where each
  element of the result came from, so the gradient follows from that, the same way for all.

There are three types: bool, int64, and float64, in which all of torch's floats are computed. Where
a gradient is a matter of choice (ties, kinks, 0 times infinity) it is torch's. No result may have
more than NUMBERS_MAX elements, which is checked before it is made; no tensor is ever changed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Gradients = Sequence[Array | None]
Row = tuple[Callable[..., Any], Callable[..., Any] | None]

NUMBERS_MAX = 1 << 24
FLOAT, INT, BOOL = np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_)

_count = itertools.count()


class Unsupported(ValueError):
    """What torch can do and tinsmith does not: the sentence says what."""


class Tensor:
    """An array and, if its gradient is wanted, how it goes back to those it was made of."""

    def __init__(
        self,
        data: Any,
        parents: Sequence["Tensor"] = (),
        back: Callable[[Array], Gradients] | None = None,
        *,
        tracked: bool = False,
    ):
        array = np.asarray(data)
        self.data: Array = array.astype(
            {"f": FLOAT, "b": BOOL}.get(array.dtype.kind, INT), copy=False
        )
        made = back is not None and any(parent.tracked for parent in parents)
        self.tracked = tracked or (made and self.data.dtype == FLOAT)
        self.parents, self.back = (tuple(parents), back) if self.tracked else ((), None)
        self.number = next(_count)

    def __add__(self, other: Any) -> "Tensor":
        return pointwise("add", self, other)

    def __sub__(self, other: Any) -> "Tensor":
        return pointwise("sub", self, other)

    def __rsub__(self, other: Any) -> "Tensor":
        return pointwise("sub", other, self)

    def __mul__(self, other: Any) -> "Tensor":
        return pointwise("mul", self, other)

    def __truediv__(self, other: Any) -> "Tensor":
        return pointwise("div", self, other)

    def __neg__(self) -> "Tensor":
        return pointwise("neg", self)

    __radd__, __rmul__ = __add__, __mul__


class Picked(NamedTuple):
    """What max, min, sort and topk return along a dimension."""

    values: Tensor
    indices: Tensor


def gradient(of: Tensor, by: Tensor) -> Array | None:
    """d of / d by, where `of` has one element; None if it does not depend on it."""
    if not of.tracked:
        return None
    reached, todo = {of.number: of}, [of]
    while todo:
        for parent in todo.pop().parents:
            if parent.tracked and parent.number not in reached:
                reached[parent.number] = parent
                todo.append(parent)
    grads: dict[int, Array] = {of.number: np.ones_like(of.data)}
    for number in sorted(reached, reverse=True):
        tensor = reached[number]
        if tensor is by or tensor.back is None or number not in grads:
            continue
        for parent, part in zip(tensor.parents, tensor.back(grads.pop(number)), strict=True):
            if parent.tracked and part is not None:
                before = grads.get(parent.number)
                grads[parent.number] = part if before is None else before + part
    return grads.get(by.number)


# ---- arguments ----


def room(*shape: int) -> None:
    """ValueError where an array of this shape would be too large."""
    if math.prod(shape) > NUMBERS_MAX:
        raise ValueError(f"a result of shape {shape} is larger than {NUMBERS_MAX} numbers")


def tensor(value: Any) -> Tensor:
    """A tensor, or a number as one."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return Tensor(value)
    raise ValueError(f"a tensor or a number is needed, {type(value).__name__} came")


def whole(value: Any) -> int:
    """An integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Tensor) and value.data.dtype == INT and value.data.ndim == 0:
        return int(value.data)
    raise ValueError(f"an integer is needed, {type(value).__name__} came")


def wholes(values: Sequence[Any]) -> tuple[int, ...]:
    """Integers that came one by one or as a list."""
    if len(values) == 1 and isinstance(values[0], tuple | list):
        values = values[0]
    return tuple(whole(value) for value in values)


def cast(value: Any, dtype: Any) -> Tensor:
    """A tensor of another type."""
    x = tensor(value)
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"a dtype is needed, {dtype!r:.60} came")
    return x if x.data.dtype == dtype else Tensor(x.data.astype(dtype))


def axis_of(dim: Any, ndim: int) -> int:
    """A dimension, counted from the front."""
    dim, least = whole(dim), max(ndim, 1)
    if not -least <= dim < least:
        raise ValueError(f"there is no dimension {dim} in a tensor of {ndim}")
    return dim % least


def axes_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dimensions that a reduction is over."""
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return tuple(range(ndim))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return tuple(sorted({axis_of(item, ndim) for item in dims})) if ndim else ()


def unbroadcast(g: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of what was broadcast: the sum over where it went."""
    g = g.sum(tuple(range(g.ndim - len(shape))))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and g.shape[i] != 1)
    return g.sum(axes, keepdims=True) if axes else g


# ---- the three kinds ----


def pointwise(row: str | Row, *values: Any) -> Tensor:
    """One row of POINTWISE on tensors and numbers."""
    forward, back = POINTWISE[row] if isinstance(row, str) else row
    tensors = [tensor(value) for value in values]
    arrays = [item.data for item in tensors]
    room(*np.broadcast_shapes(*(array.shape for array in arrays)))
    y = forward(*arrays)

    def gradients(g: Array) -> Gradients:
        assert back is not None
        parts = back(g, y, *arrays)
        parts = parts if isinstance(parts, tuple) else (parts,)
        full = [None if part is None else np.broadcast_to(part, g.shape) for part in parts]
        shapes = [array.shape for array in arrays]
        return [
            None if part is None else unbroadcast(part, shape)
            for part, shape in zip(full, shapes, strict=True)
        ]

    return Tensor(y, tensors, gradients if back else None)


def move(f: Callable[..., Array], *tensors: Tensor) -> Tensor:
    """f(arrays), which only moves elements; the gradient gathers them where they came from."""
    if not any(item.tracked for item in tensors):
        return Tensor(f(*(item.data for item in tensors)))
    sizes = np.cumsum([0, *(item.data.size for item in tensors)])
    places = [
        np.arange(start, start + item.data.size).reshape(item.data.shape)
        for start, item in zip(sizes[:-1], tensors, strict=True)
    ]
    source = f(*places)
    room(*source.shape)
    flat = np.concatenate([item.data.ravel() for item in tensors])

    def back(g: Array) -> Gradients:
        total = np.bincount(source.ravel(), g.ravel(), minlength=int(sizes[-1]))
        parts = np.split(total, sizes[1:-1])
        return [part.reshape(item.data.shape) for part, item in zip(parts, tensors, strict=True)]

    return Tensor(flat[source], tensors, back)


def moved(name: str, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One row of MOVES."""
    return move(lambda array: MOVES[name](array, *args, **kwargs), tensor(x))


def reduce(name: str, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """One row of REDUCTIONS."""
    forward, back = REDUCTIONS[name]
    x = tensor(x) if dtype is None else cast(x, dtype)
    axis = axes_of(dim, x.data.ndim)
    if name in ("amax", "amin") and any(x.data.shape[item] == 0 for item in axis):
        raise ValueError(f"{name} of no elements")
    y = np.asarray(forward(x.data, axis))
    shape = y.shape if keepdim else tuple(n for i, n in enumerate(y.shape) if i not in axis)

    def gradients(g: Array) -> Gradients:
        assert back is not None
        return [np.broadcast_to(back(g.reshape(y.shape), y, x.data, axis), x.data.shape)]

    return Tensor(y.reshape(shape), [x], gradients if back else None)


# ---- pointwise ----


def _float(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: f(x.astype(FLOAT, copy=False))


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _pow(x: Array, p: Array) -> Array:
    if x.dtype != FLOAT and p.dtype != FLOAT and (p < 0).any():
        raise ValueError("an integer to a negative power; make one of them a float")
    return np.power(x if x.dtype != BOOL else x.astype(INT), p)


def _pow_back(g: Array, y: Array, x: Array, p: Array) -> Gradients:
    dx = np.where(p == 0, 0.0, g * p * np.power(x.astype(FLOAT), p - 1.0))
    return dx, np.where((x == 0) & (p >= 0), 0.0, g * y * np.log(x.astype(FLOAT)))


def _divisible(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def checked(a: Array, b: Array) -> Array:
        if FLOAT not in (a.dtype, b.dtype) and (b == 0).any():
            raise ValueError("an integer is divided by zero")
        return f(a, b)

    return checked


def _where(c: Array, a: Array, b: Array) -> Array:
    if c.dtype != BOOL:
        raise ValueError(f"where needs a condition of bools, {c.dtype} came")
    return np.where(c, a, b)


def _no_gradient(*functions: Callable[..., Array]) -> dict[str, Row]:
    return {function.__name__: (function, None) for function in functions}


def _step(g: Array, y: Array, x: Array) -> Array:
    return np.zeros_like(g)


def _clamp_back(g: Array, y: Array, x: Array, low: Array, high: Array) -> Gradients:
    inside = (x >= low) & (x <= high)
    below, above = (x < low) & (low < high), (x > high) | (low > high)
    return tuple(np.where(mask, g, 0.0) for mask in (inside, below, above))


POINTWISE: dict[str, Row] = {
    "add": (np.add, lambda g, y, a, b: (g, g)),
    "sub": (np.subtract, lambda g, y, a, b: (g, -g)),
    "mul": (np.multiply, lambda g, y, a, b: (g * b, g * a)),
    "div": (np.true_divide, lambda g, y, a, b: (g / b, -g * (a / b / b))),
    "floor_divide": (_divisible(np.floor_divide), None),
    "remainder": (_divisible(np.remainder), lambda g, y, a, b: (g, -g * np.floor(a / b))),
    "pow": (_pow, _pow_back),
    "maximum": (
        np.maximum,
        lambda g, y, a, b: (
            np.where(a == b, g / 2, np.where(a > b, g, 0.0)),
            np.where(a == b, g / 2, np.where(b > a, g, 0.0)),
        ),
    ),
    "minimum": (
        np.minimum,
        lambda g, y, a, b: (
            np.where(a == b, g / 2, np.where(a < b, g, 0.0)),
            np.where(a == b, g / 2, np.where(b < a, g, 0.0)),
        ),
    ),
    "logaddexp": (np.logaddexp, lambda g, y, a, b: (g * np.exp(a - y), g * np.exp(b - y))),
    "xlogy": (
        lambda a, b: np.where((a == 0) & ~np.isnan(b), 0.0, a * np.log(b)),
        lambda g, y, a, b: (np.where((a == 0) & (b <= 0), 0.0, g * np.log(b)), g * a / b),
    ),
    "where": (
        _where,
        lambda g, y, c, a, b: (None, np.where(c, g, 0.0), np.where(c, 0.0, g)),
    ),
    "clamp": (lambda x, low, high: np.minimum(np.maximum(x, low), high), _clamp_back),
    "neg": (np.negative, lambda g, y, x: -g),
    "abs": (np.abs, lambda g, y, x: g * np.sign(x)),
    "square": (np.square, lambda g, y, x: 2 * g * x),
    "exp": (_float(np.exp), lambda g, y, x: g * y),
    "exp2": (_float(np.exp2), lambda g, y, x: g * y * math.log(2)),
    "expm1": (_float(np.expm1), lambda g, y, x: g * (y + 1)),
    "log": (_float(np.log), lambda g, y, x: g / x),
    "log2": (_float(np.log2), lambda g, y, x: g / (x * math.log(2))),
    "log10": (_float(np.log10), lambda g, y, x: g / (x * math.log(10))),
    "log1p": (_float(np.log1p), lambda g, y, x: g / (1 + x)),
    "sqrt": (_float(np.sqrt), lambda g, y, x: g / (2 * y)),
    "_norm_sqrt": (np.sqrt, lambda g, y, x: np.where(y == 0, 0.0, g / (2 * y))),
    "rsqrt": (_float(lambda x: 1 / np.sqrt(x)), lambda g, y, x: -0.5 * g * y**3),
    "reciprocal": (_float(lambda x: 1 / x), lambda g, y, x: -g * y * y),
    "sin": (_float(np.sin), lambda g, y, x: g * np.cos(x)),
    "cos": (_float(np.cos), lambda g, y, x: -g * np.sin(x)),
    "atan": (_float(np.arctan), lambda g, y, x: g / (1 + x * x)),
    "tanh": (_float(np.tanh), lambda g, y, x: g * (1 - y * y)),
    "sigmoid": (_float(_sigmoid), lambda g, y, x: g * y * (1 - y)),
    "logsigmoid": (
        _float(lambda x: -np.logaddexp(0.0, -x)),
        lambda g, y, x: g * _sigmoid(-x),
    ),
    "softplus": (
        _float(lambda x: np.where(x > 20, x, np.log1p(np.exp(x)))),
        lambda g, y, x: np.where(x > 20, g, g * _sigmoid(x)),
    ),
    "relu": (lambda x: np.maximum(x, 0), lambda g, y, x: np.where(x <= 0, 0.0, g)),
    "sign": (np.sign, _step),
    "floor": (np.floor, _step),
    "ceil": (np.ceil, _step),
    "round": (np.rint, _step),
    "trunc": (np.trunc, _step),
    **_no_gradient(np.isnan, np.isinf, np.isfinite, np.logical_not, np.logical_and),
    **_no_gradient(np.logical_or, np.logical_xor, np.bitwise_and, np.bitwise_or, np.bitwise_xor),
    "bitwise_not": (np.invert, None),
    "eq": (np.equal, None),
    "ne": (np.not_equal, None),
    "lt": (np.less, None),
    "le": (np.less_equal, None),
    "gt": (np.greater, None),
    "ge": (np.greater_equal, None),
}


# ---- reductions ----


def _product_back(g: Array, y: Array, x: Array, axis: tuple[int, ...]) -> Array:
    """g times the product of the others, without a division."""
    last = np.moveaxis(x, axis, range(x.ndim - len(axis), x.ndim))
    rows = last.reshape(*last.shape[: x.ndim - len(axis)], math.prod(x.shape[i] for i in axis))
    ones = np.ones_like(rows[..., :1])
    left = np.cumprod(np.concatenate([ones, rows[..., :-1]], -1), -1)
    right = np.cumprod(np.concatenate([ones, rows[..., :0:-1]], -1), -1)[..., ::-1]
    return g * np.moveaxis(
        (left * right).reshape(last.shape), range(x.ndim - len(axis), x.ndim), axis
    )


def _even_back(g: Array, y: Array, x: Array, axis: tuple[int, ...]) -> Array:
    mask = x == y
    return g * mask / mask.sum(axis, keepdims=True)


def _logsumexp(x: Array, axis: tuple[int, ...]) -> Array:
    most = x.max(axis, keepdims=True, initial=-np.inf)
    most = np.where(np.isfinite(most), most, 0.0)
    return np.log(np.exp(x - most).sum(axis, keepdims=True)) + most


def _mean(x: Array, axis: tuple[int, ...]) -> Array:
    if x.dtype != FLOAT:
        raise ValueError("the mean of a tensor that is not of floats; use .float() before it")
    return x.sum(axis, keepdims=True) / math.prod(x.shape[i] for i in axis)


def _sum(x: Array, axis: tuple[int, ...]) -> Array:
    return x.sum(axis, keepdims=True)


REDUCTIONS: dict[str, Row] = {
    "sum": (_sum, lambda g, y, x, axis: g),
    "mean": (_mean, lambda g, y, x, axis: g / math.prod(x.shape[i] for i in axis)),
    "nansum": (
        lambda x, axis: np.nansum(x, axis, keepdims=True),
        lambda g, y, x, axis: g * ~np.isnan(x),
    ),
    "prod": (lambda x, axis: np.prod(x, axis, keepdims=True), _product_back),
    "amax": (lambda x, axis: x.max(axis, keepdims=True), _even_back),
    "amin": (lambda x, axis: x.min(axis, keepdims=True), _even_back),
    "logsumexp": (_logsumexp, lambda g, y, x, axis: g * np.exp(x - y)),
    "any": (lambda x, axis: x.astype(BOOL).any(axis, keepdims=True), None),
    "all": (lambda x, axis: x.astype(BOOL).all(axis, keepdims=True), None),
    "count_nonzero": (lambda x, axis: (x != 0).sum(axis, keepdims=True), None),
}


# ---- moves: functions of an array ----


def _shape_of(x: Array, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a reshape; -1 is what is left."""
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and x.size % known == 0:
        return tuple(x.size // known if size == -1 else size for size in sizes)
    if min(sizes, default=0) < 0 or math.prod(sizes) != x.size:
        raise ValueError(f"a tensor of shape {x.shape} has no shape {sizes}")
    return sizes


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    first, last = axis_of(start_dim, x.ndim), axis_of(end_dim, x.ndim)
    return (
        x.reshape(*x.shape[:first], -1 if x.size else 0, *x.shape[last + 1 :])
        if x.ndim
        else x[None]
    )


def _expand(x: Array, given: tuple[int, ...]) -> Array:
    own = (1,) * (len(given) - x.ndim) + x.shape
    shape = tuple(n if size == -1 else size for n, size in zip(own, given, strict=True))
    room(*shape)
    return np.broadcast_to(x, shape)


def _repeat(x: Array, given: tuple[int, ...]) -> Array:
    if len(given) < x.ndim or min(given, default=0) < 0:
        raise ValueError(f"repeat{given} does not fit a tensor of shape {x.shape}")
    room(x.size, *given)
    return np.tile(x, given)


def _squeeze(x: Array, dim: Any = None) -> Array:
    axes = axes_of(dim, x.ndim)
    return x.reshape([n for i, n in enumerate(x.shape) if i not in axes or n != 1])


def _unsqueeze(x: Array, dim: int) -> Array:
    return np.expand_dims(x, axis_of(dim, x.ndim + 1))


def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    axis, start, length = axis_of(dim, x.ndim), whole(start), whole(length)
    start += x.shape[axis] if start < 0 else 0
    if length < 0 or not 0 <= start <= x.shape[axis] - length:
        raise ValueError(f"narrow({dim}, {start}, {length}) of a tensor of shape {x.shape}")
    return np.take(x, range(start, start + length), axis)


def _key(x: Array, item: Any) -> Any:
    """An index as NumPy takes it."""
    if isinstance(item, Tensor):
        if item.data.dtype == FLOAT:
            raise ValueError("an index must be integers or bools, floats came")
        return item.data
    if isinstance(item, slice):
        parts = (item.start, item.stop, item.step)
        if item.step is not None and whole(item.step) < 1:
            raise ValueError("the step of a slice must be at least 1")
        return slice(*(None if part is None else whole(part) for part in parts))
    if isinstance(item, list):
        return np.array([whole(part) for part in item], INT)
    if item is None or item is Ellipsis:
        return item
    return whole(item)


def _getitem(x: Array, key: Any) -> Array:
    keys = tuple(_key(x, item) for item in (key if isinstance(key, tuple) else (key,)))
    spent = [
        item.ndim if isinstance(item, np.ndarray) and item.dtype == BOOL else int(item is not None)
        for item in keys
        if item is not Ellipsis
    ]
    rest, axis = x.size, 0
    for item in keys:
        if isinstance(item, np.ndarray) and item.dtype == INT and axis < x.ndim:
            rest //= max(x.shape[axis], 1)
        if item is Ellipsis:
            axis += x.ndim - sum(spent)
        elif isinstance(item, np.ndarray) and item.dtype == BOOL:
            axis += item.ndim
        else:
            axis += item is not None
    arrays = [item for item in keys if isinstance(item, np.ndarray) and item.dtype == INT]
    room(*np.broadcast_shapes(*(item.shape for item in arrays)), rest)
    return x[keys]


def _gather(x: Array, dim: int, index: Tensor) -> Array:
    axis = axis_of(dim, x.ndim)
    if index.data.ndim != x.ndim:
        raise ValueError(f"gather's index has {index.data.ndim} dimensions, the tensor {x.ndim}")
    cut = tuple(slice(n) if i != axis else slice(None) for i, n in enumerate(index.data.shape))
    return np.take_along_axis(x[cut], index.data, axis)


def _index_select(x: Array, dim: int, index: Tensor) -> Array:
    room(x.size // max(x.shape[axis_of(dim, x.ndim)], 1), index.data.size)
    return np.take(x, index.data, axis_of(dim, x.ndim))


def _repeat_interleave(x: Array, repeats: Any, dim: int | None = None) -> Array:
    counts = np.atleast_1d(repeats.data if isinstance(repeats, Tensor) else whole(repeats))
    if counts.dtype != INT or counts.ndim != 1 or (counts < 0).any():
        raise ValueError("repeats must be integers of 0 or more")
    flat = x.ravel() if dim is None else x
    axis = 0 if dim is None else axis_of(dim, x.ndim)
    times = float(counts.sum(dtype=float)) * (flat.shape[axis] if len(counts) == 1 else 1)
    room(flat.size // max(flat.shape[axis], 1), int(min(times, 1e18)))
    return np.repeat(flat, counts, axis)


def _listed(key: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of integers, which come one by one, as a list, or as the list `key`."""

    def called(x: Array, *values: Any, **named: Any) -> Array:
        if set(named) - {key} or (named and values):
            raise ValueError(f"arguments {sorted(named)} came; {key} is what it takes")
        return function(x, wholes((named[key],) if named else values))

    return called


def _axes(x: Array, dims: tuple[int, ...]) -> list[int]:
    return [axis_of(dim, x.ndim) for dim in dims]


def _swap(x: Array, dim0: int, dim1: int) -> Array:
    return np.swapaxes(x, axis_of(dim0, x.ndim), axis_of(dim1, x.ndim)) if x.ndim else x


def _roll(x: Array, shifts: Any, dims: Any = None) -> Array:
    by = wholes([shifts])
    return np.roll(x, by if dims is not None else by[0], None if dims is None else wholes([dims]))


def _masked_select(x: Array, mask: Tensor) -> Array:
    room(*np.broadcast_shapes(x.shape, mask.data.shape))
    values, where = np.broadcast_arrays(x, mask.data)
    return values[where]


MOVES: dict[str, Callable[..., Array]] = {
    "getitem": _getitem,
    "reshape": _listed("shape", lambda x, shape: x.reshape(_shape_of(x, shape))),
    "flatten": _flatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _swap,
    "permute": _listed("dims", lambda x, dims: x.transpose(_axes(x, dims))),
    "t": lambda x: x.T,
    "expand": _listed("size", _expand),
    "expand_as": lambda x, other: _expand(x, other.data.shape),
    "view_as": lambda x, other: x.reshape(_shape_of(x, other.data.shape)),
    "repeat": _listed("repeats", _repeat),
    "repeat_interleave": _repeat_interleave,
    "flip": _listed("dims", lambda x, dims: np.flip(x, _axes(x, dims))),
    "roll": _roll,
    "narrow": _narrow,
    "select": lambda x, dim, index: np.take(x, whole(index), axis_of(dim, x.ndim)),
    "index_select": _index_select,
    "gather": _gather,
    "masked_select": _masked_select,
    "diagonal": np.diagonal,
}
