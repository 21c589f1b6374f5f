"""Requests that are sent again, and others that look like it."""

from typing import Any

import pytest
import tinker
from conftest import Wire
from tinsmith.server.service.retries import KEY


@pytest.fixture
def wire(server) -> Wire:
    return Wire(server.url)


def saved(client: tinker.ServiceClient, *names: str) -> list[str]:
    run = client.create_lora_training_client("tiny", rank=2).result()
    return [run.save_state(name).result().path for name in names]


def copy(wire: Wire, source: str, key: str) -> Any:
    body = {"source_path": source, "destination_project_id": "local"}
    return wire.http.post("/copy_weights", json=body, headers={KEY: key})


def test_a_request_that_is_sent_again_makes_one_thing(service_client, wire: Wire) -> None:
    one, other = saved(service_client, "one", "other")
    first = copy(wire, one, "k").json()["tinker_path"]
    assert copy(wire, one, "k").json()["tinker_path"] == first
    assert copy(wire, one, "l").json()["tinker_path"] != first
    refused = copy(wire, other, "k")
    assert refused.status_code == 400
    assert f"another request came with the {KEY} 'k': each needs one" in refused.text.replace(
        "a key of its own", "one"
    )
    assert copy(wire, other, "m").json()["tinker_path"] != first


def test_a_key_of_one_path_is_none_of_another(service_client, wire: Wire) -> None:
    (path,) = saved(service_client, "one")
    key = {KEY: "of a session"}
    for _ in range(2):
        assert wire.http.post("/create_session", json={}, headers=key).status_code == 200
    refused = copy(wire, path, "of a session")
    assert refused.status_code == 400 and "another request came with the" in refused.text
    session = wire.http.post("/create_session", json={"tags": ["a"]}, headers=key)
    assert session.status_code == 400 and "another request came with the" in session.text


def test_a_failed_request_is_tried_again(wire: Wire, service_client) -> None:
    (path,) = saved(service_client, "one")
    missing = path.replace("/weights/one", "/weights/two")
    assert copy(wire, missing, "f").status_code == 404
    assert copy(wire, path, "f").status_code == 200


def test_a_sampling_session_is_of_one_checkpoint(service_client, wire: Wire) -> None:
    one, other = saved(service_client, "one", "other")
    session = wire.post("/create_session")["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 3}
    first = wire.post("/create_sampling_session", **asked, model_path=one)
    assert wire.post("/create_sampling_session", **asked, model_path=one) == first
    for body in ({"model_path": other}, {"base_model": "tiny"}):
        refused = wire.http.post("/create_sampling_session", json=asked | body)
        assert refused.status_code == 400
        assert f"sampling_session_seq_id 3 already, of {one}" in refused.text
