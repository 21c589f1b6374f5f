"""The Tinker endpoints that describe models, runs, checkpoints and sessions. ROUTES is the table.

All of it except the timelines is read from disk, so it survives a restart; threads read and write
it. Tinker's features that a local server does not have are refused by name in REFUSED, never left
unanswered.
"""

from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.checkpoints.meta import Meta, is_time
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.server.http.error_bodies import SERVERLESS
from tinsmith.server.records import timeline
from tinsmith.server.records.database import CheckpointRow, RunRow, SessionRow
from tinsmith.server.routes.metrics import healthz
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import read_json
from tinsmith.server.service.promises import Refusal, owner
from tinsmith.server.service.service import Service
from tinsmith.server.wire import fields, parse
from tinsmith.system.home import split_context

T = TypeVar("T")

LOCAL = "local"  # the owner and the project of everything here
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


async def capabilities(service: Service, request: Request) -> dict[str, Any]:
    models = [
        {
            "model_name": name,
            "max_context_length": model.context,
            "trainable": True,
            "sampleable": True,
        }
        for name, model in service.bases.items()
    ]
    return {"supported_models": models}


async def weights_info(service: Service, request: Request) -> dict[str, Any]:
    path = parse.need(await read_json(service, request), "tinker_path", str)
    runs = () if request.scope["path"].startswith(SERVERLESS) else None
    try:
        _, meta = await service.disk(service.checkpoints.find, path, "weights", runs)
    except FileNotFoundError:  # Fireworks' names do not contain the kind
        _, meta = await service.disk(service.checkpoints.find, path, "sampler_weights", runs)
    return {
        "base_model": meta.base_model,
        "optimizer_config": OPTIMIZERS[meta.optimizer].config,
        "is_lora": True,
        "lora_rank": meta.rank,
        "train_unembed": meta.unembed,
        "train_mlp": meta.mlp,
        "train_attn": meta.attn,
    }


# ---- runs and checkpoints ----


async def list_runs(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 20)
    rows, cursor = _page(await service.disk(service.state.runs), limit, offset)
    runs = await service.disk(lambda: [_run(service, row) for row in rows])
    return {"training_runs": runs, "cursor": cursor}


async def get_run(service: Service, request: Request) -> dict[str, Any]:
    name = request.path_params["run"]
    return await service.disk(lambda: _run(service, service.state.run(name)))


async def list_run_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    found = await service.disk(_checkpoints, service, request.path_params["run"])
    return {"checkpoints": found}


async def list_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 100)

    def find() -> list[dict[str, Any]]:
        found = [item for row in service.state.runs() for item in _checkpoints(service, row.id)]
        return sorted(found, key=lambda item: item["time"], reverse=True)

    items, cursor = _page(await service.disk(find), limit, offset)
    return {"checkpoints": items, "cursor": cursor}


async def search_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    """The checkpoints that match all criteria, newest first."""
    body = await read_json(service, request)
    fields.check("search_checkpoints", body)
    limit, anything = _limit(body), _own(body)
    kind = parse.optional(body, "checkpoint_type", str)
    if kind is not None and kind not in TYPES.values():
        kinds = " or ".join(TYPES.values())
        raise Refusal(400, f"checkpoint_type must be {kinds}, {kind!r:.80} came")
    bases = _base_models(body)
    wanted = parse.maybe(body, "user_metadata", dict, {})

    def matches(meta: Meta) -> bool:
        return (
            anything
            and not service.store.has_ended(meta)
            and kind in (None, TYPES[meta.kind])
            and (bases is None or meta.base_model in bases)
            and all(meta.user_metadata.get(key) == value for key, value in wanted.items())
        )

    def find() -> list[tuple[datetime, str, CheckpointRow]]:
        runs = service.state.runs()
        entries = [entry for run in runs for entry in service.state.checkpoints(run.id)]
        found = [entry for entry in entries if matches(entry.meta)]
        dated = [(datetime.fromisoformat(e.meta.created), e.path, e) for e in found]
        return sorted(dated, key=lambda item: item[:2], reverse=True)

    found = await service.disk(find)
    cursor = parse.optional(body, "cursor", dict)
    if cursor is not None:
        last = _time(cursor), parse.need(cursor, "last_checkpoint_uuid", str, "the cursor")
        found = [item for item in found if item[:2] < last]
    page, left = found[:limit], found[limit:]
    reply: dict[str, Any] = {"checkpoints": [_checkpoint(entry) for _, _, entry in page]}
    if page and left:
        created, path, _ = page[-1]
        reply["next_cursor"] = {
            "last_created_at": created.isoformat(),
            "last_checkpoint_uuid": path,
        }
    return reply


