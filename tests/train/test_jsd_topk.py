"""generalized_jsd of datums that carry their teacher's log-probabilities of K ids at each position:
against autograd of OPSD's formula on every device, beside the form in which the teacher is run, and
through the API and the in-process face; and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import tinsmith
import torch
from support import training_cases
from support.distill_cases import distill, logits_of, pair
from support.tiny_models import SPECS, Datum, call, cpu_only, datum, error, reference, tokens_of
from support.training_cases import adapter_of, check
from test_opsd import ADAM, datums, pairs, saved, trained
from tinsmith.checkpoints import checkpoint
from tinsmith.engine.teachers import divergences
from tinsmith.models.registry import load_model
from tinsmith.server.backend import Backend

pytestmark = pytest.mark.pairs

LOSS, NONE = "generalized_jsd", -99999.0
CONFIGS: dict[str, dict[str, float]] = {
    "forward": {"beta": 0.0},
    "near": {"beta": 0.1, "temperature": 2.0},
    "jsd": {"beta": 0.5},
    "sharp": {"beta": 0.9, "temperature": 0.6},
    "reverse": {"beta": 1.0, "temperature": 1.3},
    "clipped": {"beta": 0.5, "token_clip": 0.03},
    "forward clipped": {"beta": 0.0, "token_clip": 0.2},
    "reverse clipped": {"beta": 1.0, "token_clip": 0.2, "temperature": 0.7},
}


def taught(name: str, length: int, targets: int, seed: int = 0) -> Datum:
    """K ids a position and a teacher's log-probabilities of them, some far out and some missing; a
    third of the rows without weight, the others with one for each id."""
    rng = np.random.default_rng([seed, length, targets])
    vocab = SPECS[name].config["vocab_size"]
    ids = np.array([rng.permutation(vocab)[:targets] for _ in range(length)])
    teacher = np.log(rng.dirichlet(np.ones(targets + 3), length)[:, :targets])
    teacher[1::4, -1] -= 400  # no mass in float32
    ids[2::5, 1:][:, ::2], teacher[2::5, 1:][:, ::2] = 0, NONE
    weights = rng.normal(size=ids.shape)
    weights[::3] = 0
    teacher[0] = NONE  # as of a prompt's first token
    return datum(tokens_of(name, length, seed), ids, teacher_logprobs=teacher, weights=weights)


def data_of(name: str = "qwen3") -> list[Datum]:
    return [taught(name, 23, 6), taught(name, 1, 4), taught(name, 40, 1), taught(name, 7, 20)]


# ---- numbers, on every device ----


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("case", CONFIGS)
def test_the_loss_and_every_gradient_equal_autograd(case: str) -> None:
    check("qwen3", adapter_of("qwen3"), data_of(), LOSS, CONFIGS[case])


@pytest.mark.usefixtures("on")
def test_another_family_and_the_defaults() -> None:
    check("llama", adapter_of("llama"), data_of("llama"), LOSS)


@pytest.mark.parametrize("case", CONFIGS)
def test_the_gradient_is_the_losss_slope(case: str) -> None:
    adapter, data, config = adapter_of("qwen3"), data_of(), CONFIGS[case]
    call(adapter, data, LOSS, config)
    gradient, weights = adapter.read("gradients").astype(np.float64), adapter.read("weights")
    direction = np.random.default_rng(1).normal(size=adapter.size) + 3 * np.sign(gradient)
    direction *= 0.0005 / np.linalg.norm(direction)
    sides = []
    for sign in (1, -1):
        adapter.write("weights", (weights + sign * direction).astype(np.float32))
        sides.append(call(adapter, data, LOSS, config, backward=False)[1])
    assert (sides[0] - sides[1]) / 2 == pytest.approx(gradient @ direction, rel=5e-3)


@pytest.mark.usefixtures("on")
def test_packed_datums_are_what_they_are_alone() -> None:
    """More rows than the head sees at a time, 512, and each datum with another K."""
    data = [*data_of(), *(taught("qwen3", 150, targets) for targets in (3, 2, 5, 4))]
    whole = adapter_of("qwen3")
    wanted, total = call(whole, data, LOSS)
    alone = adapter_of("qwen3")
    losses = []
    for one, logp in zip(data, wanted, strict=True):
        (found,), loss = call(alone, [one], LOSS)
        np.testing.assert_array_equal(found, logp)
        losses.append(loss)
    assert sum(losses) == pytest.approx(total, rel=1e-12)
    assert error(alone.read("gradients"), whole.read("gradients")) < 1e-6
    split = adapter_of("qwen3", step_tokens=16)
    assert call(split, data, LOSS)[1] == pytest.approx(total, rel=1e-12)
    assert error(split.read("gradients"), whole.read("gradients")) < 1e-6
    assert call(split, data, LOSS, backward=False)[1] == pytest.approx(total, rel=1e-12)


def test_what_fills_a_list_up_and_what_has_no_weight_is_not_there() -> None:
    (one,) = data = [taught("qwen3", 23, 6)]
    wide = {"teacher_logprobs": NONE, "weights": 3.0}
    filled = Datum(
        one.tokens,
        np.pad(one.targets, ((0, 0), (2, 3))),
        {key: np.pad(one.inputs[key], ((0, 0), (2, 3)), constant_values=value)
         for key, value in wide.items()},
    )  # fmt: skip
    filled.inputs["weights"][(one.inputs["weights"] == 0).all(axis=1)] = 0
    blank = np.nonzero((one.inputs["weights"] == 0).all(axis=1))
    filled.inputs["teacher_logprobs"][blank] = 7.0  # of no use, and so of no harm
    plain, other = adapter_of("qwen3"), adapter_of("qwen3")
    assert call(plain, data, LOSS)[1] == call(other, [filled], LOSS)[1]
    np.testing.assert_array_equal(plain.read("gradients"), other.read("gradients"))
    assert plain.pending == other.pending


def test_a_teachers_numbers_matter_up_to_a_constant_and_its_equal_teaches_nothing() -> None:
    (one,) = data = [taught("qwen3", 23, 6)]
    teacher = one.inputs["teacher_logprobs"]
    teacher[teacher == NONE] = -2.0
    one.targets[:] = np.arange(6)
    one.inputs["weights"] = np.ones_like(teacher)
    plain, other = adapter_of("qwen3"), adapter_of("qwen3")
    wanted = call(plain, data, LOSS, {"temperature": 3.0})[1]
    moved = [replace(one, inputs=one.inputs | {"teacher_logprobs": teacher + np.float32(8)})]
    assert call(other, moved, LOSS, {"temperature": 3.0})[1] == pytest.approx(wanted, rel=1e-5)
    assert error(plain.read("gradients"), other.read("gradients")) < 1e-5
    own, _ = call(plain, data, LOSS, backward=False)
    equal = [replace(one, inputs=one.inputs | {"teacher_logprobs": own[0]})]
    scale = np.linalg.norm(other.read("gradients"))
    for beta in (0.0, 0.5, 1.0):
        same = adapter_of("qwen3")
        assert abs(call(same, equal, LOSS, {"beta": beta})[1]) < 1e-13
        assert np.linalg.norm(same.read("gradients")) < 1e-6 * scale


@pytest.mark.parametrize("beta", (0.0, 0.1, 0.5, 0.9, 1.0))
def test_it_equals_the_form_in_which_the_teacher_is_run(beta: float) -> None:
    """The K ids are its best, its log-probabilities transformers'."""
    K, config = 9, {"beta": beta, "temperature": 1.4, "token_clip": 0.3}
    lessons = [pair("qwen3", 11, 9, 14), pair("qwen3", 3, 6, 25, seed=1)]
    run, carried = adapter_of("qwen3"), adapter_of("qwen3")
    _, _, wanted = distill(run, lessons, {**config, "top_k": K})
    data = []
    for one in lessons:
        with torch.no_grad():
            table = torch.log_softmax(logits_of(reference("qwen3"), one.teacher[:-1]), -1)
        best = table[len(one.teacher) - 1 - len(one.tokens) :].topk(K)
        inputs = {"teacher_logprobs": best.values.numpy().astype(np.float32)}
        inputs["weights"] = np.repeat(one.weights[:, None], K, axis=1)
        data.append(Datum(one.tokens, best.indices.numpy().astype(np.int32), inputs))
    assert call(carried, data, LOSS, config)[1] == pytest.approx(wanted, rel=1e-5)
    assert error(carried.read("gradients"), run.read("gradients")) < 1e-5
    assert carried.pending[1:] == run.pending[1:]


