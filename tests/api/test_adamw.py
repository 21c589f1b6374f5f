"""What users are promised of optim_step: torch's AdamW, settings of each step, sums over any number
of calls, clipping, the metrics, and that a gradient that is not finite harms nobody."""

import numpy as np
import pytest
import torch
from support.op_devices import device
from support.tiny_models import call as train
from support.tiny_models import cut, datum, error, loaded, randomize, tokens_of
from tinsmith import _core

ADAM = {
    "learning_rate": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
FUSED = ("cpu-avx2", "cpu-avx512", "cuda-emulated")


def adapter_of(rank: int = 5) -> _core.Adapter:
    return randomize(_core.Adapter(loaded("qwen3").core, rank=rank, alpha=8.0), 0)


def torchs(adapter: _core.Adapter) -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
    """torch's AdamW on the adapter's weights, in one vector of float32."""
    weights = torch.nn.Parameter(torch.from_numpy(adapter.read("weights")))
    return weights, torch.optim.AdamW([weights], foreach=False)


def torch_step(
    weights: torch.nn.Parameter, optimizer: torch.optim.AdamW, gradient: np.ndarray, **o: float
) -> None:
    optimizer.param_groups[0].update(
        lr=o["learning_rate"],
        betas=(o["beta1"], o["beta2"]),
        eps=o["eps"],
        weight_decay=o["weight_decay"],
    )
    weights.grad = torch.from_numpy(gradient.copy())
    if o["grad_clip_norm"]:
        torch.nn.utils.clip_grad_norm_([weights], o["grad_clip_norm"])
    optimizer.step()


@pytest.mark.parametrize("name", FUSED)
def test_the_moments_are_torchs_to_the_last_bit(name: str) -> None:
    dev = device(name)
    rng, n = np.random.default_rng(0), 4099
    w = rng.standard_normal(n).astype(np.float32)
    ours = {"w": w, "m": np.zeros(n, np.float32), "v": np.zeros(n, np.float32)}
    scalars = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    weights = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([weights], foreach=False)
    options = {"learning_rate": 3e-3, "grad_clip_norm": 0.0, **scalars}
    for step in range(1, 21):
        g = rng.standard_normal(n).astype(np.float32)
        ours = dev.call(
            "adamw",
            **ours | {"w": "before", "before": ours["w"]},
            g=g,
            n=n,
            step=step,
            scale=1.0,
            **scalars,
        )
        torch_step(weights, optimizer, g, **options)
    state = optimizer.state[weights]
    np.testing.assert_array_equal(ours["m"], state["exp_avg"].numpy())
    np.testing.assert_array_equal(ours["v"], state["exp_avg_sq"].numpy())
    same = ours["w"] == weights.detach().numpy()  # torch's square root is not always the nearest
    assert same.mean() > 0.97
    np.testing.assert_allclose(ours["w"], weights.detach().numpy(), rtol=0, atol=1e-6)


def test_settings_are_those_of_each_step() -> None:
    adapter, rng = adapter_of(), np.random.default_rng(0)
    weights, optimizer = torchs(adapter)
    changes = [
        {},
        {"learning_rate": 0.01, "beta1": 0.8},
        {"beta2": 0.99, "weight_decay": 0.2},
        {"eps": 0.1, "grad_clip_norm": 0.3},
        {"learning_rate": 0.0},
        {"learning_rate": 0.005, "weight_decay": 0.01, "grad_clip_norm": 50.0},
    ]
    for change in changes:
        gradient = rng.standard_normal(adapter.size).astype(np.float32)
        adapter.write("gradients", gradient)
        adapter.optim_step(**{**ADAM, **change})
        torch_step(weights, optimizer, gradient, **{**ADAM, **change})
        assert error(adapter.read("weights"), weights.detach().numpy()) < 1e-6
    state = optimizer.state[weights]
    assert error(adapter.read("m"), state["exp_avg"].numpy()) < 1e-6
    assert error(adapter.read("v"), state["exp_avg_sq"].numpy()) < 1e-6


def test_any_number_of_calls_add_up() -> None:
    data = [datum(tokens_of("qwen3", length)) for length in (5, 9, 2, 14, 7, 1, 30)]
    adapter, total = adapter_of(), 0.0
    gradients = np.zeros(adapter.size)
    for one in data:
        alone = adapter_of()
        train(alone, [one])
        gradients += alone.read("gradients")
        total += train(adapter, [one])[1]
    assert error(adapter.read("gradients"), gradients) < 1e-6
    assert adapter.pending == (pytest.approx(total), sum(len(one.tokens) for one in data), 7)
    report = adapter.optim_step(**ADAM)
    assert report["grad_norm"] == pytest.approx(np.linalg.norm(gradients), rel=1e-6)
    assert adapter.pending == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("clip", [0.0, 0.25, 1e9])
def test_the_metrics_are_what_they_say(clip: float) -> None:
    adapter, data = adapter_of(), [datum(tokens_of("qwen3", 20))]
    train(adapter, data)
    gradient = adapter.read("gradients").astype(np.float64)
    norm = np.linalg.norm(gradient)
    report = adapter.optim_step(**{**ADAM, "grad_clip_norm": clip})
    assert norm > 0.25
    assert report["grad_norm"] == pytest.approx(norm, rel=1e-6)
    wanted = clip if 0 < clip < norm else norm
    assert report["grad_norm_clipped"] == pytest.approx(wanted, rel=1e-5)
    weights = adapter.read("weights").astype(np.float64)
    assert report["weight_norm"] == pytest.approx(np.linalg.norm(weights), rel=1e-9)
    matrices = cut(adapter, adapter.read("m")).values()
    first_moment = np.sqrt(sum((matrix.astype(float) ** 2).sum() for matrix in matrices))
    assert first_moment == pytest.approx(0.1 * wanted, rel=1e-5)


def test_others_do_not_notice_a_gradient_that_is_not_finite() -> None:
    data = [datum(tokens_of("qwen3", 20))]
    alone, beside, bad = adapter_of(), adapter_of(), adapter_of(3)
    for adapter in (alone, beside):
        train(adapter, data)
    train(bad, data)
    before = {what: bad.read(what) for what in ("weights", "m", "v")}
    with pytest.raises(FloatingPointError, match="the gradient of this batch is not finite"):
        train(bad, [datum(one.tokens, weights=np.full(20, 3e38)) for one in data])
    for what, old in before.items():
        np.testing.assert_array_equal(bad.read(what), old)
    for adapter in (alone, beside):
        adapter.optim_step(**ADAM)
    np.testing.assert_array_equal(beside.read("weights"), alone.read("weights"))
    train(bad, data)  # and it goes on
    assert bad.optim_step(**ADAM)["grad_norm"] > 0
