"""Graphs of custom losses, written down as the SDK would send them: for tests of what it never
sends."""

from typing import Any

X, Y = {"ref": "x"}, {"ref": "y"}
LOGPROBS = [{"name": "logprobs", "rank": 1}]
LARGE = 1 << 40


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def function(target: str, *args: Any, name: str = "y", **kwargs: Any) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


def method(target: str, *args: Any, name: str = "y", **kwargs: Any) -> dict[str, Any]:
    return node("call_method", name, target, *args, **kwargs)


def graph_of(*nodes: dict[str, Any], loss: str = "y") -> dict[str, Any]:
    """A graph of nodes on logprobs `x`, which returns one of them."""
    result = {"tuple": [{"ref": loss}, {"dict": {}}]}
    ends = node("placeholder", "x", "logprobs"), node("output", "output", "output", result)
    return {"format": 1, "nodes": [ends[0], *nodes, ends[1]]}
