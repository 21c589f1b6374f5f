"""Every loss of Tinker against autograd of its formula, on every device."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import Datum, call, cpu_only, datum, error, loaded, tokens_of
from support.training_cases import (
    CONFIG,
    INPUTS,
    KEYS,
    POLICY,
    REFERENCE,
    ROWS,
    THRESHOLDS,
    adapter_of,
    advantaged,
    batch,
    check,
    example,
    loss_of,
    soft,
)
from tinsmith import _core

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]


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


@cpu_only
def test_a_weight_of_zero_counts_for_nothing_where_its_logprob_is_infinite() -> None:
    """The head's adapter alone has overflowed there, to the one side or the other."""
    adapter = _core.Adapter(loaded("qwen3").core, rank=1, attn=False, mlp=False)
    one, found = datum([5], [[7, 9]], weights=[[0.0, 1.0]]), []
    for sign in (1, -1):
        flat = np.full(adapter.size, 1e3, np.float32)
        [offset, _, columns] = next(row[4:] for row in adapter.layout if row[3] == "B")
        flat[offset : offset + columns] = 0
        flat[offset + 7] = sign * 5e37
        adapter.write("weights", flat)
        with contextlib.suppress(FloatingPointError):  # above, not even the others are finite
            found.append(call(adapter, [one], backward=False))
    [([logp], loss)] = found
    assert logp[0, 0] == -np.inf and 0 < loss == -logp[0, 1]


@cpu_only
@pytest.mark.parametrize("loss", [name for name in POLICY if ROWS[name]["gate"]])
def test_a_target_without_an_advantage_has_no_ratio(loss: str) -> None:
    data = advantaged("qwen3", (23,))
    none = data[0].inputs["advantages"] == 0
    far = np.where(none, np.float32(-1e4), data[0].inputs["logprobs"])  # the ratio overflows
    moved = [replace(data[0], inputs=data[0].inputs | {"logprobs": far})]
    plain, other = adapter_of("qwen3"), adapter_of("qwen3")
    assert none.any() and call(plain, data, loss)[1] == call(other, moved, loss)[1]
    np.testing.assert_array_equal(plain.read("gradients"), other.read("gradients"))


def test_k_of_one_is_the_plain_loss() -> None:
    plain, wide = adapter_of("qwen3"), adapter_of("qwen3")
    data = batch("qwen3")
    columns = [
        Datum(one.tokens, one.targets[:, None], {"weights": one.inputs["weights"][:, None]})
        for one in data
    ]
    assert call(plain, data)[1] == call(wide, columns)[1]
    np.testing.assert_array_equal(plain.read("gradients"), wide.read("gradients"))


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
    check(name, adapter_of(name), advantaged(name), loss, CONFIG.get(loss))


@pytest.mark.parametrize("loss", ROWS)
def test_every_loss_is_its_reference(loss: str) -> None:
    """Value and gradients against autograd in float64, for each row of the engine's table."""
    data, config = example("qwen3", loss)
    check("qwen3", adapter_of("qwen3"), data, loss, config)


@cpu_only
@pytest.mark.parametrize("loss", ROWS)
def test_every_losss_gradient_is_its_slope(loss: str) -> None:
    """Central differences of the loss where what it holds constant is held constant."""
    adapter, (data, config) = adapter_of("qwen3"), example("qwen3", loss)
    start, _ = call(adapter, data, loss, config)
    gradient = adapter.read("gradients").astype(np.float64)
    weights = adapter.read("weights")

    def at(logp: list[np.ndarray]) -> float:
        now, then = ([torch.from_numpy(one).double() for one in rows] for rows in (logp, start))
        rows = zip(now, data, then, strict=True)
        return sum(float(loss_of(lp, one, loss, config, held)) for lp, one, held in rows)

    direction = np.random.default_rng(1).normal(size=adapter.size) + 3 * np.sign(gradient)
    direction *= 0.002 / np.linalg.norm(direction)
    sides = []
    for sign in (1, -1):
        adapter.write("weights", (weights + sign * direction).astype(np.float32))
        sides.append(at(call(adapter, data, loss, config, backward=False)[0]))
    assert (sides[0] - sides[1]) / 2 == pytest.approx(gradient @ direction, rel=5e-3)


@cpu_only
def test_a_loss_without_a_reference_is_told_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = example("qwen3", "ppo")
    (logp, *_), _ = call(adapter_of("qwen3"), data, "ppo", backward=False)
    with monkeypatch.context() as patch:
        patch.delitem(REFERENCE, "ppo")
        with pytest.raises(AssertionError, match=r"the loss ppo has no reference: write its form"):
            loss_of(torch.from_numpy(logp), data[0], "ppo")
    for table, name, told in (
        (INPUTS, "advantages", "the loss dro needs advantages: say in INPUTS"),
        (CONFIG, "dro", "the loss dro needs beta: give it a value in CONFIG"),
    ):
        with monkeypatch.context() as patch:
            patch.delitem(table, name)
            with pytest.raises(AssertionError, match=told):
                example("qwen3", "dro")


