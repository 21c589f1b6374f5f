"""Custom losses that the server evaluates: every operation and whole losses against torch, graphs
that must be refused, and the SDK's own client with the flag on."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from conftest import logprobs, make_datum
from loss_cases import CASES, Case
from models import error
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from tinsmith.losses import custom_loss
from tinsmith.losses.custom_loss import CustomLoss, Evaluation, evaluate

RANKS = {"logprobs": 1, "v": 1, "ids": 1, "m": 2, "c": 0}


def spread(y: torch.Tensor) -> torch.Tensor:
    """A scalar that every element of y counts in differently, whatever its type."""
    flat = y.reshape(-1).double()
    return (flat * (torch.arange(flat.shape[0]) + 1)).sum()


def checked(handle: LossHandle) -> CustomLoss:
    """The loss as the server would take it from the wire."""
    graph = encode_graph(handle).model_dump(mode="json")
    return custom_loss.check(handle.name, [one.model_dump() for one in handle.inputs], graph)


def traced(case: Case, ranks: dict[str, int] = RANKS) -> LossHandle:
    """A case of (logprobs, v, ids, m, c) as the SDK traces it."""

    def loss(logprobs, v, ids, m, c):
        y = case(logprobs, v, ids, m, c, m * logprobs[:, None])
        parts = y if isinstance(y, tuple) else (y,)
        total = sum(spread(part) for part in parts)
        return total, {"custom/y:sum": total}

    return trace_loss(loss, ranks, "session")


def data(seed: int = 0, rows: int = 6, columns: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.normal(-0.7, 1.0, rows).astype(np.float32),
        rng.uniform(0.2, 1.8, rows).astype(np.float32),
        rng.integers(0, rows, rows),
        rng.normal(0, 1, (rows, columns)).astype(np.float32),
        np.float32(0.3),
    ]


def by_torch(
    handle: LossHandle, arrays: list[np.ndarray], kind: torch.dtype = torch.float64
) -> tuple[float, np.ndarray, dict[str, float]]:
    """What torch makes of the same graph."""
    x, *others = (torch.tensor(np.asarray(array)) for array in arrays)
    x = x.to(kind).requires_grad_()
    others = [one.to(kind) if one.is_floating_point() else one for one in others]
    loss, metrics = handle.graph(x, *others)
    loss.backward()
    assert x.grad is not None
    return float(loss.detach()), x.grad.numpy(), {k: float(v.detach()) for k, v in metrics.items()}


def by_us(loss: CustomLoss, *datums: list[np.ndarray]) -> Evaluation:
    return evaluate(loss, [one[0] for one in datums], [one[1:] for one in datums])


def compare(handle: LossHandle, arrays: list[np.ndarray]) -> None:
    wanted, gradient, metrics = by_torch(handle, arrays)
    found = by_us(checked(handle), arrays)
    assert found.loss == pytest.approx(wanted, rel=1e-11, abs=1e-11)
    for key, value in metrics.items():
        assert found.metrics[key] == pytest.approx(value, rel=1e-11, abs=1e-11)
    assert found.gradients[0].shape == gradient.shape
    np.testing.assert_allclose(found.gradients[0], gradient, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_equals_torch(name: str) -> None:
    handle = traced(CASES[name])
    for seed in range(3):
        compare(handle, data(seed))


def test_the_cases_use_every_operation() -> None:
    nodes = [node for case in CASES.values() for node in checked(traced(case)).nodes]
    runs = {node.run for node in nodes}
    said = {
        node.says.rpartition(".")[2].removeprefix("special_").removeprefix("linalg_")
        for node in nodes
    }
    missing = {n for n, run in custom_loss.OPS.items() if n not in said and run not in runs}
    assert not missing


# ---- whole losses ----


def reverse_kl(logprobs, weights):
    """The cookbook's reverse_kl_custom_loss (distillation/sdft.py) of one datum."""
    mask = weights > 0
    position = mask.any(dim=-1).float()
    teacher = torch.where(mask, torch.log(weights.clamp(min=1e-30)), torch.zeros_like(weights))
    masked = torch.where(mask, logprobs, torch.full_like(logprobs, float("-inf")))
    log_p = torch.nan_to_num(torch.log_softmax(masked, dim=-1), nan=0.0, neginf=0.0)
    p = log_p.exp()
    each = p * (log_p - teacher).detach() * mask.float()
    loss = (each.sum(dim=-1) * position).sum()
    entropy = -(p * log_p * mask.float()).sum(dim=-1)
    return loss, {
        "custom/kl:sum": ((p * (log_p - teacher) * mask.float()).sum(-1) * position).sum().detach(),
        "custom/entropy:mean": (entropy * position).sum(),
        "custom/positions:sum": position.sum(),
    }


