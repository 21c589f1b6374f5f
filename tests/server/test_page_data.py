"""What the page at / is made of, without a browser: its files and headers, its JSON, and who may
have which. test_page.py looks at it in a browser."""

import io
import json
import re
import shlex
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from support.small_run import PROMPT, make_client, sample, train
from tinker import ModelInput
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.cli import commands
from tinsmith.engine.bases import NotLoaded
from tinsmith.engine.call_log import Call, Now
from tinsmith.server.backend import Backend
from tinsmith.server.dashboard import page
from tinsmith.server.records import history
from tinsmith.server.records.steps import Step
from tinsmith.server.service.config import ServerConfig
from tinsmith.system.install_hints import pip_install

KEY = "tml-the-right-one"
FILES = sorted(path for path in page.FOLDER.iterdir() if not path.name.startswith("."))


def data(server: Backend, path: str) -> Any:
    return httpx.get(f"{server.url}/page/data/{path}").raise_for_status().json()


@pytest.fixture(scope="module")
def run(server: Backend) -> Iterator[str]:
    """A run of two steps, a sample, two checkpoints, and a call that was refused."""
    with server.service_client() as service:
        client = make_client(service)
        train(client, 2)
        sample(client.save_weights_and_get_sampling_client().result(), max_tokens=4, seed=1)
        client.save_state("kept").result()
        client.save_weights_for_sampler("gone", ttl_seconds=3600).result()
        httpx.get(f"{server.url}/api/v1/training_runs/nobody")
        server.notifier.flush()
        yield client.model_id


# ---- files ----


def test_the_pages_files_are_served_with_a_strict_policy(server: Backend) -> None:
    for path in (page.FOLDER / "index.html", *FILES):
        at = "/" if path.name == "index.html" else f"/page/static/{path.name}"
        reply = httpx.get(server.url + at).raise_for_status()
        assert reply.content == path.read_bytes()
        assert reply.headers["content-type"].startswith(page.KINDS[path.suffix])
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; " in policy
        assert (
            "unsafe" not in policy and "http" not in policy and "frame-ancestors 'none'" in policy
        )
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_plotly_is_served_from_its_package(server: Backend) -> None:
    reply = httpx.get(f"{server.url}/page/static/plotly.min.js").raise_for_status()
    version = data(server, "hello")["plotly"]
    assert version == metadata.version("plotly") and b"plotly.js v" in reply.content[:200]
    assert reply.headers["content-type"].startswith("text/javascript")


def test_without_plotly_a_sentence_says_how_to_get_it(
    server: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "plotly", lambda: None)
    assert data(server, "hello")["plotly"] is None
    reply = httpx.get(f"{server.url}/page/static/plotly.min.js")
    assert reply.status_code == 404 and pip_install("page") in reply.json()["detail"]


@pytest.mark.parametrize(
    "name",
    ("nothing.js", "..%2fserver%2fpage.py", "%2e%2e%2fcli.py", "commands.py", "tokenizer.json"),
)
def test_nothing_else_is_served(server: Backend, name: str) -> None:
    reply = httpx.get(f"{server.url}/page/static/{name}")
    assert reply.status_code == 404 and "detail" in reply.json()


def test_all_addresses_are_relative_and_every_module_is_there() -> None:
    names = {path.name for path in FILES}
    assert {"index.html", "app.js", "page.css"} <= names
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(r"""(?:src|href|from|url\()\s*=?\s*["'(]/""", text), path.name
        for found in re.findall(r"""from '\./(.+?)'|page/static/([\w.]+)""", text):
            assert "".join(found) in names | {"plotly.min.js"}
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text


# ---- data ----


def test_a_run_is_told_with_its_steps(server: Backend, run: str) -> None:
    (row,) = (row for row in data(server, "runs")["runs"] if row["id"] == run)
    assert row["steps"] == 2 and row["step"] == 1 and len(row["spark"]) == 2
    assert row["base"] == "tiny" and row["status"] == "live" and not row["failed"]
    told = data(server, f"runs/{run}")
    assert [step["step"] for step in told["steps"]] == [0, 1]
    assert told["about"]["rank"] == 4 and told["about"]["seed"] == "1"
    later = data(server, f"runs/{run}?after={told['place']}")
    assert later["steps"] == [] and later["place"] == told["place"]
    weights = 3.5 + 4  # the sizes of make_data's
    loss = told["steps"][0]["metrics"]["loss:sum"]
    assert row["loss_mean"] == told["steps"][1]["loss_mean"]
    assert told["steps"][0]["loss_mean"] == pytest.approx(loss / weights)


