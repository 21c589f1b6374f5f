"""Fireworks' training SDK: its endpoints besides Tinker's, as two tables of routes.

ROUTES are beside Tinker's; all of them also exist under the prefix that its sampling client uses.
CONTROL is the part of its control plane that a local server has: one account, and the checkpoints
of a session. Requests to provision machines are refused at once, with a status that its client does
not read as "not ready".

https://docs.fireworks.ai/fine-tuning/training-api
"""

from typing import Any

from starlette.requests import Request

from tinsmith.engine.jobs import LoadJob
from tinsmith.server.routes.rest import refuse
from tinsmith.server.routes.training import Handler, place
from tinsmith.server.service.bodies import read_json
from tinsmith.server.service.promises import owner
from tinsmith.server.service.service import Service
from tinsmith.server.service.sessions import RunInfo
from tinsmith.server.wire import fields, parse
from tinsmith.server.wire.fireworks_names import ACCOUNT, alive, checkpoints, newest, ref_of

TYPES = {"weights": "TRAINING_LORA", "sampler_weights": "INFERENCE_LORA"}


async def list_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    """The names of the states that its clients have saved here, newest last."""

    def find() -> list[str]:
        found = newest(checkpoints(service.store, "weights"))
        names = (one.path.rpartition("/")[2] for one in found if alive(service.store, one))
        return list(dict.fromkeys(names))[::-1]

    return {"checkpoints": await service.disk(find)}


async def load_adapter(service: Service, request: Request) -> dict[str, Any]:
    """Loads a PEFT folder's or a checkpoint's weights into a run; its optimizer starts anew."""
    body = await read_json(service, request)
    model_id, seq = place(body)
    path = body.get("adapter_path")

    async def prepare(run: RunInfo) -> LoadJob:
        fields.check("load_adapter", body)
        name = parse.need(body, "adapter_path", str)
        found = await service.disk(
            service.checkpoints.find, name, "sampler_weights", (model_id,), run.fits
        )
        return LoadJob(found[0], optimizer=False)

    reply = {"type": "load_adapter", "model_id": model_id, "adapter_path": path}
    return await service.turn(request, model_id, seq, prepare, lambda _: reply)


async def create_sampling_route(service: Service, request: Request) -> dict[str, Any]:
    """Nothing has to be created: each request names its weights. Unknown weights are refused here,
    not at the first sample."""
    body = await read_json(service, request)
    fields.check("create_sampling_route", body)
    if body.get("training_run") is None:
        service.bases.name(parse.need(body, "base_model", str))
        return {}
    run = parse.need(body, "training_run", str).rpartition("/")[2]
    known = [*service.sessions.runs, *await service.disk(service.store.runs)]
    if not any(run in (name, name.partition(":")[0]) for name in known):
        raise FileNotFoundError(f"there is no training run {run!r:.200}")
    return {}


async def accounts(service: Service, request: Request) -> dict[str, Any]:
    """The only account."""
    return {"accounts": [{"name": f"accounts/{ACCOUNT}"}]}


async def session_checkpoints(service: Service, request: Request) -> dict[str, Any]:
    """The checkpoints of a session's runs, oldest first."""
    session = request.path_params["session"]
    rows = await service.disk(service.state.sessions, owner(request))
    if not any(row.id == session for row in rows):
        raise FileNotFoundError(f"there is no session {session:.200}")

    def find() -> list[dict[str, Any]]:
        runs = service.state.runs_of(session)
        rows = [row for run in runs for row in service.state.checkpoints(run)]
        name = f"accounts/{ACCOUNT}/trainingSessions/{session}/checkpoints"
        return [
            {
                "name": f"{name}/{'-'.join(ref_of(row.path).split('/')[1:])}",
                "checkpointType": TYPES[row.meta.kind],
                "createTime": row.meta.created,
                "promotable": row.meta.kind == "sampler_weights",
            }
            for row in sorted(rows, key=lambda row: row.meta.created)
            if row.meta.kind in TYPES and not service.store.has_ended(row.meta)
        ]

    return {"checkpoints": await service.disk(find)}


async def delete_session(service: Service, request: Request) -> dict[str, Any]:
    service.end_session(service.sessions.find(request, request.path_params["session"]))
    return {}


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/list_checkpoints", list_checkpoints),
    ("POST", "/load_adapter", load_adapter),
    ("POST", "/create_sampling_route", create_sampling_route),
    ("POST", "/weight_sync", refuse("RDMA's weight_sync")),
)

_SESSION = "/v1/accounts/{account}/trainingSessions/{session}"
_PROVISIONING = "provisioning (jobs, deployments, shapes, promotion)"

CONTROL: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/accounts", accounts),
    ("GET", f"{_SESSION}/checkpoints", session_checkpoints),
    ("DELETE", _SESSION, delete_session),
    *(
        (method, "/v1/accounts/{path:path}", refuse(_PROVISIONING))
        for method in ("GET", "POST", "PATCH", "DELETE")
    ),
)
