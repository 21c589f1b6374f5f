"""Custom losses: a graph that the SDK traced with torch.fx and sent as data, checked and run.

A graph is a list of nodes in execution order; each calls one operation of OPS by name, with
numbers, names of types, and the results of earlier nodes. Nothing that comes is ever executed,
imported or looked up as an attribute: what is not in a table is refused by name, with the node that
calls it. A loss is evaluated datum by datum, in float64, on a budget of numbers that bounds time
and memory.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.losses import autograd
from tinsmith.losses.autograd import BOOL, FLOAT, INT, Tensor, Unsupported
from tinsmith.losses.loss_functions import ATTRIBUTES, FUNCTIONS

NODES_MAX = 5_000
VALUES_MAX = 100_000  # that all nodes' arguments hold
DEPTH_MAX = 8  # of lists in lists
INPUTS_MAX = 16
HELD_MAX = 1 << 26  # numbers that one datum's results hold
WORK_MAX = 1 << 31  # numbers that all operations of a request read and write
TRIED_MAX = 1 << 22  # likewise when a loss is uploaded

METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
DTYPES = {
    **dict.fromkeys(("float32", "float64"), FLOAT),
    **dict.fromkeys(("int64", "int32", "int16", "int8", "uint8"), INT),
    "bool": BOOL,
}
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# Where torch keeps functions, as torch.fx names them.
MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg")
MODULES += ("torch._C._nn", "torch._C._special", "torch._C._linalg", "torch.Tensor", "operator")
# Keyword arguments that make no difference here with these values; None: with any.
IDLE: dict[str, tuple[Any, ...] | None] = {
    "device": None, "layout": None, "memory_format": None, "pin_memory": None, "_stacklevel": None,
    "non_blocking": None, "copy": None, "out": (None,), "inplace": (False,), "weight": (None,),
    "size_average": (None,), "reduce": (None,), "requires_grad": (False,),
}  # fmt: skip
ALIASES = {
    "div": ("truediv", "true_divide", "divide"),
    "mul": ("multiply",),
    "sub": ("subtract",),
    "neg": ("negative",),
    "abs": ("absolute",),
    "remainder": ("mod",),
    "floor_divide": ("floordiv",),
    "pow": ("float_power",),
    "bitwise_and": ("and_",),
    "bitwise_or": ("or_",),
    "bitwise_xor": ("xor",),
    "bitwise_not": ("inv", "invert"),
    "ne": ("not_equal",),
    "lt": ("less",),
    "le": ("less_equal",),
    "gt": ("greater",),
    "ge": ("greater_equal",),
    "sigmoid": ("expit",),
    "logsigmoid": ("log_sigmoid",),
    "clamp": ("clip",),
    "clone": ("contiguous", "cpu", "positive", "pos"),
    "float": ("double",),
    "long": ("int",),
    "reshape": ("view",),
    "flatten": ("ravel",),
    "transpose": ("swapaxes", "swapdims"),
    "expand": ("broadcast_to",),
    "cat": ("concat", "concatenate"),
    "dot": ("inner", "vdot"),
    "numel": ("nelement",),
    "dim": ("ndimension",),
}


def _operations() -> dict[str, Callable[..., Any]]:
    """Every operation by every name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in autograd.POINTWISE:
        if not name.startswith("_"):
            found[name] = _pointwise(name)
    for name in autograd.REDUCTIONS:
        found[name] = _reduction(name)
    for name in autograd.MOVES:
        found[name] = _move(name)
    found |= FUNCTIONS
    return found | {alias: found[name] for name, aliases in ALIASES.items() for alias in aliases}


def _pointwise(name: str) -> Callable[..., Any]:
    forward, _ = autograd.POINTWISE[name]
    count = (
        forward.nin if isinstance(forward, np.ufunc) else len(inspect.signature(forward).parameters)
    )

    def one(input: Any) -> Tensor:
        return autograd.pointwise(name, input)

    def two(input: Any, other: Any) -> Tensor:
        return autograd.pointwise(name, input, other)

    def power(input: Any, exponent: Any) -> Tensor:
        return autograd.pointwise(name, input, exponent)

    return power if name == "pow" else one if count == 1 else two


