"""The HTTP server: the app that answers for a Service, and the threads it runs in.

The app turns every exception into a 4xx with a sentence, in the shape of the API that was called
(error_bodies.py). The SDK retries 5xx and 409 for minutes, so neither is sent, except 507 for a
full disk, which may get space meanwhile. All models' files are checked before it listens. A single
model is also loaded then; several are loaded on first use. It listens on the loopback by default,
and on another address only with an API key.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinsmith.checkpoints.store import SCHEME, Store
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.devices import choose_device
from tinsmith.engine.errors import RequestError, explain, sentence
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import BaseModel
from tinsmith.replicas.crew import RemoteCrew
from tinsmith.replicas.local import Here, Places
from tinsmith.replicas.messages import Start
from tinsmith.server.dashboard import page
from tinsmith.server.http.addresses import url
from tinsmith.server.http.authorisation import PREFIX, Access, Door, keys_of
from tinsmith.server.http.connections import BACKLOG, ListeningSocket, Server
from tinsmith.server.http.error_bodies import (
    ANTHROPIC_PREFIXES,
    FIREWORKS_PREFIXES,
    OPENAI_PREFIXES,
    SERVERLESS,
    refusal,
    status_of,
)
from tinsmith.server.http.overload import Overloaded
from tinsmith.server.inference import anthropic_messages, openai_text
from tinsmith.server.records.database import State
from tinsmith.server.records.history import RunHistory
from tinsmith.server.records.notifier import Notifier, Refused
from tinsmith.server.records.traces import tracing
from tinsmith.server.routes import (
    client_logs,
    fireworks,
    metrics,
    rest,
    results,
    sampling,
    training,
    transfers,
    uploads,
)
from tinsmith.server.routes.metrics import Metrics
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.promises import Refusal
from tinsmith.server.service.service import Service
from tinsmith.system.install_hints import require_ray

log = logging.getLogger("tinsmith")

API_KEY = "tml-local"  # what clients send to a server without a key: the SDK needs one
EXPIRY_SECONDS = 60.0  # between two checks for expired checkpoints


# The modules whose ROUTES are Tinker's.
TINKER = (results, sampling, training, rest, transfers, uploads)


def make_app(service: Service) -> Starlette:
    """The ASGI app: the tables of routes, each under its prefixes."""
    tinker = [row for table in (*TINKER, fireworks) for row in table.ROUTES]
    tables = [(prefix, tinker) for prefix in (PREFIX, SERVERLESS + PREFIX)]
    tables += [("", rows) for rows in (metrics.ROUTES, page.ROUTES, fireworks.CONTROL)]
    tables += [(prefix, client_logs.ROUTES) for prefix in (PREFIX, SERVERLESS + PREFIX)]
    tables += [(prefix, openai_text.ROUTES) for prefix in OPENAI_PREFIXES]
    tables += [(prefix, anthropic_messages.ROUTES) for prefix in ANTHROPIC_PREFIXES]
    tables += [(prefix, openai_text.FIREWORKS) for prefix in FIREWORKS_PREFIXES]
    table = [
        Route(prefix + path, _endpoint(service, prefix + path, handler), methods=[method])
        for prefix, rows in tables
        for method, path, handler in rows
    ]
    return Starlette(routes=table, exception_handlers={HTTPException: _no_route})


def _endpoint(service: Service, route: str, handler: Handler) -> Any:
    async def endpoint(request: Request) -> Response:
        def refused(status: int, detail: str, *headers: Any, **more: Any) -> Response:
            service.notify(Refused(f"{request.method} {route}", status, detail))
            return refusal(request.scope["path"], status, detail, *headers, **more)

        try:
            reply = await handler(service, request)
            asyncio.get_running_loop().call_soon(service.sweep)  # it is not part of the reply
            return reply if isinstance(reply, Response) else JSONResponse(reply)
        except Refusal as error:
            return refused(error.status, str(error), error=error)
        except Overloaded as error:
            return refused(429, str(error), {"Retry-After": f"{error.again_seconds:g}"})
        except FileNotFoundError as error:
            return refused(404, str(error))
        except ClientDisconnect:
            return refused(400, "the client went away")
        except asyncio.CancelledError:  # by close(): the client may retry on the next server
            return refused(429, "the server is shutting down", {"Retry-After": "1"})
        except Exception as error:
            return refused(status_of(error), str(explain(error)))

    return endpoint


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    path = request.scope["path"]
    return refusal(path, status, f"tinsmith has no {request.method} {path}")


class Backend:
    """A running server, in threads of this process. A context manager; `close` ends it."""

    recipe = ""  # the recipe that it serves; its runs are named after it

    def __init__(self, config: ServerConfig):
        if not config.models:
            raise ValueError("there is no model to serve: name at least one")
        hosts, origins = map(str.lower, config.allow_hosts), config.allow_origins
        keys = keys_of(config.api_key)
        access = Access(config.host, frozenset(hosts), frozenset(origins), keys)
        self._key = next(iter(keys), API_KEY)
        self.checkpoints = Path(config.checkpoints).resolve()
        with contextlib.ExitStack() as undo:
            self._socket = _bind(config.host, config.port)
            undo.callback(self._socket.close)
            access.check_address(self._socket.getsockname()[0])
            self.url = url(config.host, self._socket.getsockname()[1])
            store = Store(self.checkpoints, expire=config.expire, bytes_max=config.checkpoints_max)
            undo.callback(store.close)
            store.claim(self.url, shared=config.share_checkpoints)
            self._remember(store, undo)
            bases = self._open(config, store, undo)
            undo.pop_all()
        self._service = Service(
            config,
            bases,
            self.worker,
            store,
            self._state,
            history=self.history,
            notify=self.notifier,
            access=access,
        )
        self.queue = self._service.queue
        self._begin(access)

    def _open(
        self, config: ServerConfig, store: Store, undo: contextlib.ExitStack
    ) -> dict[str, BaseModel]:
        """Opens the engine; returns the base models that it knows."""
        self._places = _places(config)
        undo.callback(self._places.close)
        own = self._places.own
        bases = inspect_models(
            config.models,
            device=own.device,
            dtype=config.dtype,
            weights=config.weights,
            weights_copy=config.weights_copy,
        )
        self._metrics = Metrics()
        self.notifier = Notifier(self._metrics, *tracing())
        undo.callback(self.notifier.close)
        self.crew = RemoteCrew(str(own), mixed=config.mixed)
        undo.callback(self.crew.close)
        self._places.begin(self.crew, _start(config))
        self.worker = Worker(
            bases,
            device=own.device,
            threads=own.threads,
            memory=own.memory,
            gap_seconds=config.gap_seconds,
            on_end=self.notifier,
            reserve=store.quota.reserve,
            offload=store.idle_runs,
            crew=self.crew,
        )
        undo.callback(self.worker.close)
        loaded = config.preload or (config.preload is None and len(bases) == 1)
        if loaded:
            self.worker.preload(bases).result()
        self._places.wait()
        self.crew.wait(bases, own.device, [partial(self._ask, one) for one in bases if loaded])
        return bases

    def _ask(self, base: str) -> list[Future[None]]:
        """Has replicas probed on a base model."""
        return self.worker.call(lambda engine: self.crew.ask_for(engine, base)).result()

    def _remember(self, store: Store, undo: contextlib.ExitStack) -> None:
        """Opens what is kept across restarts."""
        self._state = State(store)
        undo.callback(self._state.close)
        self.history = RunHistory(self._state, self._settings, self._origin)
        undo.callback(self.history.close)

    def _begin(self, access: Access) -> None:
        """From here on, connections queue until the server's loop accepts them."""
        self._metrics.service = self._service
        app = make_app(self._service)
        app.state.metrics = self._metrics
        app.state.threads = self._service.config.threads or len(os.sched_getaffinity(0))
        self.notifier.listen(self.history)
        self.notifier.listen(self._service.timelines)
        self._server = Server(Door(app, access, self.notifier))
        self._socket.listen(BACKLOG)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="tinsmith-server", daemon=True
        )
        self._thread.start()
        self._closing = threading.Event()
        self._expiry = threading.Thread(
            target=self._expire, args=(self._service.store,), name="tinsmith-expiry", daemon=True
        )
        self._expiry.start()

    def close(self) -> None:
        """Ends the server: all unfinished requests fail, and a running computation ends soon,
        without a trace. A save that takes longer leaves the checkpoint as it was."""
        self._closing.set()
        self._expiry.join()
        self.worker.close()
        self.crew.close()
        self._places.close()
        self._server.should_exit = True
        self._thread.join()
        self.notifier.close()
        self.history.close()
        self._service.beside.close()
        self._service.disk.close()
        self._socket.close()
        self._state.close()
        self._service.store.close()

    def _settings(self, run: str) -> dict[str, Any]:
        """A run's settings, for its history."""
        info = self._service.sessions.runs.get(run)
        if info is None:
            return {}
        return {
            **asdict(info.lora),
            "base": info.base,
            "user_metadata": info.user_metadata,
            "session": info.session.id,
            "recipe": self.recipe or None,
            "seed": str(info.lora.seed),  # JavaScript would round
        }

    def _origin(self, sampler: str) -> str:
        """The run of this server that saved the checkpoint of a sampling session."""
        info = self._service.samplers.get(sampler)
        run = ((info and info.path) or "").removeprefix(SCHEME).partition("/")[0]
        return run if run in self._service.sessions.runs else ""

    def _expire(self, store: Store) -> None:
        """Deletes expired checkpoints, if the store does that, even when no client connects."""
        while store.expire:
            try:
                store.delete_expired()
            except Exception:
                log.exception("expired checkpoints could not be deleted")
            if self._closing.wait(EXPIRY_SECONDS):
                return

    def service_client(self, **arguments: Any) -> Any:
        """A tinker.ServiceClient, the SDK's own, on this server."""
        import tinker

        arguments.setdefault("base_url", self.url)
        arguments.setdefault("api_key", self._key)
        return tinker.ServiceClient(**arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _places(config: ServerConfig) -> Places:
    """Where the replicas are."""
    device = choose_device(config.device, config.threads, config.stages)
    shares = config.replicas, device, config.threads, config.memory
    if config.ray is None:
        return Here(*shares)
    require_ray()
    from tinsmith.replicas.cluster import Cluster

    return Cluster(config.ray, *shares, name=_name(config))


def _name(config: ServerConfig) -> str:
    """Names the server: one that is started again has the same, and no other one that runs. "" if
    there is no such name."""
    if config.share_checkpoints and not config.port:
        return ""
    port = config.port if config.share_checkpoints else 0
    told = f"{socket.gethostname()} {config.checkpoints.resolve()} {port}"
    return f"{socket.gethostname()} {sha256(told.encode()).hexdigest()[:16]}"


def _start(config: ServerConfig) -> Start:
    """What replicas have in common."""
    return Start(
        0,
        models=config.models,
        dtype=config.dtype,
        weights=config.weights,
        weights_copy=config.weights_copy,
    )


def _bind(host: str, port: int) -> ListeningSocket:
    listener = ListeningSocket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is in use; choose another" if busy else sentence(error)
        raise RequestError(f"can't listen on {host}:{port}: {reason}", "server") from None
    return listener
