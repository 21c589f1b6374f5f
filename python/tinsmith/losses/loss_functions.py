"""Torch's functions that are not a row of autograd.py's tables: made of those, for custom losses.

Parameters have torch's names and order, so that a call binds as it does there. FUNCTIONS is the
table, by torch's names; what of a function is not supported is refused by name.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinsmith.losses.autograd import (
    BOOL,
    FLOAT,
    INT,
    Array,
    Gradients,
    Picked,
    Tensor,
    Unsupported,
    axes_of,
    axis_of,
    cast,
    move,
    moved,
    pointwise,
    reduce,
    room,
    tensor,
    whole,
    wholes,
)

PRODUCTS_MAX = 1 << 28  # multiplications of one matrix product
PARTS_MAX = 1 << 12  # that one tensor is split in
DIFFERENCES_MAX = 16  # of differences


# ---- arithmetic ----


def add(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    return pointwise("add", input, other if alpha == 1 else pointwise("mul", other, alpha))


def sub(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    return pointwise("sub", input, other if alpha == 1 else pointwise("mul", other, alpha))


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return pointwise("div", input, other)
    if rounding_mode == "floor":
        return pointwise("floor_divide", input, other)
    if rounding_mode == "trunc":
        return pointwise("trunc", pointwise("div", input, other))
    raise ValueError(f"rounding_mode must be None, 'trunc' or 'floor', {rounding_mode!r} came")


def clamp(input: Any, min: Any = None, max: Any = None) -> Tensor:
    if min is None and max is None:
        raise ValueError("clamp needs a min or a max")
    x = tensor(input)
    low = _extreme(x, -1) if min is None else min
    high = _extreme(x, 1) if max is None else max
    return pointwise("clamp", x, low, high)


def _extreme(x: Tensor, sign: int) -> Any:
    """What no element is beyond."""
    if x.data.dtype == FLOAT:
        return sign * math.inf
    return int(np.iinfo(INT).max if sign > 0 else np.iinfo(INT).min)


def where(condition: Any, input: Any, other: Any) -> Tensor:
    return pointwise("where", condition, input, other)


def masked_fill(input: Any, mask: Any, value: Any) -> Tensor:
    x = tensor(input)
    kept = tensor(value).data.astype(x.data.dtype) if x.data.dtype != FLOAT else None
    return pointwise("where", mask, value if kept is None else Tensor(kept), x)


def nan_to_num(
    input: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    most = float(np.finfo(np.float32).max)  # torch's for what it keeps in float32
    high, low = most if posinf is None else posinf, -most if neginf is None else neginf
    return pointwise(
        (
            lambda x: np.nan_to_num(x, nan=nan, posinf=high, neginf=low),
            lambda g, y, x: g * np.isfinite(x),
        ),
        input,
    )


# ---- activations ----


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Tensor:
    if threshold != 20:
        raise Unsupported(f"softplus with a threshold of {threshold}, only of 20")
    return pointwise("softplus", tensor(input) * beta) / beta


def silu(input: Any) -> Tensor:
    return tensor(input) * pointwise("sigmoid", input)


def softmax(input: Any, dim: Any = None, dtype: Any = None) -> Tensor:
    def forward(x: Array, axis: int) -> Array:
        e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return e / e.sum(axis, keepdims=True)

    return _along(
        input, dim, dtype, forward, lambda g, y, axis: y * (g - (g * y).sum(axis, keepdims=True))
    )


def log_softmax(input: Any, dim: Any = None, dtype: Any = None) -> Tensor:
    def forward(x: Array, axis: int) -> Array:
        shifted = x - x.max(axis, keepdims=True, initial=-np.inf)
        return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))

    return _along(
        input, dim, dtype, forward, lambda g, y, axis: g - np.exp(y) * g.sum(axis, keepdims=True)
    )


def cumsum(input: Any, dim: Any, dtype: Any = None) -> Tensor:
    return _along(
        input,
        dim,
        dtype,
        lambda x, axis: np.cumsum(x, axis),
        lambda g, y, axis: np.flip(np.cumsum(np.flip(g, axis), axis), axis),
    )


def _along(
    input: Any,
    dim: Any,
    dtype: Any,
    forward: Callable[[Array, int], Array],
    back: Callable[[Array, Array, int], Array],
) -> Tensor:
    """What keeps the shape, and is computed along one dimension."""
    x = tensor(input) if dtype is None else cast(input, dtype)
    if dim is None:
        raise Unsupported("a softmax without dim")
    axis, flat = axis_of(dim, x.data.ndim), np.atleast_1d(x.data)
    y = forward(flat, axis)
    shape = x.data.shape
    return Tensor(
        y.reshape(shape), [x], lambda g: [back(g.reshape(y.shape), y, axis).reshape(shape)]
    )


# ---- reductions that are made of others ----


def var(
    input: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    x = tensor(input)
    count = math.prod(x.data.shape[axis] for axis in axes_of(dim, x.data.ndim))
    less = int(unbiased) if correction is None else correction
    difference = x - reduce("mean", x, dim, True)
    total = reduce("sum", difference * difference, dim, keepdim)
    return total / float(max(count - less, 0))


def std(
    input: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    return pointwise("_norm_sqrt", var(input, dim, unbiased, keepdim, correction=correction))


def norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    x = tensor(input) if dtype is None else cast(input, dtype)
    if p == "fro" or p == 2:
        return pointwise("_norm_sqrt", reduce("sum", x * x, dim, keepdim))
    if isinstance(p, bool) or not isinstance(p, int | float) or p <= 0:
        raise Unsupported(f"a norm with p = {p!r}")
    size = pointwise("abs", x)
    if p == 1 or math.isinf(p):
        return reduce("sum" if p == 1 else "amax", size, dim, keepdim)
    return pointwise("pow", reduce("sum", pointwise("pow", size, p), dim, keepdim), 1 / p)


def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return norm(x, ord, dim, keepdim, dtype)


def _pick(name: str, order: Callable[[Array, int], Array]) -> Callable[..., Any]:
    """max or min: of all, of two tensors, or along a dimension."""

    def picked(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        x = tensor(input)
        other = dim if isinstance(dim, Tensor) else other
        if other is not None:
            return pointwise(f"{name}imum", x, other)
        if dim is None:
            return reduce(f"a{name}", x)
        axis = axis_of(dim, x.data.ndim)
        if x.data.size == 0:
            raise ValueError(f"{name} of no elements")
        index = np.expand_dims(order(np.atleast_1d(x.data), axis), axis)
        values = move(lambda a: np.take_along_axis(np.atleast_1d(a), index, axis), x)
        if keepdim and x.data.ndim:
            return Picked(values, Tensor(index))
        return Picked(*(move(lambda a: a.squeeze(axis), part) for part in (values, Tensor(index))))

    return picked


def _arg(order: Callable[..., Array]) -> Callable[..., Tensor]:
    def found(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
        x = tensor(input).data
        if x.size == 0:
            raise ValueError("argmax of no elements")
        axis = None if dim is None else axis_of(dim, x.ndim)
        return Tensor(order(x, axis, keepdims=keepdim) if x.ndim else 0)

    return found


def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Picked:
    x = tensor(input)
    axis, keys = axis_of(dim, x.data.ndim), np.atleast_1d(x.data)
    index = np.argsort(-keys.astype(FLOAT) if descending else keys, axis, kind="stable")
    index = index.reshape(x.data.shape)
    ordered = move(lambda a: np.take_along_axis(a, index, axis) if a.ndim else a, x)
    return Picked(ordered, Tensor(index))


def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    return sort(input, dim, descending).indices


def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Picked:
    x = tensor(input)
    axis, count = axis_of(dim, x.data.ndim), whole(k)
    if not x.data.ndim or not 0 <= count <= x.data.shape[axis]:
        raise ValueError(f"topk of {k} in a tensor of shape {x.data.shape}")
    first = [moved("narrow", part, axis, 0, count) for part in sort(x, axis, largest)]
    return Picked(*first)


# ---- products ----


def matmul(input: Any, other: Any) -> Tensor:
    a, b = tensor(input), tensor(other)
    if not a.data.ndim or not b.data.ndim:
        raise ValueError("a matrix product needs tensors of at least one dimension")
    left = a.data[None] if a.data.ndim == 1 else a.data
    right = b.data[:, None] if b.data.ndim == 1 else b.data
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    room(*shape)
    if math.prod(shape) * left.shape[-1] > PRODUCTS_MAX:
        raise ValueError(f"a matrix product of {left.shape} and {right.shape} is too large")
    y = left @ right
    drop = tuple(axis for axis, one in ((-2, a), (-1, b)) if one.data.ndim == 1)

    def back(g: Array) -> Gradients:
        g = g.reshape(shape)
        parts = (g @ np.swapaxes(right, -1, -2), left, a), (np.swapaxes(left, -1, -2) @ g, right, b)
        return [
            part.sum(tuple(range(part.ndim - like.ndim)))
            .sum(_ones(part.shape[-like.ndim :], like.shape), keepdims=True)
            .reshape(one.data.shape)
            for part, like, one in parts
        ]

    return Tensor(y.squeeze(drop), [a, b], back)


def _ones(full: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i, (n, m) in enumerate(zip(full, own, strict=True)) if m == 1 and n != 1)


def _product_of(*dims: int) -> Callable[[Any, Any], Tensor]:
    """A matrix product of tensors with so many dimensions."""

    def product(input: Any, other: Any) -> Tensor:
        came = tensor(input).data.ndim, tensor(other).data.ndim
        if came != dims:
            raise ValueError(f"tensors of {dims} dimensions are needed, {came} came")
        return matmul(input, other)

    return product


def outer(input: Any, vec2: Any) -> Tensor:
    return pointwise("mul", move(lambda a: a.reshape(-1, 1), tensor(input)), vec2)


def einsum(equation: Any, *operands: Any) -> Tensor:
    """Products of one or two tensors without repeated indices or an ellipsis."""
    operands = operands[0] if isinstance(operands[0], tuple | list) else operands
    inputs, arrow, out = str(equation).replace(" ", "").partition("->")
    names = inputs.split(",")
    plain = all(set(name) == set(name) & _LETTERS and len(set(name)) == len(name) for name in names)
    if not arrow or not plain or len(names) > 2 or len(set(out)) != len(out):
        raise Unsupported(f"einsum({equation!r:.60}): one or two tensors, no index twice, with ->")
    tensors = [tensor(item) for item in operands]
    if [len(name) for name in names] != [item.data.ndim for item in tensors]:
        raise ValueError(f"einsum({equation!r:.60}) does not fit its tensors")
    sizes = {
        index: size
        for name, item in zip(names, tensors, strict=True)
        for index, size in zip(name, item.data.shape, strict=True)
    }
    if not set(out) <= set(sizes):
        raise ValueError(
            f"einsum({equation!r:.60}): none of its tensors has an index of its result"
        )
    axes = [*out, *(index for index in sizes if index not in out)]
    parts = []
    for name, item in zip(names, tensors, strict=True):
        order = sorted(name, key=axes.index)
        spread = [sizes[index] if index in name else 1 for index in axes]
        parts.append(move(_spread(name, order, spread), item))
    product = parts[0] if len(parts) == 1 else parts[0] * parts[1]
    summed = list(range(len(out), len(axes)))
    return reduce("sum", product, summed) if summed else product


_LETTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _spread(name: str, order: list[str], shape: list[int]) -> Callable[[Array], Array]:
    return lambda a: a.transpose([name.index(index) for index in order]).reshape(shape)


# ---- several tensors in one, one in several ----


def cat(tensors: Any, dim: int = 0) -> Tensor:
    parts = [tensor(item) for item in tensors]
    if not parts:
        raise ValueError("cat of no tensors")
    room(sum(part.data.size for part in parts))
    axis = axis_of(dim, parts[0].data.ndim)
    kind = np.result_type(*(part.data for part in parts))
    return move(lambda *arrays: np.concatenate(arrays, axis), *(cast(part, kind) for part in parts))


def stack(tensors: Any, dim: int = 0) -> Tensor:
    return cat([moved("unsqueeze", item, dim) for item in tensors], dim)


def split(input: Any, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    x = tensor(input)
    axis = axis_of(dim, x.data.ndim)
    length = x.data.shape[axis] if x.data.ndim else 0
    if isinstance(split_size, tuple | list):
        sizes = list(wholes(split_size))
    else:
        size = max(whole(split_size), 1)
        sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
    if sum(sizes) != length or len(sizes) > PARTS_MAX:
        raise ValueError(f"a dimension of {length} is not split in {len(sizes)} such parts")
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return tuple(
        moved("narrow", x, axis, start, size) for start, size in zip(starts, sizes, strict=True)
    )


def chunk(input: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    x = tensor(input)
    length = x.data.shape[axis_of(dim, x.data.ndim)] if x.data.ndim else 0
    return split(x, -(-length // max(whole(chunks), 1)), dim)


def unbind(input: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(moved("squeeze", part, dim) for part in split(input, 1, dim))


def _triangle(keep: Callable[..., Array]) -> Callable[..., Tensor]:
    def cut(input: Any, diagonal: int = 0) -> Tensor:
        x = tensor(input)
        mask = keep(np.ones(x.data.shape[-2:], BOOL), whole(diagonal))
        return masked_fill(x, Tensor(~mask), 0)

    return cut


def diff(input: Any, n: int = 1, dim: int = -1) -> Tensor:
    x = tensor(input)
    axis = axis_of(dim, x.data.ndim)
    if not 0 <= whole(n) <= DIFFERENCES_MAX:
        raise Unsupported(f"diff with n = {n}, only from 0 to {DIFFERENCES_MAX}")
    for _ in range(min(n, x.data.shape[axis])):
        length = x.data.shape[axis] - 1
        x = moved("narrow", x, axis, 1, length) - moved("narrow", x, axis, 0, length)
    return x


def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    x, sizes = tensor(input), wholes([pad])
    if mode != "constant" or len(sizes) % 2 or len(sizes) > 2 * x.data.ndim or min(sizes) < 0:
        raise Unsupported(f"pad{sizes} with mode {mode!r}: only of constants, by 0 or more")
    for i in range(0, len(sizes), 2):
        axis, shape = x.data.ndim - 1 - i // 2, list(x.data.shape)
        ends = [full([*shape[:axis], n, *shape[axis + 1 :]], value or 0) for n in sizes[i : i + 2]]
        x = cat([cast(ends[0], x.data.dtype), x, cast(ends[1], x.data.dtype)], axis)
    return x


def one_hot(input: Any, num_classes: int = -1) -> Tensor:
    ids, count = tensor(input).data, whole(num_classes)
    count = int(ids.max()) + 1 if count == -1 else count
    if ids.dtype != INT or (ids.size and not 0 <= ids.min() <= ids.max() < count):
        raise ValueError(f"one_hot needs integers from 0 to {count - 1}")
    room(max(ids.size, 1), count)
    return Tensor((ids[..., None] == np.arange(count)).astype(INT))


# ---- new tensors ----


def full(size: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    shape = wholes([size])
    if min(shape, default=0) < 0:
        raise ValueError(f"there is no shape {shape}")
    room(*shape)
    return cast(
        move(lambda a: np.broadcast_to(a, shape), tensor(fill_value)), dtype or _own(fill_value)
    )


def _own(value: Any) -> np.dtype[Any]:
    return tensor(value).data.dtype


def _filled(value: int) -> tuple[Callable[..., Tensor], ...]:
    """zeros, zeros_like and new_zeros, or ones."""

    def new(*size: Any, dtype: Any = FLOAT) -> Tensor:
        return full(wholes(size), value, dtype)

    def like(input: Tensor, dtype: Any = None) -> Tensor:
        return full(input.data.shape, value, dtype or input.data.dtype)

    def of(input: Tensor, *size: Any, dtype: Any = None) -> Tensor:
        return full(wholes(size), value, dtype or input.data.dtype)

    return new, like, of


def full_like(input: Tensor, fill_value: Any, dtype: Any = None) -> Tensor:
    return full(input.data.shape, fill_value, dtype or input.data.dtype)


def new_full(input: Tensor, size: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    return full(size, fill_value, dtype or input.data.dtype)


def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    room(math.ceil((last - first) / step))
    return Tensor(np.arange(first, last, step, dtype))


# ---- types and facts ----


def to(input: Tensor, *args: Any, dtype: Any = None) -> Tensor:
    for item in args:
        if isinstance(item, Tensor | np.dtype):
            dtype = item.data.dtype if isinstance(item, Tensor) else item
    return input if dtype is None else cast(input, dtype)


def size(input: Tensor, dim: Any = None) -> Any:
    return input.data.shape if dim is None else input.data.shape[axis_of(dim, input.data.ndim)]


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.data.shape,
    "ndim": lambda x: x.data.ndim,
    "dtype": lambda x: x.data.dtype,
    "device": lambda x: "cpu",
    "is_cuda": lambda x: False,
    "T": lambda x: moved("t", x),
    "mT": lambda x: moved("transpose", x, -1, -2),
    "data": lambda x: Tensor(x.data),
}


# ---- torch.nn.functional's losses ----


def _loss(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of each element, reduced as torch does."""

    def reduced(input: Any, target: Any, *, reduction: str = "mean", **more: Any) -> Tensor:
        each = of(tensor(input), tensor(target), **more)
        if reduction == "none":
            return each
        if reduction == "batchmean":
            return reduce("sum", each) / each.data.shape[0]
        return reduce({"mean": "mean", "sum": "sum"}[reduction], each)

    return reduced


