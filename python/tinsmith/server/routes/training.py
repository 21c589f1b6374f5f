"""The Tinker endpoints with which clients train. ROUTES is the table: one row each.

A handler translates: it reads the body (server/wire), submits to the worker through the service,
and returns a JSON object. A refused request still takes its place in a run's order, so that later
requests do not wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.checkpoints import encryption
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import ADAMW, OPTIMIZERS
from tinsmith.custom_losses import custom_loss
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.jobs import LoadJob, SaveJob, SnapshotJob, StateSpec
from tinsmith.engine.runs import Job
from tinsmith.engine.training import OptimJob, TrainJob
from tinsmith.server.service.bodies import (
    BODY_BYTES_MAX,
    LARGE_JSON_BYTES_MAX,
    parsed_json,
    read_body,
    read_json,
)
from tinsmith.server.service.images import hold_images
from tinsmith.server.service.promises import failed, owner, when_done
from tinsmith.server.service.samplers import SamplerInfo
from tinsmith.server.service.service import Service
from tinsmith.server.service.sessions import RunInfo, Session
from tinsmith.server.wire import fields, fireworks_names, json_calls, parse, replies, training_calls
from tinsmith.server.wire.chunking import JSON, LARGE

Handler = Callable[[Service, Request], Awaitable[dict[str, Any] | Response]]

# create_model_via_load_weights: SDK 0.34 then loads as 0.38 does. The SDK splits a forward_backward
# into requests that are not marked as one call: with chunks this large there is only one, which is
# executed whole or not at all. Several chunks come in order (see overload.py).
CLIENT_CONFIG = {
    "create_model_via_load_weights": True,
    "fwdbwd_max_chunk_bytes_count": 256_000_000,
    "fwdbwd_max_chunk_len": 1_000_000,
    "parallel_fwdbwd_chunks": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
LOSSES_MAX = 256  # custom losses that one session may upload


def place(body: dict[str, Any]) -> tuple[str, int]:
    """A request's run, and its turn in that run."""
    return parse.need(body, "model_id", str), parse.need(body, "seq_id", int)


# ---- sessions ----


async def client_config(service: Service, request: Request) -> dict[str, Any]:
    # If true, create_custom_loss sends its graph here; otherwise the SDK evaluates it.
    return {**CLIENT_CONFIG, "custom_loss_server_side": custom_loss.available()}


async def dynamic_config(service: Service, request: Request) -> dict[str, Any]:
    return DYNAMIC_CONFIG


async def telemetry(service: Service, request: Request) -> dict[str, Any]:
    return {"status": "accepted"}


