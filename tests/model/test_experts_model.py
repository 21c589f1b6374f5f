"""Models with experts against transformers in float64, with LoRA on experts as the hosted service
lays it out; and their results, whatever else is in a batch, in the cache or in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.sampler_loop import finish, run
from support.tiny_models import (
    MIXTURES,
    SPECS,
    assert_same,
    call,
    cpu_only,
    cut,
    datum,
    error,
    folder,
    loaded,
    logprobs,
    needs_bf16,
    randomize,
    reference,
    targets_of,
    tokens_of,
    with_peft,
)
from support.training_cases import ADAM, adapter_of, batch, check, torch_losses
from tinsmith import _core
from tinsmith.models.registry import load_model

pytestmark = [pytest.mark.usefixtures("on"), cpu_only]
NAMES = MIXTURES
Asked = dict[str, Any]  # the arguments of Sampler.add after the request's number


# ---- against transformers ----


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_of_every_token_with_and_without_an_adapter(name: str) -> None:
    vocab = SPECS[name].config["vocab_size"]
    for length in (1, 65, 130):
        one = datum(tokens_of(name, length), np.tile(np.arange(vocab), (length, 1)))
        adapter = adapter_of(name, seed=1, rank=3)
        (found,), _ = call(adapter, [one], backward=False)
        with torch.no_grad():
            wanted = targets_of(logprobs(with_peft(name, adapter), one.tokens), one).numpy()
            plain = targets_of(logprobs(reference(name), one.tokens), one).numpy()
        adapter.write("weights", np.zeros(adapter.size, np.float32))
        (base,), _ = call(adapter, [one], backward=False)
        assert np.abs(found - wanted).max() < 5e-5
        assert np.abs(base - plain).max() < 5e-5
        assert error(found, plain) > 0.01  # what an adapter changes would have been seen


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_autograd(name: str) -> None:
    check(name, adapter_of(name, rank=3), batch(name, (65, 3, 130)))


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_that_no_token_takes_has_no_gradient(name: str) -> None:
    """Of one token: the B of chosen experts alone, and both common factors."""
    adapter = adapter_of(name, rank=2)
    call(adapter, [replace(one, inputs={}) for one in batch(name, (1,))])
    gradients, chosen = adapter.read("gradients"), SPECS[name].config["num_experts_per_tok"]
    layers: dict[int, int] = {}
    for slot, layer, index, _, offset, rows, cols in adapter.layout:
        used = np.any(gradients[offset : offset + rows * cols])
        if slot in ("e_gate", "e_up", "e_down") and index < 0:
            assert used, (slot, layer)
        elif slot == "e_down":
            layers[layer] = layers.get(layer, 0) + int(used)
    assert layers and set(layers.values()) == {chosen}


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_equal_torch(name: str) -> None:
    data = [replace(one, inputs={}) for one in batch(name, (70, 5))]
    adapter, start = adapter_of(name, rank=4), adapter_of(name, rank=4)
    losses = []
    for _ in range(10):
        losses.append(call(adapter, data)[1])
        adapter.optim_step(**ADAM)
    wanted, _, matrices = torch_losses(name, start, data, 10, ADAM, torch.float64)
    assert losses[9] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    for key, matrix in cut(adapter, adapter.read("weights")).items():
        assert error(matrix, matrices[key]) < 2e-4, key


@needs_bf16
def test_products_in_bf16_err_as_bf16() -> None:
    """Of a model in bf16, on the device that computes in it: near the exact ones, and not them."""
    name = "qwen3_moe-tied"
    core = load_model(folder(name), dtype="bfloat16", threads=1).core
    assert core.device == "cpu-bf16"
    one = datum(tokens_of(name, 60))
    found, base = (
        call(randomize(_core.Adapter(used, rank=3, alpha=8.0)), [one], backward=False)[0][0]
        for used in (core, loaded(name).core)
    )
    assert 1e-4 < error(found, base) < 0.05


# ---- the same bits, whatever else is there ----


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_logprob_is_the_trainers_bit_for_bit(name: str) -> None:
    adapter = adapter_of(name, rank=3)
    sampler = _core.Sampler(loaded(name).core)
    for length in (1, 63, 70):
        prompt = tokens_of(name, length)
        (sample,) = run(sampler, prompt, adapter, max_tokens=40)["samples"]
        whole = np.concatenate([prompt, sample["tokens"]])
        (wanted,), _ = call(adapter, [datum(whole[:-1], whole[1:])], backward=False)
        np.testing.assert_array_equal(sample["logprobs"], wanted[length - 1 :])


def requests(name: str) -> list[Asked]:
    """Some of three adapters and none, that need several pages each."""
    one, two, three = (adapter_of(name, seed=seed, rank=seed) for seed in (1, 2, 3))
    return [
        {"prompt": tokens_of(name, 3), "max_tokens": 40, "seed": 1},
        {"prompt": tokens_of(name, 70), "adapter": one, "max_tokens": 33, "num_samples": 3},
        {"prompt": tokens_of(name, 1), "adapter": two, "max_tokens": 66, "temperature": 0.0},
        {"prompt": tokens_of(name, 130), "max_tokens": 20, "prompt_logprobs": True},
        {"prompt": tokens_of(name, 65), "adapter": three, "max_tokens": 20, "num_samples": 2},
    ]


def together(name: str, asked: list[Asked], **options: int) -> list[dict[str, Any]]:
    """Their results, decoded together by a new sampler."""
    sampler = _core.Sampler(loaded(name).core, **options)
    for number, one in enumerate(asked):
        sampler.add(number, **one)
    return finish(sampler, *range(len(asked)))


@pytest.mark.parametrize("name", NAMES)
def test_many_adapters_in_a_step_and_a_cache_that_is_too_small_change_nothing(name: str) -> None:
    asked = requests(name)
    alone = [together(name, [one])[0] for one in asked]
    for tokens in (0, 320):
        for found, wanted in zip(together(name, asked, tokens=tokens), alone, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_in_the_cache_gives_the_same(name: str) -> None:
    adapter = adapter_of(name, rank=2)
    prompt = tokens_of(name, 140)
    sampler = _core.Sampler(loaded(name).core, tokens=4096)
    first, second = (run(sampler, prompt, adapter) for _ in range(2))
    assert sampler.reused == 128
    assert_same(second, first)


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_and_smaller_batches_change_no_bit(name: str) -> None:
    data = batch(name, (66, 40, 3))
    plan = loaded(name).core.plan(5, 66, 1)
    found = []
    for options in ({}, {"step_bytes": plan["step"] + plan["scratch"], "step_tokens": 66}):
        adapter = adapter_of(name, **options)
        logp, loss = call(adapter, data)
        found.append((np.concatenate(logp), np.float64(loss), adapter.read("gradients")))
    assert plan["kept"] == 0  # nothing but each layer's input
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    alone = adapter_of(name, step_bytes=plan["step"] + plan["scratch"], step_tokens=66)
    kept = adapter_of(name, step_tokens=66)
    for adapter in (alone, kept):
        call(adapter, data)
    np.testing.assert_array_equal(alone.read("gradients"), kept.read("gradients"))
