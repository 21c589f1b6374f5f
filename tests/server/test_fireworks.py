"""Fireworks' training SDK against the server: its requests as it writes them, by hand.

`tools/peers/fireworks_steps.py` does the same with the SDK itself.
"""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from conftest import Wire, logprobs, make_datum
from test_json_calls import PLAIN, body, values

SERVERLESS = "/training/v1/serverless"


class Fireworks(Wire):
    """A client of one session, whose calls take their turns."""

    def __init__(self, url: str, prefix: str = "", key: str = "fw-local"):
        super().__init__(url + prefix, key)
        session = self.post("/create_session", tags=[], user_metadata={}, sdk_version="0.23.0")
        self.session = session["session_id"]
        self.models = 0
        self.turns: dict[str, int] = {}

    def create(self, base: str = "tiny", **more: Any) -> str:
        lora = {"rank": 4, "alpha": 32, "seed": 1} | more.pop("lora", {})
        self.models += 1
        place = {"session_id": self.session, "model_seq_id": self.models, "base_model": base}
        reply = self.post("/create_model", **place, **({"lora_config": lora} | more))
        return self.result(reply)["model_id"]

    def call(self, route: str, model: str, **fields: Any) -> dict[str, Any]:
        """The result of the run's next call."""
        turn = self.turns[model] = self.turns.get(model, 0) + 1
        return self.result(self.post(f"/{route}", model_id=model, seq_id=turn, **fields))

    def forward(self, model: str) -> np.ndarray:
        given = body(model, 0, [PLAIN], "forward_input")["forward_input"]
        [found] = values(self.call("forward", model, forward_input=given))
        return found

    def train(self, model: str, **fields: Any) -> dict[str, Any]:
        given = body(model, 0, [PLAIN])["forward_backward_input"]
        assert "metrics" in self.call("forward_backward", model, forward_backward_input=given)
        adam = {"learning_rate": 1e-2, "eps": 1e-8}
        return self.call("optim_step", model, adam_params=adam, **fields)


@pytest.fixture
def fireworks(server) -> Iterator[Fireworks]:
    made = Fireworks(server.url)
    with closing(made.http):
        yield made


@pytest.fixture
def serverless(server) -> Iterator[Fireworks]:
    made = Fireworks(server.url, SERVERLESS)
    with closing(made.http):
        yield made


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return np.array_equal(found, wanted)


# ---- runs ----


def test_a_run_has_the_alpha_that_was_asked_for(fireworks, server) -> None:
    model = fireworks.create(lora={"alpha": 16, "init_method": "kaiming"})
    assert re.fullmatch(r"run-[0-9a-f]{32}:train:1", model)
    path = fireworks.call("save_weights_for_sampler", model, path="a", checkpoint_type="base")[
        "path"
    ]
    run = path.split("/")[1]
    [file] = server.checkpoints.glob(f"{run}*/sampler_weights/a/adapter_config.json")
    assert json.loads(file.read_text())["lora_alpha"] == 16
    wide = fireworks.create(lora={"alpha": 32})
    for one in (model, wide):
        fireworks.train(one)
    assert not same(fireworks.forward(model), fireworks.forward(wide))


def test_tinkers_runs_keep_their_names(server) -> None:
    wire = Wire(server.url)
    model = wire.create()
    assert re.fullmatch(r"s-[0-9a-f]{32}:train:0", model)
    saved = wire.result(wire.post("/save_weights", model_id=model, seq_id=1, path="a"))
    assert saved["path"] == f"tinker://{model}/weights/a"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"lora": {"rank": 0}},
            "rank must be at least 1, 0 came: tinsmith trains LoRA alone",
        ),
        ({"lora": {"init_method": "nora"}}, "init_method must be kaiming, 'nora' came"),
        ({"lora": {"alpha": 0}}, "alpha must be a positive number of f32, 0 came"),
        ({"lora": {"alpha": "all"}}, "alpha must be a number, 'all' came"),
        ({"projection_head_dim": 8}, "create_model with projection_head_dim is not supported here"),
    ],
)
def test_what_a_new_run_can_not_be_is_said(fireworks, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KeyError):
        fireworks.create(**more)
    place = {"session_id": fireworks.session, "model_seq_id": 99, "base_model": "tiny"}
    lora = {"rank": 4, "alpha": 32} | more.pop("lora", {})
    reply = fireworks.post("/create_model", **place, **({"lora_config": lora} | more))
    assert sentence in fireworks.result(reply)["error"]


