"""Inflight sampling sessions: their requests go on with a run's newer weights from the next token.

In the engine a request of a session is given other weights between two steps. What comes after is
compared with what the trainer's forward gives on the weights that drew it, and, where all keys were
computed by one of the two, with the same request without a session, bit for bit."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from conftest import Wire, make_datum
from support.sampler_loop import finish, run
from support.tiny_models import assert_same, loaded, randomize, tokens_of, with_peft
from tinsmith import _core

PAGE = 64
PROMPT = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def core() -> _core.Model:
    return loaded("qwen3").core


@pytest.fixture(scope="module")
def weights(core: _core.Model) -> list[_core.Adapter]:
    """Of one run at two of its steps, far enough from each other."""
    return [randomize(_core.Adapter(core, rank=4), seed).snapshot() for seed in (1, 2)]


def alone(core: _core.Model, prompt: np.ndarray, adapter: Any, **options: Any) -> Any:
    return run(_core.Sampler(core, tokens=512), prompt, adapter, **options)


def test_each_tokens_logprob_is_that_of_the_weights_that_drew_it(core, weights) -> None:
    """transformers and PEFT: one model's keys and values, and then the other model over them."""
    old, new = weights
    sampler, prompt = _core.Sampler(core, tokens=512), tokens_of("qwen3", 20)
    sampler.add(0, prompt, old, max_tokens=8, seed=3, session=1)
    for _ in range(3):
        sampler.step()
    sampler.set_adapter(0, new)
    [sample] = finish(sampler, 0)[0]["samples"]
    whole = np.concatenate([prompt, sample["tokens"]])
    cut = len(prompt) + 2  # the third token is run by the new weights, and predicts the fourth
    with torch.no_grad():
        before = with_peft("qwen3", old, torch.float64)(
            torch.from_numpy(whole[None, :cut]).long(), use_cache=True
        )
        after = with_peft("qwen3", new, torch.float64)(
            torch.from_numpy(whole[None, cut:]).long(), past_key_values=before.past_key_values
        )
    logits = torch.cat([before.logits, after.logits], dim=1)[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(8), sample["tokens"]].numpy()
    np.testing.assert_allclose(sample["logprobs"], wanted, atol=1e-4)
    first = alone(core, prompt, old, max_tokens=8)["samples"][0]
    np.testing.assert_array_equal(sample["logprobs"][:3], first["logprobs"][:3])
    assert np.abs(sample["logprobs"][3:] - first["logprobs"][3:]).min() > 1e-3


def test_weights_that_come_before_the_first_step_are_the_requests_alone(core, weights) -> None:
    """And only those of its own session: to the bit as without one."""
    old, new = weights
    sampler, prompt = _core.Sampler(core, tokens=512), tokens_of("qwen3", 20)
    sampler.add(0, prompt, old, max_tokens=5, seed=3, session=1)
    sampler.add(1, prompt, old, max_tokens=5, seed=3, session=2)
    sampler.set_adapter(0, new)
    first, second = finish(sampler, 0, 1)
    assert_same(first, alone(core, prompt, new))
    assert_same(second, alone(core, prompt, old))


@pytest.mark.usefixtures("on")
def test_recorded_steps_follow_too() -> None:
    """Where a device records decoding steps, they belong to the weights that they read."""
    core, prompt, found = loaded("qwen3").core, tokens_of("qwen3", 20), []
    old, new = (randomize(_core.Adapter(core, rank=4), seed).snapshot() for seed in (1, 2))
    for graphs in (True, False):
        sampler = _core.Sampler(core, tokens=512, graphs=graphs)
        sampler.add(0, prompt, old, max_tokens=12, seed=3, session=1)
        for _ in range(6):
            sampler.step()
        sampler.set_adapter(0, new)
        found += finish(sampler, 0)
    assert_same(*found)
    kept = run(_core.Sampler(core, tokens=512), prompt, old, max_tokens=12)["samples"][0]
    [sample] = found[0]["samples"]
    np.testing.assert_array_equal(sample["logprobs"][:6], kept["logprobs"][:6])
    assert not np.array_equal(sample["logprobs"][6:], kept["logprobs"][6:])


