"""The page at `/`: its files, and the JSON that it requests. ROUTES is the table.

The files in static/ say nothing about this server, so they need no key; the routes under /page/data
do. POLICY lets the page run only its own files: a model's text can't become script there. plotly.js
is served from pip's package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Collection
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from tinsmith.chat.template import load_template
from tinsmith.chat.text import load_tokenizer
from tinsmith.checkpoints.quota import bytes_in
from tinsmith.checkpoints.store import SCHEME
from tinsmith.engine.call_log import Now
from tinsmith.server.http.authorisation import PREFIX
from tinsmith.server.records.last_samples import shown
from tinsmith.server.routes.client_logs import is_made
from tinsmith.server.routes.metrics import memory_now
from tinsmith.server.routes.rest import TYPES
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.promises import Refusal
from tinsmith.server.service.service import Service
from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FOLDER = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# The hash is that of an empty style: plotly.js fills an empty style sheet with its own rules.
POLICY = (
    "default-src 'none'; script-src 'self'; "
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
FRESH_SECONDS = 30.0  # a run is live if it was active in the last FRESH_SECONDS
AGAIN_SECONDS = 2 * FRESH_SECONDS  # how long a run is sent again: it may no longer be live
RUNS_SHOWN = 300
KEPT_SECONDS = 20.0  # between two measurements of the checkpoints' size


# ---- files ----


@cache
def plotly() -> tuple[Path, str] | None:
    """plotly.js and its version; None if it is not installed."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "package_data" / "plotly.min.js"
    return (path, metadata.version("plotly")) if path.is_file() else None


async def index(service: Service, request: Request) -> Response:
    return _file(FOLDER / "index.html")


async def static(service: Service, request: Request) -> Response:
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in KINDS}
    name = request.path_params["name"]
    if name not in known:
        raise FileNotFoundError(f"the page has no file {name!r:.80}")
    return _file(known[name])


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS)


async def plotly_file(service: Service, request: Request) -> Response:
    found = plotly()
    if found is None:
        raise FileNotFoundError(f"plotly is not installed: {pip_install('page')}")
    headers = {**HEADERS, "cache-control": "max-age=86400"}
    return FileResponse(found[0], media_type=KINDS[".js"], headers=headers)


# ---- data ----


def _told(content: Any) -> Response:
    headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    return JSONResponse(content, headers=headers)


async def hello(service: Service, request: Request) -> Response:
    """What the page needs to start."""
    found = plotly()
    return _told({"started": service.started, "plotly": found and found[1]})


def _status(service: Service, now: Now, run: str, seen: float) -> str:
    if run not in service.sessions.runs:
        return "ended"
    if any(call.run == run for call in now.training):
        return "training"
    if now.waiting.get(run):
        return "waiting"
    return "live" if time.time() - seen < FRESH_SECONDS else "idle"


def _find_runs(
    service: Service, now: Now, since: float, busy: Collection[str]
) -> list[dict[str, Any]]:
    """The runs that were created or active since a time, and those that are busy now."""
    names = dict(service.state.read("SELECT id, display_name FROM session"))
    known = service.history.runs(since, busy)
    made = {row.id: row for row in service.state.runs()}
    begun = datetime.fromtimestamp(since, UTC).isoformat() if since else ""
    new = [run for run, row in made.items() if row.created >= begun or run in busy]
    told = []
    for run in dict.fromkeys([*known, *new]):
        seen, about = known.get(run, (0.0, {}))
        row, last = made.get(run), about.get("last") or {}
        told.append(
            {
                "id": run,
                "name": names.get(run.partition(":")[0]),
                "recipe": about.get("recipe"),
                "base": about.get("base") or (row.base_model if row else ""),
                "rank": about.get("rank", row.rank if row else None),
                "status": _status(service, now, run, seen),
                "steps": about.get("steps", 0),
                "step": last.get("step", about.get("log_step")),
                "loss_mean": last.get("loss_mean"),
                "loss": about.get("loss"),
                "reward": about.get("logged", {}).get(about.get("reward")),
                "spark": about.get("reward_spark") or about.get("spark", []),
                "seen": seen,
                "created": row.created if row else None,
                "user_metadata": row.user_metadata if row else {},
                "failed": bool(about.get("error")),
            }
        )
    # Runs that were only found on the disk have equal times: they keep their order of creation.
    told.sort(key=lambda item: (item["seen"], item["created"] or ""), reverse=True)
    return told[:RUNS_SHOWN]


async def list_runs(service: Service, request: Request) -> Response:
    """The runs, newest first: those with a history, and those that are only on disk. With `after`,
    the time of an earlier reply, only those that may have changed since: listing hundreds of runs
    takes 20 ms, and an open page asks all the time."""
    now, after = service.worker.now, _after(request)
    busy = {run for run, waiting in now.waiting.items() if waiting}
    busy |= {call.run for call in now.training}
    since = max(0.0, min(after, time.time()) - AGAIN_SECONDS)
    runs = await service.disk(_find_runs, service, now, since, busy)
    return _told({"runs": runs, "now": time.time()})