def test_the_reference_is_the_base_model_and_has_forward_only(fireworks) -> None:
    base, fresh = fireworks.create(base_only=True), fireworks.create()
    assert same(fireworks.forward(base), fireworks.forward(fresh))
    about = fireworks.post("/get_info", model_id=base)
    assert about["is_lora"] is False and about["lora_rank"] is None
    given = body(base, 0, [PLAIN])["forward_backward_input"]
    for route, fields in (
        ("forward_backward", {"forward_backward_input": given}),
        ("optim_step", {"adam_params": {}}),
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "a"}),
        ("load_weights", {"path": "a"}),
        ("load_adapter", {"adapter_path": "a"}),
    ):
        error = fireworks.call(route, base, **fields)["error"]
        assert error == f"{base} is the base model alone: it has forward only"
    assert same(fireworks.forward(base), fireworks.forward(fresh))
    unnamed = fireworks.call("save_weights_for_sampler", base, sampling_session_seq_id=7)
    assert "forward only" in unnamed["error"]
    session = fireworks.http.get(f"/sessions/{fireworks.session}").json()
    assert session["sampler_ids"] == []


def test_none_normalises_nothing_and_detailed_metrics_are_refused(fireworks) -> None:
    first, second, third = (fireworks.create() for _ in range(3))
    adam = {"learning_rate": 1e-2, "eps": 1e-8, "emit_grad_norm_metrics": "basic"}
    found = fireworks.train(first, grad_accumulation_normalization="none")
    assert found["metrics"] == fireworks.train(second)["metrics"]
    fireworks.train(third, grad_accumulation_normalization="num_loss_tokens")
    assert same(fireworks.forward(first), fireworks.forward(second))
    for kind in (True, False, "off", "basic"):
        adam["emit_grad_norm_metrics"] = kind
        assert "metrics" in fireworks.call("optim_step", first, adam_params=adam)
    adam["emit_grad_norm_metrics"] = "detailed"
    error = fireworks.call("optim_step", first, adam_params=adam)["error"]
    assert error.startswith("emit_grad_norm_metrics can be off or basic")


# ---- names ----


def test_a_state_is_loaded_by_each_of_its_names(fireworks, server) -> None:
    model = fireworks.create()
    fireworks.train(model)
    path = fireworks.call("save_weights", model, path="step-1")["path"]
    run = path.split("/")[1]
    assert path == f"local/{run}/step-1" and model.startswith(f"{run}:")
    kept = fireworks.forward(model)
    assert "step-1" in fireworks.http.get("/list_checkpoints").json()["checkpoints"]
    other = Fireworks(server.url)  # of another session
    with closing(other.http):
        for client, target in ((fireworks, model), (other, other.create(lora={"seed": 2}))):
            for name in (
                path,
                "step-1",
                f"cross_job://{run}/step-1",
                f"tinker://{model}/weights/step-1",
            ):
                client.train(target)
                assert not same(client.forward(target), kept)
                found = client.call("load_weights", target, path=name, optimizer=True)
                assert found == {"type": "load_weights", "path": name, "model_id": target}
                assert same(client.forward(target), kept), name
        info = other.post("/weights_info", tinker_path=path)
        assert (info["lora_rank"], info["is_lora"]) == (4, True)