def _reduction(name: str) -> Callable[..., Any]:
    def reduced(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        return autograd.reduce(name, input, dim, keepdim, dtype)

    return reduced


def _move(name: str) -> Callable[..., Any]:
    function = autograd.MOVES[name]

    def moved(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        inspect.signature(function).bind(None, *args, **kwargs)
        return autograd.moved(name, input, *args, **kwargs)

    return moved


def _number_power(a: float, b: float) -> float:
    power = math.pow(a, b)
    exact = isinstance(a, int) and isinstance(b, int) and b >= 0 and abs(power) < 1 << 53
    return a**b if exact else power


OPS = _operations()
# Methods whose tensor is another parameter than their function's first.
METHODS = {"where": lambda input, condition, other: OPS["where"](condition, input, other)}
MATH = {
    f.__name__: f
    for f in (math.sqrt, math.exp, math.log, math.log2, math.log10, math.log1p, math.expm1)
} | {f.__name__: f for f in (math.floor, math.ceil, math.fabs, math.tanh, math.sin, math.cos)}
MATH["pow"] = _number_power
NUMBERS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "abs", "pos")
} | {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
NUMBERS["pow"] = _number_power


@dataclass(frozen=True)
class Ref:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True)
class Node:
    """One call; `run` takes decoded arguments."""

    name: str
    says: str  # what it calls, for sentences
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CustomLoss:
    """A checked graph. inputs: logprobs and the loss_fn_inputs it reads, with their ranks."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    placeholders: tuple[str, ...]
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


@dataclass(frozen=True)
class Evaluation:
    """A loss on some datums: its sum, the gradient of each one's log-probabilities, and metrics."""

    loss: float
    gradients: tuple[NDArray[np.float32], ...]
    metrics: dict[str, float]


# ---- the graph ----


