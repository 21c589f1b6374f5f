"""What SDK 0.39 asks of checkpoints, as its documentation shows it: search and uploads; and models
named with a context."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import tinker
from conftest import CONTEXT, Wire, logprobs, make_datum
from safetensors.numpy import load_file, save_file
from tinsmith.checkpoints import checkpoint
from tinsmith.server.backend import Backend
from tinsmith.server.routes import uploads
from tinsmith.server.service.config import ServerConfig

NAMES = itertools.count()
FILES = (checkpoint.CONFIG_FILE, checkpoint.ADAPTER_FILE)


@pytest.fixture
def wire(server) -> Wire:
    return Wire(server.url)


def train(client: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    """A run that was trained for a step."""
    run = client.create_lora_training_client("tiny", rank=4, seed=next(NAMES), **options).result()
    run.forward_backward(data(), "cross_entropy")
    run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return run


def data() -> list[tinker.Datum]:
    return [make_datum([11, 12, 13], [12, 13, 14], weights=[1, 1, 1])]


def read(client: tinker.TrainingClient) -> np.ndarray:
    return logprobs(client.forward(data(), "cross_entropy").result())[0]


# ---- search ----


def search(wire: Wire, **asked: Any) -> list[str]:
    """The paths that a search finds, over all its pages."""
    paths: list[str] = []
    cursor = None
    while True:
        reply = wire.post("/checkpoints/search", **asked, **({"cursor": cursor} if cursor else {}))
        assert len(reply["checkpoints"]) <= asked.get("limit", 50)
        paths += [item["tinker_path"] for item in reply["checkpoints"]]
        assert len(set(paths)) == len(paths)
        cursor = reply.get("next_cursor")
        if cursor is None:
            return paths


def test_checkpoints_are_found_by_all_that_is_asked_for(service_client, wire: Wire) -> None:
    run = train(service_client)
    mark = {"search": run.model_id}
    saved = [
        run.save_state("one", user_metadata=mark | {"n": "1"}).result().path,
        run.save_weights_for_sampler("two", user_metadata=mark).result().path,
        run.save_state("three", user_metadata=mark | {"n": "3"}).result().path,
    ]
    newest = saved[::-1]
    assert search(wire, user_metadata=mark) == newest
    assert search(wire, user_metadata=mark, limit=1) == newest
    assert search(wire, user_metadata=mark | {"n": "3"}) == [saved[2]]
    assert search(wire, user_metadata=mark, checkpoint_type="sampler") == [saved[1]]
    assert search(wire, user_metadata=mark, base_models=["other", "tiny"]) == newest
    assert search(wire, user_metadata=mark, base_models=["tiny:peft:64"]) == newest
    assert search(wire, user_metadata=mark, base_models=["other"]) == []
    assert search(wire, user_metadata=mark, base_models=[]) == []
    assert search(wire, user_metadata=mark, owner={"type": "accessible"}) == newest
    assert search(wire, user_metadata=mark, owner={"type": "user", "owner_urns": ["me"]}) == []
    assert search(wire, user_metadata=mark, project_ids=["local"]) == newest
    found = wire.post("/checkpoints/search", user_metadata=mark | {"n": "1"})["checkpoints"]
    assert found[0]["base_model"] == "tiny"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    (
        ({"limit": 0}, "limit must be from 1 to 200"),
        ({"checkpoint_type": "weights"}, "checkpoint_type must be training or sampler"),
        ({"project_ids": ["other"]}, "there is no project 'other'"),
        ({"owner": {"type": "all"}}, "the owner's type must be own, accessible or user"),
        ({"name": "x"}, "unknown field 'name' in search_checkpoints"),
        ({"base_models": ["tiny", 5]}, "base_models must be strings, 5 came"),
        ({"cursor": {"last_created_at": "today", "last_checkpoint_uuid": "x"}}, "last_created_at"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z"}}, "last_checkpoint_uuid"),
    ),
)
def test_a_search_for_what_is_not_here_is_told(asked, sentence, wire: Wire) -> None:
    reply = wire.http.post("/checkpoints/search", json=asked)
    assert reply.status_code == 400 and sentence in reply.json()["detail"]


def test_sessions_of_other_projects_and_owners_are_none_of_this_server(wire: Wire) -> None:
    reply = wire.http.post("/sessions/search", json={"run": "x"})
    assert reply.status_code == 400 and "unknown field 'run' in search_sessions" in reply.text
    reply = wire.http.post("/sessions/search", json={"project_ids": ["other"]})
    assert reply.status_code == 400 and "there is no project 'other'" in reply.text
    asked = {"owner": {"type": "user", "owner_urns": ["someone"]}}
    assert wire.post("/sessions/search", **asked)["sessions"] == []


# ---- uploads ----

LORA = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": True}


def begin(wire: Wire, **lora: Any) -> dict[str, Any]:
    return wire.post("/external_weights_upload_start", base_model="tiny", lora_config=LORA | lora)


def put(begun: dict[str, Any], folder: Path) -> None:
    for name in FILES:
        reply = httpx.put(begun["urls"][name], content=(folder / name).read_bytes())
        assert reply.status_code == 200, reply.text


def finish(wire: Wire, begun: dict[str, Any]) -> httpx.Response:
    upload = {"upload_id": begun["upload_id"]}
    return wire.http.post("/external_weights_upload_finish", json=upload, timeout=60)


@pytest.fixture
def exported(service_client, server, tmp_path: Path) -> tuple[np.ndarray, Path]:
    """What a run computes, and its files as the SDK downloads them."""
    run, rest = train(service_client), tinker.RestClient(base_url=server.url, api_key="tml-local")
    path = run.save_weights_external("out").result().path
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).content)
    return read(run), tmp_path


def test_an_adapter_that_is_uploaded_computes_what_it_did(
    service_client, server, wire: Wire, exported: tuple[np.ndarray, Path]
) -> None:
    expected, folder = exported
    begun = begin(wire)
    assert sorted(begun["urls"]) == sorted(FILES)
    put(begun, folder)
    reply = finish(wire, begun)
    path = reply.json()["tinker_path"]
    run, kind, _ = path.removeprefix("tinker://").split("/")
    assert kind == "external_weights"
    again = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(again), expected)
    listed = wire.http.get(f"/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert [(item["tinker_path"], item["base_model"]) for item in listed] == [(path, "tiny")]
    assert finish(wire, begun).json() == {"tinker_path": path}  # a client that lost the reply
    late = httpx.put(begun["urls"][FILES[0]], content=b"{}")
    assert late.status_code == 404 and "there is no upload" in late.text
    assert not list(Path(server.checkpoints).glob(f"{run}/*/*~*"))


def test_an_upload_that_failed_once_it_was_saved_is_finished_again(
    server, wire: Wire, exported: tuple[np.ndarray, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(wire)
    put(begun, exported[1])
    state = server._service.state
    with monkeypatch.context() as broken:
        broken.setattr(state, "add_run", Mock(side_effect=OSError("the database is away")))
        assert finish(wire, begun).status_code == 400
    reply = finish(wire, begun)
    assert reply.status_code == 200, reply.text
    run = begun["upload_id"]
    listed = wire.http.get(f"/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert [item["tinker_path"] for item in listed] == [reply.json()["tinker_path"]]
    assert not list(Path(server.checkpoints).glob(f"{run}/*/*~*"))


def test_an_adapter_of_the_hosted_service_has_another_name_for_the_head(
    service_client, wire: Wire, exported: tuple[np.ndarray, Path]
) -> None:
    expected, folder = exported
    file = folder / checkpoint.ADAPTER_FILE
    renamed = {
        name.replace("base_model.model.lm_head.", "base_model.model.model.unembed_tokens."): array
        for name, array in load_file(file).items()
    }
    assert sum("unembed_tokens" in name for name in renamed) == 2
    save_file(renamed, file)
    begun = begin(wire)
    put(begun, folder)
    path = finish(wire, begun).json()["tinker_path"]
    again = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(again), expected)


def changed(folder: Path, **said: Any) -> None:
    file = folder / checkpoint.CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | said))


def test_an_upload_is_checked_before_it_is_a_checkpoint(
    wire: Wire, exported: tuple[np.ndarray, Path]
) -> None:
    _, folder = exported
    missing = begin(wire)
    assert "the upload lacks adapter_config.json" in finish(wire, missing).text
    for lora, sentence in (
        ({"rank": 8}, "has rank 8, its files have 4"),
        ({"train_mlp": False}, "has train_mlp False, its files have True"),
    ):
        begun = begin(wire, **lora)
        put(begun, folder)
        assert sentence in finish(wire, begun).text
    begun = begin(wire)
    changed(folder, use_dora=True)
    put(begun, folder)
    assert "use_dora is True, which is not supported" in finish(wire, begun).text
    changed(folder, use_dora=False)
    put(begun, folder)  # what was wrong is put again
    tensors = folder / checkpoint.ADAPTER_FILE
    content = bytearray(tensors.read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    httpx.put(begun["urls"][checkpoint.ADAPTER_FILE], content=bytes(content))
    told = finish(wire, begun)
    assert told.status_code == 400 and "the upload: base_model.model.lm_head" in told.text
    assert "all of its numbers must be finite" in told.text
    assert wire.http.get(f"/training_runs/{begun['upload_id']}").status_code == 404
    put(begun, folder)
    assert finish(wire, begun).status_code == 200


def test_an_upload_has_no_more_bytes_than_its_adapter(wire: Wire) -> None:
    begun = begin(wire, rank=1)
    large = httpx.put(
        begun["urls"][checkpoint.ADAPTER_FILE], content=bytes(uploads.EXTRA_BYTES * 2)
    )
    assert large.status_code == 413
    other = begun["urls"][checkpoint.CONFIG_FILE].replace(checkpoint.CONFIG_FILE, "../meta.json")
    assert httpx.put(other, content=b"{}").status_code in (404, 405)


def test_what_an_upload_asks_for_is_checked_first(wire: Wire) -> None:
    for asked, sentence in (
        ({"base_model": "absent", "lora_config": LORA}, "unknown base model 'absent'"),
        ({"base_model": "tiny:peft:9999999", "lora_config": LORA}, "a context of 9999999 tokens"),
        ({"base_model": "tiny", "lora_config": LORA, "user_metadata": {"a": "b"}}, "unknown field"),
        ({"base_model": "tiny"}, "lora_config"),
        ({"base_model": "tiny", "lora_config": {"rank": 0}}, "rank must be at least 1"),
    ):
        reply = wire.http.post("/external_weights_upload_start", json=asked)
        assert reply.status_code == 400 and sentence in reply.text
    reply = wire.http.post("/external_weights_upload_finish", json={"upload_id": "../x"})
    assert reply.status_code == 404 and "there is no upload" in reply.text


def test_an_upload_is_its_clients_and_its_urls_need_no_key(
    tiny_model_dir: Path, tmp_path: Path, exported: tuple[np.ndarray, Path]
) -> None:
    """The URL is signed for PUT: one to fetch a file by is another."""
    key = "tml-of-this-server"
    folder = tmp_path / "checkpoints"
    with Backend(
        ServerConfig({"tiny": tiny_model_dir}, checkpoints=folder, threads=1, api_key=key)
    ) as backend:
        wire = Wire(backend.url, key=key)
        begun = begin(wire)
        put(begun, exported[1])
        url = begun["urls"][FILES[0]]
        assert httpx.put(url.partition("?")[0], content=b"{}").status_code == 401
        path = finish(wire, begun).json()["tinker_path"]
        run = path.removeprefix("tinker://").partition("/")[0]
        where = f"/training_runs/{run}/checkpoints/external_weights/uploaded/external_weights_urls"
        fetched = wire.http.get(where).json()["urls"][FILES[0]]
        assert httpx.get(fetched).status_code == 200
        assert httpx.put(fetched, content=b"{}").status_code == 401


# ---- models at a context ----


def test_a_models_name_may_say_its_context(service_client, server) -> None:
    short = CONTEXT // 4
    run = train(service_client)
    base = server.service_client().create_lora_training_client(
        f"tiny:peft:{short}", rank=4, seed=1
    ).result()  # fmt: skip
    assert base.get_info().model_name == "tiny"
    fits = make_datum([11] * short, [12] * short, weights=[1] * short)
    base.forward([fits], "cross_entropy").result()
    longer = make_datum([11] * (short + 1), [12] * (short + 1), weights=[1] * (short + 1))
    with pytest.raises(tinker.RequestFailedError, match=f"the model's context is {short}"):
        base.forward([longer], "cross_entropy").result()
    run.forward([longer], "cross_entropy").result()


@pytest.mark.parametrize("most", [None, 10 * CONTEXT])
def test_a_sample_ends_where_the_names_context_ends(service_client, most: int | None) -> None:
    short = CONTEXT // 4
    params = tinker.SamplingParams(max_tokens=most, stop=[], seed=1)
    prompt = tinker.ModelInput.from_ints([10, 20, 30])
    lengths = []
    for name in ("tiny", f"tiny:peft:{short}"):
        client = service_client.create_sampling_client(base_model=name).result()
        result = client.sample(prompt, 1, params).result()
        lengths.append(len(result.sequences[0].tokens))
    assert lengths == [CONTEXT - 3, short - 3]


@pytest.mark.parametrize("context", [0, CONTEXT + 1, 10**8])
def test_a_context_that_the_model_lacks_is_refused(service_client, context: int) -> None:
    with pytest.raises(Exception, match=f"asks for a context of {context} tokens; the model's"):
        service_client.create_lora_training_client(f"tiny:peft:{context}", rank=4).result()


def test_a_name_that_is_registered_is_that_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Whatever it looks like."""
    models = {"tiny:peft:16": tiny_model_dir}
    with Backend(ServerConfig(models, checkpoints=tmp_path, threads=1)) as backend:
        found = backend._service.bases.model("tiny:peft:16")
        assert found.context == CONTEXT
        assert dataclasses.replace(found, context=16) == backend._service.bases.model(
            f"{tiny_model_dir}:peft:16"
        )