def test_an_alpha_that_float32_rounds_is_the_checkpoints_too(fireworks) -> None:
    model = fireworks.create(lora={"alpha": 12.3})
    fireworks.train(model)
    kept = fireworks.forward(model)
    fireworks.call("save_weights", model, path="odd-alpha")
    fireworks.train(model)
    fireworks.call("load_weights", model, path="odd-alpha", optimizer=True)
    assert same(fireworks.forward(model), kept)


def test_a_name_alone_is_fireworks_clients_alone(fireworks, server) -> None:
    """A run of Tinker's gets nobody's checkpoint by it, and learns nothing of the folders."""
    fireworks.call("save_weights", fireworks.create(), path="somebodys")
    wire = Wire(server.url)
    model = wire.create()
    for seq, name in enumerate(("somebodys", "tests", "no-such-name"), 1):
        found = wire.result(wire.post("/load_weights", model_id=model, seq_id=seq, path=name))
        assert found["error"].startswith(f"{name!r} is not a checkpoint's path, tinker://")


def test_a_name_alone_passes_over_what_does_not_fit(fireworks, server) -> None:
    """Of other runs: another rank, and a checkpoint that is gone."""
    first, other, gone, last = (fireworks.create(lora={"rank": rank}) for rank in (4, 8, 4, 4))
    for model in (first, gone):
        fireworks.train(model)
    kept = fireworks.forward(first)
    for model in (first, gone, other):
        path = fireworks.call("save_weights", model, path="go-on")["path"]
    fireworks.http.delete(f"/training_runs/{gone}/checkpoints/weights/go-on").raise_for_status()
    fireworks.call("load_weights", last, path="go-on")
    assert same(fireworks.forward(last), kept)
    wide = fireworks.create(lora={"rank": 16})
    assert "rank" in fireworks.call("load_weights", wide, path="go-on")["error"]
    assert path.endswith("/go-on")


def test_names_have_dots_and_capitals_and_are_listed_the_newest_last(fireworks) -> None:
    first, second = fireworks.create(), fireworks.create()
    for model, name in ((first, "A_b"), (first, "v1.0"), (second, "A_b")):
        fireworks.train(model)
        fireworks.call("save_weights", model, path=name)
    kept = fireworks.forward(second)
    names = fireworks.http.get("/list_checkpoints").json()["checkpoints"]
    assert names[-2:] == ["v1.0", "A_b"]
    fireworks.train(second)
    fireworks.call("load_weights", second, path="A_b")
    assert same(fireworks.forward(second), kept)


def test_a_name_alone_is_the_runs_own_and_else_the_newest(fireworks) -> None:
    first, second, third = (fireworks.create() for _ in range(3))
    kept = []
    for model in (first, second):
        fireworks.train(model)
        if model == second:
            fireworks.train(model)
        kept.append(fireworks.forward(model))
        fireworks.call("save_weights", model, path="both-of-us")
    for model, wanted in ((first, kept[0]), (second, kept[1]), (third, kept[1])):
        fireworks.call("load_weights", model, path="both-of-us")
        assert same(fireworks.forward(model), wanted)


@pytest.mark.parametrize(
    "name", ("no-such-name", f"local/run-{'0' * 32}/a", f"cross_job://run-{'0' * 32}/a")
)
def test_a_name_that_nothing_has_is_refused(fireworks, name: str) -> None:
    model = fireworks.create()
    error = fireworks.call("load_weights", model, path=name)["error"]
    assert error == f"there is no checkpoint {name!r}"
    assert "metrics" in fireworks.train(model)


