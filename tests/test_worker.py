"""The worker without HTTP: requests decode together, and neither training nor sampling starves."""

import numpy as np
import pytest
from tinsmith.decoding import SampleRequest
from tinsmith.worker import Batch, LoraSpec, Worker, load_models


@pytest.fixture(scope="module")
def worker(tiny_model_dir):
    made = Worker(load_models({"tiny": tiny_model_dir}, device="cpu", threads=1))
    made.create("run", "tiny", LoraSpec(rank=4, seed=1)).result()
    made.open_base("base", "tiny")
    yield made
    made.close()


def small_batch() -> Batch:
    ids = np.arange(5, 45, dtype=np.int32)
    length = np.asarray([40], np.int32)
    one = np.ones(1, np.int32)
    return Batch(ids, length, ids, one, "cross_entropy", {}, {}, ((40,),))


def test_a_request_that_arrives_later_joins_and_may_end_sooner(worker):
    prompt, order = np.asarray([5, 6], np.int32), []
    long = worker.sample("base", SampleRequest(prompt, num_samples=4, max_tokens=120))
    short = worker.sample("base", SampleRequest(prompt, max_tokens=2))
    long.add_done_callback(lambda _: order.append("long"))
    short.add_done_callback(lambda _: order.append("short"))
    assert len(long.result(timeout=60).samples) == 4
    assert order == ["short", "long"]


def test_sampling_goes_on_under_endless_training_and_training_under_sampling(worker):
    prompt = np.asarray([5, 6], np.int32)
    seq = iter(range(1, 1_000_000))
    request = SampleRequest(prompt, max_tokens=100)
    sampled = worker.sample("base", request)
    newest = [worker.forward_backward("run", next(seq), small_batch()) for _ in range(3)]
    while not sampled.done():  # there are always two training requests waiting
        newest.append(worker.forward_backward("run", next(seq), small_batch()))
        newest.pop(0).result(timeout=60)
    under_way = [worker.sample("base", request) for _ in range(3)]
    trained = worker.forward_backward("run", next(seq), small_batch())
    while not trained.done():
        under_way.append(worker.sample("base", request))
        under_way.pop(0).result(timeout=60)
    assert next(seq) < 100_000


def test_snapshots_that_nobody_used_for_long_make_room(tiny_model_dir):
    base = load_models({"tiny": tiny_model_dir}, device="cpu", threads=1)
    probe = Worker(base, snapshot_bytes_max=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result()
        request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=2, seed=1)
        probe.snapshot("run", 1, "old").result()
        probe.open_base("base", "tiny")
        first = probe.sample("old", request).result(timeout=60)
        probe.snapshot("run", 2, "new").result()
        dropped = probe.sample("old", request).exception(timeout=60)
        assert "were dropped to make room" in str(dropped)
        kept = [probe.sample(name, request).result(timeout=60) for name in ("new", "base")]
        assert all(len(item.samples[0].tokens) == 2 for item in (first, *kept))
    finally:
        probe.close()


def test_a_cancelled_sample_fails_and_the_rest_goes_on(worker):
    prompt = np.asarray([5, 6], np.int32)
    cancelled = worker.sample("base", SampleRequest(prompt, max_tokens=120))
    other = worker.sample("base", SampleRequest(prompt, max_tokens=120))
    worker.cancel(cancelled)
    assert "cancelled" in str(cancelled.exception(timeout=60))
    assert len(other.result(timeout=60).samples[0].tokens) == 120
