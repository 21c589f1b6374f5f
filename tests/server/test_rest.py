"""Checkpoints' whole life over REST, sessions, and polls for all of a client's samples: the SDK's
own calls, and the cookbook's download, against a server."""

import asyncio
import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from conftest import CONTEXT, Wire, logprobs, make_datum
from support.archives import unpack
from tinker_cookbook import weights as cookbook
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import Backend
from tinsmith.server.routes import training as routes
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.promises import Completions

Search = tinker.types.SessionSearchRequest
ADAM = tinker.AdamParams(learning_rate=1e-3)
PROMPT = tinker.ModelInput.from_ints([10, 20, 30])


@pytest.fixture
def rest(server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key="tml-local")


@pytest.fixture
def training(service_client) -> tinker.TrainingClient:
    """A client that was trained for a step."""
    client = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(ADAM).result()
    return client


def data() -> list[tinker.Datum]:
    return [make_datum([11, 12, 13], [12, 13, 14], weights=[1, 1, 1])]


def read(client: tinker.TrainingClient) -> np.ndarray:
    return logprobs(client.forward(data(), "cross_entropy").result())[0]


def told(rest: tinker.RestClient, path: str) -> tinker.Checkpoint:
    run = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    items = rest.list_checkpoints(run).result().checkpoints
    return next(item for item in items if item.tinker_path == path)


# ---- what is refused ----


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(server):
    """It can't be sent again, so the server answered with 500, which the SDK repeats."""
    wire = Wire(server.url)
    model = wire.create()
    session, half = model.partition(":")[0], "a\ud800"
    bodies = {
        "/create_session": {"user_metadata": {"a": half}, "tags": []},
        "/create_model": {"session_id": session, "model_seq_id": 1, "base_model": half},
        "/get_info": {"model_id": half},
        "/retrieve_future": {"request_id": half},
        "/retrieve_futures": {"target": {"sampling_session_id": half}},
        "/cancel_future": {"request_id": half},
        "/optim_step": {"model_id": model, "seq_id": 1, "adam_params": {half: 1}},
        "/asample": {"sampling_session_id": half, "seq_id": 1},
        "/save_weights": {"model_id": model, "seq_id": 1, "path": half},
        "/weights_info": {"tinker_path": half},
        "/sessions/search": {"display_name": half},
        f"/sessions/{session}/finish": {"detail": half},
    }
    for path, body in bodies.items():
        text = json.dumps(body).encode()
        for sent in (text, text.replace(b"\\ud800", b"\xed\xa0\x80")):
            reply = wire.http.post(path, content=sent)
            assert reply.status_code == 400, path
            assert "no Unicode" in reply.text or "no UTF-8" in reply.text
    assert wire.result(wire.optim_step(model, 1))["metrics"]["grad_norm"] == 0


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    (
        ("/retrieve_futures", {"timeout": 10**400}, "timeout must be a number of 63 bits, 1000"),
        (
            "/retrieve_futures",
            {"prev_cursor": 1 << 63},
            "prev_cursor must be an integer of 63 bits",
        ),
        ("/sessions/search", {"limit": -(1 << 64)}, "limit must be an integer of 63 bits"),
        (
            "/sessions/search",
            {"statuses": [{"type": "active", "reasons": 3}]},
            "reasons must be a l",
        ),
        ("/sessions/{}/finish", {"reason": {"a": 1}}, "the reason has no type"),
        ("/create_model", {"lora_config": {"rank": 10**30}}, "rank must be an integer of 63 bits"),
    ),
)
def test_numbers_and_kinds_that_no_field_has_are_told(server, path, body, sentence):
    wire = Wire(server.url)
    session = wire.create().partition(":")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = wire.post("/create_sampling_session", **asked)["sampling_session_id"]
    more = {
        "/retrieve_futures": {"target": {"sampling_session_id": sampler}},
        "/create_model": {"session_id": session, "model_seq_id": 7, "base_model": "tiny"},
    }
    reply = wire.http.post(path.format(session), json=more.get(path, {}) | body)
    told = reply.text if reply.status_code != 200 else wire.result(reply.json())["error"]
    assert sentence in told and "a bug" not in told


