"""Requests that the SDK sent, changed, straight into what parses them: protobuf through
training_calls.batch, and JSON through bodies.py into what each route reads of it, some thousand a
second. requests.py sends the same to a server.

A request is refused with a sentence, and the report says by which function; or what is read is
whole: finite numbers, ids of the vocabulary or of held images, text that can be stored and sent
again. The model can see; images.py attacks the images themselves.
"""

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.images import PROCESSOR, Core, jpeg, png
from tinsmith.checkpoints import meta
from tinsmith.checkpoints.store import Store
from tinsmith.demo.demo import MODEL
from tinsmith.engine.image_cache import IMAGE_TOKENS, HeldImage, ImageCache
from tinsmith.engine.training import Batch
from tinsmith.models import registry
from tinsmith.models.registry import BaseModel
from tinsmith.server.backend import Backend
from tinsmith.server.records.database import SessionRow
from tinsmith.server.routes import rest
from tinsmith.server.service import bodies
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.promises import Refusal
from tinsmith.server.wire import fields, json_calls, parse, sampling_calls, training_calls
from tinsmith.server.wire.messages import pb

from tools.attack.common import (
    USER,
    Attempt,
    Failure,
    One,
    changed,
    changed_bytes,
    json_text,
    refusal,
)
from tools.attack.common import where as raised_by
from tools.attack.requests import PROTOBUF, changed_message, record

SESSION = SessionRow("s", "", "a b", {"a": "b"}, "", {"reason": {"type": "success"}})
SESSIONS = SimpleNamespace(sessions={})
IMAGES = ImageCache(Core())
SEEN = [
    {"type": "encoded_text", "tokens": [5, 6]},
    {"type": "image", "format": "png", "data": base64.b64encode(png(1, (20, 40))).decode()},
    {"type": "image", "format": "jpeg", "data": base64.b64encode(jpeg(2, (90, 40))).decode(),
     "expected_tokens": 3},
]  # fmt: skip
# What a run that ends well doesn't send.
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/finish", {"reason": {"type": "error", "code": "a"}, "detail": "b"}),
    ("/sessions/search", {"display_name": "a", "user_metadata": {"a": "b"}, "limit": 9,
                          "statuses": [{"type": "client_finished", "reasons": ["success"]}]}),
    ("/forward", {"model_id": "m", "seq_id": 1, "forward_input": {
        "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.5}, "data": [{
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
                "logprobs": {"data": [-1.5, -2, -3], "dtype": "float32", "shape": [3]},
                "advantages": {"data": [1, -0.5, 2], "dtype": "float32", "shape": [3]}}}]}}),
    ("/forward_backward", {"model_id": "m", "seq_id": 1, "forward_backward_input": {
        "loss_fn": "cross_entropy", "data": [{
            "model_input": {"chunks": [{"tokens": [5]}, {"tokens": [6]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [6, 7, 8, 9], "dtype": "int64", "shape": [2, 2]},
                "weights": {"data": [1.0, 0.5], "dtype": "float32", "shape": [2, 2],
                            "sparse_crow_indices": [0, 1, 2],
                            "sparse_col_indices": [0, 1]}}}]}}),
    ("/forward_backward", {"model_id": "m", "seq_id": 1, "forward_backward_input": {
        "loss_fn": "cross_entropy", "data": [{
            "model_input": {"chunks": SEEN},
            "loss_fn_inputs": {
                "target_tokens": {"data": [0] * 7, "dtype": "int64", "shape": [7]}}}]}}),
    ("/asample", {"sampling_session_id": "s", "seq_id": 1, "prompt_logprobs": True,
                  "prompt": {"chunks": SEEN}}),
)  # fmt: skip
Read = Callable[[dict[str, Any], BaseModel], Any]


def _save(route: str, kind: str, body: dict[str, Any]) -> Any:
    fields.check(route, body)
    run, name = (parse.need(body, key, str) for key in ("model_id", "path"))
    path = Store(Path("/nowhere")).path(run, kind, name)
    return path, parse.metadata(body), parse.ttl(body), parse.maybe(body, "overwrite", bool, False)


def _sample(body: dict[str, Any], model: BaseModel) -> Any:
    placed = sampling_calls.look_at_images(body, model, IMAGE_TOKENS)
    held = [IMAGES.hold(one.image) for one in placed]
    request = sampling_calls.sample_request(body, model, 1, held=held)
    _check_ids(request.prompt, request.images, model)
    scores = request.targets
    if scores is not None and (scores.ids.min() < 0 or scores.ids.max() >= model.vocab):
        raise Failure(f"the ids to score are {scores.ids}")
    if sampling_calls.held_bytes(request, model.context) < 0:
        raise Failure("it holds less than nothing")
    return request


def _call(body: dict[str, Any], key: str, model: BaseModel) -> Any:
    _read(json_calls.call_of(body, key), model)