def test_what_fills_a_list_up_has_no_divergence() -> None:
    rng = np.random.default_rng(0)
    own, teacher = np.log(rng.dirichlet(np.ones(4), (2, 5))).astype(np.float32)
    weights = np.ones_like(own)
    filled = [
        np.pad(array, ((0, 0), (0, 3)), constant_values=value)
        for array, value in ((own, -1.0), (teacher, NONE), (weights, 1.0))
    ]
    [wanted] = divergences([own], [teacher], [weights], {})
    [found] = divergences(*([one] for one in filled), {})
    assert (wanted > 0.01).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# ---- through the SDK ----


K = 12


def carried(service: tinker.ServiceClient) -> list[tinker.Datum]:
    """pairs() with what the base model, having read its prompts, says of its K best."""
    sampler = service.create_sampling_client(base_model="tiny").result()
    made = []
    for one in pairs():
        reply = sampler.sample(
            tinker.ModelInput.from_ints(one.teacher.tolist()),
            1,
            tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=K,
        ).result()
        top = reply.topk_prompt_logprobs[len(one.teacher) - len(one.tokens) :]
        rows = np.array([row or [(0, NONE)] * K for row in top])
        made.append(
            tinker.Datum(
                tinker.ModelInput.from_ints(one.tokens.tolist()),
                {
                    "target_tokens": rows[..., 0].astype(np.int64),
                    "teacher_logprobs": rows[..., 1].astype(np.float32),
                    "weights": one.weights,
                },
            )
        )
    return made


