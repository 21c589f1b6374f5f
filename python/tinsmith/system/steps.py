"""Work in steps: a generator that yields (steps done, all) between two steps, and returns a result.

Whoever runs it decides what happens between two steps, and may end it there (`close`).
"""

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[tuple[int, int], None, T]


def finish(steps: Steps[T], told: Callable[[int, int], object] = lambda done, count: None) -> T:
    """Runs all steps; `told` is called between two. Its exception ends the work, and is raised."""
    try:
        while True:
            told(*next(steps))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