def _read(call: training_calls.TrainingCall, model: BaseModel) -> None:
    placed = training_calls.look_at_images(call, model, IMAGE_TOKENS)
    held = [IMAGES.hold(one.image) for one in placed]
    _check_batch(training_calls.batch(call, model, held=held), model)


# What the routes read of a body, by the end of their paths.
READERS: dict[str, Read] = {
    "/create_model": lambda body, _: (
        parse.need(body, "session_id", str), parse.need(body, "model_seq_id", int),
        parse.need(body, "base_model", str), asdict(parse.lora_spec(body, 1)), parse.metadata(body),
        parse.optimizer(body),
    ),
    "/optim_step": lambda body, _: (
        parse.need(body, "model_id", str), parse.need(body, "seq_id", int),
        parse.step_params(body, "adamw"),
    ),
    "/save_weights": lambda body, _: _save("save_weights", "weights", body),
    "/save_weights_for_sampler": lambda body, _: _save(
        "save_weights_for_sampler", "sampler_weights", body
    ),
    "/load_weights": lambda body, _: (
        fields.check("load_weights", body), parse.need(body, "path", str),
        parse.maybe(body, "optimizer", bool, False), parse.optimizer(body),
    ),
    "/asample": _sample,
    "/forward": lambda body, model: _call(body, "forward_input", model),
    "/forward_backward": lambda body, model: _call(body, "forward_backward_input", model),
    "/create_session": lambda body, _: (parse.metadata(body), parse.text(body, "display_name")),
    "/finish": lambda body, _: parse.finish(body),
    "/ttl": lambda body, _: parse.ttl(body),
    "/sessions/search": lambda body, _: rest._matches(SESSIONS, SESSION, body),  # type: ignore
}  # fmt: skip


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    tower: Any = SimpleNamespace(processor=PROCESSOR)
    found, model = _recorded(), replace(registry.inspect_model(MODEL), vision=tower)
    messages = [one.body for one in found if one.headers.get("content-type") == PROTOBUF]
    messages += [_seen(body) for body in messages]
    texts = [
        *MORE,
        *(
            (end, json.loads(one.body))
            for one in found
            for end in READERS
            if one.path.endswith(end) and one.body.startswith(b"{")
        ),
    ]
    missing = set(READERS) - {end for end, _ in texts}
    assert messages and not missing, missing

    def one(attempt: Attempt) -> str:
        rng = attempt.rng
        try:
            if rng.random() < 0.5:
                body = _message(rng, rng.choice(messages))
                attempt.note(body[:3000])
                _read(training_calls.parse_call(body), model)
                return "protobuf: taken"
            end, sent = rng.choice(texts)
            body = json_text(rng, changed(rng, sent))
            attempt.note(end, body[:3000])
            bodies.count_values(body)
            content = bodies.parse_json(body)
            if not meta.is_text(json.dumps(content, allow_nan=False, ensure_ascii=False)):
                raise Failure("its text can't be sent again")
            READERS[end](content, model)
        except Failure:
            raise
        except Exception as error:
            refusal(error, kinds=(*USER, Refusal))
            return f"refused by {raised_by(error)}"
        return "JSON: taken"

    yield one


def _seen(body: bytes) -> bytes:
    """A message with images in front of its first datum."""
    message = pb.ForwardBackwardRequest.FromString(body)
    for chunk in SEEN[1:]:
        image = message.data[0].model_input.add().image
        image.data, image.format = base64.b64decode(chunk["data"]), chunk["format"]
    return message.SerializeToString()


def _message(rng: Random, body: bytes) -> bytes:
    if rng.random() < 1 / 3:
        return changed_bytes(rng, body)
    return changed_message(rng, body, (1, 2, 8))


def _recorded() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"checkpoints": Path(folder), "device": "cpu", "threads": 1}
        with Backend(ServerConfig({"m": MODEL}, **options)) as backend:
            found, client = record(backend.url)
            client.close("success").result()
    return found


def _check_ids(ids: NDArray[np.int32], images: Sequence[HeldImage], model: BaseModel) -> None:
    rows = {int(row) for image in images for row in image.ids}
    if ids.dtype != np.int32 or ids.max() >= model.vocab or not {*ids[ids < 0].tolist()} <= rows:
        raise Failure(f"the ids are {ids}, of images {sorted(rows)}")


def _check_batch(batch: Batch, model: BaseModel) -> None:
    _check_ids(batch.tokens, batch.images, model)
    _check_ids(batch.targets, (), model)
    rows = int(batch.lengths.sum())
    if rows != len(batch.tokens) or int((batch.lengths * batch.counts).sum()) != len(batch.targets):
        raise Failure(f"{rows} rows of {len(batch.tokens)} tokens, {len(batch.targets)} targets")
    for key, array in batch.inputs.items():
        if array.shape != batch.targets.shape or not np.isfinite(array).all():
            raise Failure(f"{key} is {array}")
    if batch.nbytes <= 0:
        raise Failure("it holds nothing")