def _after(request: Request, name: str = "after") -> int:
    text = request.query_params.get(name, "0")
    if not text.isdecimal() or len(text) > 18:
        raise Refusal(400, f"{name} must be a whole number, {text!r:.80} came")
    return int(text)


def _about(service: Service, run: str) -> tuple[float, dict[str, Any]]:
    """When a run was last active, and what is known of it. FileNotFoundError if none exists."""
    seen, about = service.history.about(run) or (0.0, {})
    if about.get("base"):
        return seen, about
    try:
        row = service.state.run(run)
    except FileNotFoundError:
        if not about:
            raise
        return seen, about
    kept = {"base": row.base_model, "rank": row.rank, "user_metadata": row.user_metadata}
    return seen, {**about, **kept}


async def get_run(service: Service, request: Request) -> Response:
    """A run's settings, its steps and its client's numbers after the given positions, and what the
    run and the engine do now."""
    run, after, behind = request.path_params["run"], _after(request), _after(request, "logged")
    now = service.worker.now

    def find() -> dict[str, Any]:
        steps, place = service.history.steps(run, after)
        logged, log_place = service.history.logged(run, behind)
        seen, about = _about(service, run)  # after `logged`, which may thin the numbers
        return {
            "about": about, "seen": seen, "steps": steps, "place": place, "logged": logged,
            "log_place": log_place,
        }  # fmt: skip

    found = await service.disk(find)
    return _told(
        {
            **found,
            "status": _status(service, now, run, found["seen"]),
            "under_way": service.history.under_way(run),
            "doing": _training(service, now, run),
            "sampling": now.sampling.get(found["about"].get("base", ""), 0),
            "waiting": now.waiting.get(run, 0),
        }
    )


def _training(service: Service, now: Now, run: str = "") -> dict[str, Any] | None:
    """A training call in flight: the run's, or another one's."""
    calls = sorted(now.training, key=lambda call: call.run != run)
    if not calls:
        return None
    call = calls[0]
    return {
        "run": call.run, "kind": call.kind, "done": call.done, "count": call.count,
        "seconds": call.seconds, "tokens": call.tokens, "who": _who(service, call.run),
    }  # fmt: skip


def _who(service: Service, run: str) -> dict[str, str] | None:
    """The session of a run, and a prefix of its owner, which stands for the API key."""
    info = service.sessions.runs.get(run)
    return info and {"session": info.session.id, "key": info.session.owner[:6]}


def _tokenizer(service: Service, base: str) -> Tokenizer | None:
    """The tokenizer of a served base model, if it can be read."""
    model = service.bases.get(base)
    try:
        return None if model is None else load_tokenizer(model.tokenizer_dir)
    except (OSError, ValueError, RuntimeError):
        return None


async def get_samples(service: Service, request: Request) -> Response:
    """A run's last samples and datums, as text; None if the page has `seen` them."""
    run, seen = request.path_params["run"], request.query_params.get("seen")

    def find() -> dict[str, Any]:
        _about(service, run)
        mark = service.history.samples_mark(run)
        if mark == seen:
            return {"seen": mark, "samples": None}
        rows = service.history.samples(run)
        told = [shown(row, _tokenizer(service, row.get("base", ""))) for row in rows]
        return {"seen": mark, "samples": told}

    return _told(await service.disk(find))


def _checkpoints(service: Service, run: str) -> list[dict[str, Any]]:
    return [
        {
            "path": item.path,
            "run": run,
            "name": item.meta.run_metadata.get("name"),
            "kind": TYPES[item.meta.kind],
            "base": item.meta.base_model,
            "step": item.meta.step,
            "bytes": item.bytes,
            "created": item.meta.created,
            "ttl_ends": item.meta.expires and item.meta.expires.isoformat(),
            "expires": service.store.expire and item.meta.expires is not None,
            "user_metadata": item.meta.user_metadata,
        }
        for item in service.state.checkpoints(run)
        if not service.store.has_ended(item.meta)
    ]


async def get_checkpoints(service: Service, request: Request) -> Response:
    """A run's checkpoints, oldest first."""
    run = request.path_params["run"]

    def find() -> list[dict[str, Any]]:
        _about(service, run)
        return [row | _ways(service, row) for row in _checkpoints(service, run)]

    return _told({"checkpoints": await service.disk(find)})


