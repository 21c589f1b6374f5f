"""A forward that is kept, and the backward that follows it: bit for bit what one call does."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from conftest import logprobs, make_datum
from support.midway import interrupt_midway
from support.op_devices import emulated_library, kernels_given
from support.tiny_models import Datum, datum, folder, loaded, randomize, tokens_of
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.training import Batch, BatchResult, KeptForward, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model

ADAM = {
    "learning_rate": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01,
    "grad_clip_norm": 0.0,
}  # fmt: skip
LENGTHS = (23, 1, 40, 7, 65)
KEPT = {  # what of five datums stays in memory: options of the adapter, and what is computed again
    "one micro-batch, kept": {},
    "many, the first kept": {"step_tokens": 30, "keep_bytes": 0},
    "many, some kept": {"step_tokens": 30, "keep_bytes": 500_000},
    "many, all kept": {"step_tokens": 30},
    "one row each": {"step_tokens": 1},
}


def adapter_of(name: str = "qwen3", **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, **{"rank": 5, "alpha": 8.0, **options}), 0)


def arrays(data: list[Datum]) -> tuple[np.ndarray, ...]:
    return (
        np.concatenate([one.tokens for one in data]),
        np.array([len(one.tokens) for one in data], np.int32),
        np.concatenate([one.targets.ravel() for one in data]),
        np.array([one.targets[0].size for one in data], np.int32),
    )


def few() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """A batch for the emulated card, and its gradients."""
    data = [datum(tokens_of("qwen3", length)) for length in (5, 1, 7)]
    return arrays(data), np.linspace(-1, 1, 13, dtype=np.float32)


def batch(name: str = "qwen3") -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Sequences, one with three targets a token, and gradients of which a third are zero."""
    rng = np.random.default_rng(0)
    data = [datum(tokens_of(name, length)) for length in LENGTHS]
    data[2] = datum(data[2].tokens, rng.integers(0, 80, (LENGTHS[2], 3)))
    flat = arrays(data)
    dlogp = rng.normal(size=flat[2].size) * (rng.random(flat[2].size) > 1 / 3)
    dlogp[: LENGTHS[0]] = 0.0  # the first datum has none
    return flat, dlogp.astype(np.float32)


def state(adapter: _core.Adapter) -> dict[str, Any]:
    kinds = ("weights", "gradients", "m", "v")
    return {kind: adapter.read(kind).tobytes() for kind in kinds} | {"pending": adapter.pending}


def two_forwards(
    adapter: _core.Adapter, flat: tuple[np.ndarray, ...], dlogp: np.ndarray
) -> tuple[np.ndarray, float]:
    return adapter.forward_backward(*flat, "cross_entropy", {"weights": -dlogp}, {})


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("name", ["qwen3", "llama-tied", "qwen3_5"])
def test_forward_and_backward_equal_forward_backward(name: str, options: dict[str, int]) -> None:
    flat, dlogp = batch(name)
    once = adapter_of(name, **options)
    logp, loss = two_forwards(once, flat, dlogp)
    assert np.any(once.read("gradients"))
    halves = adapter_of(name, **options)
    assert halves.forward(*flat, keep=True).tobytes() == logp.tobytes()
    assert not np.any(halves.read("gradients"))
    assert halves.backward(dlogp) == loss
    assert state(halves) == state(once)
    for adapter in (once, halves):  # and what follows is the same too
        two_forwards(adapter, flat, dlogp)
        adapter.optim_step(**ADAM)
    assert state(halves) == state(once)


@pytest.mark.parametrize("options", [{}, {"step_tokens": 8, "keep_bytes": 0}], ids=str)
def test_the_cuda_kernels_do_the_same(options: dict[str, int]) -> None:
    """On the emulator: bf16 activations, a stream, and memory that is poison when it is new."""
    emulated_library()
    core = load_model(folder("qwen3"), device="cuda-emulated").core
    flat, dlogp = few()
    dlogp[6] = 0.0
    once, halves = (
        randomize(_core.Adapter(core, rank=3, alpha=8.0, **options), 0) for _ in range(2)
    )
    logp, loss = two_forwards(once, flat, dlogp)
    assert halves.forward(*flat, keep=True).tobytes() == logp.tobytes()
    assert halves.backward(dlogp) == loss
    assert np.any(once.read("gradients")) and state(halves) == state(once)


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_calls_in_between_change_nothing(options: dict[str, int]) -> None:
    flat, dlogp = batch()
    other = arrays([datum(tokens_of("qwen3", 31, 5))])
    wanted, found = adapter_of(**options), adapter_of(**options)
    found.forward(*flat, keep=True)
    for adapter in (wanted, found):
        adapter.forward_backward(*other, "cross_entropy", {}, {})
        adapter.forward(*other)
        adapter.clear_gradients()
        adapter.forward_backward(*other, "cross_entropy", {}, {})
    two_forwards(wanted, flat, dlogp)
    found.backward(dlogp)
    assert state(found) == state(wanted)


