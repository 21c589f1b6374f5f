"""Every field of the SDK's requests of training and sampling is read, or refused by name: its types
are walked, and compared with the server's table (server/wire/fields.py)."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import tinker
from conftest import Wire, make_datum
from tinker.proto import tinker_public_pb2 as pb
from tinsmith.checkpoints import optimizers
from tinsmith.server.wire import fields
from tinsmith.server.wire.fields import FIELDS

SERVER = Path(fields.__file__).parents[1]
# The SDK writes optim_params as one of two fields of the wire.
OPTIM = {"optim_params": ("adam_params", "optimizer_params")}
TYPES = {
    "sample": tinker.types.SampleRequest,
    "sampling_params": tinker.SamplingParams,
    "optim_step": tinker.types.OptimStepRequest,
    "adam_params": tinker.AdamParams,
    "optimizer_params": tinker.types.DimuonParams,
    "optimizer_config": tinker.types.DimuonOptimizerConfig,
    "create_model": tinker.types.CreateModelRequest,
    "lora_config": tinker.types.LoraConfig,
    "load_weights": tinker.types.LoadWeightsRequest,
    "save_weights": tinker.types.SaveWeightsRequest,
    "save_weights_for_sampler": tinker.types.SaveWeightsForSamplerRequest,
    "save_weights_external": tinker.types.SaveWeightsExternalRequest,
    "create_sampling_session": tinker.types.CreateSamplingSessionRequest,
    "search_sessions": tinker.types.SessionSearchRequest,
    "forward_backward": pb.ForwardBackwardRequest,
    "datum": pb.Datum,
    "image": pb.ImageChunk,
    "image_chunk": tinker.types.ImageChunk,
}
NEWER = {"search_checkpoints", "external_weights_upload_start"}  # of SDK 0.39
# Training calls in JSON, of SDKs up to 0.24; and what Fireworks' has of its own.
OLDER = {
    "forward_backward_input", "forward_input", "loss_input", "json_datum", "model_input", "tensor",
    "load_adapter", "create_sampling_route",
}  # fmt: skip
# What the SDK's own classes have that its protobuf message has in parts.
PARTS = {
    tinker.types.ForwardBackwardRequest: {"forward_backward_input", "model_id", "seq_id"},
    tinker.types.ForwardRequest: {"forward_input", "model_id", "seq_id"},
    tinker.types.ForwardBackwardInput: {"data", "loss_fn", "loss_fn_config"},
}


def fields_of(kind: Any) -> set[str]:
    """The names of a type's fields: pydantic's, a dataclass's or a protobuf message's."""
    if hasattr(kind, "DESCRIPTOR"):
        return {descriptor.name for descriptor in kind.DESCRIPTOR.fields}
    if dataclasses.is_dataclass(kind):
        return {item.name for item in dataclasses.fields(kind)}
    names = set(kind.model_fields)
    return {wire for name in names for wire in OPTIM.get(name, (name,))}


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_of_the_sdk_is_decided_on(kind: str) -> None:
    table = FIELDS[kind]
    decided = {*table.read, *table.idle, *table.refused}
    undecided = fields_of(TYPES[kind]) - decided
    assert not undecided, f"{kind} has fields that the server's table does not know: {undecided}"
    parts = (table.read, table.idle, table.refused)
    assert sum(map(len, parts)) == len(decided), "a field has one fate"
    assert all(reason for part in parts[1:] for reason in part.values())


def test_the_table_has_every_request_that_trains_and_samples() -> None:
    assert set(TYPES) | OLDER | NEWER == set(FIELDS)
    for kind, known in PARTS.items():
        assert fields_of(kind) == known, kind
    named = {kind.__name__ for kind in (*TYPES.values(), *PARTS)}
    # The others keep sessions, poll, list and copy; or upload a loss, which custom_loss.py checks.
    others = {
        "ClientConfigRequest", "CopyWeightsRequest", "CreateCustomLossRequest",
        "CreateSessionRequest", "FutureRetrieveRequest", "FuturesRetrieveRequest",
        "GetBillingUsageRequest", "GetCurrentCheckpointStorageUsageRequest", "GetInfoRequest",
        "JoinSamplingSessionRequest", "SessionHeartbeatRequest",
        "TelemetrySendRequest", "UnloadModelRequest",
    }  # fmt: skip
    found = set()
    for module in vars(tinker.types).values():
        for name, kind in vars(module).items() if inspect.ismodule(module) else ():
            if inspect.isclass(kind) and name.endswith("Request") and not name.startswith("_"):
                found.add(name)
    assert found - named == others, "a request of the SDK that nobody has decided on"


def test_what_is_said_to_be_read_is_read() -> None:
    """By its name, in the server's code or in the table of optimizers."""
    files = [file for file in SERVER.rglob("*.py") if file.name != "fields.py"]
    text = "".join(file.read_text() for file in (*files, Path(optimizers.__file__)))
    for kind, table in FIELDS.items():
        for name in table.read:
            assert re.search(rf"[\"'. ]{name}\b", text), (kind, name)


