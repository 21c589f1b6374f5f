"""Attacks what checks an uploaded custom loss: graphs that the SDK traced, mutated, and then tried
on small inputs as when they are uploaded. The graphs are the suite's: all functions of the table,
and whole losses. What is taken is evaluated on datums too, now and then.

A graph is refused with a sentence, and the report says by which function; or it is a loss, and its
value and its gradient are finite numbers, or refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
from support.loss_cases import CASES
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinsmith.custom_losses import allowed_functions, custom_loss
from tinsmith.custom_losses.graph import CustomLoss
from tinsmith.system.steps import finish

from tools.attack import common
from tools.attack.common import Attempt, One

RANKS = {"logprobs": 1, "v": 1, "ids": 1, "m": 2, "c": 0}
EVALUATED = 0.1  # of the graphs that are taken
NODES = 18  # of a graph that is attacked
WORDS = ("dim", "keepdim", "dtype", "size", "n", "value", "pad", "inplace", "out", "ord")
TEXTS = sorted(allowed_functions.TEXTS)
SMALL = (0, 1, 2, 3, 5, 6, -1, -2, 0.5)


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    graphs, nodes = [], []
    for case in CASES.values():
        handle = trace_loss(_loss_of(case), RANKS, "session")
        inputs = [one.model_dump() for one in handle.inputs]
        graph = encode_graph(handle).model_dump(mode="json")
        nodes += graph["nodes"]
        if len(graph["nodes"]) <= NODES:
            graphs.append({"inputs": inputs, "graph": graph})
    targets = sorted({(node["op"], node["target"]) for node in nodes if "call" in node["op"]})

    def one(attempt: Attempt) -> str:
        rng = attempt.rng
        sent = rng.choice(graphs)
        given = _rewritten(rng, sent, targets) if rng.random() < 0.7 else common.changed(rng, sent)
        attempt.note(given)
        try:
            loss = _checked(given)
        except common.Failure:
            raise
        except Exception as error:
            common.refusal(error, kinds=(ValueError,))
            return f"refused by {common.where(error) or 'the fields'}"
        if rng.random() >= EVALUATED:
            return "taken"
        try:
            fits = [np.full((6, 4)[:rank], -0.5, np.float32) for _, rank in loss.inputs]
            found = finish(custom_loss.evaluate(loss, fits[:1], [fits[1:]]))
        except Exception as error:
            common.refusal(error, kinds=(ValueError, FloatingPointError))
            return f"taken, not evaluated by {common.where(error)}"
        if not np.isfinite([found.loss, *found.gradients[0].ravel()]).all():
            raise common.Failure(f"it gives {found}")
        return "taken and evaluated"

    yield one


def _loss_of(case: Callable[..., Any]) -> Callable[..., Any]:
    def loss(logprobs: Any, v: Any, ids: Any, m: Any, c: Any) -> Any:
        y = case(logprobs, v, ids, m, c, m * logprobs[:, None])
        return sum(part.sum() for part in (y if isinstance(y, tuple) else (y,))), {}

    return loss


def _rewritten(rng: Random, sent: dict[str, Any], targets: list[tuple[str, str]]) -> Any:
    """A graph as it could be: other functions, arguments and references, in a few nodes."""
    nodes = [dict(node) for node in sent["graph"]["nodes"]]
    inputs = [dict(one) for one in sent["inputs"]]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(inputs), len(nodes) - 1)
        node, act = nodes[at], rng.randrange(8)
        args = node["args"] = list(node["args"])
        if act == 0:
            node["op"], node["target"] = rng.choice(targets)
        elif act == 1:
            rng.choice(inputs[1:])["rank"] = rng.randrange(3)
        elif act == 2:
            word = rng.choice((*WORDS, *(key for other in nodes for key in other["kwargs"])))
            node["kwargs"] = {**node["kwargs"], word: _argument(rng, nodes[:at])}
        elif act == 3 and args:
            del args[rng.randrange(len(args))]
        elif act == 4:
            args.append(_argument(rng, nodes[:at]))
        elif args:
            args[rng.randrange(len(args))] = _argument(rng, nodes[:at])
    return {"inputs": inputs, "graph": {**sent["graph"], "nodes": nodes}}


def _argument(rng: Random, before: list[dict[str, Any]]) -> Any:
    act = rng.randrange(9)
    if act < 4:
        return {"ref": rng.choice(before)["name"]}
    if act == 4:
        return {"tuple": [_argument(rng, before) for _ in range(rng.randrange(4))]}
    if act == 5:
        return {"slice": [rng.choice((None, 0, 1, -1, 2**40)) for _ in range(3)]}
    if act == 6:
        return {"dtype": rng.choice(allowed_functions.DTYPES)}
    if act == 7:
        return [_argument(rng, before) for _ in range(rng.randrange(3))]
    return rng.choice((*SMALL, *common.INTEGERS, *common.FLOATS[:8], True, None, *TEXTS))


def _checked(given: Any) -> CustomLoss:
    """What the route does with a body's fields, which are a list and an object there."""
    inputs, graph = (given.get(k) if isinstance(given, dict) else None for k in ("inputs", "graph"))
    if not isinstance(inputs, list) or not isinstance(graph, dict):
        raise ValueError("the request needs inputs, a list, and a graph, an object")
    return custom_loss.check("a", inputs, graph)
