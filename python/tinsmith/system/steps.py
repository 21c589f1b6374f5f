"""Work in steps: a generator that yields (steps done, all) between two steps, and returns a result.

Whoever runs it decides what happens between two steps, and may end it there (`close`). Instead of
progress it may yield a future: it has nothing to do until that is done.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[tuple[int, int] | Future[None], None, T]


def finish(steps: Steps[T], told: Callable[[int, int], object] = lambda done, count: None) -> T:
    """Runs all steps; `told` is called between two. Its exception ends the work, and is raised."""
    try:
        while True:
            news = next(steps)
            if isinstance(news, Future):
                news.result()
            else:
                told(*news)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
