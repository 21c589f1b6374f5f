"""Models whose layers have a window, at the edges of windows and pages, on every device.

One checkpoint of two layers, the second with a window, is loaded under windows of many lengths.
transformers is the oracle, and the sampler's numbers are the trainer's, bit for bit.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.sampler_loop import finish
from support.tiny_models import (
    DEVICE,
    Datum,
    as_double,
    assert_near,
    assert_same,
    call,
    datum,
    error,
    folder,
    logprobs,
    randomize,
    targets_of,
    tokens_of,
)
from tinsmith import _core
from tinsmith.models.registry import load_model
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]
NAME = "qwen2-window"
PAGE = 64
WINDOWS = (1, 2, 63, 64, 65, 100)
LENGTH = 150
_ROOT = tempfile.TemporaryDirectory(prefix="tinsmith-windows-")


@functools.cache
def path_of(window: int) -> Path:
    """The checkpoint, with another window."""
    path = Path(_ROOT.name) / str(window)
    shutil.copytree(folder(NAME), path)
    content = json.loads((path / "config.json").read_text()) | {"sliding_window": window}
    (path / "config.json").write_text(json.dumps(content))
    return path


@functools.cache
def core_on(window: int, device: str) -> _core.Model:
    return load_model(path_of(window), device=device, threads=1).core


def core_of(window: int) -> _core.Model:
    """The model with this window, on the device that the test runs on."""
    return core_on(window, DEVICE.get())


def adapter_of(window: int) -> _core.Adapter:
    return randomize(_core.Adapter(core_of(window), rank=4, alpha=8.0), seed=1)


def trainer(adapter: _core.Adapter, prompt: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The trainer's log-probabilities of the tokens after a prompt."""
    whole = np.concatenate([prompt, more])
    (found,), _ = call(adapter, [datum(whole[:-1], whole[1:])], backward=False)
    return found[len(prompt) - 1 :]


def run(sampler: _core.Sampler, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    for number, asked in enumerate(requests):
        sampler.add(number, **asked)
    return finish(sampler, *range(len(requests)))


@torch.no_grad()
def table(window: int, one: Datum, dtype: torch.dtype) -> np.ndarray:
    """torch's log-probabilities of a datum's targets."""
    path = path_of(window)
    if dtype == torch.float64:
        model = as_double(path)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return targets_of(logprobs(model, one.tokens), one).numpy()


@pytest.mark.parametrize("window", WINDOWS)
def test_logprobs_equal_transformers_under_every_window(window: int) -> None:
    tokens = tokens_of(NAME, LENGTH)
    one = datum(tokens, np.tile(np.arange(91), (LENGTH, 1)))
    (found,), _ = call(_core.Adapter(core_of(window), rank=1), [one], backward=False)
    assert_near(found, functools.partial(table, window, one))
    assert error(found, table(1 << 20, one, torch.float64)) > 0.01  # the window matters


@pytest.mark.pairs(False)
@pytest.mark.parametrize("window", WINDOWS)
def test_what_is_sampled_at_the_edges_has_the_trainers_bits(window: int) -> None:
    adapter = adapter_of(window)
    edges = (PAGE, 2 * PAGE, window, window + PAGE)
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    lengths = sorted(length for length in near if 0 < length < LENGTH)
    options = {"max_tokens": 3, "num_samples": 2, "prompt_logprobs": True, "adapter": adapter}
    requests = [{"prompt": tokens_of(NAME, n, seed=n), "seed": n, **options} for n in lengths]
    results = run(_core.Sampler(core_of(window), tokens=4096), *requests)
    for asked, result in zip(requests, results, strict=True):
        prompt = asked["prompt"]
        for sample in result["samples"]:
            wanted = trainer(adapter, prompt, sample["tokens"])
            np.testing.assert_array_equal(sample["logprobs"], wanted)
        if len(prompt) > 1:
            wanted = trainer(adapter, prompt[:1], prompt[1:])
            np.testing.assert_array_equal(result["prompt_logprobs"][1:], wanted)


@pytest.mark.parametrize("window", (63, 64, 65))
def test_a_prompt_that_begins_with_pages_of_an_earlier_one_has_its_own_bits(window: int) -> None:
    sampler, core = _core.Sampler(core_of(window), tokens=2048), core_of(window)
    first = tokens_of(NAME, LENGTH)
    run(sampler, {"prompt": first, "max_tokens": 1})
    for length, reused in ((130, 128), (129, 128), (100, 64), (65, 64)):
        before = sampler.reused
        prompt = np.concatenate([first[: length - 1], tokens_of(NAME, 1, seed=length)])
        asked = {"prompt": prompt, "max_tokens": 5, "seed": length}
        (found,) = run(sampler, asked)
        assert sampler.reused - before == reused
        assert_same(found, run(_core.Sampler(core, tokens=512), asked)[0])


@pytest.mark.parametrize("window", (2, 64, 65))
def test_packed_sequences_do_not_see_one_anothers_windows(window: int) -> None:
    data = [datum(tokens_of(NAME, length, seed=3)) for length in (5, 66, 1, 130, 64)]
    together, _ = call(adapter_of(window), data)
    for found, one in zip(together, data, strict=True):
        np.testing.assert_array_equal(found, call(adapter_of(window), [one])[0][0])
