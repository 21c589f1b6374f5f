"""Programs of a test, each a process with a log of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from support.waiting import until

TINSMITH = "from tinsmith.cli.commands import main; raise SystemExit(main())"


class Programs:
    """Processes by name; their logs are files in `folder`. A context manager that ends them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None):
        self.folder = folder
        self._environment = os.environ | (environment or {})
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._begin = time.monotonic()

    def start(self, name: str, *words: str) -> None:
        """Starts one."""
        with (self.folder / name).open("w") as log:
            self._running[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env=self._environment
            )

    def serve(self, name: str, model: str, *words: str) -> str:
        """Starts a server, and waits until it listens; its address."""
        self.start_server(name, model, *words)
        return self.said(name, r"http://\S+:\d+")

    def start_server(self, name: str, model: str, *words: str) -> None:
        """Starts a server on the CPU, with one thread."""
        self.start(
            name, sys.executable, "-c", TINSMITH, "serve", model, "--device", "cpu",
            "--threads", "1", "--port", "0", "--no-status", *words,
        )  # fmt: skip

    def said(self, name: str, pattern: str) -> str:
        """Waits until one has said something; what it was."""
        found: list[str] = []

        def looked() -> list[str]:
            ended, text = self._running[name].poll(), (self.folder / name).read_text()
            found.extend(re.findall(pattern, text)[:1])
            assert found or ended is None, text
            return found

        until(looked)
        self.tell(f"{name}: {found[0]}")
        return found[0]

    def tell(self, event: str) -> None:
        """Prints when something happened."""
        print(f"{time.monotonic() - self._begin:5.1f} s: {event}", flush=True)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends one by a signal."""
        process = self._running.pop(name)
        process.send_signal(number)
        process.wait()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._running)):
            self.end(name)
