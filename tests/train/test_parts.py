"""A call's gradient is eight parts, summed as a fixed tree: whoever computes them, in any order and
however often, the gradients, losses and log-probabilities have the bits of one call."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.distill_cases import Pair, distill, pair
from support.tiny_models import SPECS, Datum, call, loaded, loaded_on, randomize
from support.training_cases import ADAM, CONFIG, adapter_of, advantaged, batch, soft
from test_jsd_topk import taught
from tinsmith import _core

NAME = "qwen3"
LENGTHS = (9, 3, 70, 5, 12, 30, 1, 44, 8, 21, 17, 2, 60, 33)
LOSSES = [row["name"] for row in _core.losses()]
ROWS_DATA: dict[str, Callable[[], list[Datum]]] = {
    "cross_entropy": lambda: [*batch(NAME, LENGTHS), soft(NAME, 8, 3)],
    "generalized_jsd": lambda: [taught(NAME, length, 4) for length in LENGTHS],
}


def lengths_of(data: Sequence[Any]) -> np.ndarray:
    return np.array([len(one.tokens) for one in data], np.int32)


def state(adapter: _core.Adapter) -> list[Any]:
    return [adapter.read("gradients").tobytes(), adapter.pending]


def by_replicas(
    adapter: _core.Adapter,
    helpers: Sequence[_core.Adapter],
    data: Sequence[Any],
    work: Callable[..., Any],
    order: random.Random,
) -> tuple[Any, float]:
    """A call whose parts are computed by any helper, in any order, some of them twice."""
    cuts = adapter.parts(lengths_of(data))
    results: dict[int, Any] = {}
    parts = [part for part, (first, last) in enumerate(cuts) if first < last]
    order.shuffle(parts)
    for part in parts:
        first, last = cuts[part]
        helper, lost = order.choice([adapter, *helpers]), order.choice(helpers)
        if helper is not lost and order.random() < 0.3:  # another one is lost after its work
            work(lost, data[first:last], part=part)
            lost.drop_parts()
        results[part] = work(helper, data[first:last], part=part)[0]
        if helper is not adapter:
            node = _core.PARTS + part
            adapter.put_part(node, *helper.take_part(node))
    for part, (first, last) in enumerate(cuts):
        if first == last:
            adapter.put_part(_core.PARTS + part, None, 0.0, 0.0, 0.0)
    total = adapter.end_parts()
    return [row for part in sorted(results) for row in results[part]], total


def test_the_cut_covers_all_datums_once_and_evens_out_rows() -> None:
    adapter = adapter_of(NAME, step_tokens=32)
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 90, rng.integers(1, 60)).astype(np.int32)
        cuts = adapter.parts(lengths)
        assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
        assert cuts[-1][1] == len(lengths) and len(cuts) == _core.PARTS == 8
        rows = [int(lengths[first:last].sum()) for first, last in cuts]
        micro = max(32, int(lengths.max()))
        assert max(rows) <= lengths.sum() / 8 + micro
        assert cuts == by_hand(lengths.tolist())
    with pytest.raises(ValueError, match="datum 1 has 0 tokens"):
        adapter.parts(np.array([3, 0], np.int32))


def by_hand(lengths: list[int], step: int = 32) -> list[tuple[int, int]]:
    """Micro-batches of whole datums; each is of the part that its middle row is in."""
    total, row, micro = sum(lengths), 0, [[0]]
    for index in range(1, len(lengths)):
        full = sum(lengths[one] for one in micro[-1]) + lengths[index] > step
        micro.append([index]) if full else micro[-1].append(index)
    parts: list[list[int]] = [[] for _ in range(8)]
    for datums in micro:
        rows = sum(lengths[one] for one in datums)
        parts[int((row + rows / 2) * 8 / total)] += datums
        row += rows
    ends = [0, *itertools.accumulate(len(part) for part in parts)]
    return list(itertools.pairwise(ends))


def test_a_gradient_is_the_tree_of_its_parts_gradients() -> None:
    """As NumPy sums it."""
    adapter, data = adapter_of(NAME, step_tokens=16), batch(NAME, LENGTHS)
    call(adapter, data)
    helper, sums = adapter.snapshot(), []
    for part, (first, last) in enumerate(adapter.parts(lengths_of(data))):
        call(helper, data[first:last], part=part)
        sums.append(helper.take_part(_core.PARTS + part)[0])
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert np.array_equal(adapter.read("gradients"), sums[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_any_replicas_give_the_bits_of_one_for_each_loss(loss: str) -> None:
    data = ROWS_DATA[loss]() if loss in ROWS_DATA else advantaged(NAME, LENGTHS)

    def work(adapter: _core.Adapter, some: Sequence[Datum], **options: Any) -> Any:
        return call(adapter, some, loss, CONFIG.get(loss, {}), **options)

    check(lambda: adapter_of(NAME, step_tokens=16), data, work)


@pytest.mark.parametrize("name", SPECS)
def test_any_replicas_give_the_bits_of_one_for_each_kind_of_layer(name: str) -> None:
    check(lambda: adapter_of(name, step_tokens=24), batch(name, LENGTHS), call)


@pytest.mark.parametrize("weights", ("int8", "int4", "nf4", "q4_k"))
def test_any_replicas_give_the_bits_of_one_with_packed_weights(weights: str) -> None:
    core = loaded_on(NAME, "cpu", weights).core
    check(
        lambda: randomize(_core.Adapter(core, rank=5, step_tokens=24)), batch(NAME, LENGTHS), call
    )


@pytest.mark.usefixtures("on")
def test_any_replicas_give_the_bits_of_one_on_each_device() -> None:
    check(lambda: adapter_of(NAME, step_tokens=1), batch(NAME, LENGTHS[:7]), call, rounds=1)


@pytest.mark.parametrize("rank", (1, 32))
@pytest.mark.parametrize("step_tokens", (1, 40, 100, 10_000))
def test_any_replicas_give_the_bits_of_one_for_each_step_and_rank(
    step_tokens: int, rank: int
) -> None:
    check(lambda: adapter_of(NAME, rank=rank, step_tokens=step_tokens), batch(NAME, LENGTHS), call)


def test_any_replicas_give_the_bits_of_one_with_a_teacher() -> None:
    data = [pair(NAME, 1 + length % 11, length, 1 + length % 7, seed=length) for length in LENGTHS]

    def work(adapter: _core.Adapter, some: Sequence[Pair], **options: Any) -> Any:
        logprobs, divergences, loss = distill(adapter, some, **options)
        return list(zip(logprobs, divergences, strict=True)), loss

    check(lambda: adapter_of(NAME, step_tokens=16), data, work)


def check(
    make: Callable[[], _core.Adapter], data: Sequence[Any], work: Any, rounds: int = 3
) -> None:
    """One call, then gradients that follow others', and an optimizer's step."""
    whole = make()
    wanted = []
    for _ in range(2):
        rows, total = work(whole, data)
        wanted.append(([np.asarray(row).tobytes() for row in rows], total, state(whole)))
    whole.optim_step(**ADAM, normalization="num_loss_tokens")
    for seed in range(rounds):
        order, owner = random.Random(seed), make()
        helpers = [make() for _ in range(1 + seed * 2)]
        for expected in wanted:
            rows, total = by_replicas(owner, helpers, data, work, order)
            found = [np.asarray(row).tobytes() for row in rows], total, state(owner)
            assert found == expected
        owner.optim_step(**ADAM, normalization="num_loss_tokens")
        assert owner.read("weights").tobytes() == whole.read("weights").tobytes()


def test_the_loss_of_a_forward_is_the_loss_of_a_forward_backward() -> None:
    data, adapter = batch(NAME, LENGTHS), adapter_of(NAME, step_tokens=8)
    assert call(adapter, data, backward=False)[1] == call(adapter, data)[1]


def test_siblings_are_summed_at_once_so_that_one_vector_travels() -> None:
    adapter, data = adapter_of(NAME, step_tokens=1), batch(NAME, (3,) * 16)
    cuts = adapter.parts(lengths_of(data))
    for part in (2, 0, 3):
        call_part(adapter, data, cuts, part)
    assert isinstance(adapter.take_part(5)[0], np.ndarray)  # 2 and 3
    with pytest.raises(ValueError, match="node 10 is not known"):
        adapter.take_part(10)
    assert isinstance(adapter.take_part(8)[0], np.ndarray)  # 0 alone


def call_part(
    adapter: _core.Adapter, data: Sequence[Datum], cuts: Sequence[tuple[int, int]], part: int
) -> None:
    arrays = data[slice(*cuts[part])]
    adapter.forward_backward(
        np.concatenate([one.tokens for one in arrays]),
        lengths_of(arrays),
        np.concatenate([one.targets for one in arrays]),
        np.ones(len(arrays), np.int32),
        "cross_entropy",
        {"weights": np.concatenate([one.inputs["weights"] for one in arrays])},
        {},
        part=part,
    )


def test_what_can_not_be_summed_is_refused() -> None:
    adapter, data = adapter_of(NAME, step_tokens=1), batch(NAME, (3,) * 16)
    cuts, before = adapter.parts(lengths_of(data)), state(adapter)
    call_part(adapter, data, cuts, 4)
    with pytest.raises(ValueError, match="node 12, or a part of it, was summed before"):
        call_part(adapter, data, cuts, 4)
    with pytest.raises(ValueError, match="node 6, or a part of it"):
        adapter.put_part(6, None, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="node is 1 to 15, not 16"):
        adapter.put_part(16, None, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="vector has 3 numbers"):
        adapter.put_part(8, np.zeros(3, np.float32), 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="part must be 0 to 7"):
        call_part(adapter, data, [(0, 1)] * 9, 8)
    with pytest.raises(ValueError, match="the sum of node 1 is not known"):
        adapter.end_parts()
    with pytest.raises(ValueError, match=r"parts of another call wait: end_parts\(\) adds them"):
        call(adapter, data)
    adapter.drop_parts()
    assert state(adapter) == before
    huge = np.full(adapter.size, 3e38, np.float32)
    adapter.put_part(1, huge, 1.0, 1.0, 1.0)
    with pytest.raises(FloatingPointError, match=r"not finite; this batch.s was dropped"):
        adapter.end_parts()
    assert state(adapter) == before
    call(adapter, data)


def test_a_snapshot_computes_parts_but_has_no_gradients() -> None:
    adapter, data = adapter_of(NAME, step_tokens=1), batch(NAME, (3,) * 16)
    snapshot, cuts = adapter.snapshot(), adapter.parts(lengths_of(data))
    assert snapshot.stamp == adapter.stamp and snapshot.bytes < adapter.bytes
    for one in (snapshot, adapter):
        call_part(one, data, cuts, 3)
    (mine, *told), (own, *wanted) = snapshot.take_part(11), adapter.take_part(11)
    assert mine is not None and own is not None
    assert mine.tobytes() == own.tobytes() and told == wanted
    snapshot.put_part(1, mine, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="it can be sampled from, not trained"):
        snapshot.end_parts()
    snapshot.drop_parts()
    before = adapter.stamp
    call(adapter, data)
    assert adapter.stamp == before
    adapter.optim_step(**ADAM)
    assert adapter.stamp != before == snapshot.stamp


def test_memory_of_gradients_is_shared_and_given_back() -> None:
    """A vector is taken for a call's gradients, and waits for the next call after the step."""
    model = loaded(NAME).core
    model.trim()
    adapter = randomize(_core.Adapter(model, rank=64, step_tokens=1))
    one = -(-4 * adapter.size // 256) * 256
    assert adapter.bytes == 3 * one
    data = batch(NAME, (3,) * 16)
    call(adapter, data)
    assert adapter.bytes == 4 * one  # with gradients
    held = model.training_bytes
    adapter.optim_step(**ADAM)
    assert adapter.bytes == 3 * one and model.training_bytes == held + one
    other = randomize(_core.Adapter(model, rank=64, step_tokens=1))
    assert model.training_bytes <= held + one
    before = call(other, data)[1]
    model.trim()
    assert model.training_bytes == 0
    assert call(other, data)[1] == before