def brier(logprobs, weights):
    """The cookbook's probability_loss(brier_score_loss) of one datum (recipes/decisions)."""
    target = weights[-1].float()
    choice = torch.softmax(logprobs[-1].float(), dim=-1)
    right = choice.argmax() == target.argmax()
    return ((choice - target) ** 2).sum(), {
        "custom/target_prob:mean": (choice * target).sum().detach(),
        "custom/accuracy:mean": right.float(),
    }


def dpo(logprobs, reference, sign, weights):
    """A side of compute_dpo_loss (preference/train_dpo.py), with the other side's ratio in it."""
    ratio = torch.dot(logprobs.float(), weights) - torch.dot(reference, weights)
    loss = -F.logsigmoid(0.1 * sign * ratio)
    return loss, {"custom/reward:mean": 0.1 * ratio.detach()}


def grpo(logprobs, old, reference, advantages, mask):
    """PPO's clipped term with a penalty, k3's estimate of the KL divergence to a reference."""
    ratio = torch.exp(logprobs - old)
    term = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    gap = reference - logprobs
    penalty = torch.exp(gap) - gap - 1
    loss = -((term - 0.05 * penalty) * mask).sum() / mask.sum().clamp(min=1)
    with torch.no_grad():
        clipped = ((ratio < 0.8) | (ratio > 1.2)).float() * mask
    return loss, {
        "custom/clipped:mean": clipped.sum() / mask.sum(),
        "custom/kl:sum": (penalty * mask).sum(),
    }


def smoothed(logprobs, weights):
    """The SDK's own example, with label smoothing over K targets."""
    loss = -(logprobs * weights).sum()
    loss = loss - 0.1 * logprobs.mean(dim=-1).sum() / logprobs.shape[0]
    return loss, {"custom/neg_ll:sum": loss}


