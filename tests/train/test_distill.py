"""Adapter.distill, the engine's loss with a teacher: one step beside transformers, PEFT and OPSD's
loss in float64, every LoRA gradient included; rows that do not see each other; what is refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.distill_cases import LOSS, Pair, distill, in_torch, pair
from support.midway import interrupt_midway
from support.op_devices import device, emulated_library, kernels_given
from support.tiny_models import SPECS, Spec, call, datum, error, folder, loaded, make, randomize
from tinsmith import _core
from tinsmith.models.registry import load_model

CONFIGS = {
    "jsd": {},
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0},
    "tempered": {"beta": 0.1, "temperature": 1.7},
    "top_k": {"beta": 0.5, "top_k": 7},
    "top_2": {"beta": 0.9, "top_k": 2},
    "clipped": {"beta": 0.5, "token_clip": 0.01},
    "everything": {"beta": 0.0, "temperature": 0.8, "top_k": 20, "token_clip": 0.02},
}
NAME = "qwen3"


def student(name: str = NAME, seed: int = 0, **options: int) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, rank=4, **options), seed)


def pairs(name: str = NAME) -> list[Pair]:
    """Three datums: the second without a prompt's worth of hint, the third a single token."""
    return [
        pair(name, prompt=5, completion=21, hint=60),
        pair(name, prompt=66, completion=9, hint=0, seed=1),
        pair(name, prompt=3, completion=1, hint=2, seed=2),
    ]


# ---- beside torch ----


def check_step(
    name: str, config: dict[str, float], teacher: _core.Adapter | None, bound: float = 2e-5
) -> None:
    adapter = student(name)
    *found, loss = distill(adapter, pairs(name), config, teacher)
    *wanted, total, gradient = in_torch(name, adapter, pairs(name), config, teacher)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < bound
    assert loss == pytest.approx(total, rel=bound)
    assert error(adapter.read("gradients"), gradient) < bound


@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_is_that_of_torch_with_opsds_loss(config: str) -> None:
    check_step(NAME, CONFIGS[config], None)


@pytest.mark.parametrize("name", [name for name in SPECS if name != NAME])
def test_a_step_is_that_of_torch_in_every_family(name: str) -> None:
    check_step(name, {}, None)


@pytest.mark.parametrize("config", ["jsd", "everything"])
def test_the_teacher_may_be_another_adapter(config: str) -> None:
    other = randomize(_core.Adapter(loaded(NAME).core, rank=7, alpha=20.0, mlp=False), seed=5)
    check_step(NAME, CONFIGS[config], other.snapshot())


