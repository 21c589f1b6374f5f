"""Custom losses: a graph that the SDK traced with torch.fx and sent as data, checked here.

A graph is a list of nodes in execution order. Each calls one function of allowed_functions.py by
its name, with numbers, types, and the results of earlier nodes. Nothing that a client sends is ever
executed, imported or looked up as an attribute. A function that is not in a table is refused by
name, with the node that calls it, before anything runs. evaluation.py then evaluates the graph
datum by datum, and differentiates it. It needs torch, which is imported with the first graph. If
torch is not installed, `available` is false, and clients evaluate their losses themselves.
"""

import importlib.util
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.custom_losses import allowed_functions
from tinsmith.custom_losses.graph import CustomLoss, Evaluation, Node, Ref, leaves
from tinsmith.system.steps import Steps

NODES_MAX = 5_000
VALUES_MAX = 100_000  # in the arguments of all nodes
DEPTH_MAX = 8  # of nested lists
INPUTS_MAX = 16

METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
INPUT = re.compile(r"(?!__)[a-z_][a-z0-9_]{0,63}")
TEXT = re.compile(r"[\w.]{1,200}", re.ASCII)
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
ADVICE = (
    "a custom loss that is a plain Python function, without create_custom_loss, may use all of "
    "torch"
)


def available() -> bool:
    """Whether losses can be evaluated here: torch is installed. It is not imported."""
    return importlib.util.find_spec("torch") is not None


def evaluate(
    loss: CustomLoss,
    logprobs: Sequence[NDArray[np.float32]],
    inputs: Sequence[Sequence[NDArray[Any]]],
) -> Steps[Evaluation]:
    """The loss of some datums; `inputs` are those after logprobs. It yields (datums done, all) now
    and then. Raises FloatingPointError if the loss or its gradient is not finite, ValueError if the
    graph does not fit the datums."""
    found: Steps[Evaluation] = _torch().evaluate(loss, logprobs, inputs)
    return found


def check(name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> CustomLoss:
    """Checks a graph of JSON types and returns it as a loss; ValueError says what is wrong."""
    taken = _inputs(inputs)
    if graph.get("format", 1) != 1:
        raise ValueError(f"the graph has format {reprlib.repr(graph['format'])}, only 1 is known")
    came = graph.get("nodes")
    if not isinstance(came, list) or not 0 < len(came) <= NODES_MAX:
        raise ValueError(f"a graph needs a list of 1 to {NODES_MAX} nodes")
    evaluation = _torch()
    from tinsmith.custom_losses import functions

    reader = _NodeReader(functions.DTYPES)
    placeholders: list[str] = []
    nodes: list[Node] = []
    output: Any = None
    for number, item in enumerate(came):
        op, own, target, args, kwargs = reader.node(number, item)
        if op == "placeholder" and not nodes:
            placeholders.append(own)
        elif op in ("call_function", "call_method"):
            known = functions.METHODS if op == "call_method" else functions.FUNCTIONS
            nodes.append(_call(known.get(target), own, target, args, kwargs))
        elif op == "output" and number == len(came) - 1 and len(args) == 1:
            output = args[0]
        else:
            raise ValueError(f"node {own!r} is a {op!r:.40}, which a custom loss can't have there")
        reader.known.add(own)
    if len(placeholders) != len(taken):
        raise ValueError(f"the graph has {len(placeholders)} placeholders for {len(taken)} inputs")
    loss, metrics = _output(output)
    made = CustomLoss(name, taken, tuple(placeholders), tuple(nodes), loss, metrics)
    evaluation.attempt(made)
    return made


def _torch() -> Any:
    """evaluation.py, which imports torch."""
    try:
        from tinsmith.custom_losses import evaluation
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"this server has no custom losses: torch can't be imported there ({error}); {ADVICE}"
        ) from None
    return evaluation


