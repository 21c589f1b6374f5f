"""A run whose weights have left the range: its requests end at their first bad token, each for
itself, and the sentence names the step in which it happened. That step is warned of, and so is one
without a gradient; a step that is refused says what helps."""

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import tinsmith
from conftest import make_datum
from support.sampler_loop import finish
from support.tiny_models import call, cpu_only, datum, loaded, randomize, tokens_of
from support.training_cases import ADAM, batch
from test_dimuon import DIMUON
from tinsmith import _core
from tinsmith.engine.decoding import Decoder, SampleDelta, SampleRequest, SampleResult
from tinsmith.engine.errors import RequestError
from tinsmith.models.registry import load_model

pytestmark = pytest.mark.pairs

PAGE = 64
NO_NUMBERS = "log-probabilities are not numbers here: its weights, or the adapter's, are so large"
GREW = r"the weights' norm grew from [\d.]+ to [\d.]+e\+3\d in step {}; load a checkpoint from"
SETTINGS = {"adamw": ADAM, "dimuon": DIMUON}
on_each_device = pytest.mark.usefixtures("on")


def made(seed: int = 1, **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded("qwen3").core, rank=4, alpha=8.0, **options), seed)


def diverged(seed: int = 2) -> _core.Adapter:
    """The weights of a run after a step with a learning rate of 1e30."""
    adapter = made(seed)
    call(adapter, batch("qwen3"))
    adapter.optim_step(**ADAM | {"learning_rate": 1e30})
    return adapter.snapshot()


# ---- sampling ----

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 3.0, "top_k": 5, "top_p": 0.9},
    "several": {"num_samples": 3},
    "likeliest": {"topk_sample": 4},
    "scored": {"prompt_logprobs": True},
    "scored likeliest": {"topk_prompt": 3},
    "scored at its end": {"prompt_logprobs": True, "prompt_from": 20},
    "drawn": {"prompt_draws": 2},
    "of a session": {"session": 9},
}


@on_each_device
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_request_ends_at_its_first_bad_token_and_no_other_notices(asked: dict[str, Any]) -> None:
    core, prompt = loaded("qwen3").core, tokens_of("qwen3", 30)
    good, bad, sampler = made().snapshot(), diverged(), _core.Sampler(core, tokens=1024)
    alone = _core.Sampler(core, tokens=1024)
    for one in (sampler, alone):
        one.add(0, prompt, good, max_tokens=12, seed=3, prompt_logprobs=True)
    wanted = finish(alone, 0)[0]
    sampler.step()
    sampler.add(1, prompt, bad, max_tokens=90, seed=4, **asked)
    done: list[int] = []
    for _ in range(10):  # on a GPU a prompt waits a few steps for others
        drawn, done = sampler.step()
        assert all(number == 0 for number, _, _ in drawn)
        if done:
            break
    assert done == [1] and sampler.cache["held"] == 1  # the other's page
    with pytest.raises(FloatingPointError, match=f"{NO_NUMBERS} .*; {GREW.format(1)}"):
        sampler.take(1)
    with pytest.raises(ValueError, match="no request 1 is here"):
        sampler.take(1)
    found = finish(sampler, 0)[0]
    assert found["samples"][0]["tokens"].tolist() == wanted["samples"][0]["tokens"].tolist()
    assert found["samples"][0]["logprobs"].tobytes() == wanted["samples"][0]["logprobs"].tobytes()
    assert found["prompt_logprobs"].tobytes() == wanted["prompt_logprobs"].tobytes()
    assert sampler.cache["held"] == 0


@on_each_device
def test_a_bad_token_of_a_recorded_step_ends_its_request() -> None:
    """Of the second request on, one row is missing in the cache: a step that only decodes. It runs,
    is recorded, and is replayed."""
    sampler, prompt = _core.Sampler(loaded("qwen3").core, tokens=1024), tokens_of("qwen3", PAGE + 1)
    bad = diverged()
    for number in range(5):
        sampler.add(number, prompt, bad, max_tokens=20, seed=number)
        assert sampler.step() == ([], [number])
        with pytest.raises(FloatingPointError, match=NO_NUMBERS):
            sampler.take(number)
    steps, replays = sampler.replays
    assert sampler.reused == 4 * PAGE and (steps, replays) in ((4, 3), (0, 0))


