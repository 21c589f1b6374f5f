"""The face's generalized_jsd: the API's numbers, every kind of teacher, and bad lessons refused."""

import threading
from pathlib import Path

import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import VOCAB
from support import tiny_models
from support.api_cases import state

RNG = np.random.default_rng(0)


def lessons() -> tuple[list, list, list, list]:
    """Tokens, targets and weights of two completions, and what a teacher reads."""
    rows = [RNG.integers(3, 280, length).astype(np.int32) for length in (15, 8)]
    weights = [np.r_[np.zeros(5), RNG.uniform(0.5, 1.5, len(row) - 6)] for row in rows]
    read = [np.r_[RNG.integers(3, 280, 20), row[6:]].astype(np.int32) for row in rows]
    return [row[:-1] for row in rows], [row[1:] for row in rows], weights, read


def test_generalized_jsd_equals_the_api_bit_for_bit(model, service_client) -> None:
    tokens, targets, weights, read = lessons()
    data = [
        tinker.Datum(
            tinker.ModelInput.from_ints(row.tolist()),
            {
                "target_tokens": target.astype(np.int64),
                "weights": weight.astype(np.float32),
                "teacher_tokens": taught.astype(np.int64),
            },
        )
        for row, target, weight, taught in zip(tokens, targets, weights, read, strict=True)
    ]
    for config in ({}, {"beta": 0.1, "temperature": 2.0, "top_k": 30, "token_clip": 0.05}):
        client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
        adapter = model.lora(rank=4, seed=7)
        for _ in range(2):
            theirs = client.forward_backward(data, "generalized_jsd", config).result()
            ours = adapter.generalized_jsd(tokens, targets, weights, read, **config)
            assert ours.loss == pytest.approx(theirs.metrics["loss:sum"], abs=0)
            rows = zip(ours.logprobs, ours.divergences, theirs.loss_fn_outputs, strict=True)
            for mine, gap, other in rows:
                np.testing.assert_array_equal(mine, other["logprobs"].to_numpy())
                np.testing.assert_array_equal(gap, other["jsd"].to_numpy())
            metrics = client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics
            assert adapter.optim_step(1e-2).grad_norm in metrics.values()


def test_generalized_jsd_over_the_top_k_is_what_numpy_makes_of_forward_and_backward(model) -> None:
    tokens, targets, weights, read = lessons()
    together, apart = (models_away(model) for _ in range(2))
    wanted = together.generalized_jsd(tokens[0], targets[0], weights[0], read[0], top_k=7, beta=0.3)
    top = model.topk_logprobs(read[0], 7)
    count = len(targets[0]) - 5
    ids, taught = np.zeros((len(tokens[0]), 7), np.int32), np.zeros((len(tokens[0]), 7))
    ids[5:], taught[5:] = top.ids[-count:], top.logprobs[-count:]
    found = torch.from_numpy(apart.forward(tokens[0], ids)).double().requires_grad_()
    q, p = found.log_softmax(-1), torch.from_numpy(taught).log_softmax(-1)
    m = torch.log(0.3 * p.exp() + 0.7 * q.exp())
    jsd = (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(-1)
    (torch.from_numpy(weights[0]) * jsd).sum().backward()
    apart.backward(found.grad)
    np.testing.assert_allclose(wanted.divergences[5:], jsd.detach()[5:], rtol=1e-4, atol=1e-7)
    for name, gradient in together.gradients().items():
        assert tiny_models.error(apart.gradients()[name], gradient) < 1e-4, name


def models_away(model: tinsmith.Model) -> tinsmith.Adapter:
    made = model.lora(rank=4, seed=3)
    tiny_models.randomize(made.core, seed=3)
    return made


def test_teachers_are_the_base_adapters_snapshots_and_other_models(
    model, adapter, tiny_model_dir: Path
) -> None:
    tokens, targets, weights, read = lessons()

    def loss(teacher: object, beta: float = 0.5) -> float:
        return adapter.generalized_jsd(
            tokens, targets, weights, read, teacher=teacher, beta=beta
        ).loss

    other = tinsmith.Model(tiny_model_dir, device="cpu", threads=1)
    assert loss(None) == loss(model) == loss(other)
    assert loss(adapter) == loss(adapter.snapshot())
    assert loss(adapter) != loss(None)
    elsewhere = other.lora(rank=4)
    elsewhere.core.write("weights", adapter.core.read("weights"))
    assert loss(elsewhere) == loss(adapter)
    average = adapter.snapshot()
    average.ema_update(models_away(model), 0.75)
    wanted = 0.75 * adapter.core.read("weights") + 0.25 * models_away(model).core.read("weights")
    np.testing.assert_allclose(average.core.read("weights"), wanted, atol=1e-6)


def test_two_models_teach_each_other_from_two_threads(tiny_model_dir: Path) -> None:
    """Both models' turns are taken in one order: neither thread waits for the other for ever."""
    pair = [tinsmith.Model(tiny_model_dir, device="cpu", threads=1) for _ in range(2)]
    adapters = [model.lora(rank=2, seed=1) for model in pair]
    lesson, losses = lessons(), []

    def teach(student: tinsmith.Adapter, teacher: tinsmith.Model) -> None:
        for _ in range(20):
            losses.append(student.generalized_jsd(*lesson, teacher=teacher).loss)

    threads = [
        threading.Thread(target=teach, args=(adapters[index], pair[1 - index]), daemon=True)
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(losses) == 40
    assert len(set(losses)) == 1


def test_a_bad_lesson_is_refused_and_changes_nothing(model, adapter) -> None:
    tokens, targets, weights, read = (item[0] for item in lessons())
    before = state(adapter)

    def teach(**options: object) -> object:
        return lambda: adapter.generalized_jsd(tokens, targets, weights, read, **options)

    def taught(weights: object, read: object) -> object:
        return lambda: adapter.generalized_jsd(tokens, targets, weights, read)

    for call, kind, sentence in (
        (teach(beta=1.5), ValueError, r"beta must be in \[0, 1\], not 1.5"),
        (teach(temperature=0), ValueError, "temperature must be more than 0"),
        (teach(temperature=1e-46), ValueError, "temperature must be from 1e-30 to 1e"),
        (teach(top_k=VOCAB + 1), ValueError, "top_k must be a whole number"),
        (teach(top_k=2.5), ValueError, "top_k must be a whole number"),
        (teach(token_clip=-1.0), ValueError, "token_clip must be more than 0"),
        (teach(teacher="base"), TypeError, "tinsmith Adapter or Model, or None; str came"),
        (taught(None, read), TypeError, "generalized_jsd needs weights"),
        (taught(weights, read * 1.0), TypeError, "teacher_tokens must be integers, float64 came"),
        (taught(weights, [read]), ValueError, "a list for a list"),
        (taught(weights, read[:-1]), ValueError, "teacher"),
        (taught(weights, read + VOCAB), IndexError, "teacher"),
        (
            lambda: adapter.forward_backward(tokens, targets, weights, "generalized_jsd"),
            ValueError,
            "call adapter.generalized_jsd",
        ),
        (lambda: adapter.ema_update(None, 0.5), TypeError, "leader must be a tinsmith.Adapter"),
        (lambda: adapter.ema_update(model.lora(rank=3), 0.5), ValueError, "layout|rank|other"),
    ):
        with pytest.raises(kind, match=sentence):
            call()
        assert state(adapter) == before
