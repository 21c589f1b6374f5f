"""A client with little to do beside one with much: who has one request does not wait for
the queue of the other, nobody starves, and what anybody gets has the bits that it has alone."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from support.small_run import PROMPT
from support.tiny_models import loaded, tokens_of
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.jobs import RefusedJob
from tinsmith.engine.training import Batch, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

PAGE = 64
STEP_SEQUENCES = 256
Request = dict[str, Any]  # the arguments of Sampler.add after the request's number


def ask(length: int, seed: int, max_tokens: int, client: int = 0, **options: Any) -> Request:
    prompt = tokens_of("qwen3", length, seed)
    return {"prompt": prompt, "seed": seed, "max_tokens": max_tokens, "client": client, **options}


class Room:
    """A sampler with its requests; counts steps."""

    def __init__(self, tokens: int = 65536):
        self.sampler = _core.Sampler(loaded("qwen3").core, tokens=tokens)
        self.steps = 0
        self.ended: dict[int, int] = {}  # the step in which a request was done
        self.results: dict[int, dict[str, Any]] = {}

    def add(self, number: int, asked: Request) -> None:
        self.sampler.add(number, **asked)

    def step(self) -> list[int]:
        """The requests that a token was drawn for."""
        self.steps += 1
        drawn, done = self.sampler.step()
        for number in done:
            self.ended[number] = self.steps
            self.results[number] = self.sampler.take(number)
        return [number for number, _, _ in drawn]

    def run(self, *numbers: int) -> None:
        """Until these requests are done."""
        while not all(number in self.results for number in numbers):
            self.step()
            assert self.steps < 10_000, "the sampler does not get on"


def alone(asked: Request, tokens: int = 65536) -> tuple[dict[str, Any], int]:
    """A request's result without others, and its steps."""
    room = Room(tokens)
    room.add(0, asked)
    room.run(0)
    return room.results[0], room.steps


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for one, other in zip(found["samples"], wanted["samples"], strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_one_sample_beside_500_queued_ones_takes_the_steps_that_it_takes_alone() -> None:
    small = ask(20, 1000, 5, client=2)
    wanted, steps = alone(small)
    large = [ask(4, seed, 60, client=1) for seed in range(500)]
    room = Room()
    for number, asked in enumerate(large):
        room.add(number, asked)
    for _ in range(10):
        room.step()
    assert not room.results
    room.add(1000, small)
    before = room.steps
    room.run(1000)
    assert room.ended[1000] - before == steps
    assert_same(room.results[1000], wanted)
    room.run(*range(500))
    for number in (0, 255, 256, 499):
        assert_same(room.results[number], alone(large[number])[0])


def test_a_step_is_shared_as_equally_as_the_clients_ask() -> None:
    room, whose = Room(), {}
    for client, requests in ((1, 300), (2, 300), (3, 5), (4, 1)):
        for _ in range(requests):
            whose[len(whose)] = client
            room.add(len(whose) - 1, ask(3, len(whose), 60, client))
    for _ in range(10):
        room.step()
    drawn = Counter(whose[number] for number in room.step())
    assert drawn == {1: 125, 2: 125, 3: 5, 4: 1} and drawn.total() == STEP_SEQUENCES
    # The samples of one request are their client's too.
    room, many = Room(), ask(3, 1, 60, client=1, num_samples=300)
    room.add(0, many)
    room.add(1, ask(3, 2, 60, client=2, num_samples=300))
    for _ in range(10):
        room.step()
    assert Counter(room.step()) == {0: 128, 1: 128}


def test_within_a_client_the_older_request_goes_first() -> None:
    room = Room()
    for number in range(400):
        room.add(number, ask(3, number, 30, client=number % 2))
    room.run(*range(400))
    for client in range(2):
        ends = [room.ended[number] for number in range(client, 400, 2)]
        assert ends == sorted(ends) and ends[0] < ends[-1]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    room, long = Room(), [ask(150, seed, 1, client=1) for seed in range(40)]
    for number, asked in enumerate(long):
        room.add(number, asked)
    room.step()
    small = ask(40, 99, 1, client=2)
    room.add(99, small)
    room.step()
    assert room.ended[99] == 2 and len(room.ended) < 10
    assert_same(room.results[99], alone(small)[0])
    room.run(*range(40))
    assert_same(room.results[39], alone(long[39])[0])
    # They take the steps that their rows need: no part of a step is kept for who does not come.
    assert room.steps == -(-(40 * 150 + 40) // 512)


@pytest.mark.parametrize("pages", (4, 9, 30))
def test_a_small_cache_is_shared_and_the_oldest_is_never_put_off(pages: int) -> None:
    """Newcomers take the pages of those behind them, and everyone's bits stay what they are."""
    tokens = pages * PAGE
    first = ask(60, 0, 90, client=1)
    wanted, steps = alone(first, tokens)
    room = Room(tokens)
    asked = {number: ask(30 + number, number, 90, client=1) for number in range(1, 12)}
    room.add(0, first)
    for number, one in asked.items():
        room.add(number, one)
    for number in range(12, 40):  # a new client in every third step
        asked[number] = ask(number, number, 40, client=number)
        room.add(number, asked[number])
        for _ in range(3):
            room.step()
    room.run(0, *asked)
    assert room.ended[0] == steps
    assert_same(room.results[0], wanted)
    for number, one in asked.items():
        assert_same(room.results[number], alone(one, tokens)[0])


def test_the_last_in_line_gives_its_pages_to_the_first() -> None:
    room = Room(6 * PAGE)  # for two of them
    for number in range(3):
        room.add(number, ask(60, number, 90))
    room.run(*range(3))
    assert room.ended[0] == room.ended[1] == 90 < room.ended[2]


def test_who_came_first_ends_though_others_never_stop_coming() -> None:
    """Each request of the greedy clients is followed by another one at once."""
    room, number = Room(6 * PAGE), 10
    asked = [ask(20, seed, 100, client=1) for seed in range(3)]
    for seed, one in enumerate(asked):
        room.add(seed, one)
    for client in range(2, 5):
        room.add(number := number + 1, ask(20, number, 60, client))
    while not {0, 1, 2} <= room.results.keys():
        before = set(room.results)
        room.step()
        for _ in room.results.keys() - before - {0, 1, 2}:
            room.add(number := number + 1, ask(20, number, 60, client=2 + number % 3))
        assert room.steps < 2000
    for seed, one in enumerate(asked):
        assert_same(room.results[seed], alone(one)[0])


def test_clients_that_left_leave_nothing_behind() -> None:
    room = Room()
    for turn in range(3):
        for number in range(40):
            room.add(number, ask(5, number, 3, client=number * 7 - 100))
        for number in range(0, 40, 2):
            room.sampler.cancel(number)
        room.run(*range(1, 40, 2))
        assert room.sampler.active == 0, turn
        room.results.clear()


# ---- through the worker ----


@pytest.fixture(scope="module")
def worker(tiny_model_dir) -> Iterator[Worker]:
    made = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    yield made
    made.close()


def batch() -> Batch:
    ids = np.arange(5, 45, dtype=np.int32)
    lengths = np.asarray([40], np.int32)
    one = np.ones(1, np.int32)
    return Batch(ids, lengths, ids, one, "cross_entropy", {}, {}, ((40,),))


def test_a_sample_ends_before_those_of_another_clients_queue(worker) -> None:
    worker.open_base("base", "tiny")
    prompt, order = np.asarray([5, 6], np.int32), []
    request, go = SampleRequest(prompt, max_tokens=100), threading.Event()
    worker._put(lambda: go.wait(60))  # until all of them are there
    large = [worker.sample("base", request, client=1) for _ in range(500)]
    small = worker.sample("base", SampleRequest(prompt, max_tokens=5), client=2)
    for future in (*large, small):
        future.add_done_callback(order.append)
    go.set()
    for future in large:
        future.result(timeout=60)
    assert order[0] is small


def test_a_session_is_a_client(tiny_model_dir, tmp_path, monkeypatch) -> None:
    seen, sample = [], Worker.sample

    def watched(self: Worker, name: str, request: SampleRequest, client: int = 0) -> Any:
        seen.append(client)
        return sample(self, name, request, client)

    monkeypatch.setattr(Worker, "sample", watched)
    with (
        Backend(
            ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu")
        ) as backend,
        backend.service_client() as one,
        backend.service_client() as other,
    ):
        for service in (one, one, other):
            client = service.create_sampling_client(base_model="tiny").result()
            client.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1)).result()
    assert seen[0] == seen[1] != seen[2]


def test_runs_take_turns_and_each_keeps_its_order(worker) -> None:
    order: list[tuple[str, int]] = []
    for name in ("large", "small"):
        worker.create(name, "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)

    def ask_for(run: str, seq: int) -> Any:
        future = worker.submit(run, seq, TrainJob(batch()))
        future.add_done_callback(lambda _: order.append((run, seq)))
        return future

    go = threading.Event()
    worker._put(lambda: go.wait(60))  # until all of them are there
    first = worker.submit("large", 1, RefusedJob(ValueError("its turn is over")))
    large = [ask_for("large", seq) for seq in (3, 2, *range(4, 42))]  # 2 comes late
    small = ask_for("small", 1)
    go.set()
    assert "its turn is over" in str(first.exception(timeout=60))
    losses = {future.result(timeout=60).loss for future in large}
    assert losses == {small.result(timeout=60).loss}
    assert [seq for run, seq in order if run == "large"] == list(range(2, 42))
    assert order.index(("small", 1)) < 20