async def create_session(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    session = await service.retries.once(
        owner(request), request, body, lambda: service.sessions.add(request, body)
    )
    return {"type": "create_session", "session_id": session.id}


async def heartbeat(service: Service, request: Request) -> dict[str, Any]:
    service.sessions.find(request, parse.need(await read_json(service, request), "session_id", str))
    return {"type": "session_heartbeat"}


async def finish_session(service: Service, request: Request) -> dict[str, Any]:
    name = request.path_params["session_id"]
    session = service.sessions.get(name)
    if session is None or not session.ended:  # repeating a finish is not an error
        session = service.sessions.find(request, name)
        body = await read_json(service, request, empty=b"{}")
        await service.disk(service.state.finish_session, session.id, parse.finish(body))
        service.end_session(session)
    return {}


# ---- training ----


async def create_model(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    session, number = _run_place(service, request, body)
    base_only = parse.maybe(body, "base_only", bool, False)
    model_id = f"{session.id}:train:{number}"
    if fireworks_names.is_asking(session.id, body) and not base_only:
        model_id = fireworks_names.run_id(session.id, number)

    async def describe() -> tuple[RunInfo, LoraSpec]:
        fields.check("create_model", body)
        kind = parse.optimizer(body) or ADAMW
        asked = parse.need(body, "base_model", str)
        base, model = service.bases.name(asked), service.bases.model(asked)
        seed = service.fresh_seed(f"{session.number}:train:{number}")
        spec = replace(parse.lora_spec(body, seed), optimizer=kind)
        about = parse.metadata(body)
        return RunInfo(model_id, session, base, model, spec, about, base_only), spec

    reply = {"type": "create_model", "model_id": model_id}
    return await _create(service, request, session, model_id, describe, reply)


def _run_place(service: Service, request: Request, body: dict[str, Any]) -> tuple[Session, int]:
    """A new run's session, and its number in that session."""
    session = service.sessions.find(request, parse.need(body, "session_id", str))
    return session, parse.need(body, "model_seq_id", int)


async def load_weights(service: Service, request: Request) -> dict[str, Any]:
    """Loads into an existing run (model_id, seq_id), or creates a run from the weights."""
    body = await read_json(service, request)
    if body.get("model_id") is None:
        return await _create_from_state(service, request, body)
    model_id, seq = place(body)
    reply = {"type": "load_weights", "path": body.get("path"), "model_id": model_id}

    async def prepare(run: RunInfo) -> LoadJob:
        fields.check("load_weights", body)
        path = parse.need(body, "path", str)
        own = ((model_id,), run.fits) if fireworks_names.is_run(model_id) else ()
        folder, _ = await service.disk(service.checkpoints.find, path, "weights", *own)
        kind, trained = parse.optimizer(body), run.lora.optimizer
        if kind not in (None, trained):
            raise ValueError(f"this run is trained with {trained}, which {kind} can't replace")
        return LoadJob(folder, parse.maybe(body, "optimizer", bool, False))

    return await service.turn(request, model_id, seq, prepare, lambda _: reply)


async def _create_from_state(
    service: Service, request: Request, body: dict[str, Any]
) -> dict[str, Any]:
    session, number = _run_place(service, request, body)
    model_id = f"{session.id}:train:{number}"

    async def describe() -> tuple[RunInfo, StateSpec]:
        fields.check("load_weights", body)
        kind, loads = parse.optimizer(body), parse.maybe(body, "optimizer", bool, False)
        folder, meta = await service.disk(service.checkpoints.find, parse.need(body, "path", str))
        asked = parse.maybe(body, "base_model", str, meta.base_model)
        base, model = service.bases.name(asked), service.bases.model(asked)
        if loads and kind not in (None, meta.optimizer):
            raise ValueError(f"the checkpoint has the state of {meta.optimizer}, not of {kind}")
        kind = meta.optimizer if loads else kind or ADAMW
        spec = StateSpec(folder, loads, meta.created, kind)
        lora, about = replace(meta.lora, optimizer=kind), parse.metadata(body)
        return RunInfo(model_id, session, base, model, lora, about), spec

    reply = {"type": "load_weights", "path": body.get("path"), "model_id": model_id}
    return await _create(service, request, session, model_id, describe, reply)


async def _create(
    service: Service,
    request: Request,
    session: Session,
    model_id: str,
    describe: Callable[[], Awaitable[tuple[RunInfo, LoraSpec | StateSpec]]],
    reply: dict[str, Any],
) -> dict[str, Any]:
    """Creates a run. A repeated request, however late, gets the existing run."""

    async def make() -> tuple[RunInfo, LoraSpec | StateSpec]:
        if model_id in session.runs:
            raise ValueError(f"there is a run {model_id} already; choose another model_seq_id")
        run, spec = await describe()
        await service.sessions.keep_run(run)
        return run, spec

    def start() -> Future[None]:
        if made is not None and model_id not in session.made:
            service.sessions.find(request, session.id)  # it may have ended meanwhile
            run, spec = made
            service.sessions.add_run(run)
            future = session.made[model_id] = service.worker.create(
                model_id, run.base, spec, session.owner, service.weight(session.owner)
            )
            future.add_done_callback(partial(service.sessions.made_run, model_id))
        return session.made[model_id]

    promise = partial(service.promises.make, request, f"{model_id}:create", encode=lambda _: reply)
    try:
        made = None if model_id in session.made else await make()
    except Exception as error:
        return promise(start=partial(failed, error), model_id=model_id)
    return promise(start=start, model_id=model_id)


async def get_info(service: Service, request: Request) -> dict[str, Any]:
    model_id = parse.need(await read_json(service, request), "model_id", str)
    run = service.sessions.run(request, model_id)
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_name": run.base,
        "model_data": {
            "arch": run.model.family.name,
            "model_name": run.base,
            "tokenizer_id": str(run.model.tokenizer_dir.resolve()),
        },
        "is_lora": not run.base_only,
        "lora_rank": None if run.base_only else run.lora.rank,
        "optimizer_config": OPTIMIZERS[run.lora.optimizer].config,
    }


async def forward_backward(service: Service, request: Request) -> dict[str, Any]:
    """As protobuf; or as JSON, with a JSON reply."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        return await _training_call(service, request, None)
    return await _training_call(service, request, "forward_backward_input")


async def forward(service: Service, request: Request) -> dict[str, Any]:
    """Without a gradient, as JSON. SDKs since 0.25 send a forward_backward with a flag instead."""
    return await _training_call(service, request, "forward_input")


async def _training_call(service: Service, request: Request, key: str | None) -> dict[str, Any]:
    """`key` is the field with a JSON call's data; None: the call is protobuf."""
    limit = LARGE_JSON_BYTES_MAX if key else BODY_BYTES_MAX
    with service.arrivals.begin() as arrival:
        body = await read_body(service, request, arrival, limit)
        if key is None:
            parsed = await service.beside(len(body), training_calls.parse_call, body)
            head, read_call = parsed.head, lambda: parsed
            model_id, seq, forward_only = head.model_id, head.seq_id, head.forward_only
        else:
            content = await parsed_json(service, body, arrival)
            (model_id, seq), forward_only = place(content), key == "forward_input"
            read_call = partial(json_calls.call_of, content, key)

        async def prepare(run: RunInfo) -> TrainJob:
            call, held = await service.beside(len(body), read_call), list[HeldImage]()
            losses = dict(run.session.losses)
            if call.lifted.images:
                look = partial(training_calls.look_at_images, call, run.model)
                placed = await service.beside(len(body), look, service.config.image_tokens)
                held = await hold_images(service, arrival, placed, came=2 * len(body) if key else 0)
            find = partial(service.samplers.sequences.find, run.session.id)
            read = partial(training_calls.batch, call, run.model, losses, find)
            batch = await service.beside(len(body), read, held)
            if (teacher := batch.teacher) is not None:
                name = await service.samplers.teacher(request, run, teacher.name)
                batch = replace(batch, teacher=replace(teacher, name=name))
            return TrainJob(batch, backward=not forward_only)

        encode = replies.batch_message if key is None else replies.batch_text
        weigh, trains = replies.batch_bytes, not forward_only
        return await service.turn(request, model_id, seq, prepare, encode, weigh, trains)


async def optim_step(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    model_id, seq = place(body)

    async def prepare(run: RunInfo) -> OptimJob:
        return OptimJob(parse.step_params(body, run.lora.optimizer))

    return await service.turn(request, model_id, seq, prepare, lambda found: {"metrics": found})


async def save_weights(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    model_id, seq = place(body)

    async def prepare(run: RunInfo) -> SaveJob:
        fields.check("save_weights", body)
        name, overwrite = parse.need(body, "path", str), parse.maybe(body, "overwrite", bool, False)
        user_metadata, ttl = parse.metadata(body), parse.ttl(body)
        return SaveJob(
            service.store.folder(service.store.path(model_id, "weights", name)),
            lambda step: run.meta("weights", step, user_metadata, ttl),
            optimizer=True,
            overwrite=overwrite or fireworks_names.is_run(model_id),
        )

    path = fireworks_names.ref_of(f"tinker://{model_id}/weights/{body.get('path')}")
    reply = {"type": "save_weights", "path": path}
    return await service.turn(request, model_id, seq, prepare, lambda _: reply)


async def save_weights_for_sampler(service: Service, request: Request) -> dict[str, Any]:
    """With a name, on disk; without, as a new sampling session that keeps these weights or,
    inflight, uses the run's newest."""
    body = await read_json(service, request)
    model_id, seq = place(body)
    number = parse.optional(body, "sampling_session_seq_id", int)
    reply: dict[str, Any] = {"type": "save_weights_for_sampler"}
    made: list[SamplerInfo] = []

    async def prepare(run: RunInfo) -> Job[Any]:
        inflight = _inflight(body)
        if body.get("path") is None and number is not None:
            info = await _new_sampler(service, request, run, number)
            reply["sampling_session_id"] = info.id
            made.append(info)
            job = SnapshotJob(info.id, inflight)
            when_done(job.future, partial(_made_sampler, service, info, model_id, job.future))
            return job
        path = service.store.path(model_id, "sampler_weights", parse.need(body, "path", str))
        user_metadata, ttl = parse.metadata(body), parse.ttl(body)
        reply["path"] = fireworks_names.ref_of(path)
        return SaveJob(
            service.store.folder(path),
            lambda step: run.meta("sampler_weights", step, user_metadata, ttl),
            optimizer=False,
            overwrite=fireworks_names.is_run(model_id),
        )

    def begin() -> None:
        for info in made:
            service.samplers.add(info)

    return await service.turn(request, model_id, seq, prepare, lambda _: reply, begin=begin)


def _made_sampler(service: Service, info: SamplerInfo, model_id: str, made: Future[int]) -> None:
    if made.exception() is None:
        service.samplers.locate(info, model_id, made.result())


def _inflight(body: dict[str, Any]) -> bool:
    """Whether a sampling session is inflight; ValueError for settings that exclude each other."""
    parse.one_of(body, "checkpoint_type", ("base",), "a LoRA checkpoint is a PEFT adapter")
    fields.check("save_weights_for_sampler", body)
    kind, named = parse.maybe(body, "kind", str, "snapshot"), body.get("path") is not None
    if kind not in ("snapshot", "inflight"):
        raise ValueError(f"kind must be 'snapshot' or 'inflight', {parse.short(kind)} came")
    if named and kind == "inflight":
        raise ValueError(
            "inflight weights change, so they are not saved under a path: leave it out"
        )
    told = [key for key in ("ttl_seconds", "user_metadata") if body.get(key)]
    if told and not named:
        raise ValueError(f"{told[0]} needs a path: a sampling session alone is no checkpoint")
    return kind == "inflight"


async def _new_sampler(
    service: Service, request: Request, run: RunInfo, number: int
) -> SamplerInfo:
    """A sampling session of a run, stored on disk."""
    info = SamplerInfo(f"{run.session.id}:sample:{number}", run.session, run.base, run.model)
    if info.id not in service.samplers:
        await service.samplers.keep(info)
        service.sessions.run(request, run.id)  # it may have ended meanwhile
    if info.id in service.samplers:
        raise ValueError(f"there is a sampling session {info.id} already")
    return info


async def save_weights_external(service: Service, request: Request) -> dict[str, Any]:
    """PEFT's files, to be downloaded one by one: see transfers.py."""
    body = await read_json(service, request)
    model_id, seq = place(body)

    async def prepare(run: RunInfo) -> SaveJob:
        fields.check("save_weights_external", body)
        keys = encryption.recipients(parse.maybe(body, "age_encryption_recipients", list, []))
        path = service.store.path(model_id, "external_weights", parse.need(body, "path", str))
        ttl = parse.ttl(body)
        return SaveJob(
            service.store.folder(path),
            lambda step: replace(run.meta("external_weights", step, {}, ttl), recipients=keys),
            optimizer=False,
        )

    path = f"tinker://{model_id}/external_weights/{body.get('path')}"
    reply = {"type": "save_weights_external", "path": path}
    return await service.turn(request, model_id, seq, prepare, lambda _: reply)


async def create_custom_loss(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    session = service.sessions.find(request, parse.need(body, "session_id", str))
    loss_id = f"{session.id}:loss:{parse.need(body, 'custom_loss_seq_id', int)}"

    async def check() -> None:
        session.losses[loss_id] = await service.beside(LARGE, parse.uploaded_loss, body)

    def start() -> Future[None]:
        if len(session.losses) >= LOSSES_MAX:
            raise ValueError(f"a session has at most {LOSSES_MAX} custom losses")
        return asyncio.run_coroutine_threadsafe(check(), asyncio.get_running_loop())

    reply = {"type": "create_custom_loss", "loss_id": loss_id}
    return service.promises.make(request, loss_id, start, lambda _: reply)


async def unload_model(service: Service, request: Request) -> dict[str, Any]:
    model_id = parse.need(await read_json(service, request), "model_id", str)
    name = f"{model_id}:unload"
    if service.promises.find(request, name) is None:
        service.sessions.run(request, model_id)  # refuses an unknown run

    def start() -> Future[None]:
        run = service.sessions.runs.pop(model_id)
        service.worker.forget([run.id], [])
        future: Future[None] = Future()
        future.set_result(None)
        return future

    reply = {"type": "unload_model", "model_id": model_id}
    return service.promises.make(request, name, start, lambda _: reply, model_id=model_id)


# Routes are tried one after the other: those of every step come first.
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/forward_backward", forward_backward),
    ("POST", "/forward", forward),
    ("POST", "/optim_step", optim_step),
    ("POST", "/client/config", client_config),
    ("POST", "/client/dynamic_config", dynamic_config),
    ("POST", "/telemetry", telemetry),
    ("POST", "/create_session", create_session),
    ("POST", "/session_heartbeat", heartbeat),
    ("POST", "/sessions/{session_id}/finish", finish_session),
    ("POST", "/create_model", create_model),
    ("POST", "/unload_model", unload_model),
    ("POST", "/get_info", get_info),
    ("POST", "/save_weights", save_weights),
    ("POST", "/save_weights_for_sampler", save_weights_for_sampler),
    ("POST", "/save_weights_external", save_weights_external),
    ("POST", "/load_weights", load_weights),
    ("POST", "/create_custom_loss", create_custom_loss),
)
