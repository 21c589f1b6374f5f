"""What holds for every request: order, retries, polls, and who may see what.

What the SDK would not do by itself (requests out of order, compressed bodies) is posted by hand.
"""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from conftest import Wire, logprobs, make_datum
from support.small_run import ADAM, make_client, make_data, read, train
from tinsmith.engine import runs
from tinsmith.engine.engine import GAP_SECONDS
from tinsmith.server.backend import Backend
from tinsmith.server.routes import results
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.service import Service


def test_replies_are_not_held_back_by_nagles_algorithm(server):
    """It held every reply of header and body back for 40 ms."""
    wire = Wire(server.url)
    assert wire.http.get("/healthz").status_code == 200  # and the connection is kept
    transports = [one.transport for one in list(server._server.server_state.connections)]
    sockets = [one.get_extra_info("socket") for one in transports if not one.is_closing()]
    delays = [not one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets]
    assert delays and not any(delays)


def test_requests_that_arrive_out_of_order_are_executed_in_order(server):
    wire = Wire(server.url)
    straight, turned = wire.create(), wire.create()
    wire.forward_backward(straight, 1, make_data())
    wire.forward_backward(straight, 2, make_data())
    expected = wire.result(wire.optim_step(straight, 3))
    last = wire.optim_step(turned, 3)
    wire.forward_backward(turned, 2, make_data())
    wire.forward_backward(turned, 1, make_data())
    assert wire.result(last) == expected
    assert expected["metrics"]["grad_norm"] > 0


def test_a_retry_is_answered_with_the_first_promise_and_executed_once(server):
    wire = Wire(server.url)
    once, retried = wire.create(), wire.create()
    wire.forward_backward(once, 1, make_data())
    expected = wire.result(wire.optim_step(once, 2))
    first, second = (
        wire.forward_backward(retried, 1, make_data()),
        wire.forward_backward(retried, 1, make_data()),
    )
    assert first == second
    assert wire.result(second) == {}
    step = wire.optim_step(retried, 2)
    assert wire.result(step) == expected
    assert wire.optim_step(retried, 2) == step
    assert wire.result(wire.optim_step(retried, 3))["metrics"]["grad_norm"] == 0


def test_a_retry_that_comes_while_the_first_is_read_is_not_executed(server, monkeypatch):
    wire = Wire(server.url)
    once, retried = wire.create(), wire.create()
    wire.forward_backward(once, 1, make_data())
    expected = wire.result(wire.optim_step(once, 2))
    beside, reading = server._service.beside, []

    async def together(size: int, function: Callable[..., Any], *given: Any) -> Any:
        if isinstance(function, partial):  # it reads the datums
            reading.append(function)
            while len(reading) < 2:
                await asyncio.sleep(0.01)
        return await beside(size, function, *given)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(server._service, "beside", together)
        first, second = pool.map(
            lambda run: wire.forward_backward(run, 1, make_data()), [retried] * 2
        )
    assert first == second and len(reading) == 2
    assert wire.result(second) == {}
    assert wire.result(wire.optim_step(retried, 2)) == expected


def test_creations_and_samples_are_retried_too(server):
    wire = Wire(server.url)
    model = wire.create()
    session = model.partition(":")[0]
    again = wire.post("/create_model", session_id=session, model_seq_id=0, base_model="tiny")
    assert wire.result(again)["model_id"] == model
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = wire.post("/create_sampling_session", **asked)["sampling_session_id"]
    assert wire.post("/create_sampling_session", **asked)["sampling_session_id"] == sampler
    body = {
        "sampling_session_id": sampler,
        "seq_id": 551568033000000000,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 8, "stop": []},
    }
    first, second = wire.post("/asample", **body), wire.post("/asample", **body)
    assert first == second and len(first["sample_sequence_ids"]) == 1
    # Without a seed a second execution would draw other tokens.
    assert wire.poll(first).content == wire.poll(second).content
    assert wire.result(wire.optim_step(model, 1))["metrics"]["grad_norm"] == 0


def test_a_compressed_body_is_read(server):
    wire = Wire(server.url)
    one, two = wire.create(), wire.create()
    wire.forward_backward(one, 1, make_data())
    wire.forward_backward(two, 1, make_data(), compress=True)
    norms = [wire.result(wire.optim_step(model, 2)) for model in (one, two)]
    assert norms[0] == norms[1]


