"""Adapter files that are uploaded and become a checkpoint. ROUTES is the table.

A client declares what it has (a base model and a LoRA configuration), puts each file at the URL
that it gets, and finishes. Then the files are read like any PEFT folder, into an adapter on the
base model, and that adapter is saved. So the checkpoint is checked tensor by tensor, and has our
format. Until then the files are beside the later checkpoint under an unfinished name, which has no
path and which the next server deletes. An upload that is not finished is removed after a day.
"""

import asyncio
import contextlib
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request

from tinsmith import _core
from tinsmith.checkpoints import peft
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import ADAPTER_FILE, CONFIG_FILE, Meta
from tinsmith.engine.errors import explain
from tinsmith.engine.jobs import SaveJob, StateSpec
from tinsmith.models.registry import BaseModel
from tinsmith.server.http.error_bodies import status_of
from tinsmith.server.records.database import RunRow
from tinsmith.server.routes.training import Handler
from tinsmith.server.routes.transfers import URL_TIME
from tinsmith.server.service.bodies import promised, read_json, received
from tinsmith.server.service.promises import Refusal, owner
from tinsmith.server.service.service import Service
from tinsmith.server.service.sessions import now
from tinsmith.server.wire import fields, parse
from tinsmith.system import disk

UPLOADS_MAX = 64  # unfinished ones
ABOUT_FILE = "upload.json"  # in an upload's folder: its owner, and what was declared
NAME = "uploaded"  # of the checkpoint, in a run of its own
UNFINISHED = f"{NAME}~upload"
EXTRA_BYTES = 1 << 20  # in a file of tensors, besides the numbers and the names
ENTRY_BYTES = 512  # for both matrices of a module


@dataclass(frozen=True)
class Upload:
    """What a client declared."""

    id: str
    folder: Path
    owner: str
    base: str
    lora: LoraSpec
    bytes: int  # of its tensors, at most


async def start(service: Service, request: Request) -> dict[str, Any]:
    body = await read_json(service, request)
    fields.check("external_weights_upload_start", body)
    parse.optional(body, "destination_project_id", str)  # this server has one project
    asked = parse.need(body, "base_model", str)
    base, model = service.bases.name(asked), service.bases.model(asked)
    parse.need(body, "lora_config", dict)
    spec = parse.lora_spec(body, 0)
    size = await service.beside(1 << 20, _tensor_bytes, model, spec)
    told = owner(request), base, spec, size
    run = await service.retries.once(
        owner(request), request, body, lambda: service.disk(_begin, service, *told)
    )
    expires = datetime.now(UTC) + URL_TIME
    here = str(request.url).partition("?")[0]
    return {
        "upload_id": run,
        "urls": {
            name: service.access.signed(f"{here}/{run}/{name}", "PUT")
            for name in (CONFIG_FILE, ADAPTER_FILE)
        },
        "expires": expires.isoformat(),
    }


async def put_file(service: Service, request: Request) -> dict[str, Any]:
    """One file, written as it arrives; an existing one is replaced when the new one is complete."""
    name = request.path_params["file"]
    if name not in (CONFIG_FILE, ADAPTER_FILE):
        raise FileNotFoundError(f"an upload has no file {name!r:.80}")
    upload = await service.disk(_find, service, request.path_params["upload_id"])
    most = peft.CONFIG_BYTES_MAX if name == CONFIG_FILE else upload.bytes
    said = promised(request)
    size = most if said is None else min(most, said)
    await service.disk(service.store.quota.check, size, upload.folder / name)
    part = upload.folder / f"{name}~{secrets.token_hex(4)}"
    try:
        await _write(service, part, received(request, most, _uncounted))
        await service.disk(part.replace, upload.folder / name)
    except BaseException as error:
        disk.remove(part)
        if isinstance(error, OSError) and error.errno in disk.FULL:
            raise disk.full(error, f"{name} was not kept", part, size) from None
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"the upload {upload.id} has ended") from None
        raise
    return {}


async def _uncounted(size: int) -> None:
    """Counts nothing: pieces that go straight to the disk take no memory."""


async def _write(service: Service, path: Path, pieces: AsyncIterator[bytes]) -> None:
    with await service.disk(disk.create, path) as file:
        async for piece in pieces:
            await service.disk(file.write, piece)
        await service.disk(file.flush)


async def finish(service: Service, request: Request) -> dict[str, Any]:
    """Finishes an upload. A retry gets the first checkpoint."""
    body = await read_json(service, request)
    run = parse.need(body, "upload_id", str)
    made = await service.retries.once(
        owner(request), request, body, lambda: _finish(service, request, run)
    )
    return {"tinker_path": made}


