"""A process that has imported what recipes import, and forks for each that is to run; and `Host`,
a test's end of it.

Standard input has one JSON object a line: the command, its folder, its environment, the file for
its output. Standard output answers with the exit code. A recipe so starts in a tenth of a second
instead of six; it runs as `tinsmith run` would run it, in a process and a module __main__ of its
own. Nothing here starts a thread or a client, so the fork is safe.
"""

import atexit
import contextlib
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinsmith import launch


class Host:
    """The process, to who asks it to run a recipe."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, **job: object) -> int:
        """Runs a recipe (`child`); returns its exit code."""
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self._answer())


@contextlib.contextmanager
def running_host(datasets: Path) -> Iterator[Host]:
    """A host whose recipes keep what they make of data in the folder `datasets`."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(datasets),
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    running = Host(environment)
    yield running
    running.process.stdin.close()
    running.process.wait()


# ---- in the process ----


def preload() -> None:
    """The imports that recipes share."""
    import datasets  # noqa: F401
    import tinker_cookbook.distillation.sdft
    import tinker_cookbook.preference.train_dpo
    import tinker_cookbook.rl.train
    import tinker_cookbook.supervised.train  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401


def child(job: dict[str, Any]) -> int:
    """The recipe, in the forked process."""
    with Path(job["output"]).open("wb") as output, Path(job["input"]).open("rb") as given:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.dup2(given.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    sys.path.insert(0, "")
    try:
        launch.prepare()
        launch.launch(job["command"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    preload()
    gc.freeze()  # a child's collections leave the parent's pages shared
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            code = child(json.loads(line))
            atexit._run_exitfuncs()  # the SDK says good-bye; taking the imports apart takes seconds
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
