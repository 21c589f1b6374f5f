"""When the CPU device's workers are awake: between the jobs of a step, and not for what is too
small to be shared. What they compute, and that they sleep when nothing is asked, is in
test_threads.py. In processes of their own, for other tests leave devices and threads behind."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import beside
from support.waiting import until

TASKS = Path("/proc/self/task")
SAME = (64, 64, 1e-6)  # a head's width, all of it rotated, and eps
ROUNDS, CALLS = 12, 40
GAP = 3000  # turns of an empty loop: some 100 µs of the caller's own work
SHARED = {"swiglu": (64, 4096), "rmsnorm": (256, 1024), "sample": (8, 65536)}
ALONE = {"swiglu": (8, 768), "rmsnorm": (8, 1024), "sample": (4, 512), "rotate": (8, 8, 64)}


def slept(task: Path) -> int:
    """How often a thread has gone to sleep."""
    lines = (task / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def fall_asleep(task: Path) -> None:
    """Waits until a thread sleeps."""
    until(lambda: "(sleeping)" in (task / "status").read_text(), pause=0.001)


def sleeps(op: str, *sizes: int) -> list[int]:
    """How often a device's worker goes to sleep in CALLS of an op, GAP apart; some rounds of it."""
    from support.op_devices import Device, Draw

    others = set(TASKS.iterdir())
    dev = Device("cpu", threads=2)
    [worker] = set(TASKS.iterdir()) - others
    T = sizes[0]
    zeros = np.zeros(math.prod(sizes), np.float32)
    memory = [dev.put(zeros, "real") for _ in range(4)]
    draws = dev.put([Draw(temperature=1.0, top_p=1.0)] * T, "Draw")
    x = [one.pointer for one in memory]
    arguments = {
        "swiglu": (*x[:3], *sizes, *sizes[-1:] * 2),
        "rmsnorm": (*x, *sizes, 1e-6),
        "rotate": (
            *(x[0], x[0], None, None, x[1], x[1], None, None, *x[2:], *sizes[:2], 0),
            *(*SAME[:2], sizes[1] * 64, 0, SAME[2]),
        ),
        "sample": (*x, draws.pointer, *sizes),
    }[op]
    found = []
    fall_asleep(worker)
    for _ in range(ROUNDS):
        before = slept(worker)
        for _ in range(CALLS):
            getattr(dev.c, op)(dev.pointer, *arguments)
            for _ in range(GAP):
                pass
        fall_asleep(worker)
        found.append(slept(worker) - before)
    return found


def sleeps_alone(op: str, sizes: tuple[int, ...]) -> list[int]:
    """What `sleeps` finds in a process of its own."""
    script = f"import test_crew; print(*test_crew.sleeps({op!r}, *{sizes}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, **beside(__file__))
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("op", SHARED)
def test_a_worker_stays_awake_between_the_jobs_of_a_step(op: str) -> None:
    """In one round at least: on a machine that is not free it may be kept from looking in time."""
    found = sleeps_alone(op, SHARED[op])
    assert min(found) < CALLS / 4, found


@pytest.mark.parametrize("op", ALONE)
def test_nobody_is_woken_for_a_small_job(op: str) -> None:
    """But for the first rounds: a thread may sleep for the first time as late as then."""
    found = sleeps_alone(op, ALONE[op])
    assert found.count(0) > ROUNDS / 2, found
