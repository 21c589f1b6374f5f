"""Ctrl-C: a real SIGINT ends a long call soon, and leaves the adapter as it was."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from timeit import timeit

import numpy as np
import pytest
import tinsmith
from support import TESTS
from tinsmith.api import call_thread
from tinsmith.api.call_thread import CallThread
from tinsmith.demo.demo import MODEL

SCRIPT = TESTS / "support" / "interrupted.py"


def test_sigint_ends_each_long_call_and_changes_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(MODEL)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for name in (
            "forward_backward",
            "forward",
            "generalized_jsd",
            "sample",
            "sample with progress",
            "topk_logprobs",
            "Model",
        ):
            assert process.stdout.readline().strip() == name
            time.sleep(0.4)
            process.send_signal(signal.SIGINT)
            report = json.loads(process.stdout.readline())
            assert report["raised"] == "KeyboardInterrupt", name
            assert report["late"] <= 1 and report["same"], name
        assert json.loads(process.stdout.readline())["same"]
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def interrupt() -> None:
    """What Ctrl-C does in the thread that waits."""
    raise KeyboardInterrupt


def test_short_work_is_finished_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that can't be interrupted, an optim_step, happens whole."""
    made, stop = CallThread(), call_thread._stop
    noticed, done = threading.Event(), []

    def work() -> None:
        assert noticed.wait(60)
        done.append(1)

    monkeypatch.setattr(call_thread, "_stop", lambda *given: (noticed.set(), stop(*given)))
    with pytest.raises(KeyboardInterrupt):
        made.run(work, tick=interrupt)
    assert done == [1]


def test_work_whose_turn_has_not_come_never_begins() -> None:
    made, free, done = CallThread(), threading.Event(), []
    begun = threading.Event()
    thread = threading.Thread(target=made.run, args=(lambda: (begun.set(), free.wait(60)),))
    thread.start()
    begun.wait()
    with pytest.raises(KeyboardInterrupt):
        made.run(lambda: done.append(1), tick=interrupt)
    assert thread.is_alive(), "it waited for the other's end"
    free.set()
    thread.join()
    made.run(lambda: None)
    assert done == []


def test_work_is_asked_to_stop_until_it_does() -> None:
    """The first request may come before the engine listens: it clears the flag as it begins."""
    made, asked, stop = CallThread(), [], threading.Event()

    def ask() -> None:
        asked.append(1)
        if len(asked) == 3:
            stop.set()

    with pytest.raises(KeyboardInterrupt):
        made.run(lambda: stop.wait(60), interrupt=ask, tick=interrupt)
    assert len(asked) == 3


def test_an_interrupt_of_one_thread_leaves_the_call_of_another() -> None:
    """The one is under way while the other waits for its turn."""
    model = tinsmith.Model(MODEL, device="cpu", threads=1)
    first, second = (model.lora(rank=4, seed=1) for _ in range(2))
    rows = [np.full(500, 7, np.int32)] * 4
    wanted = first.forward_backward(rows, rows).loss
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(second.forward_backward(rows, rows).loss))

    def progress(done: int, total: int) -> None:
        if not thread.ident:
            thread.start()
        if model.engine.thread._pool._work_queue.qsize():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.forward_backward(rows * 1000, rows * 1000, progress=progress)
    thread.join()
    assert found == [wanted]


def test_whenever_an_interrupt_comes_a_call_has_happened_whole_or_not_at_all() -> None:
    """At many moments of short calls, from their beginning until after their end."""
    model = tinsmith.Model(MODEL, device="cpu", threads=1)
    rows = [np.full(60, 7, np.int32)] * 4

    def prepared() -> tinsmith.Adapter:
        adapter = model.lora(rank=2, seed=1)
        adapter.forward_backward(rows, rows)
        return adapter

    def state(adapter: tinsmith.Adapter) -> list[object]:
        vectors = [adapter.core.read(what).tobytes() for what in ("weights", "gradients", "m")]
        return [*vectors, adapter.step, adapter.core.pending]

    def sample(adapter: tinsmith.Adapter) -> None:
        model.sampler().sample(rows[0], adapter=adapter, max_tokens=10, stop=[])

    before = state(prepared())
    for call in (lambda one: one.forward_backward(rows, rows), tinsmith.Adapter.optim_step, sample):
        whole = prepared()
        took, after = timeit(partial(call, whole), number=1), state(whole)
        for index in range(15):
            adapter = prepared()
            timer = threading.Timer(took * index / 10, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                call(adapter)
                timer.join()
                time.sleep(0.1)
            timer.join()
            assert state(adapter) in (before, after), index
