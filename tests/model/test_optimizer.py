"""optim_step against torch's AdamW: ten steps of losses, norms and matrices, on every device."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from support.tiny_models import (
    assert_near,
    call,
    cut,
    datum,
    error,
    tokens_of,
)
from support.training_cases import ADAM, adapter_of, batch, torch_losses

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"grad_clip_norm": 0.5}, {"grad_clip_norm": 1e6, "eps": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("name", ("qwen3", "llama-tied"))
def test_ten_steps_equal_torch(name: str, options: dict[str, float]) -> None:
    settings = ADAM | options
    data = [replace(one, inputs={}) for one in batch(name)]
    adapter = adapter_of(name, rank=4)
    start = adapter_of(name, rank=4)
    torchs = functools.cache(functools.partial(torch_losses, name, start, data, 10, settings))
    losses, norms = [], []
    for step in range(10):
        losses.append(call(adapter, data)[1])
        norms.append(adapter.optim_step(**settings)["grad_norm"])
        assert adapter.step == step + 1
    assert losses[9] < 0.9 * losses[0]  # it learned: the losses could have differed
    assert_near(losses, lambda dtype: torchs(dtype)[0], f32_error=1e-4)
    assert_near(norms, lambda dtype: torchs(dtype)[1], f32_error=1e-4)
    for key, matrix in cut(adapter, adapter.read("weights")).items():
        assert_near(matrix, lambda dtype, key=key: torchs(dtype)[2][key], key, f32_error=1e-3)


@pytest.mark.parametrize(("mode", "divisor"), [("num_loss_tokens", 9), ("num_sequences", 2)])
def test_normalization_divides_the_gradients(mode: str, divisor: int) -> None:
    counts = (4, 0, 5)  # tokens with a gradient, of three sequences in two calls
    data = []
    for count, one in zip(counts, batch("qwen3", (10, 6, 12)), strict=True):
        weights = np.zeros(one.targets.shape, np.float32)
        weights[:count] = 2
        data.append(replace(one, inputs={"weights": weights}))
    divided, scaled = adapter_of("qwen3"), adapter_of("qwen3")
    for part in (data[:1], data[1:]):
        call(divided, part)
        call(scaled, part)
    scaled.write("gradients", (scaled.read("gradients") / np.float32(divisor)).astype(np.float32))
    options = ADAM | {"grad_clip_norm": 0.01, "eps": 0.1}  # so that the gradient's size matters
    report = divided.optim_step(**options, normalization=mode)
    wanted = scaled.optim_step(**options)
    assert report["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
    assert (report["loss_tokens"], report["loss_sequences"]) == (9, 2)
    start = adapter_of("qwen3").read("weights")
    assert error(divided.read("weights") - start, scaled.read("weights") - start) < 1e-4


def test_several_targets_count_as_one_token() -> None:
    adapter = adapter_of("qwen3")
    weights = np.zeros((6, 3), np.float32)
    weights[2], weights[4, 1] = 1, -1
    call(adapter, [datum(tokens_of("qwen3", 6), np.ones((6, 3)), weights=weights)])
    report = adapter.optim_step(**ADAM)
    assert (report["loss_tokens"], report["loss_sequences"]) == (2, 1)


def test_a_step_without_gradients_only_decays() -> None:
    adapter = adapter_of("qwen3")
    before = adapter.read("weights")
    report = adapter.optim_step(**ADAM | {"weight_decay": 0.5}, normalization="num_loss_tokens")
    assert not any(report[key] for key in ("grad_norm", "loss_tokens", "loss_sequences"))
    np.testing.assert_allclose(adapter.read("weights"), before * (1 - 0.002 * 0.5), rtol=1e-6)


def test_a_step_clears_the_gradients() -> None:
    adapter = adapter_of("qwen3")
    call(adapter, batch("qwen3"))
    adapter.optim_step(**ADAM)
    assert not adapter.read("gradients").any()
    call(adapter, batch("qwen3"))
    adapter.clear_gradients()
    assert not adapter.read("gradients").any()
    assert adapter.optim_step(**ADAM)["loss_tokens"] == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", -1.0), ("learning_rate", float("nan")), ("beta1", 1.0), ("beta2", -0.1),
        ("eps", float("inf")), ("weight_decay", -1.0), ("grad_clip_norm", float("nan")),
    ],
)  # fmt: skip
def test_a_bad_optimizer_setting_is_named(key: str, value: float) -> None:
    adapter = adapter_of("qwen3")
    call(adapter, batch("qwen3"))
    before = [adapter.read(what) for what in ("weights", "gradients", "m", "v")]
    with pytest.raises(ValueError, match=key):
        adapter.optim_step(**ADAM | {key: value})
    with pytest.raises(ValueError, match="num_loss_tokens"):
        adapter.optim_step(**ADAM, normalization="by_magic")
    after = [adapter.read(what) for what in ("weights", "gradients", "m", "v")]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert adapter.step == 0


KEPT = ("weights", "gradients", "m", "v")


def state_of(adapter) -> list:
    """All that a step may change."""
    return [adapter.read(what).tobytes() for what in KEPT] + [adapter.step, adapter.pending]


def spoilt(adapter, options: dict) -> None:
    """Gives the last parameter the gradient or the first moment that the options name."""
    for what, key in (("gradients", "gradient"), ("m", "m")):
        if key in options:
            values = adapter.read(what)
            values[-1] = options[key]
            adapter.write(what, values)
            adapter.write("v", np.zeros_like(values))


@pytest.mark.parametrize("shared", (False, True), ids=("alone", "beside a snapshot"))
@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e38},
        {"learning_rate": 1e300},
        {"weight_decay": 1e300},
        {"eps": 0.0, "gradient": 1e-30},  # its square is 0 in float32
        {"gradient": 1e25},  # its square is not finite, and it would not move the weight
        {"m": 3e38},
        {"m": -3e38, "gradient": 3e38},
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_leaves_all_as_it_was(options: dict, shared: bool) -> None:
    adapter, other = adapter_of("qwen3"), adapter_of("qwen3")
    for one in (adapter, other):
        call(one, batch("qwen3"))
        one.optim_step(**ADAM)
        call(one, batch("qwen3"))
    spoilt(adapter, options)
    before, settings = state_of(adapter), ADAM | {k: v for k, v in options.items() if k in ADAM}
    copy = adapter.snapshot() if shared else None
    with pytest.raises(FloatingPointError, match=r"learning_rate .* was not taken"):
        adapter.optim_step(**settings)
    assert state_of(adapter) == before
    if copy is not None:
        assert copy.read("weights").tobytes() == before[0]
    if not {"gradient", "m"} & set(options):  # and it goes on as if it had not been asked
        assert adapter.optim_step(**ADAM) == other.optim_step(**ADAM)
        assert state_of(adapter) == state_of(other)


def test_eps_zero_leaves_a_weight_alone_that_never_had_a_gradient() -> None:
    adapter = adapter_of("qwen3")
    call(adapter, batch("qwen3"))
    gradient, before = adapter.read("gradients"), adapter.read("weights")
    gradient[::2] = 0.0
    adapter.write("gradients", gradient)
    report = adapter.optim_step(**ADAM | {"eps": 0.0})
    after = adapter.read("weights")
    np.testing.assert_array_equal(after[::2], before[::2])
    moved = gradient != 0
    np.testing.assert_allclose(
        (after - before)[moved], -ADAM["learning_rate"] * np.sign(gradient[moved]), rtol=1e-3
    )
    assert report["weight_norm"] == pytest.approx(np.linalg.norm(after.astype(float)), rel=1e-9)


def test_weights_of_which_no_average_is_finite_are_refused() -> None:
    adapter, other = adapter_of("qwen3"), adapter_of("qwen3")
    before = adapter.read("weights")
    large = np.zeros(adapter.size, np.float32)
    large[:2] = 7e37  # each is less than 2^126
    with pytest.raises(ValueError, match=r"the weights' norm is 9\.\d+e\+37; it should be below 8"):
        adapter.write("weights", large)
    np.testing.assert_array_equal(adapter.read("weights"), before)
    large[1] = 0
    adapter.write("weights", large)
    other.write("weights", -large)
    adapter.ema_update(other, 0.5)
    assert np.isfinite(adapter.read("weights")).all()


def test_gradients_whose_sum_overflows_are_dropped_by_the_call_that_brings_them() -> None:
    adapter, data = adapter_of("qwen3"), batch("qwen3")
    call(adapter, data)
    signs = np.where(adapter.read("gradients") < 0, -1, 1)
    adapter.write("gradients", (3.4e38 * signs).astype(np.float32))
    before = state_of(adapter)
    huge = [datum(one.tokens, weights=np.full(len(one.tokens), 1e36)) for one in data]
    with pytest.raises(FloatingPointError, match="the sum of this batch's gradient and"):
        call(adapter, huge)
    assert state_of(adapter) == before
    call(adapter, data)  # a small one brings no finite number to infinity
    assert np.isfinite(adapter.read("gradients")).all()


def test_a_run_of_the_most_steps_takes_no_other() -> None:
    adapter = adapter_of("qwen3")
    adapter.step = 2**31 - 1
    before = state_of(adapter)
    with pytest.raises(ValueError, match="2147483647 steps"):
        adapter.optim_step(**ADAM)
    assert state_of(adapter) == before
