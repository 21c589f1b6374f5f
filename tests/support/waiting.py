"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def until(happened: Callable[[], object], pause: float = 0.01) -> None:
    """Asks again and again. What never happens ends by the test's timeout (pyproject.toml), whose
    report shows where it waits: a deadline of its own would be one that a busy machine misses."""
    while not happened():
        time.sleep(pause)