def test_sessions_are_found_by_the_reasons_of_their_ends(server):
    wire = Wire(server.url, key="tml-reasons")
    made = [wire.post("/create_session", tags=[], user_metadata={})["session_id"] for _ in range(3)]
    wire.post(f"/sessions/{made[0]}/finish", reason={"type": "success"})
    wire.post(f"/sessions/{made[1]}/finish", reason={"type": "error"})

    def found(kind: str, *reasons: str) -> list[str]:
        query = {"type": kind, "reasons": list(reasons)}
        reply = wire.post("/sessions/search", statuses=[query])
        return [item["session_id"] for item in reply["sessions"]]

    assert found("client_finished", "error") == [made[1]]
    assert sorted(found("client_finished")) == sorted(made[:2])
    assert found("active") == [made[2]] and found("active", "error") == []


# ---- runs ----


def test_rest_tells_of_runs_checkpoints_and_sessions(server, service_client):
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    capabilities = rest.get_server_capabilities().result().supported_models
    assert [(m.model_name, m.max_context_length) for m in capabilities] == [("tiny", CONTEXT)]
    client = service_client.create_lora_training_client(
        "tiny",
        rank=4,
        train_mlp=False,
        train_unembed=False,
        user_metadata={"renderer_name": "qwen3"},
    ).result()
    path = client.save_state("000001").result().path
    weights = client.save_weights_for_sampler("000001").result().path
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank) == ("tiny", 4)
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert run.last_checkpoint.tinker_path == path
    assert run.last_sampler_checkpoint.tinker_path == weights
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (False, False, True)
    assert info.lora_rank == 4
    runs = rest.list_training_runs(limit=1000).result().training_runs
    assert client.model_id in {item.training_run_id for item in runs}
    listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert {path, weights} <= {item.tinker_path for item in listed}
    session = rest.get_session(client.model_id.partition(":")[0]).result()
    assert session.training_run_ids == [client.model_id]
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [item.tinker_path for item in left] == [weights]
    with pytest.raises(tinker.BadRequestError, match="assigning projects is not built"):
        rest.assign_session_project(client.model_id.partition(":")[0], "p").result()


# ---- ttl, publishing ----


def test_a_ttl_is_set_and_cleared(rest, training, server):
    first = training.save_state("first").result().path
    second = training.save_state("second").result().path
    hour = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    Store(server.checkpoints).update(first, created=hour)  # a ttl counts from now
    rest.set_checkpoint_ttl_from_tinker_path(first, 7200).result()
    left = told(rest, first).expires_at - datetime.now(UTC)
    assert timedelta(seconds=7100) < left <= timedelta(seconds=7200)
    rest.set_checkpoint_ttl_from_tinker_path(first, None).result()
    assert told(rest, first).expires_at is None
    newest = rest.get_training_run(training.model_id).result().last_checkpoint
    assert newest.tinker_path == second  # to change the first did not make it the newest
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds must be from 3600"):
        rest.set_checkpoint_ttl_from_tinker_path(first, 10).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.set_checkpoint_ttl_from_tinker_path(first + "x", 7200).result()


def make_old(folder: Path, *paths: str) -> None:
    """Lets checkpoints have been saved a little more than an hour ago."""
    for path in paths:
        created = (datetime.now(UTC) - timedelta(seconds=3601)).isoformat()
        Store(folder).update(path, created=created)


