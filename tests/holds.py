"""How long a call keeps other threads from running Python."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TRIES = 8


@dataclass(frozen=True)
class Held:
    """CPU seconds that a call took on its thread, and of these the longest stretch in which another
    thread had no turn. Neighbours on the machine's cores count in neither."""

    longest: float
    total: float


@contextmanager
def impatient() -> Iterator[None]:
    """A thread that wants a turn gets it as soon as Python lets go, not 5 ms later."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def held(call: Callable[[], object], tries: int = TRIES) -> Held:
    """The best of some tries: another thread may also wait for a core."""
    with impatient():
        return min((_held(call) for _ in range(tries)), key=lambda found: found.longest)


def _held(call: Callable[[], object]) -> Held:
    clock = time.pthread_getcpuclockid(threading.get_ident())
    begun, ended = threading.Event(), threading.Event()
    seen: list[float] = []

    def watch() -> None:
        begun.set()
        while not ended.is_set():
            seen.append(time.clock_gettime(clock))
            time.sleep(1e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun.wait()
    start = time.thread_time()
    try:
        call()
    finally:
        end = time.thread_time()
        ended.set()
        watcher.join()
    turns = [start, *(moment for moment in seen if start < moment < end), end]
    longest = max(after - before for before, after in itertools.pairwise(turns))
    return Held(longest, end - start)