@pytest.fixture(scope="module")
def hasty_server(tiny_model_dir, tmp_path_factory):
    """A server that answers a poll after 0.2 s."""
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir},
            checkpoints=tmp_path_factory.mktemp("hasty"),
            device="cpu",
            threads=1,
            poll_seconds=0.2,
        )
    ) as backend:
        yield backend


@pytest.fixture
def hours_pass(hasty_server, monkeypatch) -> Callable[[], None]:
    """For the worker, whenever this is called."""
    hours = itertools.count(1)

    def later() -> None:
        hasty_server.worker.memory().result(60)  # all that came so far has its place
        now = time.monotonic() + 3600 * next(hours)
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now))

    return later


def answer(wire: Wire, promise: dict, between: Callable[[], None] = lambda: None) -> dict:
    """A result, however many polls it takes; a minute's are too many."""
    for _ in range(300):
        if (reply := wire.poll(promise)).status_code != 408:
            return reply.json()
        between()
    pytest.fail("it was never answered")


def test_a_poll_ends_in_time_with_try_again(hasty_server):
    wire = Wire(hasty_server.url)
    model = wire.create()
    waiting = wire.optim_step(model, 2)
    reply = wire.poll(waiting)
    assert (reply.status_code, reply.json()["type"]) == (408, "try_again")
    wire.forward_backward(model, 1, make_data())
    assert answer(wire, waiting)["metrics"]["grad_norm"] > 0


def test_a_gap_that_never_fills_fails_with_a_sentence(hasty_server, hours_pass):
    wire = Wire(hasty_server.url)
    model = wire.create()
    told = answer(wire, wire.optim_step(model, 3), hours_pass)
    assert f"waited {GAP_SECONDS:g} s for request 1, which never came" in told["error"]
    late = answer(wire, wire.forward_backward(model, 1, make_data()))
    assert "comes after its turn" in late["error"]
    wire.forward_backward(model, 4, make_data())
    assert answer(wire, wire.optim_step(model, 5))["metrics"]["grad_norm"] > 0


def test_all_that_waited_behind_a_gap_are_given_up_and_what_follows_goes_on(
    hasty_server, hours_pass
):
    wire = Wire(hasty_server.url)
    model = wire.create()
    for waiting in [wire.optim_step(model, seq) for seq in (5, 3)]:  # 1, 2 and 4 never come
        assert "requests [3, 5] were not executed" in answer(wire, waiting, hours_pass)["error"]
    assert "metrics" in answer(wire, wire.optim_step(model, 6))


def test_the_sdk_waits_through_several_polls(hasty_server, monkeypatch):
    """The engine begins when three of them were answered with "try again"."""
    finished, again, go = results._finished, [], threading.Event()

    async def counted(request, pending, seconds):
        done = await finished(request, pending, seconds)
        again.extend([] if done else [pending])
        if len(again) >= 3:
            go.set()
        return done

    data = [make_datum([7 + i] * 20, [8 + i] * 20) for i in range(40)]
    with hasty_server.service_client() as service:
        client = make_client(service)
        expected = client.forward_backward(data, "cross_entropy").result()
        monkeypatch.setattr(results, "_finished", counted)
        hasty_server.worker._put(lambda: go.wait(60))
        found = client.forward_backward(data, "cross_entropy").result()
    assert len(again) >= 3 and found.metrics == expected.metrics
    assert len(set(map(bytes, logprobs(expected)))) == 40
    np.testing.assert_array_equal(logprobs(found), logprobs(expected))


def test_a_refused_request_uses_up_its_turn(service_client):
    client = make_client(service_client)
    bad = client.forward_backward([make_datum([1, 2], [1])], "cross_entropy")
    good = client.forward_backward(make_data(), "cross_entropy")
    step = client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match="they must agree"):
        bad.result(timeout=60)
    assert good.result(timeout=60).metrics["loss:sum"] > 0
    assert step.result(timeout=60).metrics["grad_norm"] > 0


