"""Graphs that no SDK would send: each is answered with a sentence, and nothing of it is run that
the table does not have, or that would take more memory or time than a loss may.

UNCHECKED are refused when they are uploaded. UNFIT pass that, for they may fit some datums, and are
refused when they are evaluated. Some of both would stop the process if torch got to see them.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from conftest import Wire, make_datum
from support.loss_graphs import LARGE, LOGPROBS, X, Y, function, graph_of, method, node
from tinsmith.custom_losses import custom_loss, evaluation, functions
from tinsmith.custom_losses.graph import Evaluation
from tinsmith.system.steps import finish

Z = {"ref": "z"}
DEEP = json.loads("[" * 20 + "]" * 20)

UNCHECKED: dict[str, tuple[dict[str, Any], str]] = {
    # What is called.
    "an unknown function": (graph_of(function("os.system", "ls")), r"os.system is not built"),
    "eval": (graph_of(function("builtins.eval", "1")), r"builtins.eval is not built"),
    "an import": (graph_of(function("builtins.__import__", "os")), "is not built"),
    "a module in torch": (graph_of(function("torch.os.system", "ls")), "is not built"),
    "a file": (graph_of(function("torch.load", "/etc/passwd")), "torch.load is not built"),
    "a library": (graph_of(function("torch.ops.load_library", "a.so")), "is not built"),
    "compiled code": (graph_of(function("torch.utils.cpp_extension.load", "a")), "is not built"),
    "memory as it lies": (
        graph_of(function("torch.as_strided", X, [99], [1])),
        "torch.as_strided is not built",
    ),
    "memory as it was": (graph_of(function("torch.empty", 9)), "torch.empty is not built"),
    "a hook": (graph_of(method("register_hook", X, "f")), "register_hook is not built"),
    "pickles": (graph_of(method("__reduce_ex__", X, 2)), "__reduce_ex__ is not built"),
    "an address": (graph_of(method("data_ptr", X)), "data_ptr is not built"),
    "a map of Python": (graph_of(method("apply_", X, "f")), "apply_ is not built"),
    "backward": (graph_of(method("backward", X)), "backward is not built"),
    "a decomposition": (graph_of(function("torch.linalg.svd", X)), "torch.linalg.svd is not built"),
    "a random number": (graph_of(function("torch.rand_like", X)), "torch.rand_like is not built"),
    "the number of threads": (graph_of(function("torch.set_num_threads", 64)), "is not built"),
    "a type as a function": (graph_of(function("torch.float", X)), "torch.float is not built"),
    "a function of Python": (graph_of(function("math.factorial", 10**6)), "is not built"),
    "a formatted text": (graph_of(function("operator.mod", "%99999999d", 1)), "'%99999999d' came"),
    "a long text": (graph_of(function("operator.mul", "a", LARGE)), "'a' came"),
    "a private method": (graph_of(method("__class__", X)), "__class__ is not built"),
    "a private attribute": (
        graph_of(function("getattr", X, "__class__"), loss="y"),
        "the attribute '__class__' is not built",
    ),
    "an attribute of an attribute": (
        graph_of(function("getattr", X, "data.__class__")),
        "the attribute 'data.__class__' is not built",
    ),
    "an attribute that is no name": (graph_of(function("getattr", X, 7)), "attribute 7 is not"),
    "an attribute of a size": (
        graph_of(function("getattr", X, "shape"), function("getattr", Y, "index", name="z")),
        "the attribute 'index' is not built",
    ),
    "a gradient": (graph_of(function("getattr", X, "grad_fn")), "'grad_fn' is not built"),
    "a module's attribute": (graph_of(node("get_attr", "y", "weight")), "is a 'get_attr'"),
    "a module": (graph_of(node("call_module", "y", "linear", X)), "is a 'call_module'"),
    "another kind of node": (graph_of(node("exec", "y", "torch.exp", X)), "is a 'exec'"),
    # What would change a tensor.
    "in place": (
        graph_of(method("mul_", X, 2)),
        "mul_ changes a tensor in place: use the one without _",
    ),
    "an assignment": (graph_of(function("operator.setitem", X, 0, 1)), "is not built"),
    "an operator in place": (graph_of(function("operator.iadd", X, 1)), "is not built"),
    "a result in an input": (
        graph_of(function("torch.exp", X, out=X)),
        "unexpected keyword argument 'out'",
    ),
    "a result in an input, by place": (
        graph_of(function("torch.nn.functional.normalize", X, 2.0, 0, 1e-9, X)),
        "the result is a new tensor",
    ),
    "an activation in place": (
        graph_of(function("torch.nn.functional.relu", X, inplace=True)),
        "unexpected keyword argument 'inplace'",
    ),
    "an activation in place, by place": (
        graph_of(function("torch.nn.functional.leaky_relu", X, 0.1, True)),
        "the result is a new tensor",
    ),
    "a leaf": (
        graph_of(function("torch.ones_like", X, requires_grad=True)),
        "unexpected keyword argument 'requires_grad'",
    ),
    # Arguments.
    "a complex type": (
        graph_of(method("to", X, {"dtype": "complex64"})),
        "the type 'complex64' is not built; there are float32",
    ),
    "a type that is none": (graph_of(method("to", X, {"dtype": "__class__"})), "is not built"),
    "a type that is a list": (graph_of(method("to", X, {"dtype": ["int8"]})), "no kind of arg"),
    "bits read as another type's": (graph_of(method("view", X, {"dtype": "bool"})), "node 'y'"),
    "a float that is none": (graph_of(function("torch.exp", {"float": "1e9999"})), "no kind of"),
    "a float that is a list": (graph_of(function("torch.exp", {"float": ["nan"]})), "no kind of"),
    "a keyword that is unknown": (
        graph_of(function("torch.softmax", X, 0, temperature=2)),
        "unexpected keyword argument 'temperature'",
    ),
    "a keyword that is private": (graph_of(method("sum", X, **{"__class__": 1})), "'__class__'"),
    "too many arguments": (graph_of(function("torch.exp", X, 2)), "takes 1 positional argument"),
    "a condition alone": (graph_of(function("torch.where", X)), "missing a required argument"),
    "too few": (graph_of(function("torch.gather", X)), "missing 2 required positional"),
    "a text for a number": (graph_of(method("sum", X, "0")), "a number is needed, '0' came"),
    "a text for a tensor": (graph_of(function("torch.exp", "x")), "a number is needed, 'x' came"),
    "a text in a list": (graph_of(method("reshape", X, ["3"])), "a number is needed, '3' came"),
    "a text for an index": (graph_of(function("operator.getitem", X, "a")), "'a' came"),
    "a name for a dimension": (graph_of(method("softmax", X, "rows")), "'rows' came"),
    "a norm by singular values": (graph_of(method("norm", X, "nuc")), "'nuc' came"),
    "a list for a number": (graph_of(function("torch.add", X, [1])), "node 'y'"),
    "a dict for a number": (graph_of(function("torch.add", X, {"dict": {}})), "node 'y'"),
    "many differences": (graph_of(method("diff", X, 1_000_000)), "diff with n = 1000000, only"),
    "many tensors in one product": (
        graph_of(function("torch.functional.einsum", "i,i,i->i", X, X, X)),
        "an equation of one or two tensors",
    ),
    "a strange argument": (graph_of(function("torch.exp", {"a": 1, "b": 2})), "is no argument"),
    "an unknown tag": (graph_of(function("torch.exp", {"code": "1"})), "'code' is no kind"),
    "a huge integer": (graph_of(function("operator.mul", X, 10**30)), "is no argument"),
    "a long text that is shown": (
        graph_of(function("torch.exp", "x" * 1_000_000)),
        "is no argument",
    ),
    "a deep list": (graph_of(function("torch.cat", DEEP)), "8 levels"),
    "deep tags": (graph_of(method("sum", X, {"tuple": [{"tuple": DEEP}]})), "8 levels"),
    "many arguments": (graph_of(function("torch.cat", [X] * 200_000)), "more than 100000"),
    # The graph.
    "a cycle": (
        graph_of(function("torch.exp", Z), function("torch.exp", Y, name="z")),
        "refers to 'z', which is no node before it",
    ),
    "itself": (graph_of(function("torch.exp", Y)), "refers to 'y', which is no node before it"),
    "a node that is missing": (graph_of(function("torch.exp", {"ref": "w"})), "refers to 'w'"),
    "a name twice": (
        graph_of(function("torch.exp", X), function("torch.exp", X)),
        "two nodes are called 'y'",
    ),
    "a name of another line": (graph_of(function("torch.exp", X, name="y\n")), "needs an op"),
    "a target of another line": (graph_of(function("torch.exp\nok", X)), "needs an op"),
    "a target that is a list": (graph_of(function(["torch", "exp"], X)), "needs an op"),
    "a name that is no text": (graph_of(function("torch.exp", X, name=7)), "needs an op"),
    "arguments that are none": (
        graph_of({"op": "call_function", "name": "y", "target": "torch.exp", "args": {"a": X}}),
        "needs an op, a name, a target, args",
    ),
    "two inputs where one is declared": (
        {"nodes": [node("placeholder", "v", "v"), *graph_of(method("sum", X))["nodes"]]},
        "2 placeholders for 1 inputs",
    ),
    "an input at the end": (graph_of(method("sum", X), node("placeholder", "z", "v")), "there"),
    "no output": ({"nodes": graph_of(function("torch.exp", X))["nodes"][:-1]}, "must return"),
    "an output in between": (
        graph_of(
            node("output", "o", "output", {"tuple": [X, {"dict": {}}]}), function("torch.exp", X)
        ),
        "is a 'output'",
    ),
    "an output that is no tensor": (
        {
            "nodes": [
                node("placeholder", "x", "logprobs"),
                node("output", "o", "output", {"tuple": [7, {"dict": {}}]}),
            ]
        },
        "must return a tensor and a dict",
    ),
    "no loss": (graph_of(loss="nothing"), "refers to 'nothing'"),
    "a bad metric": (
        {
            "nodes": [
                node("placeholder", "x", "logprobs"),
                node("output", "o", "output", {"tuple": [X, {"dict": {"loss:sum": X}}]}),
            ]
        },
        "the metric 'loss:sum' must be a tensor, named custom/",
    ),
    "no nodes": ({"nodes": []}, "a list of 1 to 5000 nodes"),
    "no graph": ({}, "a list of 1 to 5000 nodes"),
    "too many nodes": ({"nodes": [{}] * 6000}, "a list of 1 to 5000 nodes"),
    "another format": ({"format": 2, "nodes": [{}]}, "the graph has format 2"),
    "a format that is long": ({"format": ["x" * 99] * 99, "nodes": [{}]}, "the graph has format"),
    "a node that is none": ({"nodes": [7]}, "node 0 is no object"),
    "a node without a name": ({"nodes": [{"op": "placeholder"}]}, "node 0 needs an op, a name"),
}


def told(refusal: BaseException) -> str:
    """The sentence of a refusal, which is one, and no longer than one can read."""
    text = str(refusal)
    assert text and "\n" not in text and len(text) < 600
    assert not re.search(r"Traceback|\.(cpp|py):", text)
    return text


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_graph_is_refused_before_it_is_used(name: str) -> None:
    graph, sentence = UNCHECKED[name]
    with pytest.raises(ValueError, match=sentence) as refusal:
        custom_loss.check("mine", LOGPROBS, graph)
    told(refusal.value)


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [{"name": "weights", "rank": 1}],
        [{"name": "logprobs", "rank": 0}],
        [{"name": "logprobs", "rank": 3}],
        [{"name": "logprobs", "rank": 1}] * 2,
        [{"name": "logprobs", "rank": 1}, {"name": "a.b", "rank": 1}],
        [{"name": "logprobs", "rank": 1}, {"name": "__class__", "rank": 1}],
        [{"name": "logprobs", "rank": True}],
        [{"name": "logprobs", "rank": 1.0}],
        [{"name": ["logprobs"], "rank": 1}],
        [7],
        LOGPROBS * 17,
    ],
)
def test_inputs_that_are_none_are_refused(inputs: list[Any]) -> None:
    told_by = "takes 1 to 16 inputs|an input needs a name|inputs must be logprobs"
    with pytest.raises(ValueError, match=told_by) as refusal:
        custom_loss.check("mine", inputs, graph_of(function("torch.sum", X)))
    told(refusal.value)


SUMMED = method("sum", Y, name="s")
LEAST = -(1 << 63) + 1
LARGER = "larger than 16777216"


def ids(size: int, name: str) -> dict[str, Any]:
    return function("torch.arange", size, name=name)


def ones(*shape: int, name: str) -> dict[str, Any]:
    return function("torch.ones", *shape, name=name)


UNFIT: dict[str, tuple[list[dict[str, Any]], str]] = {
    # Results that are too large.
    "a large tensor": ([function("torch.ones", LARGE)], LARGER),
    "a tensor as large as numbers go": ([function("torch.zeros", (1 << 63) - 1, 9)], "node 'y'"),
    "a negative size": ([function("torch.zeros", -5)], "must be non-negative"),
    "a large identity": ([function("torch.eye", 1 << 20)], LARGER),
    "a large range": ([function("torch.arange", LARGE)], LARGER),
    "a range of small steps": ([function("torch.arange", 0, 1, 1e-12)], LARGER),
    "a range without an end": ([function("torch.arange", 0, {"float": "inf"})], "infinity"),
    "a range without steps": ([function("torch.arange", 0, 9, 0)], "division by zero"),
    "many points": ([function("torch.linspace", 0, 1, LARGE)], LARGER),
    "a large expansion": ([method("expand", X, LARGE, 3)], LARGER),
    "a large repetition": ([method("repeat", X, LARGE)], LARGER),
    "a large tile": ([function("torch.tile", X, {"tuple": [LARGE, 2]})], LARGER),
    "a large interleaving": ([function("torch.repeat_interleave", X, LARGE)], LARGER),
    "large padding": ([function("torch.nn.functional.pad", X, [0, LARGE])], LARGER),
    "padding of many dimensions": (
        [ones(*[1] * 8, name="z"), function("torch.nn.functional.pad", Z, [9] * 16)],
        LARGER,
    ),
    "many classes": (
        [ids(9, "z"), function("torch._C._nn.one_hot", Z, LARGE)],
        LARGER,
    ),
    "a large class": (
        [
            ids(9, "z"),
            function("operator.mul", Z, LARGE, name="w"),
            function("torch._C._nn.one_hot", {"ref": "w"}),
        ],
        LARGER,
    ),
    "a size that a tensor holds": (
        [
            function("torch.full", {"tuple": []}, LARGE, name="z"),
            function("torch.ones", Z),
        ],
        LARGER,
    ),
    "a sum over nothing": ([function("torch.zeros", 0, LARGE, name="z"), method("sum", Z, 0)], "z"),
    "an outer product": ([ids(1 << 20, "z"), function("torch.outer", Z, Z)], LARGER),
    "an outer product by broadcasting": (
        [
            ids(1 << 20, "a"),
            method("unsqueeze", {"ref": "a"}, 1, name="b"),
            function("operator.mul", {"ref": "a"}, {"ref": "b"}),
        ],
        "a result of shape .1048576, 1048576. is larger",
    ),
    "a loss by broadcasting": (
        [
            ones(1 << 20, name="a"),
            method("unsqueeze", {"ref": "a"}, 1, name="b"),
            function("torch.nn.functional.mse_loss", {"ref": "a"}, {"ref": "b"}),
        ],
        LARGER,
    ),
    "distances of all pairs": (
        [
            ones(4096, 1, 64, name="a"),
            ones(1, 4096, 64, name="b"),
            function("torch.cosine_similarity", {"ref": "a"}, {"ref": "b"}, 2),
        ],
        LARGER,
    ),
    "an outer product in an equation": (
        [ones(1 << 20, name="z"), function("torch.functional.einsum", "i,j->ij", Z, Z)],
        LARGER,
    ),
    "a product of many batches": (
        [
            ones(1024, 1, 1, 4096, name="a"),
            ones(1, 1024, 4096, 1, name="b"),
            function("torch.matmul", {"ref": "a"}, {"ref": "b"}),
        ],
        LARGER,
    ),
    "a slow product": (
        [ones(4000, 4000, name="z"), function("torch.mm", Z, Z)],
        "a matrix product of .4000, 4000. and .4000, 4000. is too large",
    ),
    "an index of indices": (
        [
            ids(1 << 20, "a"),
            method("unsqueeze", {"ref": "a"}, 1, name="b"),
            function("torch.zeros", 1, 1 << 20, name="z"),
            function("operator.getitem", Z, {"tuple": [{"ref": "b"}, {"ref": "a"}]}),
        ],
        LARGER,
    ),
    "a mask and an index": (
        [
            ones(1 << 16, name="z"),
            function("operator.gt", Z, 0, name="m"),
            ids(1 << 10, "a"),
            method("unsqueeze", {"ref": "a"}, 1, name="b"),
            method("unsqueeze", Z, 1, name="w"),
            function("operator.getitem", {"ref": "w"}, {"tuple": [{"ref": "m"}, {"ref": "b"}]}),
        ],
        LARGER,
    ),
    "many parts": ([ones(1 << 20, name="z"), method("unbind", Z)], "at most 4096 parts"),
    "many parts of one": ([ones(1 << 20, name="z"), method("split", Z, 1)], "at most 4096 parts"),
    "the same tensor many times": (
        [ones(1 << 20, name="z"), function("torch.cat", [Z] * 100)],
        "what is joined or split is larger",
    ),
    "many dimensions": ([method("reshape", X, *[1] * 90, 3)], "more than 8 dimensions"),
    "many sizes": ([method("repeat", X, [1] * 50_000)], "more than 8 dimensions"),
    "many dimensions of a sum": ([method("sum", X, [0] * 99)], "a list has 99 entries"),
    # What stops a process that runs it.
    "the least integer by -1": (
        [
            function("torch.full", {"tuple": [3]}, LEAST, name="a"),
            function("operator.sub", {"ref": "a"}, 1, name="b"),
            function("torch.div", {"ref": "b"}, -1, rounding_mode="trunc"),
        ],
        "the least integer is divided by -1",
    ),
    "an interleaving that overflows": (
        [
            function("torch.full", {"tuple": [4]}, 1 << 62, name="a"),
            ids(4, "b"),
            function("torch.repeat_interleave", {"ref": "b"}, {"ref": "a"}),
        ],
        LARGER,
    ),
    "a roll by many": ([method("roll", X, [1] * 40_000, [0] * 40_000)], "a list has 40000 entries"),
    "a roll by the least integer": (
        [function("operator.sub", LEAST, 0, name="z"), method("roll", X, Z)],
        "node 'y' .roll.",
    ),
    # Numbers.
    "a large power": ([function("operator.pow", 10, 400)], "node 'y' .operator.pow."),
    "a complex power": ([function("operator.pow", -8, 0.5)], "node 'y' .operator.pow."),
    "an integer of many bits": ([function("operator.mul", 1 << 62, 4)], "larger than 64 bits"),
    "an integer by zero": ([ids(3, "z"), function("operator.floordiv", Z, 0)], "ZeroDivision"),
    "a number by zero": ([function("operator.truediv", 1, 0)], "division by zero"),
    "a list times a number": ([function("operator.mul", [1], 1 << 30)], "numbers are needed here"),
    "a size times a number": (
        [function("getattr", X, "shape", name="z"), function("operator.mul", Z, 1 << 30)],
        "numbers are needed here",
    ),
    # What does not fit.
    "an index that is not there": ([function("operator.getitem", X, 5)], "node 'y' .operator.geti"),
    "a slice backwards": (
        [function("operator.getitem", X, {"slice": [None, None, -1]})],
        "step must be greater than zero",
    ),
    "a dimension that is not there": ([function("torch.softmax", X, 2)], "Dimension out of range"),
    "classes of floats": ([function("torch._C._nn.one_hot", X, 9)], "node 'y'"),
    "an index of floats": ([function("operator.getitem", X, X)], "node 'y'"),
    "ids that are not there": (
        [
            ids(3, "a"),
            function("operator.sub", {"ref": "a"}, 99, name="b"),
            method("gather", X, 0, {"ref": "b"}),
        ],
        "index -99 is out of bounds",
    ),
    "the spectral norm": (
        [ones(2, 2, name="z"), function("torch._C._linalg.linalg_norm", Z, 2)],
        "by singular values is not built",
    ),
    # The loss.
    "a loss that is a number": ([method("numel", X)], "must be a scalar tensor, int came"),
    "a loss that is a size": ([function("getattr", X, "shape")], "must be a scalar tensor, Size"),
    "a loss of several numbers": ([function("torch.exp", X)], "must be a scalar tensor, .3,. came"),
    "a loss of one number in a list": ([method("sum", X, 0, True)], "scalar tensor, .1,. came"),
    "a loss of integers": ([ids(3, "z"), method("sum", Z)], "does not depend on logprobs"),
    "a loss of something else": (
        [function("torch.zeros", 2, name="z"), method("sum", Z)],
        "does not depend on logprobs",
    ),
    "a loss that is cut off": (
        [method("detach", X, name="z"), method("sum", Z)],
        "does not depend on logprobs",
    ),
    "an infinite loss": ([method("sum", X, name="z"), function("operator.truediv", Z, 0)], "-inf"),
    "a loss times NaN": (
        [method("sum", X, name="z"), function("operator.mul", Z, {"float": "nan"})],
        "datum 0: the loss is nan",
    ),
    "a logarithm of what is negative": (
        [method("log", X, name="z"), method("sum", Z)],
        "datum 0: the loss is nan",
    ),
    "a slope that is infinite": (
        [
            function("operator.sub", X, X, name="d"),
            method("sqrt", {"ref": "d"}, name="z"),
            method("sum", Z),
        ],
        r"the gradient of logprobs\[0\] is nan",
    ),
}
LOGP = np.array([-1.0, -2.0, -0.5], np.float32)


def evaluate(*arguments: Any, told: Callable[..., Any] = lambda *_: None) -> Evaluation:
    return finish(custom_loss.evaluate(*arguments), told)


@pytest.mark.parametrize("name", UNFIT)
def test_a_graph_that_does_not_fit_its_datums_is_refused(name: str) -> None:
    nodes, sentence = UNFIT[name]
    loss = custom_loss.check("mine", LOGPROBS, graph_of(*nodes))
    with pytest.raises((ValueError, FloatingPointError), match=sentence) as refusal:
        evaluate(loss, [LOGP], [()])
    assert "custom loss 'mine', datum 0" in told(refusal.value)


def chain(length: int) -> dict[str, Any]:
    names = ["x", *(f"n{number}" for number in range(length))]
    nodes = [
        function("torch.tanh", {"ref": before}, name=after) for before, after in pairwise(names)
    ]
    return graph_of(*nodes, function("torch.sum", {"ref": names[-1]}))


def test_what_a_loss_holds_and_does_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = custom_loss.check("mine", LOGPROBS, chain(8))
    data = [np.full(100, -1.0, np.float32)]
    monkeypatch.setattr(evaluation, "HELD_MAX", 500)
    with pytest.raises(ValueError, match=r"node 'n5' .*holds more than 500 numbers"):
        evaluate(loss, data, [()])
    monkeypatch.undo()
    monkeypatch.setattr(evaluation, "WORK_MAX", 12_000)
    with pytest.raises(ValueError, match=r"datum 1, node 'n1' .*more than 12000 numbers of work"):
        evaluate(loss, data * 2, [()] * 2)


def test_what_autograd_keeps_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number comes of each node, which keeps several tensors of all."""
    one = {"ref": "x"}
    nodes = [
        function("torch.nn.functional.poisson_nll_loss", one, one, name=f"n{n}", full=True)
        for n in range(9)
    ]
    total = [
        function("torch.add", {"ref": a}, {"ref": b}, name=f"t{n}")
        for n, (a, b) in enumerate([("n0", "n1"), *((f"t{n - 2}", f"n{n}") for n in range(2, 9))])
    ]
    nodes = [*nodes, *total, function("torch.sum", {"ref": "t7"})]
    loss = custom_loss.check("mine", LOGPROBS, graph_of(*nodes))
    data = [np.full(100, 1.0, np.float32)]
    assert np.isfinite(evaluate(loss, data, [()]).loss)
    monkeypatch.setattr(evaluation, "HELD_MAX", 1000)
    with pytest.raises(ValueError, match=r"node 'n\d' .*holds more than 1000 numbers"):
        evaluate(loss, data, [()])


