"""Gradients, losses and optimizer steps against autograd, PEFT and torch's AdamW in float64."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import (
    SPECS,
    Datum,
    call,
    cut,
    datum,
    error,
    folder,
    loaded,
    logprobs,
    randomize,
    targets_of,
    tokens_of,
    with_peft,
)
from tinsmith import _core
from tinsmith.families import load_model

ADAM = {
    "learning_rate": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
GROUPS = ("attn", "mlp", "unembed")
ENDS = ("low", "high")
KEYS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
POLICY = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def adapter_of(name: str, *, seed: int = 0, **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, **{"rank": 5, "alpha": 8.0, **options}), seed)


def batch(name: str, lengths: Sequence[int] = (23, 1, 40, 7), seed: int = 0) -> list[Datum]:
    """Sequences with weights of any sign, a third of them zero."""
    rng = np.random.default_rng(seed)
    data = [datum(tokens_of(name, length, seed)) for length in lengths]
    return [weighted(one, rng) for one in data]


def weighted(one: Datum, rng: np.random.Generator) -> Datum:
    weights = rng.normal(size=one.targets.shape) * (rng.random(one.targets.shape) > 1 / 3)
    return replace(one, inputs={"weights": weights.astype(np.float32)})


def advantaged(name: str, lengths: Sequence[int] = (23, 1, 40), seed: int = 0) -> list[Datum]:
    """Sequences for the policy losses: ratios from about 0.3 to 3, some advantages zero."""
    rng = np.random.default_rng(seed)
    data = [datum(tokens_of(name, length, seed)) for length in lengths]
    adapter = adapter_of(name, rank=5)
    now, _ = call(adapter, data, backward=False)
    return [
        replace(
            one,
            inputs={
                "logprobs": (logp + rng.normal(0, 0.6, logp.shape)).astype(np.float32),
                "advantages": (rng.normal(size=logp.shape) * (rng.random(logp.shape) > 0.3)).astype(
                    np.float32
                ),
            },
        )
        for one, logp in zip(data, now, strict=True)
    ]


# ---- the reference ----


def loss_of(
    table: torch.Tensor, one: Datum, loss: str, config: dict[str, float] | None = None
) -> torch.Tensor:
    """A datum's loss as Tinker's documents write it."""
    logp = targets_of(table, one)
    inputs = {
        name: torch.from_numpy(array.astype(np.float64)) for name, array in one.inputs.items()
    }
    if loss == "cross_entropy":
        return -(inputs.get("weights", torch.ones_like(logp)) * logp).sum()
    q, advantage = inputs["logprobs"], inputs["advantages"]
    if loss == "dro":
        assert config is not None
        return -(logp * advantage - 0.5 * config["beta"] * (logp - q) ** 2).sum()
    ratio = torch.exp(logp - q)
    if loss == "importance_sampling":
        return -(ratio * advantage).sum()
    if loss == "gspo":
        used = inputs.get("sequence_ratio_mask", advantage) != 0
        if not used.any():
            return 0.0 * logp.sum()
        ratio = torch.exp((logp - q)[used].mean().detach() + logp - logp.detach())
    keys = KEYS[loss] | (config or {})
    low, high = (inputs.get(f"clip_{end}_threshold", keys[f"clip_{end}_threshold"]) for end in ENDS)
    clipped = torch.clamp(ratio, torch.as_tensor(low), torch.as_tensor(high))
    if loss == "cispo":
        return -(clipped.detach() * logp * advantage).sum()
    return -torch.minimum(ratio * advantage, clipped * advantage).sum()


def check(
    name: str,
    adapter: _core.Adapter,
    data: list[Datum],
    loss: str = "cross_entropy",
    config: dict[str, float] | None = None,
) -> None:
    """One forward_backward: log-probabilities, loss and the gradient of each matrix."""
    found, total = call(adapter, data, loss, config)
    model = with_peft(name, adapter)
    tables = [logprobs(model, one.tokens) for one in data]
    losses = [loss_of(table, one, loss, config) for table, one in zip(tables, data, strict=True)]
    sum(losses).backward()
    values = [float(item.detach()) for item in losses]
    for logp, table, one in zip(found, tables, data, strict=True):
        assert logp.shape == one.targets.shape
        assert error(logp, targets_of(table, one).detach()) < 1e-5
    assert total == pytest.approx(sum(values), abs=1e-5 * sum(map(abs, values)))
    parameters = dict(model.named_parameters())
    for key, gradient in cut(adapter, adapter.read("gradients")).items():
        wanted = parameters[key].grad.numpy().T
        assert np.linalg.norm(wanted) > 0, key
        assert error(gradient, wanted) < 1e-4, key


# ---- gradients ----


@pytest.mark.parametrize("name", SPECS)
def test_every_gradient_equals_autograd(name: str) -> None:
    check(name, adapter_of(name), batch(name))


@pytest.mark.parametrize("name", ("llama", "llama-tied"))
def test_gradients_at_positions_that_rope_scaling_reaches(name: str) -> None:
    check(name, adapter_of(name, rank=2), batch(name, (150,)))


@pytest.mark.parametrize("rank", (1, 8, 32))
def test_every_rank(rank: int) -> None:
    check("qwen3", adapter_of("qwen3", rank=rank, alpha=32.0), batch("qwen3"))


@pytest.mark.parametrize(
    "groups", [one for size in (1, 2) for one in itertools.combinations(GROUPS, size)]
)
@pytest.mark.parametrize("name", ("qwen3", "qwen2-tied"))
def test_groups_of_matrices(name: str, groups: tuple[str, ...]) -> None:
    adapter = adapter_of(name, rank=3, **{group: group in groups for group in GROUPS})
    slots = {
        "attn": {"wq", "wk", "wv", "wo"},
        "mlp": {"w_gate", "w_up", "w_down"},
        "unembed": {"head"},
    }
    assert {slot for slot, *_ in adapter.layout} == set().union(*(slots[one] for one in groups))
    assert sum(rows * cols for *_, rows, cols in adapter.layout) == adapter.size
    check(name, adapter, batch(name))


def test_a_new_adapter_has_gradients_of_b_alone() -> None:
    adapter = _core.Adapter(loaded("qwen3").core, rank=4)
    call(adapter, batch("qwen3"))
    for key, gradient in cut(adapter, adapter.read("gradients")).items():
        assert gradient.any() == ("lora_B" in key), key


def test_finite_differences() -> None:
    adapter = adapter_of("llama", rank=4)
    data = batch("llama")
    call(adapter, data)
    gradient = adapter.read("gradients").astype(np.float64)
    weights = adapter.read("weights")
    rng = np.random.default_rng(1)
    for _ in range(3):
        direction = rng.normal(size=adapter.size) + 3 * np.sign(gradient)  # not at a right angle
        direction *= 0.002 / np.linalg.norm(direction)
        sides = []
        for sign in (1, -1):
            adapter.write("weights", (weights + sign * direction).astype(np.float32))
            sides.append(call(adapter, data, backward=False)[1])
        slope = (sides[0] - sides[1]) / 2
        assert slope == pytest.approx(gradient @ direction, rel=5e-3)


def test_forward_alone_gives_the_same_and_no_gradients() -> None:
    adapter = adapter_of("qwen3")
    data = batch("qwen3")
    forward, loss = call(adapter, data, backward=False)
    assert not adapter.read("gradients").any()
    both, loss_again = call(adapter, data)
    assert loss == loss_again
    for one, other in zip(forward, both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_the_same_each_time() -> None:
    gradients = []
    for _ in range(2):
        adapter = adapter_of("qwen2")
        call(adapter, batch("qwen2"))
        gradients.append(adapter.read("gradients"))
    np.testing.assert_array_equal(*gradients)


def test_threads_change_nothing() -> None:
    data = batch("llama", (150, 23, 1, 140, 60))
    results = []
    for threads in (1, 2, 3):
        core = load_model(folder("llama"), threads=threads).core
        adapter = randomize(_core.Adapter(core, rank=8, step_tokens=200))
        logp, _ = call(adapter, data)
        adapter.optim_step(**ADAM)
        results.append(np.concatenate([*logp, adapter.read("weights")]))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


# ---- losses ----


def soft(name: str, length: int, targets: int, seed: int = 0) -> Datum:
    """A datum with K targets a token, some of them the same id twice, some rows all zero."""
    rng = np.random.default_rng([seed, length, targets])
    vocab = SPECS[name].config["vocab_size"]
    ids = rng.integers(0, vocab, (length, targets))
    if targets > 1:
        ids[::2, 1] = ids[::2, 0]
    one = weighted(datum(tokens_of(name, length, seed), ids), rng)
    one.inputs["weights"][::3] = 0
    return one


@pytest.mark.parametrize("targets", (1, 2, 20, 107))
def test_cross_entropy_with_many_targets(targets: int) -> None:
    check("llama", adapter_of("llama"), [soft("llama", 30, targets), soft("llama", 2, targets)])


def test_datums_of_different_k_are_what_they_are_alone() -> None:
    data = [soft("qwen3", 20, 3), *batch("qwen3", (11,)), soft("qwen3", 9, 20), soft("qwen3", 5, 1)]
    check("qwen3", adapter_of("qwen3"), data)
    together, _ = call(adapter_of("qwen3"), data, backward=False)
    for one, found in zip(data, together, strict=True):
        (alone,), _ = call(adapter_of("qwen3"), [one], backward=False)
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("targets", (None, 4))
def test_missing_weights_are_ones(targets: int | None) -> None:
    shape = (25,) if targets is None else (25, targets)
    ids = np.random.default_rng(0).integers(0, 100, shape)
    one = datum(tokens_of("qwen3", 25), ids)
    check("qwen3", adapter_of("qwen3"), [one])
    missing, ones = adapter_of("qwen3"), adapter_of("qwen3")
    found = call(missing, [one])
    wanted = call(ones, [replace(one, inputs={"weights": np.ones(shape, np.float32)})])
    assert found[1] == wanted[1]
    np.testing.assert_array_equal(missing.read("gradients"), ones.read("gradients"))


def test_weights_of_zero_give_no_gradient() -> None:
    adapter = adapter_of("qwen3")
    data = [replace(one, inputs={"weights": np.zeros(one.targets.shape)}) for one in batch("qwen3")]
    _, loss = call(adapter, data)
    assert loss == 0 and not adapter.read("gradients").any()


def test_k_of_one_is_the_plain_loss() -> None:
    plain, wide = adapter_of("qwen3"), adapter_of("qwen3")
    data = batch("qwen3")
    columns = [
        Datum(one.tokens, one.targets[:, None], {"weights": one.inputs["weights"][:, None]})
        for one in data
    ]
    assert call(plain, data)[1] == call(wide, columns)[1]
    np.testing.assert_array_equal(plain.read("gradients"), wide.read("gradients"))


def config_of(loss: str) -> dict[str, float]:
    """What a loss must be told."""
    return {"beta": 0.3} if loss == "dro" else {}


def with_thresholds(data: list[Datum]) -> list[Datum]:
    """Clip thresholds of their own for each token."""
    rng = np.random.default_rng(3)
    return [
        replace(
            one,
            inputs=one.inputs
            | {
                "clip_low_threshold": rng.uniform(0.3, 1, one.targets.shape).astype(np.float32),
                "clip_high_threshold": rng.uniform(1, 2, one.targets.shape).astype(np.float32),
            },
        )
        for one in data
    ]


@pytest.mark.parametrize("loss", POLICY)
@pytest.mark.parametrize("name", ("qwen3", "llama"))
def test_policy_losses(name: str, loss: str) -> None:
    check(name, adapter_of(name), advantaged(name), loss, config_of(loss))


@pytest.mark.parametrize("loss", POLICY)
def test_a_policy_losses_gradient_is_its_slope(loss: str) -> None:
    """Central differences of the loss where what it holds constant is held constant."""
    adapter, data, config = adapter_of("qwen3"), advantaged("qwen3"), config_of(loss)
    start, _ = call(adapter, data, loss, config)
    gradient = adapter.read("gradients").astype(np.float64)
    weights = adapter.read("weights")

    def held(logp: list[np.ndarray]) -> float:
        total = 0.0
        for one, now, then in zip(data, logp, start, strict=True):
            now, then = now.astype(np.float64), then.astype(np.float64)
            q, advantage = one.inputs["logprobs"].astype(np.float64), one.inputs["advantages"]
            ratio = np.exp(now - q)
            if loss == "gspo":
                used = advantage != 0
                ratio = np.exp((then - q)[used].mean() + now - then) if used.any() else ratio
            keys = KEYS.get(loss, KEYS["ppo"])
            low, high = (keys[f"clip_{end}_threshold"] for end in ENDS)
            total -= {
                "importance_sampling": ratio * advantage,
                "ppo": np.minimum(ratio * advantage, ratio.clip(low, high) * advantage),
                "gspo": np.minimum(ratio * advantage, ratio.clip(low, high) * advantage),
                "cispo": np.exp(then - q).clip(low, high) * now * advantage,
                "dro": now * advantage - 0.15 * (now - q) ** 2,
            }[loss].sum()
        return total

    direction = np.random.default_rng(1).normal(size=adapter.size) + 3 * np.sign(gradient)
    direction *= 0.002 / np.linalg.norm(direction)
    sides = []
    for sign in (1, -1):
        adapter.write("weights", (weights + sign * direction).astype(np.float32))
        sides.append(held(call(adapter, data, loss, config, backward=False)[0]))
    assert (sides[0] - sides[1]) / 2 == pytest.approx(gradient @ direction, rel=5e-3)


@pytest.mark.parametrize("loss", ("ppo", "cispo", "gspo"))
def test_clip_thresholds_of_each_token(loss: str) -> None:
    data = with_thresholds(advantaged("qwen3", (60, 9)))
    check("qwen3", adapter_of("qwen3"), data, loss)
    constant = [
        replace(one, inputs=one.inputs | {key: np.full(one.targets.shape, value, np.float32)
                                          for key, value in KEYS[loss].items()})
        for one in data
    ]  # fmt: skip
    given, default = adapter_of("qwen3"), adapter_of("qwen3")
    wanted = call(default, advantaged("qwen3", (60, 9)), loss)
    assert call(given, constant, loss)[1] == wanted[1]
    np.testing.assert_array_equal(given.read("gradients"), default.read("gradients"))


def masked(data: list[Datum]) -> list[Datum]:
    rng = np.random.default_rng(4)
    masks = [(rng.random(one.targets.shape) > 0.4).astype(np.float32) for one in data]
    for mask in masks:
        mask[0] = 1  # at least one
    return [
        replace(one, inputs=one.inputs | {"sequence_ratio_mask": mask})
        for one, mask in zip(data, masks, strict=True)
    ]


@pytest.mark.parametrize("groups", ({}, {"unembed": False}))
def test_gspo_with_masks_and_thresholds(groups: dict[str, bool]) -> None:
    data = with_thresholds(masked(advantaged("qwen3", (23, 1, 60, 5))))
    check("qwen3", adapter_of("qwen3", **groups), data, "gspo")


def test_gspo_sees_whole_datums_however_the_batch_is_cut() -> None:
    """Wide clips, so that every ratio counts; the head sees 512 rows at most, micro-batches 41."""
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    data = advantaged("qwen3", (150, 23, 1, 140, 60, 155, 150, 40))
    whole, split = adapter_of("qwen3"), adapter_of("qwen3", step_tokens=41)
    wanted, total = call(whole, data, "gspo", config)
    found, split_total = call(split, data, "gspo", config)
    assert split_total == pytest.approx(total, rel=1e-6)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert error(split.read("gradients"), whole.read("gradients")) < 1e-6
    check("qwen3", adapter_of("qwen3"), data, "gspo", config)
    forward = call(whole, data, "gspo", config, backward=False)
    assert forward[1] == total


def test_ppo_clips_on_both_sides_and_only_there() -> None:
    data = advantaged("qwen3", (60,))
    (logp,), _ = call(adapter_of("qwen3"), data, "ppo", backward=False)
    ratio = np.exp(logp - data[0].inputs["logprobs"])
    advantage = data[0].inputs["advantages"]
    cases = [
        (ratio > 1.2) & (advantage > 0),
        (ratio > 1.2) & (advantage < 0),
        (ratio < 0.8) & (advantage > 0),
        (ratio < 0.8) & (advantage < 0),
        (ratio < 1.2) & (ratio > 0.8) & (advantage != 0),
        advantage == 0,
    ]
    for case in cases:
        assert case.sum() >= 2  # all of them are in the data
        kept = {"advantages": np.where(case, advantage, 0), "logprobs": data[0].inputs["logprobs"]}
        adapter = adapter_of("qwen3")
        call(adapter, [replace(data[0], inputs=kept)], "ppo")
        clipped = case is cases[0] or case is cases[3] or case is cases[5]
        assert adapter.read("gradients").any() != clipped
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    check("qwen3", adapter_of("qwen3"), data, "ppo", config)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    free, importance = adapter_of("qwen3"), adapter_of("qwen3")
    call(free, data, "ppo", wide)
    call(importance, data, "importance_sampling")
    np.testing.assert_array_equal(free.read("gradients"), importance.read("gradients"))


def test_the_table_of_losses_is_tinkers() -> None:
    table = {row["name"]: row for row in _core.losses()}
    assert set(table) >= {"cross_entropy", *POLICY}
    assert table["cross_entropy"]["multi"] and not table["ppo"]["multi"]
    assert table["cross_entropy"]["inputs"] == [
        {"name": "weights", "required": False, "fallback": None, "default": 1.0}
    ]
    for name in POLICY:
        required = [item["name"] for item in table[name]["inputs"] if item["required"]]
        assert required == ["logprobs", "advantages"]
    for name, keys in KEYS.items():
        assert table[name]["config"] == keys
        assert {item["fallback"] for item in table[name]["inputs"]} >= set(keys)
    assert table["dro"]["config"] == {"beta": None}


# ---- batches ----


@pytest.mark.parametrize("rows", (1, 16, 41, 64))
def test_a_split_batch_equals_a_whole_one(rows: int) -> None:
    data = [*batch("qwen3", (23, 1, 40, 7, 16, 2)), soft("qwen3", 12, 6)]
    whole, split = adapter_of("qwen3"), adapter_of("qwen3", step_tokens=rows)
    wanted, total = call(whole, data)
    found, split_total = call(split, data)
    assert split_total == pytest.approx(total, rel=1e-6)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert error(split.read("gradients"), whole.read("gradients")) < 1e-6


def test_two_calls_add_up_to_one() -> None:
    data = batch("llama", (23, 1, 40, 7))
    once, twice = adapter_of("llama"), adapter_of("llama")
    call(once, data)
    losses = [call(twice, data[:2])[1], call(twice, data[2:])[1]]
    assert error(twice.read("gradients"), once.read("gradients")) < 1e-6
    for adapter in (once, twice):
        report = adapter.optim_step(**ADAM)
        assert report["loss_tokens"] == sum((one.inputs["weights"] != 0).sum() for one in data)
        assert report["loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert error(twice.read("weights"), once.read("weights")) < 1e-4


def test_two_adapters_of_a_model_do_not_meet() -> None:
    alone, first = adapter_of("qwen3"), adapter_of("qwen3")
    second = adapter_of("qwen3", seed=9, rank=2, mlp=False)
    wanted, _ = call(alone, batch("qwen3"))
    call(second, batch("qwen3", seed=4))
    found, _ = call(first, batch("qwen3"))
    call(second, batch("qwen3", seed=5))
    second.optim_step(**ADAM)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(first.read("gradients"), alone.read("gradients"))
    np.testing.assert_array_equal(first.read("weights"), alone.read("weights"))


# ---- the optimizer ----


def torch_losses(
    name: str, adapter: _core.Adapter, data: list[Datum], steps: int, options: dict[str, float]
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and final matrices of torch's AdamW on PEFT's layers."""
    model = with_peft(name, adapter)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=options["learning_rate"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
    )
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(loss_of(logprobs(model, one.tokens), one, "cross_entropy") for one in data)
        loss.backward()
        limit = options["grad_clip_norm"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        losses.append(loss.item())
    final = {key: one.detach().numpy().T for key, one in model.named_parameters()}
    return losses, norms, final


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
    wanted, norms, final = torch_losses(name, adapter, data, 10, settings)
    for step in range(10):
        _, loss = call(adapter, data)
        report = adapter.optim_step(**settings)
        assert loss == pytest.approx(wanted[step], rel=1e-4), step
        assert report["grad_norm"] == pytest.approx(norms[step], rel=1e-4), step
        assert adapter.step == step + 1
    assert wanted[9] < 0.9 * wanted[0]  # it learned: the losses could have differed
    for key, matrix in cut(adapter, adapter.read("weights")).items():
        assert error(matrix, final[key]) < 1e-3, key


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


# ---- errors add nothing ----


def plain(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call, with some of them replaced."""
    arguments = {
        "tokens": np.arange(6, dtype=np.int32),
        "lengths": np.array([4, 2], np.int32),
        "targets": np.arange(6, dtype=np.int32),
        "counts": np.array([1, 1], np.int32),
        "loss": "cross_entropy",
        "inputs": {"weights": np.ones(6, np.float32)},
        "config": {},
    }
    return arguments | changes


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def policy(**changes: Any) -> dict[str, np.ndarray]:
    inputs = {"logprobs": np.zeros(6, np.float32), "advantages": np.ones(6, np.float32)}
    return {name: array for name, array in (inputs | changes).items() if array is not None}


def weights(*values: float) -> dict[str, np.ndarray]:
    return {"weights": np.array(values, np.float32)}


ONES = np.ones(161, np.int32)
WIDE = {"counts": ints(2, 1), "targets": np.arange(10, dtype=np.int32)}
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "token too large": (IndexError, "131", {"tokens": ints(0, 1, 131, 3, 4, 5)}),
    "token negative": (IndexError, "-1", {"tokens": ints(0, 1, 2, 3, 4, -1)}),
    "target too large": (IndexError, "500", {"targets": ints(0, 1, 2, 3, 4, 500)}),
    "target negative": (IndexError, "-100", {"targets": ints(-100, 1, 2, 3, 4, 5)}),
    "empty datum": (ValueError, "datum 1 is empty", {"lengths": ints(6, 0)}),
    "negative length": (ValueError, "datum 1", {"lengths": ints(8, -2)}),
    "lengths too short": (ValueError, "tokens", {"lengths": ints(4, 1)}),
    "lengths too long": (ValueError, "tokens", {"lengths": ints(4, 3)}),
    "no targets a token": (ValueError, "datum 1 has 0 targets", {"counts": ints(1, 0)}),
    "too few targets": (ValueError, "targets", {"targets": ints(0, 1, 2)}),
    "too many targets": (ValueError, "targets", {"counts": ints(1, 3)}),
    "weights too short": (ValueError, "weights", {"inputs": weights(1, 1, 1, 1, 1)}),
    "weight NaN": (ValueError, "weights.*nan", {"inputs": weights(1, 1, np.nan, 1, 1, 1)}),
    "weight infinite": (ValueError, "weights.*inf", {"inputs": weights(1, 1, 1, 1, 1, np.inf)}),
    "unknown loss": (ValueError, "no loss is called 'magic'", {"loss": "magic"}),
    "unknown input": (ValueError, "wieghts", {"inputs": {"wieghts": np.ones(6, np.float32)}}),
    "unknown key": (ValueError, "beta", {"config": {"beta": 1.0}}),
    "no advantages": (
        ValueError, "ppo.*advantages", {"loss": "ppo", "inputs": policy(advantages=None)},
    ),
    "advantage NaN": (
        ValueError,
        "advantages.*nan",
        {"loss": "ppo", "inputs": policy(advantages=np.full(6, np.nan, np.float32))},
    ),
    "logprob infinite": (
        ValueError,
        "logprobs.*-inf",
        {"loss": "ppo", "inputs": policy(logprobs=np.full(6, -np.inf, np.float32))},
    ),
    "many targets for ppo": (
        ValueError,
        "datum 0 has 2 targets a position; ppo takes one",
        WIDE | {"loss": "ppo", "inputs": {key: np.ones(10, np.float32) for key in policy()}},
    ),
    "clip not a number": (
        ValueError,
        "clip_low_threshold",
        {"loss": "ppo", "inputs": policy(), "config": {"clip_low_threshold": float("nan")}},
    ),
    "no beta": (ValueError, "dro needs beta", {"loss": "dro", "inputs": policy()}),
    "a mean of no tokens": (
        FloatingPointError,
        "gspo is not finite",
        {"loss": "gspo", "inputs": policy(sequence_ratio_mask=np.zeros(6, np.float32))},
    ),
    "a threshold NaN": (
        ValueError,
        "clip_low_threshold at position 0 is nan",
        {"loss": "cispo", "inputs": policy(clip_low_threshold=np.full(6, np.nan, np.float32))},
    ),
    "longer than the context": (
        ValueError,
        "161.*160",
        {"tokens": ONES, "targets": ONES, "lengths": ints(161), "counts": ints(1), "inputs": {}},
    ),
    "a loss that overflows": (
        FloatingPointError,
        "importance_sampling is.*-inf",
        {
            "loss": "importance_sampling",
            "inputs": policy(logprobs=np.full(6, -1e4, np.float32)),
        },
    ),
    "a gradient that overflows": (
        FloatingPointError, "finite", {"inputs": weights(*[3e38] * 6)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_error_adds_nothing_and_says_why(case: str) -> None:
    kind, sentence, changes = BAD[case]
    adapter = adapter_of("qwen3")
    call(adapter, batch("qwen3"))
    before = [adapter.read(what) for what in ("weights", "gradients", "m", "v")]
    with pytest.raises(kind, match=sentence):
        adapter.forward_backward(**plain(**changes))
    for old, what in zip(before, ("weights", "gradients", "m", "v"), strict=True):
        np.testing.assert_array_equal(adapter.read(what), old)
    _, loss = adapter.forward_backward(**plain())  # still usable
    assert np.isfinite(loss)
    clean = adapter_of("qwen3")
    call(clean, batch("qwen3"))
    clean.forward_backward(**plain())
    assert adapter.optim_step(**ADAM) == clean.optim_step(**ADAM)
    np.testing.assert_array_equal(adapter.read("weights"), clean.read("weights"))


def test_an_empty_batch_is_an_error_or_nothing() -> None:
    adapter = adapter_of("qwen3")
    empty = np.zeros(0, np.int32)
    arguments = plain(tokens=empty, lengths=empty, targets=empty, counts=empty, inputs={})
    with pytest.raises(ValueError, match="datum"):
        adapter.forward_backward(**arguments)
    assert not adapter.read("gradients").any()


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    adapter = adapter_of("qwen3")
    data = [
        replace(one, inputs={"weights": np.full(one.targets.shape, 1e36)}) for one in batch("qwen3")
    ]
    call(adapter, batch("qwen3"))
    adapter.optim_step(**ADAM)
    before = [adapter.read(what) for what in ("weights", "m", "v")]
    call(adapter, data)
    gradient = adapter.read("gradients")
    adapter.write("gradients", np.where(gradient < 0, -3.4e38, 3.4e38).astype(np.float32))
    call(adapter, data)  # finite by itself, but not added to what was there
    with pytest.raises(FloatingPointError, match="finite"):
        adapter.optim_step(**ADAM)
    assert adapter.step == 1 and not adapter.read("gradients").any()
    for old, what in zip(before, ("weights", "m", "v"), strict=True):
        np.testing.assert_array_equal(adapter.read(what), old)


@pytest.mark.parametrize("what", ("weights", "gradients", "m", "v"))
def test_only_finite_vectors_of_the_right_size_are_written(what: str) -> None:
    adapter = adapter_of("qwen3")
    flat = np.random.default_rng(0).random(adapter.size).astype(np.float32)
    adapter.write(what, flat)
    np.testing.assert_array_equal(adapter.read(what), flat)
    for bad in (np.float32("nan"), np.float32("inf")):
        broken = flat.copy()
        broken[-1] = bad
        with pytest.raises(ValueError, match="finite"):
            adapter.write(what, broken)
    with pytest.raises(ValueError, match=str(adapter.size)):
        adapter.write(what, flat[:-1])
    np.testing.assert_array_equal(adapter.read(what), flat)
    with pytest.raises(ValueError, match="moments"):
        adapter.read("moments")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -3}, "rank"),
        ({"rank": 5000}, "rank 5000 is more than 4096"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"attn": False, "mlp": False, "unembed": False}, "nothing to train|train"),
        ({"step_tokens": -1}, "step_tokens"),
    ],
)
def test_a_bad_adapter_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _core.Adapter(loaded("qwen3").core, **{"rank": 4, **options})


def test_a_snapshot_stays_and_is_not_trained() -> None:
    adapter = adapter_of("qwen3")
    before = adapter.read("weights")
    snapshot = adapter.snapshot()
    call(adapter, batch("qwen3"))
    adapter.optim_step(**ADAM)
    assert not np.array_equal(adapter.read("weights"), before)
    np.testing.assert_array_equal(snapshot.read("weights"), before)
    with pytest.raises(ValueError, match="snapshot"):
        call(snapshot, batch("qwen3"))
    with pytest.raises(ValueError, match="snapshot"):
        snapshot.optim_step(**ADAM)


def test_what_the_machine_can_never_hold_is_refused_in_a_sentence() -> None:
    config = dict(loaded("qwen3").core.config) | {"vocab": 2_000_000_000, "width": 4096}
    freq = np.ones(int(config["head_width"]) // 2, np.float32)
    with pytest.raises(MemoryError, match=r"the base model needs .* MiB .* memory in all"):
        _core.Model(config, freq).load("final_norm", -1, np.ones(4096, np.float32))
