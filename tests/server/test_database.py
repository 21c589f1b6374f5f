"""What a server remembers across restarts, and that the folders remain the truth about it."""

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from conftest import Wire
from support.small_run import make_client, train
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.engine.errors import sentence
from tinsmith.server.backend import Backend
from tinsmith.server.records import database as state_file
from tinsmith.server.records.database import STATE_FILE, State
from tinsmith.server.service.config import ServerConfig

Search = tinker.types.SessionSearchRequest


def start(model: Path, folder: Path) -> Backend:
    return Backend(ServerConfig({"tiny": model}, checkpoints=folder, device="cpu", threads=1))


def rest_of(backend: Backend) -> tinker.RestClient:
    return tinker.RestClient(base_url=backend.url, api_key="tml-local")


@pytest.fixture(scope="module")
def made(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The checkpoints' folder of a server that has stopped, and what its client knew."""
    folder = tmp_path_factory.mktemp("made")
    known: dict = {"folder": folder}
    with start(tiny_model_dir, folder) as backend:
        arguments = {"user_metadata": {"who": "me"}, "display_name": "red bird"}
        with backend.service_client(**arguments) as service:
            client = service.create_lora_training_client(
                "tiny", rank=4, seed=1, user_metadata={"renderer_name": "qwen3"}
            ).result()
            train(client, 1)
            known["state"] = client.save_state("a", ttl_seconds=7200).result().path
            known["weights"] = client.save_weights_for_sampler("b").result().path
            sampler = service.create_sampling_client(model_path=known["weights"]).result()
            known["run"], known["sampler"] = client.model_id, sampler._sampling_session_id
        live = backend.service_client(user_metadata={"who": "you"})
        make_client(live)
        known["live"] = live.holder.get_session_id()
        rest_of(backend).publish_checkpoint_from_tinker_path(known["weights"]).result()
    known["session"] = known["run"].partition(":")[0]
    return known


@pytest.fixture
def folder(made: dict, tmp_path: Path) -> Path:
    """A copy of that folder, for a test to change."""
    return Path(shutil.copytree(made["folder"], tmp_path / "copy"))


@pytest.fixture
def state(folder: Path) -> Iterator[State]:
    opened = State(Store(folder))
    yield opened
    opened.close()


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_runs_and_samplers_are_told_of_after_a_restart(made, folder, tiny_model_dir):
    with start(tiny_model_dir, folder) as backend:
        rest = rest_of(backend)
        assert rest.list_sessions().result().sessions == [made["live"], made["session"]]
        session = rest.get_session(made["session"]).result()
        assert session.training_run_ids == [made["run"]]
        assert session.sampler_ids == [made["sampler"]]
        found = rest.search_sessions(Search(display_name="bird")).result().sessions
        assert [item.session_id for item in found] == [made["session"]]
        assert (found[0].status.type, found[0].checkpoints_count) == ("client_finished", 2)
        assert found[0].user_metadata == {"who": "me"}
        (left,) = rest.search_sessions(Search(user_metadata={"who": "you"})).result().sessions
        ended = [{"type": "client_finished"}]
        page = rest.search_sessions(Search(statuses=ended)).result()
        assert [item.session_id for item in page.sessions] == [made["session"]]
        assert left.session_id == made["live"] and left.status is None  # nobody ended it
        run = rest.get_training_run(made["run"]).result()
        assert (run.base_model, run.lora_rank) == ("tiny", 4)
        assert run.user_metadata == {"renderer_name": "qwen3"}
        runs = rest.list_training_runs().result().training_runs
        assert len(runs) == 2 and runs[1].training_run_id == made["run"]  # the newest first
        items = {
            item.tinker_path: item for item in rest.list_user_checkpoints().result().checkpoints
        }
        assert set(items) == {made["state"], made["weights"]}
        assert items[made["weights"]].public and not items[made["state"]].public
        left_seconds = items[made["state"]].expires_at - items[made["state"]].time
        assert left_seconds.total_seconds() == 7200


def test_an_old_sessions_client_is_told_to_make_a_new_one(made, folder, tiny_model_dir):
    with start(tiny_model_dir, folder) as backend:
        http = Wire(backend.url).http
        for path, body in (
            ("/session_heartbeat", {"session_id": made["session"]}),
            ("/get_info", {"model_id": made["run"]}),
        ):
            reply = http.post(path, json=body)
            assert reply.status_code == 404 and "was started again" in reply.json()["detail"]
        reply = http.get(f"/samplers/{made['sampler']}")
        assert reply.status_code == 404 and "started again since" in reply.json()["detail"]


def test_keys_are_not_kept(made):
    kept = b"".join(file.read_bytes() for file in made["folder"].glob(STATE_FILE + "*"))
    assert made["session"].encode() in kept and b"tml-local" not in kept


def test_folders_changed_by_hand_are_noticed(made, folder, state):
    run, path = made["run"], made["weights"]
    store = Store(folder)
    assert [item.path for item in state.checkpoints(run)] == [made["state"], path]
    copied = f"tinker://{run}/weights/copied"
    shutil.copytree(store.folder(made["state"]), store.folder(copied))
    assert copied in [item.path for item in state.checkpoints(run)]
    store.update(copied, public=True)
    assert [item.meta.public for item in state.checkpoints(run) if item.path == copied] == [True]
    shutil.rmtree(store.folder(copied))
    (store.folder(made["state"]) / checkpoint.META_FILE).write_text("{")  # damaged: left out
    assert [item.path for item in state.checkpoints(run)] == [path]
    shutil.copytree(store.run_folder(run), store.run_folder("another"))
    rows = {row.id: row for row in state.runs()}
    assert rows["another"].user_metadata == {"renderer_name": "qwen3"}
    assert rows["another"].session is None and rows[run].session == made["session"]
    shutil.rmtree(store.run_folder(run))
    assert state.checkpoints(run) == [] and state.run(run).rank == 4


def test_an_index_row_is_read_again_only_when_its_file_changed(made, folder, state, monkeypatch):
    first = state.checkpoints(made["run"])
    read = []
    load = state_file._read
    monkeypatch.setattr(state_file, "_read", lambda *it: read.append(it) or load(*it))
    assert state.checkpoints(made["run"]) == first and read == []
    Store(folder).update(made["state"], ttl_seconds=None)
    changed = state.checkpoints(made["run"])
    assert [item.meta.ttl_seconds for item in changed] == [None, None] and len(read) == 1
    assert first[0].bytes == sum(
        f.stat().st_size for f in Store(folder).folder(first[0].path).iterdir()
    )


def test_runs_are_found_again_without_the_database(made, folder):
    for file in folder.glob(STATE_FILE + "*"):
        file.unlink()
    state = State(Store(folder))
    row = state.run(made["run"])
    assert (row.base_model, row.rank) == ("tiny", 4)
    assert row.user_metadata == {"renderer_name": "qwen3"}
    assert [item.id for item in state.runs()] == [made["run"]]
    assert len(state.checkpoints(made["run"])) == 2
    state.close()


def test_what_a_row_says_beside_a_finish_is_not_told(made, folder, state):
    """Nor is it a reason for any client to get no list: JSON has no NaN."""
    (owner,) = state.read("SELECT owner FROM session WHERE id = ?", made["session"])[0]
    finish = {"reason": {"type": "success"}, "detail": "done"}
    state.finish_session(made["session"], finish | {"more": math.nan})
    (row,) = [row for row in state.sessions(owner) if row.id == made["session"]]
    assert row.finish == finish


def test_an_older_folder_is_imported(made, folder):
    """It has a run.json for each run, and no run_metadata in meta.json."""
    for file in folder.glob(STATE_FILE + "*"):
        file.unlink()
    store = Store(folder)
    for name in ("empty:train:0", made["run"]):
        store.run_folder(name).mkdir(exist_ok=True)
        info = {"base_model": "b", "lora_rank": 3, "user_metadata": {"n": name}, "created": "2026"}
        (store.run_folder(name) / "run.json").write_text(json.dumps(info))
    meta = store.folder(made["state"]) / checkpoint.META_FILE
    content = json.loads(meta.read_text())
    del content["run_metadata"]
    meta.write_text(json.dumps(content))
    (store.run_folder("broken")).mkdir()
    (store.run_folder("broken") / "run.json").write_text("{")
    state = State(store)
    assert {row.id: row.user_metadata["n"] for row in state.runs()} == {
        name: name for name in ("empty:train:0", made["run"])
    }
    assert state.run(made["run"]).rank == 3
    assert len(state.checkpoints(made["run"])) == 2
    state.close()


# ---- what can go wrong with the file ----


def damage_header(file: Path) -> None:
    file.write_bytes(b"no database at all" + file.read_bytes()[18:])


def damage_pages(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize("damage", (damage_header, damage_pages, cut_short))
def test_a_damaged_database_is_a_sentence(damage, made, folder):
    State(Store(folder)).close()  # what stood in the log is in the file now
    before = {
        f: f.read_bytes() for f in folder.rglob("*") if f.is_file() and STATE_FILE not in f.name
    }
    damage(folder / STATE_FILE)
    with pytest.raises(OSError, match=r"is damaged .*; move it away and start the server again"):
        State(Store(folder)).runs()
    (folder / STATE_FILE).unlink()
    state = State(Store(folder))
    assert state.run(made["run"]).rank == 4
    state.close()
    assert before == {f: f.read_bytes() for f in before}


def test_a_database_that_another_process_keeps_is_a_sentence(folder, monkeypatch):
    monkeypatch.setattr("tinsmith.server.records.database.WAIT_SECONDS", 0.1)
    other = sqlite3.connect(folder / STATE_FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="can't be read and written: database is locked"):
        State(Store(folder))
    other.close()


def test_a_full_disk_is_a_sentence_and_loses_nothing(made, state):
    state._sql.execute("PRAGMA max_page_count = 1")  # what SQLite meets where the disk is full
    with pytest.raises(OSError, match=r"the disk is full: .*`tinsmith prune` frees") as caught:
        for number in range(2000):
            state.add_sampler(f"s{number}", "s", "tiny", "x" * 100)
    assert "where the server keeps its sessions and runs" in sentence(caught.value)
    assert state.run(made["run"]).rank == 4


def test_a_transaction_that_fails_is_undone_and_the_next_one_goes_on(made, state):
    with pytest.raises(KeyError), state.transaction() as sql:
        sql.execute("DELETE FROM run")
        raise KeyError("which SQLite knows nothing of")
    assert state.run(made["run"]).rank == 4
    state.add_sampler("s", made["session"], "tiny", None)
    assert state.samplers_of(made["session"])[-1] == "s"


def test_a_server_in_a_read_only_folder_ends_with_a_sentence(folder, tiny_model_dir):
    """As a user who may only read, which root can become."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = (
        "import os, sys\n"
        "from tinsmith.checkpoints.store import Store\n"
        "from tinsmith.server.records.database import State\n"
        "from tinsmith.engine.errors import sentence\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: State(Store(sys.argv[1]))\n"
        "except OSError as error: print(sentence(error)); sys.exit(3)\n"
    )
    parent = folder
    while parent != parent.parent and os.geteuid() == 0:  # pytest's folders are its user's alone
        if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o5 != 0o5:
            parent.chmod(parent.stat().st_mode | 0o5)
        parent = parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert STATE_FILE in done.stdout and "can't be read and written: " in done.stdout
    folder.chmod(0o755)