def test_the_teacher_may_be_the_student_itself_and_gets_no_gradient() -> None:
    itself, frozen = student(), student()
    mine = distill(itself, pairs(), teacher=itself)
    copy = distill(frozen, pairs(), teacher=frozen.snapshot())
    for one, other in zip(mine, copy, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(itself.read("gradients"), frozen.read("gradients"))


def test_the_teacher_may_be_another_base_model(tmp_path) -> None:
    from support.tiny_models import as_double

    config = dict(SPECS[NAME].config, hidden_size=28, num_attention_heads=2, num_hidden_layers=1)
    path = make(Spec("qwen3", config), tmp_path / "teacher", seed=9)
    adapter, data = student(), pairs()
    _, found, loss = distill(adapter, data, teacher=load_model(path, threads=1).core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.distill_cases.reference", lambda name: as_double(path))
        _, wanted, total, gradient = in_torch(NAME, adapter, data)
    assert error(found, wanted) < 2e-5 and loss == pytest.approx(total, rel=2e-5)
    assert error(adapter.read("gradients"), gradient) < 2e-5


@pytest.mark.parametrize("groups", [{"unembed": False}, {"attn": False, "mlp": False}], ids=str)
def test_a_student_whose_head_or_nothing_else_is_trained(groups: dict[str, bool]) -> None:
    adapter, teacher = student(**groups), student(seed=4).snapshot()
    *_, loss = distill(adapter, pairs(), {}, teacher)
    *_, total, gradient = in_torch(NAME, adapter, pairs(), {}, teacher)
    assert loss == pytest.approx(total, rel=2e-5)
    assert error(adapter.read("gradients"), gradient) < 2e-5


def test_a_kept_forward_outlives_a_distillation() -> None:
    one, found = pairs()[0], []
    data = (one.tokens, np.array([25], np.int32), one.targets, np.ones(1, np.int32))
    for between in (False, True):
        adapter = student()
        adapter.forward(*data, keep=True)
        if between:
            distill(adapter, pairs(), backward=False)
        adapter.backward(one.weights)
        found.append(adapter.read("gradients"))
    np.testing.assert_array_equal(*found)


def test_an_average_follows_as_torchs_does() -> None:
    leader, average = student(seed=1), student(seed=2).snapshot()
    expected = average.read("weights").astype(np.float64)
    for seed in range(3, 6):
        average.ema_update(leader, 0.9)
        expected = 0.9 * expected + 0.1 * leader.read("weights")
        randomize(leader, seed)
    assert error(average.read("weights"), expected) < 1e-6
    average.ema_update(leader, 0.0)
    np.testing.assert_allclose(average.read("weights"), leader.read("weights"), atol=1e-7)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), not 1"):
        average.ema_update(leader, 1.0)
    with pytest.raises(ValueError, match="the same model and layout"):
        average.ema_update(_core.Adapter(loaded(NAME).core, rank=3), 0.5)


@pytest.mark.parametrize("config", ["jsd", "forward", "tempered", "top_k"])
def test_the_gradient_is_that_of_finite_differences(config: str) -> None:
    adapter, rng = student(), np.random.default_rng(0)
    data, weights = pairs()[:1], adapter.read("weights")
    distill(adapter, data, CONFIGS[config])
    gradient = adapter.read("gradients").astype(np.float64)
    way = (gradient / np.linalg.norm(gradient) + rng.normal(0, 0.01, adapter.size)).astype("f4")
    step, losses = 1e-3, []
    for sign in (1, -1):
        adapter.write("weights", weights + np.float32(sign * step) * way)
        losses.append(distill(adapter, data, CONFIGS[config], backward=False)[2])
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient @ way, rel=5e-3)


# ---- rows, datums and micro-batches ----


def test_packed_datums_give_the_bits_that_they_give_one_by_one() -> None:
    together = distill(student(), pairs(), backward=False)
    alone = [distill(student(), [one], backward=False) for one in pairs()]
    for index in range(2):
        np.testing.assert_array_equal(together[index], np.concatenate([o[index] for o in alone]))
    assert together[2] == pytest.approx(sum(one[2] for one in alone), rel=1e-12)


@pytest.mark.parametrize("step_tokens", [1, 30, 90, 160])
def test_micro_batches_change_no_row_and_add_up(step_tokens: int) -> None:
    whole, parts = student(), student(step_tokens=step_tokens)
    first, second = (distill(adapter, pairs()) for adapter in (whole, parts))
    for one, other in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    assert error(parts.read("gradients"), whole.read("gradients")) < 1e-6
    assert parts.pending == pytest.approx(whole.pending)


def test_more_rows_than_the_head_sees_at_a_time_add_up() -> None:
    data = [pair(NAME, prompt=2, completion=60, hint=5, seed=seed) for seed in range(10)]
    together, alone = student(step_tokens=1000), student()
    *_, loss = distill(together, data)  # 600 rows, and 512 at a time
    assert loss == pytest.approx(sum(distill(alone, [one])[2] for one in data))
    assert error(together.read("gradients"), alone.read("gradients")) < 1e-5


def test_forward_alone_gives_the_same_numbers_and_no_gradient() -> None:
    adapter, other = student(), student()
    found, wanted = distill(adapter, pairs(), backward=False), distill(other, pairs())
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not adapter.read("gradients").any() and other.read("gradients").any()


def test_logprobs_are_those_of_forward_backward_bit_for_bit() -> None:
    found, _, _ = distill(student(), pairs(), backward=False)
    data = [datum(one.tokens, one.targets) for one in pairs()]
    np.testing.assert_array_equal(found, np.concatenate(call(student(), data, backward=False)[0]))


