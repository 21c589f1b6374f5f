"""Interrupts a training call of the engine from another thread, wherever it is then."""

import threading
from collections.abc import Callable

from tinsmith import _core

TRIES = 100


def interrupt_midway(
    adapter: _core.Adapter, begin: Callable[[], object], call: Callable[[], object]
) -> None:
    """Calls until a call was interrupted: on a busy machine the other thread may come too late.
    `begin` makes the adapter what it is before each call."""
    for _ in range(TRIES):
        begin()
        ended = threading.Event()

        def interrupt(ended: threading.Event = ended) -> None:
            while not ended.wait(0.001):
                adapter.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            call()
        except KeyboardInterrupt:
            return
        finally:
            ended.set()
            thread.join()
    raise AssertionError("no call was interrupted")
