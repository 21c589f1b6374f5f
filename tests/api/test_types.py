"""mypy --strict and pyright pass on the in-process API, on calls of it, and on the snippets of
README and of docs/in_process.md.

mypy takes minutes to read the SDK and openai, so it takes their objects as they come; pyright reads
them all.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import tinsmith
from support import ROOT
from tinsmith import _core
from tinsmith.api import kinds

FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
README = FENCE.findall((ROOT / "README.md").read_text())
PAGE = FENCE.findall((ROOT / "docs" / "in_process.md").read_text())  # one program
SNIPPETS = [*README, "".join(PAGE)]
CALLS = ROOT / "tests" / "api" / "typed_calls.py"
LARGE = ["openai.*", "tinker.*"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the snippets, and the calls."""
    folder = tmp_path_factory.mktemp("types")
    assert README and PAGE
    for number, snippet in enumerate(SNIPPETS):
        (folder / f"snippet_{number}.py").write_text(snippet)
    (folder / CALLS.name).write_text(CALLS.read_text())
    return folder


def checked(*command: str, folder: Path) -> tuple[int, str]:
    given = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_mypy_finds_nothing(sources: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"]
    untyped = [name for row in settings["overrides"] for name in row["module"]]
    (sources / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"  # of other files' faults
        + "".join(f"[mypy-{name}]\nignore_missing_imports = true\n" for name in untyped)
        + "".join(f"[mypy-{name}]\nfollow_imports = skip\n" for name in LARGE)
    )
    files = sorted(path.name for path in sources.glob("*.py"))
    files += [str(path) for path in sorted((ROOT / "python/tinsmith/api").glob("*.py"))]
    files.append(str(ROOT / "python/tinsmith/_core.pyi"))
    code, said = checked(sys.executable, "-m", "mypy", *files, folder=sources)
    assert code == 0, said
    assert f"no issues found in {len(files)} source files" in said


def test_pyright_finds_nothing(sources: Path) -> None:
    settings = {
        "include": ["."],
        "extraPaths": [str(ROOT / "python")],
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (sources / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    try:
        code, said = checked(*command, "--version", folder=sources)
    except OSError as error:
        code, said = 1, str(error)
    if code:
        pytest.skip(f"pyright can't be started: {said.strip()[-200:]}")
    code, said = checked(*command, "--outputjson", folder=sources)
    found = json.loads(said[said.index("{") :])
    assert found["generalDiagnostics"] == []
    assert found["summary"]["filesAnalyzed"] == len(SNIPPETS) + 1


def test_every_loss_and_its_arguments_are_in_the_docstrings_table() -> None:
    table = (inspect.getdoc(tinsmith.Adapter.forward_backward) or "").partition("Parameters")[0]
    rows = {row["name"]: row for row in _core.losses() if not row["taught"]}
    assert set(get_args(kinds.LossFn)) == rows.keys(), "LossFn in api/kinds.py is not _core's"
    told = [set(re.findall(r"\w+", line)) for line in table.splitlines() if line.startswith("| ")]
    for name, row in rows.items():
        [words] = [words for words in told if name in words]
        others = {*(item["name"] for item in row["inputs"]), *row["config"]}
        assert others <= words <= {*rows, *others, "where", "left", "out", "1"}, name
    [taught] = [row for row in _core.losses() if row["taught"]]
    methods = tinsmith.Adapter.generalized_jsd, tinsmith.Adapter.generalized_jsd_topk
    given = {name for method in methods for name in inspect.signature(method).parameters}
    assert {item["name"] for item in taught["inputs"]} | set(taught["config"]) <= given
