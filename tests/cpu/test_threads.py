"""The engine's threads: one crew in a process, and the same bits whatever they do."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import beside
from support.waiting import until
from tinsmith import _core, ops
from tinsmith.models import registry

IDS = np.arange(7, 107, dtype=np.int32)


def adapter_on(model: Path, threads: int) -> _core.Adapter:
    loaded = registry.load_model(model, threads=threads)
    return _core.Adapter(loaded.core, rank=4, seed=1)


def losses(adapter: _core.Adapter, calls: int = 3) -> list[float]:
    length, one = np.asarray([len(IDS)], np.int32), np.ones(1, np.int32)
    return [
        adapter.forward_backward(IDS, length, IDS[::-1].copy(), one, "cross_entropy", {}, {})[1]
        for _ in range(calls)
    ]


TASKS = Path("/proc/self/task")


def tasks() -> int:
    return len(list(TASKS.iterdir()))


def test_devices_share_one_crew(tiny_model_dir: Path) -> None:
    """In a process of its own, for other tests leave models and threads behind."""
    script = "import sys, pathlib, test_threads; test_threads.share(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tiny_model_dir)]
    subprocess.run(command, check=True, timeout=120, **beside(__file__))


def share(tiny_model_dir: Path) -> None:
    before = tasks()
    few = [adapter_on(tiny_model_dir, threads) for threads in (1, 2, 3)]
    assert tasks() == before + 2
    more = adapter_on(tiny_model_dir, 5)
    assert tasks() == before + 4
    assert len({loss for adapter in (*few, more) for loss in losses(adapter)}) == 1
    del few
    assert tasks() == before + 4
    assert losses(more) == losses(more)
    del more
    until(lambda: tasks() == before)  # the system takes a moment to forget a joined thread
    assert len(losses(adapter_on(tiny_model_dir, 2))) == 3  # a new one


def test_threads_with_small_stacks_compute(tiny_model_dir: Path) -> None:
    """musl's have 128 KB, and glibc's what the process was started with. Python's own needs more,
    and so do a sanitizer's frames."""
    small = (1 << 20) if "TINSMITH_SANITIZE" in os.environ else (256 << 10)

    def limit() -> None:
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (small, most))

    script = "import sys, pathlib, test_threads; test_threads.compute(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tiny_model_dir)]
    subprocess.run(command, check=True, timeout=120, preexec_fn=limit, **beside(__file__))


def compute(tiny_model_dir: Path) -> None:
    """Training and sampling, in a Python thread and the crew's."""
    adapter = adapter_on(tiny_model_dir, 3)
    sampler = _core.Sampler(adapter.model, tokens=256)

    def call() -> None:
        losses(adapter, 20)
        sampler.add(0, IDS, adapter, max_tokens=20, num_samples=4, top_p=0.5)
        while not sampler.step()[1]:
            pass

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("threads", [2, 4])
def test_callers_of_several_models_at_once_get_what_each_gets_alone(
    tiny_model_dir: Path, threads: int
) -> None:
    expected = losses(adapter_on(tiny_model_dir, 1), 1)[0]
    adapters = [adapter_on(tiny_model_dir, threads) for _ in range(3)]
    found: list[list[float]] = [[] for _ in adapters]

    def call(index: int) -> None:
        found[index] = losses(adapters[index], 40)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(adapters))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[expected] * 40] * 3


def test_a_forked_child_computes_with_and_without_threads_of_its_own(tiny_model_dir: Path) -> None:
    parents = adapter_on(tiny_model_dir, 3)
    expected = losses(parents)
    child = os.fork()
    if not child:
        code = 1
        try:
            same = losses(parents) == expected  # the caller alone: the crew is the parent's
            own = losses(adapter_on(tiny_model_dir, 3)) == expected
            code = 0 if same and own and losses(parents) == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert losses(parents) == expected


def child_of_a_busy_process(work: Callable[[], None], child: Callable[[], int]) -> int:
    """The exit code of a process that is forked while another thread is in `work`; that thread
    works on until then."""
    ended = threading.Event()
    begun = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            begun.set()
            work()

    thread = threading.Thread(target=busy)
    thread.start()
    begun.wait()
    time.sleep(0.02)
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = child()
        finally:
            os._exit(code)
    ended.set()
    thread.join()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:  # it hangs: the test's timeout
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def test_a_child_that_was_forked_while_another_thread_was_in_ops_computes() -> None:
    logits = np.random.default_rng(0).standard_normal((256, 30_000)).astype(np.float32)
    expected = ops.topk_logprobs(logits[:3], 4)[1]

    def child() -> int:
        return 0 if np.array_equal(ops.topk_logprobs(logits[:3], 4)[1], expected) else 1

    for _ in range(3):
        assert child_of_a_busy_process(lambda: ops.topk_logprobs(logits, 4), child) == 0
    end = signal.signal, (signal.SIGTERM, signal.SIG_DFL)  # by which a pool ends its processes
    with multiprocessing.get_context("fork").Pool(2, *end) as pool:
        found = pool.map(ops_in_a_pool, [logits[:3]] * 4)
    assert all(np.array_equal(one, expected) for one in found)


def ops_in_a_pool(logits: np.ndarray) -> np.ndarray:
    return ops.topk_logprobs(logits, 4)[1]


def test_a_model_in_a_call_at_a_fork_is_refused_in_the_child(tiny_model_dir: Path) -> None:
    adapter = adapter_on(tiny_model_dir, 2)
    expected = losses(adapter)

    def child() -> int:
        try:
            found = losses(adapter)
        except RuntimeError as error:
            return 2 if "when the process was forked: load the model again" in str(error) else 3
        return 0 if found == expected else 1

    for _ in range(100):  # a fork may come between two calls
        code = child_of_a_busy_process(lambda: losses(adapter, 20), child)
        assert code in (0, 2)
        if code == 2:
            return
    pytest.fail("no call was under way at a fork")


def test_an_idle_crew_uses_no_time(tiny_model_dir: Path) -> None:
    """In a process of its own, whose threads are the crew's. Each sleeps until it is called: who
    looks now and then wakes for it."""
    script = "import sys, pathlib, test_threads; test_threads.idle(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tiny_model_dir)]
    subprocess.run(command, check=True, timeout=120, **beside(__file__))


def idle(tiny_model_dir: Path) -> None:
    before = set(TASKS.iterdir())
    adapter = adapter_on(tiny_model_dir, 4)
    workers = set(TASKS.iterdir()) - before
    losses(adapter)

    def turns() -> list[str]:
        """Whether each sleeps, and how often it had a core."""
        lines = [line for one in workers for line in (one / "status").read_text().splitlines()]
        return [line for line in lines if line.startswith("State") or "ctxt_switches" in line]

    seen = [turns()]
    while sum("sleeping" in line for line in seen[-1]) < 3 or seen[-1] not in seen[:-1]:
        time.sleep(0.5)
        seen.append(turns())
