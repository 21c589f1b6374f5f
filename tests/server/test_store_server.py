"""A server and its folder: requests that come twice, a database that another process keeps or has
written nonsense to, metadata that can't be kept, and folders that are not a client's business."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from conftest import Wire
from support.small_run import make_client, make_data, read, train
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints import store as store_file
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import Backend
from tinsmith.server.records.database import STATE_FILE
from tinsmith.server.records.notifier import Refused
from tinsmith.server.service import checkpoints, promises
from tinsmith.server.service import service as service_file
from tinsmith.server.service.config import ServerConfig


@pytest.fixture
def backend(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Backend]:
    """A server of a test's own."""
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir}, checkpoints=tmp_path / "root", device="cpu", threads=1
        )
    ) as made:
        yield made


@pytest.fixture
def wire(backend: Backend) -> Wire:
    return Wire(backend.url)


def new_session(wire: Wire, **more) -> str:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", **more}
    return wire.post("/create_session", **body)["session_id"]


def create(wire: Wire, session: str, number: int = 0, **more) -> dict:
    lora = {"rank": 4, "seed": 1}
    body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", **more}
    return wire.post("/create_model", lora_config=lora, **body)


def paths_of(listing: dict) -> list[str]:
    return [item["tinker_path"] for item in listing["checkpoints"]]