def test_a_kept_forward_is_not_run_again() -> None:
    """On the emulated card, which counts its kernels."""
    emulated_library()
    flat, dlogp = few()
    adapter = _core.Adapter(load_model(folder("qwen3"), device="cuda-emulated").core, rank=3)

    def kernels(work: Callable[[], object]) -> int:
        before = kernels_given()
        work()
        return kernels_given() - before

    forward = kernels(lambda: adapter.forward(*flat, keep=True))
    backward = kernels(lambda: adapter.backward(dlogp))
    adapter.forward(*flat, keep=True)
    adapter.forward(*flat)  # takes the memory
    again = kernels(lambda: adapter.backward(dlogp))
    assert again - backward > 0.8 * forward > 0  # the head's own part is run in each


def test_the_arrays_may_change_after_the_forward() -> None:
    flat, dlogp = batch()
    wanted, found = adapter_of(step_tokens=30), adapter_of(step_tokens=30)
    two_forwards(wanted, flat, dlogp)
    found.forward(*flat, keep=True)
    for array in flat:
        array[:] = 1
    ones = [np.ones_like(array) for array in flat for _ in range(100)]  # where copies of them were
    found.backward(dlogp)
    assert state(found) == state(wanted) and len(ones) == 400


def test_the_newest_kept_forward_counts() -> None:
    flat, dlogp = batch()
    other = arrays([datum(tokens_of("qwen3", 31, 5))])
    wanted, found = adapter_of(), adapter_of()
    two_forwards(wanted, flat, dlogp)
    found.forward(*other, keep=True)
    found.forward(*flat, keep=True)
    found.forward_backward(*other, "cross_entropy", {}, {}, backward=False)
    found.backward(dlogp)
    assert state(found) == state(wanted)


def test_forward_says_the_loss_and_keeps_too() -> None:
    flat, dlogp = batch()
    inputs = {"weights": -dlogp}
    adapter = adapter_of()
    wanted = adapter.forward_backward(*flat, "cross_entropy", inputs, {}, backward=False)
    found = adapter.forward_backward(*flat, "cross_entropy", inputs, {}, backward=False, keep=True)
    assert found[0].tobytes() == wanted[0].tobytes()
    assert found[1] == wanted[1]
    assert adapter.backward(dlogp) == wanted[1]
    with pytest.raises(ValueError, match="keep=True goes with backward=False"):
        adapter.forward_backward(*flat, "cross_entropy", inputs, {}, keep=True)


def test_a_gradient_of_zeros_is_none() -> None:
    flat, dlogp = batch()
    adapter = adapter_of()
    adapter.forward(*flat, keep=True)
    assert adapter.backward(np.zeros_like(dlogp)) == 0.0
    assert not np.any(adapter.read("gradients"))
    assert adapter.pending == (0.0, 0.0, 0.0)


def step(adapter: _core.Adapter) -> None:
    adapter.optim_step(**ADAM)


def write(adapter: _core.Adapter) -> None:
    adapter.write("weights", adapter.read("weights"))


def use_up(adapter: _core.Adapter) -> None:
    adapter.backward(batch()[1])


def nothing(adapter: _core.Adapter) -> None:
    """No forward at all."""


@pytest.mark.parametrize("change", [step, write, use_up, nothing])
def test_backward_needs_a_kept_forward(change: Callable[[_core.Adapter], None]) -> None:
    flat, dlogp = batch()
    adapter = adapter_of()
    if change is not nothing:
        adapter.forward(*flat, keep=True)
    change(adapter)
    adapter.forward(*flat)
    before = state(adapter)
    with pytest.raises(ValueError, match="there is no kept forward to go back from"):
        adapter.backward(dlogp)
    assert state(adapter) == before