def test_a_student_that_sees_what_its_teacher_sees_has_nothing_to_learn() -> None:
    one = pair(NAME, prompt=5, completion=8, hint=0)
    same = replace(one, teacher=np.append(one.tokens, one.targets[-1]))
    adapter = student()
    _, jsd, loss = distill(adapter, [same], teacher=adapter)
    assert not jsd.any() and loss == 0.0
    assert np.abs(adapter.read("gradients")).max() < 1e-9


def test_datums_without_weights_count_for_nothing() -> None:
    blank = replace(pairs()[0], weights=np.zeros(25, np.float32), teacher=np.array([3], np.int32))
    adapter, other = student(), student()
    logprobs, jsd, loss = distill(adapter, [blank, pairs()[2]])
    assert not jsd[:25].any() and loss == distill(other, pairs()[2:])[2]
    assert adapter.pending == other.pending and other.pending[1:] == (1.0, 1.0)
    assert error(adapter.read("gradients"), other.read("gradients")) < 1e-6
    assert np.isfinite(logprobs).all()
    assert distill(student(), [blank])[2] == 0.0


def test_weights_may_lie_apart_and_be_negative() -> None:
    one = pairs()[0]
    one.weights[[7, 8, 12]] = 0.0
    one.weights[10] = -2.0
    adapter = student()
    _, jsd, loss = distill(adapter, [one])
    _, wanted, total, gradient = in_torch(NAME, adapter, [one])
    assert error(jsd, wanted) < 2e-5 and loss == pytest.approx(total, rel=2e-5)
    assert error(adapter.read("gradients"), gradient) < 2e-5


def test_calls_add_up_and_count_for_normalization() -> None:
    adapter, twice = student(), student()
    distill(adapter, pairs())
    for _ in range(2):
        distill(twice, pairs())
    assert error(twice.read("gradients"), 2 * adapter.read("gradients")) < 1e-6
    assert adapter.pending[1:] == (31.0, 3.0)


# ---- refused, and nothing added ----


def change(**fields) -> Callable[[list[Pair]], list[Pair]]:
    return lambda data: [data[0], replace(data[1], **fields), data[2]]