@on_each_device
def test_a_session_whose_weights_are_good_again_finds_no_bad_pages() -> None:
    core, prompt = loaded("qwen3").core, tokens_of("qwen3", PAGE + 6)
    good, sampler = made().snapshot(), _core.Sampler(core, tokens=1024)
    sampler.add(0, prompt, diverged(), max_tokens=4, seed=1, session=7)
    assert sampler.step() == ([], [0])
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        sampler.take(0)
    for one, number in ((sampler, 1), (other := _core.Sampler(core, tokens=1024), 2)):
        one.add(number, prompt, good, max_tokens=4, seed=1, session=7)
    found, wanted = finish(sampler, 1)[0], finish(other, 2)[0]
    assert found["prompt_reused"] == 0
    np.testing.assert_array_equal(found["samples"][0]["tokens"], wanted["samples"][0]["tokens"])


@cpu_only
@on_each_device
def test_a_session_that_is_given_bad_weights_ends_in_the_next_step() -> None:
    sampler, prompt = _core.Sampler(loaded("qwen3").core, tokens=512), tokens_of("qwen3", 9)
    sampler.add(0, prompt, made().snapshot(), num_samples=2, max_tokens=40, seed=1, session=7)
    for _ in range(3):
        assert sampler.step()[1] == []
    sampler.set_adapter(0, diverged())
    assert sampler.step() == ([], [0])
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        sampler.take(0)


def leaning(size: float) -> _core.Adapter:
    """It adds a multiple of a row's sum to the logit of id 7, and to no other."""
    adapter = _core.Adapter(loaded("qwen3").core, rank=1, attn=False, mlp=False)
    flat = np.full(adapter.size, 1e3, np.float32)
    [offset, _, columns] = next(row[4:] for row in adapter.layout if row[3] == "B")
    flat[offset : offset + columns] = 0
    flat[offset + 7] = size
    adapter.write("weights", flat)
    return adapter


@cpu_only
@on_each_device
def test_scores_that_the_cache_remembers_are_as_bad() -> None:
    """Of one row alone, whose logit of the next token is infinite; that of the last row is -inf."""
    weak, none, bad = leaning(1e-6), leaning(0.0), leaning(5e37).snapshot()
    for seed in range(100):
        prompt = tokens_of("qwen3", PAGE + 9, seed)
        prompt[20] = 7
        asked = [datum(prompt, np.full(len(prompt), 7))]
        found = [call(one, asked, backward=False)[0][0] for one in (weak, none)]
        leans = found[0] - found[1]
        if leans[19] > 0 > leans[-1]:
            break
    assert leans[19] > 0 > leans[-1]
    sampler = _core.Sampler(loaded("qwen3").core, tokens=1024)
    sampler.add(9, prompt, bad, max_tokens=1)
    assert sampler.step()[1] == [9] and len(sampler.take(9)["samples"][0]["tokens"]) == 1
    for number in range(2):
        sampler.add(number, prompt, bad, max_tokens=1, prompt_logprobs=True)
        assert sampler.step()[1] == [number]
        with pytest.raises(FloatingPointError, match=NO_NUMBERS):
            sampler.take(number)
    assert sampler.reused >= PAGE


@cpu_only
@on_each_device
def test_a_long_scored_prompt_ends_before_anything_is_drawn() -> None:
    """The fourth prompt has 62 rows of the first step's 512, and not its last."""
    sampler = _core.Sampler(loaded("qwen3").core, tokens=1024)
    for number in range(4):
        weights = diverged() if number == 3 else None
        prompt = tokens_of("qwen3", 150, seed=number)
        sampler.add(number, prompt, weights, max_tokens=2, prompt_logprobs=True)
    drawn, done = sampler.step()
    assert [number for number, _, _ in drawn] == [0, 1, 2] and done == [3]