def test_an_adapter_is_loaded_and_its_optimizer_begins_anew(fireworks, server) -> None:
    model = fireworks.create()
    fireworks.train(model)
    path = fireworks.call("save_weights_for_sampler", model, path="adapter-1")["path"]
    kept = fireworks.forward(model)
    [folder] = server.checkpoints.glob(f"{path.split('/')[1]}*/sampler_weights/adapter-1")
    begun = []
    for name in (path, str(folder)):
        target = fireworks.create()
        fireworks.train(target)
        found = fireworks.call("load_adapter", target, adapter_path=name)
        assert found == {"type": "load_adapter", "model_id": target, "adapter_path": name}
        assert same(fireworks.forward(target), kept)
        fireworks.train(target)
        begun.append(fireworks.forward(target))
    assert same(*begun)
    for path, sentence in (
        ("/no/such/folder", "is not a checkpoint's path"),
        (None, "the request has no adapter_path"),
        (5, "adapter_path must be a string, 5 came"),
    ):
        assert sentence in fireworks.call("load_adapter", model, adapter_path=path)["error"]
    assert (
        "unknown field 'x'" in fireworks.call("load_adapter", model, adapter_path="a", x=1)["error"]
    )
    assert same(fireworks.forward(model), kept)


def test_a_checkpoint_of_the_same_name_takes_the_others_place(fireworks) -> None:
    """Its client can't ask for that, and warns that it happens; Tinker's is refused."""
    model, loads = fireworks.create(), fireworks.create()
    for _ in range(2):
        fireworks.train(model)
        path = fireworks.call("save_weights", model, path="twice", overwrite=False)["path"]
        adapter = fireworks.call("save_weights_for_sampler", model, path="twice")["path"]
        fireworks.call("load_weights", loads, path=path)
        assert same(fireworks.forward(loads), fireworks.forward(model))
        fireworks.call("load_adapter", loads, adapter_path=adapter)
        assert same(fireworks.forward(loads), fireworks.forward(model))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"checkpoint_type": "delta"}, "checkpoint_type must be base, 'delta' came"),
        ({"export_precision": "bf16"}, "with export_precision is not supported here"),
        ({"metadata": {"a": 1}}, "with metadata is not supported here"),
    ],
)
def test_kinds_of_sampler_checkpoints_are_refused(fireworks, more, sentence: str) -> None:
    model = fireworks.create()
    assert sentence in fireworks.call("save_weights_for_sampler", model, path="a", **more)["error"]


# ---- the serverless prefix, and the control plane ----