def _ways(service: Service, row: dict[str, Any]) -> dict[str, Any]:
    """URLs relative to the page that delete a checkpoint or download it as a tar; and the command
    that merges it."""
    name = quote(row["path"].removeprefix(f"{SCHEME}{row['run']}/"))
    place = f"{PREFIX}/training_runs/{quote(row['run'], safe='')}/checkpoints/{name}"
    model = service.bases.get(row["base"])
    folder = f" --checkpoints {shlex.quote(str(service.store.root))}"
    command = None
    if model is not None and row["kind"] != "external":
        source = shlex.quote(str(model.path))
        command = f"tinsmith export {source} {shlex.quote(row['path'])} merged{folder}"
    tar = service.access.signed(f"{place}/archive.tar")
    return {"place": place.lstrip("/"), "tar": tar.lstrip("/"), "export": command}


async def list_models(service: Service, request: Request) -> Response:
    """What you can chat with: base models, and checkpoints of these, newest first."""

    def find() -> list[dict[str, Any]]:
        rows = [item for run in service.state.runs() for item in _checkpoints(service, run.id)]
        fit = [row for row in rows if row["kind"] != "external" and row["base"] in service.bases]
        return sorted(fit, key=lambda row: row["created"], reverse=True)[:RUNS_SHOWN]

    def thinking() -> list[str]:
        return [
            name for name, model in sorted(service.bases.items()) if thinks(model.tokenizer_dir)
        ]

    return _told(
        {
            "bases": sorted(service.bases),
            "thinking": await service.disk(thinking),
            "seeing": sorted(name for name, model in service.bases.items() if model.processor),
            "checkpoints": await service.disk(find),
        }
    )


@cache
def thinks(folder: Path) -> bool:
    """Whether a model's chat template has a switch for thinking."""
    try:
        return "enable_thinking" in load_template(folder).source
    except (OSError, ValueError, RuntimeError):
        return False


def _host(service: Service, threads: int) -> dict[str, Any]:
    """The server's device, its processor time, and its disk's space."""
    root = service.store.root
    disk = shutil.disk_usage(root)
    return {
        "devices": sorted({model.device for model in service.bases.values()}),
        "threads": threads,
        "cores": os.cpu_count(),
        "cpu_seconds": time.process_time(),
        "clock": time.monotonic(),
        "load": os.getloadavg()[0],
        "folder": str(root),
        "disk": {"bytes": disk.total - disk.free, "bytes_max": disk.total},
        "checkpoints": {
            "bytes": _kept(root, int(time.monotonic() / KEPT_SECONDS)),
            "bytes_max": service.store.quota.most,
        },
    }


@lru_cache(maxsize=8)
def _kept(root: Path, moment: int) -> int:
    """The bytes of all checkpoints, cached for a `moment`: each file is looked at."""
    return bytes_in(*(path for path in root.iterdir() if path.is_dir()))


async def machine(service: Service, request: Request) -> Response:
    """What holds memory, what is in flight and queued, and what was refused."""
    memory = await memory_now(service, request)
    now, (steps, seconds) = service.worker.now, service.worker.drawn
    waits = {text for future in now.paused if (text := service.worker.waits_for(future))}
    return _told(
        {
            "memory": memory and vars(memory),
            "host": await service.disk(_host, service, request.app.state.threads),
            "training": _training(service, now),
            "waiting": dict(now.waiting),
            "who": {run: _who(service, run) for run in now.waiting},
            "sampling": dict(now.sampling),
            "loading": sorted(waits),
            "queue": {
                "count": service.queue.count,
                "bytes": service.queue.bytes,
                "bytes_max": service.queue.bytes_max,
            },
            "arriving": {"bytes": service.arrivals.bytes, "bytes_max": service.arrivals.bytes_max},
            "results": {"bytes": service.promises.bytes, "bytes_max": service.promises.bytes_max},
            "sampler": {
                "steps": sum(steps.values()),
                "tokens": sum(size * count for size, count in steps.items()),
                "seconds": seconds,
            },
            "refused": service.history.refusals(),
            "models": [
                {"name": name, "bytes": model.weight_bytes, "context": model.context}
                for name, model in sorted(service.bases.items())
            ],
            "replicas": [vars(row) for row in service.worker.replicas],
            "sessions": sum(not one.ended for one in service.sessions.values()),
            "runs": sum(map(is_made, service.sessions.runs.values())),
            "started": service.started,
        }
    )  # fmt: skip


DATA = "/page/data"
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", index),
    ("GET", "/page/static/plotly.min.js", plotly_file),
    ("GET", "/page/static/{name}", static),
    ("GET", f"{DATA}/hello", hello),
    ("GET", f"{DATA}/runs", list_runs),
    ("GET", f"{DATA}/runs/{{run}}", get_run),
    ("GET", f"{DATA}/runs/{{run}}/samples", get_samples),
    ("GET", f"{DATA}/runs/{{run}}/checkpoints", get_checkpoints),
    ("GET", f"{DATA}/models", list_models),
    ("GET", f"{DATA}/machine", machine),
)
