"""Others' work between the micro-batches of a training call: samples, trains and saves others, and
changes no bit of the call or of what they get; a call that it ends has not happened."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.distill_cases import distill, pair
from support.tiny_models import Datum, call, folder, randomize, tokens_of
from support.training_cases import ADAM, adapter_of, advantaged, batch, soft
from test_jsd_topk import taught
from tinsmith import _core
from tinsmith.models.registry import load_model
from tinsmith.system.steps import finish

NAME = "qwen3"
LENGTHS = (9, 3, 70, 5, 12)
DATA: dict[str, Callable[[], list[Datum]]] = {
    "cross_entropy": lambda: [*batch(NAME, LENGTHS), soft(NAME, 8, 3)],
    "generalized_jsd": lambda: [taught(NAME, length, 4) for length in LENGTHS],
}
LOSSES = [row["name"] for row in _core.losses()]


class Others:
    """What shares a model with a training call. Each time it is called it takes a step of sampling
    (the base model, a run's weights, its snapshot) and trains another adapter."""

    def __init__(self, trained: _core.Adapter):
        self.core = trained.model
        self.trained = trained
        self.other = randomize(_core.Adapter(self.core, rank=3, step_tokens=4), 7)
        self.sampler = _core.Sampler(self.core, tokens=2048)
        self.calls, self.results = 0, {}
        before = trained.snapshot()
        for number, adapter in enumerate((None, before, self.other.snapshot(), before)):
            prompt = tokens_of(NAME, 40 + 30 * number, number)
            options: dict[str, Any] = {"seed": number, "max_tokens": 4, "num_samples": 2}
            if number == 3:
                options |= {"prompt_logprobs": True, "topk_prompt": 3, "topk_sample": 2}
            self.sampler.add(number, prompt, adapter, **options)

    def __call__(self, *_: int) -> None:
        self.calls += 1
        self.step()
        call(self.other, batch(NAME, (5, 30, 4)), between=self.step)
        self.other.optim_step(**ADAM)
        assert np.isfinite(self.trained.read("gradients")).all() and self.trained.bytes > 0

    def step(self, *_: int) -> None:
        for number in self.sampler.step()[1]:
            self.results[number] = self.sampler.take(number)

    def finish(self) -> list[Any]:
        """All that they got."""
        while len(self.results) < 4:
            self.step()
        return [
            [flat(self.results[number]) for number in range(4)],
            self.other.read("weights").tobytes(),
            self.other.step,
        ]


def flat(result: Any) -> Any:
    """A sampler's result in a form that can be compared."""
    if isinstance(result, dict):
        return {key: flat(value) for key, value in result.items()}
    if isinstance(result, list):
        return [flat(item) for item in result]
    return result.tobytes() if isinstance(result, np.ndarray) else result


def state(adapter: _core.Adapter) -> list[Any]:
    vectors = [adapter.read(what).tobytes() for what in ("weights", "gradients", "m", "v")]
    return [*vectors, adapter.step, adapter.pending]


def check(make: Callable[[], _core.Adapter], work: Callable[..., Any], least: int) -> None:
    """Work on an adapter, with others' between its micro-batches and without."""
    alone, shared = make(), make()
    wanted = [flat(list(work(alone))), state(alone)]
    others = Others(shared)
    assert [flat(list(work(shared, between=others))), state(shared)] == wanted
    assert others.calls >= least
    undisturbed = Others(make())
    for _ in range(others.calls):
        undisturbed()
    assert others.finish() == undisturbed.finish()


@pytest.mark.usefixtures("on")
def test_on_every_device_no_bit_depends_on_others() -> None:
    data = batch(NAME, (9, 3))
    check(lambda: adapter_of(NAME, step_tokens=1), lambda a, **o: call(a, data, **o), 1)


@pytest.mark.parametrize("backward", (True, False))
@pytest.mark.parametrize("loss", LOSSES)
def test_no_bit_of_a_loss_or_of_others_results_depends_on_the_other(
    loss: str, backward: bool
) -> None:
    data = DATA[loss]() if loss in DATA else advantaged(NAME, LENGTHS)
    config = {"beta": 0.3} if loss == "dro" else {}

    def work(adapter: _core.Adapter, **options: Any) -> Any:
        call(adapter, data[:2], loss, config)  # there are gradients already
        return call(adapter, data, loss, config, backward=backward, **options)

    check(lambda: adapter_of(NAME, step_tokens=1), work, len(data) - 1)


@pytest.mark.parametrize("teacher", ("the base", "itself", "its past", "another", "another model"))
def test_no_bit_of_a_loss_with_a_teacher_depends_on_others(teacher: str) -> None:
    data = [pair(NAME, 5, 21, 60), pair(NAME, 66, 9, 0, seed=1), pair(NAME, 3, 1, 2, seed=2)]

    def work(adapter: _core.Adapter, **options: Any) -> Any:
        teachers: dict[str, Callable[[], Any]] = {
            "the base": lambda: None,
            "itself": lambda: adapter,
            "its past": adapter.snapshot,
            "another": lambda: adapter_of(NAME, seed=3, rank=2).snapshot(),
            "another model": lambda: load_model(folder(NAME), threads=1).core,
        }
        return distill(adapter, data, teacher=teachers[teacher](), **options)

    check(lambda: adapter_of(NAME, step_tokens=1), work, 2)


@pytest.mark.parametrize("keep_bytes", (0, 500_000, 4 << 30))
def test_no_bit_of_a_forward_and_its_backward_depends_on_others(keep_bytes: int) -> None:
    """Others also work between the two, while activations are kept."""
    data = batch(NAME, LENGTHS)
    arrays = (
        np.concatenate([one.tokens for one in data]),
        np.array(LENGTHS, np.int32),
        np.concatenate([one.targets for one in data]),
        np.ones(len(data), np.int32),
    )
    weights = np.concatenate([one.inputs["weights"] for one in data])

    def work(adapter: _core.Adapter, between: Callable[..., Any] = lambda *_: None) -> Any:
        logprobs = finish(adapter.forward(*arrays, keep=True, stepwise=True), between)
        between()
        return logprobs, finish(adapter.backward(-weights, stepwise=True), between)

    check(lambda: adapter_of(NAME, step_tokens=1, keep_bytes=keep_bytes), work, 2 * len(data) - 1)


@pytest.mark.parametrize("at", range(3))
def test_an_exception_of_others_ends_the_call_which_has_not_happened(at: int) -> None:
    adapter, calls, data = adapter_of(NAME, step_tokens=1), [], batch(NAME, (9, 3, 7, 5))
    call(adapter, data)
    before = state(adapter)

    def between(*_: int) -> None:
        calls.append(1)
        if len(calls) == at + 1:
            raise LookupError("enough")

    for work in (call, lambda *_, **o: distill(adapter, [pair(NAME, 3, 2, 2)] * 4, **o)):
        calls.clear()
        with pytest.raises(LookupError, match="enough"):
            work(adapter, data, between=between)
        assert state(adapter) == before and len(calls) == at + 1
    other = adapter_of(NAME, step_tokens=1)
    call(other, data)
    assert call(adapter, data)[1] == call(other, data)[1]
    assert state(adapter) == state(other)


def test_a_call_that_is_refused_between_two_micro_batches_changes_nothing() -> None:
    """Not even what the outer call lets in from then on."""
    adapter, wanted = (adapter_of(NAME, step_tokens=1) for _ in range(2))
    data, calls = batch(NAME, (9, 3, 7, 5)), []

    def between(*_: Any) -> None:
        calls.append(len(calls))
        with pytest.raises(ValueError, match="another call on this adapter has more"):
            call(adapter, data, between=lambda *_: calls.clear())

    call(wanted, data)
    call(adapter, data, between=between)
    assert len(calls) == len(data) - 1
    assert state(adapter) == state(wanted)


def test_an_interrupt_between_two_micro_batches_ends_the_call() -> None:
    adapter = adapter_of(NAME, step_tokens=1)
    before = state(adapter)
    with pytest.raises(KeyboardInterrupt, match="interrupted"):
        call(adapter, batch(NAME, (9, 3)), between=lambda *_: adapter.interrupt())
    assert state(adapter) == before


def test_a_failure_after_others_have_worked_adds_nothing() -> None:
    adapter, data = adapter_of(NAME, step_tokens=1), batch(NAME, (9, 3, 7))
    before = state(adapter)
    data[2].inputs["weights"][:] = 3e38
    others = Others(adapter)
    with pytest.raises(FloatingPointError):
        call(adapter, data, between=others)
    assert others.calls == 2 and state(adapter) == before


def test_a_kept_forward_outlives_a_backward_that_others_ended() -> None:
    adapter, wanted = (adapter_of(NAME, step_tokens=1) for _ in range(2))
    ids, lengths = tokens_of(NAME, 20), np.array([12, 8], np.int32)
    gradient = np.linspace(-1, 1, 20, dtype=np.float32)
    for one in (adapter, wanted):
        one.forward(ids, lengths, ids, np.ones(2, np.int32), keep=True)
    with pytest.raises(ZeroDivisionError):
        finish(adapter.backward(gradient, stepwise=True), lambda *_: 1 // 0)
    assert adapter.backward(gradient) == wanted.backward(gradient)
    assert state(adapter) == state(wanted)


def test_others_may_not_use_the_adapter_of_the_call() -> None:
    adapter, data = adapter_of(NAME, step_tokens=1), batch(NAME, (9, 3))
    before = adapter.read("gradients").tobytes()
    for work, told in (
        (lambda *_: call(adapter, data), "another call on this adapter"),
        (lambda *_: distill(adapter, [pair(NAME, 3, 2, 2)]), "another call on this adapter"),
        (lambda *_: adapter.write("weights", adapter.read("weights")), "the weights changed"),
    ):
        with pytest.raises(ValueError, match=told):
            call(adapter, data, between=work)
        assert adapter.read("gradients").tobytes() == before
    assert call(adapter, data)[1] == call(adapter_of(NAME), data)[1]


@pytest.mark.parametrize(("step_tokens", "count"), [(136, 1), (135, 2), (30, 4), (23, 5)])
def test_a_micro_batch_has_as_many_tokens_as_it_may(step_tokens: int, count: int) -> None:
    seen: list[tuple[int, int]] = []
    adapter = adapter_of(NAME, step_tokens=step_tokens)
    call(adapter, batch(NAME, (23, 1, 40, 7, 65)), between=lambda *done: seen.append(done))
    assert seen == [(done, count) for done in range(1, count)]
