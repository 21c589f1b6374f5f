"""A sampling step that fails, on an emulated card of which a launch or a copy fails: nothing was
drawn, nothing is lost, and the step can be repeated to the same bits."""

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.op_devices import emulated_library
from support.tiny_models import assert_same, loaded_on, randomize, tokens_of
from tinsmith import _core

FAILED = "invalid argument|cublasLtMatmul failed"  # a launch or a copy, or a product


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_fail.argtypes = [ctypes.c_int64]
    yield library
    library.cuda_emulated_fail(-1)


def requests_of(core: _core.Model, kind: str) -> list[dict[str, Any]]:
    """Requests that only decode once their prompts are read, or that ask for everything."""
    adapter = randomize(_core.Adapter(core, rank=4))
    plain = {"adapter": adapter, "max_tokens": 9}
    requests = [
        {"prompt": tokens_of("qwen3", 5), "num_samples": 3, **plain},
        {"prompt": tokens_of("qwen3", 140, 1), **plain, "temperature": 0.0},
    ]
    if kind == "decoding":
        return requests
    targets = {
        "targets": np.arange(69, dtype=np.int32),
        "target_starts": np.arange(70, dtype=np.int32),
    }
    return [
        requests[0] | {"topk_sample": 5, "prompt_logprobs": True, "topk_prompt": 3},
        requests[1] | {"adapter": None, "topk_prompt": 2},
        {"prompt": tokens_of("qwen3", 70, 2), **plain, "prompt_draws": 2, **targets},
        {"prompt": tokens_of("qwen3", 134, 3), "max_tokens": 3, "prompt_from": 100}
        | {"prompt_logprobs": True, "num_samples": 2},
    ]


def added(core: _core.Model, requests: list[dict[str, Any]], tokens: int = 1024) -> _core.Sampler:
    sampler = _core.Sampler(core, tokens=tokens)
    for number, asked in enumerate(requests):
        sampler.add(number, **asked)
    return sampler


@pytest.mark.parametrize("kind", ("decoding", "everything"))
def test_a_step_that_fails_anywhere_can_be_repeated(library: ctypes.CDLL, kind: str) -> None:
    core = loaded_on("qwen3", "cuda-emulated").core
    requests, rng, failures = requests_of(core, kind), np.random.default_rng(0), 0
    found: list[dict[int, dict[str, Any]]] = []
    for disturbed in (False, True, True, True):
        sampler, results = added(core, requests), {}
        for _ in range(100):
            library.cuda_emulated_fail(int(rng.integers(0, 150)) if disturbed else -1)
            try:
                done = sampler.step()[1]
            except RuntimeError as error:
                assert re.search(FAILED, str(error))
                failures += 1
                library.cuda_emulated_fail(-1)
                done = sampler.step()[1]
            results |= {number: sampler.take(number) for number in done}
            if not sampler.active:
                break
        found.append(results)
    assert failures > 10
    for results in found:
        assert sorted(results) == list(range(len(requests)))
        for number, wanted in found[0].items():
            assert_same(results[number], wanted)


class Mallinfo(ctypes.Structure):
    """malloc.h's struct mallinfo2."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd")
    names += ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def allocated() -> int:
    """Bytes that malloc has given out."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def test_a_step_that_fails_keeps_no_memory(library: ctypes.CDLL) -> None:
    core = loaded_on("qwen3", "cuda-emulated").core
    asked = {"prompt": tokens_of("qwen3", 9), "max_tokens": 9, "topk_sample": 131}
    before = 0
    for number in range(10):
        sampler = added(core, [{**asked, "num_samples": 64}], tokens=64 * 64)
        assert len(sampler.step()[0]) == 1 and len(sampler.step()[0]) == 64
        library.cuda_emulated_fail(0)
        with pytest.raises(RuntimeError, match=FAILED):
            sampler.step()
        del sampler
        before = before if number else allocated()
    # A step has lists of the best for 64 × 131 numbers; threads of other tests allocate too.
    assert allocated() - before < 4 * 64 * 131 * 8