def sampled(client: Fireworks, name: str) -> dict[str, Any]:
    """A completion of some ids by what a name stands for."""
    asked = {"model": name, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    reply = client.http.post(str(client.http.base_url.join("/v1/completions")), json=asked)
    return reply.json()


def test_serverless_names_sample_what_they_say(serverless, server) -> None:
    assert serverless.session.startswith("ts-")
    model = serverless.create()
    for _ in range(8):
        serverless.train(model)
    path = serverless.call("save_weights_for_sampler", model, path="rollout-1")["path"]
    scores = serverless.forward(model)
    place = f"accounts/local/trainingSessions/{serverless.session}"
    tuned = [
        f"{place}/checkpoints/{path}",
        f"{place}/checkpoints/rollout-1",
        f"{place}/checkpoints/{'-'.join(path.split('/')[1:])}",
        f"accounts/local/trainingSamplers/checkpoints/{path}",
        f"tiny;{path}",
        f"tinker://{model}/sampler_weights/rollout-1",
    ]
    serverless.call("save_weights", model, path="rollout-1")  # a state of the same name
    assert serverless.post("/weights_info", tinker_path=path)["lora_rank"] == 4
    alone = serverless.call("save_weights_for_sampler", model, path="alone")["path"]
    assert serverless.post("/weights_info", tinker_path=alone)["lora_rank"] == 4
    base = [place, "accounts/local/trainingSamplers/tiny", "tiny"]
    texts = [[sampled(serverless, name)["choices"] for name in names] for names in (tuned, base)]
    assert all(choices == row[0] for row in texts for choices in row)
    assert texts[0][0] != texts[1][0] and len(scores) == 3
    other = Fireworks(server.url, SERVERLESS)
    with closing(other.http):
        other.create()
        elsewhere = f"accounts/local/trainingSessions/{other.session}/checkpoints/rollout-1"
        for name in (
            elsewhere,
            f"{place}/checkpoints/never",
            "accounts/local/trainingSessions/ts-0",
        ):
            error = sampled(other, name)["error"]
            assert error["code"] == "model_not_found" and "there is no" in error["message"]


def test_the_control_plane_has_one_account_and_a_sessions_checkpoints(serverless, server) -> None:
    model = serverless.create()
    run = model.partition(":")[0]
    serverless.call("save_weights", model, path="step-1")
    serverless.call("save_weights_for_sampler", model, path="sampler-1")
    root = serverless.http.base_url.join("/")
    place = f"{root}v1/accounts"
    assert serverless.http.get(f"{place}?pageSize=2").json() == {
        "accounts": [{"name": "accounts/local"}]
    }
    session = f"accounts/local/trainingSessions/{serverless.session}"
    rows = serverless.http.get(f"{root}v1/{session}/checkpoints").json()["checkpoints"]
    told = [(row["name"], row["checkpointType"], row["promotable"]) for row in rows]
    assert told == [
        (f"{session}/checkpoints/{run}-step-1", "TRAINING_LORA", False),
        (f"{session}/checkpoints/{run}-sampler-1", "INFERENCE_LORA", True),
    ]
    stranger = Fireworks(server.url, SERVERLESS, "another")
    with closing(stranger.http):
        assert stranger.http.delete(f"{root}v1/{session}").status_code == 404
        assert stranger.http.get(f"{root}v1/{session}/checkpoints").status_code == 404
    assert serverless.http.delete(f"{root}v1/{session}").json() == {}
    assert serverless.http.post("/get_info", json={"model_id": model}).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "accounts/fireworks/trainingShapes/ts-x/versions"),
        ("POST", "accounts/local/rlorTrainerJobs"),
        ("GET", "accounts/local/deployments/d"),
        ("PATCH", "accounts/local/deployments/d"),
        ("DELETE", "accounts/local/rlorTrainerJobs/j"),
        ("POST", "accounts/local/trainingSessions/ts-1/checkpoints/a:promote"),
    ],
)
def test_provisioning_is_refused_at_once(serverless, method: str, path: str) -> None:
    root = serverless.http.base_url.join("/v1/")
    reply = serverless.http.request(method, f"{root}{path}")
    assert reply.status_code == 400
    assert "provisioning" in reply.json()["error"]["message"]


def test_a_sampling_route_needs_weights_that_are_here(serverless) -> None:
    model = serverless.create()
    run = f"accounts/local/trainingRuns/{model.partition(':')[0]}"
    assert serverless.post("/create_sampling_route", base_model="tiny") == {}
    assert serverless.post("/create_sampling_route", training_run=run) == {}
    for asked, status, sentence in (
        ({"base_model": "other"}, 400, "unknown base model 'other'"),
        ({"training_run": f"{run}0"}, 404, "there is no training run"),
        ({}, 400, "the request has no base_model"),
    ):
        reply = serverless.http.post("/create_sampling_route", json=asked)
        assert reply.status_code == status and sentence in reply.json()["detail"]


# ---- the examples of its page on losses ----


def cross_entropy(data: Any, rows: Any) -> Any:
    total = torch.tensor(0.0)
    for one, row in zip(data, rows, strict=True):
        total = total - torch.dot(row.float(), torch.tensor(one.loss_fn_inputs["weights"].data))
    loss = total / len(rows)
    return loss, {"cross_entropy": loss.item()}