def weights_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Probabilities, with rows and slots of zero."""
    raw = rng.random(shape) * (rng.random(shape) > 0.3) * (rng.random(shape[0]) > 0.2)[:, None]
    return (raw / np.maximum(raw.sum(-1, keepdims=True), 1e-9)).astype(np.float32)


WHOLE: dict[str, tuple[Any, dict[str, int], Callable[[np.random.Generator], list[np.ndarray]]]] = {
    "reverse KL": (
        reverse_kl,
        {"logprobs": 2, "weights": 2},
        lambda r: [r.normal(-4, 2, (9, 5)).astype(np.float32), weights_of(r, (9, 5))],
    ),
    "Brier score": (
        brier,
        {"logprobs": 2, "weights": 2},
        lambda r: [r.normal(-4, 2, (7, 3)).astype(np.float32), weights_of(r, (7, 3))],
    ),
    "DPO": (
        dpo,
        {"logprobs": 1, "reference": 1, "sign": 0, "weights": 1},
        lambda r: [
            *r.normal(-2, 1, (2, 8)).astype(np.float32),
            np.float32(-1),
            (r.random(8) > 0.4).astype(np.float32),
        ],
    ),
    "GRPO": (
        grpo,
        {"logprobs": 1, "old": 1, "reference": 1, "advantages": 1, "mask": 1},
        lambda r: [
            *r.normal(-2, 0.5, (3, 12)).astype(np.float32),
            r.normal(0, 1, 12).astype(np.float32),
            (r.random(12) > 0.4).astype(np.float32),
        ],
    ),
    "label smoothing": (
        smoothed,
        {"logprobs": 2, "weights": 2},
        lambda r: [r.normal(-4, 2, (6, 4)).astype(np.float32), weights_of(r, (6, 4))],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_losses_equal_torch(name: str) -> None:
    fn, ranks, make = WHOLE[name]
    handle = trace_loss(fn, ranks, "session")
    datums = [make(np.random.default_rng(seed)) for seed in range(4)]
    wanted = [by_torch(handle, one, torch.float32) for one in datums]
    found = by_us(checked(handle), *datums)
    assert found.loss == pytest.approx(sum(item[0] for item in wanted), rel=1e-5)
    for ours, (_, gradient, _) in zip(found.gradients, wanted, strict=True):
        assert error(ours, gradient) < 1e-6
    for key, value in found.metrics.items():
        total = sum(item[2][key] for item in wanted)
        assert value == pytest.approx(total / 4 if key.endswith(":mean") else total, rel=1e-5)


# ---- what is refused ----


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph_of(*nodes: dict[str, Any], loss: str = "y") -> dict[str, Any]:
    """A graph of nodes on logprobs `x`, which returns one of them."""
    result = {"tuple": [{"ref": loss}, {"dict": {}}]}
    ends = node("placeholder", "x", "logprobs"), node("output", "output", "output", result)
    return {"format": 1, "nodes": [ends[0], *nodes, ends[1]]}


X, Y = {"ref": "x"}, {"ref": "y"}
LOGPROBS = [{"name": "logprobs", "rank": 1}]


def function(target: str, *args: Any, name: str = "y", **kwargs: Any) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown function": (graph_of(function("os.system", "ls")), r"os.system is not built"),
    "eval": (graph_of(function("builtins.eval", "1")), r"builtins.eval is not built"),
    "an attribute of a module": (graph_of(function("torch.os.system", "ls")), "is not built"),
    "a decomposition": (graph_of(function("torch.linalg.svd", X)), "torch.linalg.svd is not built"),
    "a random number": (graph_of(function("torch.rand_like", X)), "torch.rand_like is not built"),
    "in place": (
        graph_of(node("call_method", "y", "mul_", X, 2)),
        "mul_ changes a tensor in place: use the one without _",
    ),
    "an assignment": (graph_of(function("operator.setitem", X, 0, 1)), "is not built"),
    "a private method": (graph_of(node("call_method", "y", "__class__", X)), "is not built"),
    "a private attribute": (
        graph_of(function("getattr", X, "__class__"), loss="y"),
        "the attribute '__class__' is not built",
    ),
    "a module's attribute": (graph_of(node("get_attr", "y", "weight")), "is a 'get_attr'"),
    "a module": (graph_of(node("call_module", "y", "linear", X)), "is a 'call_module'"),
    "bfloat16": (
        graph_of(node("call_method", "y", "to", X, {"dtype": "bfloat16"})),
        "the type 'bfloat16' is not built",
    ),
    "a keyword that is unknown": (
        graph_of(function("torch.softmax", X, 0, temperature=2)),
        "unexpected keyword argument 'temperature'",
    ),
    "an idle keyword that is not": (
        graph_of(function("torch.nn.functional.relu", X, inplace=True)),
        "unexpected keyword argument 'inplace'",
    ),
    "too many arguments": (graph_of(function("torch.exp", X, 2)), "too many positional"),
    "a cycle": (
        graph_of(function("torch.exp", {"ref": "z"}), function("torch.exp", Y, name="z")),
        "refers to 'z', which is no node before it",
    ),
    "itself": (graph_of(function("torch.exp", Y)), "refers to 'y', which is no node before it"),
    "a name twice": (
        graph_of(function("torch.exp", X), function("torch.exp", X)),
        "two nodes are called 'y'",
    ),
    "no output": ({"nodes": graph_of(function("torch.exp", X))["nodes"][:-1]}, "return"),
    "an output in between": (
        graph_of(
            node("output", "o", "output", {"tuple": [X, {"dict": {}}]}), function("torch.exp", X)
        ),
        "is a 'output'",
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
    "a node that is none": ({"nodes": [7]}, "node 0 is no object"),
    "a node without a name": ({"nodes": [{"op": "placeholder"}]}, "node 0 needs an op, a name"),
    "a strange argument": (graph_of(function("torch.exp", {"a": 1, "b": 2})), "is no argument"),
    "an unknown tag": (graph_of(function("torch.exp", {"code": "1"})), "'code' is no kind"),
    "a huge integer": (graph_of(function("operator.mul", X, 10**30)), "is no argument"),
    "a deep list": (graph_of(function("torch.cat", json.loads("[" * 20 + "]" * 20))), "8 levels"),
    "many arguments": (graph_of(function("torch.cat", [X] * 200_000)), "more than 100000"),
    "an inner einsum": (graph_of(function("torch.einsum", "ii->i", X)), "no index twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_can_not_be_used_is_told_of(name: str) -> None:
    graph, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        custom_loss.check("mine", LOGPROBS, graph)


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [{"name": "weights", "rank": 1}],
        [{"name": "logprobs", "rank": 0}],
        [{"name": "logprobs", "rank": 3}],
        [{"name": "logprobs", "rank": 1}] * 2,
        [{"name": "logprobs", "rank": 1}, {"name": "__class__", "rank": 1}],
        [{"name": "logprobs", "rank": True}],
        [7],
        LOGPROBS * 17,
    ],
)
def test_inputs_that_are_none_are_refused(inputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="input"):
        custom_loss.check("mine", inputs, graph_of(function("torch.sum", X)))


SUMMED = function("torch.sum", Y, name="s")
LARGE = 1 << 40


@pytest.mark.parametrize(
    ("nodes", "error", "sentence"),
    [
        ([function("torch.ones", LARGE)], ValueError, "node 'y' .torch.ones.: a result of shape"),
        ([node("call_method", "y", "expand", X, LARGE, 6)], ValueError, "larger than 16777216"),
        ([node("call_method", "y", "repeat", X, LARGE)], ValueError, "larger than 16777216"),
        ([function("torch.repeat_interleave", X, LARGE)], ValueError, "larger than 16777216"),
        ([function("torch.arange", LARGE)], ValueError, "larger than 16777216"),
        ([function("torch.nn.functional.pad", X, [0, LARGE])], ValueError, "larger than 16777216"),
        ([function("torch._C._nn.one_hot", X, LARGE)], ValueError, "needs integers"),
        (
            [
                function("torch.arange", 1 << 20, name="a"),
                node("call_method", "b", "unsqueeze", {"ref": "a"}, 1),
                function("operator.mul", {"ref": "a"}, {"ref": "b"}),
            ],
            ValueError,
            "a result of shape .1048576, 1048576. is larger",
        ),
        (
            [
                function("torch.arange", 1 << 20, name="a"),
                node("call_method", "b", "unsqueeze", {"ref": "a"}, 1),
                function("torch.zeros", 1 << 20, name="z"),
                node("call_method", "y", "reshape", {"ref": "z"}, 1, 1 << 20),
                function(
                    "operator.getitem",
                    {"ref": "y"},
                    {"tuple": [{"ref": "b"}, {"ref": "a"}]},
                    name="g",
                ),
            ],
            ValueError,
            "node 'g'.*is larger than",
        ),
        ([function("operator.pow", 10, 400)], ValueError, "node 'y'"),
        ([function("torch.exp", X)], ValueError, "must be a scalar tensor, .3,. came"),
        ([function("torch.zeros", 2), SUMMED], ValueError, "does not depend on logprobs"),
        (
            [node("call_method", "y", "detach", X), SUMMED],
            ValueError,
            "does not depend on logprobs",
        ),
        ([function("torch.log", X), SUMMED], FloatingPointError, "datum 0: the loss is nan"),
        (
            [
                function("operator.sub", X, X, name="d"),
                function("torch.sqrt", {"ref": "d"}),
                SUMMED,
            ],
            FloatingPointError,
            r"the gradient of logprobs\[0\] is nan",
        ),
        ([function("operator.getitem", X, 5)], ValueError, "node 'y' .operator.getitem."),
        ([function("torch.softmax", X, 2)], ValueError, "there is no dimension 2"),
    ],
)
def test_what_does_not_fit_the_datums_is_told_of(
    nodes: list[dict[str, Any]], error: type[Exception], sentence: str
) -> None:
    loss = custom_loss.check("mine", LOGPROBS, graph_of(*nodes, loss=nodes[-1]["name"]))
    with pytest.raises(error, match=sentence):
        evaluate(loss, [np.array([-1.0, -2.0, -0.5], np.float32)], [()])


def test_what_a_loss_holds_and_does_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{number}" for number in range(8)]
    nodes = [
        function("torch.tanh", {"ref": before}, name=after)
        for before, after in zip(["x", *names[:-1]], names, strict=True)
    ]
    loss = custom_loss.check(
        "mine", LOGPROBS, graph_of(*nodes, function("torch.sum", {"ref": "n7"}))
    )
    data = [np.full(100, -1.0, np.float32)]
    monkeypatch.setattr(custom_loss, "HELD_MAX", 500)
    with pytest.raises(ValueError, match=r"node 'n5' .*holds more than 500 numbers"):
        evaluate(loss, data, [()])
    monkeypatch.undo()
    monkeypatch.setattr(custom_loss, "WORK_MAX", 2000)
    with pytest.raises(ValueError, match=r"datum 1, node 'n1' .*more than 2000 numbers of work"):
        evaluate(loss, data * 2, [()] * 2)


def random_graph(rng: random.Random) -> dict[str, Any]:
    """Operations by their names on whatever: mostly nonsense."""
    numbers = [0, 1, -1, 2, 0.5, 1e30, True, None, 1 << 40, {"float": "nan"}, {"ellipsis": True}]
    known, nodes = ["x"], []
    for number in range(rng.randrange(1, 8)):

        def value() -> Any:
            return rng.choice([{"ref": rng.choice(known)}, rng.choice(numbers)])

        args = [value() for _ in range(rng.choice([0, 0, 1, 1, 2]))]
        if rng.random() < 0.2:
            args = [{rng.choice(["tuple", "slice"]): [value() for _ in range(3)]}]
        target = rng.choice(sorted(custom_loss.OPS))
        name = f"n{number}"
        nodes.append(node("call_method", name, target, {"ref": rng.choice(known)}, *args))
        known.append(name)
    return graph_of(*nodes, node("call_method", "y", "sum", {"ref": known[-1]}))


def test_no_graph_ends_otherwise() -> None:
    rng, ends = random.Random(0), Counter()
    logp = np.array([-1.0, -2.0, -0.5], np.float32)
    for _ in range(2000):
        try:
            evaluate(custom_loss.check("mine", LOGPROBS, random_graph(rng)), [logp], [()])
            ends["value"] += 1
        except (ValueError, FloatingPointError) as refusal:
            assert str(refusal)
            ends[type(refusal)] += 1
    assert len(ends) >= 3 and min(ends["value"], ends[ValueError]) > 50


# ---- through the SDK ----


@pytest.fixture
def client(server: Any) -> Iterator[tinker.ServiceClient]:
    """The SDK's client."""
    with server.service_client() as made:
        yield made


