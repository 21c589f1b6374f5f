"""`tinsmith run`: a recipe, unmodified, on a backend that runs only as long as the recipe.

The recipe is a separate process with the same Python. It finds the backend by the SDK's two
environment variables, and the models' tokenizers by launch.py. Its exit code is the command's, even
if Python crashes after the recipe's end (launch.py); Ctrl-C reaches it first. Recipes that run at
the same time may share a folder of checkpoints: a recipe that is resumed there finds its own,
whatever else ran there.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith import launch

if TYPE_CHECKING:
    from tinsmith.server.backend import Backend

log = logging.getLogger("tinsmith")

API_KEY = "tml-local"  # the SDK requires the prefix; the rest is not read
# Signals that a process sends itself. A kill from outside is not a crash, even if it comes late.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


def show_help(command: Sequence[str]) -> int:
    """Shows a recipe's own help, without a backend; returns the exit code."""
    return subprocess.call([sys.executable, *command])


def run_recipe(
    command: Sequence[str],
    models: Mapping[str, Path],
    console: "Callable[[Backend, int], AbstractContextManager[object]]",
    *,
    checkpoints: Path,
    **options: Any,
) -> int:
    """Runs Python with `command` as its arguments; returns the exit code. The console shows what
    the backend does for the recipe's process; the options are the backend's."""
    from tinsmith.server.backend import Backend
    from tinsmith.server.service.config import ServerConfig

    config = ServerConfig(models, checkpoints=checkpoints, share_checkpoints=True, **options)
    with (
        tempfile.TemporaryDirectory() as folder,
        Backend(config) as backend,
    ):
        backend.recipe = recipe_name(command)
        report = Path(folder) / "exit_code"
        environment = os.environ | {
            "TINKER_BASE_URL": backend.url,
            "TINKER_API_KEY": API_KEY,
            launch.MODELS: json.dumps({name: str(path) for name, path in models.items()}),
            launch.EXIT_CODE: str(report),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith.launch", *command], env=environment
        )
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        log.info("the page at %s/ shows the run", backend.url)
        try:
            with console(backend, process.pid):
                code = _wait(process)
        finally:
            signal.signal(signal.SIGTERM, before)
        reported = report.read_text() if report.exists() else ""
    if -code in CRASHES and reported:
        name = signal.Signals(-code).name
        print(
            f"tinsmith: the recipe ended with exit code {reported}, then Python crashed while "
            f"shutting down ({name})",
            file=sys.stderr,
        )
        return int(reported)
    return code if code >= 0 else 128 - code


def recipe_name(command: Sequence[str]) -> str:
    """A recipe's name from its command line: its module or script, or its folder if it is called
    train, as most of the cookbook's are."""
    module = command[0] == "-m"
    parts = command[1].split(".") if module else Path(command[0]).resolve().with_suffix("").parts
    named = [part for part in parts if part not in ("train", "main", "__main__", "/")]
    return (named if module and named else parts)[-1]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code. A terminal's Ctrl-C reaches both processes; another SIGINT is passed on."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                process.send_signal(signal.SIGINT)