def test_a_ttl_that_is_over_is_only_a_mark(server, rest, training, service_client):
    """All of it is found, listed, changed and downloaded as before."""
    path = training.save_state("short", ttl_seconds=3600).result().path
    sampler = training.save_weights_for_sampler("short", ttl_seconds=3600).result().path
    external = training.save_weights_external("short", ttl_seconds=3600).result().path
    make_old(server.checkpoints, path, sampler, external)
    now = datetime.now(UTC)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [item.tinker_path for item in listed] == [path, sampler, external]
    assert all(item.expires_at < now for item in listed)
    newest = rest.get_training_run(training.model_id).result().last_checkpoint
    assert newest.tinker_path == path
    search = Wire(server.url).post("/checkpoints/search", limit=200)["checkpoints"]
    assert {path, sampler, external} <= {item["tinker_path"] for item in search}
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert sampler in {item["id"] for item in models}
    page = f"{server.url}/page/data/runs/{training.model_id}/checkpoints"
    assert len(httpx.get(page).json()["checkpoints"]) == 3
    loaded = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(loaded), read(training))
    urls = rest.get_external_weights_urls(external).result()
    assert urls.expires - now > timedelta(hours=23)  # not in the past
    assert httpx.get(urls.urls[checkpoint.CONFIG_FILE]).status_code == 200
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert told(rest, path).expires_at is None


def test_an_expired_checkpoint_is_gone_where_that_was_asked_for(tiny_model_dir, tmp_path):
    """Also before the server next looks for such, and those that ended while it was down."""

    def start() -> Backend:
        return Backend(
            ServerConfig(
                {"tiny": tiny_model_dir}, checkpoints=tmp_path, expire=True, device="cpu", threads=1
            )
        )

    store = Store(tmp_path)
    with start() as backend, backend.service_client() as service:
        rest = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        client = service.create_lora_training_client("tiny", rank=2).result()
        path = client.save_state("short", ttl_seconds=3600).result().path
        kept = client.save_state("kept", ttl_seconds=7200).result().path
        sampler = client.save_weights_for_sampler("short", ttl_seconds=3600).result().path
        external = client.save_weights_external("short", ttl_seconds=3600).result().path
        urls = rest.get_external_weights_urls(external).result()
        assert urls.expires == told(rest, external).expires_at
        page = f"{backend.url}/page/data/runs/{client.model_id}/checkpoints"
        assert all(row["expires"] for row in httpx.get(page).json()["checkpoints"])
        make_old(tmp_path, path, kept, sampler, external)
        with pytest.raises(tinker.RequestFailedError, match="any more: its ttl is over"):
            service.create_training_client_from_state(path).result()
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        assert [item.tinker_path for item in listed] == [kept]
        run = rest.get_training_run(client.model_id).result()
        assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint) == (kept, None)
        search = Wire(backend.url).post("/checkpoints/search")["checkpoints"]
        assert [item["tinker_path"] for item in search] == [kept]
        assert sampler not in httpx.get(f"{backend.url}/v1/models").text
        assert len(httpx.get(page).json()["checkpoints"]) == 1
        assert store.folder(path).is_dir()
    with start():
        pass
    assert store.checkpoints(client.model_id) == [kept] and not store.folder(path).exists()


def test_a_server_that_lets_nothing_expire_deletes_nothing(tiny_model_dir, tmp_path):
    models = {"tiny": tiny_model_dir}
    options = {"checkpoints": tmp_path, "device": "cpu", "threads": 1}
    with Backend(ServerConfig(models, **options)) as backend, backend.service_client() as service:
        client = service.create_lora_training_client("tiny", rank=2).result()
        path = client.save_state("a", ttl_seconds=3600).result().path
    make_old(tmp_path, path)
    with Backend(ServerConfig(models, **options)):
        pass
    assert Store(tmp_path).checkpoints(client.model_id) == [path]


def test_a_checkpoint_is_marked_as_public_and_not(rest, training):
    path = training.save_weights_for_sampler("p").result().path
    assert not told(rest, path).public
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert told(rest, path).public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not told(rest, path).public


# ---- copies and downloads ----