def test_an_unknown_route_or_body_is_a_4xx_with_a_sentence(server):
    http = httpx.Client(base_url=server.url)
    reply = http.get("/api/v1/nothing")
    assert (reply.status_code, reply.json()["detail"]) == (
        404,
        "tinsmith has no GET /api/v1/nothing",
    )
    assert http.get("/api/v1/healthz").json() == {"status": "ok"}
    for path, body in (
        ("/optim_step", b"{"),
        ("/optim_step", b"[]"),
        ("/optim_step", b'{"model_id": 3}'),
        ("/forward_backward", b"\xff\xff\xff"),
        ("/retrieve_future", b'{"request_id": "none"}'),
    ):
        reply = http.post(f"/api/v1{path}", content=body)
        assert 400 <= reply.status_code < 500 and reply.status_code != 409
        assert len(reply.json()["detail"]) > 20


# ---- who sees what ----


def test_two_clients_train_apart(server):
    with server.service_client() as one, server.service_client() as two:
        first, second = make_client(one), make_client(two)
        np.testing.assert_array_equal(read(first), read(second))
        before = read(second)
        train(first, 2)
        np.testing.assert_array_equal(read(second), before)
        assert np.abs(read(first) - before).max() > 0


def test_another_key_can_not_use_a_model_or_sampler(server):
    with server.service_client() as service:
        client = make_client(service)
        sampler = client.save_weights_and_get_sampling_client().result()
        name = sampler._sampling_session_id
        stranger = Wire(server.url, key="tml-other")
        refused = stranger.result(stranger.optim_step(client.model_id, 1))
        assert "there is no model" in refused["error"]
        assert stranger.http.get(f"/samplers/{name}").status_code == 404
        reply = stranger.http.post("/get_info", json={"model_id": client.model_id})
        assert reply.status_code == 404
        assert stranger.http.get("/sessions").json() == {"sessions": []}
        assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0


def test_another_key_can_not_use_a_session(server):
    owner, stranger = Wire(server.url), Wire(server.url, key="tml-other")
    model = owner.create()
    session = model.partition(":")[0]
    saved = owner.post("/save_weights", model_id=model, seq_id=1, path="state")
    state = owner.result(saved)["path"]
    named = {"session_id": session}
    asked = {
        "/session_heartbeat": named,
        "/create_model": {**named, "model_seq_id": 1, "base_model": "tiny"},
        "/load_weights": {**named, "model_seq_id": 2, "path": state},
        "/create_sampling_session": {**named, "sampling_session_seq_id": 0, "base_model": "tiny"},
        "/create_custom_loss": {**named, "custom_loss_seq_id": 0},
        f"/sessions/{session}/finish": {},
    }
    for path, body in asked.items():
        reply = stranger.http.post(path, json=body)
        assert reply.status_code == 404, path
        assert f"there is no session {session}" in reply.json()["detail"], path
    for path, body in asked.items():  # its owner can still do all of it; the last one ends it
        assert owner.http.post(path, json=body).status_code == 200, path
    assert owner.http.post("/session_heartbeat", json=named).status_code == 410


def test_another_key_can_neither_read_nor_cancel_a_sample(server):
    owner, stranger = Wire(server.url), Wire(server.url, key="tml-other")
    sampler, go = make_sampler(owner), threading.Event()
    server.worker._put(go.wait)  # the sample has not begun when it is to be cancelled
    try:
        asked = ask(owner, sampler)
        stranger.post("/cancel_future", request_id=asked["request_id"])
        assert stranger.poll(asked).status_code == 404
    finally:
        go.set()
    assert owner.result(asked) == {}  # protobuf, a sample: a failure is JSON


def test_a_finished_session_is_over_and_others_are_not(server):
    other = server.service_client()
    kept = make_client(other)
    with server.service_client() as service:
        client = make_client(service)
        sampler = client.save_weights_and_get_sampling_client().result()._sampling_session_id
        model = client.model_id
    wire = Wire(server.url)
    assert wire.http.get(f"/samplers/{sampler}").status_code == 404
    assert "there is no sampling session" in wire.result(ask(wire, sampler))["error"]
    assert "there is no model" in wire.result(wire.optim_step(model, 2))["error"]
    session = model.partition(":")[0]
    assert wire.http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
    assert wire.http.post(f"/sessions/{session}/finish", json={}).status_code == 200
    assert train(kept, 1)[0] > 0
    assert model not in server.worker._engine.runs  # its adapter is freed
    assert sampler not in server.worker._engine.snapshots._items
    other.close("success").result()