def _time(cursor: dict[str, Any]) -> datetime:
    text = parse.need(cursor, "last_created_at", str, "the cursor")
    if not is_time(text):
        raise Refusal(400, f"last_created_at must be a time with its zone, {text!r:.80} came")
    return datetime.fromisoformat(text)


async def delete_checkpoint(service: Service, request: Request) -> dict[str, Any]:
    """The checkpoint's id is two segments, weights/<name>."""
    await service.disk(service.store.delete, path_of(request))
    return {}


async def publish(service: Service, request: Request) -> dict[str, Any]:
    """Marks the checkpoint as published. All clients of a local server can read its checkpoints
    anyway."""
    public = request.method == "POST"
    await service.disk(service.store.update, path_of(request), public=public)
    return {}


async def set_ttl(service: Service, request: Request) -> dict[str, Any]:
    """Counted from now; null: for ever. Without --expire it is only recorded."""
    seconds = parse.ttl(await read_json(service, request))

    def changes(meta: Meta) -> dict[str, Any]:
        age = datetime.now(UTC) - datetime.fromisoformat(meta.created)
        return {"ttl_seconds": seconds and seconds + int(age.total_seconds())}

    await service.disk(service.store.change, path_of(request), changes)
    return {}


def path_of(request: Request) -> str:
    """The path of the checkpoint in a request's URL."""
    return f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}"


def _run(service: Service, row: RunRow) -> dict[str, Any]:
    listing = service.state.listing(row.id)
    items = [_checkpoint(item) for item in _alive(service, listing.entries)]
    newest: dict[str, Any] = {item["checkpoint_type"]: item for item in items}
    return {
        "training_run_id": row.id,
        "base_model": row.base_model,
        "model_owner": LOCAL,
        "is_lora": True,
        "corrupted": bool(listing.unreadable),
        "lora_rank": row.rank,
        "last_request_time": max([row.created, *(item["time"] for item in items)]),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": row.user_metadata,
    }


def _checkpoints(service: Service, run: str) -> list[dict[str, Any]]:
    """A run's checkpoints, oldest first."""
    return [_checkpoint(item) for item in _alive(service, service.state.checkpoints(run))]


def _alive(service: Service, entries: list[CheckpointRow]) -> list[CheckpointRow]:
    """The checkpoints that have not expired."""
    return [item for item in entries if not service.store.has_ended(item.meta)]


def _checkpoint(item: CheckpointRow) -> dict[str, Any]:
    meta = item.meta
    return {
        "checkpoint_id": "/".join(item.path.split("/")[-2:]),
        "checkpoint_type": TYPES[meta.kind],
        "time": meta.created,
        "tinker_path": item.path,
        "size_bytes": item.bytes,
        "public": meta.public,
        "user_metadata": meta.user_metadata or None,
        "expires_at": meta.expires and meta.expires.isoformat(),
        "base_model": meta.base_model,
    }


# ---- sessions ----


async def list_sessions(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 20)
    rows = await service.disk(service.state.sessions, owner(request))
    return {"sessions": [row.id for row in rows[offset : offset + limit]]}


