"""A page of another origin, in a real browser, gets nowhere: it reads nothing, and nothing is made,
published or deleted. The same page gets in where its origin is allowed, which shows that the
browser would have let it try."""

from pathlib import Path

import httpx
import pytest
from conftest import Wire
from support import foreign_page
from support.foreign_page import BROWSER, EMPTY, NAME, REASON, everything
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

SECONDS = 120


def facts(server: Backend) -> tuple:
    """All that a page could have changed."""
    wire = Wire(server.url)
    runs = wire.http.get("/training_runs").json()["training_runs"]
    checkpoints = wire.http.get("/checkpoints").json()["checkpoints"]
    return runs, checkpoints, sorted(server._service.sessions)


def saved(server: Backend) -> str:
    """The route of a checkpoint that is saved."""
    wire = Wire(server.url)
    model = wire.create()
    wire.result(wire.post("/save_weights_for_sampler", model_id=model, seq_id=1, path="kept"))
    return f"/training_runs/{model}/checkpoints/sampler_weights/kept"


@pytest.mark.skipif(BROWSER is None, reason=REASON)
def test_a_page_of_another_origin_gets_nowhere(
    server: Backend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with (
        foreign_page.page() as page,
        Backend(
            ServerConfig(
                {"tiny": tiny_model_dir},
                checkpoints=tmp_path,
                device="cpu",
                threads=1,
                allow_origins=[page.url],
            )
        ) as friend,
    ):
        path, theirs = saved(server), saved(friend)
        before = facts(server), facts(friend)
        port = server.url.rpartition(":")[2]
        servers = {
            "address": server.url,
            "localhost": f"http://localhost:{port}",
            "rebound": f"http://{NAME}:{port}",
            "friend": friend.url,
        }
        steps = [each for name, url in servers.items() for each in everything(name, url, path)]
        told = foreign_page.try_all(page, steps, SECONDS)
        assert told["friend list"].startswith("200") and theirs.split("/")[2] in told["friend list"]
        assert told["friend json"].startswith("200")
        for name, outcome in told.items():
            if not name.startswith("friend"):
                assert outcome in EMPTY or outcome.startswith("failed:"), (name, outcome)
        assert len(told) == len(steps)
        assert facts(server) == before[0]
        assert len(facts(friend)[2]) == len(before[1][2]) + 2  # as json and as a blob
        shown = foreign_page.visit(f"http://{NAME}:{port}/api/v1/training_runs", seconds=SECONDS)
        assert f"this server is not known as {NAME}:{port}" in shown
        assert httpx.get(f"{server.url}/api/v1{path}/archive.tar").status_code == 200
