"""Drives a sampler of the engine until requests are done."""

from typing import Any

import numpy as np
from tinsmith import _core


def finish(sampler: _core.Sampler, *numbers: int) -> list[dict[str, Any]]:
    """Steps until these are done; their results."""
    waiting = set(numbers)
    for _ in range(10_000):
        if not waiting:
            break
        waiting -= set(sampler.step()[1])
    assert not waiting, "the sampler does not get on"
    return [sampler.take(number) for number in numbers]


def run(sampler: _core.Sampler, prompt: np.ndarray, adapter: Any = None, **options: Any) -> Any:
    """The result of one request."""
    sampler.add(0, prompt, adapter, **{"max_tokens": 5, "seed": 3} | options)
    return finish(sampler, 0)[0]