# ---- requests that come twice ----


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are dropped as soon as they were read, as otherwise after a minute."""
    monkeypatch.setattr(promises, "KEPT_READ_SECONDS", -1.0)
    monkeypatch.setattr(service_file, "SWEEP_SECONDS", -1.0)


def test_a_run_that_is_created_again_later_is_the_run_that_is_there(backend, forgetful):
    with backend.service_client() as service:
        client = make_client(service)
        train(client, 2)
        trained = read(client)
        wire, session = Wire(backend.url), client.model_id.partition(":")[0]
        for _ in range(2):
            reply = create(wire, session)
            assert reply["model_id"] == client.model_id
            assert wire.result(reply) == {"type": "create_model", "model_id": client.model_id}
        np.testing.assert_array_equal(read(client), trained)
        path = client.save_state("a").result().path
        body = {"session_id": session, "model_seq_id": 7, "path": path}
        first = wire.post("/load_weights", **body)
        assert "error" not in wire.result(first)
        assert "error" not in wire.result(wire.optim_step(first["model_id"], 1))
        assert "error" not in wire.result(wire.post("/load_weights", **body))
        late = wire.result(wire.optim_step(first["model_id"], 1))
        assert "comes after its turn" in late["error"]  # the run is the first one
        assert "error" not in wire.result(wire.optim_step(first["model_id"], 2))
        listed = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        runs = listed.list_training_runs().result().training_runs
        assert len(runs) == 2


def test_a_creation_that_failed_is_told_again(wire, forgetful):
    session = new_session(wire)
    for _ in range(2):
        reply = create(wire, session, base_model="none")
        assert "unknown base model 'none'" in wire.result(reply)["error"]
    assert "error" not in wire.result(create(wire, session))


def test_a_run_does_not_take_the_place_of_a_copy(backend):
    with backend.service_client() as service:
        client = make_client(service)
        path = client.save_state("a").result().path
        wire, session = Wire(backend.url), client.model_id.partition(":")[0]
        body = {"source_path": path, "session_id": session, "model_seq_id": 90}
        copied = wire.post("/copy_weights", **body)["tinker_path"]
        told = wire.result(create(wire, session, 90))["error"]
        assert f"there is a run {session}:train:90 already" in told
        store = Store(backend.checkpoints)
        assert store.checkpoints(f"{session}:train:90") == [copied]


def test_a_session_that_is_asked_for_twice_is_one(wire):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}

    def ask(key: str) -> str:
        headers = {"X-Idempotency-Key": key}
        return wire.http.post("/create_session", json=body, headers=headers).json()["session_id"]

    assert ask("one") == ask("one") != ask("two")


def test_copies_that_are_asked_for_at_once_are_one(backend):
    with backend.service_client() as service:
        path = make_client(service).save_state("a").result().path
        wire = Wire(backend.url)
        body = {"source_path": path, "destination_project_id": "any"}

        def ask(_: int) -> str:
            headers = {"X-Idempotency-Key": "once"}
            return wire.http.post("/copy_weights", json=body, headers=headers).json()["tinker_path"]

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(ask, range(8)))) == 1
        assert len(Store(backend.checkpoints).runs()) == 2


# ---- two servers ----


def test_a_second_server_on_a_folder_is_refused(backend, tiny_model_dir):
    with pytest.raises(OSError, match="is used by another tinsmith server: this process at http"):
        Backend(
            ServerConfig(
                {"tiny": tiny_model_dir}, checkpoints=backend.checkpoints, device="cpu", threads=1
            )
        )
    assert Wire(backend.url).http.get("/healthz").json() == {"status": "ok"}


def test_two_runs_of_recipes_share_a_folder(tiny_model_dir, tmp_path):
    def start() -> Backend:
        return Backend(
            ServerConfig(
                {"tiny": tiny_model_dir},
                checkpoints=tmp_path,
                share_checkpoints=True,
                device="cpu",
                threads=1,
            )
        )

    with start() as one, start() as other:
        with one.service_client() as first, other.service_client() as second:
            clients = [make_client(first), make_client(second)]
            for number in range(4):
                saves = [client.save_state("last", overwrite=number > 0) for client in clients]
                paths = [save.result().path for save in saves]
        listed = paths_of(Wire(one.url).http.get("/checkpoints").json())
        assert set(listed) == set(paths)
    with start() as again, again.service_client() as service:  # each finds its own again
        for path in paths:
            service.create_training_client_from_state_with_optimizer(path).result()


@pytest.mark.parametrize("mask", (0, 0o777))
def test_what_a_server_makes_is_its_owners_alone(mask, tiny_model_dir, tmp_path):
    before = os.umask(mask)
    try:
        with (
            Backend(
                ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path / "root", device="cpu")
            ) as made,
            made.service_client() as service,
        ):
            client = make_client(service)
            client.save_state("a").result()
            client.save_weights_external("b").result()
            paths = [made.checkpoints, *made.checkpoints.rglob("*")]
            modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
    finally:
        os.umask(before)
    assert {STATE_FILE, "server.lock"} < {path.name for path in modes}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


# ---- a database that another process keeps ----


@contextlib.contextmanager
def locked(backend: Backend) -> Iterator[None]:
    other = sqlite3.connect(backend.checkpoints / STATE_FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def test_a_locked_database_stops_only_who_writes_to_it(backend):
    with backend.service_client() as service:
        client = make_client(service)
        path = client.save_state("a").result().path
        wire = Wire(backend.url)
        made: list[str] = []
        asking = [
            threading.Thread(target=lambda: made.append(new_session(Wire(backend.url))))
            for _ in range(6)
        ]
        with locked(backend):
            for thread in asking:
                thread.start()
            for _ in range(5):
                assert wire.http.get("/healthz").json() == {"status": "ok"}
                assert paths_of(wire.http.get("/checkpoints").json()) == [path]
                client.forward_backward(make_data(), "cross_entropy").result()
                client.save_state("a", overwrite=True).result()
            assert made == []
        for thread in asking:
            thread.join()
        assert len(set(made)) == 6


def test_a_database_that_stays_locked_is_a_sentence(backend, monkeypatch):
    monkeypatch.setattr(checkpoints, "BUSY_SECONDS", 0.1)
    wire = Wire(backend.url)
    session = new_session(wire)
    with locked(backend):
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        reply = wire.http.post("/create_session", json=body)
        assert reply.status_code == 400 and "database is locked" in reply.json()["detail"]
        told = wire.result(create(wire, session))
        assert "where the server keeps its sessions and runs" in told["error"]
        assert told["category"] == "server"
    assert "error" not in wire.result(create(wire, session, 1))


# ---- what anyone may have written ----


def test_a_full_database_is_507_and_its_client_goes_on_when_there_is_room(backend, caplog):
    """It was a 400, which the SDK gives up at once."""
    backend._state.read("PRAGMA max_page_count = 1")  # what SQLite meets where the disk is full
    refused = []

    def make_room(happened: object) -> None:
        if isinstance(happened, Refused):
            refused.append((happened.status, happened.detail))
            backend._state.read("PRAGMA max_page_count = 100000")

    backend.notifier.listen(make_room)
    with backend.service_client(user_metadata={"k": "v" * 20000}) as service:
        service.create_lora_training_client("tiny", rank=2).result()
    [(status, told)] = refused
    assert status == 507 and told.startswith("the disk is full: ")
    assert [record.getMessage() for record in caplog.records if record.levelno == 30] == [told]


def test_odd_rows_of_the_database_are_left_out(backend, caplog):
    wire = Wire(backend.url)
    with backend.service_client() as service:
        client = make_client(service)
        path = client.save_state("a").result().path
        session = client.model_id.partition(":")[0]
        assert paths_of(wire.http.get("/checkpoints").json()) == [path]
        sql = sqlite3.connect(backend.checkpoints / STATE_FILE, isolation_level=None)
        (owner,) = sql.execute("SELECT owner FROM session WHERE id = ?", (session,)).fetchone()
        good = "2026-11-22T10:00:00+00:00"
        for number, (data, created, finish) in enumerate(
            [
                ("{", good, None), ("[]", good, None), ('{"a": 1}', good, None),
                ('{"a": "\\ud800"}', good, None), ("{}", "soon", None), ("{}", 7, None),
                ("{}", good, "[]"), ("{}", good, '{"reason": {}}'), ("[" * 9999, good, None),
            ]
        ):  # fmt: skip
            row = (f"odd-{number}", owner, None, data, created, finish)
            sql.execute("INSERT INTO session VALUES (?, ?, ?, ?, ?, ?)", row)
            row = (f"odd-{number}", session, "tiny", "x" if finish else 4, data, created)
            sql.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?)", row)
        sql.execute(
            "INSERT INTO run VALUES (?, ?, CAST(x'ff' AS TEXT), 4, '{}', ?)", ("b", "", good)
        )
        for name in ("", "..", "x" * 5000):  # the names of no folder
            row = (name, session, good)
            sql.execute("INSERT INTO run VALUES (?, ?, 'tiny', 4, '{}', ?)", row)
        sql.execute("UPDATE checkpoint SET meta = '{', bytes = 'many'")
        sql.close()
        for route in ("/training_runs", "/checkpoints", "/sessions", f"/sessions/{session}"):
            reply = wire.http.get(route)
            assert reply.status_code == 200, reply.text
        runs = wire.http.get("/training_runs").json()["training_runs"]
        assert {run["training_run_id"] for run in runs} == {client.model_id, "b"}
        assert wire.http.get("/sessions").json()["sessions"] == [session]
        assert paths_of(wire.http.get("/checkpoints").json()) == [path]
        told = wire.post("/sessions/search")["sessions"]
        assert [item["session_id"] for item in told] == [session]
        told = [record.message for record in caplog.records if "is left out" in record.message]
        assert len(told) == len(set(told)) and sum("'odd-0'" in text for text in told) == 1


def test_an_odd_folder_is_left_out_and_told_of(backend, caplog):
    wire = Wire(backend.url)
    with backend.service_client() as service:
        client = make_client(service)
        kept, odd = (client.save_state(name).result().path for name in ("kept", "odd"))
        store = Store(backend.checkpoints)
        file = store.folder(odd) / "meta.json"
        content = json.loads(file.read_text())
        run = f"/training_runs/{client.model_id}"
        assert not wire.http.get(run).json()["corrupted"]
        meta_sentence = re.compile("should be|can't be a file")
        for changes in (
            {"ttl_seconds": 10**300}, {"created": "soon"}, {"kind": "other"}, {"rank": "four"},
            {"user_metadata": {"a": "\ud800"}}, {"files": {"../../x": {}}},
        ):  # fmt: skip
            file.write_text(json.dumps(content | changes))
            for _ in range(2):
                assert paths_of(wire.http.get("/checkpoints").json()) == [kept]
            told = wire.http.get(run).json()
            assert told["corrupted"] and told["last_checkpoint"]["tinker_path"] == kept
            kind, name = odd.split("/")[-2:]
            for route in ("archive.tar", "external_weights_urls", "files/x"):
                reply = wire.http.get(f"{run}/checkpoints/{kind}/{name}/{route}")
                assert reply.status_code == 400 and meta_sentence.search(reply.text)
        assert sum(odd in record.message for record in caplog.records) == 6
        assert wire.http.delete(f"{run}/checkpoints/weights/odd").status_code == 200
        assert not wire.http.get(run).json()["corrupted"]


BAD_METADATA = {
    "lone surrogate": ({"a": "\ud800"}, "half of a surrogate pair"),
    "surrogate key": ({"\udfff": "a"}, "half of a surrogate pair"),
    "deep surrogate": ({"a": [{"b": "\ud800"}]}, "half of a surrogate pair"),
    "infinity": ({"a": float("inf")}, "is not finite"),
    "nan": ({"a": float("nan")}, "is not finite"),
    "deep": ({"a": json.loads("[" * 100 + "]" * 100)}, "more than 64"),
    "large": ({"a": "ü" * 40_000}, "user_metadata has 80001 bytes; at most 65536"),
    "list": ([1], "user_metadata must be an object"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_metadata_that_can_not_be_kept_is_a_sentence(name, server):
    wire = Wire(server.url)
    given, sentence = BAD_METADATA[name]

    def told(path: str, /, **body) -> str:
        text = json.dumps({"user_metadata": given, **body})
        headers = {"Content-Type": "application/json"}
        reply = wire.http.post(path, content=text, headers=headers)
        if reply.status_code == 400:
            return reply.json()["detail"]
        return wire.result(reply.json())["error"]

    assert sentence in told("/create_session", tags=[], sdk_version="0")
    new = {"session_id": new_session(wire), "base_model": "tiny", "lora_config": {"rank": 4}}
    assert sentence in told("/create_model", model_seq_id=0, **new)
    model = create(wire, new["session_id"], 1)["model_id"]
    for number, path in ((1, "/save_weights"), (2, "/save_weights_for_sampler")):
        assert sentence in told(path, model_id=model, seq_id=number, path="a")
    assert wire.http.get("/training_runs").status_code == 200
    assert wire.http.get("/sessions").status_code == 200


def test_a_long_number_is_kept_as_text(server):
    wire = Wire(server.url)
    session = new_session(wire, user_metadata={"a": 10**300})
    assert wire.http.get(f"/sessions/{session}").json()["user_metadata"] == {"a": str(10**300)}


def test_what_can_not_be_told_again_is_refused(server):
    wire = Wire(server.url)
    session = new_session(wire)
    for path, body, sentence in (
        ("/create_session", {"display_name": "x" * 10_001}, "display_name must have at most"),
        (f"/sessions/{session}/finish", {"detail": "x" * 10_001}, "detail must have at most"),
        (f"/sessions/{session}/finish", {"reason": {"a": "b"}}, "the reason has no type"),
        (f"/sessions/{session}/finish", {"reason": {"type": "a", "b": []}}, "must have text alone"),
    ):
        reply = wire.http.post(path, json=body)
        assert reply.status_code == 400 and sentence in reply.json()["detail"], reply.text
    wire.post("/session_heartbeat", session_id=session)


# ---- folders that are none of a client's business ----


def test_other_folders_tell_nothing(server, tmp_path):
    """Neither what is in them nor whether they are there."""
    wire = Wire(server.url)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("secret")
    for name, text in (("other", '{"peft_type": "secret"}'), ("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.CONFIG_FILE).write_text(text)
        (tmp_path / name / checkpoint.ADAPTER_FILE).write_text("secret")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "meta.json").write_text('{"version": "secret"}')
    (tmp_path / "linked").symlink_to("/etc")
    names = ("none", "empty", "file", "file/below", "other", "broken", "list", "odd", "linked")
    told = set()
    model = wire.create()
    session = model.partition(":")[0]
    for number, name in enumerate((*names, "a\0b", "x" * 5000), 1):
        path = str(tmp_path / name)
        replies = [
            wire.http.post("/weights_info", json={"tinker_path": path}).json()["detail"],
            wire.http.post(
                "/create_sampling_session",
                json={"session_id": session, "sampling_session_seq_id": 5, "model_path": path},
            ).json()["detail"],
            wire.result(wire.post("/load_weights", model_id=model, seq_id=number, path=path))[
                "error"
            ],
            wire.result(
                wire.post("/load_weights", session_id=session, model_seq_id=number, path=path)
            )["error"],
        ]
        told |= {reply.replace(repr(path)[:200], "PATH") for reply in replies}
    assert len(told) == 1, told
    assert "is not a checkpoint's path" in told.pop()


def test_a_folder_that_is_named_again_and_again_is_warned_of_once(server, tmp_path, caplog):
    wire = Wire(server.url)
    for name in ("one", "other") * 5:
        reply = wire.http.post("/weights_info", json={"tinker_path": str(tmp_path / name)})
        assert "the server's log says why" in reply.json()["detail"]
    warned = [item.message for item in caplog.records if str(tmp_path) in item.message]
    assert len(warned) == 2 and "one" in warned[0] and "other" in warned[1]


def test_meta_is_read_once_by_what_changes_it(backend, monkeypatch):
    """So that what is checked is what is changed."""
    wire, read, reads = Wire(backend.url), store_file.content_of, []
    monkeypatch.setattr(store_file, "content_of", lambda v: reads.append(v) or read(v))
    model = wire.create()
    wire.result(wire.post("/save_weights", model_id=model, seq_id=1, path="a"))
    checkpoint = f"/training_runs/{model}/checkpoints/weights/a"
    for method, path, body in (
        ("POST", "publish", None),
        ("DELETE", "publish", None),
        ("PUT", "ttl", {"ttl_seconds": 7200}),
        ("GET", "archive.tar", None),
    ):
        reads.clear()
        reply = wire.http.request(method, f"{checkpoint}/{path}", json=body)
        assert reply.status_code == 200 and len(reads) == 1, (path, reply.text)


def test_an_url_of_a_version_that_was_replaced_leads_nowhere(backend):
    with backend.service_client() as service:
        client = make_client(service)
        client.save_state("a").result()
        http = Wire(backend.url).http
        base = f"/training_runs/{client.model_id}/checkpoints/weights/a"
        urls = http.get(f"{base}/external_weights_urls").json()["urls"]
        assert [httpx.get(url).status_code for url in urls.values()] == [200] * 3
        train(client, 1)
        client.save_state("a", overwrite=True).result()
        for url in urls.values():
            reply = httpx.get(url)
            assert reply.status_code == 404 and "was saved again since" in reply.text
        assert httpx.get(f"{backend.url}/api/v1{base}/files/meta.json").status_code == 404


def test_a_copied_folder_of_a_stranger_gives_nothing_away(backend, tmp_path):
    """Its meta.json names files elsewhere, and its files are links."""
    (tmp_path / "secret.txt").write_text("secret")
    with backend.service_client() as service:
        client = make_client(service)
        path = client.save_weights_for_sampler("a").result().path
        store = Store(backend.checkpoints)
        folder = store.folder(path)
        foreign = store.run_folder("foreign") / "sampler_weights" / "a"
        shutil.copytree(folder, foreign)
        content = json.loads((foreign / "meta.json").read_text())
        facts = {"bytes": 6, "sha256": "0" * 64}
        http = Wire(backend.url).http
        base = "/training_runs/foreign/checkpoints/sampler_weights/a"
        for name in ("../../../../secret.txt", "adapter_config.json"):
            (foreign / "adapter_config.json").unlink(missing_ok=True)
            (foreign / "adapter_config.json").symlink_to(tmp_path / "secret.txt")
            (foreign / "meta.json").write_text(json.dumps(content | {"files": {name: facts}}))
            for route in ("archive.tar", f"files/{name.rpartition('/')[2]}"):
                reply = http.get(f"{base}/{route}")
                assert reply.status_code in (400, 404) and "secret" not in reply.text.replace(
                    "secret.txt", ""
                )
