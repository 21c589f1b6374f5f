"""The Tinker endpoints that tell of models, runs, checkpoints and sessions. ROUTES is the table.

Runs and checkpoints are read from disk, so they are told of after a restart too. What Tinker has
and a local server can't or doesn't do is refused by name in REFUSED, never left unanswered.
"""

from datetime import datetime, timedelta
from typing import Any, TypeVar

from starlette.requests import Request

from tinsmith import wire
from tinsmith.routes import Handler, read_json
from tinsmith.service import Refusal, Service, owner

T = TypeVar("T")

TYPES = {"weights": "training", "sampler_weights": "sampler"}


async def healthz(service: Service, request: Request) -> dict[str, Any]:
    """The server listens only once its models are loaded: whoever gets an answer gets "ok"."""
    return {"status": "ok"}


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
    _, meta = service.meta(wire.need(await read_json(request), "tinker_path", str))
    return {
        "base_model": meta.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": meta.rank,
        "train_unembed": meta.unembed,
        "train_mlp": meta.mlp,
        "train_attn": meta.attn,
    }


# ---- runs and checkpoints ----


async def list_runs(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 20)
    names, cursor = _page(service.store.runs(), limit, offset)
    return {"training_runs": [_run(service, name) for name in names], "cursor": cursor}


async def get_run(service: Service, request: Request) -> dict[str, Any]:
    return _run(service, request.path_params["run"])


async def list_run_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    return {"checkpoints": _checkpoints(service, request.path_params["run"])}


async def list_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 100)
    found = [item for run in service.store.runs() for item in _checkpoints(service, run)]
    found.sort(key=lambda item: item["time"], reverse=True)
    items, cursor = _page(found, limit, offset)
    return {"checkpoints": items, "cursor": cursor}


async def delete_checkpoint(service: Service, request: Request) -> dict[str, Any]:
    """The id is two segments, weights/<name>."""
    run, name = request.path_params["run"], request.path_params["checkpoint"]
    service.store.delete(f"tinker://{run}/{name}")
    return {}


def _run(service: Service, name: str) -> dict[str, Any]:
    info = service.store.run(name)
    items = _checkpoints(service, name)
    newest: dict[str, Any] = {item["checkpoint_type"]: item for item in items}
    times = [info["created"], *(item["time"] for item in items)]
    return {
        "training_run_id": name,
        "base_model": info["base_model"],
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": info["lora_rank"],
        "last_request_time": max(times),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": info["user_metadata"],
    }


def _checkpoints(service: Service, run: str) -> list[dict[str, Any]]:
    """A run's checkpoints, the oldest first."""
    return [_checkpoint(service, path) for path in service.store.checkpoints(run)]


def _checkpoint(service: Service, path: str) -> dict[str, Any]:
    folder, meta = service.meta(path)
    expires = None
    if meta.ttl_seconds is not None:
        created = datetime.fromisoformat(meta.created)
        expires = (created + timedelta(seconds=meta.ttl_seconds)).isoformat()
    return {
        "checkpoint_id": "/".join(path.split("/")[-2:]),
        "checkpoint_type": TYPES[meta.kind],
        "time": meta.created,
        "tinker_path": path,
        "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "public": False,
        "user_metadata": meta.user_metadata or None,
        "expires_at": expires,
    }


# ---- sessions ----


async def list_sessions(service: Service, request: Request) -> dict[str, Any]:
    limit, offset = _window(request, 20)
    own = [item.id for item in service.sessions.values() if item.owner == owner(request)]
    return {"sessions": own[::-1][offset : offset + limit]}


async def get_session(service: Service, request: Request) -> dict[str, Any]:
    session = service.sessions.get(request.path_params["session_id"])
    if session is None or session.owner != owner(request):
        raise Refusal(404, f"there is no session {request.path_params['session_id']}")
    return {
        "training_run_ids": session.runs,
        "sampler_ids": session.samplers,
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def _page(items: list[T], limit: int, offset: int) -> tuple[list[T], dict[str, int]]:
    """A part of a listing, and its cursor."""
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


def _refuse(what: str) -> Handler:
    async def handler(service: Service, request: Request) -> dict[str, Any]:
        raise Refusal(400, f"{what} is not built in tinsmith, a local server")

    return handler


REFUSED = (
    ("POST", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", "publishing"),
    ("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", "publishing"),
    (
        "PUT",
        "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl",
        "changing a checkpoint's ttl",
    ),
    (
        "GET",
        "/training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls",
        "downloading external weights",
    ),
    (
        "GET",
        "/training_runs/{run}/checkpoints/{checkpoint:path}/archive",
        "downloading a checkpoint (it is a PEFT folder in the server's --checkpoints)",
    ),
    ("POST", "/copy_weights", "copying checkpoints"),
    ("GET", "/sessions/{session_id}/trace_export", "exporting a session's trace"),
    ("PUT", "/sessions/{session_id}/project", "assigning projects"),
    ("POST", "/sessions/search", "searching sessions"),
    ("POST", "/retrieve_futures", "polling all of a sampling session's requests at once"),
    ("POST", "/auth/token", "exchanging credentials"),
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
    *((method, path, _refuse(what)) for method, path, what in REFUSED),
    ("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}", delete_checkpoint),
    ("GET", "/checkpoints", list_checkpoints),
    ("GET", "/sessions", list_sessions),
    ("GET", "/sessions/{session_id}", get_session),
)