@pytest.mark.parametrize(
    ("bad", "error", "sentence"),
    [
        (lambda d: d[:-1], ValueError, r"dlogprobs has 215 numbers for 216 targets"),
        (lambda d: d.astype(np.float64), TypeError, "dlogprobs must be a one-dimensional float32"),
        (
            lambda d: np.where(np.arange(d.size) == 30, np.float32(np.nan), d),
            ValueError,
            r"datum 2: dlogprobs at position 2 is nan; it must be finite",
        ),
        (
            lambda d: np.full_like(d, 3e38),
            FloatingPointError,
            "the gradient of this batch is not finite; it was dropped",
        ),
    ],
    ids=["short", "float64", "nan", "overflow"],
)
def test_a_bad_gradient_is_refused_and_a_good_one_may_follow(
    bad: Callable[[np.ndarray], np.ndarray], error: type[Exception], sentence: str
) -> None:
    flat, dlogp = batch()
    adapter, wanted = adapter_of(), adapter_of()
    adapter.forward(*flat, keep=True)
    before = state(adapter)
    with pytest.raises(error, match=sentence):
        adapter.backward(bad(dlogp))
    assert state(adapter) == before
    adapter.backward(dlogp)
    two_forwards(wanted, flat, dlogp)
    assert state(adapter) == state(wanted)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_an_interrupt_leaves_all_as_it_was(half: str) -> None:
    flat, dlogp = batch()
    long, gradient = tuple(np.tile(array, 40) for array in flat), np.tile(dlogp, 40)
    adapter, wanted = adapter_of(step_tokens=50), adapter_of(step_tokens=50)
    before = state(adapter)

    def begin() -> None:
        adapter.clear_gradients()
        adapter.forward(*(flat if half == "forward" else long), keep=True)

    def call() -> None:
        if half == "forward":
            adapter.forward(*long, keep=True)
        else:
            adapter.backward(gradient)

    interrupt_midway(adapter, begin, call)
    assert state(adapter) == before
    kept = (flat, dlogp) if half == "forward" else (long, gradient)
    adapter.backward(kept[1])
    two_forwards(wanted, *kept)
    assert state(adapter) == state(wanted)


def test_a_snapshot_keeps_nothing() -> None:
    flat, dlogp = batch()
    snapshot = adapter_of().snapshot()
    assert snapshot.forward(*flat).tobytes() == adapter_of().forward(*flat).tobytes()
    with pytest.raises(ValueError, match="this adapter is a snapshot"):
        snapshot.forward(*flat, keep=True)
    with pytest.raises(ValueError, match="this adapter is a snapshot"):
        snapshot.backward(dlogp)


def test_a_refused_step_leaves_the_kept_forward() -> None:
    flat, dlogp = batch()
    adapter, wanted = adapter_of(), adapter_of()
    adapter.forward(*flat, keep=True)
    adapter.write("gradients", np.full(adapter.size, 3e38, np.float32))
    with pytest.raises(ValueError, match="beta1"):
        adapter.optim_step(**{**ADAM, "beta1": 1.0})
    adapter.clear_gradients()
    adapter.backward(dlogp)
    two_forwards(wanted, flat, dlogp)
    assert state(adapter) == state(wanted)


@pytest.mark.parametrize(
    "groups", [{"attn": True}, {"mlp": True}, {"unembed": True}, {"attn": True, "unembed": True}]
)
def test_groups_of_matrices(groups: dict[str, bool]) -> None:
    flat, dlogp = batch()
    options = {"attn": False, "mlp": False, "unembed": False, **groups}
    once, halves = adapter_of(**options), adapter_of(**options)
    for _ in range(2):
        two_forwards(once, flat, dlogp)
        halves.forward(*flat, keep=True)
        halves.backward(dlogp)
    assert state(halves) == state(once)


def test_adapters_of_a_model_keep_their_own() -> None:
    flat, dlogp = batch()
    found = [adapter_of(rank=rank) for rank in (2, 7)]
    for adapter in found:
        adapter.forward(*flat, keep=True)
    for adapter in found:
        adapter.backward(dlogp)
    for adapter, rank in itertools.zip_longest(found, (2, 7)):
        wanted = adapter_of(rank=rank)
        two_forwards(wanted, flat, dlogp)
        assert state(adapter) == state(wanted)


# ---- the two requests of forward_backward_custom ----


def batch_of(data: list[Datum], loss: str = "cross_entropy", **inputs: np.ndarray) -> Batch:
    return Batch(*arrays(data), loss, inputs, {}, tuple(one.targets.shape for one in data))