def gradients(server: Backend, tiny: Path, client: tinker.TrainingClient, name: str) -> np.ndarray:
    model = load_model(tiny, threads=1)
    folder = saved(server, client, name)
    return checkpoint.load_adapter(folder, model, optimizer=True).read("gradients")


@pytest.mark.parametrize("config", [{}, {"beta": 0.0, "temperature": 1.3}, {"token_clip": 0.01}])
def test_a_samplers_top_k_teaches_as_the_teacher_does(
    server: Backend,
    service_client: tinker.ServiceClient,
    tiny_model_dir: Path,
    config: dict[str, float],
) -> None:
    run, other = (trained(service_client, seed=1) for _ in range(2))
    wanted = run.forward_backward(datums(pairs()), LOSS, {**config, "top_k": K}).result()
    found = other.forward_backward(carried(service_client), LOSS, config).result()
    assert found.metrics.keys() == wanted.metrics.keys()
    for key, value in wanted.metrics.items():
        assert found.metrics[key] == pytest.approx(value, rel=1e-4), key
    assert found.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-5)
    for one, part, whole in zip(
        pairs(), found.loss_fn_outputs, wanted.loss_fn_outputs, strict=True
    ):
        assert part["logprobs"].to_numpy().shape == (len(one.tokens), K)
        jsd, same = part["jsd"].to_numpy(), whole["jsd"].to_numpy()
        assert jsd.shape == same.shape and not jsd[one.weights == 0].any()
        np.testing.assert_allclose(jsd, same, rtol=1e-4, atol=1e-7)
    made = [gradients(server, tiny_model_dir, one, "jsd") for one in (other, run)]
    assert error(*made) < 1e-5
    for one in (run, other):
        one.optim_step(ADAM).result()
    losses = [
        client.forward(data, LOSS, {**config, **extra}).result().metrics["loss:sum"]
        for client, data, extra in (
            (run, datums(pairs()), {"top_k": K}),
            (other, carried(service_client), {}),
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def changed(data: list[tinker.Datum], index: int = 1, **inputs: Any) -> list[tinker.Datum]:
    """A datum with other inputs; None leaves one out."""
    arrays = {**data[index].loss_fn_inputs, **inputs}
    kept = {key: value for key, value in arrays.items() if value is not None}
    data[index] = tinker.Datum(data[index].model_input, kept)
    return data


def array_of(one: tinker.Datum, key: str) -> np.ndarray:
    return one.loss_fn_inputs[key].to_numpy().copy()


def with_entry(data: list[tinker.Datum], key: str, at: Any, value: float) -> list[tinker.Datum]:
    array = array_of(data[1], key)
    array[at] = value
    return changed(data, **{key: array})


Change = Callable[[list[tinker.Datum]], list[tinker.Datum]]
REFUSED: dict[str, tuple[Change, dict[str, Any], str]] = {
    "one datum with the teacher's tokens": (
        lambda data: [data[0], datums(pairs())[1]], {},
        "datum 1 has teacher_tokens, datum 0 has teacher_logprobs: all datums of a call must have",
    ),
    "one datum without a teacher": (
        lambda data: changed(data, teacher_logprobs=None), {},
        "datum 1 has neither teacher_tokens nor teacher_logprobs, datum 0 has teacher_logprobs",
    ),
    "a teacher's first": (
        lambda data: changed(data, 0, teacher_logprobs=None, teacher_tokens=np.arange(9)), {},
        "datum 1 has teacher_logprobs, datum 0 has teacher_tokens",
    ),
    "both": (
        lambda data: changed(data, teacher_tokens=np.arange(9)), {},
        "datum 1 has both teacher_tokens and teacher_logprobs: it needs one",
    ),
    "one target a position": (
        lambda data: changed(data, target_tokens=pairs()[1].targets.astype(np.int64)), {},
        r"datum 1: target_tokens has shape \(7,\); with teacher_logprobs it must be \(7, K\)",
    ),
    "a column too few": (
        lambda data: changed(data, teacher_logprobs=np.zeros((7, K - 1), np.float32)), {},
        r"datum 1: teacher_logprobs has shape \(7, 11\), target_tokens has \(7, 12\)",
    ),
    "one row's": (
        lambda data: changed(data, teacher_logprobs=np.zeros(7, np.float32)), {},
        r"datum 1: teacher_logprobs has shape \(7,\), target_tokens has \(7, 12\)",
    ),
    "weights of another length": (
        lambda data: changed(data, weights=np.ones(K, np.float32)), {},
        r"datum 1: weights has shape \(12,\), target_tokens has \(7, 12\)",
    ),
    "no weights": (
        lambda data: changed(data, weights=None), {}, "datum 1: generalized_jsd needs weights",
    ),
    "minus infinity": (
        lambda data: with_entry(data, "teacher_logprobs", (5, 2), -np.inf), {},
        r"datum 1: teacher_logprobs\[5, 2\] is -inf: every number must be finite",
    ),
    "no entry": (
        lambda data: with_entry(data, "teacher_logprobs", 5, NONE), {},
        "datum 1: teacher_logprobs at position 5 has no entry .* but the weight there is not 0",
    ),
    "an id twice": (
        lambda data: with_entry(data, "target_tokens", (5, slice(3, 5)), 17), {},
        "datum 1: target_tokens at position 5 has id 17 twice; the ids that teacher_logprobs",
    ),
    "top_k": (lambda data: data, {"top_k": 5}, "loss_fn_config top_k goes with teacher_tokens"),
    "a teacher": (lambda data: data, {"teacher": "base"}, "teacher goes with teacher_tokens"),
    "an average": (
        lambda data: data, {"teacher": "ema", "teacher_ema": 0.9},
        "loss_fn_config teacher, teacher_ema goes with teacher_tokens",
    ),
    "beta": (lambda data: data, {"beta": 1.1}, r"beta must be in \[0, 1\], not 1.1"),
    "temperature": (lambda data: data, {"temperature": 0}, "temperature must be more than 0"),
    "cold": (lambda data: data, {"temperature": 1e-38}, "temperature must be from 1e-30 to 1e"),
    "hot": (lambda data: data, {"temperature": 1e35}, "temperature must be from 1e-30 to 1e.30"),
    "clip": (lambda data: data, {"token_clip": -1.0}, "token_clip must be more than 0, not -1"),
}  # fmt: skip


def test_what_does_not_fit_is_refused_and_training_goes_on(
    service_client: tinker.ServiceClient,
) -> None:
    client = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    wanted = client.forward(carried(service_client), LOSS).result().metrics
    data = carried(service_client)
    for case, (change, config, sentence) in REFUSED.items():
        with pytest.raises(tinker.RequestFailedError, match=sentence):
            client.forward_backward(change(list(data)), LOSS, config).result(timeout=60)
            pytest.fail(case)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
    assert client.forward_backward(data, LOSS).result().metrics == wanted


# ---- in one's own process ----


def test_the_face_equals_the_api_bit_for_bit(
    service_client: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    model = tinsmith.Model(tiny_model_dir, device="cpu", threads=1)
    client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
    adapter, data = model.lora(rank=4, seed=7), carried(service_client)
    tokens = [one.tokens for one in pairs()]
    ids, taught, weights = (
        [array_of(one, key) for one in data]
        for key in ("target_tokens", "teacher_logprobs", "weights")
    )
    config = {"beta": 0.1, "temperature": 2.0, "token_clip": 0.05}
    for _ in range(2):
        theirs = client.forward_backward(data, LOSS, config).result()
        ours = adapter.generalized_jsd_topk(tokens, ids, weights, taught, **config)
        assert ours.loss == theirs.metrics["loss:sum"]
        rows = zip(ours.logprobs, ours.divergences, theirs.loss_fn_outputs, strict=True)
        for mine, gap, other in rows:
            np.testing.assert_array_equal(mine, other["logprobs"].to_numpy())
            np.testing.assert_array_equal(gap, other["jsd"].to_numpy())
        metrics = client.optim_step(tinker.AdamParams(**training_cases.ADAM)).result().metrics
        assert adapter.core.optim_step(**training_cases.ADAM)["grad_norm"] == metrics["grad_norm"]
    of_each = [np.repeat(row[:, None], K, axis=1) for row in weights]
    arrays = [torch.from_numpy(row) for row in taught]
    again = adapter.generalized_jsd_topk(tokens, ids, of_each, arrays)
    by_row = adapter.generalized_jsd_topk(tokens[0], ids[0], weights[0], taught[0])
    single = adapter.generalized_jsd_topk(tokens[1], ids[1], of_each[1], taught[1])
    assert again.loss == pytest.approx(by_row.loss + single.loss, rel=1e-12)
    np.testing.assert_array_equal(by_row.divergences, again.divergences[0])
    assert by_row.loss == pytest.approx(weights[0] @ by_row.divergences, rel=1e-5)


def test_the_face_refuses_what_does_not_fit(tiny_model_dir: Path) -> None:
    model = tinsmith.Model(tiny_model_dir, device="cpu", threads=1)
    adapter = model.lora(rank=2)
    tokens, ids = np.arange(5), np.arange(15).reshape(5, 3)
    taught, weights = np.zeros((5, 3)), np.ones(5)

    def give(
        ids: np.ndarray = ids, weights: Any = weights, taught: Any = taught, **options: Any
    ) -> Callable[[], object]:
        return lambda: adapter.generalized_jsd_topk(tokens, ids, weights, taught, **options)

    for refused, kind, sentence in (
        (give(taught=None), TypeError, "generalized_jsd_topk needs teacher_logprobs"),
        (give(teacher=model), TypeError, "no argument 'teacher'"),
        (give(top_k=2), TypeError, "no argument 'top_k'"),
        (give(ids=tokens), ValueError, r"targets has shape \(5,\); it must be \(5, K\)"),
        (give(taught=np.zeros((5, 2))), ValueError, "they must agree"),
        (give(taught=np.zeros(5)), ValueError, "they must agree"),
        (give(weights=None), TypeError, "generalized_jsd needs weights"),
        (give(weights=np.ones(3)), ValueError, "they must agree"),
        (give(taught=taught + np.nan), ValueError, "datum 0: teacher_logprobs .* nan"),
        (give(taught=taught + NONE), ValueError, "at position 0 has no entry"),
        (give(ids=ids // 2), ValueError, "position 0 has id 0 twice"),
        (give(beta=2), ValueError, r"beta must be in \[0, 1\], not 2"),
    ):
        with pytest.raises(kind, match=sentence):
            refused()
        assert not adapter.core.read("gradients").any()


@cpu_only
@pytest.mark.usefixtures("on")
def test_each_form_has_its_own_call() -> None:
    adapter, lesson = adapter_of("qwen3"), pair("qwen3", 3, 6, 5)
    with pytest.raises(ValueError, match="needs a teacher: use distill, or give its teacher_logp"):
        call(adapter, [datum(lesson.tokens, lesson.targets, weights=lesson.weights)], LOSS)
    arrays = {"weights": lesson.weights, "teacher_logprobs": lesson.weights}
    ends = [np.array([len(part)], np.int32) for part in (lesson.tokens, lesson.teacher)]
    with pytest.raises(ValueError, match="either the teacher's tokens or its teacher_logprobs"):
        adapter.distill(
            lesson.tokens, ends[0], lesson.targets, np.ones(1, np.int32), LOSS, arrays, {},
            lesson.teacher, ends[1],
        )  # fmt: skip
    double = np.repeat(lesson.targets, 2), np.full(1, 2, np.int32)
    with pytest.raises(ValueError, match="datum 0 has 2 targets a position; with teacher_tokens"):
        adapter.distill(
            lesson.tokens, ends[0], *double, LOSS, {"weights": np.repeat(lesson.weights, 2)}, {},
            lesson.teacher, ends[1],
        )  # fmt: skip
    assert not adapter.read("gradients").any()