def test_a_copy_outlives_its_source(rest, training, service_client, server, monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "any")  # the SDK wants one; there is none here
    source = training.save_state("s", ttl_seconds=7200).result().path
    rest.publish_checkpoint_from_tinker_path(source).result()
    for copy in (
        service_client.copy_weights(source).result(),
        rest.copy_weights(source, "any").result(),
    ):
        assert copy.endswith("/weights/s") and copy != source
        assert told(rest, copy).expires_at is None and not told(rest, copy).public
    late = service_client.copy_weights(source, ttl_seconds=3600).result()
    assert told(rest, late).expires_at is not None
    session = training.model_id.partition(":")[0]
    body = {"source_path": source, "session_id": session, "model_seq_id": 90}
    http, headers = Wire(server.url).http, {"X-Idempotency-Key": "once"}
    replies = [http.post("/copy_weights", json=body, headers=headers) for _ in range(2)]
    wanted = {"tinker_path": f"tinker://{session}:train:90/weights/s"}
    assert [reply.json() for reply in replies] == [wanted, wanted]
    assert http.post("/copy_weights", json=body).status_code == 400
    rest.delete_checkpoint_from_tinker_path(source).result()
    loaded = service_client.create_training_client_from_state_with_optimizer(copy).result()
    np.testing.assert_array_equal(read(loaded), read(training))
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        service_client.copy_weights(source).result()


def test_external_weights_are_downloaded_as_the_cookbook_does(
    rest, server, training, tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    path = training.save_weights_external("final", ttl_seconds=7200).result().path
    assert path == f"tinker://{training.model_id}/external_weights/final"
    assert told(rest, path).checkpoint_type == "external"
    cookbook.download(tinker_path=path, output_dir=str(tmp_path / "a"), base_url=server.url)
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names == {checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE}
    stored = Store(server.checkpoints).folder(path)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (stored / name).read_bytes()
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name for"):
        training.save_weights_external("final").result()
    urls = rest.get_external_weights_urls(path).result()
    assert urls.expires > told(rest, path).expires_at  # which is only a mark
    bad = httpx.get(urls.urls[checkpoint.CONFIG_FILE] + "x")
    assert bad.status_code == 404 and "it has" in bad.json()["detail"]


def test_an_archive_is_a_tar_behind_a_redirection(server, training, tmp_path):
    path = training.save_weights_for_sampler("t").result().path
    run, kind, name = path.removeprefix("tinker://").split("/")
    url = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    reply = httpx.get(url)
    assert reply.status_code == 302 and reply.headers["location"] == reply.json()["url"]
    assert datetime.strptime(reply.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT")
    packed = httpx.get(reply.headers["location"]).content
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        unpack(tar, tmp_path)
    stored = Store(server.checkpoints).folder(path)
    for file in sorted(tmp_path.iterdir()):
        assert file.read_bytes() == (stored / file.name).read_bytes()
    assert not (stored / checkpoint.OPTIMIZER_FILE).exists()
    assert (tmp_path / checkpoint.ADAPTER_FILE).stat().st_size > 0


# ---- sessions ----


def test_sessions_are_searched(server):
    rest = tinker.RestClient(base_url=server.url, api_key="tml-searcher")
    made = []
    for name in ("Blue whale", "blue bird", "red bird"):
        arguments = {"api_key": "tml-searcher", "display_name": name}
        with server.service_client(user_metadata={"n": name}, **arguments) as client:
            made.append(client.holder.get_session_id())
    live = server.service_client(api_key="tml-searcher")
    made.append(live.holder.get_session_id())

    def search(**query) -> list[int]:
        found = rest.search_sessions(Search(**query)).result().sessions
        return [made.index(item.session_id) for item in found]

    assert search() == [3, 2, 1, 0]
    assert search(display_name="BLUE") == [1, 0] and search(display_name="bird blue") == [1]
    assert search(session_id=made[2]) == [2]
    assert search(user_metadata={"n": "red bird"}) == [2]
    assert search(statuses=[{"type": "active"}]) == [3]
    assert search(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == [2, 1, 0]
    assert search(statuses=[{"type": "failed"}]) == []
    first = rest.search_sessions(Search(limit=3)).result()
    rest_of = rest.search_sessions(Search(limit=3, cursor=first.next_cursor)).result()
    assert [made.index(item.session_id) for item in rest_of.sessions] == [0]
    assert rest_of.next_cursor is None
    assert rest.get_session(made[0]).result().display_name == "Blue whale"
    assert rest.list_sessions().result().sessions == made[::-1]
    live.close("success").result()


# ---- many samples at once ----


def test_one_poll_for_all_samples_of_a_client(server, monkeypatch):
    """The SDK asks retrieve_futures what is done, and retrieve_future only for what is."""
    monkeypatch.setitem(routes.CLIENT_CONFIG, "sample_use_retrieve_futures", True)
    with server.service_client() as service:
        client = service.create_sampling_client(base_model="tiny").result()
        params = [tinker.SamplingParams(max_tokens=n % 7 + 1, seed=n, stop=[]) for n in range(40)]
        futures = [client.sample(PROMPT, 1, one) for one in params]
        found = [list(future.result(timeout=60).sequences[0].tokens) for future in futures]
        with pytest.raises(tinker.RequestFailedError, match="top_k must be"):
            client.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1, top_k=0)).result(60)
        again = list(client.sample(PROMPT, 1, params[5]).result(timeout=60).sequences[0].tokens)
        assert again == found[5]
    monkeypatch.setitem(routes.CLIENT_CONFIG, "sample_use_retrieve_futures", False)
    with server.service_client() as service:
        client = service.create_sampling_client(base_model="tiny").result()
        for one, tokens in zip(params, found, strict=True):
            assert list(client.sample(PROMPT, 1, one).result().sequences[0].tokens) == tokens


def test_a_poll_for_all_waits_and_forgets_what_was_seen(server):
    http = Wire(server.url)
    session = http.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    sampler = http.post(
        "/create_sampling_session",
        session_id=session["session_id"],
        sampling_session_seq_id=0,
        base_model="tiny",
    )["sampling_session_id"]

    def ask(seq: int) -> str:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        return http.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq,
            prompt=prompt,
            sampling_params={"max_tokens": 4},
        )["request_id"]

    def poll(cursor: int, clone: int = 0, **more) -> dict:
        target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
        return http.post("/retrieve_futures", target=target, prev_cursor=cursor, **more)

    assert poll(0, timeout=0) == {"completions": [], "cursor": 0}
    first = ask(0)
    assert poll(0)["completions"] == [{"state": "finished", "request_id": first}]
    second, clones = ask(1), ask(2_000_000_007)
    seen = poll(1)
    assert [item["request_id"] for item in seen["completions"]] == [second]
    assert poll(seen["cursor"], timeout=0, retrieved_request_ids=[second])["completions"] == []
    assert [item["request_id"] for item in poll(0, 2)["completions"]] == [clones]