def _huber(x: Tensor, t: Tensor, *, delta: float = 1.0) -> Tensor:
    size = pointwise("abs", x - t)
    far = (size - 0.5 * delta) * delta
    return pointwise("where", pointwise("lt", size, delta), size * size * 0.5, far)


def _smooth_l1(x: Tensor, t: Tensor, *, beta: float = 1.0) -> Tensor:
    return _huber(x, t, delta=beta) / beta if beta else pointwise("abs", x - t)


def _kl_div(x: Tensor, t: Tensor, *, log_target: bool = False) -> Tensor:
    if log_target:
        return pointwise("exp", t) * (t - x)
    return pointwise("xlogy", t, t) - t * x


def _bce_with_logits(x: Tensor, t: Tensor, *, pos_weight: Any = None) -> Tensor:
    weight = 1 if pos_weight is None else (tensor(pos_weight) - 1) * t + 1
    return (1 - t) * x - pointwise("logsigmoid", x) * weight


def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    return tensor(input) / clamp(norm(input, p, dim, True), eps)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [clamp(norm(item, 2, dim), eps) for item in (x1, x2)]
    return reduce("sum", tensor(x1) * x2, dim) / (lengths[0] * lengths[1])


# ---- the table ----

_max, _min = _pick("max", np.argmax), _pick("min", np.argmin)
_zeros, _ones_ = _filled(0), _filled(1)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (add, sub, div, clamp, where, masked_fill, nan_to_num)},
    **{f.__name__: f for f in (softplus, silu, softmax, log_softmax)},
    **{f.__name__: f for f in (var, std, norm, vector_norm, sort, argsort, topk, cumsum)},
    **{f.__name__: f for f in (matmul, outer, einsum, cat, stack, split, chunk, unbind)},
    **{f.__name__: f for f in (diff, pad, one_hot, full, full_like, new_full, arange, to, size)},
    **{f.__name__: f for f in (normalize, cosine_similarity)},
    "max": _max,
    "min": _min,
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "dot": _product_of(1, 1),
    "mv": _product_of(2, 1),
    "mm": _product_of(2, 2),
    "bmm": _product_of(3, 3),
    "tril": _triangle(np.tril),
    "triu": _triangle(np.triu),
    **dict(zip(("zeros", "zeros_like", "new_zeros"), _zeros, strict=True)),
    **dict(zip(("ones", "ones_like", "new_ones"), _ones_, strict=True)),
    "float": lambda input: cast(input, FLOAT),
    "long": lambda input: cast(input, INT),
    "bool": lambda input: cast(input, BOOL),
    "type_as": lambda input, other: cast(input, other.data.dtype),
    "detach": lambda input: Tensor(tensor(input).data),
    "clone": lambda input: input,
    "numel": lambda input: input.data.size,
    "dim": lambda input: input.data.ndim,
    "mse_loss": _loss(lambda x, t: (x - t) * (x - t)),
    "l1_loss": _loss(lambda x, t: pointwise("abs", x - t)),
    "smooth_l1_loss": _loss(_smooth_l1),
    "huber_loss": _loss(_huber),
    "kl_div": _loss(_kl_div),
    "binary_cross_entropy_with_logits": _loss(_bce_with_logits),
}