REFUSED = {
    "beta below": ({"beta": -0.1}, None, r"beta must be in \[0, 1\], not -0.1"),
    "beta above": ({"beta": 1.5}, None, r"beta must be in \[0, 1\], not 1.5"),
    "temperature": ({"temperature": -1.0}, None, "temperature must be more than 0, not -1"),
    "no temperature": ({"temperature": 0.0}, None, "temperature must be more than 0, not 0"),
    "top_k": ({"top_k": 132}, None, "top_k must be a whole number from 0 .* to 131, not 132"),
    "half top_k": ({"top_k": 2.5}, None, "top_k must be a whole number .* not 2.5"),
    "clip": ({"token_clip": 0.0}, None, "token_clip must be more than 0, not 0"),
    "not finite": ({"beta": np.nan}, None, "generalized_jsd needs beta|beta .* finite"),
    "unknown key": ({"alpha": 1.0}, None, "takes no such configuration"),
    "no teacher": ({}, change(teacher=np.empty(0, np.int32)), "datum 1: teacher_tokens is empty"),
    "no prompt": (
        {},
        lambda data: [data[0], replace(data[1], teacher=data[1].teacher[-9:]), data[2]],
        "datum 1: teacher_tokens has 9 tokens; it must be the teacher's prompt and then the 9 of",
    ),
    "cut short": (
        {},
        lambda data: [data[0], replace(data[1], teacher=data[1].teacher[:-1]), data[2]],
        r"datum 1: teacher_tokens must end with the completion, target_tokens from position 65 on",
    ),
    "not shifted": (
        {},
        lambda data: [data[0], replace(data[1], tokens=data[1].targets), data[2]],
        "datum 1: over the completion target_tokens must be model_input one position on, but",
    ),
    "id": ({}, change(teacher=np.full(99, 131, np.int32)), "datum 1: teacher_tokens at .* is 131"),
    "long": (
        {},
        lambda data: [
            *data[:2],
            replace(data[2], teacher=np.concatenate([np.zeros(160, np.int32), data[2].teacher])),
        ],
        "datum 2: teacher_tokens has 166 tokens; the teacher's context is 160",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_was_added(case: str) -> None:
    config, changed, sentence = REFUSED[case]
    adapter = student()
    with pytest.raises((ValueError, IndexError), match=sentence):
        distill(adapter, changed(pairs()) if changed else pairs(), config)
    assert not adapter.read("gradients").any() and adapter.pending == (0.0, 0.0, 0.0)


def test_teachers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 113, the student's of 131"):
        distill(student(), pairs(), teacher=loaded("qwen2").core)
    with pytest.raises(TypeError, match="teacher must be an Adapter, a Model or None, not str"):
        distill(student(), pairs(), teacher="base")
    with pytest.raises(ValueError, match="a snapshot: it can be sampled from, not trained"):
        distill(student().snapshot(), pairs())


def test_each_kind_of_loss_has_its_own_call() -> None:
    one = pairs()[0]
    data = [datum(one.tokens, one.targets, weights=one.weights)]
    with pytest.raises(ValueError, match="generalized_jsd needs a teacher"):
        call(student(), data, LOSS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.distill_cases.LOSS", "cross_entropy")
        with pytest.raises(ValueError, match="cross_entropy is a loss without a teacher"):
            distill(student(), pairs())


def test_a_gradient_that_overflows_is_dropped() -> None:
    one = pairs()[0]
    one.weights[10] = 3e38
    adapter = student()
    with pytest.raises(FloatingPointError, match="not finite"):
        distill(adapter, [one])
    assert not adapter.read("gradients").any()
    assert distill(adapter, pairs())[2] == distill(student(), pairs())[2]


def test_an_interrupt_adds_nothing() -> None:
    adapter = student(step_tokens=1)
    interrupt_midway(adapter, adapter.clear_gradients, lambda: distill(adapter, pairs() * 40))
    assert not adapter.read("gradients").any() and adapter.pending == (0.0, 0.0, 0.0)
    assert distill(adapter, pairs())[2] == distill(student(), pairs())[2]


def test_an_interrupt_ends_the_teachers_forward_between_its_layers(tmp_path) -> None:
    """The teacher's is the first forward of a micro-batch. On the emulated card, which counts its
    kernels: a layer has more than one."""
    emulated_library()
    config = {**SPECS[NAME].config, "num_hidden_layers": 16}
    core = load_model(make(Spec("qwen3", config), tmp_path / "deep"), device="cuda-emulated").core
    adapter, given = _core.Adapter(core, rank=1, step_tokens=1), [kernels_given()]

    def between(done: int, count: int) -> None:
        given.append(kernels_given())
        adapter.interrupt()

    with pytest.raises(KeyboardInterrupt, match="interrupted"):
        distill(adapter, [pair(NAME, 1, 1, 1)] * 2, backward=False, between=between)
    begun, paused, ended = *given, kernels_given()
    assert ended - paused < 16 < (paused - begun) / 8


# ---- the GPU's device ----


@pytest.mark.parametrize("device_name", ["cuda", "cuda-emulated"])
def test_on_the_gpus_device(device_name: str) -> None:
    device(device_name)
    data = [pair(NAME, prompt=4, completion=6, hint=9), pair(NAME, 2, 3, 1, seed=1)]
    core = load_model(folder(NAME), device=device_name).core
    adapter = randomize(_core.Adapter(core, rank=4))
    _, jsd, loss = distill(adapter, data, {"beta": 0.5})
    _, wanted, total, gradient = in_torch(NAME, student(), data, {"beta": 0.5})
    assert error(jsd, wanted) < 0.2 and loss == pytest.approx(total, rel=0.1)
    assert error(adapter.read("gradients"), gradient) < 0.3
    alone = [distill(adapter, [one], backward=False)[1] for one in data]
    np.testing.assert_array_equal(np.concatenate(alone), jsd)
