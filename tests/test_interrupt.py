"""Ctrl-C: a real SIGINT ends a long call soon, and leaves the adapter as it was."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tinsmith
from tinsmith.api.turns import Turns
from tinsmith.demo.demo import MODEL

SCRIPT = Path(__file__).parent / "interrupted.py"


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
            assert report["seconds"] < 10, f"{name}: {report['seconds']:.1f} s"
            assert report["same"], name
            print(name, report["seconds"])
        assert json.loads(process.stdout.readline())["same"]
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def interrupt_soon(seconds: float) -> None:
    """A SIGINT to this process, from another thread."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_short_work_is_finished_first() -> None:
    """Work that can't be interrupted, an optim_step, happens whole."""
    turns, done = Turns(), []

    def work() -> None:
        time.sleep(0.5)
        done.append(1)

    interrupt_soon(0.1)
    with pytest.raises(KeyboardInterrupt):
        turns.take(work)
    assert done == [1]


def test_work_whose_turn_has_not_come_never_begins() -> None:
    turns, begun, done = Turns(), threading.Event(), []

    def other() -> None:
        turns.take(lambda: (begun.set(), time.sleep(0.5)))

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    interrupt_soon(0.1)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        turns.take(lambda: done.append(1))
    assert time.monotonic() - start < 0.45
    thread.join()
    turns.take(lambda: None)
    assert done == []


def test_work_is_asked_to_stop_until_it_does() -> None:
    """The first request may come before the engine listens: it clears the flag as it begins."""
    turns, asked, stop = Turns(), [], threading.Event()

    def interrupt() -> None:
        asked.append(1)
        if len(asked) == 3:
            stop.set()

    interrupt_soon(0.1)
    with pytest.raises(KeyboardInterrupt):
        turns.take(lambda: stop.wait(20), interrupt=interrupt)
    assert len(asked) == 3


def test_an_interrupt_of_one_thread_leaves_the_call_of_another() -> None:
    model = tinsmith.Model(MODEL, device="cpu", threads=1)
    first, second = (model.lora(rank=4, seed=1) for _ in range(2))
    rows = [np.full(500, 7, np.int32)] * 4
    wanted = first.forward_backward(rows, rows).loss
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(second.forward_backward(rows, rows).loss))
    thread.start()
    time.sleep(0.05)
    interrupt_soon(0.1)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            first.forward_backward(rows, rows)
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
        start = time.monotonic()
        call(whole)
        took, after = time.monotonic() - start, state(whole)
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
