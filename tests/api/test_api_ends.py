"""The face's beginnings and ends: with, close, the version, and what dir and repr show."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tinsmith
import torch
from support.api_cases import PROMPT, TOKENS

ROW = TOKENS[1]


@pytest.fixture
def opened(tiny_model_dir: Path) -> tinsmith.Model:
    """A model of the test's own, which it may close."""
    return tinsmith.Model(tiny_model_dir, device="cpu", threads=1)


# ---- close ----


def test_a_closed_model_is_held_by_nothing(opened: tinsmith.Model) -> None:
    """Its memory is the engine's object's, which goes with the last reference to it."""
    adapter, core = opened.lora(rank=2), opened.core
    opened.sampler().sample(PROMPT, adapter=adapter, max_tokens=2)
    adapter.forward(ROW[:-1], ROW[1:])
    assert sys.getrefcount(core) > 2
    opened.close()
    assert sys.getrefcount(core) == 2  # `core`, and getrefcount's own
    assert (opened.closed, adapter.closed) == (True, True)


def test_what_is_closed_says_so(opened: tinsmith.Model) -> None:
    adapter, sampler, snapshot = opened.lora(rank=2), opened.sampler(), opened.lora().snapshot()
    opened.close()
    opened.close()
    for call in (
        lambda: opened.logprobs(ROW),
        lambda: opened.lora(),
        lambda: opened.vocab,
        lambda: opened.__enter__(),
        lambda: sampler.sample(PROMPT),
        lambda: adapter.forward_backward(ROW, ROW),
        lambda: adapter.optim_step(),
        lambda: adapter.zero_grad(),
        lambda: adapter.rank,
        lambda: snapshot.forward(ROW, ROW),
    ):
        with pytest.raises(ValueError, match="the model is closed: load it again"):
            call()
    assert repr(opened) == "<tinsmith.Model tiny, closed>"
    assert repr(adapter) == "<tinsmith.Adapter, closed>"


def test_with_closes_at_the_end_and_after_an_error(tiny_model_dir: Path) -> None:
    with tinsmith.Model(tiny_model_dir, device="cpu", threads=1) as model:
        with pytest.raises(KeyError), model.lora(rank=2) as adapter:
            raise KeyError
        with pytest.raises(ValueError, match="the adapter is closed"):
            adapter.forward(ROW, ROW)
        with pytest.raises(ValueError, match="the adapter is closed"):
            model.sampler().sample(PROMPT, adapter=adapter)
        with pytest.raises(ValueError, match="the adapter is closed"):
            model.lora(rank=2).ema_update(adapter, 0.5)
        assert not model.closed
        assert len(model.logprobs(ROW)) == len(ROW) - 1
    assert model.closed


def test_close_waits_for_the_call_under_way(opened: tinsmith.Model) -> None:
    adapter, seen = opened.lora(rank=2, seed=1), []
    wanted = adapter.forward(ROW, ROW)
    begun = threading.Event()

    def score() -> None:
        while True:
            try:
                found = adapter.forward(ROW, ROW)
            except ValueError as error:
                seen.append(str(error))
                return
            np.testing.assert_array_equal(found, wanted)
            begun.set()

    threads = [threading.Thread(target=score) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    opened.close()
    for thread in threads:
        thread.join(60)
    assert seen == ["the model is closed: load it again"] * 3


def test_a_model_and_its_adapter_may_be_closed_by_several_threads_at_once(
    opened: tinsmith.Model,
) -> None:
    """The second found the turns ended that it had just seen open."""
    adapter, failures = opened.lora(rank=2), []
    slow = opened.engine.thread.run
    both = threading.Barrier(4)

    def late(work, **options):
        both.wait(60)  # all have seen it open
        return slow(work, **options)

    def close(one) -> None:
        try:
            one.close()
        except BaseException as error:
            failures.append(error)

    opened.engine.thread.run = late
    threads = [threading.Thread(target=close, args=(one,)) for one in (opened, adapter) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and opened.closed and adapter.closed


def test_a_closed_models_thread_ends(opened: tinsmith.Model) -> None:
    opened.logprobs(ROW)
    [thread] = opened.engine.thread._pool._threads
    assert thread.is_alive()
    opened.close()
    thread.join(60)
    assert not thread.is_alive()


# ---- what is shown ----


def test_dir_has_what_is_public(model, adapter) -> None:
    assert dir(tinsmith) == sorted([*tinsmith.__all__, "ops"])
    assert all(hasattr(tinsmith, name) for name in dir(tinsmith))
    output = adapter.forward_backward(ROW, ROW)
    for item in (model, adapter, model.sampler(), output):
        shown = set(dir(item))
        assert not shown & {"core", "engine"}
        assert not [name for name in shown if name.startswith("_")]
        public = {name for name in vars(type(item)) if name[0] != "_"}
        assert public <= shown, type(item)
    assert {"loss", "logprobs"} <= set(dir(output))


def test_reprs_are_short_and_have_shapes(model, adapter) -> None:
    many = [ROW] * 40
    [drawn] = model.sampler().sample(PROMPT, max_tokens=5, stop=[])
    shown = {
        "<tinsmith.Model tiny: 2 layers, width 64, vocab 304, context 128, on cpu>": model,
        f"<tinsmith.Adapter of tiny: rank 4, {adapter.size:,} parameters, step 0>": adapter,
        f"<tinsmith.Adapter of tiny: snapshot of rank 4, {adapter.size:,} parameters, step 0>": (
            adapter.snapshot()
        ),
        "<tinsmith.Sampler of tiny>": model.sampler(),
        "TopKLogprobs(ids=int32[39, 5], logprobs=float32[39, 5])": model.topk_logprobs(ROW, 5),
        "SampledSequence(tokens=int32[5], logprobs=float32[5], stop_reason='length')": drawn,
    }
    for text, item in shown.items():
        assert repr(item) == text
    ours = adapter.forward_backward(ROW, torch.from_numpy(ROW))
    assert repr(ours) == f"ForwardBackwardOutput(loss={ours.loss:.6g}, logprobs=float32[40])"
    ours = adapter.generalized_jsd([ROW[:-1]] * 40, [ROW[1:]] * 40, [np.ones(39)] * 40, many)
    arrays = "[float32[39], float32[39], float32[39], … 37 more]"
    assert repr(ours) == f"DistillOutput(loss={ours.loss:.6g}, logprobs={arrays}, " + (
        f"divergences={arrays})"
    )
