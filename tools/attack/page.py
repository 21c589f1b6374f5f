"""A foreign page in a browser (Chromium, headless): what it draws to try on a server.

An input is a page with some steps: fetches with methods, modes, headers and bodies that are drawn,
forms, beacons, frames, images, scripts and web sockets, by each name that leads to the server. The
page may read nothing, and what it could have changed must be as it was. Without a browser an input
does nothing.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from support import foreign_page
from support.foreign_page import BROWSER, EMPTY, NAME, Page
from tinsmith.server.backend import Backend

from tools.attack.common import Attempt, Failure, One
from tools.attack.served import SECONDS, Clean, served

STEPS = 30  # of a page: the browser's start takes the most time
BODIES = ("", "{}", '{"tags": [], "user_metadata": {}}', '{"request_id": "a"}', "a=b", "\0")
TYPES = (
    "text/plain", "application/json", "application/x-www-form-urlencoded", "multipart/form-data",
    "application/x-protobuf", "application/octet-stream",
)  # fmt: skip


class Attacked:
    """A server with a checkpoint, and the page."""

    def __init__(self, backend: Backend, clean: Clean, page: Page):
        self._backend, self._clean, self._page = backend, clean, page
        run = clean.training.model_id
        path = clean.training.save_weights_for_sampler("kept").result().path
        kept = f"/training_runs/{run}/checkpoints/{path.partition(f'{run}/')[2]}"
        self._paths = (
            "/create_session", "/training_runs", "/checkpoints", "/sessions", "/optim_step",
            "/asample", "/forward_backward", "/copy_weights", "/sessions/search", "/telemetry",
            "/checkpoints/search", "/external_weights_upload_start", kept, f"{kept}/archive.tar",
            f"{kept}/archive", f"{kept}/publish", f"{kept}/ttl",
        )  # fmt: skip
        port = backend.url.rpartition(":")[2]
        names = ("127.0.0.1", "localhost", NAME, "a.localhost", "0.0.0.0", "127.1")
        self._servers = [f"http://{name}:{port}/api/v1" for name in names]
        self._before = self._facts()

    def _facts(self) -> object:
        """What a page could have changed."""
        service = self._backend._service
        runs = service.state.runs()
        kept = [entry for row in runs for entry in service.state.checkpoints(row.id)]
        return runs, kept, sorted(service.sessions), sorted(service.sessions.runs)

    def one(self, attempt: Attempt) -> str:
        if BROWSER is None:
            return "no browser"
        rng = attempt.rng
        steps = [self._step(rng, str(number)) for number in range(STEPS)]
        for step in steps:
            attempt.note(step)
        told = foreign_page.try_all(self._page, steps, SECONDS)
        if len(told) != len(steps):
            raise Failure(f"{len(told)} of {len(steps)} steps were made")
        for step in steps:
            outcome = told[step["name"]]
            if outcome not in EMPTY and not outcome.startswith("failed:"):
                raise Failure(f"the page saw {outcome!r} of {step}")
        if self._facts() != self._before:
            raise Failure("the page changed something")
        self._clean.check()
        return "refused"

    def _step(self, rng: random.Random, name: str) -> dict[str, Any]:
        kind = rng.choice(("fetch",) * 8 + ("form", "beacon", "script", "img", "iframe", "socket"))
        how: dict[str, Any] = {"body": rng.choice(BODIES[1:3]), "type": rng.choice(TYPES[:4])}
        if kind == "fetch":
            how = {"method": rng.choice(("GET", "POST", "POST", "PUT", "DELETE", "HEAD"))}
            how["mode"] = rng.choice(("cors", "no-cors", "same-origin"))
            how["credentials"] = rng.choice(("omit", "include"))
            how["redirect"] = rng.choice(("follow", "manual", "error"))
            how["referrerPolicy"] = rng.choice(("no-referrer", "unsafe-url"))
            if rng.random() < 0.7:
                how["headers"] = {"Content-Type": rng.choice(TYPES)}
            if rng.random() < 0.2:
                how.setdefault("headers", {})["X-API-Key"] = "tml-local"
            if how["method"] not in ("GET", "HEAD"):
                how["body"] = rng.choice(BODIES)
        url = rng.choice(self._servers) + rng.choice(self._paths)
        return {"name": name, "kind": kind, "url": url, "how": how, "blob": rng.random() < 0.1}


@contextlib.contextmanager
def attack() -> Iterator[One]:
    """A server, and a page's own."""
    with foreign_page.page() as page, served() as (backend, clean):
        yield Attacked(backend, clean, page).one
