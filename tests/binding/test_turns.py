"""Threads that share a model: others run Python while the engine copies, and calls take turns, so
that each thread gets what it would get alone."""

import ctypes
import itertools
import operator
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.distill_cases import distill, pair
from support.tiny_models import (
    DEVICE,
    assert_same,
    call,
    datum,
    folder,
    loaded,
    randomize,
    tokens_of,
)
from tinsmith import _core
from tinsmith.models.registry import load_model

pytestmark = pytest.mark.pairs

Call = Callable[[], object]
ROUNDS, TRIES = 30, 20


# ---- others run ----


@pytest.fixture(scope="module")
def large() -> _core.Adapter:
    """One whose vectors take long to copy: 100 MB each."""
    base, sizes = loaded("qwen3"), {"vocab": 2000, "width": 1024, "context": 1000}
    core = _core.Model(base.core.config | sizes, base.inv_freq, weights="f32", threads=1)
    for slot, layer, index, rows, cols in core.slots:
        core.load(slot, layer, np.zeros((rows, cols) if rows > 1 else (cols,), np.float32), index)
    core.seal()
    each = _core.Adapter(core, rank=1).size
    return _core.Adapter(core, rank=25_000_000 // each)


def clear(adapter: _core.Adapter) -> Call:
    """Of gradients that are there: none take no time."""
    adapter.write("gradients", np.ones(adapter.size, np.float32))
    return adapter.clear_gradients


def add(adapter: _core.Adapter) -> Call:
    prompt = tokens_of("qwen3", 150)
    return partial(_core.Sampler(loaded("qwen3").core).add, 0, prompt, num_samples=20_000)


def take(adapter: _core.Adapter) -> Call:
    sampler = asked(adapter)
    while sampler.active:
        sampler.step()
    return partial(sampler.take, 0)


def asked(adapter: _core.Adapter) -> _core.Sampler:
    sampler = _core.Sampler(adapter.model)
    sampler.add(0, np.zeros(500, np.int32), max_tokens=1, topk_prompt=2000)
    return sampler


def train(adapter: _core.Adapter) -> Call:
    one, length = np.ones(300, np.int32), np.full(1, 300, np.int32)
    other, count = _core.Adapter(adapter.model, rank=1), np.ones(1, np.int32)
    return partial(other.forward_backward, one, length, one, count, "cross_entropy", {}, {})


CALLS: dict[str, Callable[[_core.Adapter], Call]] = {
    "read": lambda adapter: partial(adapter.read, "v"),
    "write": lambda adapter: partial(adapter.write, "m", np.ones(adapter.size, np.float32)),
    "clear": clear,
    "follow": lambda adapter: partial(adapter.snapshot().ema_update, adapter, 0.5),
    "make an adapter": lambda adapter: partial(_core.Adapter, adapter.model, rank=64),
    "let go of an adapter": lambda adapter: [_core.Adapter(adapter.model, rank=64)].clear,
    "add a request": add,
    "take a result": take,
    "train": train,
    "a sampler's step": lambda adapter: asked(adapter).step,
}


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_meanwhile(large, name: str) -> None:
    """Another thread that wants a turn all the time has one within the call. What happens between
    two numbers is C: there Python gives a turn only where the call lets go of the interpreter. The
    pause holds on to it until the other thread has asked for its turn; on a busy machine that may
    take longer, and the call is made again."""
    numbers, ended = itertools.count(), list[bool]()

    def want() -> None:
        for _ in numbers:
            if ended:
                return

    number, pause = numbers.__next__, partial(ctypes.PyDLL(None).usleep, 5000)
    other, before = threading.Thread(target=want), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    other.start()
    try:
        for _ in range(TRIES):
            work = CALLS[name](large)
            _, first, _, last = map(operator.call, (pause, number, work, number))
            if last > first + 1:
                return
    finally:
        ended.append(True)
        other.join()
        sys.setswitchinterval(before)
    pytest.fail("no other thread had a turn")


# ---- calls take turns ----


def together(*works: Callable[[], None]) -> None:
    """Each in a thread of its own, ROUNDS times; fewer where a call takes longer."""
    failures: list[BaseException] = []
    begin, rounds = threading.Barrier(len(works)), ROUNDS if DEVICE.get() == "cpu" else ROUNDS // 3

    def repeat(work: Callable[[], None]) -> None:
        try:
            begin.wait()
            for _ in range(rounds):
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "the threads wait for each other"
    if failures:
        raise failures[0]


def adapter_of(core: _core.Model | None = None, rank: int = 4, seed: int = 0) -> _core.Adapter:
    return randomize(_core.Adapter(core or loaded("qwen3").core, rank=rank), seed)


def test_a_call_waits_until_the_one_before_it_has_ended(large) -> None:
    sampler = _core.Sampler(large.model)
    sampler.add(0, np.zeros(65, np.int32), max_tokens=1)
    sampler.step()
    asked = {"prompt_logprobs": True, "prompt_from": 65, "topk_prompt": 500}
    sampler.add(1, np.zeros(500, np.int32), max_tokens=1, **asked)
    thread = threading.Thread(target=sampler.step, daemon=True)
    assert sampler.reused == 0
    thread.start()
    while thread.is_alive() and not sampler.reused:  # the step begins with the page that is known
        pass
    assert sampler.active == 0, "it did not wait for the end of the step"
    thread.join()


@pytest.mark.usefixtures("on")
def test_one_adapter_in_many_threads() -> None:
    adapter, other = adapter_of(), adapter_of(seed=1)
    weights = adapter.read("weights")

    def forward(length: int) -> Callable[[], None]:
        data = [datum(tokens_of("qwen3", length))]
        [wanted], _ = call(adapter, data, backward=False)

        def work() -> None:
            [found], _ = call(adapter, data, backward=False)
            np.testing.assert_array_equal(found, wanted)

        return work

    def copy() -> None:
        np.testing.assert_array_equal(adapter.snapshot().read("weights"), weights)
        adapter.write("m", weights)
        np.testing.assert_array_equal(adapter.read("m"), weights)
        assert adapter.bytes > 4 * adapter.size

    def replace() -> None:
        other.write("weights", weights)
        other.ema_update(adapter, 0.5)
        other.clear_gradients()
        np.testing.assert_array_equal(other.read("weights"), weights)
        assert adapter.model.plan(4)["step_tokens"] > 0

    together(forward(60), forward(90), copy, replace)


@pytest.mark.usefixtures("on")
def test_one_sampler_in_many_threads() -> None:
    """Any of them may run the step that ends another one's request."""
    core, adapter = loaded("qwen3").core, adapter_of()
    lock, results, taken = threading.Lock(), dict[int, dict[str, Any]](), set()

    def decode(sampler: _core.Sampler, number: int, length: int) -> dict[str, Any]:
        prompt = tokens_of("qwen3", length)
        sampler.add(number, prompt, adapter, max_tokens=6, seed=length, topk_prompt=3)
        while number not in results:
            _, done = sampler.step()
            for each in done:
                with lock:  # who was slow may hear of one that another thread has taken
                    if (sampler, each) not in taken:
                        taken.add((sampler, each))
                        results[each] = sampler.take(each)
        return results.pop(number)

    wanted = {length: decode(_core.Sampler(core), length, length) for length in (5, 70, 9)}
    sampler = _core.Sampler(core)
    numbers = iter(range(1000, 2000))

    def ask(length: int) -> Callable[[], None]:
        return lambda: assert_same(decode(sampler, next(numbers), length), wanted[length])

    def come_and_go() -> None:
        number = next(numbers)
        sampler.add(number, tokens_of("qwen3", 30), adapter, num_samples=3, max_tokens=50)
        assert sampler.active <= 4  # the others may have ended this one, too
        sampler.cancel(number)

    def drop() -> None:
        dropped = _core.Sampler(core, tokens=640)
        dropped.add(0, tokens_of("qwen3", 30), adapter.snapshot())

    together(*(ask(length) for length in wanted), come_and_go, drop)


@pytest.mark.usefixtures("on")
def test_models_that_teach_each_other_do_not_wait_for_each_other() -> None:
    cores = [load_model(folder("qwen3"), device=DEVICE.get(), threads=1).core for _ in range(2)]
    one, other = (adapter_of(core, seed=1) for core in cores)
    data = [pair("qwen3", prompt=3, completion=4, hint=2)]

    def work(student: _core.Adapter, teacher: _core.Adapter) -> Callable[[], None]:
        wanted = distill(student, data, {}, teacher)

        def again() -> None:
            found = distill(student, data, {}, teacher)
            np.testing.assert_array_equal(found[0], wanted[0])
            assert found[2] == wanted[2]

        return again

    together(work(one, other), work(other, one), work(one, one))