def check(name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> CustomLoss:
    """A graph as it came, in JSON's types, as a loss; ValueError says what can't be used."""
    taken = _inputs(inputs)
    if graph.get("format", 1) != 1:
        raise ValueError(f"the graph has format {graph['format']!r:.20}, only 1 is known")
    came = graph.get("nodes")
    if not isinstance(came, list) or not 0 < len(came) <= NODES_MAX:
        raise ValueError(f"a graph needs a list of 1 to {NODES_MAX} nodes")
    reader = _Reader()
    placeholders: list[str] = []
    nodes: list[Node] = []
    output: Any = None
    for number, item in enumerate(came):
        op, own, target, args, kwargs = reader.node(number, item)
        if op == "placeholder" and not nodes:
            placeholders.append(own)
        elif op in ("call_function", "call_method"):
            nodes.append(_call(op, own, target, args, kwargs))
        elif op == "output" and number == len(came) - 1 and len(args) == 1:
            output = args[0]
        else:
            raise ValueError(f"node {own!r} is a {op!r:.40}, which a custom loss can't have there")
        reader.known.add(own)
    if len(placeholders) != len(taken):
        raise ValueError(f"the graph has {len(placeholders)} placeholders for {len(taken)} inputs")
    loss, metrics = _output(output)
    made = CustomLoss(name, taken, tuple(placeholders), tuple(nodes), loss, metrics)
    _try(made)
    return made


def _inputs(inputs: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise ValueError(f"a custom loss takes 1 to {INPUTS_MAX} inputs, {len(inputs)} came")
    found = []
    for item in inputs:
        name, rank = map(item.get, ("name", "rank")) if isinstance(item, dict) else (None, None)
        named = isinstance(name, str) and INPUT.fullmatch(name)
        if not named or type(rank) is not int or not 0 <= rank <= 2:
            raise ValueError(f"an input needs a name and a rank of 0, 1 or 2, {item!r:.80} came")
        found.append((name, rank))
    names = [name for name, _ in found]
    if names[0] != "logprobs" or found[0][1] == 0 or len(set(names)) != len(names):
        raise ValueError(f"inputs must be logprobs (of rank 1 or 2) and others, {names} came")
    return tuple(found)


class _Reader:
    """Reads nodes; knows the names of those that came before."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.values = 0

    def node(self, number: int, item: Any) -> tuple[str, str, str, list[Any], dict[str, Any]]:
        """(op, name, target, args, kwargs) of one node."""
        if not isinstance(item, dict):
            raise ValueError(f"node {number} is no object")
        op, name, target = (item.get(key) for key in ("op", "name", "target"))
        args, kwargs = item.get("args", []), item.get("kwargs", {})
        plain = all(isinstance(text, str) and 0 < len(text) <= 200 for text in (op, name, target))
        if not plain or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError(f"node {number} needs an op, a name, a target, args and kwargs")
        if name in self.known:
            raise ValueError(f"two nodes are called {name!r}")
        where = f"node {name!r} ({target})"
        given = {key: self.value(value, where) for key, value in kwargs.items()}
        return op, name, target, [self.value(value, where) for value in args], given

    def value(self, value: Any, where: str, depth: int = 0) -> Any:
        """An argument: numbers and strings are themselves, the rest are objects of one key."""
        self.values += 1
        if self.values > VALUES_MAX or depth > DEPTH_MAX:
            raise ValueError(f"{where}: more than {VALUES_MAX} arguments, or {DEPTH_MAX} levels")
        if isinstance(value, list):
            return [self.value(item, where, depth + 1) for item in value]
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int) and abs(value) < 1 << 63:
            return value
        if isinstance(value, str) and len(value) <= 200:
            return value
        if isinstance(value, dict) and len(value) == 1:
            ((kind, inner),) = value.items()
            return self.tagged(kind, inner, where, depth + 1)
        raise ValueError(f"{where}: {value!r:.60} is no argument")

    def tagged(self, kind: str, inner: Any, where: str, depth: int) -> Any:
        """The value of an object of one key."""
        if kind == "ref" and isinstance(inner, str):
            if inner not in self.known:
                raise ValueError(f"{where} refers to {inner!r:.60}, which is no node before it")
            return Ref(inner)
        if kind == "dtype" and isinstance(inner, str):
            if inner not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{where}: the type {inner!r:.40} is not built; there are {known}")
            return DTYPES[inner]
        if kind == "float" and inner in FLOATS:
            return FLOATS[inner]
        if kind in ("tuple", "slice") and isinstance(inner, list):
            items = self.value(inner, where, depth)
            if kind == "tuple":
                return tuple(items)
            if len(items) == 3:
                return slice(*items)
        if kind == "dict" and isinstance(inner, dict):
            return {key: self.value(item, where, depth) for key, item in inner.items()}
        if kind == "ellipsis":
            return Ellipsis
        if kind in ("device", "layout", "memory_format") and isinstance(inner, str):
            return inner
        raise ValueError(f"{where}: {kind!r:.40} is no kind of argument")


def _call(op: str, name: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> Node:
    """A node whose operation is in a table, and takes such arguments."""
    run, where = _find(op, target), f"node {name!r} ({target})"
    if run is None:
        inplace = target.endswith("_") and target.rpartition(".")[2][:-1] in OPS
        why = "changes a tensor in place: use the one without _" if inplace else "is not built"
        raise ValueError(
            f"{where}: {target} {why}; a custom loss that is a plain Python function, without "
            "create_custom_loss, may use all of torch"
        )
    for key, allowed in IDLE.items():
        if key in kwargs and (allowed is None or any(kwargs[key] is value for value in allowed)):
            del kwargs[key]
    try:
        inspect.signature(run).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    return Node(name, target, run, tuple(args), kwargs)


def _find(op: str, target: str) -> Callable[..., Any] | None:
    """The operation behind a name, or None."""
    if op == "call_method":
        return METHODS.get(target) or OPS.get(target)
    module, _, name = target.rpartition(".")
    if target == "getattr":
        return _attribute
    if module == "math":
        return _numbers(MATH[name], None) if name in MATH else None
    if module not in MODULES:
        return None
    if module == "operator":
        if name == "getitem":
            return _item
        return _numbers(NUMBERS.get(name), OPS.get(name)) if name in OPS else None
    return OPS.get(name.removeprefix("special_").removeprefix("linalg_"))


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, Tensor) and name in ATTRIBUTES:
        return ATTRIBUTES[name](value)
    if isinstance(value, autograd.Picked) and name in ("values", "indices"):
        return value[name == "indices"]
    raise Unsupported(f"the attribute {name!r:.40} is not built")


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, tuple):
        return value[key if isinstance(key, slice) else autograd.whole(key)]
    return OPS["getitem"](value, key)


def _numbers(
    of_numbers: Callable[..., Any] | None, of_tensors: Callable[..., Any] | None
) -> Callable[..., Any]:
    """An operation that Python does where no tensor takes part."""

    def run(*args: Any) -> Any:
        if of_tensors and (of_numbers is None or any(isinstance(item, Tensor) for item in args)):
            return of_tensors(*args)
        if not of_numbers or not all(isinstance(item, int | float) for item in args):
            raise ValueError("numbers are needed here; for tensors there are torch's functions")
        result = of_numbers(*args)
        if isinstance(result, int) and abs(result) >= 1 << 63:
            raise ValueError("an integer is larger than 64 bits")
        return result

    return run


def _output(output: Any) -> tuple[Ref, dict[str, Ref]]:
    """(loss, metrics) as the loss returns them."""
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise ValueError("a custom loss must return (loss, metrics)")
    loss, metrics = output
    if not isinstance(loss, Ref) or not isinstance(metrics, dict):
        raise ValueError("a custom loss must return a tensor and a dict of tensors")
    for key, value in metrics.items():
        if not METRIC.fullmatch(key) or not isinstance(value, Ref):
            raise ValueError(
                f"the metric {key!r:.80} must be a tensor, named custom/<name>:sum or "
                "custom/<name>:mean in lowercase"
            )
    return loss, metrics


# ---- evaluation ----


class _Budget:
    """Numbers that a request's operations may still read and write."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def spend(self, numbers: int) -> None:
        """ValueError where it is used up."""
        self.left -= numbers
        if self.left < 0:
            raise ValueError(f"the loss takes more than {self.most} numbers of work in one request")


def evaluate(
    loss: CustomLoss,
    logprobs: Sequence[NDArray[np.float32]],
    inputs: Sequence[Sequence[NDArray[Any]]],
) -> Evaluation:
    """The loss of some datums; `inputs` are those after logprobs. FloatingPointError where the
    loss or its gradient is not finite, ValueError where the graph does not fit the datums."""
    budget, total, gradients = _Budget(WORK_MAX), 0.0, []
    sums = dict.fromkeys(loss.metrics, 0.0)
    with np.errstate(all="ignore"):
        for index, (logp, others) in enumerate(zip(logprobs, inputs, strict=True)):
            where = f"custom loss {loss.name!r}, datum {index}"
            x = Tensor(logp, tracked=True)
            results = _run(loss, [x, *map(Tensor, others)], budget, where)
            value = results[loss.loss.name]
            if not isinstance(value, Tensor) or value.data.ndim:
                shape = value.data.shape if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{where}: the loss must be a scalar tensor, {shape} came")
            gradient = _gradient(value, x, where)
            total += float(value.data)
            gradients.append(gradient)
            for key, ref in loss.metrics.items():
                sums[key] += _metric(results[ref.name], f"{where}: the metric {key}")
    count = len(logprobs)
    metrics = {
        key: value / count if key.endswith(":mean") else value for key, value in sums.items()
    }
    return Evaluation(total, tuple(gradients), metrics)


def _run(loss: CustomLoss, inputs: list[Tensor], budget: _Budget, where: str) -> dict[str, Any]:
    """The results of all nodes by their names."""
    results: dict[str, Any] = dict(zip(loss.placeholders, inputs, strict=True))
    held = 0
    for node in loss.nodes:
        args = [_resolve(value, results) for value in node.args]
        kwargs = {key: _resolve(value, results) for key, value in node.kwargs.items()}
        try:
            result = node.run(*args, **kwargs)
            held += _numbers_in(result)
            budget.spend(_numbers_in(args) + _numbers_in(result))
            if held > HELD_MAX:
                raise ValueError(f"the loss holds more than {HELD_MAX} numbers")
        except MemoryError:
            raise
        except Exception as error:
            kind = Unsupported if isinstance(error, Unsupported) else ValueError
            raise kind(f"{where}, node {node.name!r} ({node.says}): {error}") from None
        results[node.name] = result
    return results


def _resolve(value: Any, results: Mapping[str, Any]) -> Any:
    """An argument with the results that it refers to."""
    if isinstance(value, Ref):
        return results[value.name]
    if isinstance(value, tuple | list):
        return type(value)(_resolve(item, results) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, results) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(part, results) for part in (value.start, value.stop, value.step)))
    return value


