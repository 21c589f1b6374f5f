"""What a server tells of its calls: each one, once, with what the client saw of it."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from support.tiny_models import folder
from tinker import types
from tinsmith.engine.call_log import Call
from tinsmith.server.backend import Backend
from tinsmith.server.records.notifier import Notifier, Refused
from tinsmith.server.service.config import ServerConfig

LORA = {"base_model": "tiny", "rank": 4}


class Seen(list[Any]):
    """A listener; `take` returns what it heard since."""

    def __init__(self, backend: Backend):
        super().__init__()
        self._notifier = backend.notifier
        backend.notifier.listen(self.append)

    def take(self) -> list[Any]:
        self._notifier.flush()
        taken = list(self)
        self.clear()
        return taken


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with Backend(
        ServerConfig({"tiny": folder("qwen3")}, checkpoints=checkpoints, device="cpu")
    ) as it:
        yield it


@pytest.fixture(scope="module")
def seen(backend: Backend) -> Seen:
    return Seen(backend)


@pytest.fixture(scope="module")
def client(backend: Backend) -> Iterator[tinker.ServiceClient]:
    with backend.service_client() as client:
        yield client


def datum(length: int, weight: float = 1.0) -> types.Datum:
    ids = [1 + place % 9 for place in range(length)]
    inputs = {
        "target_tokens": types.TensorData(data=ids, dtype="int64"),
        "weights": types.TensorData(data=[weight] * length, dtype="float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)


def test_each_call_of_a_run_is_told_with_its_result(client: Any, seen: Seen) -> None:
    seen.take()
    run = client.create_lora_training_client(**LORA).result()
    loss = run.forward_backward([datum(5), datum(7)], "cross_entropy").result()
    report = run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    run.forward([datum(3)], "cross_entropy").result()
    run.save_state("there").result()
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    samples = sampler.sample(prompt, 2, params).result().sequences
    create, train, step, forward, save, snapshot, sample = told = seen.take()
    assert [call.kind for call in told] == [
        "create", "forward_backward", "optim_step", "forward", "save", "snapshot", "sample"
    ]  # fmt: skip
    assert {call.run for call in told} == {run.model_id} and {c.base for c in told} == {"tiny"}
    assert [call.step for call in told] == [0, 0, 0, 1, 1, 1, 1]
    assert not any(call.error for call in told)
    assert create.request.rank == 4
    assert (train.tokens, forward.tokens) == (12, 3)
    assert train.result.loss == loss.metrics["loss:sum"]
    assert step.request.learning_rate == 1e-3 and step.result == report.metrics
    assert save.request.name == "there"
    assert sample.sampler == snapshot.sampler
    assert (sample.tokens, sample.drawn) == (3, sum(len(one.tokens) for one in samples))
    for one, other in zip(sample.result.samples, samples, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    for call in told:
        assert call.arrived <= call.began <= call.ended and call.queued >= 0 and call.seconds >= 0
    assert sample.began <= sample.first <= sample.ended


def test_a_call_that_fails_is_told_with_its_sentence(client: Any, seen: Seen) -> None:
    run = client.create_lora_training_client(**LORA).result()
    seen.take()
    for data, function in (([datum(5, 3e38)], "cross_entropy"), ([datum(2)], "nothing")):
        with pytest.raises(tinker.TinkerError):
            run.forward_backward(data, function).result()
    failed, rejected = seen.take()
    assert (failed.kind, rejected.kind) == ("forward_backward", "reject")
    assert "not finite" in failed.error and "nothing" in rejected.error
    assert failed.result is None and failed.run == rejected.run == run.model_id


def test_a_request_that_is_refused_is_told_with_its_status(client: Any, seen: Seen) -> None:
    seen.take()
    with pytest.raises(tinker.NotFoundError):
        client.create_rest_client().get_training_run("nobody").result()
    (refused,) = seen.take()
    assert isinstance(refused, Refused) and refused.status == 404
    assert "{" in refused.route and "nobody" in refused.detail


def test_progress_is_told_while_a_call_runs(backend: Backend, client: Any, seen: Seen) -> None:
    run = client.create_lora_training_client(**LORA).result()
    many = [datum(150) for _ in range(60)]
    run.forward_backward(many[:1], "cross_entropy").result()
    future = run.forward_backward(many, "cross_entropy")
    steps: set[tuple[int, int]] = set()
    while not future._future.done():
        for training in backend.worker.now.training:
            steps.add((training.done, training.count))
    future.result()
    counts = {count for _, count in steps if count > 1}
    assert len(counts) == 1 and len(steps) > 2
    assert all(0 <= done < count for done, count in steps)
    memory = backend.worker.memory().result()
    assert memory.weights > 0 and memory.adapters > 0 and memory.arenas > 0


def test_what_listeners_are_too_slow_for_is_dropped_and_counted() -> None:
    gate, heard = threading.Event(), []

    def slow(call: Call | Refused) -> None:
        gate.wait()
        heard.append(call)

    notifier = Notifier(slow, waiting_max=4)
    for number in range(20):
        notifier(Refused("GET /", 400, str(number)))
    gate.set()
    notifier.close()
    assert 4 <= len(heard) <= 5 and notifier.dropped == 20 - len(heard)
    assert [one.detail for one in heard] == [str(n) for n in range(len(heard))]


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    notifier = Notifier(lambda _: 1 // 0, heard.append)
    notifier(Refused("GET /", 400, "why"))
    notifier.close()
    assert len(heard) == 1 and "could not be shown" in caplog.text
