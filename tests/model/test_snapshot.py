"""A snapshot shares the adapter's weights, and a change of either is never seen by the other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.tiny_models import call, datum, loaded, randomize, tokens_of
from tinsmith import _core

pytestmark = pytest.mark.usefixtures("on")  # every test on every device
ADAM = {
    "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
    "grad_clip_norm": 0.0,
}  # fmt: skip


def adapter_of(seed: int = 0) -> _core.Adapter:
    return randomize(_core.Adapter(loaded("qwen3").core, rank=4, alpha=8.0), seed)


def train(adapter: _core.Adapter) -> None:
    call(adapter, [datum(tokens_of("qwen3", 20))])
    adapter.optim_step(**ADAM, normalization=None)


def write(adapter: _core.Adapter) -> None:
    adapter.write("weights", np.full(adapter.size, 0.25, np.float32))


def follow(adapter: _core.Adapter) -> None:
    adapter.ema_update(adapter_of(seed=9), 0.5)


def drawn(sampler: _core.Sampler, adapter: _core.Adapter) -> list[int]:
    sampler.add(0, tokens_of("qwen3", 7), adapter, max_tokens=12, seed=3)
    while not sampler.step()[1]:
        pass
    return sampler.take(0)["samples"][0]["tokens"].tolist()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("change", [train, write, follow])
def test_what_changes_the_adapter_leaves_its_snapshots(
    change: Callable[[_core.Adapter], None], count: int
) -> None:
    adapter, lone = adapter_of(), adapter_of()
    for _ in range(3):
        before = adapter.read("weights")
        snapshots = [adapter.snapshot() for _ in range(count)]
        change(adapter)
        change(lone)
        for snapshot in snapshots:
            np.testing.assert_array_equal(snapshot.read("weights"), before)
        assert np.abs(adapter.read("weights") - before).max() > (0 if change is write else 1e-3)
        for vector in ("weights", "gradients", "m", "v"):
            np.testing.assert_array_equal(adapter.read(vector), lone.read(vector))
        if change is write:
            return


@pytest.mark.parametrize("change", [write, follow])
def test_what_changes_a_snapshot_leaves_the_adapter_and_the_other_ones(
    change: Callable[[_core.Adapter], None],
) -> None:
    adapter = adapter_of()
    before = adapter.read("weights")
    average, other = adapter.snapshot(), adapter.snapshot()
    further = average.snapshot()
    change(average)
    assert np.abs(average.read("weights") - before).max() > 1e-3
    for one in (adapter, other, further):
        np.testing.assert_array_equal(one.read("weights"), before)


def test_a_snapshot_outlives_the_adapter() -> None:
    adapter = adapter_of()
    before, snapshot = adapter.read("weights"), adapter.snapshot()
    train(adapter)
    del adapter
    np.testing.assert_array_equal(snapshot.read("weights"), before)


def test_only_what_is_not_shared_takes_memory() -> None:
    adapter = adapter_of()
    weights, alone = 4 * adapter.size, adapter.bytes
    snapshot = adapter.snapshot()
    assert snapshot.bytes == pytest.approx(weights, abs=512)
    assert adapter.bytes == alone  # the place for its next weights counts as the snapshot's
    del snapshot
    assert adapter.bytes == pytest.approx(alone + weights, abs=512)  # which it keeps
    adapter.snapshot()
    assert adapter.bytes == pytest.approx(alone + weights, abs=512)


def test_a_step_that_was_recorded_is_not_replayed_on_other_weights() -> None:
    adapter, sampler = adapter_of(), _core.Sampler(loaded("qwen3").core, tokens=512)
    for seed in range(3):
        for _ in range(2):  # the second time a step comes, it is recorded
            found = drawn(sampler, adapter)
        assert found == drawn(_core.Sampler(loaded("qwen3").core, tokens=512), adapter)
        held: Any = adapter.snapshot()
        assert found == drawn(sampler, held)
        adapter.write("weights", adapter_of(seed=seed + 5).read("weights"))