def test_a_stream_ends_at_once_and_hears_nothing(tiny_model_dir: Path) -> None:
    base = load_model(tiny_model_dir, threads=1)
    adapter = _core.Adapter(base.core, rank=2)
    adapter.write("weights", np.full(adapter.size, 1e35, np.float32))
    decoder, heard = Decoder(), list[SampleDelta]()
    decoder.open(base)
    futures = [Future[SampleResult]() for _ in range(3)]
    for future, weights, listener in zip(
        futures, (adapter, None, adapter), (heard.extend, None, None), strict=True
    ):
        request = SampleRequest(np.arange(5, 15, dtype=np.int32), num_samples=2, max_tokens=60)
        decoder.add(base, weights, request, future, listener=listener)
    steps = 0
    while not (futures[0].done() and futures[2].done()):
        decoder.step()
        steps += 1
    assert steps <= 2 and not heard and not futures[1].done()
    for future in (futures[0], futures[2]):
        error = future.exception(0)
        assert isinstance(error, RequestError) and NO_NUMBERS in str(error)
        assert isinstance(error.__cause__, FloatingPointError)
    while decoder.active:
        decoder.step()
    assert [len(one.tokens) for one in futures[1].result(0).samples] == [60, 60]


# ---- steps ----


@on_each_device
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_step_in_which_the_weights_left_the_range_is_named(kind: str) -> None:
    adapter, settings, data = made(optimizer=kind), SETTINGS[kind], batch("qwen3")
    before = adapter.read("weights")
    for _ in range(2):
        call(adapter, data)
        assert adapter.optim_step(**settings)["warning"] == ""
    norm = np.linalg.norm(adapter.read("weights").astype(float))
    earlier = adapter.snapshot()
    call(adapter, data)
    report = adapter.optim_step(**settings | {"learning_rate": 1e30})
    grew = f"the weights' norm grew from {norm:.3g} to {report['weight_norm']:.3g} in step 3"
    assert report["warning"] == f"{grew}; load a checkpoint from before it"
    told: list[str] = []
    for ask in (lambda: call(adapter, data), lambda: sample(adapter.snapshot())):
        with pytest.raises(FloatingPointError, match=GREW.format(3)) as caught:
            ask()
        told.append(str(caught.value))
    assert all(grew in one for one in told)
    assert len(sample(earlier)["samples"][0]["tokens"]) == 2
    adapter.write("weights", before)  # as a checkpoint is loaded
    call(adapter, data)
    assert adapter.optim_step(**settings)["warning"] == ""
    adapter.write("weights", np.full(adapter.size, 1e35, np.float32))
    with pytest.raises(FloatingPointError) as caught:
        call(adapter, data)
    assert "grew" not in str(caught.value)


def sample(adapter: _core.Adapter) -> dict[str, Any]:
    sampler = _core.Sampler(loaded("qwen3").core, tokens=256)
    sampler.add(0, tokens_of("qwen3", 9), adapter, max_tokens=2)
    return finish(sampler, 0)[0]


@cpu_only
@on_each_device
@pytest.mark.parametrize(("factor", "warned"), [(900.0, False), (1100.0, True)])
def test_weights_may_grow_to_less_than_a_thousand_times_their_norm(
    factor: float, warned: bool
) -> None:
    adapter = made()
    norm = np.linalg.norm(adapter.read("weights").astype(float))
    call(adapter, batch("qwen3"))
    rate = factor * norm / np.sqrt(adapter.size)  # AdamW's first step moves each number by it
    report = adapter.optim_step(**ADAM | {"learning_rate": rate, "eps": 0.0})
    assert report["weight_norm"] == pytest.approx(factor * norm, rel=0.05)
    assert ("grew" in report["warning"]) == warned


