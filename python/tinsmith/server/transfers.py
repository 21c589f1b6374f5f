"""Checkpoints on the move: copies, and downloads of their files. ROUTES is the table.

Clients download PEFT's own files: one by one by plain GET, as the SDK's external weights, or in one
tar, for SDKs up to 0.34. The URLs are fetched without the client's key: a server that has one signs
them (door.py).
"""

import tarfile
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from tinsmith.server import wire
from tinsmith.server.bodies import read_json
from tinsmith.server.routes import Handler
from tinsmith.server.service import Refusal, Service, now, owner
from tinsmith.server.state import RunRow

URL_TIME = timedelta(days=1)
PIECE = 1 << 20


async def external_weights_urls(service: Service, request: Request) -> dict[str, Any]:
    path = _path(service, request)
    return {
        "urls": {
            name: _url(service, request, f"files/{quote(name)}")
            for name in service.store.files(path)
        },
        "expires": _expires(service, path).isoformat(),
    }


async def get_file(service: Service, request: Request) -> Response:
    files = service.store.files(_path(service, request))
    name = request.path_params["file"]
    if name not in files:
        raise FileNotFoundError(f"the checkpoint has no file {name!r:.80}; it has {list(files)}")
    return FileResponse(files[name])


async def archive_url(service: Service, request: Request) -> Response:
    """The tar's URL: SDKs take it from the redirection or from the body."""
    expires = _expires(service, _path(service, request))
    url = _url(service, request, "archive.tar")
    stamp = expires.strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"Location": url, "Expires": stamp}
    return JSONResponse({"url": url, "expires": expires.isoformat()}, 302, headers)


async def get_archive(service: Service, request: Request) -> Response:
    files = service.store.files(_path(service, request))
    return StreamingResponse(_tar(files), media_type="application/x-tar")


async def copy_weights(service: Service, request: Request) -> dict[str, Any]:
    """A checkpoint in a run of its own that can't be trained. A retry finds the first copy."""
    body = await read_json(service, request)
    key = owner(request), request.headers.get("x-idempotency-key", uuid.uuid4().hex)
    if key not in service.copies:
        source = wire.need(body, "source_path", str)
        _, meta = service.meta(source)
        ttl = wire.ttl(body)
        run, owned = f"copy-{uuid.uuid4().hex}", None
        if body.get("session_id") is not None:
            session = service.session(request, wire.need(body, "session_id", str))
            run = f"{session.id}:train:{wire.need(body, 'model_seq_id', int)}"
            if run in session.runs:
                raise Refusal(400, f"there is a run {run} already; choose another model_seq_id")
            session.runs.append(run)
            owned = session.id
        elif body.get("destination_project_id") is None:
            raise Refusal(400, "a copy needs a destination_project_id, or a session_id")
        row = RunRow(run, owned, meta.base_model, meta.rank, meta.run_metadata, now())
        service.state.add_run(row)
        service.copies[key] = service.store.copy(
            source, run, created=now(), ttl_seconds=ttl, public=False
        )
    return {"tinker_path": service.copies[key]}


def _path(service: Service, request: Request) -> str:
    path = f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}"
    service.meta(path)
    return path


def _url(service: Service, request: Request, last: str) -> str:
    """A URL next to the requested one, on the host that the client used."""
    here = str(request.url).partition("?")[0].rpartition("/")[0]
    return service.access.signed(f"{here}/{last}")


def _expires(service: Service, path: str) -> datetime:
    _, meta = service.meta(path)
    day = datetime.now(UTC) + URL_TIME
    return day if meta.expires is None else min(day, meta.expires)


def _tar(files: Mapping[str, Path]) -> Iterator[bytes]:
    """A tar of some files, piece by piece."""
    for name, path in files.items():
        with path.open("rb") as file:
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            yield member.tobuf()
            while piece := file.read(PIECE):
                yield piece
            yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


_CHECKPOINT = "/training_runs/{run}/checkpoints/{checkpoint:path}"

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", f"{_CHECKPOINT}/external_weights_urls", external_weights_urls),
    ("GET", f"{_CHECKPOINT}/files/{{file}}", get_file),
    ("GET", f"{_CHECKPOINT}/archive", archive_url),
    ("GET", f"{_CHECKPOINT}/archive.tar", get_archive),
    ("POST", "/copy_weights", copy_weights),
)
