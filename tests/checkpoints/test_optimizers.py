"""A run's optimizer, from its creation to its checkpoints; and that of a loop without a server."""

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import tinsmith
from conftest import Wire, logprobs, make_datum
from tinker import types
from tinsmith.checkpoints.meta import load_meta
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.server.wire.fields import FIELDS

DATA = [make_datum([11, 12, 13, 15], [12, 13, 15, 14], weights=[1, 1, 1, 1])]
STEP = types.DimuonParams(learning_rate=0.02)
CONFIG = types.DimuonOptimizerConfig()
KINDS = {"adamw": tinker.AdamParams(learning_rate=1e-2), "dimuon": STEP}
KEYS = {"damping": 1e-3, "rank_lr_correction_exponent": 0.5}  # of SDK 0.39


@pytest.fixture
def model(server) -> Iterator[tinsmith.Model]:
    with tinsmith.Model(server._service.bases["tiny"].path) as model:
        yield model


def made(client: tinker.ServiceClient, kind: str = "dimuon") -> tinker.TrainingClient:
    config = {"adamw": types.AdamOptimizerConfig(), "dimuon": CONFIG}[kind]
    return client.create_lora_training_client("tiny", rank=4, seed=1, optimizer=config).result()


def train(run: tinker.TrainingClient, params: Any, steps: int = 1) -> list[float]:
    """Steps on one datum; the losses."""
    losses = []
    for _ in range(steps):
        output = run.forward_backward(DATA, "cross_entropy")
        run.optim_step(params).result()
        losses.append(output.result().metrics["loss:sum"])
    return losses


def read(run: tinker.TrainingClient) -> np.ndarray:
    return logprobs(run.forward(DATA, "cross_entropy").result())[0]


def test_a_run_is_trained_with_dimuon(service_client: tinker.ServiceClient) -> None:
    run = made(service_client)
    losses = train(run, STEP, 8)
    assert losses[-1] < 0.7 * losses[0] and all(map(math.isfinite, losses))
    assert run.get_info().optimizer_config.type == "dimuon"
    report = run.optim_step(STEP).result().metrics
    assert report["grad_norm"] == 0.0 and report["weight_norm"] > 0


def create(wire: Wire, config: Any) -> dict[str, Any]:
    """What becomes of a new run with that optimizer."""
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    reply = wire.post(
        "/create_model",
        session_id=session["session_id"],
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 4, "seed": 1},
        optimizer_config=config,
    )
    return wire.result(reply)


def step(wire: Wire, run: str, seq: int, **params: Any) -> dict[str, Any]:
    body = {"type": "dimuon", **params}
    return wire.result(wire.post("/optim_step", model_id=run, seq_id=seq, optimizer_params=body))


