"""A process that is sent SIGINT in the middle of long calls: see test_interrupt.py.

For each call it prints its name when the call is about to begin, and afterwards a line of JSON:
what it raised, how many decoding steps began after it was told to stop, and whether the adapter is
as it was.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import tinsmith
from tinsmith.engine.decoding import Decoder

ROWS = [np.full(2000, 7, np.int32)] * 400  # minutes of work
FEW = [np.full(300, 7, np.int32)] * 2
ONES = [np.ones(2000, np.float32)] * 400
TEACHER = [np.full(2001, 7, np.int32)] * 400
PROMPTS = [np.full(1900, 7, np.int32)] * 1000
STEPS, STOPS = list[int](), list[int]()


def state(adapter: tinsmith.Adapter) -> list:
    """Everything that training an adapter changes."""
    vectors = [adapter.core.read(what).tobytes() for what in ("weights", "gradients", "m", "v")]
    return [vectors, adapter.step, adapter.core.pending]


def count(name: str, counts: list[int]) -> None:
    """Has calls of a decoder's method noted as the number of steps so far."""
    method = getattr(Decoder, name)

    def noted(decoder: Decoder) -> None:
        counts.append(len(STEPS))
        method(decoder)

    setattr(Decoder, name, noted)


def main(folder: str) -> None:
    """Makes each call, to be interrupted."""
    count("step", STEPS)
    count("interrupt", STOPS)
    model = tinsmith.Model(folder, device="cpu", threads=1)
    adapter = model.lora(rank=4, seed=1)
    short = np.arange(5, 25, dtype=np.int32)
    adapter.forward_backward(short, short)
    adapter.optim_step(1e-3)
    adapter.forward_backward(short, short)
    before, scores = state(adapter), model.logprobs(short, adapter=adapter)
    adapter.forward(FEW, FEW)
    zeros = [np.ones(300, np.float32)] * 2

    calls: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: adapter.forward_backward(ROWS, ROWS),
        "forward": lambda: adapter.forward(ROWS, ROWS),
        "generalized_jsd": lambda: adapter.generalized_jsd(ROWS, ROWS, ONES, TEACHER),
        "sample": lambda: model.sampler().sample(PROMPTS, adapter=adapter, stop=[]),
        "sample with progress": lambda: model.sampler().sample(
            PROMPTS, adapter=adapter, stop=[], progress=lambda done, total: None
        ),
        "topk_logprobs": lambda: model.topk_logprobs(PROMPTS, 100),
        "Model": lambda: tinsmith.Model(
            folder, device="cpu", progress=lambda done, total: time.sleep(1.0)
        ),
    }
    for name, call in calls.items():
        raised, first = "", len(STEPS)
        STOPS.clear()
        try:
            print(name, flush=True)
            call()
        except BaseException as error:
            raised = type(error).__name__
        late = len(STEPS) - (STOPS[0] if STOPS else first)
        same = state(adapter) == before
        same &= bool((model.logprobs(short, adapter=adapter) == scores).all())
        print(json.dumps({"raised": raised, "late": late, "same": same}), flush=True)
    adapter.backward(zeros)  # of the forward that was made before the interrupted one
    other = model.lora(rank=4, seed=1)
    other.forward_backward(short, short)
    other.optim_step(1e-3)
    other.forward_backward(short, short)
    other.forward_backward(FEW, FEW, [-zeros[0]] * 2)
    print(json.dumps({"same": state(adapter) == state(other)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