def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=4, seed=1).result()


def policy_data() -> list[tinker.Datum]:
    rng = np.random.default_rng(0)
    return [
        make_datum(
            rng.integers(3, 200, length).tolist(),
            rng.integers(3, 200, length),
            old=rng.normal(-5.7, 0.1, length),
            reference=rng.normal(-5.7, 0.3, length),
            advantages=rng.normal(0, 1, length),
            mask=np.arange(length) > 1,
        )
        for length in (9, 4, 17)
    ]


GRPO_RANKS = {"logprobs": 1, "old": 1, "reference": 1, "advantages": 1, "mask": 1}


def test_the_server_gives_what_the_client_would(client: tinker.ServiceClient) -> None:
    handle = client.create_custom_loss(grpo, GRPO_RANKS).result()
    assert handle.loss_id is not None
    local = replace(handle, loss_id=None)
    ours, theirs = trainer(client), trainer(client)
    for _ in range(3):
        found = ours.forward_backward_custom(policy_data(), handle).result()
        wanted = theirs.forward_backward_custom(policy_data(), local).result()
        for left, right in zip(logprobs(found), logprobs(wanted), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)
        wanted.metrics.pop("surrogate_loss:sum")
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)
        steps = [
            one.optim_step(tinker.AdamParams(learning_rate=0.01)).result().metrics
            for one in (ours, theirs)
        ]
        assert steps[0] == pytest.approx(steps[1], rel=1e-4)