async def get_session(service: Service, request: Request) -> dict[str, Any]:
    row = await _session(service, request)
    return {
        "training_run_ids": await service.disk(service.state.runs_of, row.id),
        "sampler_ids": await service.disk(service.state.samplers_of, row.id),
        "user_metadata": row.user_metadata,
        "display_name": row.display_name,
    }


async def export_trace(service: Service, request: Request) -> dict[str, Any]:
    """The URL of a session's timeline, which can be fetched without the API key."""
    session = (await _session(service, request)).id
    if session not in service.timelines:
        return {
            "status": "failed",
            "error": f"the server knows no calls of {session}: it keeps those since its start, of "
            f"the {timeline.SESSIONS_MAX} sessions that it heard of last",
        }
    here = str(request.url).partition("?")[0].rpartition("/")[0]
    url = f"{here}/trace/{service.timelines.ticket(session)}"
    return {"status": "ready", "url": service.access.signed(url)}


async def get_trace(service: Service, request: Request) -> Response:
    """The timeline; the URL has the ticket from `export_trace`."""
    session, ticket = request.path_params["session_id"], request.path_params["ticket"]
    known = compare_digest(ticket.encode(), service.timelines.ticket(session).encode())
    pieces = service.timelines.trace(session) if known else None
    if pieces is None:
        raise Refusal(404, "there is no such trace; export it again")
    return StreamingResponse(pieces, media_type="application/json")


async def search_sessions(service: Service, request: Request) -> dict[str, Any]:
    """The client's own sessions, newest first."""
    body = await read_json(service, request)
    fields.check("search_sessions", body)
    limit, anything = _limit(body), _own(body)
    cursor = parse.optional(body, "cursor", dict)
    rows = await service.disk(service.state.sessions, owner(request))
    found = [row for row in rows if anything and _matches(service, row, body)]
    if cursor is not None:
        last = parse.need(cursor, "last_session_id", str, "the cursor")
        places = [index for index, row in enumerate(found) if row.id == last]
        found = found[places[0] + 1 :] if places else []
    page, left = found[:limit], found[limit:]
    told = [(row, _status(service, row)) for row in page]
    summaries = await service.disk(lambda: [_summary(service, *item) for item in told])
    reply: dict[str, Any] = {"sessions": summaries}
    if page and left:
        reply["next_cursor"] = {
            "last_created_at": page[-1].created,
            "last_session_id": page[-1].id,
        }
    return reply


async def _session(service: Service, request: Request) -> SessionRow:
    """The session in a request's URL, which must be the client's own."""
    name = request.path_params["session_id"]
    rows = await service.disk(service.state.sessions, owner(request))
    row = next((item for item in rows if item.id == name), None)
    if row is None:
        raise Refusal(404, f"there is no session {name}")
    return row


def _base_models(body: dict[str, Any]) -> set[str] | None:
    """The base models of a search, also without their context suffix."""
    if body.get("base_models") is None:
        return None
    given = parse.need(body, "base_models", list)
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"base_models must be strings, {parse.short(name)} came")
    return {part for name in given for part in (name, split_context(name)[0])}


def _limit(body: dict[str, Any]) -> int:
    limit = parse.maybe(body, "limit", int, 50)
    if not 1 <= limit <= 200:
        raise Refusal(400, f"limit must be from 1 to 200, {limit} came")
    return limit


def _own(body: dict[str, Any]) -> bool:
    """Whether a search includes this server's only project and only owner."""
    projects = body.get("project_ids")
    if projects is not None:
        for name in parse.need(body, "project_ids", list):
            if name != LOCAL:
                raise Refusal(400, f"there is no project {name!r:.80}; all here is {LOCAL!r}")
    asked = parse.maybe(body, "owner", dict, {"type": "own"})
    kind = parse.need(asked, "type", str, "the owner")
    if kind not in ("own", "accessible", "user"):
        raise Refusal(400, f"the owner's type must be own, accessible or user, {kind!r:.80} came")
    mine = kind != "user" or LOCAL in parse.need(asked, "owner_urns", list, "the owner")
    return mine and projects != []


