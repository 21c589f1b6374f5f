"""More requests than memory allows: held back, answered with 429, and all of them answered in the
end, as if there had been room."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
from conftest import CONTEXT, Wire, logprobs, make_datum
from support.small_run import make_client
from support.waiting import until
from tinsmith.engine.decoding import SampleRequest
from tinsmith.server.backend import Backend
from tinsmith.server.http.overload import Overloaded, Queue
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.wire.sampling_calls import SAMPLE_BYTES, held_bytes

LIMIT = 20_000


def start(model: Path, folder: Path, queue: Queue | None = None) -> Backend:
    return Backend(
        ServerConfig({"tiny": model}, checkpoints=folder, device="cpu", threads=1, queue=queue)
    )


@pytest.fixture
def crowded(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Backend]:
    """A server that takes four samples at once, and holds others back for 0.3 s."""
    queue = Queue(bytes_max=LIMIT, count_max=8, hold_seconds=0.3, again_seconds=0.1)
    with start(tiny_model_dir, tmp_path, queue) as backend:
        yield backend


def ask_for_everything(backend: Backend, crowd: Callable[[], bool]) -> tuple[list, list]:
    """200 requests at once: 100 samples, and 25 forwards from each of four training clients. The
    engine answers none before there is a `crowd`."""
    with backend.service_client() as service:
        sampler = service.create_sampling_client(base_model="tiny").result()
        trainers = [make_client(service, seed) for seed in range(4)]
        params = [tinker.SamplingParams(max_tokens=24, seed=seed, stop=[]) for seed in range(100)]
        prompt = tinker.ModelInput.from_ints(list(range(5, 45)))
        go = threading.Event()
        backend.worker._put(lambda: go.wait(120))
        drawn = [sampler.sample(prompt, 1, one) for one in params]
        data = [make_datum([n + 3] * 90, [n + 4] * 90, weights=[1] * 90) for n in range(25)]
        trained = [c.forward([one], "cross_entropy") for c in trainers for one in data]
        assert len(drawn) + len(trained) == 200
        until(crowd)
        go.set()
        return (
            [list(one.result(timeout=120).sequences[0].tokens) for one in drawn],
            [logprobs(one.result(timeout=120))[0] for one in trained],
        )


@pytest.fixture
def refused(monkeypatch) -> list[int]:
    """The bytes that waited whenever a request was told to come again."""
    found, full = list[int](), Queue._full
    monkeypatch.setattr(Queue, "_full", lambda queue: found.append(queue.bytes) or full(queue))
    return found


def test_all_of_200_requests_are_answered_right(crowded, tiny_model_dir, tmp_path, refused):
    with start(tiny_model_dir, tmp_path / "roomy") as backend:
        expected = ask_for_everything(backend, lambda: backend.queue.peak > 4 * LIMIT)
        assert not refused  # though there is more than fits into the crowded one
    found = ask_for_everything(crowded, lambda: len(refused) > 0)  # they are told to come again
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert LIMIT / 2 < crowded.queue.peak <= LIMIT
    assert (crowded.queue.bytes, crowded.queue.count) == (0, 0)


class Crowd:
    """A request that waits for the one before it, and leaves little room in the queue."""

    def __init__(self, backend: Backend, compress: bool = False):
        self.wire = Wire(backend.url)
        self.model = self.wire.create()
        data = [make_datum([5] * 100, [6] * 100) for _ in range(16)]
        self.waiting = self.wire.forward_backward(self.model, 2, data, compress=compress)
        assert LIMIT * 0.8 < backend.queue.bytes < LIMIT

    def leave(self) -> None:
        """Sends the one before it, with which both are done."""
        self.wire.optim_step(self.model, 1)
        self.wire.result(self.waiting)


def test_the_queue_takes_an_eighth_of_a_small_memory(tiny_model_dir, tmp_path):
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu", threads=1, memory=80 << 20
        )
    ) as backend:
        assert backend.queue.bytes_max == 10 << 20


def test_who_waits_too_long_is_told_to_come_again(crowded, monkeypatch):
    crowd, wire = Crowd(crowded), Wire(crowded.url)
    model = wire.create()
    asked = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0}
    sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
    body = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    }
    waited, move = list[int](), Queue.move
    monkeypatch.setattr(Queue, "move", lambda line: (waited.append(len(line._waiting)), move(line)))
    reply = wire.http.post("/asample", json=body)
    assert reply.status_code == 429 and max(waited) == 1
    assert reply.headers["retry-after"] == "0.1"
    assert f"in its queue, and takes 8 of {LIMIT} at once" in reply.json()["detail"]
    # A small request that waits for nothing in memory is answered all the same.
    assert wire.result(wire.optim_step(model, 1))["metrics"]["grad_norm"] == 0
    # What can't be done is refused, whatever the load.
    told = wire.result(wire.post("/asample", **body | {"num_samples": 10**9}))
    assert told["error"] == "num_samples must be from 1 to 4096, 1000000000 came"
    assert told["category"] == "user"
    crowd.leave()
    assert wire.http.post("/asample", json=body | {"seq_id": 1}).status_code == 200


def test_a_compressed_request_counts_for_what_it_unpacks_to(crowded):
    Crowd(crowded, compress=True).leave()
    assert (crowded.queue.bytes, crowded.queue.count) == (0, 0)


def test_a_request_for_many_samples_counts_for_each_of_them(crowded):
    wire, go = Wire(crowded.url), threading.Event()
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    asked = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    sampler = wire.post("/create_sampling_session", **asked, base_model="tiny")
    crowded.worker._put(lambda: go.wait(60))
    try:
        promise = wire.post(
            "/asample",
            **sampler,
            seq_id=0,
            num_samples=3,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            sampling_params={"max_tokens": 2},
        )
        assert 3 * SAMPLE_BYTES < crowded.queue.bytes < 4 * SAMPLE_BYTES
    finally:
        go.set()
    assert wire.result(promise) == {}


def test_a_training_request_is_sent_again_by_the_sdk(crowded, refused):
    with crowded.service_client() as service:
        client, crowd = make_client(service), Crowd(crowded)
        data = [make_datum([5] * 100, [6] * 100)] * 4
        waiting = client.forward(data, "cross_entropy")
        until(lambda: len(refused) > 0)
        crowd.leave()
        assert waiting.result(timeout=60).metrics["loss:sum"] > 0
    assert crowded.queue.peak <= LIMIT


def test_a_request_larger_than_the_limit_is_let_in_alone(crowded):
    with crowded.service_client() as service:
        client = make_client(service)
        data = [make_datum([5] * 100, [6] * 100) for _ in range(60)]
        calls = [client.forward(data, "cross_entropy") for _ in range(3)]
        results = [call.result(timeout=60).metrics for call in calls]
        assert results[0] == results[1] == results[2]
        one = client.forward(data[:1], "cross_entropy").result().metrics["loss:sum"]
    assert crowded.queue.peak > LIMIT and results[0]["loss:sum"] == pytest.approx(60 * one)
    sizes = crowded.queue.peak
    assert sizes < 2 * 60 * 100 * 8  # one at a time


def test_many_samples_of_one_request_count_for_what_they_are():
    prompt = np.arange(10, dtype=np.int32)
    plain = SampleRequest(prompt, num_samples=7, max_tokens=50)
    assert held_bytes(plain, CONTEXT) == prompt.nbytes + 7 * SAMPLE_BYTES
    scored = replace(plain, topk_sample=20, topk_prompt=5, prompt_logprobs=True, prompt_draws=2)
    more = 7 * 50 * 20 * 8 + 10 * (4 + 5 * 8 + 2 * 12)
    assert held_bytes(scored, CONTEXT) == held_bytes(plain, CONTEXT) + more


def test_small_requests_are_counted_too():
    async def main() -> None:
        queue = Queue(bytes_max=1 << 30, count_max=2, hold_seconds=0.01)
        with await queue.enter(1), await queue.enter(1) as second:
            with pytest.raises(Overloaded, match="has 2 requests of 2 bytes"):
                await queue.enter(1)
            second.leave()
            with await queue.enter(1):
                assert queue.count == 2
        assert (queue.bytes, queue.count) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", (False, True))
def test_what_fits_comes_in_as_soon_as_the_one_in_front_of_it_gives_up(cancelled: bool):
    async def main() -> None:
        queue = Queue(bytes_max=10, hold_seconds=60.0 if cancelled else 0.1)
        with await queue.enter(6):
            large = asyncio.create_task(queue.enter(8))
            await asyncio.sleep(0)
            queue._hold_seconds = 60.0  # of those that come now
            small = asyncio.create_task(queue.enter(3))
            await asyncio.sleep(0)
            assert not small.done()
            if cancelled:
                large.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else Overloaded):
                await large
            (await small).leave()
        assert (queue.bytes, queue.count) == (0, 0)

    asyncio.run(main())


def test_places_are_given_in_the_order_of_arrival_and_none_is_lost():
    async def main() -> None:
        queue, order = Queue(bytes_max=10, hold_seconds=60.0), []

        async def one(name: str, size: int) -> None:
            with await queue.enter(size):
                order.append(name)
                await asyncio.sleep(0)

        with await queue.enter(10):
            sizes = {"left": 9, "large": 8, "small": 3, "tiny": 1}
            left, *tasks = [asyncio.create_task(one(*each)) for each in sizes.items()]
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
            assert left.cancelled() and order == []
        await asyncio.gather(*tasks)
        assert order == ["large", "small", "tiny"]
        assert (queue.bytes, queue.count, queue.peak) == (0, 0, 10)

    asyncio.run(main())