def _numbers_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data.size
    return sum(map(_numbers_in, value)) if isinstance(value, tuple | list) else 1


def _gradient(loss: Tensor, x: Tensor, where: str) -> NDArray[np.float32]:
    if not np.isfinite(loss.data):
        raise FloatingPointError(f"{where}: the loss is {loss.data}; nothing was added")
    found = autograd.gradient(loss, x)
    if found is None:
        raise ValueError(f"{where}: the loss has no gradient: it does not depend on logprobs")
    exact = np.ascontiguousarray(np.broadcast_to(found, x.data.shape), np.float32)
    bad = np.argwhere(~np.isfinite(exact))
    if len(bad):
        at = ", ".join(map(str, bad[0]))
        raise FloatingPointError(
            f"{where}: the gradient of logprobs[{at}] is {exact[tuple(bad[0])]}; nothing was added"
        )
    return exact


def _metric(value: Any, where: str) -> float:
    if isinstance(value, Tensor) and value.data.size == 1:
        return float(value.data.reshape(()))
    if isinstance(value, bool | int | float):
        return float(value)
    raise ValueError(f"{where} must be a scalar")


def _try(loss: CustomLoss) -> None:
    """Runs the graph once on small inputs, to tell of what is not supported before it is used."""
    shapes = {0: (), 1: (6,), 2: (6, 3)}
    inputs = [Tensor(np.full(shapes[rank], -0.5), tracked=True) for _, rank in loss.inputs]
    try:
        with np.errstate(all="ignore"):
            _run(loss, inputs, _Budget(TRIED_MAX), f"custom loss {loss.name!r}")
    except Unsupported as error:
        raise ValueError(str(error)) from None
    except ValueError:
        return  # it may fit the inputs that come