def _matches(service: Service, session: SessionRow, body: dict[str, Any]) -> bool:
    name = parse.optional(body, "display_name", str)
    exact = parse.optional(body, "session_id", str)
    words = (name or "").lower().split()
    named = bool(words) and all(word in (session.display_name or "").lower() for word in words)
    if (name or exact) and not named and session.id != exact:
        return False
    wanted = parse.maybe(body, "user_metadata", dict, {})
    if any(session.user_metadata.get(key) != value for key, value in wanted.items()):
        return False
    status = _status(service, session)
    if body.get("statuses") is None:
        return True
    for query in parse.need(body, "statuses", list):
        if not isinstance(query, dict):
            raise ValueError(f"statuses must be objects, {parse.short(query)} came")
        if status is None or query.get("type") != status["type"]:
            continue
        reasons = parse.maybe(query, "reasons", list, [])
        if not reasons or status.get("reason", {}).get("type") in reasons:
            return True
    return False


def _status(service: Service, session: SessionRow) -> dict[str, Any] | None:
    if session.finish is not None:
        return {"type": "client_finished", **session.finish}
    here = service.sessions.get(session.id)
    return {"type": "active"} if here is not None and not here.ended else None


def _summary(
    service: Service, session: SessionRow, status: dict[str, Any] | None
) -> dict[str, Any]:
    runs = service.state.runs_of(session.id)
    checkpoints = [item for run in runs for item in _checkpoints(service, run)]
    return {
        "session_id": session.id,
        "created_at": session.created,
        "owner": LOCAL,
        "project_id": LOCAL,
        "status": status,
        "checkpoints_count": len(checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
        "checkpoint_storage_bytes": sum(item["size_bytes"] for item in checkpoints),
    }


def _page(items: list[T], limit: int, offset: int) -> tuple[list[T], dict[str, int]]:
    """A page of a listing, and its cursor."""
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _window(request: Request, limit: int) -> tuple[int, int]:
    values = []
    for key, default in (("limit", limit), ("offset", 0)):
        text = request.query_params.get(key, str(default))
        if not text.isdecimal():
            raise Refusal(400, f"{key} must be a whole number, {text!r} came")
        values.append(int(text))
    return values[0], values[1]


def refuse(what: str) -> Handler:
    """A handler that refuses an unsupported feature by name."""

    async def handler(service: Service, request: Request) -> dict[str, Any]:
        raise Refusal(400, f"{what} is not built in tinsmith, a local server")

    return handler


REFUSED = (
    ("PUT", "/sessions/{session_id}/project", "assigning projects"),
    ("POST", "/auth/token", "exchanging credentials"),
    ("GET", "/auth/apikey/me", "logging in (set TINKER_API_KEY instead)"),
    ("DELETE", "/auth/apikey/me", "revoking API keys"),
    ("GET", "/audit", "the audit log"),
    ("GET", "/billing/{path:path}", "billing"),
)

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/healthz", healthz),
    ("GET", "/get_server_capabilities", capabilities),
    ("POST", "/weights_info", weights_info),
    ("GET", "/training_runs", list_runs),
    ("GET", "/training_runs/{run}", get_run),
    ("GET", "/training_runs/{run}/checkpoints", list_run_checkpoints),
    *((method, path, refuse(what)) for method, path, what in REFUSED),
    ("POST", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", publish),
    ("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", publish),
    ("PUT", "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl", set_ttl),
    ("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}", delete_checkpoint),
    ("GET", "/checkpoints", list_checkpoints),
    ("POST", "/checkpoints/search", search_checkpoints),
    ("GET", "/sessions", list_sessions),
    ("POST", "/sessions/search", search_sessions),
    ("GET", "/sessions/{session_id}", get_session),
    ("GET", "/sessions/{session_id}/trace_export", export_trace),
    ("GET", "/sessions/{session_id}/trace/{ticket}", get_trace),
)