@cpu_only
def test_dppo_takes_out_what_moves_away_and_is_far() -> None:
    """One target on each side of both bounds, for a gain and for a loss; in float64 by hand."""
    adapter = adapter_of("qwen3")
    one = datum(tokens_of("qwen3", 8))
    [logp], _ = call(adapter, [one], backward=False)
    p = np.exp(logp.astype(np.float64))
    away = p * np.array([0.3, 0.7, -0.3, -0.7, 0.3, 0.7, -0.3, -0.7])  # the sampler's probability
    q = np.log(p + away)
    advantages = np.array([1, 1, 1, 1, -1, -1, -1, -1], np.float32)
    delta = 0.5 * p.min()
    inputs = {"logprobs": q.astype(np.float32), "advantages": advantages}
    _, found = call(adapter, [replace(one, inputs=inputs)], "dppo", {"delta": delta})
    moved = p - np.exp(q)
    kept = ~(((advantages > 0) & (moved > delta)) | ((advantages < 0) & (-moved > delta)))
    assert kept[0] and kept[1] and not kept[3] and not kept[5] and kept[6] and kept[7]
    assert found == pytest.approx(-(np.exp(logp - q) * advantages)[kept].sum(), rel=1e-5)


@pytest.mark.parametrize("loss", ("ppo", "dapo", "cispo", "gspo"))
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


@pytest.mark.parametrize("kl_coeff", (0.0, 2.5))
def test_stable_reinforce_with_its_coefficient(kl_coeff: float) -> None:
    check(
        "qwen3",
        adapter_of("qwen3"),
        advantaged("qwen3"),
        "stable_reinforce",
        {"kl_coeff": kl_coeff},
    )


@cpu_only
def test_stable_reinforce_is_importance_sampling_where_the_sampler_is_the_learner() -> None:
    data = advantaged("qwen3", (60,))
    now, _ = call(adapter_of("qwen3"), data, "importance_sampling", backward=False)
    data = [replace(data[0], inputs=data[0].inputs | {"logprobs": now[0]})]
    stable, importance = adapter_of("qwen3"), adapter_of("qwen3")
    call(stable, data, "stable_reinforce")
    call(importance, data, "importance_sampling")
    np.testing.assert_array_equal(stable.read("gradients"), importance.read("gradients"))


@cpu_only
def test_no_target_pulls_stable_reinforce_harder_than_its_advantage_and_the_divergence() -> None:
    """However far the learner is from the sampler, on either side."""
    for gap in (-80.0, -3.0, 3.0, 80.0):
        for sign in (-1.0, 1.0):
            data = advantaged("qwen3", (1,))
            (logp,), _ = call(adapter_of("qwen3"), data, "ppo", backward=False)
            inputs = {
                "logprobs": logp - np.float32(gap),
                "advantages": np.full(1, sign, np.float32),
            }
            moved = [replace(data[0], inputs=inputs)]
            _, loss = call(adapter_of("qwen3"), moved, "stable_reinforce", {"kl_coeff": 0.25})
            weight = min(1.0, np.exp(gap)) if sign < 0 else 1.0
            assert loss == pytest.approx(0.125 * gap**2 - weight * sign * float(logp[0]), rel=1e-5)


@cpu_only
@pytest.mark.parametrize("loss", ("ppo", "cispo", "gspo"))
@pytest.mark.parametrize(
    ("low", "high"), ((0.2, 0.2), (1.2, 0.8), (1.01, 2.0), (0.5, 0.99), (-0.2, 1.2), (0.0, 0.2))
)
def test_clip_thresholds_that_are_no_ratios_around_one_are_refused(
    loss: str, low: float, high: float
) -> None:
    names = ("clip_low_threshold", "clip_high_threshold")
    data, adapter = advantaged("qwen3", (5, 9)), adapter_of("qwen3")
    told = f"datum 0: {loss} has {names[0]} {low:g} and {names[1]} {high:g} at .* they are ratios"
    with pytest.raises(ValueError, match=told):
        call(adapter, data, loss, dict(zip(names, (low, high), strict=True)))
    own = {
        name: np.where(one.inputs["advantages"] != 0, 1.0, value).astype(np.float32)
        for name, value, one in ((names[0], low, data[1]), (names[1], high, data[1]))
    }
    call(adapter, [replace(data[1], inputs=data[1].inputs | own)], loss)  # nobody reads the others
    own[names[0]][:], own[names[1]][:] = low, high
    with pytest.raises(ValueError, match=told):
        call(adapter, [replace(data[1], inputs=data[1].inputs | own)], loss)


@cpu_only
def test_a_negative_kl_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_coeff must be at least 0, not -1"):
        call(adapter_of("qwen3"), advantaged("qwen3"), "stable_reinforce", {"kl_coeff": -1.0})


@cpu_only
def test_the_table_of_losses_is_tinkers() -> None:
    assert {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"} <= set(ROWS)
    assert ROWS["cross_entropy"]["multi"] and not ROWS["ppo"]["multi"]
    assert ROWS["cross_entropy"]["inputs"] == [
        {"name": "weights", "required": False, "fallback": None, "default": 1.0}
    ]
    assert {"importance_sampling", "ppo", "dapo", "dppo", "cispo", "dro", "gspo"} <= set(POLICY)
    for name in POLICY:
        required = [item["name"] for item in ROWS[name]["inputs"] if item["required"]]
        assert required == ["logprobs", "advantages"]
    for name, row in ROWS.items():
        told = f"the loss {name} has these keys, with their defaults: say so in KEYS"
        assert row["config"] == KEYS.get(name), told
        if "clip_low_threshold" in row["config"]:
            assert {item["fallback"] for item in row["inputs"]} >= set(THRESHOLDS)
