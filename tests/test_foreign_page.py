"""A page of another origin, in a real browser, gets nowhere: it reads nothing, and nothing is made,
published or deleted. The same page gets in where its origin is allowed, which shows that the
browser would have let it try."""

from pathlib import Path

import foreign_page
import httpx
import pytest
from conftest import Wire
from foreign_page import BROWSER, NAME, REASON
from tinsmith.server.backend import Backend

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
            {"tiny": tiny_model_dir},
            checkpoints=tmp_path,
            device="cpu",
            threads=1,
            allow_origins=[page.url],
        ) as friend,
    ):
        path, theirs = saved(server), saved(friend)
        before = facts(server), facts(friend)
        paths = {"archive": f"{path}/archive.tar", "publish": f"{path}/publish", "checkpoint": path}
        port = server.url.rpartition(":")[2]
        servers = {
            "address": server.url,
            "localhost": f"http://localhost:{port}",
            "rebound": f"http://{NAME}:{port}",
            "friend": friend.url,
        }
        foreign_page.attack(page, servers, paths, SECONDS)
        assert page.come.is_set(), "the page did not run"
        told = page.told
        assert told["friend list"].startswith("200") and theirs.split("/")[2] in told["friend list"]
        assert told["friend json"].startswith("200")
        for name, outcome in told.items():
            if not name.startswith("friend"):
                # Failed, or an answer that a page can't read: status 0 and no text.
                empty = outcome in ("0", "sent", "true")
                assert empty or outcome.startswith("failed:"), (name, outcome)
        assert len(told) == 4 * 13
        assert facts(server) == before[0]
        assert len(facts(friend)[2]) == len(before[1][2]) + 2  # as json and as a blob
        shown = foreign_page.visit(f"http://{NAME}:{port}/api/v1/training_runs", seconds=SECONDS)
        assert f"this server is not known as {NAME}:{port}" in shown
        assert httpx.get(f"{server.url}/api/v1{path}/archive.tar").status_code == 200
