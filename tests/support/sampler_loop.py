"""Drives a sampler of the engine until requests are done."""

import threading
from collections.abc import Callable
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


def step_until_interrupted(
    sampler: _core.Sampler, add: Callable[[], object], step: Callable[[], object] | None = None
) -> None:
    """Steps until another thread has interrupted one. `add` is called where no request is left: on
    a busy machine that thread may have to wait through thousands of steps."""

    def step_and_take() -> None:
        for done in sampler.step()[1]:
            sampler.take(done)

    ended = threading.Event()

    def interrupt() -> None:
        while not ended.is_set():
            sampler.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        while True:
            if not sampler.active:
                add()
            (step or step_and_take)()
    except KeyboardInterrupt:
        return
    finally:
        ended.set()
        thread.join()
