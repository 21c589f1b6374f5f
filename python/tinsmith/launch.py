"""`python -m tinsmith.launch`: runs a recipe, which then finds the served models' tokenizers and
image processors.

A server's model may have any name for a folder on this machine, "Qwen/Qwen3-8B" for example; the
cookbook and the SDK's sampling client look for a name's tokenizer on the Hugging Face hub. Before
the recipe starts, this module registers the folder with the cookbook's own register_tokenizer:
under the name, and with Tinker's suffixes, NAME:peft:32768. The SDK has no such register, and the
cookbook has none for image processors, so their loading functions are patched to use the folder.
What the recipe logs with the cookbook's logger, the numbers in its metrics.jsonl, goes to the
server's page too. The same holds in processes that the recipe spawns. Nothing else differs from
`python -m MODULE …` and `python SCRIPT …`.

**The exit code survives a crash of Python's own shutdown.** Before 3.14, pthread_exit ends a
thread that asks for the GIL once the shutdown has begun. The SDK's HTTP client, pyqwest, has native
threads that call into Python to wake the event loop. A busy machine can interrupt such a call until
the shutdown. Then pthread_exit finds frames of Rust on the stack, which it can't unwind, and the C
library aborts the process without a message, though the recipe had finished.

Python's shutdown joins the threads that are not daemons, calls the atexit callbacks, denies the GIL
to other threads, flushes stdout and stderr, and deletes the remaining objects. The callback that is
registered first is called last, so ours runs right before the dangerous steps. It flushes, reports
the exit code, and waits until no native thread is inside Python. So a crash is unlikely, and
harmless if it happens: run.py returns the reported code.

Leaving by os._exit at that point would also avoid the crash. But a file that the recipe left open
would lose its buffer, which Python writes when it deletes the object.
"""

import atexit
import importlib.abc
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from tinsmith.api import client_log

MODELS = "TINSMITH_MODELS"  # environment variable: JSON, a folder for each name
EXIT_CODE = "TINSMITH_EXIT_CODE"  # environment variable: a file for the exit code
CONTEXTS = tuple(1 << power for power in range(10, 22))  # of Tinker's suffixes, in tokens


def register_tokenizers(models: Mapping[str, str | Path]) -> None:
    """Lets the SDK's and the cookbook's get_tokenizer read each name's tokenizer from the model's
    folder."""
    pairs = ((name, Path(folder)) for name, folder in models.items())
    names = {name: str(one) for name, one in pairs if Path(name).resolve() != one.resolve()}
    if not names:
        return
    register_with_sdk(names)
    register_image_processors(names)
    try:
        from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer
    except ImportError:
        return  # a script that needs the SDK only
    suffixed = {
        f"{name}:peft:{context}": folder for name, folder in names.items() for context in CONTEXTS
    }
    for name, folder in (suffixed | names).items():
        register_tokenizer(name, lambda folder=folder: get_tokenizer(folder))


def register_with_sdk(names: Mapping[str, str]) -> None:
    """The same for the SDK's sampling client, which only knows the name."""
    try:
        from tinker.lib.public_interfaces import sampling_client

        load = sampling_client._load_tokenizer_from_model_info
    except (ImportError, AttributeError):
        return  # a script without the SDK; or an SDK that loads them differently, from the hub

    def load_from_folder(name: str, tokenizer_id: str | None = None) -> Any:
        folder = names.get(name) or names.get(name.partition(":")[0])
        return load(name, tokenizer_id or folder)

    sampling_client._load_tokenizer_from_model_info = load_from_folder


def register_image_processors(names: Mapping[str, str]) -> None:
    """Lets the cookbook's get_image_processor read each name's settings from the folder."""
    try:
        from tinker_cookbook import image_processing_utils

        load = image_processing_utils.get_image_processor
    except (ImportError, AttributeError):
        return  # a script that needs the SDK only; or a cookbook that loads them differently

    def load_from_folder(model_name: str) -> Any:
        return load(names.get(model_name.partition(":")[0], model_name))

    image_processing_utils.get_image_processor = load_from_folder


class LogsShown(importlib.abc.MetaPathFinder):
    """Patches the cookbook's logger, on import, to show numbers on the server's page too."""

    MODULE = "tinker_cookbook.utils.ml_log"

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's spec, with a loader that patches it; None for any other module."""
        if name != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_show(module: Any) -> None:
            load(module)
            with suppress(AttributeError):  # another version of the cookbook
                module.JsonLogger.log_metrics = shown_too(module.JsonLogger.log_metrics)

        spec.loader.exec_module = load_and_show  # type: ignore[method-assign]
        return spec


def shown_too(write: Callable[..., None]) -> Callable[..., None]:
    """A JsonLogger's log_metrics that also shows numbers on the page. Texts are not curves."""

    def log_metrics(self: Any, metrics: dict[str, Any], step: int | None = None) -> None:
        write(self, metrics, step)
        with suppress(Exception):  # the recipe goes on, even if this fails
            texts = (str, bytes, list, dict, type(None))
            numbers = {key: of for key, of in metrics.items() if not isinstance(of, texts)}
            if numbers:
                client_log.log(numbers, step=step)

    return log_metrics


class SpawnedName(str):
    """The name of a process that multiprocessing spawns. It arrives there before anything of the
    recipe, and prepares the process as this one is."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        from tinsmith import launch  # this module, which may be __main__ here

        return launch.arrive, (str(self),)


def arrive(name: str) -> str:
    """Called in a spawned process, with its name."""
    prepare()
    return name


def prepare() -> None:
    """Registers the models' tokenizers and image processors, and patches the cookbook's logger, in
    this process and in those that it spawns."""
    sys.meta_path.insert(0, LogsShown())
    register_tokenizers(json.loads(os.environ.get(MODELS, "{}")))
    described = spawn.get_preparation_data

    def described_and_named(name: str) -> dict[str, Any]:
        return described(name) | {"name": SpawnedName(name)}

    spawn.get_preparation_data = described_and_named


def launch(command: Sequence[str]) -> None:
    """Does what `python` would do with these arguments: -m MODULE …, or SCRIPT …"""
    module = command[0] == "-m"
    sys.argv = list(command[1:] if module else command)
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        script = Path(sys.argv[0])
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(str(script.absolute()), run_name="__main__")


def exit_code(error: BaseException) -> int:
    """Python's exit code when this exception ends the program."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # as a shell shows it: Python ends by the signal
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 255 if isinstance(error.code, int) else 1


def wait_for_native_threads(seconds: float) -> None:
    """Waits, at most `seconds`, until only threads that Python started are inside Python."""
    dummy = threading._DummyThread  # the threading module's object for a native thread
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, dummy)}
    end = time.monotonic() + seconds
    while sys._current_frames().keys() - ours and time.monotonic() < end:
        time.sleep(0.001)


def main() -> None:
    """Runs the recipe on the command line, and reports its exit code."""
    process = os.getpid()
    report = os.environ.pop(EXIT_CODE, None)
    code = 0

    def leave() -> None:
        if os.getpid() != process:
            return  # a child that the recipe forked
        client_log.end()  # it would come later otherwise, beside native threads
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # Python flushes them again, and reports the error
                stream.flush()
        if report is not None:
            Path(report).write_text(str(code))
        wait_for_native_threads(1)

    atexit.register(leave)  # the first to be registered is the last to be called
    try:
        prepare()
        launch(sys.argv[1:])
    except BaseException as error:
        code = exit_code(error)
        raise


if __name__ == "__main__":
    main()