def grpo(rewards: list[float], reference: list[Any], beta: float = 0.001) -> Any:
    advantages = np.asarray(rewards) - np.mean(rewards)

    def loss(data: Any, rows: Any) -> Any:
        total = torch.tensor(0.0)
        for advantage, one, row, ref in zip(advantages, data, rows, reference, strict=True):
            weights = torch.tensor(one.loss_fn_inputs["weights"].data)
            drift = torch.dot(row.float() - torch.tensor(ref), weights)
            total = total - float(advantage) * torch.dot(row.float(), weights) + beta * drift
        return total / len(rows), {"loss": (total / len(rows)).item()}

    return loss


def dpo(chosen: Any, rejected: Any, beta: float = 0.1) -> Any:
    def loss(data: Any, rows: Any) -> Any:
        weights = [torch.tensor(one.loss_fn_inputs["weights"].data) for one in data]
        margin = torch.dot(rows[0].float() - torch.tensor(chosen), weights[0])
        margin = margin - torch.dot(rows[1].float() - torch.tensor(rejected), weights[1])
        return -F.logsigmoid(beta * margin), {"margin": margin.item()}

    return loss


PAIR = [
    make_datum([11, 12, 13, 14], [12, 13, 14, 15], weights=[0, 0, 1, 1]),
    make_datum([11, 12, 16, 17], [12, 16, 17, 18], weights=[0, 0, 1, 1]),
]


@pytest.mark.parametrize("name", ("cross-entropy", "grpo", "dpo"))
def test_the_pages_custom_losses_train(service_client, name: str) -> None:
    """Each lowers its own loss; what is reported is what torch makes of the log-probabilities."""
    client = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    reference = logprobs(client.forward(PAIR, "cross_entropy").result())
    loss, key = {
        "cross-entropy": (cross_entropy, "cross_entropy"),
        "grpo": (grpo([1.0, 0.0], reference), "loss"),
        "dpo": (dpo(*reference), "margin"),
    }[name]
    told, wanted = [], []
    for _ in range(3):
        rows = logprobs(client.forward(PAIR, "cross_entropy").result())
        _, metrics = loss(PAIR, [torch.tensor(row) for row in rows])
        wanted.append(metrics[key])
        found = client.forward_backward_custom(PAIR, loss).result()
        told.append(found.metrics[key])
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert told == pytest.approx(wanted, abs=1e-6)
    assert told[2] > told[0] if name == "dpo" else told[2] < told[0]


@pytest.mark.parametrize("mode", ("num_loss_tokens", "num_sequences", None))
def test_the_pages_accumulation_divides_by_what_it_says(fireworks, mode: str | None) -> None:
    """Three micro-batches of one datum with two weights that are not zero, before one step: SGD
    would tell the factor at once, so the norm that the step reports does."""
    model, datum = fireworks.create(), {**PLAIN}
    given = body(model, 0, [datum])["forward_backward_input"]
    for _ in range(3):
        fireworks.call("forward_backward", model, forward_backward_input=given)
    adam = {"learning_rate": 0.0}
    found = fireworks.call(
        "optim_step", model, adam_params=adam, grad_accumulation_normalization=mode
    )
    alone = fireworks.create()
    fireworks.call("forward_backward", alone, forward_backward_input=given)
    one = fireworks.call("optim_step", alone, adam_params=adam)
    divisor = {"num_loss_tokens": 9, "num_sequences": 3, None: 1}[mode]
    norms = [row["metrics"]["grad_norm"] for row in (found, one)]
    assert norms[0] == pytest.approx(3 * norms[1] / divisor, rel=1e-5)


def test_the_pages_datums_of_weights_alone_are_refused_by_the_built_in_loss(fireworks) -> None:
    model = fireworks.create()
    weights = PLAIN["loss_fn_inputs"]["weights"]
    given = body(model, 0, [{**PLAIN, "loss_fn_inputs": {"weights": weights}}])
    given = given["forward_backward_input"]
    error = fireworks.call("forward_backward", model, forward_backward_input=given)["error"]
    assert "datum 0: loss_fn_inputs has no target_tokens" in error
