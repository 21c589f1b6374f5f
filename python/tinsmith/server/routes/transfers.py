"""Copies of checkpoints, and downloads of their files. ROUTES is the table.

Clients download PEFT's own files: one by one with GET, as the SDK's external weights, or in one
tar, for SDKs up to 0.34. The URLs are fetched without the client's key, so a server with a key
signs them (authorisation.py).
"""

import os
import tarfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.server.records.database import RunRow
from tinsmith.server.routes.rest import path_of
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import read_json
from tinsmith.server.service.promises import Refusal, owner
from tinsmith.server.service.service import Service
from tinsmith.server.service.sessions import now
from tinsmith.server.wire import parse

URL_TIME = timedelta(days=1)
PIECE = 1 << 20
PLAIN = "application/octet-stream"


class Download(StreamingResponse):
    """Pieces of open files, which are closed when the reply ends, even if it never began."""

    def __init__(self, pieces: Iterator[bytes], files: Iterable[BinaryIO], **options: Any):
        super().__init__(pieces, **options)
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for file in self._files:
                file.close()


async def external_weights_urls(service: Service, request: Request) -> dict[str, Any]:
    """The URLs are for one version: once it is replaced, they find nothing."""
    path = path_of(request)
    expires = await _expires(service, path)
    version, names = await service.disk(service.store.files, path)
    return {
        "urls": {name: _url(service, request, f"files/{version}/{quote(name)}") for name in names},
        "expires": expires.isoformat(),
    }


async def get_file(service: Service, request: Request) -> Response:
    version, files = await service.disk(service.store.open, path_of(request))
    name = request.path_params["file"]
    wanted = files.pop(name, None)
    for file in files.values():
        file.close()
    if wanted is None:
        raise FileNotFoundError(f"the checkpoint has no file {name!r:.80}; it has {sorted(files)}")
    if request.path_params.get("version", version) != version:
        wanted.close()
        raise FileNotFoundError("the checkpoint was saved again since: ask for its URLs again")
    headers = {"content-length": str(_size(wanted))}
    return Download(_pieces(wanted), [wanted], headers=headers, media_type=PLAIN)


async def archive_url(service: Service, request: Request) -> Response:
    """The tar's URL: SDKs read it from the redirect or from the body."""
    expires = await _expires(service, path_of(request))
    url = _url(service, request, "archive.tar")
    stamp = expires.strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"Location": url, "Expires": stamp}
    return JSONResponse({"url": url, "expires": expires.isoformat()}, 302, headers)


async def get_archive(service: Service, request: Request) -> Response:
    _, files = await service.disk(service.store.open, path_of(request))
    return Download(_tar(files), files.values(), media_type="application/x-tar")


async def copy_weights(service: Service, request: Request) -> dict[str, Any]:
    """Copies a checkpoint into a run that can't be trained. A retry gets the first copy."""
    body = await read_json(service, request)
    made = await service.retries.once(
        owner(request), request, body, lambda: _copy(service, request, body)
    )
    return {"tinker_path": made}


async def _copy(service: Service, request: Request, body: dict[str, Any]) -> str:
    source = parse.need(body, "source_path", str)
    service.store.folder(source)  # only tinker:// paths can be copied
    _, meta = await service.disk(service.checkpoints.find, source)
    ttl = parse.ttl(body)
    run, session = f"copy-{uuid.uuid4().hex}", None
    if body.get("session_id") is not None:
        session = service.sessions.find(request, parse.need(body, "session_id", str))
        run = f"{session.id}:train:{parse.need(body, 'model_seq_id', int)}"
        if run in session.runs:
            raise Refusal(400, f"there is a run {run} already; choose another model_seq_id")
        session.runs.append(run)
    elif body.get("destination_project_id") is None:
        raise Refusal(400, "a copy needs a destination_project_id, or a session_id")
    owned = session and session.id
    row = RunRow(run, owned, meta.base_model, meta.rank, meta.run_metadata, now())
    path = None
    try:
        path = await service.disk(
            service.store.copy, source, run, created=now(), ttl_seconds=ttl, public=False
        )
        await service.disk(service.state.add_run, row)
    except Exception:  # nothing of it remains, and its number is free
        if path is not None:
            await service.disk(service.store.delete, path)
        if session is not None:
            session.runs.remove(run)
        raise
    return path


def _url(service: Service, request: Request, last: str) -> str:
    """A URL beside the requested one, with the host that the client used."""
    here = str(request.url).partition("?")[0].rpartition("/")[0]
    return service.access.signed(f"{here}/{last}")


async def _expires(service: Service, path: str) -> datetime:
    _, meta = await service.disk(service.checkpoints.find, path)
    day = datetime.now(UTC) + URL_TIME
    return min(day, meta.expires) if service.store.expire and meta.expires else day


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def _tar(files: Mapping[str, BinaryIO]) -> Iterator[bytes]:
    """A tar of some files, piece by piece."""
    for name, file in files.items():
        member = tarfile.TarInfo(name)
        member.size = _size(file)
        yield member.tobuf()
        yield from _pieces(file)
        yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


_CHECKPOINT = "/training_runs/{run}/checkpoints/{checkpoint:path}"

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", f"{_CHECKPOINT}/external_weights_urls", external_weights_urls),
    ("GET", f"{_CHECKPOINT}/files/{{file}}", get_file),
    ("GET", f"{_CHECKPOINT}/files/{{version}}/{{file}}", get_file),
    ("GET", f"{_CHECKPOINT}/archive", archive_url),
    ("GET", f"{_CHECKPOINT}/archive.tar", get_archive),
    ("POST", "/copy_weights", copy_weights),
)
