"""What a run of the tests leaves in a folder for whoever reads it later, elsewhere: the variable
TINSMITH_WRONG names it, and without it nothing is left.

A lent card goes back minutes after the tests, and of what they print only the end may be seen."""

import json
import os
from pathlib import Path

VARIABLE = "TINSMITH_WRONG"


def folder() -> Path | None:
    """The folder, made if it is not there; or None."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def noted(name: str, row: dict) -> None:
    """Adds a line of JSON to a file of the folder, in one write: several processes add lines."""
    place = folder()
    if place is None:
        return
    file = os.open(place / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{json.dumps(row)}\n".encode())
    finally:
        os.close(file)
