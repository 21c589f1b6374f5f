"""The functions that a node of a custom loss can call, and the memory that a call takes.

FUNCTIONS and METHODS hold torch's functions under every name of allowed_functions.py that this
torch has. `look` is called before one runs. It raises ValueError if the result, or an intermediate
tensor, has more than NUMBERS_MAX numbers. For most groups, the sizes of the arguments bound it. If
that bound is too coarse, the function runs on torch's meta device first, where tensors have sizes
and no numbers, and _Meter checks every tensor that is made.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith.custom_losses import allowed_functions
from tinsmith.custom_losses.graph import leaves

NUMBERS_MAX = 1 << 24  # in one result
DIMENSIONS_MAX = 8  # of one result: an index by a mask makes this many integers for each True
LIST_MAX = 64  # entries of a list, except the lists of joins and picks
PRODUCTS_MAX = 1 << 28  # multiplications of one matrix product
PARTS_MAX = 1 << 12  # into which one tensor is split
DIFFERENCES_MAX = 16  # the order of a difference (torch.diff)

TorchFunction = Callable[..., Any]


# ---- bounds on memory ----


def room(shape: Sequence[int]) -> int:
    """The numbers in a tensor; ValueError if they are too many. A dimension of 0 counts as 1: a sum
    over it has as many numbers as the other dimensions."""
    numbers = math.prod(max(size, 1) for size in shape)
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"a result has more than {DIMENSIONS_MAX} dimensions")
    if numbers > NUMBERS_MAX:
        raise ValueError(f"a result of shape {tuple(shape)} is larger than {NUMBERS_MAX} numbers")
    return numbers


def numbers(tensor: torch.Tensor) -> int:
    """`room` of a tensor's shape."""
    count = tensor.numel()
    small = 0 < count <= NUMBERS_MAX and tensor.ndim <= DIMENSIONS_MAX
    return count if small else room(tensor.shape)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [item for item in leaves(value) if isinstance(item, torch.Tensor)]


