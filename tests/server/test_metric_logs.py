"""Numbers that clients log of their runs: which are refused by which sentence, whose run they go
to, how many are kept, and that they are there after a restart."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from support.small_run import make_client, train
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import Backend
from tinsmith.server.records import metric_logs
from tinsmith.server.records.database import State
from tinsmith.server.records.history import RunHistory
from tinsmith.server.service.config import ServerConfig

HERS = {"X-API-Key": "tml-hers"}
RUN = "s-1:train:0"


def post(server: Backend, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1/log", json=body, headers=headers)


def logged(server: Backend, run: str) -> dict[int, dict[str, float | None]]:
    told = httpx.get(f"{server.url}/page/data/runs/{run}").raise_for_status().json()
    return {row["step"]: row["values"] for row in told["logged"]}


@pytest.fixture
def hers(server: Backend) -> Iterator[tinker.ServiceClient]:
    """A client with a key that no other test's runs have."""
    with server.service_client(api_key="tml-hers") as client:
        yield client


@pytest.fixture
def history(tmp_path: Path) -> Iterator[RunHistory]:
    state = State(Store(tmp_path))
    made = RunHistory(state)
    yield made
    made.close()
    state.close()


# ---- what may come ----


@pytest.mark.parametrize(
    ("body", "sentence"),
    (
        ({"step": 3, "reward": 0.7}, "unknown field 'reward'; numbers stand in metrics"),
        ({"step": 3}, "metrics"),
        ({"metrics": {}}, "metrics is empty"),
        ({"metrics": [1]}, "metrics must be an object"),
        ({"metrics": {"reward": "0.7"}}, "'reward' must be a number, or null for none"),
        ({"metrics": {"reward": True}}, "'reward' must be a number"),
        ({"metrics": {"reward": [1]}}, "'reward' must be a number"),
        ({"metrics": {"": 1}}, "a name must have 1 to 120 visible characters"),
        ({"metrics": {"a\nb": 1}}, "a name must have 1 to 120 visible characters"),
        ({"metrics": {"a" * 121: 1}}, "a name must have 1 to 120 visible characters"),
        ({"metrics": {str(i): 1 for i in range(513)}}, "513 names; a run can have 512"),
        ({"metrics": {"a": 1}, "step": -1}, "step must be from 0 to"),
        ({"metrics": {"a": 1}, "step": 1 << 60}, "step must be from 0 to"),
        ({"metrics": {"a": 1}, "step": 1.5}, "step must be an integer"),
        ({"metrics": {"a": 1}, "run": 7}, "run must be a string"),
    ),
)
def test_what_is_no_number_of_a_step_is_refused(
    server: Backend, hers: tinker.ServiceClient, body: Any, sentence: str
) -> None:
    run = make_client(hers).model_id
    reply = post(server, body, **HERS)
    assert reply.status_code == 400 and sentence in reply.json()["detail"]
    assert logged(server, run) == {}


def test_a_run_has_so_many_names(server: Backend, hers: tinker.ServiceClient) -> None:
    run = make_client(hers).model_id
    first = {f"a{i}": 1.0 for i in range(512)}
    assert post(server, {"metrics": first}, **HERS).status_code == 200
    reply = post(server, {"metrics": {"a0": 2, "b": 1}}, **HERS)
    assert reply.status_code == 400 and "513 numbers by name" in reply.json()["detail"]
    assert logged(server, run) == {0: first}


def test_numbers_of_a_step_are_joined_and_what_is_none_is_null(
    server: Backend, hers: tinker.ServiceClient
) -> None:
    run = make_client(hers).model_id
    post(server, {"step": 2, "metrics": {"a": None, "b": 2, "c": 10**400}}, **HERS)
    post(server, {"step": 2, "metrics": {"b": 3.5, "d": -1}}, **HERS)
    assert logged(server, run) == {2: {"a": None, "b": 3.5, "c": None, "d": -1.0}}
    post(server, {"step": 2, "metrics": {"a": 5}}, **HERS)  # those before are on the disk
    assert logged(server, run)[2] == {"a": 5.0, "b": 3.5, "c": None, "d": -1.0}
    assert post(server, {"metrics": {"b": 4}}, **HERS).json() == {"run": run, "step": 3}


# ---- whose run ----


def test_without_a_run_it_is_the_newest_that_was_used_alone(
    server: Backend, hers: tinker.ServiceClient
) -> None:
    first = make_client(hers)
    train(first, 1)
    second = make_client(hers)
    server.notifier.flush()
    assert post(server, {"metrics": {"a": 1}}, **HERS).json()["run"] == second.model_id
    train(first, 1)
    server.notifier.flush()
    reply = post(server, {"metrics": {"a": 1}}, **HERS)
    assert reply.status_code == 400
    assert "2 runs of this API key are in use" in reply.json()["detail"]
    reply = post(server, {"metrics": {"a": 2}, "run": first.model_id}, **HERS)
    assert reply.json() == {"run": first.model_id, "step": 0}
    assert logged(server, first.model_id) == {0: {"a": 2.0}}


def test_a_run_whose_creation_was_refused_is_none(
    server: Backend, hers: tinker.ServiceClient
) -> None:
    run = make_client(hers).model_id
    with pytest.raises(tinker.TinkerError, match="rank 100000"):
        hers.create_lora_training_client("tiny", rank=100000).result()
    assert post(server, {"metrics": {"a": 1}}, **HERS).json()["run"] == run