@pytest.mark.pairs(False)
@on_each_device
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_without_a_gradient_is_warned_of(kind: str) -> None:
    adapter, settings, data = made(optimizer=kind), SETTINGS[kind], batch("qwen3")
    told = "step {} had no gradient: no forward_backward came before it"
    assert adapter.optim_step(**settings)["warning"].startswith(told.format(1))
    call(adapter, data)
    assert adapter.optim_step(**settings)["warning"] == ""
    weights = adapter.read("weights")
    assert adapter.optim_step(**settings)["warning"].startswith(told.format(3))
    assert (adapter.read("weights") != weights).any()  # by momentum
    nothing = [one.inputs["weights"] * 0 for one in data]
    for one, zeros in zip(data, nothing, strict=True):
        one.inputs["weights"] = zeros
    call(adapter, data)
    assert adapter.optim_step(**settings)["warning"] == ""  # a gradient of zero is one
    call(adapter, data)
    adapter.clear_gradients()
    assert adapter.optim_step(**settings)["warning"].startswith(told.format(5))


@pytest.mark.pairs(False)
@on_each_device
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_that_a_huge_gradient_has_refused_is_taken_with_a_clipped_one(kind: str) -> None:
    adapter, settings = made(optimizer=kind), SETTINGS[kind]
    call(adapter, batch("qwen3"))
    adapter.write("gradients", adapter.read("gradients") * np.float32(1e32))
    if kind == "adamw":
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=r"with grad_clip_norm or .* zero_grad"):
                adapter.optim_step(**settings)
            call(adapter, batch("qwen3"))  # its gradient is added to the huge one
    report = adapter.optim_step(**settings | {"grad_clip_norm": 1.0})
    assert report["grad_norm"] > 1e25 and report["grad_norm_clipped"] == pytest.approx(1.0)
    call(adapter, batch("qwen3"))
    assert adapter.optim_step(**settings)["warning"] == ""


# ---- a server and a loop in this process ----

DATA = [make_datum([11, 12, 13, 15], [12, 13, 15, 14], weights=[1, 1, 1, 1])]


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_a_servers_client_reads_the_step_and_the_log_has_the_warning(
    server, service_client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    run = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    other = service_client.create_lora_training_client("tiny", rank=4, seed=2).result()
    for rate in (1e-3, 1e30):
        run.forward_backward(DATA, "cross_entropy").result()
        run.optim_step(tinker.AdamParams(learning_rate=rate)).result()
    other.optim_step(tinker.AdamParams()).result()
    logged = [record.getMessage() for record in caplog.records]
    [grew] = [line for line in logged if "grew" in line]
    assert "in step 2; load a checkpoint from before it" in grew
    assert any("step 1 had no gradient" in line for line in logged)
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), {"max_tokens": 50, "seed": 1}
    good = other.save_weights_and_get_sampling_client()
    bad = run.save_weights_and_get_sampling_client()
    futures = [
        one.sample(prompt, 2, tinker.SamplingParams(temperature=t, **params))
        for one, t in ((bad, 1.0), (good, 1.0), (bad, 0.0))
    ]
    assert len(futures[1].result().sequences) == 2
    for future in (futures[0], futures[2]):
        with pytest.raises(tinker.RequestFailedError, match=GREW.format(2)):
            future.result()
    with pytest.raises(tinker.RequestFailedError, match=GREW.format(2)):
        run.forward_backward(DATA, "cross_entropy").result()
    steps, *_ = server._service.history.steps(run.model_id)
    assert [row.get("warning", "").partition(" grew")[0] for row in steps] == [
        "",
        "the weights' norm",
    ]


def test_a_loop_in_this_process_is_warned(model: tinsmith.Model, told) -> None:
    adapter = model.lora(rank=2, seed=1)
    adapter.forward_backward([11, 12, 13], [12, 13, 14])
    adapter.optim_step(learning_rate=1e30)
    with pytest.raises(FloatingPointError, match=GREW.format(1)):
        model.sampler().sample([5, 6, 7], adapter=adapter, max_tokens=100)
    adapter.optim_step()
    assert [line.partition(":")[0] for line in told()] == ["an adapter", "an adapter"]
    assert "grew" in told()[0] and "had no gradient" in told()[1]
    assert adapter.history[0].weight_norm > 1e29
