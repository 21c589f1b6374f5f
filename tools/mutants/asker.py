"""A process that asks tests: it has imported what most of them import, which takes longer than most
of them, and forks for each run. The package under test is imported by the forks alone.

A request is a line of JSON: the file for what pytest prints, and pytest's arguments. Its answers
are two lines: the fork's process id, which is its process group's too, and its exit code."""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2] / "tests")
import conftest  # noqa: E402, F401 - sets the environment that the libraries below read

IMPORTED = (
    "numpy", "torch", "transformers", "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "peft", "tokenizers", "safetensors.torch",
    "tinker", "tinker.proto.request_conv", "starlette.applications", "uvicorn", "httpx",
    "zstandard", "pyrage",
)  # fmt: skip


def ask(output: str, arguments: list[str]) -> int:
    """pytest's exit code, in a fork."""
    import pytest

    os.setsid()
    nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)
    sys.path[0] = ""  # as `python -m pytest` has it
    return int(pytest.main(arguments))


def main() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            sys.exit(ask(*json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
