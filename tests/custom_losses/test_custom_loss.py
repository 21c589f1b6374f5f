"""Custom losses that the server evaluates give what the SDK gives where it evaluates them: every
function of the table, whole losses, and calls of the SDK's own client with the flag on and off.
Graphs that are refused are in test_hostile_graphs.py."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from conftest import Wire, logprobs, make_datum
from support.loss_cases import CASES, Case
from support.loss_graphs import LOGPROBS, X, graph_of, method
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from tinsmith.custom_losses import allowed_functions, custom_loss
from tinsmith.custom_losses.custom_loss import evaluate
from tinsmith.custom_losses.graph import CustomLoss, Evaluation
from tinsmith.server.routes import training
from tinsmith.system.steps import finish

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


def by_client(
    handle: LossHandle, arrays: list[np.ndarray]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """What the SDK makes of the same graph where it evaluates it itself."""
    x, *others = (torch.tensor(np.asarray(array)) for array in arrays)
    x.requires_grad_()
    loss, metrics = handle.graph(x, *others)
    loss.backward()
    assert x.grad is not None
    return float(loss.detach()), x.grad.numpy(), {k: float(v.detach()) for k, v in metrics.items()}


def by_us(loss: CustomLoss, *datums: list[np.ndarray]) -> Evaluation:
    return finish(evaluate(loss, [one[0] for one in datums], [one[1:] for one in datums]))


@pytest.mark.parametrize("name", CASES)
def test_every_function_gives_what_the_client_would(name: str) -> None:
    handle = traced(CASES[name])
    for seed in range(3):
        wanted, gradient, metrics = by_client(handle, data(seed))
        found = by_us(checked(handle), data(seed))
        assert found.loss == wanted and math.isfinite(wanted)
        assert found.metrics == metrics
        np.testing.assert_array_equal(found.gradients[0], gradient)


def test_the_cases_use_the_whole_table() -> None:
    nodes = [node for case in CASES.values() for node in checked(traced(case)).nodes]
    said = {node.says.rpartition(".")[2] for node in nodes}
    bare = {name.removeprefix("special_").removeprefix("linalg_") for name in said}
    bare |= {"logsigmoid"} if "log_sigmoid" in bare else set()  # one function by two names
    assert not {*allowed_functions.GROUP_OF, *allowed_functions.OPERATORS} - bare


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
def test_a_whole_loss_gives_what_the_client_would(name: str) -> None:
    fn, ranks, make = WHOLE[name]
    handle = trace_loss(fn, ranks, "session")
    datums = [make(np.random.default_rng(seed)) for seed in range(4)]
    wanted = [by_client(handle, one) for one in datums]
    found = by_us(checked(handle), *datums)
    assert found.loss == pytest.approx(sum(item[0] for item in wanted), rel=1e-12)
    for ours, (_, gradient, _) in zip(found.gradients, wanted, strict=True):
        np.testing.assert_array_equal(ours, gradient)
    for key, value in found.metrics.items():
        total = sum(item[2][key] for item in wanted)
        assert value == pytest.approx(total / 4 if key.endswith(":mean") else total, rel=1e-12)


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
            np.testing.assert_array_equal(left, right)
        wanted.metrics.pop("surrogate_loss:sum")
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-6)
        steps = [
            one.optim_step(tinker.AdamParams(learning_rate=0.01)).result().metrics
            for one in (ours, theirs)
        ]
        assert steps[0] == steps[1]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as where it is not installed
from tinsmith.cli.commands import main
sys.exit(main())
"""