def test_another_key_has_another_keys_run_not(server: Backend, hers: tinker.ServiceClient) -> None:
    run = make_client(hers).model_id
    theirs = {"X-API-Key": "tml-nobodys"}
    reply = post(server, {"metrics": {"a": 1}, "run": run}, **theirs)
    assert reply.status_code == 404 and "there is no run" in reply.json()["detail"]
    assert post(server, {"metrics": {"a": 1}, "run": "no"}, **theirs).status_code == 404
    reply = post(server, {"metrics": {"a": 1}}, **theirs)
    assert reply.status_code == 404 and "this API key has no run here" in reply.json()["detail"]
    assert logged(server, run) == {}


def test_a_run_of_an_earlier_server_takes_numbers(tiny_model_dir: Path, tmp_path: Path) -> None:
    start = {"checkpoints": tmp_path, "device": "cpu", "threads": 1}
    with (
        Backend(ServerConfig({"tiny": tiny_model_dir}, **start)) as server,
        server.service_client() as service,
    ):
        run = make_client(service).model_id
        mine = {"X-API-Key": "tml-local"}
        post(server, {"metrics": {"reward": 0.5}, "step": 7}, **mine)
    with Backend(ServerConfig({"tiny": tiny_model_dir}, **start)) as server:
        assert logged(server, run) == {7: {"reward": 0.5}}
        assert post(server, {"metrics": {"reward": 1}}, **mine).status_code == 404  # which run?
        answer = post(server, {"metrics": {"reward": 1}, "run": run}, **mine).json()
        assert answer == {"run": run, "step": 8}
        assert post(server, {"metrics": {"a": 1}, "run": run}, **HERS).status_code == 404
        assert logged(server, run) == {7: {"reward": 0.5}, 8: {"reward": 1.0}}
        (row,) = httpx.get(f"{server.url}/page/data/runs").json()["runs"]
        assert row["reward"] == 1.0 and row["spark"] == [0.5, 1.0] and row["base"] == "tiny"


# ---- which is the reward ----


@pytest.mark.parametrize(
    ("names", "reward"),
    (
        (["loss", "reward", "env/all/reward/total"], "reward"),
        (["test/env/all/reward/total", "env/all/reward/total", "loss"], "env/all/reward/total"),
        (["reward/std", "reward_max", "mean_reward"], "mean_reward"),
        (["Return", "a"], "Return"),
        (["rewarding", "loss"], None),
        ([], None),
    ),
)
def test_the_reward_is_found_by_its_name(names: list[str], reward: str | None) -> None:
    assert metric_logs.reward_of(names) == reward


# ---- how many are kept ----


def test_a_long_run_keeps_every_second_row_and_what_comes_seldom(
    history: RunHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_logs, "ROWS_MAX", 20)
    for step in range(1, 200, 2):  # odd steps: no multiple of two is among them
        seldom = {"rare": step * 1.0} if step % 9 == 0 else {}
        history.log(RUN, step, {"a": float(step)} | seldom)
        rows, place = history.logged(RUN)
        assert len(rows) <= 20
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert all(row["values"]["a"] == row["step"] for row in rows)
    kept = [row["values"]["rare"] for row in rows if "rare" in row["values"]]
    assert len(kept) >= 5 and all(value % 9 == 0 for value in kept)
    thinned = history.about(RUN)[1]["log_thinned"]
    assert thinned > 1
    assert history.logged(RUN, place) == ([], place)
    for step in range(201, 240, 2):
        history.log(RUN, step, {"a": 0.0})
    new, _ = history.logged(RUN, place)
    assert history.about(RUN)[1]["log_thinned"] == thinned + 1
    assert new == history.logged(RUN)[0]  # who has the old rows gets all that are kept now


def test_rows_have_so_many_bytes(history: RunHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_logs, "BYTES_MAX", 2000)
    for step in range(100):
        history.log(RUN, step, {f"a{i}": 0.25 for i in range(10)})
        rows, _ = history.logged(RUN)
        assert sum(len(str(row["values"])) for row in rows) <= 2000
    assert rows[0]["step"] == 0 and rows[-1]["step"] > 90


def test_rows_that_can_not_be_written_are_bounded_too(
    history: RunHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_logs, "ROWS_MAX", 4)

    def full() -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(history, "flush", full)
        history._flush_told()
        for step in range(4):
            history.log(RUN, step, {"a": 0.5})
        history._flush_told()
        with pytest.raises(OSError, match="numbers of 4 steps wait for room on the server's disk"):
            history.log(RUN, 4, {"a": 0.5})
        history.log(RUN, 3, {"b": 0.5})  # a row that is there
    history._flush_told()
    history.log(RUN, 4, {"a": 0.5})
    assert history.logged(RUN)[0][-1]["step"] == 4


def test_logged_rows_of_old_runs_go_with_them(
    history: RunHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.server.records.history.FORGET_FLUSHES", 1)
    monkeypatch.setattr("tinsmith.server.records.history.ROWS_MAX", 8)
    for run in ("old", "new"):
        for step in range(6):
            history.log(run, step, {"a": 1.0})
        history.flush()
    history.log("new", 6, {"a": 1.0})
    history.flush()
    assert history.logged("old") == ([], 0) and history.about("old") is None
    assert len(history.logged("new")[0]) == 7