def test_pages_of_older_weights_are_found_in_their_session_alone(core, weights) -> None:
    old, new = weights
    sampler, prompt = _core.Sampler(core, tokens=4096), tokens_of("qwen3", 2 * PAGE + 9)
    sampler.add(0, prompt, old, max_tokens=5, seed=3, session=1)
    sampler.step()
    sampler.set_adapter(0, new)  # the pages of the prompt are the old weights'
    finish(sampler, 0)
    same = run(sampler, prompt, new, session=1)
    assert same["prompt_reused"] == 2 * PAGE
    for adapter, session in ((new, 0), (new, 2), (old, 0), (None, 0), (old, 3)):
        found = run(sampler, prompt, adapter, session=session)
        assert found["prompt_reused"] == 0, (session, "found what other weights computed")
        assert_same(found, alone(core, prompt, adapter))
    assert not np.array_equal(
        same["samples"][0]["logprobs"], alone(core, prompt, new)["samples"][0]["logprobs"]
    )


def test_pages_without_a_session_are_not_found_in_one(core, weights) -> None:
    old, _ = weights
    sampler, prompt = _core.Sampler(core, tokens=4096), tokens_of("qwen3", PAGE + 9)
    run(sampler, prompt, old)
    assert run(sampler, prompt, old, session=1)["prompt_reused"] == 0
    assert run(sampler, prompt, old)["prompt_reused"] == PAGE


def test_a_prompt_is_scored_by_the_weights_that_run_it(core, weights) -> None:
    """Scores are not remembered in a session: the next request gets those of newer weights."""
    old, new = weights
    sampler, prompt = _core.Sampler(core, tokens=4096), tokens_of("qwen3", PAGE + 30)
    options = {"prompt_logprobs": True, "topk_prompt": 3, "max_tokens": 1}
    assert_same(
        run(sampler, prompt, old, session=1, **options), alone(core, prompt, old, **options)
    )
    assert_same(
        run(sampler, prompt, new, session=1, **options), alone(core, prompt, new, **options)
    )


def test_what_follows_must_be_there_and_of_a_session(core, weights) -> None:
    old, new = weights
    sampler = _core.Sampler(core, tokens=512)
    sampler.add(0, tokens_of("qwen3", 5), old, max_tokens=2, seed=3)
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"no request {number} of a session is here"):
            sampler.set_adapter(number, new)
    sampler.add(1, tokens_of("qwen3", 5), old, max_tokens=2, seed=3, session=1)
    other = _core.Adapter(loaded("llama").core, rank=4)
    with pytest.raises(ValueError, match="belongs to another model"):
        sampler.set_adapter(1, other)
    with pytest.raises(TypeError):
        sampler.set_adapter(1, None)
    finish(sampler, 0, 1)


def test_a_request_keeps_its_newer_weights_alive(core) -> None:
    sampler, prompt = _core.Sampler(core, tokens=512), tokens_of("qwen3", 5)
    made = [randomize(_core.Adapter(core, rank=4), seed) for seed in (1, 2)]
    wanted = alone(core, prompt, made[1])
    sampler.add(0, prompt, made[0], max_tokens=5, seed=3, session=1)
    sampler.set_adapter(0, made[1])
    made.clear()
    assert_same(finish(sampler, 0)[0], wanted)


def test_a_preempted_prompt_that_finds_its_own_pages_found_nothing(core) -> None:
    """The first request needs a second page, of which the other one gives up its three."""
    sampler = _core.Sampler(core, tokens=4 * PAGE)
    sampler.add(0, tokens_of("qwen3", PAGE - 4), None, max_tokens=20, seed=3)
    sampler.add(1, tokens_of("qwen3", 2 * PAGE + 9), None, max_tokens=20, seed=3)
    found = finish(sampler, 0, 1)
    assert sampler.reused == 2 * PAGE and [one["prompt_reused"] for one in found] == [0, 0]


@pytest.mark.parametrize("samples", (1, 3))
def test_a_prompts_tokens_in_the_cache_are_counted_once(core, samples: int) -> None:
    sampler, prompt = _core.Sampler(core, tokens=4096), tokens_of("qwen3", 2 * PAGE + 9)
    options = {"num_samples": samples, "max_tokens": 20}
    assert run(sampler, prompt, None, **options)["prompt_reused"] == 0
    again = run(sampler, prompt, None, **options)
    assert again["prompt_reused"] == 2 * PAGE
    longer = np.concatenate([prompt[: PAGE + 5], tokens_of("qwen3", 70, seed=4)])
    assert run(sampler, longer, None, **options)["prompt_reused"] == PAGE


