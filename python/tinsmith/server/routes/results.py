"""The Tinker endpoints with which clients wait for results. ROUTES is the table.

A poll is shorter than the SDK's timeout. It ends when its client disconnects. If the result is not
there in time, the reply is 408, and the client polls again.
"""

import asyncio
import contextlib
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tinsmith.engine.errors import GO_ON, clipped, explain
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import read_json, reply_of
from tinsmith.server.service.promises import Pending, Refusal
from tinsmith.server.service.service import Service
from tinsmith.server.wire import parse
from tinsmith.server.wire.chunking import PROTOBUF

LOOK_SECONDS = 1.0  # between two checks whether the client of a poll has disconnected


async def retrieve_future(service: Service, request: Request) -> dict[str, Any] | Response:
    """Waits for a result, less than the SDK's 45 s; after a 408 the client polls again."""
    body = await read_json(service, request)
    name = parse.need(body, "request_id", str)
    pending = service.promises.find(request, name)
    if pending is None:
        raise Refusal(
            404,
            f"there is no request {name}: its result was read before and is not kept any longer, "
            f"or the server was started again since: then {GO_ON}",
        )
    if not await _finished(request, pending, service.config.poll_seconds):
        again = {"type": "try_again", "request_id": name, "queue_state": "active"}
        reason = service.worker.waits_for(pending.future)
        if reason is not None:
            again |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
        return JSONResponse(again, status_code=408)
    pending.read = asyncio.get_running_loop().time()
    error = pending.future.exception()
    if error is not None:
        failure = explain(error)
        return {"error": clipped(str(failure)), "category": failure.category}
    found, accepted = pending.future.result(), request.headers.get("accept", "*/*")
    binary = pending.text is None or PROTOBUF in accepted or "*/*" in accepted
    encode = pending.encode if binary or pending.text is None else pending.text
    result = await service.beside(pending.bytes, encode, found)
    return reply_of(result) if isinstance(result, list) else result


async def retrieve_futures(service: Service, request: Request) -> dict[str, Any]:
    """One poll for all requests of a sampling session (or of one clone of its client): returns the
    completed ones. The client then reads each by retrieve_future."""
    body = await read_json(service, request)
    target = parse.need(body, "target", dict)
    sampler = service.samplers.find(
        request, parse.need(target, "sampling_session_id", str, "the target")
    )
    clone = parse.maybe(target, "cloned_sampler_id", int, 0)
    cursor = parse.maybe(body, "prev_cursor", int, 0)
    most = service.config.poll_seconds
    seconds = min(parse.maybe(body, "timeout", float, most), most)
    for name in parse.maybe(body, "retrieved_request_ids", list, []):
        pending = service.promises.find(request, name) if isinstance(name, str) else None
        if pending is not None and pending.read is None:
            pending.read = asyncio.get_running_loop().time()
    done, end = sampler.completions(clone), asyncio.get_running_loop().time() + seconds
    while not (names := await done.after(cursor, min(seconds, LOOK_SECONDS))):
        seconds = end - asyncio.get_running_loop().time()
        if seconds <= 0:
            break
        await _look_for(request)
    completions = []
    for name in names:
        pending = service.promises.find(request, name)
        failed = pending is None or (pending.future.done() and pending.future.exception())
        completions.append({"state": "failed" if failed else "finished", "request_id": name})
    return {"completions": completions, "cursor": max(cursor, done.last)}


async def cancel_future(service: Service, request: Request) -> dict[str, Any]:
    name = parse.need(await read_json(service, request), "request_id", str)
    pending = service.promises.find(request, name)
    if pending is not None:
        service.worker.cancel(pending.future)
    return {}


async def _finished(request: Request, pending: Pending, seconds: float) -> bool:
    """Waits for a result; False after a timeout."""
    end = asyncio.get_running_loop().time() + seconds
    while not pending.here.is_set():
        left = end - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pending.here.wait(), min(left, LOOK_SECONDS))
            return True
        await _look_for(request)
    return True


async def _look_for(request: Request) -> None:
    """Ends the poll of a disconnected client: each poll takes memory."""
    if await request.is_disconnected():
        raise ClientDisconnect


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/retrieve_future", retrieve_future),
    ("POST", "/retrieve_futures", retrieve_futures),
    ("POST", "/cancel_future", cancel_future),
)
