"""Requests that promise much and send little, or unpack to much: refused with a sentence before
they take memory, while others are answered; and results that nobody reads."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from conftest import CONTEXT, VOCAB, Wire, make_datum
from starlette.requests import Request
from support.waiting import until
from tinsmith.server.backend import Backend
from tinsmith.server.http.overload import FREE_BYTES, Arrivals, Overloaded
from tinsmith.server.routes import results, sampling, training
from tinsmith.server.service import bodies, promises, samplers
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.service.promises import Refusal
from tinsmith.server.wire import arrays, chunking, training_calls
from tinsmith.server.wire.messages import pb

MODEL = SimpleNamespace(vocab=VOCAB, context=CONTEXT)


def head(server: Backend, path: str, *lines: str) -> bytes:
    port = server.url.rpartition(":")[2]
    text = [f"POST /api/v1{path} HTTP/1.1", f"Host: localhost:{port}", "X-API-Key: tml-a", *lines]
    return "\r\n".join([*text, "", ""]).encode()


def connect(server: Backend, data: bytes) -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.sendall(data)
    return made


def reply(client: socket.socket) -> tuple[int, str]:
    """The status and sentence that come."""
    came = b""
    while not came.endswith(b"}") and (piece := client.recv(1 << 16)):
        came += piece
    first, _, body = came.decode().partition("\r\n\r\n")
    return int(first.split()[1]), json.loads(body)["detail"]


# ---- in time ----


@pytest.mark.parametrize("path", ("/asample", "/forward_backward", "/create_session"))
def test_a_body_that_is_only_promised_takes_no_memory(server, path: str) -> None:
    wire = Wire(server.url)
    silent = [connect(server, head(server, path, f"Content-Length: {1 << 23}")) for _ in range(9)]
    try:
        wire.create()  # each of its requests is answered
        assert (server._service.arrivals.bytes, server.queue.bytes) == (0, 0)
        assert server.queue.count == 0
    finally:
        for client in silent:
            client.close()


@pytest.mark.parametrize("sent", (b"", b"{" * 5000), ids=("silent", "slow"))
def test_a_body_that_does_not_come_is_given_up(server, monkeypatch, sent: bytes) -> None:
    monkeypatch.setattr(bodies, "PACE_SECONDS", 0.2)
    with connect(server, head(server, "/asample", "Content-Length: 1000000") + sent) as client:
        status, told = reply(client)
    assert status == 408 and f"the body came too slowly: {len(sent)} bytes in " in told


def test_a_body_that_comes_at_a_walk_is_read_and_one_that_never_ends_is_not() -> None:
    """By a clock on which each piece takes half of the time in which PACE_BYTES must come."""

    async def came(count: int, size: int) -> int:
        loop, now, left = asyncio.get_running_loop(), 0.0, count
        loop.time = lambda: now

        async def receive() -> dict[str, Any]:
            nonlocal now, left
            now, left = now + bodies.PACE_SECONDS / 2, left - 1
            return {"type": "http.request", "body": bytes(size), "more_body": left > 0}

        async def take(more: int) -> None:
            pass

        request: Any = SimpleNamespace(headers={}, receive=receive)
        return sum([len(piece) async for piece in bodies.received(request, 1 << 30, take)])

    walk = bodies.PACE_BYTES // 2
    assert asyncio.run(came(20, walk)) == 20 * walk
    for count, size in ((20, walk - 1), (200, walk)):
        with pytest.raises(Refusal, match="the body came too slowly: "):
            asyncio.run(came(count, size))


def test_a_poll_whose_client_has_gone_ends(tiny_model_dir, tmp_path, monkeypatch) -> None:
    looked, look = set[int](), results._look_for

    async def look_for(request: Request) -> None:
        looked.add(id(request))
        await look(request)

    monkeypatch.setattr(results, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(results, "_look_for", look_for)
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir},
            checkpoints=tmp_path,
            device="cpu",
            threads=1,
            poll_seconds=1000.0,
        )
    ) as backend:
        wire, tasks, go = Wire(backend.url), backend._server.server_state.tasks, threading.Event()
        model = wire.create()
        backend.worker._put(lambda: go.wait(120))  # longer than the polls have to end
        body = json.dumps(wire.optim_step(model, 1)).encode()
        length = f"Content-Length: {len(body)}"
        key = head(backend, "/retrieve_future", length).replace(b"tml-a", b"tml-local")
        asked = [connect(backend, key + body) for _ in range(5)]
        until(lambda: len(looked) >= 5)  # all of them wait
        for client in asked:
            client.close()
        until(lambda: not tasks)
        go.set()


# ---- in size ----


def chunked(size: int) -> Iterator[bytes]:
    for _ in range(size >> 16):
        yield bytes(1 << 16)


@pytest.mark.parametrize(
    ("path", "most"),
    (("/create_session", 1 << 23), ("/asample", 1 << 27), ("/forward_backward", 1 << 30)),
)
def test_a_body_has_a_limit_however_it_comes(server, monkeypatch, path: str, most: int) -> None:
    with connect(server, head(server, path, f"Content-Length: {most + 1}")) as client:
        assert reply(client) == (
            413,
            f"the body has more than {most} bytes, the most that this takes",
        )
    monkeypatch.setattr(bodies, "JSON_BYTES_MAX", 1 << 17)
    monkeypatch.setattr(sampling, "LARGE_JSON_BYTES_MAX", 1 << 17)
    monkeypatch.setattr(training, "BODY_BYTES_MAX", 1 << 17)
    url = f"{server.url}/api/v1{path}"
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    for body, headers in ((chunked(1 << 20), {}), (packed, {"Content-Encoding": "zstd"})):
        answer = httpx.post(url, content=body, headers=headers, timeout=60)
        assert answer.status_code == 413 and "more than 131072 bytes" in answer.text
    assert server._service.arrivals.bytes == 0


def test_a_small_body_that_unpacks_to_millions_of_lists_is_refused(server) -> None:
    text = b'{"a": [' + b"[]," * 33_000_000 + b"[]]}"
    body = zstandard.ZstdCompressor().compress(text)
    assert len(body) < 20_000 and len(text) < 1 << 27
    wire, before = Wire(server.url), server._service.arrivals.peak
    answer = wire.http.post("/asample", content=body, headers={"Content-Encoding": "zstd"})
    assert answer.status_code == 413 and "of them lists and objects; at most" in answer.text
    peak = server._service.arrivals.peak
    assert peak <= max(before, len(text) + (1 << 24)) and server._service.arrivals.bytes == 0


def test_other_encodings_and_windows_of_zstd_are_refused(server) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    body = packer.compress(b"{}") + packer.flush()
    post = Wire(server.url).http.post
    answer = post("/create_session", content=body, headers={"Content-Encoding": "zstd"})
    assert answer.status_code == 400 and "the body is not zstd: " in answer.text
    answer = post("/create_session", content=b"{}", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "must be zstd or none, 'gzip' came" in answer.text


# ---- room for those that come ----


def test_many_bodies_partly_here_do_not_wait_for_one_another() -> None:
    """Without one that may go beyond the limit, each would wait for the others' ends."""

    async def main() -> None:
        arrivals = Arrivals(bytes_max=10 * FREE_BYTES, hold_seconds=30)
        done = []

        async def come(name: int) -> None:
            with arrivals.begin() as arrival:
                for _ in range(8):
                    await arrival.take(FREE_BYTES)
                    await asyncio.sleep(0)
                done.append(name)

        async with asyncio.timeout(60):
            await asyncio.gather(*(come(name) for name in range(20)))
        assert sorted(done) == list(range(20))
        assert 10 * FREE_BYTES < arrivals.peak <= (10 + 7) * FREE_BYTES
        assert arrivals.bytes == 0

    asyncio.run(main())