def look(group: str, run: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The numbers that a call reads; ValueError if it would make too many."""
    given = leaves([args, kwargs])
    tensors = [item for item in given if isinstance(item, torch.Tensor)]
    read = sum(map(numbers, tensors)) + len(given)
    if group == "joins" and read > NUMBERS_MAX:
        raise ValueError(f"what is joined or split is larger than {NUMBERS_MAX} numbers")
    if group == "spreads":
        _spread({tensor.shape for tensor in tensors if tensor.ndim})
    if group in ("picks", "multiplies", "sized", "new"):
        most = math.prod(map(numbers, tensors))
        if group in ("sized", "new"):
            most *= math.prod(abs(item) + 1 for item in given if isinstance(item, int))
        if most > NUMBERS_MAX:
            # As an argument: torch.device("meta") misses functions that transformers has patched.
            made = {"device": "meta"} if group == "new" else {}
            _measure(run, args, {**kwargs, **made})
    if group not in ("joins", "picks"):
        for item in (*args, *kwargs.values()):
            if isinstance(item, tuple | list) and len(item) > LIST_MAX:
                raise ValueError(f"a list has {len(item)} entries, more than {LIST_MAX}")
    return read


def _spread(shapes: set[torch.Size]) -> None:
    """ValueError if the shapes, broadcast to one, are too large."""
    if len(shapes) > 1:
        most = max(map(len, shapes))
        rows = [(1,) * (most - len(shape)) + tuple(shape) for shape in shapes]
        room([max(sizes) for sizes in zip(*rows, strict=True)])


def plain(group: str, value: Any) -> Any:
    """The arguments of a call, with integers as sizes: torch also takes tensors of one integer."""
    if isinstance(value, tuple | list):
        first = int(group == "sized")
        return [*value[:first], *(_plain(item) for item in value[first:])]
    return {key: item if key == "input" else _plain(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and _integral(value.dtype)
    return int(value) if one else value


class _Meter(TorchDispatchMode):
    """Checks every tensor that is made on the way to a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            numbers(tensor)
        product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
        if product and multiplications(*args, result) > PRODUCTS_MAX:
            shapes = " and ".join(str(tuple(item.shape)) for item in args)
            raise ValueError(f"a matrix product of {shapes} is too large")
        return result


def multiplications(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> int:
    """√(MK·KN·MN) for an (M, K) and a (K, N); an upper bound for a product with batches."""
    return math.isqrt(math.prod(map(numbers, (a, b, product))))


def _on_meta(value: Any) -> Any:
    """Tensors with shapes only."""
    if isinstance(value, torch.Tensor):
        like = {"dtype": value.dtype, "requires_grad": value.requires_grad}
        return torch.empty_strided(value.shape, value.stride(), **like)
    if isinstance(value, tuple | list):
        return (list if isinstance(value, list) else tuple)(map(_on_meta, value))
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    return value


def _measure(run: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if a call would make a tensor that is too large."""
    if run is getitem and len(args) == 2:
        args = args[0], _integers(args[1])
    with torch.device("meta"), _Meter():
        run(*_on_meta(args), **_on_meta(kwargs))


def _integers(key: Any) -> tuple[Any, ...]:
    """An index with each mask replaced by the integers that torch makes of it, one for each
    True."""
    found: list[Any] = []
    for item in key if isinstance(key, tuple) else (key,):
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            count = int(item.count_nonzero())
            found += [torch.empty(count, dtype=torch.long, device="meta")] * item.ndim
        else:
            found.append(int(item) if isinstance(item, torch.Tensor) and item.ndim == 0 else item)
    return tuple(found)


# ---- functions that are more than torch's own, or less ----


def _integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def whole(value: Any) -> int:
    """An integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor) and value.ndim == 0 and _integral(value.dtype):
        return int(value)
    raise ValueError(f"an integer is needed, {type(value).__name__} came")


def _is_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor is needed, {type(value).__name__} came")
    return value


def getitem(value: Any, key: Any) -> Any:
    """One or more elements, of a tensor or of a tuple of tensors."""
    if isinstance(value, tuple):
        return value[key if isinstance(key, slice) else whole(key)]
    for item in leaves(key):
        if item is not None and item is not Ellipsis and not isinstance(item, torch.Tensor):
            whole(item)
    return _is_tensor(value)[key]


def to(input: Any, *args: Any, dtype: Any = None) -> torch.Tensor:
    """A tensor of another type; the device stays."""
    for item in args:
        dtype = getattr(item, "dtype", item)
    return _is_tensor(input).to(dtype) if isinstance(dtype, torch.dtype) else input


def arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: Any = None) -> torch.Tensor:
    first, last = (0, start) if end is None else (start, end)
    ends = [item.item() if isinstance(item, torch.Tensor) else item for item in (first, last, step)]
    room([math.ceil((ends[1] - ends[0]) / ends[2])])
    return torch.arange(*ends, dtype=dtype)


def eye(n: Any, m: Any = None, *, dtype: Any = None) -> torch.Tensor:
    shape = whole(n), whole(n if m is None else m)
    room(shape)
    return torch.eye(*shape, dtype=dtype)


def where(condition: Any, input: Any, other: Any) -> torch.Tensor:
    """torch.where without its one-argument form, whose result has as many integers as the condition
    is long."""
    return torch.where(condition, input, other)


def one_hot(input: Any, num_classes: Any = -1) -> torch.Tensor:
    count = whole(num_classes)
    count = int(_is_tensor(input).max()) + 1 if count == -1 else count
    room([*input.shape, count])
    return F.one_hot(input, count)


def repeat_interleave(input: Any, repeats: Any, dim: Any = None) -> torch.Tensor:
    """The sum of the counts is checked as a float: torch's integer sum may overflow."""
    counts = repeats if isinstance(repeats, torch.Tensor) else torch.tensor(whole(repeats))
    if not _integral(counts.dtype) or counts.ndim > 1 or (counts < 0).any():
        raise ValueError("repeats must be integers of 0 or more")
    length = _is_tensor(input).numel() if dim is None else input.size(dim)
    times = float(counts.double().sum()) * (length if counts.numel() == 1 else 1)
    room([input.numel() // max(length, 1), int(min(times, 1e18))])
    return torch.repeat_interleave(input, counts, dim)


def _parts(count: int) -> None:
    if count > PARTS_MAX:
        raise ValueError(f"a tensor is split in at most {PARTS_MAX} parts, not in {count}")


def split(input: Any, split_size: Any, dim: int = 0) -> Any:
    sizes = split_size if isinstance(split_size, tuple | list) else whole(split_size)
    length = _is_tensor(input).size(dim)
    _parts(-(-length // max(sizes, 1)) if isinstance(sizes, int) else len(sizes))
    return torch.split(input, sizes, dim)


def chunk(input: Any, chunks: Any, dim: int = 0) -> Any:
    _parts(min(whole(chunks), _is_tensor(input).size(dim)))
    return torch.chunk(input, whole(chunks), dim)


def unbind(input: Any, dim: int = 0) -> Any:
    _parts(_is_tensor(input).size(dim))
    return torch.unbind(input, dim)


def diff(input: Any, n: Any = 1, dim: int = -1) -> torch.Tensor:
    if not 0 <= whole(n) <= DIFFERENCES_MAX:
        raise TypeError(f"diff with n = {n}, only from 0 to {DIFFERENCES_MAX}")
    return torch.diff(input, whole(n), dim)


def einsum(equation: Any, *operands: Any) -> torch.Tensor:
    given = operands[0] if operands and isinstance(operands[0], tuple | list) else operands
    if not isinstance(equation, str) or not 1 <= len(given) <= 2:
        raise TypeError("einsum needs an equation of one or two tensors")
    return torch.einsum(equation, *given)


def linalg_norm(
    input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    if ord in (2, -2) and _is_tensor(input).ndim > 1 and not isinstance(dim, int):
        raise ValueError("a matrix norm by singular values is not built; vector_norm is")
    return torch.linalg.norm(input, ord, dim, keepdim, dtype=dtype)


def _divides(function: TorchFunction) -> TorchFunction:
    """A division. On the CPU, torch crashes the process for the smallest integer divided by −1."""

    def run(input: Any, other: Any, **named: Any) -> Any:
        a, b = torch.as_tensor(input), torch.as_tensor(other)
        kind = torch.result_type(a, b)
        if _integral(kind) and (b == -1).any() and (a == torch.iinfo(kind).min).any():
            raise ValueError("the least integer is divided by -1")
        return function(input, other, **named)

    return run


def attribute(value: Any, name: Any) -> Any:
    """getattr of a tensor, or of the named tuple that sort returns."""
    if isinstance(value, torch.Tensor) and name in allowed_functions.ATTRIBUTES:
        return allowed_functions.ATTRIBUTES[name](value)
    if type(value).__module__ == "torch.return_types" and name in allowed_functions.FIELDS:
        return allowed_functions.FIELDS[name](value)
    raise TypeError(f"the attribute {name!r:.40} is not built")


def _of_numbers(
    of_numbers: TorchFunction | None, of_tensors: TorchFunction | None
) -> TorchFunction:
    """An operator that is Python's own if no argument is a tensor."""

    def run(*args: Any) -> Any:
        if of_tensors and any(isinstance(item, torch.Tensor) for item in args):
            if all(isinstance(item, torch.Tensor | int | float) for item in args):
                return of_tensors(*args)
        elif of_numbers and all(isinstance(item, int | float) for item in args):
            result = of_numbers(*args)
            if isinstance(result, int) and abs(result) >= 1 << 63:
                raise ValueError("an integer is larger than 64 bits")
            return result
        raise ValueError("numbers are needed here; for tensors there are torch's functions")

    return run


# ---- functions for nodes ----


OWN: dict[str, TorchFunction] = {
    **{f.__name__: f for f in (getitem, to, arange, eye, one_hot, repeat_interleave, diff)},
    **{f.__name__: f for f in (einsum, split, chunk, unbind)},
    **{name: _divides(getattr(torch, name)) for name in ("div", "divide", "floor_divide")},
    **{name: _divides(getattr(torch, name)) for name in ("remainder", "fmod")},
    "view": torch.Tensor.reshape,  # it has no form that reads the bits as another type
    "torch.where": where,
    "operator.floordiv": _divides(operator.floordiv),
    "operator.mod": _divides(operator.mod),
    "torch.linalg.norm": linalg_norm,
    "torch._C._linalg.linalg_norm": linalg_norm,
}
# Where torch.fx finds functions: (its name, the module, the prefix of their names).
MODULES = (
    ("torch", torch, ""),
    ("torch.functional", torch.functional, ""),
    ("torch.nn.functional", F, ""),
    ("torch.special", torch.special, ""),
    ("torch.linalg", torch.linalg, ""),
    ("torch.Tensor", torch.Tensor, ""),
    ("torch._C._nn", torch._C._nn, ""),
    ("torch._C._special", torch._C._special, "special_"),
    ("torch._C._linalg", torch._C._linalg, "linalg_"),
)


def _functions() -> dict[str, tuple[TorchFunction, str]]:
    """Every function of the table that this torch has, under each of its names."""
    found = {
        f"{path}.{prefix}{name}": (getattr(module, prefix + name), name, group)
        for path, module, prefix in MODULES
        for name, group in allowed_functions.GROUP_OF.items()
        if callable(getattr(module, prefix + name, None))
    }
    made = {}
    for path, (function, name, group) in found.items():
        made[path] = OWN.get(path) or OWN.get(name) or function, group
    return made


def _operators() -> dict[str, tuple[TorchFunction, str]]:
    """Python's operators, its math, and getattr."""
    made = {"getattr": (attribute, "keeps")}
    for name, like in allowed_functions.OPERATORS.items():
        group, path = allowed_functions.GROUP_OF[like], f"operator.{name}"
        run = OWN.get(path) or OWN.get(name) or getattr(operator, name)
        if name != "getitem":
            run = _of_numbers(allowed_functions.NUMBERS.get(name), run)
        made[path] = run, group
    for name, function in allowed_functions.MATH.items():
        made[f"math.{name}"] = _of_numbers(function, None), "keeps"
    return made


FUNCTIONS = _functions() | _operators()
METHODS = {
    name: FUNCTIONS[f"torch.Tensor.{name}"]
    for name in allowed_functions.GROUP_OF
    if f"torch.Tensor.{name}" in FUNCTIONS
}
DTYPES = {name: getattr(torch, name) for name in allowed_functions.DTYPES}
