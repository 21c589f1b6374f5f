"""Every public name of the in-process API has a docstring whose example runs."""

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinsmith
from support.images import png
from support.seeing_chat import chat_folder
from tinsmith.api.results import INTERNAL
from tinsmith.demo.demo import MODEL


def public() -> Iterator[tuple[str, Any]]:
    """Every public name of tinsmith with what it is; of a class its public members too."""
    for name in dir(tinsmith):
        item = getattr(tinsmith, name)
        if inspect.ismodule(item):
            yield from ((f"{name}.{key}", getattr(item, key)) for key in item.__all__)
        elif not name.startswith("__"):
            yield name, item
        if inspect.isclass(item):
            for key in sorted(dir(item)):
                member = inspect.getattr_static(item, key)
                made_by = getattr(getattr(member, "fget", member), "__module__", "")
                if key[0] != "_" and key not in INTERNAL and made_by.startswith("tinsmith"):
                    yield f"{name}.{key}", member


NAMES = dict(public())


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What examples begin with: a model that talks, an adapter, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    Path("path/to").mkdir(parents=True)
    Path("path/to/Qwen3-0.6B").symlink_to(MODEL)
    Path("path/to/Qwen3.5-0.8B").symlink_to(chat_folder("qwen3_5"))
    Path("photo.png").write_bytes(png(1, (64, 96)))
    model = tinsmith.Model("path/to/Qwen3-0.6B", device="cpu", threads=1)
    adapter = model.lora(rank=4, seed=1)
    return {"tinsmith": tinsmith, "np": np, "model": model, "adapter": adapter}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_an_example_that_runs(name: str, given: dict[str, Any]) -> None:
    item = NAMES[name]
    text = inspect.getdoc(item) or ""
    assert text.strip(), "no docstring"
    [example] = [doctest.DocTestParser().get_doctest(text, given, name, None, None)]
    assert example.examples, "no example"
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert failed == 0, "".join(said)


def test_an_example_that_is_wrong_is_noticed(given: dict[str, Any]) -> None:
    example = doctest.DocTestParser().get_doctest(">>> model.vocab\n3\n", given, "n", None, None)
    assert doctest.DocTestRunner().run(example, out=lambda text: None).failed == 1
