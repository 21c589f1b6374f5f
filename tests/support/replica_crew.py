"""A worker with replicas on this machine, for tests: their processes end with the test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.engine.bases import inspect_models
from tinsmith.engine.replica import Replica
from tinsmith.engine.worker import Worker
from tinsmith.replicas import local
from tinsmith.replicas.crew import RemoteCrew
from tinsmith.replicas.messages import Start


class Replicated:
    """A worker, its crew, and their processes."""

    def __init__(self, worker: Worker, crew: RemoteCrew, processes: list[subprocess.Popen[bytes]]):
        self.worker, self.crew, self.processes = worker, crew, processes

    def send_all_to(self, number: int) -> None:
        """From here on, replica `number`, from 0, gets each request, while it is alive, unless it
        has refused it."""

        def choose(*rest: Any) -> Replica | None:
            wanted, refused = self.crew.all[number], rest[2] if len(rest) > 2 else ()
            return wanted if wanted in self.crew.replicas and wanted not in refused else None

        self.crew.choose = choose  # type: ignore[method-assign]


@contextlib.contextmanager
def replicated(
    replicas: int,
    models: Mapping[str, Path],
    *,
    theirs: Mapping[str, Path] | None = None,
    mixed: bool = False,
    wait: bool = True,
    short: int | None = None,
    **options: Any,
) -> Iterator[Replicated]:
    """A worker and its replicas, one thread each, on loaded models. `theirs` are the children's
    models, if they have others; `short` is the first child's memory; the options are the
    worker's."""
    begun: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            begun.append(self)

    crew = RemoteCrew(mixed=mixed)
    shares = local.divide(replicas, "cpu", threads=replicas)
    shares[1:2] = [replace(one, memory=short) for one in shares[1:2]]
    start = Start(0, models=theirs or models, dtype=None, weights="stored", weights_copy=True)
    known = inspect_models(models)
    before, subprocess.Popen = subprocess.Popen, Recorded  # type: ignore[misc]
    local.begin(crew, shares[1:], start)
    worker = Worker(known, threads=1, crew=crew, **options)
    try:
        worker.preload(known).result()
        if wait:
            asks = [partial(worker.call, partial(crew.ask_for, base=base)) for base in known]
            crew.wait(known, "cpu", [lambda ask=ask: ask().result() for ask in asks])
        for base in known:
            worker.open_base(base, base)
        yield Replicated(worker, crew, begun)
    finally:
        worker.close()
        crew.close()
        subprocess.Popen = before  # type: ignore[misc]
    assert all(process.poll() is not None for process in begun)
