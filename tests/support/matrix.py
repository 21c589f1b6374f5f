"""Which tests of a matrix run: tests × devices × models and settings.

On the CPU all of a matrix runs. On the emulated GPU, which is slow, a file that is marked `pairs`
runs by pairs: each of its tests is there with one model or setting, and each of these with one
test. So a test, a device and a model meet in pairs, not all three. A test that is marked
`pairs(False)` has them all; `pytest --full` runs all.
"""

from collections.abc import Iterable

import pytest

DEVICE = "cuda-emulated"


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """What a test is called with, by the names of its parameters."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The items that do not run."""
    files: dict[object, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("pairs")
        if DEVICE in item.name and mark and mark.args != (False,):
            files.setdefault(item.path, []).append(item)
    return {item for file in files.values() for item in set(file) - chosen(file)}


def chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """One of each test, with what no other test has had; and more, until each value was there."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(getattr(item, "originalname", item.name), []).append(item)
    seen, found = set[tuple[str, str]](), set[pytest.Item]()

    def take(item: pytest.Item) -> None:
        seen.update(values_of(item))
        found.add(item)

    for group in tests.values():
        take(max(group, key=lambda item: len(values_of(item) - seen)))
    for item in items:
        if not values_of(item) <= seen:
            take(item)
    return found