def test_a_poll_for_all_is_told_of_a_result_when_it_is_there():
    async def main() -> None:
        done = Completions()
        polls = [asyncio.create_task(done.after(0, 600)) for _ in range(2)]
        await asyncio.sleep(0)  # they wait
        done.add("one")
        assert await asyncio.wait_for(asyncio.gather(*polls), 60) == [["one"], ["one"]]

    asyncio.run(main())


def test_a_cancelled_sample_stops(service_client, server):
    client = service_client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=120, stop=[])
    http = Wire(server.url)
    sampler = client._sampling_session_id
    long = http.post(
        "/asample",
        sampling_session_id=sampler,
        seq_id=77,
        num_samples=200,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        sampling_params={"max_tokens": 120, "stop": []},
    )
    http.http.post("/cancel_future", json={"request_id": long["request_id"]}).raise_for_status()
    assert "cancelled" in http.result(long)["error"]
    assert len(client.sample(PROMPT, 1, params).result().sequences[0].tokens) == 120


def test_paths_that_leave_the_store_are_refused(server, training, tmp_path: Path):
    base = f"/api/v1/training_runs/{training.model_id}/checkpoints"
    http = httpx.Client(base_url=server.url)
    path = training.save_weights_for_sampler("safe").result().path
    name = path.rpartition("/")[2]
    for part in (
        f"sampler_weights/{name}/files/..%2Fmeta.json",
        f"sampler_weights/{name}/files/meta.json",
        "sampler_weights/..%2F..%2Frun.json/files/run.json",
        "weights/..%2F../archive.tar",
    ):
        reply = http.get(f"{base}/{part}")
        assert 400 <= reply.status_code < 500 and reply.status_code != 409, part
        assert len(reply.json()["detail"]) > 20
