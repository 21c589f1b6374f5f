"""dtype: what products with base weights are computed in, and what that costs in accuracy.

The oracle is the float64 model of tiny_models.py; what bf16 may cost is what the same model costs
in transformers when it computes in bf16, on the same weights.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.op_devices import cpu_has
from support.tiny_models import (
    LACKS_BF16,
    SPECS,
    as_double,
    folder,
    in_transformers,
    needs_bf16,
)
from tinsmith import _core
from tinsmith.cli import commands
from tinsmith.models.registry import LoadedModel, load_model
from tinsmith.system.format import readable

BF16 = [name for name, spec in SPECS.items() if spec.dtype is torch.bfloat16]


@pytest.fixture(params=BF16)
def spec(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def tokens_of(model: LoadedModel, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.vocab, length).astype(np.int32)


def logprobs(model: LoadedModel, tokens: np.ndarray) -> np.ndarray:
    """Of each next token, from an adapter that changes nothing."""
    adapter = _core.Adapter(model.core, rank=1)
    one = np.ones(1, np.int32)
    lengths = np.asarray([len(tokens) - 1], np.int32)
    return adapter.forward_backward(
        tokens[:-1], lengths, tokens[1:], one, "cross_entropy", {}, {}, backward=False
    )[0]


def in_torch(name: str, tokens: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.float64:
        model = as_double(folder(name))
    else:
        eager = {"experts_implementation": "eager"}  # its grouped product wants other strides
        model = in_transformers(folder(name), dtype, **eager)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        found = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
    return found[torch.arange(len(ids) - 1), ids[1:]].numpy()


def distance(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


@needs_bf16
def test_bf16_products_err_less_than_transformers_in_bf16(spec: str) -> None:
    fast, exact = load_model(folder(spec), dtype="bfloat16"), load_model(folder(spec))
    assert (fast.core.device, exact.core.device) == ("cpu-bf16", "cpu")
    ours, theirs, floats = [], [], []
    for seed in range(5):
        tokens = tokens_of(fast, 40, seed)
        truth = in_torch(spec, tokens, torch.float64)
        ours.append(distance(logprobs(fast, tokens), truth))
        floats.append(distance(logprobs(exact, tokens), truth))
        theirs.append(distance(in_torch(spec, tokens, torch.bfloat16), truth))
    assert max(floats) < 1e-5 < np.mean(ours) < np.mean(theirs)


@needs_bf16
def test_bf16_checkpoint_in_float32_is_computed_in_float32(spec: str) -> None:
    tokens = tokens_of(load_model(folder(spec)), 40)
    one, other = (logprobs(load_model(folder(spec), dtype=d), tokens) for d in ("float32", None))
    np.testing.assert_array_equal(one, other)


@needs_bf16
def test_float32_checkpoint_is_rounded_when_bfloat16_is_asked_for() -> None:
    auto = load_model(folder("qwen3"), dtype="auto")
    assert auto.core.device == "cpu"  # nothing is rounded that was not
    narrow = load_model(folder("qwen3"), dtype="bfloat16")
    assert narrow.core.device == "cpu-bf16"
    assert narrow.core.weight_bytes < 0.7 * auto.core.weight_bytes
    tokens = tokens_of(auto, 40)
    assert 1e-5 < distance(logprobs(narrow, tokens), logprobs(auto, tokens)) < 0.05


@needs_bf16
def test_sampled_logprob_equals_the_trainers_in_bf16(spec: str) -> None:
    model = load_model(folder(spec), dtype="bfloat16", threads=2)
    sampler = _core.Sampler(model.core, tokens=4096)
    prompts = [tokens_of(model, length, length) for length in (3, 70, 11, 1, 25)]
    for number, prompt in enumerate(prompts):
        sampler.add(number, prompt, num_samples=3, max_tokens=20, seed=number)
    while len(sampler.step()[1]) < len(prompts):
        pass
    for number, prompt in enumerate(prompts):
        for sample in sampler.take(number)["samples"]:
            whole = np.concatenate([prompt, sample["tokens"]])
            trained = logprobs(model, whole)[len(prompt) - 1 :]
            np.testing.assert_array_equal(sample["logprobs"], trained)


@needs_bf16
def test_threads_change_nothing_in_bf16(spec: str) -> None:
    tokens = tokens_of(load_model(folder(spec)), 60)
    results = []
    for threads in (1, 2, 3):
        model = load_model(folder(spec), dtype="bfloat16", threads=threads)
        adapter = _core.Adapter(model.core, rank=3, seed=1)
        weights = adapter.read("weights")
        adapter.write("weights", weights + np.float32(0.01))
        args = (np.asarray([59], np.int32), tokens[1:], np.ones(1, np.int32))
        flat, _ = adapter.forward_backward(tokens[:-1], *args, "cross_entropy", {}, {})
        results.append((flat, adapter.read("gradients")))
    for flat, gradients in results[1:]:
        np.testing.assert_array_equal(flat, results[0][0])
        np.testing.assert_array_equal(gradients, results[0][1])


def test_auto_takes_bf16_where_it_is_faster(spec: str) -> None:
    words = set(Path("/proc/cpuinfo").read_text().split())
    fast = ("AuthenticAMD" in words or cpu_has("amx")) and not LACKS_BF16
    assert fast == _core.bf16_is_fast()
    model = load_model(folder(spec), dtype="auto")
    assert model.core.device == ("cpu-bf16" if fast else "cpu")


def test_dtype_that_cant_be_had_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16; 'fp8'"):
        load_model(folder("qwen3"), dtype="fp8")
    with pytest.raises(ValueError, match="cuda computes in bfloat16: dtype float32 needs the CPU"):
        load_model(folder("qwen3"), device="cuda", dtype="float32")
    if LACKS_BF16:
        with pytest.raises(RuntimeError, match="lacks AVX512_BF16"):
            load_model(folder("qwen3"), dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "float32", pytest.param("bfloat16", marks=needs_bf16)])
def test_info_plans_what_a_server_opens(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    opened = load_model(folder("llama"), dtype=dtype).core
    assert commands.main(["info", str(folder("llama")), "--dtype", dtype]) == 0
    each = readable(opened.plan(32)["kv_token"])
    assert f" tokens, {each} each" in capsys.readouterr().out


def test_info_refuses_what_a_server_would(capsys: pytest.CaptureFixture[str]) -> None:
    if not LACKS_BF16:
        pytest.skip("this processor has bf16")
    assert commands.main(["info", str(folder("llama")), "--dtype", "bfloat16"]) != 0
    assert "this processor lacks" in capsys.readouterr().err