def test_settings_of_a_newer_sdk_are_read(server, model: tinsmith.Model) -> None:
    """As the engine reads them: a loop in this process is told the same norms."""
    wire = Wire(server.url)
    run = create(wire, {"type": "dimuon", "version": 1})["model_id"]
    told = wire.post("/get_info", model_id=run)["optimizer_config"]
    assert told == {"type": "dimuon", "version": 1}
    adapter = model.lora(rank=4, seed=1, optimizer="dimuon")
    settings = {"learning_rate": 0.05, "beta1": 0.5, "grad_clip_norm": 0.1, **KEYS}
    for seq, change in ((1, {}), (3, {}), (5, {"damping": 0.1})):
        wire.result(wire.forward_backward(run, seq, DATA))
        metrics = step(wire, run, seq + 1, **settings | change)["metrics"]
        adapter.forward_backward([11, 12, 13, 15], [12, 13, 15, 14])
        report = adapter.optim_step(**settings | change)
        assert metrics["weight_norm"] == report.weight_norm
        assert metrics["grad_norm_clipped"] == report.grad_norm_clipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_takes_its_own_settings_alone(service_client: Any, kind: str) -> None:
    run = made(service_client, kind)
    train(run, KINDS[kind])
    before = read(run)
    (other,) = set(KINDS) - {kind}
    own, came = OPTIMIZERS[kind].params.__name__, OPTIMIZERS[other].params.__name__
    run.forward_backward(DATA, "cross_entropy").result()
    told = f"trained with {kind}: send {own}, {came} came"
    with pytest.raises(tinker.RequestFailedError, match=told):
        run.optim_step(KINDS[other]).result()
    np.testing.assert_array_equal(read(run), before)
    train(run, KINDS[kind])
    assert (read(run) != before).any()


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({}, "dimuon needs a learning_rate"),
        ({"learning_rate": -1}, "learning_rate must be 0 or more and finite, not -1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"learning_rate": 1, "beta1": 1}, "beta1 must be in [0, 1), not 1"),
        ({"learning_rate": 1, "damping": 0}, "damping must be above 0 and finite, not 0"),
        ({"learning_rate": 1, "beta2": 0.9}, "unknown field 'beta2' in optimizer_params"),
        ({"learning_rate": 1, "type": "sgd"}, "trained with dimuon, settings of 'sgd' came"),
        ({"learning_rate": 1e38}, "was not taken"),
    ],
    ids=str,
)
def test_a_bad_setting_is_a_sentence(server, params: dict[str, Any], sentence: str) -> None:
    wire = Wire(server.url)
    run = create(wire, {"type": "dimuon"})["model_id"]
    wire.result(wire.forward_backward(run, 1, DATA))
    assert sentence in step(wire, run, 2, **params)["error"]
    assert "metrics" in step(wire, run, 3, learning_rate=0.01)  # its turn is used up


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"type": "sgd"}, "the optimizer 'sgd' is not built; tinsmith has adamw and dimuon"),
        ({"type": ["dimuon"]}, "is not built"),
        ({"type": "dimuon", "version": 2}, "tinsmith has no version 2 of dimuon"),
        ({"type": "adamw", "version": 1}, "tinsmith has no version 1 of adamw"),
        ({"type": "dimuon", "nesterov": True}, "unknown field 'nesterov' in optimizer_config"),
        ("dimuon", "optimizer_config must be"),
    ],
    ids=str,
)
def test_an_optimizer_that_there_is_not_is_a_sentence(server, config: Any, sentence: str) -> None:
    assert sentence in create(Wire(server.url), config)["error"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_setting_is_in_its_tables_and_in_the_signature(model: tinsmith.Model, kind: str) -> None:
    """A new one is a row of checkpoints/optimizers.py, one of the optimizer's C file, and an
    argument."""
    row = OPTIMIZERS[kind]
    core = model.lora(rank=2, seed=1, optimizer=kind).core
    numbers = dict.fromkeys(row.settings, 0.5)
    assert core.optim_step(**numbers)["grad_norm"] == 0.0
    for name in numbers:
        with pytest.raises(ValueError, match=f"{kind} needs a {name}"):
            core.optim_step(**{key: value for key, value in numbers.items() if key != name})
    with pytest.raises(ValueError, match=f"{kind} has no warmth"):
        core.optim_step(**numbers, warmth=1.0)
    with pytest.raises(TypeError, match="by their names"):
        core.optim_step(0.5)
    given = set(inspect.signature(tinsmith.Adapter.optim_step).parameters)
    assert set(row.settings) <= given, "api/adapter.py: an argument for each setting"
    assert set(row.settings) <= set(FIELDS[row.sent].read)


def test_a_resumed_run_goes_on_bit_for_bit(server, service_client: Any) -> None:
    """With gradients that were not used yet, and with the same optimizer, which nobody names."""
    run = made(service_client)
    train(run, STEP, 2)
    run.forward_backward(DATA, "cross_entropy").result()
    path = run.save_state("half").result().path
    meta = load_meta(server._service.store.folder(path))
    assert (meta.optimizer, meta.step) == ("dimuon", 2)
    info = Wire(server.url).post("/weights_info", tinker_path=path)
    assert info["optimizer_config"] == {"type": "dimuon", "version": 1}
    again = service_client.create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().optimizer_config.type == "dimuon"
    into = made(service_client)
    into.load_state_with_optimizer(path).result()
    for one in (run, again, into):
        one.optim_step(STEP).result()
        train(one, STEP, 2)
    for other in (again, into):
        np.testing.assert_array_equal(read(other), read(run))


def test_weights_alone_begin_anew_with_either_optimizer(service_client: Any) -> None:
    run = made(service_client)
    train(run, STEP, 2)
    path, before = run.save_state("kept").result().path, read(run)
    create = service_client.create_training_client_from_state
    for kind, config in (("adamw", None), ("dimuon", CONFIG)):
        fresh = create(path, optimizer=config).result()
        assert fresh.get_info().optimizer_config.type == kind
        np.testing.assert_array_equal(read(fresh), before)
        train(fresh, KINDS[kind])
        assert (read(fresh) != before).any()
    other = made(service_client)
    train(other, STEP, 3)
    other.load_state(path).result()
    train(other, STEP)  # its moments were dropped: it steps as the fresh run did
    np.testing.assert_array_equal(read(other), read(fresh))


def test_the_state_of_another_optimizer_is_refused(server, service_client: Any) -> None:
    paths = {}
    for kind, params in KINDS.items():
        run = made(service_client, kind)
        train(run, params)
        paths[kind] = run.save_state(f"of-{kind}").result().path
    for kind, other in (("adamw", "dimuon"), ("dimuon", "adamw")):
        run = made(service_client, kind)
        before = read(run)
        told = f"has the state of {other}, this adapter is trained with {kind}: load its weights"
        with pytest.raises(tinker.RequestFailedError, match=told):
            run.load_state_with_optimizer(paths[other]).result()
        np.testing.assert_array_equal(read(run), before)
        run.load_state(paths[other]).result()
    wire = Wire(server.url)
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    reply = wire.post(
        "/load_weights",
        session_id=session["session_id"],
        model_seq_id=0,
        path=paths["adamw"],
        optimizer=True,
        optimizer_config={"type": "dimuon"},
    )
    assert "has the state of adamw, not of dimuon" in wire.result(reply)["error"]
    run = create(wire, {"type": "adamw"})["model_id"]
    load = {"path": paths["adamw"], "optimizer_config": {"type": "dimuon"}}
    told = wire.result(wire.post("/load_weights", model_id=run, seq_id=1, **load))["error"]
    assert "this run is trained with adamw, which dimuon can't replace" in told


def test_a_checkpoint_that_does_not_say_its_optimizer_is_adamws(
    server, service_client: Any
) -> None:
    """As those of older versions."""
    run = made(service_client, "adamw")
    train(run, KINDS["adamw"])
    path = run.save_state("older").result().path
    file = server._service.store.folder(path) / "meta.json"
    content = json.loads(file.read_text())
    del content["optimizer"]
    file.write_text(json.dumps(content))
    again = service_client.create_training_client_from_state_with_optimizer(path).result()
    train(again, KINDS["adamw"])
    train(run, KINDS["adamw"])
    np.testing.assert_array_equal(read(again), read(run))


# ---- without a server ----


def test_a_loop_of_ones_own_is_trained_with_dimuon(model: tinsmith.Model, tmp_path: Path) -> None:
    adapter = model.lora(rank=4, seed=1, optimizer="dimuon")
    datum = [11, 12, 13, 15], [12, 13, 15, 14]
    losses = []
    for _ in range(6):
        losses.append(adapter.forward_backward(*datum).loss)
        adapter.optim_step(learning_rate=0.02)
    assert losses[-1] < 0.8 * losses[0]
    adapter.save(tmp_path / "it")
    again = model.load_lora(tmp_path / "it", optimizer=True)
    for one in (adapter, again):
        one.forward_backward(*datum)
        one.optim_step(0.01, damping=1e-3)
    for name, matrix in adapter.state_dict().items():
        np.testing.assert_array_equal(matrix, again.state_dict()[name])


def test_settings_of_another_optimizer_are_refused(model: tinsmith.Model) -> None:
    adapter = model.lora(rank=4, seed=1, optimizer="dimuon")
    with pytest.raises(ValueError, match="dimuon has no beta2; its settings are"):
        adapter.optim_step(0.01, beta2=0.9)
    with pytest.raises(ValueError, match="dimuon needs a learning_rate"):
        adapter.optim_step()
    with pytest.raises(ValueError, match="adamw has no damping"):
        model.lora(rank=4).optim_step(0.01, damping=0.1)
    with pytest.raises(ValueError, match="'sgd' is not built; tinsmith has adamw and dimuon"):
        model.lora(rank=4, optimizer="sgd")