def test_where_the_server_has_no_torch_the_sdk_evaluates(
    client: tinker.ServiceClient, tiny_model_dir: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", f"tiny={tiny_model_dir}"]
    command += ["--port", "0", "--device", "cpu", "--threads", "1"]
    uploaded = client.create_custom_loss(grpo, GRPO_RANKS).result()
    wanted = trainer(client).forward_backward_custom(policy_data(), uploaded).result()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with tinker.ServiceClient(base_url=url, api_key="tml-local") as other:
                handle = other.create_custom_loss(grpo, GRPO_RANKS).result()
                assert handle.loss_id is None
                found = trainer(other).forward_backward_custom(policy_data(), handle).result()
                assert found.metrics.pop("surrogate_loss:sum")
                assert found.metrics == pytest.approx(wanted.metrics, rel=1e-6)
                wire, session = Wire(url), other.holder.get_session_id()
                body = {"session_id": session, "custom_loss_seq_id": 0, "name": "mine"}
                graph = encode_graph(handle).model_dump(mode="json")
                inputs = [one.model_dump() for one in handle.inputs]
                answer = wire.result(
                    wire.post("/create_custom_loss", **body, inputs=inputs, graph=graph)
                )
                assert answer["error"].startswith("this server has no custom losses: torch can't")
        finally:
            process.terminate()


STARTED = """
import json, sys
import httpx
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig
models, folder = {"tiny": sys.argv[1]}, sys.argv[2]
with Backend(ServerConfig(models, checkpoints=folder, device="cpu", threads=1)) as backend:
    http = httpx.Client(base_url=backend.url + "/api/v1", timeout=60)
    post = lambda path, **body: http.post(path, json=body).json()
    config = post("/client/config", sdk_version="0")
    before = "torch" in sys.modules
    session = post("/create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
    body = {"session_id": session, "custom_loss_seq_id": 0, "name": "mine", **json.load(sys.stdin)}
    loss = post("/create_custom_loss", **body)["request_id"]
    found = post("/retrieve_future", request_id=loss)
    print(config["custom_loss_server_side"], before, "torch" in sys.modules, found["loss_id"])
"""


def test_the_first_graph_imports_torch(tiny_model_dir: Path, tmp_path: Path) -> None:
    graph = graph_of(method("sum", X))
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(tiny_model_dir), str(tmp_path)],
        input=json.dumps({"inputs": LOGPROBS, "graph": graph}),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config, before, after, loss = done.stdout.split()
    assert (config, before, after) == ("True", "False", "True")
    assert loss.endswith(":loss:0")


def test_torch_keeps_its_threads_elsewhere() -> None:
    """One for losses, in their own threads; the others have what they had, and so do new ones."""
    loss, logp = checked(trace_loss(smoothed, {"logprobs": 1, "weights": 1}, "s")), np.zeros(3)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        try:
            torch.set_num_threads(3)
            one.submit(finish, evaluate(loss, [logp.astype(np.float32)], [[logp]])).result()
            counts = [pool.submit(torch.get_num_threads).result() for pool in (one, other)]
            assert (*counts, torch.get_num_threads()) == (1, 3, 3)
        finally:
            torch.set_num_threads(before)


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
        total = torch.linalg.matrix_exp(logprobs[:, None] * weights).sum()
        return total, {}

    with pytest.raises(tinker.RequestFailedError, match=r"node '.*matrix_exp.* is not built"):
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


def test_a_session_has_so_many_losses(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LOSSES_MAX", 1)
    ranks = {"logprobs": 2, "weights": 2}
    assert client.create_custom_loss(smoothed, ranks).result().loss_id is not None
    with pytest.raises(tinker.RequestFailedError, match="a session has at most 1 custom losses"):
        client.create_custom_loss(brier, ranks).result()


def test_a_loss_belongs_to_its_session(client: tinker.ServiceClient, server: Any) -> None:
    handle = client.create_custom_loss(smoothed, {"logprobs": 2, "weights": 2}).result()
    data = [make_datum([5, 6], [[3, 4], [5, 6]], weights=[[1, 1], [1, 1]])]
    with server.service_client() as other:
        request = trainer(other).forward_backward(data, "custom", {"loss_id": handle.loss_id})
        with pytest.raises(tinker.RequestFailedError, match="made in this session"):
            request.result()
