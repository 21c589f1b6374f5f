"""The face among threads, event loops and forked processes."""

import asyncio
import json
import os
import threading
import time
import warnings

import numpy as np
from face import PROMPT, TOKENS


def test_threads_take_turns(model, adapter) -> None:
    """Each gets the numbers that it gets alone, and no gradient is lost."""
    wanted = [adapter.forward(row[:-1], row[1:], keep=False) for row in TOKENS]
    [drawn] = model.sampler().sample(PROMPT, adapter=adapter, max_tokens=9, seed=1)
    failures: list[BaseException] = []

    def train(index: int) -> None:
        for _ in range(10):
            row = TOKENS[index]
            found = adapter.forward_backward(row[:-1], row[1:]).logprobs
            np.testing.assert_array_equal(found, wanted[index])

    def sample() -> None:
        for _ in range(10):
            [again] = model.sampler().sample(PROMPT, adapter=adapter, max_tokens=9, seed=1)
            assert again.tokens.tolist() == drawn.tokens.tolist()

    def guarded(work, *arguments) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(train, index)) for index in range(3)]
    threads += [threading.Thread(target=guarded, args=(sample,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert adapter.core.pending[1:] == (10 * sum(len(row) - 1 for row in TOKENS), 30)


def test_other_threads_run_while_the_engine_computes(model, adapter) -> None:
    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.wait(0.002):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    rows = [np.full(120, 7, np.int32)] * 100
    thread.start()
    calls = (
        lambda: adapter.forward_backward(rows, rows),
        lambda: model.sampler().sample(rows[0][:8], num_samples=200, max_tokens=40, stop=[]),
    )
    for call in calls:
        start = time.monotonic()
        call()
        end = time.monotonic()
        margin = (end - start) / 4  # in the middle of the call there is nothing but the engine
        inside = sum(start + margin < moment < end - margin for moment in ticks)
        assert inside >= 5, f"{inside} ticks in {end - start:.2f} s"
    over.set()
    thread.join()


def test_a_running_event_loop_is_no_obstacle(model, adapter) -> None:
    row = TOKENS[1]

    async def cell() -> tuple[np.ndarray, np.ndarray, int]:
        directly = adapter.forward_backward(row[:-1], row[1:]).logprobs
        task = asyncio.create_task(
            asyncio.to_thread(model.sampler().sample, [PROMPT] * 50, max_tokens=60, stop=[])
        )
        beats = 0
        while not task.done():
            await asyncio.sleep(0.001)
            beats += 1
        await task
        return directly, adapter.forward(row[:-1], row[1:]), beats

    first, second, beats = asyncio.run(cell())
    np.testing.assert_array_equal(first, second)
    assert beats > 5


def test_a_forked_process_is_told_to_load_its_own_model(model) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            model.logprobs(PROMPT)
        except BaseException as error:
            os.write(write, json.dumps([type(error).__name__, str(error)]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    kind, sentence = json.loads(os.read(read, 1000))
    os.close(read)
    assert kind == "RuntimeError"
    assert "fork" in sentence