def test_others_work_while_a_loss_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, seen = custom_loss.check("mine", LOGPROBS, chain(8)), []
    data = [np.full(100, -1.0, np.float32)] * 3
    wanted = evaluate(loss, data, [()] * 3)
    monkeypatch.setattr(evaluation, "MEANWHILE_SECONDS", -1.0)
    found = evaluate(loss, data, [()] * 3, told=lambda *now: seen.append(now))
    assert (found.loss, len(seen)) == (wanted.loss, 3 * 9)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1] == (2, 3)

    class Over(Exception):
        """What the worker raises when it ends."""

    def over(*_: int) -> None:
        raise Over

    with pytest.raises(Over):
        evaluate(loss, data, [()] * 3, told=over)


def test_a_graph_of_as_many_nodes_as_may_be() -> None:
    loss = custom_loss.check("mine", LOGPROBS, chain(custom_loss.NODES_MAX - 3))
    found = evaluate(loss, [LOGP], [()])
    assert -0.1 < found.loss < 0 and np.all(found.gradients[0] > 0)
    with pytest.raises(ValueError, match="a list of 1 to 5000 nodes"):
        custom_loss.check("mine", LOGPROBS, chain(custom_loss.NODES_MAX - 2))


def test_inputs_are_what_the_next_datum_finds() -> None:
    """A view of an input, data without its gradient: nothing changes what came."""
    nodes = [function("getattr", X, "data", name="z"), function("operator.mul", Z, X, name="y")]
    loss = custom_loss.check("mine", LOGPROBS, graph_of(*nodes, SUMMED, loss="s"))
    logp = LOGP.copy()
    found = evaluate(loss, [logp, logp], [(), ()])
    np.testing.assert_array_equal(logp, LOGP)
    np.testing.assert_array_equal(*found.gradients)
    assert found.loss == 2 * float((LOGP * LOGP).sum())