def test_the_limit_is_passed_by_one_body_only_even_if_it_waits_to_be_let_in() -> None:
    async def main() -> None:
        arrivals = Arrivals(bytes_max=FREE_BYTES, hold_seconds=0.05)
        with arrivals.begin() as one, arrivals.begin() as two:
            await one.take(9 * FREE_BYTES)
            one.complete()
            await two.take(FREE_BYTES)  # the first bytes are free
            with pytest.raises(Overloaded, match="bytes of requests coming in, and takes"):
                await two.take(1)
            assert arrivals.bytes == 8 * FREE_BYTES
        with arrivals.begin() as three:
            await three.take(9 * FREE_BYTES)
        assert arrivals.bytes == 0

    asyncio.run(main())


def test_who_waits_for_room_and_gives_up_leaves_nothing() -> None:
    async def main() -> None:
        arrivals = Arrivals(bytes_max=2 * FREE_BYTES, hold_seconds=30)

        async def come() -> None:
            with arrivals.begin() as arrival:
                await arrival.take(2 * FREE_BYTES)

        with arrivals.begin() as first, arrivals.begin() as second:
            await first.take(4 * FREE_BYTES)  # beyond the limit
            await second.take(FREE_BYTES)
            waiting = [asyncio.create_task(come()) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            assert [task.done() for task in waiting] == [True, False, False]
        await asyncio.gather(*waiting[1:])
        assert arrivals.bytes == 0 and arrivals.peak == 3 * FREE_BYTES

    asyncio.run(main())


# ---- small messages of much ----


def test_sparse_rows_are_counted_before_they_are_made_dense(monkeypatch) -> None:
    call = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(3):
        datum = call.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(2, "<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = pb.DTYPE_INT64
        tensor.shape.extend((2, 1 << 29))
        tensor.sparse_csr.crow_indices = np.zeros(3, "<i8").tobytes()
    assert len(call.SerializeToString()) < 500
    with pytest.raises(
        ValueError, match=rf"would have {1 << 33} bytes when dense, at most {1 << 29}"
    ):
        training_calls.batch(training_calls.parse_call(call.SerializeToString()), MODEL)
    monkeypatch.setattr(arrays, "DENSE_BYTES_MAX", 2 * 2 * 5 * 8)
    for datum in call.data:
        datum.loss_fn_inputs["target_tokens"].shape[1] = 5
    with pytest.raises(ValueError, match="datum 2: target_tokens: with its sparse rows of shape"):
        training_calls.batch(training_calls.parse_call(call.SerializeToString()), MODEL)


def test_small_fields_that_would_take_much_memory_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(chunking, "INNER_BYTES_MAX", 1 << 17)
    monkeypatch.setattr(chunking, "OTHERS_BYTES_MAX", 1 << 10)
    monkeypatch.setattr(training_calls, "DATUMS_MAX", 1000)

    def datum(inner: bytes) -> bytes:
        return b"\x1a" + _varint(len(inner)) + inner

    chunks = b"\x0a\x00" * (1 << 17)
    for body, sentence in (
        (datum(chunks), r"\d+ bytes of a message are in small fields"),
        (b"\x1a\x00" * 1001, "it has more than 1000 datums"),
        (b"\x28\x00" * 1024, r"\d+ bytes of it are no data"),
    ):
        with pytest.raises(ValueError, match=f"no ForwardBackwardRequest message: {sentence}"):
            training_calls.parse_call(body)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def test_a_sampling_session_has_a_bounded_number_of_clones(server, monkeypatch) -> None:
    monkeypatch.setattr(samplers, "CLONES_MAX", 3)
    wire = Wire(server.url)
    asked = {"session_id": wire.create().partition(":")[0], "sampling_session_seq_id": 0}
    sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
    target = {"sampling_session_id": sampler["sampling_session_id"]}
    for clone, status in ((1, 200), (2, 200), (3, 200), (1 << 40, 400), (2, 200)):
        body = {"target": target | {"cloned_sampler_id": clone}, "timeout": 0}
        assert wire.http.post("/retrieve_futures", json=body).status_code == status


def test_a_shape_of_thousands_of_axes_is_refused_at_once() -> None:
    call = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = call.data.add()
    datum.model_input.add().encoded_text.tokens = np.zeros(2, "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([1 << 62] * 50_000)  # whose product has three million bits
    with pytest.raises(ValueError, match="target_tokens has 50000 axes; at most 8 are read"):
        training_calls.batch(training_calls.parse_call(call.SerializeToString()), MODEL)


# ---- results that nobody reads ----


def test_results_that_nobody_reads_make_room_for_new_ones(server, monkeypatch) -> None:
    wire = Wire(server.url)
    model = wire.create()
    data = [make_datum([1] * CONTEXT, np.ones((CONTEXT, 20))) for _ in range(4)]
    size = 4 * CONTEXT * 20 * 4
    kept = server._service.promises
    monkeypatch.setattr(kept, "bytes_max", int(2.9 * size))  # older ones go first
    asked = [wire.forward_backward(model, seq, data) for seq in range(1, 5)]
    last = wire.result(wire.optim_step(model, 5))
    assert last["metrics"]["grad_norm"] > 0
    told = [wire.poll(one) for one in asked]
    assert [("json" in one.headers["content-type"]) for one in told] == [True, True, False, False]
    for one, answer in zip(asked, told[:2], strict=False):
        assert answer.json()["category"] == "user"
        sentence = answer.json()["error"]
        assert f"the result of {one['request_id']}, of " in sentence
        assert "read results as they come" in sentence
    assert kept.bytes <= kept.bytes_max


def test_what_is_kept_of_many_small_results_has_a_limit(server, monkeypatch) -> None:
    wire, kept = Wire(server.url), server._service.promises
    monkeypatch.setattr(kept, "bytes_max", 20 * promises.RESULT_BYTES)
    for number in range(60):
        wire.post("/optim_step", model_id="none", seq_id=number + 1)
    assert len(kept._done) <= 20
    assert kept.bytes == sum(item.bytes for item in kept._done.values())


def test_a_result_may_be_as_large_as_the_server_keeps(tiny_model_dir, tmp_path) -> None:
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu", threads=1, memory=1 << 30
        )
    ) as backend:
        wire = Wire(backend.url)
        asked = {"session_id": wire.create().partition(":")[0], "sampling_session_seq_id": 0}
        sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "topk_sample_logprobs": VOCAB,
            "num_samples": 4096,
        }
        told = wire.result(wire.post("/asample", **body))["error"]
        assert f"at most {1 << 27} are sent" in told