# ---- through the SDK ----


@pytest.fixture
def client(service_client):
    return service_client.create_lora_training_client("tiny", rank=4, seed=1).result()


def train(client, rate: float = 0.05) -> None:
    client.forward_backward([make_datum([5, 6, 7, 8], [6, 7, 8, 9])], "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=rate)).result()


def sampler_of(client, kind: str):
    return client.save_weights_and_get_sampling_client(kind=kind).result()


def ask(sampler, count: int = 6, seed: int = 3):
    params = tinker.SamplingParams(max_tokens=count, seed=seed, stop=[])
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params)


def said(sampler) -> tuple[list[int], list[float]]:
    [sequence] = ask(sampler).result().sequences
    return sequence.tokens, sequence.logprobs


def test_an_inflight_client_has_the_weights_of_the_newest_inflight_save(client) -> None:
    first, fixed = sampler_of(client, "inflight"), sampler_of(client, "snapshot")
    start = said(fixed)
    assert said(first) == start
    train(client)
    assert said(first) == start  # a step alone publishes nothing
    newer = sampler_of(client, "snapshot")
    assert said(first) == start  # nor does a snapshot
    second = sampler_of(client, "inflight")
    moved = said(newer)
    assert moved != start and said(second) == moved
    assert said(first) == moved  # prompt and tokens are less than a page: nothing is cached
    assert said(fixed) == start


def test_requests_under_way_go_on_with_the_new_weights(client, server, monkeypatch) -> None:
    """The decoder is held after some tokens, while the run publishes."""
    from tinsmith.engine.decoding import Decoder

    sampler = sampler_of(client, "inflight")
    length = 60
    whole = ask(sampler, length).result().sequences[0]
    train(client)
    steps, step = [0], Decoder.step
    held, go = threading.Event(), threading.Event()

    def hold(self) -> None:
        if steps[0] < 5 or go.is_set():
            steps[0] += 1
            step(self)
        else:
            held.set()

    monkeypatch.setattr(Decoder, "step", hold)
    future = ask(sampler, length)
    assert held.wait(60)
    second = sampler_of(client, "inflight")
    go.set()
    mixed = future.result().sequences[0]
    monkeypatch.setattr(Decoder, "step", step)
    fresh = ask(second, length).result().sequences[0]
    same = [a == b for a, b in zip(mixed.logprobs, whole.logprobs, strict=True)]
    changed = same.index(False)
    assert 3 <= changed < length - 3 and not any(same[changed + 3 :])
    assert mixed.logprobs != fresh.logprobs and len(mixed.tokens) == length


def test_another_run_is_not_followed(service_client, client) -> None:
    other = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    mine, theirs = sampler_of(client, "inflight"), sampler_of(other, "inflight")
    start = said(theirs)
    train(client)
    sampler_of(client, "inflight")
    assert said(mine) != start and said(theirs) == start


@pytest.fixture
def wire(server) -> Iterator[Wire]:
    yield Wire(server.url)


@pytest.mark.parametrize(
    ("body", "sentence"),
    (
        ({"kind": "live", "sampling_session_seq_id": 0}, "kind must be 'snapshot' or 'inflight'"),
        ({"kind": "inflight", "path": "x"}, "inflight weights change"),
        ({"sampling_session_seq_id": 0, "ttl_seconds": 3600}, "ttl_seconds needs a path"),
        ({"sampling_session_seq_id": 0, "user_metadata": {"a": "b"}}, "user_metadata needs a path"),
    ),
)
def test_what_does_not_go_together_is_refused(wire: Wire, body: dict, sentence: str) -> None:
    reply = wire.post("/save_weights_for_sampler", model_id=wire.create(), seq_id=1, **body)
    assert sentence in wire.result(reply)["error"]


def test_the_sdk_gets_the_prompts_tokens_that_were_in_the_cache(service_client) -> None:
    sampler = service_client.create_sampling_client(base_model="tiny").result()
    prompt = tinker.ModelInput.from_ints([(7 * i) % 250 for i in range(PAGE + 10)])
    params = tinker.SamplingParams(max_tokens=2, seed=1)
    found = [sampler.sample(prompt, 2, params).result().prompt_cache_hit_tokens for _ in range(2)]
    assert found == [0, PAGE]
