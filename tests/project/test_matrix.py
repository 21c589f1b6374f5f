"""What runs of a matrix (support/matrix.py): each test, and each model and setting, on the emulated
GPU; and all of it elsewhere."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.matrix import DEVICE, left_out, values_of

MODELS, SETTINGS = ("qwen3", "llama", "gpt_oss"), ({}, {"top_k": 3})


class Item(SimpleNamespace):
    """The part of a pytest.Item that is asked."""

    __hash__ = object.__hash__


def items(mark: pytest.Mark | None) -> list[Any]:
    """Two tests with each model and setting, on two devices."""
    return [
        Item(
            name=f"{test}[{device}-{model}]",
            originalname=test,
            path=Path("test_file.py"),
            callspec=SimpleNamespace(params={"on": device, "name": model, "options": setting}),
            get_closest_marker=lambda name: mark,
        )
        for test in ("test_a", "test_b")
        for device, model, setting in product(("cpu", DEVICE), MODELS, SETTINGS)
    ]


def test_each_test_and_each_value_is_there_on_the_emulated_gpu() -> None:
    all_of_them = items(pytest.mark.pairs.mark)
    dropped = left_out(all_of_them)
    emulated = [item for item in all_of_them if DEVICE in item.name]
    kept = [item for item in emulated if item not in dropped]
    assert dropped < set(emulated) and len(kept) < len(emulated) / 2
    assert {item.originalname for item in kept} == {"test_a", "test_b"}
    there, wanted = (set().union(*map(values_of, some)) for some in (kept, emulated))
    assert there == wanted and len(wanted) == 1 + len(MODELS) + len(SETTINGS)


@pytest.mark.parametrize("mark", [None, pytest.mark.pairs(False).mark])
def test_what_is_not_marked_runs_whole(mark: pytest.Mark | None) -> None:
    assert left_out(items(mark)) == set()
