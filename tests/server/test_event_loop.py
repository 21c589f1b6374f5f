"""The server's event loop answers others while one request is large; and what is large goes through
the same order, retries and refusals as what is small."""

import gc
import io
import json
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import CONTEXT, VOCAB, Wire, make_datum
from support.small_run import ADAM, make_client
from support.waiting import until
from tinsmith.server.http.thread_pool import SMALL
from tinsmith.server.routes import training
from tinsmith.server.service import bodies
from tinsmith.server.wire import sampling_calls, training_calls
from tinsmith.server.wire.chunking import PIECE
from tinsmith.server.wire.messages import pb


def body_of(model: str, seq: int, count: int, last: int = 1) -> bytes:
    """A request of so many datums, the last of which has some id."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for number in range(count):
        ids = np.full(CONTEXT, last if number == count - 1 else 1)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = ids.astype("<i8").tobytes(), pb.DTYPE_INT64
    return message.SerializeToString()


@pytest.mark.parametrize("coding", ("identity", "zstd"))
def test_a_large_request_leaves_the_loop_to_others(server, monkeypatch, coding: str) -> None:
    """What works on all of it is called in other threads than the loop's."""
    called = set[tuple[str, bool]]()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            on_loop = threading.current_thread() is server._thread
            called.add((function.__name__, on_loop))
            return function(*given)

        return call

    class Packed(io.BytesIO):
        read = noted(io.BytesIO.read)

    monkeypatch.setattr(bodies, "io", SimpleNamespace(BytesIO=Packed))
    for name in ("parse_call", "batch"):
        monkeypatch.setattr(training_calls, name, noted(getattr(training_calls, name)))
    client = Wire(server.url)
    body = body_of(client.create(), 1, 2 * SMALL // CONTEXT, last=VOCAB)
    body = zstandard.ZstdCompressor().compress(body) if coding == "zstd" else body
    headers = {"Content-Encoding": coding}
    reply = client.http.post("/forward_backward", content=body, headers=headers)
    assert f"model_input has id {VOCAB}; ids must be" in client.result(reply.json())["error"]
    assert called == {
        *(("parse_call", False), ("batch", False)),
        *([("read", False)] if coding == "zstd" else []),
    }


def test_a_body_that_unpacks_to_more_than_the_limit_is_refused(server, monkeypatch) -> None:
    monkeypatch.setattr(training, "BODY_BYTES_MAX", 1 << 20)
    wire = Wire(server.url)
    for size, status in (((1 << 20) + 1, 413), (1 << 20, 400)):
        body = zstandard.ZstdCompressor().compress(b"\0" * size)
        headers = {"Content-Encoding": "zstd"}
        assert len(body) < SMALL
        reply = wire.http.post("/forward_backward", content=body, headers=headers)
        assert reply.status_code == status
    assert server.queue.bytes == server.queue.count == 0


def test_a_body_that_is_not_zstd_is_refused(server) -> None:
    wire = Wire(server.url)
    headers = {"Content-Encoding": "zstd"}
    reply = wire.http.post("/forward_backward", content=b"plain" * 9000, headers=headers)
    assert reply.status_code == 400 and "the body is not zstd" in reply.json()["detail"]


# ---- order, retries, refusals ----


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Batches are checked when the second event says so; the first says that one came."""
    came, go, check = threading.Event(), threading.Event(), training_calls.batch

    def slow(*arguments):
        came.set()
        assert go.wait(60)
        return check(*arguments)

    monkeypatch.setattr(training_calls, "batch", slow)
    yield came, go
    go.set()


def post_later(wire: Wire, body: bytes) -> tuple[threading.Thread, list[dict]]:
    """Posts a request in a thread, which adds the reply to the list."""
    replies: list[dict] = []
    sender = Wire(str(wire.http.base_url).removesuffix("/api/v1/"))

    def post() -> None:
        reply = sender.http.post("/forward_backward", content=body)
        replies.append(reply.raise_for_status().json())

    thread = threading.Thread(target=post)
    thread.start()
    return thread, replies


def test_a_retry_while_the_first_is_checked_is_executed_once(server, gate) -> None:
    wire = Wire(server.url)
    model, (came, go) = wire.create(), gate
    body = body_of(model, 1, 2 + SMALL // CONTEXT // 4)
    posts = [post_later(wire, body)]
    assert came.wait(60)
    came.clear()
    posts.append(post_later(wire, body))
    assert came.wait(60)
    go.set()
    for thread, _ in posts:
        thread.join()
    assert posts[0][1] == posts[1][1]
    assert wire.result(posts[0][1][0]) == {}
    tokens = wire.result(wire.optim_step(model, 2))["metrics"]["loss_tokens"]
    assert tokens == CONTEXT * (2 + SMALL // CONTEXT // 4)


def test_others_are_answered_and_trained_while_a_request_is_checked(server, gate) -> None:
    wire = Wire(server.url)
    model, other, (came, go) = wire.create(), wire.create(), gate
    thread, replies = post_later(wire, body_of(model, 1, 100))
    assert came.wait(60)
    assert wire.http.get("/healthz").json() == {"status": "ok"}
    assert wire.result(wire.optim_step(other, 1))["metrics"]["grad_norm"] == 0
    step = wire.optim_step(model, 2)  # waits for request 1, which is being checked
    go.set()
    thread.join()
    assert wire.result(replies[0]) == {}
    assert wire.result(step)["metrics"]["loss_tokens"] == 100 * CONTEXT


def test_a_session_that_ends_while_its_request_is_checked(server, gate) -> None:
    wire = Wire(server.url)
    model, (came, go) = wire.create(), gate
    thread, replies = post_later(wire, body_of(model, 1, 100))
    assert came.wait(60)
    session = model.partition(":")[0]
    assert wire.http.post(f"/sessions/{session}/finish", json={}).status_code == 200
    go.set()
    thread.join()
    assert "there is no model" in wire.result(replies[0])["error"]
    assert (server.queue.bytes, server.queue.count) == (0, 0)


def test_a_refused_request_is_let_go_of_at_once(server, monkeypatch) -> None:
    """Not when the garbage collector comes, which would hold everyone up to free it."""
    calls: list[int] = []
    before = training_calls.parse_call

    class Counted(training_calls.TrainingCall):
        def __del__(self) -> None:
            calls.remove(id(self))

    def counted(body: bytes) -> training_calls.TrainingCall:
        call = before(body)
        found = Counted(call.head, call.parts, call.lifted, call.count)
        calls.append(id(found))
        return found

    monkeypatch.setattr(training_calls, "parse_call", counted)
    client = Wire(server.url)
    model = client.create()
    gc.collect()
    gc.disable()
    try:
        for seq, last in enumerate((VOCAB, 1, VOCAB), 1):
            body = body_of(model, seq, 200, last)
            promise = client.http.post("/forward_backward", content=body).json()
            assert ("error" in client.result(promise)) == (last == VOCAB)
        until(lambda: not calls)  # the reply is sent before its task has ended
    finally:
        gc.enable()


# ---- results ----


def test_a_result_of_many_pieces_is_that_of_small_requests(service_client) -> None:
    client = make_client(service_client)
    ids = np.tile(np.arange(VOCAB), (CONTEXT, 1))
    data = [make_datum([n] * CONTEXT, ids, weights=np.ones(ids.shape)) for n in range(5)]
    assert 5 * ids.size * 4 > 2 * PIECE
    together = client.forward(data, "cross_entropy").result()
    alone = [client.forward([one], "cross_entropy").result() for one in data]
    assert len(together.loss_fn_outputs) == 5
    for one, other in zip(together.loss_fn_outputs, alone, strict=True):
        expected = other.loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), expected)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0


def test_a_large_sample_request_is_the_small_one(server) -> None:
    """The same prompt, with spaces: its JSON is read elsewhere."""
    wire = Wire(server.url)
    model = wire.create()
    asked = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0}
    sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
    results = []
    for seq, spaces in enumerate((0, 4 * SMALL, 1 << 18)):
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(60))}]},
            "sampling_params": {"max_tokens": 8, "seed": 3},
            "topk_prompt_logprobs": VOCAB,
        }
        text = json.dumps(body).replace(", ", "," + " " * spaces, 20)
        reply = wire.http.post("/asample", content=text)
        results.append(wire.poll(reply.json()).content)
    assert results[0] == results[1] == results[2] and len(results[0]) > 60 * VOCAB * 8


def test_a_sample_result_has_a_limit(server) -> None:
    wire = Wire(server.url)
    asked = {"session_id": wire.create().partition(":")[0], "sampling_session_seq_id": 0}
    sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
    body = {
        "sampling_session_id": sampler["sampling_session_id"],
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "num_samples": 4096,
        "topk_sample_logprobs": VOCAB,
    }
    told = wire.result(wire.post("/asample", seq_id=0, **body))["error"]
    drawn = 4096 * (CONTEXT - 3) * 8 * (1 + VOCAB)
    assert told == (
        f"the result could have {drawn} bytes, at most {1 << 30} are sent: 0 for a prompt of 3 "
        f"tokens with topk_prompt_logprobs 0 and prompt_alt_tokens_k 0, and {drawn} for 4096 "
        f"samples of up to {CONTEXT - 3} tokens with topk_sample_logprobs {VOCAB}; ask for less, "
        "or in several requests"
    )
    wanted = body | {"num_samples": 2, "sampling_params": {"max_tokens": 1}}
    assert wire.result(wire.post("/asample", seq_id=1, **wanted)) == {}


def test_scores_of_a_prompt_have_a_limit() -> None:
    class Large:
        vocab, context, eos_ids = 150_000, 1 << 18, ()
        config = MappingProxyType({"context": context})

    for length, fits in (((1 << 30) // 8000, True), ((1 << 30) // 8000 + 1, False)):
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * length}]},
            "sampling_params": {"max_tokens": 1},
            "topk_prompt_logprobs": 1000,
        }
        if fits:
            assert sampling_calls.sample_request(body, Large(), 0).topk_prompt == 1000
            continue
        with pytest.raises(ValueError, match=f"{8000 * length} for a prompt of {length} tokens"):
            sampling_calls.sample_request(body, Large(), 0)
