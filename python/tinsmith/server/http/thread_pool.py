"""Runs long work in threads, while the event loop answers other requests.

Small work runs at once: switching to a thread would take longer. There are few threads, because
Python runs one at a time: each busy thread makes the event loop wait a little longer for its turn.
A function that is called here must not hold the GIL for long. It works on large data in parts, or
calls code that releases the GIL, as NumPy and zstandard do.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 2
SMALL = 1 << 14  # bytes that are processed at once: some milliseconds


class Beside:
    """See the file's header."""

    def __init__(self, threads: int = THREADS, name: str = "tinsmith-beside") -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def __call__(
        self, size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Calls a function that works on `size` bytes."""
        if size <= SMALL:
            return function(*arguments, **named)
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Ends the threads, after their current work."""
        self._threads.shutdown(cancel_futures=True)