def test_the_list_is_told_again_where_it_may_differ(
    server: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RUNS_MAX", 1 << 20)  # of all tests' on this server
    old, report = "s-old:train:0", {"loss": 1.0, "loss_tokens": 2.0}
    facts = {"at": 1e9, "arrived": 1.0, "began": 2.0, "ended": 3.0}
    server.history(Call("optim_step", old, request=AdamParams(), result=report, **facts))
    told = data(server, "runs")
    assert {old, run} <= {row["id"] for row in told["runs"]}
    later = data(server, f"runs?after={int(told['now'])}")["runs"]
    assert run in {row["id"] for row in later} and old not in {row["id"] for row in later}
    service = server._service
    (row,) = page._find_runs(service, service.worker.now, time.time(), {old})  # it does something
    assert row["id"] == old and row["steps"] == 1 and row["spark"] == [0.5]
    soon = page._find_runs(service, service.worker.now, time.time() - 600, ())
    assert run in {row["id"] for row in soon} and old not in {row["id"] for row in soon}


def test_samples_come_once(server: Backend, run: str) -> None:
    told = data(server, f"runs/{run}/samples")
    again = data(server, f"runs/{run}/samples?seen={told['seen']}")
    assert again == {"seen": told["seen"], "samples": None}
    sampler = server.service_client().create_sampling_client(base_model="tiny").result()
    (row,) = (row for row in server.history.samples(run) if row["kind"] == "sample")
    both = [*row["prompt"], *row["ids"]]
    sampler.compute_logprobs(ModelInput.from_ints(both)).result()  # a teacher, of the same tokens
    server.notifier.flush()
    again = data(server, f"runs/{run}/samples?seen={told['seen']}")
    assert again["seen"] != told["seen"] and len(again["samples"]) == len(told["samples"])
    (row,) = (row for row in again["samples"] if row["kind"] == "sample")
    assert len(row["teacher"]) == 4


def test_samples_come_as_text(server: Backend, run: str) -> None:
    rows = data(server, f"runs/{run}/samples")["samples"]
    assert {row["kind"] for row in rows} == {"sample", "datum"}
    (row,) = (row for row in rows if row["kind"] == "sample")
    assert len(row["tokens"]) == len(row["student"]) == 4
    assert all(isinstance(text, str) for text in row["tokens"]) and "ids" not in row
    assert PROMPT.length == 5 and isinstance(row["prompt"], str)


def test_checkpoints_have_sizes_and_ends(server: Backend, run: str) -> None:
    rows = {row["path"]: row for row in data(server, f"runs/{run}/checkpoints")["checkpoints"]}
    kept, gone = rows[f"tinker://{run}/weights/kept"], rows[f"tinker://{run}/sampler_weights/gone"]
    assert kept["ttl_ends"] is None and gone["ttl_ends"] > gone["created"]
    assert kept["expires"] is gone["expires"] is False  # the server lets nothing expire
    assert (kept["kind"], gone["kind"], gone["step"]) == ("training", "sampler", 2)
    assert kept["bytes"] > gone["bytes"] > 0
    told = data(server, "models")
    assert told["bases"] == ["tiny"]
    assert {kept["path"], gone["path"]} <= {row["path"] for row in told["checkpoints"]}


def test_a_creation_that_was_refused_is_no_run(server: Backend) -> None:
    before, count = data(server, "runs")["runs"], data(server, "machine")["runs"]
    with server.service_client() as service:
        with pytest.raises(tinker.TinkerError, match="rank 100000 is more than"):
            service.create_lora_training_client("tiny", rank=100000).result()
        [*_, session] = server._service.sessions.values()
        (run,) = session.made
        server.notifier.flush()
        ids = [row["id"] for row in data(server, "runs")["runs"]]
        assert ids == [row["id"] for row in before] and data(server, "machine")["runs"] == count
        for path in (f"page/data/runs/{run}", f"api/v1/training_runs/{run}"):
            assert httpx.get(f"{server.url}/{path}").status_code == 404
        told = {row["what"]: row["detail"] for row in data(server, "machine")["refused"]}
        assert "rank 100000" in told[f"create {run}"]


def test_a_warning_of_a_step_is_told(
    server: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Step.row
    warned = property(lambda step: {**row.__get__(step), "warning": "weights grew"})
    monkeypatch.setattr(Step, "row", warned)
    report = {"loss": 1.0, "loss_tokens": 2.0}
    facts = {"at": time.time(), "arrived": 1.0, "began": 2.0, "ended": 3.0, "step": 7}
    server.history(Call("optim_step", "s-w:train:0", request=AdamParams(), result=report, **facts))
    about = data(server, "runs/s-w:train:0")["about"]
    assert about["warning"]["step"] == 7 and about["warning"]["detail"] == "weights grew"


def test_a_run_is_told_for_whom_the_engine_works(
    server: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Call("forward_backward", "s-other:train:0", tokens=9, began=1.0, done=1, count=3)
    now = Now([other], {run: 2}, {"tiny": 5})
    monkeypatch.setattr(type(server.worker), "now", property(lambda worker: now))
    told = data(server, f"runs/{run}")
    assert told["status"] == "waiting" and told["waiting"] == 2 and told["sampling"] == 5
    assert told["doing"]["run"] == "s-other:train:0" and told["doing"]["kind"] == other.kind
    told = data(server, "machine")
    session = run.partition(":")[0]
    assert told["training"]["run"] == "s-other:train:0" and told["training"]["who"] is None
    assert told["who"][run]["session"] == session and len(told["who"][run]["key"]) == 6


def test_the_machine_tells_of_processor_and_disk(server: Backend, run: str) -> None:
    host = data(server, "machine")["host"]
    assert host["devices"] == ["cpu"] and host["threads"] == 1 and host["cores"] >= 1
    assert host["cpu_seconds"] > 0 and host["folder"] == str(server.checkpoints)
    assert 0 < host["disk"]["bytes"] < host["disk"]["bytes_max"]
    assert host["checkpoints"]["bytes_max"] is None


def test_what_checkpoints_take_is_counted(tmp_path: Path) -> None:
    (tmp_path / "run" / "weights").mkdir(parents=True)
    (tmp_path / "run" / "weights" / "a").write_bytes(b"12345")
    (tmp_path / "state.sqlite").write_bytes(b"no checkpoint")
    assert page._kept(tmp_path, 1) == 5
    (tmp_path / "run" / "b").write_bytes(b"678")
    assert page._kept(tmp_path, 1) == 5 and page._kept(tmp_path, 2) == 8


def test_who_can_be_told_to_think(
    server: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("thinks", "{% if enable_thinking %}"), ("plain", "{{ messages }}")):
        (tmp_path / name).mkdir()
        template = text + ("{% endif %}" if name == "thinks" else "")
        settings = json.dumps({"chat_template": template})
        (tmp_path / name / "tokenizer_config.json").write_text(settings)
    assert page.thinks(tmp_path / "thinks") and not page.thinks(tmp_path / "plain")
    assert not page.thinks(tmp_path)  # no template at all


def test_a_checkpoint_can_be_fetched_exported_and_deleted(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    start = {"checkpoints": tmp_path / "it's", "device": "cpu", "threads": 1, "api_key": KEY}
    key = {"X-API-Key": KEY}
    with (
        Backend(ServerConfig({"tiny": tiny_model_dir}, **start)) as server,
        server.service_client() as service,
    ):
        client = make_client(service)
        path = client.save_weights_for_sampler("a").result().path
        at = f"{server.url}/page/data/runs/{client.model_id}/checkpoints"
        (row,) = httpx.get(at, headers=key).json()["checkpoints"]
        tar = httpx.get(f"{server.url}/{row['tar']}").raise_for_status()  # signed: without the key
        with tarfile.open(fileobj=io.BytesIO(tar.content)) as files:
            assert "adapter_model.safetensors" in files.getnames()
        assert httpx.get(f"{server.url}/{row['tar'].partition('?')[0]}").status_code == 401
        words = shlex.split(row["export"])
        options = commands.command_line().parse_args(words[1:])
        assert words[0] == "tinsmith" and options.adapter == path
        assert Path(options.model) == tiny_model_dir and options.checkpoints == server.checkpoints
        assert httpx.delete(f"{server.url}/{row['place']}").status_code == 401
        httpx.delete(f"{server.url}/{row['place']}", headers=key).raise_for_status()
        assert httpx.get(at, headers=key).json() == {"checkpoints": []}


def test_an_expired_checkpoint_is_not_told(
    server: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._service.store, "expire", True)
    monkeypatch.setattr(Meta, "expired", property(lambda meta: meta.ttl_seconds is not None))
    paths = [row["path"] for row in data(server, f"runs/{run}/checkpoints")["checkpoints"]]
    assert paths == [f"tinker://{run}/weights/kept"]


def test_one_talks_to_checkpoints_of_models_that_are_served(
    server: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._service, "bases", {})
    assert data(server, "models") == {
        key: [] for key in ("bases", "thinking", "seeing", "checkpoints")
    }


def test_a_runs_status_is_what_it_does(server: Backend, run: str) -> None:
    mine, others = Call("optim_step", run), Call("optim_step", "another")
    for wanted, training, waiting, ago in (
        ("training", mine, {run: 1}, 0),
        ("waiting", others, {run: 1}, 0),
        ("live", others, {run: 0}, 5),
        ("idle", None, {}, 60),
    ):
        now = Now([training] if training else [], waiting, {})
        assert page._status(server._service, now, run, time.time() - ago) == wanted
    assert page._status(server._service, Now([], {}, {}), "nobody", time.time()) == "ended"


def test_the_machine_is_told(server: Backend, run: str) -> None:
    told = data(server, "machine")
    assert told["memory"]["weights"] > 0 and told["memory"]["limit"] > told["memory"]["weights"]
    assert told["training"] is None and told["sampler"]["tokens"] >= 4
    assert [model["name"] for model in told["models"]] == ["tiny"]
    refused = [row for row in told["refused"] if "'nobody'" in row["detail"]]
    assert refused[0]["status"] == 404 and "training_runs/{" in refused[0]["what"]


def test_an_adapter_of_two_sampling_sessions_counts_once(server: Backend, run: str) -> None:
    path, held = f"tinker://{run}/sampler_weights/gone", [0]
    with server.service_client() as service:
        for _ in range(2):
            sampler = service.create_sampling_client(model_path=path).result()
            sample(sampler, max_tokens=1, seed=1)
            held.append(data(server, "machine")["memory"]["snapshots"])
    assert held[2] == held[1] > 0


def test_who_waits_for_a_model_is_told(server: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    model = server._service.bases["tiny"]
    monkeypatch.setattr(server.worker, "_paused", {Future(): NotLoaded(model)})
    assert data(server, "machine")["loading"] == ["the base model tiny is read after another one"]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    (
        ("runs/nobody", 404, "there is no training run 'nobody'"),
        ("runs/nobody/samples", 404, "there is no training run"),
        ("runs/nobody/checkpoints", 404, "there is no training run"),
        ("runs/..%2f..%2fetc", 404, ""),
        ("runs/nobody?after=-1", 400, "after must be a whole number, '-1' came"),
        ("runs/nobody?logged=x", 400, "logged must be a whole number, 'x' came"),
        ("runs/nobody?after=", 400, "after must be a whole number"),
        ("runs/nobody?after=1e3", 400, "after must be a whole number"),
        ("runs/nobody?after=" + "9" * 40, 400, "after must be a whole number"),
        ("runs/%00", 404, ""),
        ("runs?after=yesterday", 400, "after must be a whole number"),
        ("nothing", 404, ""),
    ),
)
def test_what_is_not_there_gets_a_sentence(
    server: Backend, path: str, status: int, sentence: str
) -> None:
    reply = httpx.get(f"{server.url}/page/data/{path}")
    assert reply.status_code == status
    assert sentence in reply.json()["detail"] and reply.json()["detail"]


# ---- who may have it ----


def test_the_data_needs_the_key_and_the_files_do_not(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu", threads=1, api_key=KEY
        )
    ) as server:
        for path in ("/", "/page/static/app.js", "/page/static/plotly.min.js"):
            assert httpx.get(server.url + path).status_code == 200
        for path in ("hello", "runs", "runs/x", "models", "machine", "nothing"):
            reply = httpx.get(f"{server.url}/page/data/{path}")
            assert reply.status_code == 401 and "API key" in reply.json()["detail"]
        for path in ("/page/static/../data/runs", "/page/static/..%2fdata%2fruns"):
            assert httpx.get(server.url + path).status_code in (401, 404)
        reply = httpx.get(f"{server.url}/page/data/runs", headers={"X-API-Key": KEY})
        assert reply.status_code == 200 and reply.json()["runs"] == []


def test_a_page_of_another_origin_may_only_lead_here(server: Backend) -> None:
    cross = {"Sec-Fetch-Site": "cross-site"}
    opened = cross | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    framed = opened | {"Sec-Fetch-Dest": "iframe"}
    assert httpx.get(f"{server.url}/", headers=opened).status_code == 200
    for path, headers in (
        ("/", cross),
        ("/", framed),
        ("/page/static/app.js", cross),
        ("/page/data/runs", opened),
        ("/page/data/runs", {"Origin": "http://evil.example"}),
        ("/", {"Origin": "http://evil.example"}),
    ):
        assert httpx.get(server.url + path, headers=headers).status_code == 403, (path, headers)
