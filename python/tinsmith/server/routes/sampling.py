"""The Tinker endpoints with which clients sample. ROUTES is the table.

A sampling session has a base model or a checkpoint. Its requests have no order: each gets its
promise as soon as the queue has space for it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from starlette.requests import Request

from tinsmith.engine.decoding import SampleRequest, SampleResult
from tinsmith.engine.image_cache import HeldImage
from tinsmith.server.http.overload import Overloaded, Reservation
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import LARGE_JSON_BYTES_MAX, parsed_json, read_body, read_json
from tinsmith.server.service.checkpoints import Found
from tinsmith.server.service.images import hold_images
from tinsmith.server.service.promises import Refusal, failed, owner, when_done
from tinsmith.server.service.samplers import SamplerInfo
from tinsmith.server.service.service import Service
from tinsmith.server.wire import fields, parse, replies, sampling_calls
from tinsmith.server.wire.chunking import LARGE

CLONE = 1_000_000_000  # clone n of a sampling client numbers its requests from n times this


async def create_sampling_session(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    fields.check("create_sampling_session", body)
    session = service.sessions.find(request, parse.need(body, "session_id", str))
    name = f"{session.id}:sample:{parse.need(body, 'sampling_session_seq_id', int)}"
    path = parse.optional(body, "model_path", str)
    known = service.samplers.get(name)
    if known is not None and (
        known.path != path or not (path or known.base == _base(service, body))
    ):
        number, has = body["sampling_session_seq_id"], known.path or known.base
        raise Refusal(400, f"there is a sampling_session_seq_id {number} already, of {has}")
    if known is None:
        if path is None:
            asked, found = parse.need(body, "base_model", str), None
        else:
            found = await service.disk(service.checkpoints.find, path, "sampler_weights")
            asked = found[1].base_model
        info = SamplerInfo(
            name, session, service.bases.name(asked), service.bases.model(asked), path
        )
        await service.samplers.keep(info)
        service.sessions.find(request, session.id)  # it may have ended meanwhile
        if name not in service.samplers:
            _open_sampler(service, info, found)
    return {"type": "create_sampling_session", "sampling_session_id": name}


def _base(service: Service, body: dict[str, Any]) -> str:
    return service.bases.name(parse.need(body, "base_model", str))


def _open_sampler(service: Service, info: SamplerInfo, found: Found | None) -> None:
    service.samplers.add(info)
    if info.path is None or found is None:
        service.worker.open_base(info.id, info.base)
        return
    folder, meta = found
    service.worker.open_checkpoint(info.id, info.base, folder, meta.created)
    service.samplers.locate(info, info.path.removeprefix("tinker://").partition("/")[0], meta.step)


async def get_sampler(service: Service, request: Request) -> dict[str, Any]:
    sampler = service.samplers.find(request, request.path_params["sampler_id"])
    reply = {"sampler_id": sampler.id, "base_model": sampler.base}
    return reply if sampler.path is None else {**reply, "model_path": sampler.path}


async def join_sampling_session(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    sampler = service.samplers.find(request, parse.need(body, "sampling_session_id", str))
    sampler.clones += 1
    return {"type": "join_sampling_session", "client_counter": sampler.clones}


async def asample(service: Service, request: Request) -> dict[str, Any]:
    with service.arrivals.begin() as arrival:
        text = await read_body(service, request, arrival, LARGE_JSON_BYTES_MAX)
        body = await parsed_json(service, text, arrival)
        name = parse.need(body, "sampling_session_id", str)
        number = parse.need(body, "seq_id", int)
        request_id = f"{name}:seq:{number}"
        if (known := service.promises.find(request, request_id)) is not None:
            return known.promise
        promise = partial(_promise_sample, service, request, name, number)
        check = partial(sampling_calls.sample_request, result_bytes_max=service.promises.bytes_max)
        try:
            sampler = service.samplers.find(request, name)
            seed = service.fresh_seed(f"{sampler.place}:seq:{number}")
            held = list[HeldImage]()
            if sampling_calls.has_images(body):
                look = partial(sampling_calls.look_at_images, body, sampler.model)
                placed = await service.beside(LARGE, look, service.config.image_tokens)
                held = await hold_images(service, arrival, placed, came=2 * len(text))
            read = partial(check, body, sampler.model, seed, held=held)
            wanted = await service.beside(len(text), read)
        except Overloaded:  # it is to come again
            raise
        except Exception as error:
            return promise(partial(failed, error))

        def start() -> Future[SampleResult]:
            service.samplers.find(request, name)  # it may have ended meanwhile
            future = service.worker.sample(name, wanted, client=sampler.session.number)
            if wanted.record:  # recorded before its result can be read
                when_done(future, partial(_record, service, sampler, request_id, wanted, future))
            return future

        with await service.queue.enter(
            sampling_calls.held_bytes(wanted, sampler.model.context)
        ) as queued:
            return promise(start, wanted.num_samples, queued)


def _promise_sample(
    service: Service,
    request: Request,
    name: str,
    number: int,
    start: Callable[[], Future[SampleResult]],
    count: int = 0,
    queued: Reservation | None = None,
) -> dict[str, Any]:
    """The promise of `count` samples, or of a refusal."""
    request_id = f"{name}:seq:{number}"
    first, sampler = service.promises.find(request, request_id) is None, service.samplers.get(name)
    done = None if sampler is None else sampler.completions(number // CLONE)
    promise = service.promises.make(
        request,
        request_id,
        start,
        sampling_calls.sample_message,
        queued,
        weigh=sampling_calls.result_bytes,
        text=replies.sample_text,
        sample_sequence_ids=[f"{request_id}:{index}" for index in range(count)],
    )
    if first and done is not None:
        pending = service.promises.pending[owner(request), request_id]
        when_done(pending.future, lambda: done.add(request_id))
    return promise


def _record(
    service: Service,
    sampler: SamplerInfo,
    request_id: str,
    wanted: SampleRequest,
    done: Future[SampleResult],
) -> None:
    if done.exception() is None and not sampler.session.ended:
        service.samplers.sequences.add(sampler.session.id, request_id, wanted.prompt, done.result())


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/asample", asample),
    ("POST", "/create_sampling_session", create_sampling_session),
    ("POST", "/join_sampling_session", join_sampling_session),
    ("GET", "/samplers/{sampler_id}", get_sampler),
)
