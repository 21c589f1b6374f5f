"""The face among threads, event loops and forked processes."""

import _thread
import asyncio
import itertools
import json
import os
import sys
import threading
import warnings
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from support.api_cases import PROMPT, TOKENS
from support.waiting import until
from tinsmith.api import call_thread
from tinsmith.api.call_thread import CallThread, run_in_all
from tinsmith.engine.decoding import Decoder


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


def test_a_running_event_loop_is_no_obstacle(model, adapter, monkeypatch) -> None:
    """And goes on while a call is under way in a thread."""
    row, step = TOKENS[1], Decoder.step
    begun, go = threading.Event(), threading.Event()

    def hold(decoder: Decoder) -> None:
        begun.set()
        assert go.wait(60)
        step(decoder)

    monkeypatch.setattr(Decoder, "step", hold)

    async def cell() -> tuple[np.ndarray, np.ndarray, int]:
        directly = adapter.forward_backward(row[:-1], row[1:]).logprobs
        task = asyncio.create_task(asyncio.to_thread(model.sampler().sample, PROMPT, max_tokens=6))
        await asyncio.to_thread(begun.wait, 60)
        go.set()
        [drawn] = await task
        return directly, adapter.forward(row[:-1], row[1:]), len(drawn.tokens)

    first, second, drawn = asyncio.run(cell())
    np.testing.assert_array_equal(first, second)
    assert drawn > 0


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


def test_an_interrupt_ends_no_other_threads_call() -> None:
    """A call that needs two turns may wait for the second, in which another thread's call is."""
    outer, inner, wait = CallThread(), CallThread(), call_thread.wait
    busy, free, interrupts = threading.Event(), threading.Event(), []

    def other() -> None:
        busy.set()
        assert free.wait(60)

    def interrupt() -> None:
        interrupts.append(free.is_set())
        ended.set()

    ended = threading.Event()
    thread = threading.Thread(target=inner.run, args=(other,))
    thread.start()
    assert busy.wait(60)

    def tick() -> None:
        raise KeyboardInterrupt

    def again(futures: list[Future], seconds: float | None) -> Any:
        asked.append(seconds)
        if len(asked) == 3:
            free.set()
        return wait(futures, seconds)

    asked: list[float | None] = []
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_thread, "wait", again)
        run_in_all([outer, inner], lambda: ended.wait(60), interrupt=interrupt, tick=tick)
    thread.join(60)
    assert interrupts and all(interrupts)  # none before the work had begun
    for one in (outer, inner):
        one.close()


def test_an_interrupt_is_asked_for_at_once() -> None:
    """Work that goes on until it is interrupted does not go on."""
    made, asked, begun = CallThread(), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return asked.wait(60)

    def tick() -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_thread, "AGAIN_SECONDS", 1000.0)
        made.run(work, interrupt=asked.set, tick=tick)
    assert asked.is_set()
    made.close()


def test_a_signal_that_comes_just_before_the_wait_is_noticed() -> None:
    """It does not end the wait."""
    made, asked, looks = CallThread(), threading.Event(), itertools.count()
    main = threading.main_thread().ident

    def waits() -> bool:
        return next(looks) > 2 and sys._current_frames()[main].f_code.co_name == "wait"

    def work() -> bool:
        until(waits)
        _thread.interrupt_main()  # which wakes nobody either
        return asked.wait(60)

    with pytest.raises(KeyboardInterrupt):
        made.run(work, interrupt=asked.set)
    assert asked.is_set()
    made.close()


def test_a_progress_that_fails_at_the_end_does_not_fail_the_call(adapter, caplog) -> None:
    row = TOKENS[0]

    def progress(done: int, total: int) -> None:
        if done == total:
            raise ZeroDivisionError("of the caller's")

    caplog.set_level("WARNING", "tinsmith")
    adapter.zero_grad()
    out = adapter.forward_backward(row[:-1], row[1:], progress=progress)
    assert np.isfinite(out.loss) and "the function for progress failed" in caplog.text