def test_a_gradient_of_zeros_that_torch_does_not_store() -> None:
    nodes = [method("sgn", X), SUMMED]
    loss = custom_loss.check("mine", LOGPROBS, graph_of(*nodes, loss="s"))
    np.testing.assert_array_equal(evaluate(loss, [LOGP], [()]).gradients[0], np.zeros(3))


def test_a_machine_without_memory_is_not_the_clients_fault() -> None:
    """Torch tells of it as of any other mistake."""

    def fails(input: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    loss = custom_loss.check("mine", LOGPROBS, graph_of(method("sum", X)))
    node = replace(loss.nodes[0], run=fails)
    with pytest.raises(MemoryError, match=r"datum 0, node 'y' \(sum\): there is not enough memory"):
        evaluate(replace(loss, nodes=(node,)), [LOGP], [()])


def random_graph(rng: random.Random) -> dict[str, Any]:
    """Functions by their names on whatever: mostly nonsense."""
    numbers = [0, 1, -1, 2, 0.5, 1e30, True, None, LARGE, {"float": "nan"}, {"ellipsis": True}]
    known, nodes = ["x"], []
    for number in range(rng.randrange(1, 8)):

        def value() -> Any:
            return rng.choice([{"ref": rng.choice(known)}, rng.choice(numbers)])

        args = [value() for _ in range(rng.choice([0, 0, 1, 1, 2]))]
        if rng.random() < 0.2:
            args = [{rng.choice(["tuple", "slice"]): [value() for _ in range(3)]}]
        op = rng.choice(["call_method", "call_method", "call_function"])
        held = functions.METHODS if op == "call_method" else functions.FUNCTIONS
        name = f"n{number}"
        nodes.append(node(op, name, rng.choice(sorted(held)), {"ref": rng.choice(known)}, *args))
        known.append(name)
    return graph_of(*nodes, method("sum", {"ref": known[-1]}))


@pytest.mark.filterwarnings("ignore")
def test_no_graph_ends_otherwise() -> None:
    rng, ends = random.Random(0), Counter()
    for _ in range(2000):
        try:
            evaluate(custom_loss.check("mine", LOGPROBS, random_graph(rng)), [LOGP], [()])
            ends["value"] += 1
        except (ValueError, FloatingPointError) as refusal:
            told(refusal)
            ends[type(refusal)] += 1
    assert len(ends) >= 3 and min(ends["value"], ends[ValueError]) > 30


def test_many_points_are_refused_where_torch_forgot_that_linspace_makes_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers replaces torch.linspace while it loads a model: if torch lists what makes
    tensors just then, torch.device("meta") no longer knows linspace."""
    known = torch.utils._device._device_constructors()
    left = {function for function in known if function is not torch.linspace}
    monkeypatch.setattr(torch.utils._device, "_device_constructors", lambda: left)
    nodes, sentence = UNFIT["many points"]
    with pytest.raises(ValueError, match=sentence):
        evaluate(custom_loss.check("mine", LOGPROBS, graph_of(*nodes)), [LOGP], [()])


def test_a_server_answers_them_all(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each with a sentence, as the client's mistake; then the run has no gradient of any."""
    with server.service_client() as client:
        run = client.create_lora_training_client("tiny", rank=4, seed=1).result()
        session = client.holder.get_session_id()
        wire, numbers = Wire(server.url), count()

        def upload(graph: Any) -> dict[str, Any]:
            body = {"session_id": session, "custom_loss_seq_id": next(numbers), "name": "mine"}
            return wire.result(
                wire.post("/create_custom_loss", **body, inputs=LOGPROBS, graph=graph)
            )

        for name, (graph, sentence) in UNCHECKED.items():
            if name == "many arguments":  # its body is refused before it is parsed
                with pytest.raises(httpx.HTTPStatusError, match="413"):
                    upload(graph)
                continue
            answer = upload(graph)
            assert answer["category"] == "user" and re.search(sentence, answer["error"]), answer
        data = [make_datum([5, 6, 7], [6, 7, 8])]
        for nodes, sentence in UNFIT.values():
            loss_id = upload(graph_of(*nodes))["loss_id"]
            with pytest.raises(tinker.RequestFailedError, match=sentence) as refusal:
                run.forward_backward(data, "custom", {"loss_id": loss_id}).result(timeout=60)
            assert refusal.value.category == tinker.types.RequestErrorCategory.User
        step = run.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        assert step.metrics["grad_norm"] == 0
    ours = [record for record in caplog.records if record.name.startswith("tinsmith")]
    (warning,) = [record.getMessage() for record in ours]
    assert "step 1 had no gradient" in warning