def _inputs(inputs: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise ValueError(f"a custom loss takes 1 to {INPUTS_MAX} inputs, {len(inputs)} came")
    found = []
    for item in inputs:
        name, rank = map(item.get, ("name", "rank")) if isinstance(item, dict) else (None, None)
        named = isinstance(name, str) and INPUT.fullmatch(name)
        if not named or type(rank) is not int or not 0 <= rank <= 2:
            raise ValueError(
                f"an input needs a name and a rank of 0, 1 or 2, {reprlib.repr(item)} came (names "
                "are in lowercase, and don't begin with __)"
            )
        found.append((name, rank))
    names = [name for name, _ in found]
    if names[0] != "logprobs" or found[0][1] == 0 or len(set(names)) != len(names):
        raise ValueError(f"inputs must be logprobs (of rank 1 or 2) and others, {names} came")
    return tuple(found)


class _NodeReader:
    """Reads nodes; knows the names of earlier nodes."""

    def __init__(self, dtypes: Mapping[str, Any]) -> None:
        self.dtypes = dtypes
        self.known: set[str] = set()
        self.values = 0

    def node(self, number: int, item: Any) -> tuple[str, str, str, list[Any], dict[str, Any]]:
        """(op, name, target, args, kwargs) of one node."""
        if not isinstance(item, dict):
            raise ValueError(f"node {number} is no object")
        op, name, target = (item.get(key) for key in ("op", "name", "target"))
        args, kwargs = item.get("args", []), item.get("kwargs", {})
        plain = all(isinstance(text, str) and TEXT.fullmatch(text) for text in (op, name, target))
        if not plain or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError(f"node {number} needs an op, a name, a target, args and kwargs")
        if name in self.known:
            raise ValueError(f"two nodes are called {name!r}")
        where = f"node {name!r} ({target})"
        given = {key: self.value(value, where) for key, value in kwargs.items()}
        return op, name, target, [self.value(value, where) for value in args], given

    def value(self, value: Any, where: str, depth: int = 0) -> Any:
        """An argument: numbers and strings stay as they are, the rest are objects with one key."""
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
        raise ValueError(f"{where}: {reprlib.repr(value)} is no argument")

    def tagged(self, kind: str, inner: Any, where: str, depth: int) -> Any:
        """The value of an object with one key."""
        if kind == "ref" and isinstance(inner, str):
            if inner not in self.known:
                raise ValueError(f"{where} refers to {inner!r:.60}, which is no node before it")
            return Ref(inner)
        if kind == "dtype" and isinstance(inner, str):
            if inner not in self.dtypes:
                known = ", ".join(self.dtypes)
                raise ValueError(f"{where}: the type {inner!r:.40} is not built; there are {known}")
            return self.dtypes[inner]
        if kind == "float" and isinstance(inner, str) and inner in FLOATS:
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


def _call(
    found: tuple[Callable[..., Any], str] | None,
    name: str,
    target: str,
    args: list[Any],
    kwargs: dict[str, Any],
) -> Node:
    """Checks that a table has a node's operation with these arguments; returns the node."""
    where = f"node {name!r} ({target})"
    if found is None:
        plain = target.rpartition(".")[2].removesuffix("_")
        inplace = target.endswith("_") and plain in allowed_functions.GROUP_OF
        why = "changes a tensor in place: use the one without _" if inplace else "is not built"
        raise ValueError(f"{where}: {target} {why}; {ADVICE}")
    for key in list(kwargs):
        allowed = allowed_functions.IDLE.get(key, ())
        if allowed is None or any(kwargs[key] is value for value in allowed):
            del kwargs[key]
        elif key not in allowed_functions.KEYWORDS:
            raise ValueError(f"{where}: got an unexpected keyword argument {key!r:.40}")
    texts = (item for item in leaves([args, kwargs]) if isinstance(item, str))
    text = next((item for item in texts if item not in allowed_functions.TEXTS), None)
    if text is not None and target.rpartition(".")[2] not in allowed_functions.TAKE_TEXT:
        raise ValueError(f"{where}: a tensor or a number is needed, {text!r:.60} came")
    run, group = found
    signature = _signature(run)
    try:
        bound = signature.bind(*args, **kwargs).arguments if signature else {}
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    if bound.get("inplace") or bound.get("out"):
        raise ValueError(f"{where}: the result is a new tensor, without inplace and out")
    return Node(name, target, run, group, tuple(args), kwargs)


@cache
def _signature(run: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a table's function. torch's C functions have none; they take neither inplace
    nor out."""
    try:
        return inspect.signature(run)
    except ValueError:
        return None


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