async def _finish(service: Service, request: Request, run: str) -> str:
    try:
        upload = await service.disk(_find, service, run)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError, ValueError):
            path = service.store.path(run, "external_weights", NAME)
            await service.disk(service.checkpoints.find, path)
            return path
        raise
    path = service.store.path(run, "external_weights", NAME)
    if upload.owner != owner(request):
        raise FileNotFoundError(f"there is no upload {run!r:.80}")
    try:  # saved by an earlier try that failed later
        _, meta = await service.disk(service.checkpoints.find, path)
    except FileNotFoundError:
        meta = await _made(service, upload, service.store.folder(path))
    row = RunRow(run, None, upload.base, meta.rank, {}, now())
    await service.disk(service.state.add_run, row)
    await service.disk(disk.remove, upload.folder)
    return path


async def _made(service: Service, upload: Upload, folder: Path) -> Meta:
    """Checks an upload and saves it as a checkpoint."""
    try:
        meta = await service.disk(_checked, upload)
        await _save(service, upload, meta, folder)
        return meta
    except Exception as error:  # its message has a path of this machine
        told = str(explain(error)).replace(str(upload.folder), "the upload")
        raise Refusal(status_of(error), told) from None


async def _save(service: Service, upload: Upload, meta: Meta, folder: Path) -> None:
    """Reads the files into an adapter, as a run that starts from them does, and saves it."""
    run = f"{upload.id}:{secrets.token_hex(4)}"
    spec = StateSpec(upload.folder, False, meta.created)
    kept = replace(meta, base_model=upload.base, kind="external_weights", created=now())
    made = service.worker.create(run, upload.base, spec)
    saved = service.worker.submit(run, 1, SaveJob(folder, lambda _: kept, optimizer=False))
    service.worker.forget([run], [])
    await asyncio.gather(asyncio.wrap_future(made), asyncio.wrap_future(saved))


# ---- on disk ----


def _folder(service: Service, run: str) -> Path:
    return service.store.run_folder(run) / "external_weights" / UNFINISHED


def _begin(service: Service, owner: str, base: str, lora: LoraSpec, size: int) -> str:
    """Creates an upload's folder, and removes those older than a day; returns the upload's id."""
    ended, left = time.time() - URL_TIME.total_seconds(), 0
    for folder in service.store.root.glob(f"upload-*/external_weights/{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            if (folder / ABOUT_FILE).stat().st_mtime < ended:
                disk.remove(folder)
            else:
                left += 1
    if left >= UPLOADS_MAX:
        raise ValueError(f"{UPLOADS_MAX} uploads are not finished; finish one, or wait a day")
    run = f"upload-{uuid.uuid4().hex}"
    folder = _folder(service, run)
    disk.make_folder(folder)
    said = {"owner": owner, "base": base, "bytes": size}
    disk.write_json(folder / ABOUT_FILE, asdict(lora) | said)
    return run


def _find(service: Service, run: str) -> Upload:
    """An unfinished upload; FileNotFoundError if there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # not a run's name
        folder = _folder(service, run)
        about = json.loads((folder / ABOUT_FILE).read_bytes())
        said = {key: about.pop(key) for key in ("owner", "base", "bytes")}
        return Upload(run, folder, lora=LoraSpec(**about), **said)
    raise FileNotFoundError(f"there is no upload {run!r:.80}")


def _checked(upload: Upload) -> Meta:
    """The Meta of an upload's files; ValueError if they are not what was declared."""
    for name in (CONFIG_FILE, ADAPTER_FILE):
        if not (upload.folder / name).is_file():
            raise ValueError(f"the upload lacks {name}: put it at its URL, then finish")
    meta = peft.load_meta(upload.folder)
    for key in ("rank", "attn", "mlp", "unembed"):
        said, found = getattr(upload.lora, key), getattr(meta, key)
        if said != found:
            shown = key if key == "rank" else f"train_{key}"
            raise ValueError(
                f"the lora_config of the upload has {shown} {said}, its files have {found}"
            )
    return meta


def _tensor_bytes(model: BaseModel, spec: LoraSpec) -> int:
    """The maximum size of an adapter's file of tensors, in bytes."""
    core = _core.Model(dict(model.config), model.inv_freq, weights=model.kind, threads=1)
    groups = _core.slot_groups()
    sizes = [
        spec.rank * (rows + cols)
        for slot, _, _, rows, cols in core.slots
        if slot in groups and getattr(spec, groups[slot])
    ]
    return 4 * sum(sizes) + ENTRY_BYTES * len(sizes) + EXTRA_BYTES


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/external_weights_upload_start", start),
    ("PUT", "/external_weights_upload_start/{upload_id}/{file}", put_file),
    ("POST", "/external_weights_upload_finish", finish),
)
