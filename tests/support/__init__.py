"""What the tests share: models, cases, references, programs that they start."""

import os
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent


def environment() -> dict[str, str]:
    """That of a process which imports from the tests."""
    paths = (str(TESTS), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def beside(file: str) -> dict[str, Any]:
    """subprocess's arguments for a process which imports that file of the tests."""
    return {"cwd": Path(file).parent, "env": environment()}
