"""The thread that makes a model's calls, one at a time, whoever asks; Ctrl-C ends one.

The engine allows one call at a time. A thread of this module makes a model's calls, one after
another, while each caller waits for its own. So two threads can't be in the engine at once. The
caller holds no lock and runs no C code, so it receives its signals. On KeyboardInterrupt the call
is asked to stop, and the exception is raised once it has stopped. A signal that comes just before a
wait does not end it, so each wait is short. A caller's event loop is blocked meanwhile, as by any
other call (asyncio.to_thread keeps it running).
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

T = TypeVar("T")

CLOSED = "the model is closed: load it again"
TICK_SECONDS = 0.1  # between two calls of `tick`, and between two looks at signals
AGAIN_SECONDS = 0.05  # between two requests to stop: the first may come before the call has begun


class CallThread:
    """See the file's header. The thread ends with this object."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tinsmith")

    def close(self) -> None:
        """Ends the thread after the queued calls."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def run(
        self,
        work: Callable[[], T],
        *,
        interrupt: Callable[[], None] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Runs `work` in the engine's thread; returns its result or raises its exception.

        On KeyboardInterrupt, `interrupt` is called from this thread until the work has ended. Work
        without `interrupt` is short: the caller waits for it, and it happens whole or not at all.
        `tick` is called from this thread, a few times a second. ValueError once closed.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "a model does not outlive fork(): load it in this process, or start processes by "
                "spawn"
            )
        future: Future[T] = Future()  # created before anything is queued: it is never lost
        try:
            self._submit(future, work)
            while not _ends(future):
                if tick is not None:
                    tick()
            return future.result()
        except BaseException:
            if not future.done() and not future.cancel():
                _stop(future, interrupt)
            raise

    def _submit(self, future: Future[T], work: Callable[[], T]) -> None:
        try:
            self._pool.submit(_execute, future, work)
        except RuntimeError:
            if self._closed:
                raise ValueError(CLOSED) from None
            raise


def run_in_all(
    threads: Sequence[CallThread],
    work: Callable[[], T],
    *,
    interrupt: Callable[[], None],
    tick: Callable[[], None] | None = None,
) -> T:
    """Runs `work` in the last thread, while the others wait for it."""
    begun = threading.Event()

    def noted() -> T:
        begun.set()
        return work()

    def stop() -> None:
        if begun.is_set():  # until then another thread's call may be running
            interrupt()

    nested: Callable[[], T] = noted
    for one in threads[1:]:
        nested = partial(one.run, nested)
    return threads[0].run(nested, interrupt=stop, tick=tick)


def _ends(future: Future[T]) -> bool:
    try:
        future.exception(TICK_SECONDS)
    except TimeoutError:
        return False
    return True


def _stop(future: Future[T], interrupt: Callable[[], None] | None) -> None:
    while not future.done():
        if interrupt is not None:
            interrupt()
        wait([future], AGAIN_SECONDS if interrupt else None)


def _execute(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