# ---- what is forgotten, and when ----


def make_sampler(wire: Wire) -> str:
    """A sampling session of the base model, in a session of its own."""
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    asked = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    return wire.post("/create_sampling_session", **asked, base_model="tiny")["sampling_session_id"]


def ask(wire: Wire, sampler: str, seq: int = 0, count: int = 1, tokens: int = 4) -> dict:
    """The promise of a sample, by default a small one."""
    return wire.post(
        "/asample",
        sampling_session_id=sampler,
        seq_id=seq,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        num_samples=count,
        sampling_params={"max_tokens": tokens, "stop": []},
    )


Later = Callable[[float], None]


@pytest.fixture
def ageing(tiny_model_dir, tmp_path, monkeypatch) -> Iterator[tuple[Wire, Later]]:
    """A server of its own, and what makes all that it knows so many seconds older, at once before
    it looks for what is to be forgotten."""
    passed, sweep = 0.0, Service.sweep

    def later(seconds: float) -> None:
        nonlocal passed
        passed = seconds
        wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")

    def aged(service: Service) -> None:
        nonlocal passed
        for item in service.promises.pending.values():
            item.created -= passed
            item.read = None if item.read is None else item.read - passed
        for session in service.sessions.values():
            session.seen -= passed
        service._swept -= passed
        passed = 0.0
        sweep(service)

    monkeypatch.setattr(Service, "sweep", aged)
    models = {"tiny": tiny_model_dir}
    with Backend(ServerConfig(models, checkpoints=tmp_path, device="cpu", threads=1)) as backend:
        wire = Wire(backend.url)
        yield wire, later


def test_results_stay_a_minute_after_they_were_read_and_else_an_hour(ageing):
    wire, later = ageing
    sampler = make_sampler(wire)
    late, never, read = (ask(wire, sampler, seq) for seq in range(3))
    content = wire.poll(read).content  # it came last: all three are done
    later(50)
    assert wire.poll(read).content == content
    later(50)
    assert wire.poll(read).content == content  # the time counts from when it was read last
    later(70)
    forgotten = wire.poll(read)
    assert forgotten.status_code == 404
    assert "its result was read before and is not kept any longer" in forgotten.json()["detail"]
    later(3300)
    assert wire.poll(late).status_code == 200
    later(200)
    assert wire.poll(late).status_code == 404
    assert wire.poll(never).status_code == 404


def test_a_result_that_is_not_there_yet_is_not_forgotten(ageing):
    wire, later = ageing
    model = wire.create()
    waiting = wire.optim_step(model, 2)
    for _ in range(2):
        later(2000)
        wire.post("/session_heartbeat", session_id=model.partition(":")[0])
    wire.forward_backward(model, 1, make_data())
    assert wire.result(waiting)["metrics"]["grad_norm"] > 0


def test_a_session_ends_after_an_hour_without_a_sign_of_life(ageing):
    wire, later = ageing
    silent, beating, sampling = (make_sampler(wire) for _ in range(3))
    training = wire.create()
    later(2000)
    wire.post("/session_heartbeat", session_id=beating.partition(":")[0])
    wire.http.get(f"/samplers/{sampling}").raise_for_status()
    wire.post("/get_info", model_id=training)
    later(2000)
    for name in (beating, sampling, training):
        wire.post("/session_heartbeat", session_id=name.partition(":")[0])
    assert wire.http.get(f"/samplers/{silent}").status_code == 404
    body = {"session_id": silent.partition(":")[0]}
    assert wire.http.post("/session_heartbeat", json=body).status_code == 410
    wire.post("/get_info", model_id=training)
    later(4000)
    assert wire.http.post("/get_info", json={"model_id": training}).status_code == 404


def test_samples_of_a_finished_session_do_not_go_on(server):
    """Of many minutes' work nothing is left to do, and another session's goes on."""
    wire = Wire(server.url)
    ended, other = make_sampler(wire), make_sampler(wire)
    many = [ask(wire, ended, seq, count=4096, tokens=120) for seq in range(20)]
    few = ask(wire, other)
    wire.post(f"/sessions/{ended.partition(':')[0]}/finish")
    for promise in many:
        assert wire.result(promise)["error"] == "the request was cancelled"
    assert wire.result(few) == {}  # protobuf, a sample