def pair(weights: bool = True) -> tuple[Batch, Batch]:
    """What the SDK sends: a forward with weights of zero, then weights of any sign."""
    rng = np.random.default_rng(3)
    data = [datum(rng.integers(0, 290, length)) for length in LENGTHS]
    data[1] = datum(data[1].tokens, rng.integers(0, 290, (LENGTHS[1], 4)))
    size = sum(one.targets.size for one in data)
    second = {"weights": rng.normal(size=size).astype(np.float32)} if weights else {}
    return batch_of(data, weights=np.zeros(size, np.float32)), batch_of(data, **second)


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path) -> Iterator[tuple[Worker, Worker]]:
    base = inspect_models({"tiny": tiny_model_dir})
    both = tuple(Worker(base, threads=1, keep_forwards=keep) for keep in (True, False))
    yield both
    for worker in both:
        worker.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each kept forward was used by the request after it."""
    told: list[bool] = []
    serves = KeptForward.serves

    def spy(self: KeptForward, seq: int, batch: Batch) -> bool:
        told.append(serves(self, seq, batch))
        return told[-1]

    monkeypatch.setattr(KeptForward, "serves", spy)
    return told


def results(worker: Worker, run: str, requests: list[tuple[Any, ...]]) -> list[Any]:
    """Runs them on a new run of that name; ends with what the weights then are."""
    futures = [worker.create(run, "tiny", LoraSpec(rank=4, seed=1))]
    for seq, (batch, backward) in enumerate(requests, 1):
        if batch is None:
            futures.append(worker.submit(run, seq, OptimJob(AdamParams(learning_rate=0.01))))
        else:
            futures.append(worker.submit(run, seq, TrainJob(batch, backward=backward)))
    futures.append(worker.submit(run, len(requests) + 1, TrainJob(pair()[0], backward=False)))
    found = []
    for future in futures:
        result = future.result(timeout=60)
        if isinstance(result, BatchResult):
            found.append((result.loss, [part.tobytes() for part in result.logprobs]))
        else:
            found.append(result)
    worker.forget([run], [])
    return found


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "no weights"])
def test_a_pair_gives_the_same_with_one_forward(
    workers: tuple[Worker, Worker], served: list[bool], weights: bool
) -> None:
    first, second = pair(weights)
    step = (None, True)
    requests = [(first, False), (second, True), (first, False), (second, True), step] * 2
    kept = results(workers[0], f"pair {weights}", requests)
    assert served == [True] * 4
    assert results(workers[1], f"pair {weights}", requests) == kept


OTHER = batch_of([datum(np.arange(9))], weights=np.ones(9, np.float32))


@pytest.mark.parametrize(
    ("between", "change"),
    [
        ([], {"tokens": np.roll(pair()[1].tokens, 1)}),
        ([], {"targets": np.roll(pair()[1].targets, 1)}),
        ([], {"lengths": np.array([22, 2, 40, 7, 65], np.int32)}),
        ([(OTHER, False)], {}),
        ([(OTHER, True)], {}),
        ([(None, True)], {}),
    ],
    ids=["tokens", "targets", "lengths", "a forward", "a backward", "a step"],
)
def test_other_data_and_later_requests_are_no_pair(
    workers: tuple[Worker, Worker],
    served: list[bool],
    request: pytest.FixtureRequest,
    between: list[Any],
    change: dict[str, Any],
) -> None:
    first, second = pair()
    if "lengths" in change:  # one target each, so that the sizes agree
        data = [datum(tokens_of("qwen3", length)) for length in LENGTHS]
        first = second = batch_of(data, weights=np.ones(sum(LENGTHS), np.float32))
    name = request.node.name
    requests = [(first, False), *between, (replace(second, **change), True), (None, True)]
    kept = results(workers[0], name, requests)
    assert True not in served
    assert results(workers[1], name, requests) == kept


def test_the_sdks_custom_loss_runs_one_forward(service_client: Any, served: list[bool]) -> None:
    data = [
        make_datum([5, 6, 7, 8], [6, 7, 8, 9], weights=[0, 1, 1, 1]),
        make_datum([5, 9, 3], [9, 3, 4], weights=[0, 1, 1]),
    ]

    def margin(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        sums = [
            (one.loss_fn_inputs["weights"].to_torch() * logp).sum()
            for one, logp in zip(data, logprobs, strict=True)
        ]
        loss = -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1]))
        return loss, {"margin": float((sums[0] - sums[1]).detach())}

    one, two = (
        service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
        for _ in range(2)
    )
    found = one.forward_backward_custom(data, margin).result()
    assert served == [True]
    outputs = two.forward(data, "cross_entropy").result()
    parts = [torch.from_numpy(part).requires_grad_() for part in logprobs(outputs)]
    loss, metrics = margin(data, parts)
    loss.backward()
    surrogate = [
        make_datum(
            item.model_input.to_ints(),
            item.loss_fn_inputs["target_tokens"].to_numpy(),
            weights=-part.grad.numpy(),
        )
        for item, part in zip(data, parts, strict=True)
    ]
    two.forward(data[:1], "cross_entropy").result()
    two.forward_backward(surrogate, "cross_entropy").result()
    assert True not in served[1:]
    assert found.metrics["loss:sum"] == float(loss.detach())
    assert found.metrics["margin"] == metrics["margin"]
    assert [part.tobytes() for part in logprobs(found)] == [
        part.tobytes() for part in logprobs(outputs)
    ]
    adam = tinker.AdamParams(learning_rate=0.01)
    steps = [client.optim_step(adam).result().metrics for client in (one, two)]
    assert steps[0] == steps[1]
    after = [logprobs(client.forward(data, "cross_entropy").result()) for client in (one, two)]
    for left, right in zip(*after, strict=True):
        assert left.tobytes() == right.tobytes()