def test_several_targets_and_a_call_of_two_chunks(client: tinker.ServiceClient) -> None:
    handle = client.create_custom_loss(smoothed, {"logprobs": 2, "weights": 2}).result()
    rng = np.random.default_rng(0)
    data = [
        make_datum([5, number % 200 + 3], rng.integers(3, 200, (2, 3)), weights=rng.random((2, 3)))
        for number in range(1100)
    ]
    run = trainer(client)
    found = run.forward_backward_custom(data, handle).result()
    assert len(found.loss_fn_outputs) == 1100
    assert found.metrics["custom/neg_ll:sum"] == pytest.approx(found.metrics["loss:sum"])
    wanted = sum(
        float(smoothed(torch.tensor(part), one.loss_fn_inputs["weights"].to_torch())[0])
        for part, one in zip(logprobs(found), data, strict=True)
    )
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)


def test_a_loss_that_is_refused_names_its_node(client: tinker.ServiceClient) -> None:
    def loss(logprobs, weights):
        total = torch.special.gammaln(logprobs * weights).sum()
        return total, {}

    with pytest.raises(tinker.RequestFailedError, match=r"node '.*gammaln.* is not built"):
        client.create_custom_loss(loss, {"logprobs": 1, "weights": 1}).result()


def test_a_loss_that_fails_adds_nothing(client: tinker.ServiceClient) -> None:
    def loss(logprobs, weights):
        return (logprobs * weights).log().sum(), {}

    handle = client.create_custom_loss(loss, {"logprobs": 1, "weights": 1}).result()
    run = trainer(client)
    data = [make_datum([5, 6], [6, 7], weights=[1, -1])]
    failing = run.forward_backward_custom(data, handle)
    with pytest.raises(tinker.RequestFailedError, match="'loss', datum 0: the loss is nan"):
        failing.result()
    step = run.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    assert step.metrics["grad_norm"] == 0
    good = [make_datum([5, 6], [6, 7], weights=[-1, -1])]
    assert run.forward_backward_custom(good, handle).result().metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("config", "data", "sentence"),
    [
        ({}, {"weights": [1, 1]}, "custom needs the loss_id of a loss"),
        ({"loss_id": "s-1:loss:0"}, {"weights": [1, 1]}, "in this session, 's-1:loss:0' came"),
        ({"loss_id": None}, {}, "datum 0: custom loss 'smoothed' takes weights; there came"),
        ({"loss_id": None}, {"weights": [1, 1]}, "weights has rank 1, but .* declared 2"),
        ({"loss_id": None}, {"targets": [3, 4]}, "declared logprobs with rank 2"),
    ],
)
def test_a_request_that_does_not_fit_its_loss(
    client: tinker.ServiceClient, config: dict[str, Any], data: dict[str, Any], sentence: str
) -> None:
    handle = client.create_custom_loss(smoothed, {"logprobs": 2, "weights": 2}).result()
    run = trainer(client)
    inputs = dict(data)
    targets = inputs.pop("targets", [[3, 4], [5, 6]])
    given = {key: handle.loss_id if value is None else value for key, value in config.items()}
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        run.forward_backward([make_datum([5, 6], targets, **inputs)], "custom", given).result()


def test_a_loss_belongs_to_its_session(client: tinker.ServiceClient, server: Any) -> None:
    handle = client.create_custom_loss(smoothed, {"logprobs": 2, "weights": 2}).result()
    data = [make_datum([5, 6], [[3, 4], [5, 6]], weights=[[1, 1], [1, 1]])]
    with server.service_client() as other:
        request = trainer(other).forward_backward(data, "custom", {"loss_id": handle.loss_id})
        with pytest.raises(tinker.RequestFailedError, match="made in this session"):
            request.result()
