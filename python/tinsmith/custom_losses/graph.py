"""A custom loss as data: a checked graph of calls, and the result of its evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ref:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True)
class Node:
    """One call. `says` is its name in error messages; `run` executes it, and belongs to a group of
    allowed_functions.py."""

    name: str
    says: str
    run: Callable[..., Any]
    group: str
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
    """A loss on some datums: its sum, the gradients of their log-probabilities, and metrics."""

    loss: float
    gradients: tuple[NDArray[np.float32], ...]
    metrics: dict[str, float]


def leaves(value: Any) -> list[Any]:
    """The items of lists, tuples, dicts and slices."""
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    elif not isinstance(value, tuple | list):
        return [value]
    found = []
    for item in value:
        if isinstance(item, tuple | list | dict | slice):
            found += leaves(item)
        else:
            found.append(item)
    return found
