"""TINKER.md says what becomes of each call, field, loss, command and endpoint of Tinker here."""

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from starlette.routing import compile_path
from support import ROOT
from test_sdk_fields import OLDER, TYPES
from test_tinker_cli import subcommands
from tinker import types
from tinker.cli.__main__ import main_cli
from tinsmith.server.backend import TINKER
from tinsmith.server.http.error_bodies import ANTHROPIC_PREFIXES, OPENAI_PREFIXES
from tinsmith.server.inference import anthropic_messages, openai_text
from tinsmith.server.routes import rest
from tinsmith.server.wire import training_calls
from tinsmith.server.wire.fields import FIELDS

DOCUMENT = ROOT / "TINKER.md"
SDK = Path(tinker.__file__).parent
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
SENT = {
    "AdamParams", "Datum", "DimuonParams", "ForwardBackwardInput", "LoraConfig", "ModelInput",
    "SamplingParams", "TensorData",
}  # fmt: skip
# What the documentation of 0.39 has and 0.38 has not.
NEWER = {
    "RestClient.search_checkpoints", "RestClient.external_weights_upload_start",
    "RestClient.external_weights_upload_finish", "Checkpoint.base_model",
    "DimuonParams.damping", "DimuonParams.rank_lr_correction_exponent",
    "CheckpointSearchRequest.project_ids", "CheckpointSearchRequest.user_metadata",
    "CheckpointSearchRequest.checkpoint_type", "CheckpointSearchRequest.owner",
    "CheckpointSearchRequest.base_models", "CheckpointSearchRequest.limit",
    "CheckpointSearchRequest.cursor", "ExternalWeightsUploadStartRequest.base_model",
    "ExternalWeightsUploadStartRequest.lora_config",
    "ExternalWeightsUploadStartRequest.destination_project_id",
    "ExternalWeightsUploadFinishRequest.upload_id",
}  # fmt: skip
# Types of answers beside those that are called so, and of those the calls that are not here.
TOLD = {
    "Checkpoint", "ForwardBackwardOutput", "FutureFailed", "FutureFinished", "ModelData",
    "PromptAltTokens", "SampledSequence", "SessionSummary", "SupportedModel", "TrainingRun",
    "UntypedAPIFuture",
}  # fmt: skip
ABSENT = ("AuditLog", "AuthToken", "Billing", "CurrentCheckpointStorage", "Whoami")
NAMES = {
    "search_checkpoints": "CheckpointSearchRequest",
    "external_weights_upload_start": "ExternalWeightsUploadStartRequest",
}
of_this_sdk = pytest.mark.skipif(
    not tinker.__version__.startswith("0.38."), reason="the document is of SDK 0.38"
)


def rows(title: str) -> dict[str, str]:
    """The names in a section's table, and whether each is here."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S)
    assert section is not None
    found = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ?(.*?) ?\|$", section[1], re.M)
    table = {name: status for name, status, _ in found}
    assert len(table) == len(found), "a name stands twice"
    for name, status, why in found:
        assert status == "as there" or (status in ("differs", "not here") and why), name
    return table


def calls() -> Iterator[str]:
    for client in CLIENTS:
        for name, _ in inspect.getmembers(getattr(tinker, client)):
            if not name.startswith("_") and not name.endswith("_async"):
                yield f"{client}.{name}"


def fields() -> Iterator[str]:
    for name, kind in vars(types).items():
        if inspect.isclass(kind) and (name.endswith("Request") or name in SENT):
            for field in getattr(kind, "model_fields", None) or kind.__dataclass_fields__:
                if field != "type" and not field.startswith("_"):
                    yield f"{name}.{field}"


@of_this_sdk
def test_each_call_of_the_sdk_is_decided_on() -> None:
    newer = {name for name in NEWER if name.startswith("RestClient")}
    assert set(rows("Calls")) == set(calls()) | newer


@of_this_sdk
def test_each_field_that_the_sdk_sends_is_decided_on() -> None:
    newer = {name for name in NEWER if not name.startswith("RestClient")}
    assert set(rows("Fields")) == set(fields()) | newer


def test_the_fields_that_the_server_refuses_are_told() -> None:
    table = rows("Fields")
    for kind in FIELDS.keys() - OLDER:
        known = FIELDS[kind]
        type_name = NAMES.get(kind) or TYPES[kind].__name__
        said = {name for name in table if name.startswith(f"{type_name}.")}
        refused = {f"{type_name}.{name}" for name in known.refused} & said
        assert {name for name in said if table[name] == "not here"} == refused


def answered() -> Iterator[tuple[str, str]]:
    """The types of the SDK's answers, and their fields."""
    for name, kind in vars(types).items():
        if inspect.isclass(kind) and (name.endswith("Response") or name in TOLD):
            for field in getattr(kind, "model_fields", None) or kind.__dataclass_fields__:
                if not field.startswith("_") and not name.startswith(ABSENT):
                    yield name, field.removesuffix("_np")


@of_this_sdk
def test_each_field_of_an_answer_is_filled_or_is_said_not_to_be() -> None:
    """Filled: the server's code names it."""
    code = "".join(file.read_text() for file in Path(rest.__file__).parents[1].rglob("*.py"))
    named = set(re.findall(r"\w+", code))
    missing = {f"{name}.{field}" for name, field in answered() if field not in named}
    assert set(rows("Answers")) == missing


@of_this_sdk
def test_each_loss_is_there_or_is_said_not_to_be() -> None:
    table = rows("Losses")
    assert set(table) == set(typing.get_args(types.LossFnType))
    missing = {name for name in table if name not in training_calls.LOSSES} - {"custom"}
    assert {name for name, status in table.items() if status == "not here"} == missing


@of_this_sdk
def test_each_command_is_decided_on() -> None:
    commands = {f"tinker {name}" for name in subcommands(main_cli)}
    assert set(rows("The command line")) == commands


def test_each_endpoint_of_the_server_is_told_and_no_other() -> None:
    served = {f"{method} {path}" for table in TINKER for method, path, _ in table.ROUTES}
    table = rows("Endpoints")
    assert set(table) == served
    refused = {f"{method} {path}" for method, path, _ in rest.REFUSED}
    assert {name for name, status in table.items() if status == "not here"} == refused


def test_each_inference_endpoint_of_the_server_is_told_and_no_other() -> None:
    tables = [(prefix, openai_text.ROUTES) for prefix in OPENAI_PREFIXES]
    tables += [(prefix, anthropic_messages.ROUTES) for prefix in ANTHROPIC_PREFIXES]
    served = {f"{row[0]} {prefix}{row[1]}" for prefix, routes in tables for row in routes}
    assert set(rows("Inference endpoints")) == served


def test_the_server_has_every_path_that_the_sdk_asks_for() -> None:
    paths = {path for table in TINKER for _, path, _ in table.ROUTES}
    known = [compile_path(path)[0] for path in paths]
    files = [file for file in SDK.rglob("*.py") if not file.name.endswith("_test.py")]
    asked = {path for file in files for path in re.findall(r'"/api/v1(/[^"]+)"', file.read_text())}
    assert len(asked) > 40
    for path in asked:
        assert any(pattern.match(path) for pattern in known), path