@pytest.fixture
def wire(server) -> Wire:
    return Wire(server.url)


def asked(wire: Wire, **change: Any) -> str:
    """The error of a sampling request with this change."""
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    sampler = wire.post(
        "/create_sampling_session",
        session_id=session["session_id"],
        sampling_session_seq_id=0,
        base_model="tiny",
    )
    body = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1},
    }
    return wire.result(wire.post("/asample", **{**body, **change})).get("error", "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"base_model": "tiny"}, "sample with base_model is not supported here: name a sampling"),
        ({"model_path": "tinker://a/b/c"}, "sample with model_path is not supported here"),
        ({"beam_width": 4}, "unknown field 'beam_width' in sample; there are ['num_samples'"),
        (
            {"sampling_params": {"max_tokens": 1, "min_p": 0.1}},
            "unknown field 'min_p' in sampling_params; there are ['max_tokens', 'seed'",
        ),
        ({"beam_width": 0, "sampling_params": {"min_p": None, "max_tokens": 1}}, ""),
    ),
)
def test_a_sampling_requests_field_is_refused_by_name(wire, change, sentence) -> None:
    error = asked(wire, **change)
    assert sentence in error and bool(error) == bool(sentence)


@pytest.mark.parametrize(
    ("route", "body", "sentence"),
    (
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "send AdamParams, DimuonParams"),
        ("optim_step", {"warmup": 3}, "unknown field 'warmup' in optim_step"),
        ("optim_step", {"adam_params": {"amsgrad": True}}, "'amsgrad' in adam_params"),
        ("load_weights", {"path": "x", "weights_access_token": "t"}, "open to every client"),
        ("save_weights", {"path": "x", "compress": True}, "'compress' in save_weights"),
        ("save_weights_for_sampler", {"path": "x", "format": "g"}, "'format' in save_weights_for"),
        ("save_weights_external", {"path": "x", "merge": True}, "'merge' in save_weights_ext"),
    ),
)
def test_a_training_requests_field_is_refused_by_name(wire, route, body, sentence) -> None:
    model = wire.create()
    refused = wire.result(wire.post(f"/{route}", model_id=model, seq_id=1, **body))
    assert sentence in refused["error"]
    assert "metrics" in wire.result(wire.optim_step(model, 2))  # its turn is used up


def test_a_new_runs_field_is_refused_by_name(wire) -> None:
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    create = {"session_id": session["session_id"], "base_model": "tiny"}
    for number, (more, sentence) in enumerate(
        (
            ({"quantize": "nf4"}, "unknown field 'quantize' in create_model"),
            ({"lora_config": {"rank": 4, "dropout": 0.1}}, "'dropout' in lora_config"),
        )
    ):
        reply = wire.post("/create_model", model_seq_id=number, **create, **more)
        assert sentence in wire.result(reply)["error"]


def test_a_message_with_an_unknown_field_is_refused_with_its_datum(wire, monkeypatch) -> None:
    """As if the SDK's messages had a field that the table does not have."""
    known = FIELDS["datum"]
    left = tuple(name for name in known.read if name != "loss_fn_inputs")
    monkeypatch.setitem(FIELDS, "datum", dataclasses.replace(known, read=left))
    model = wire.create()
    refused = wire.result(wire.forward_backward(model, 1, [make_datum([5, 6], [6, 7])]))
    assert "unknown field 'loss_fn_inputs' in datum 0" in refused["error"]
