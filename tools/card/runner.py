"""Runs the stages of a command one group after another, within its seconds.

A group's stages run side by side, each in processes of its own. A stage is ended at its limit, so
that one that hangs costs that and no more; a group for which no time is left is not begun. What was
found is reported after each stage: whatever happens later, it is there.

The runner asks a Machine for the time, for processes and to wait. rehearse.py has one that stands
still, and shows in a moment what would be reached."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import ROOT
from .report import Found, Stage, found

LEAST_S = 5.0  # for less no stage begins


class Process(Protocol):
    """A stage under way."""

    def over(self) -> bool:
        """Whether it has ended by itself."""

    def end(self, stage: Stage, seconds: float, late: bool) -> Found:
        """What it found; ends it where it runs still."""


class Machine(Protocol):
    """Where stages run."""

    def now(self) -> float: ...

    def start(self, stage: Stage) -> Process: ...

    def wait(self, until: float) -> None:
        """Until a process may have ended, or that time has come."""


@dataclass
class Under:
    """A stage that runs, from when, until when at most."""

    stage: Stage
    process: Process
    began: float
    limit: float


def groups(stages: Iterable[Stage]) -> Iterator[list[Stage]]:
    """Stages that follow one another and name the same group run together."""
    for group, some in itertools.groupby(stages, key=lambda stage: stage.group or stage.name):
        assert group
        yield list(some)


def run(machine: Machine, stages: Sequence[Stage], seconds: float) -> Iterator[Found]:
    """What the stages find, in the order in which they end. Without its device, the first stage,
    nothing else is tried."""
    ends = machine.now() + seconds
    for group in groups(stages):
        if ends - machine.now() < LEAST_S:
            for one in group:
                yield Found(one.name, one.tells, "not begun", "no time was left")
            continue
        for one in run_group(machine, group, ends):
            yield one
            if one.name == "device" and one.state == "failed":
                return


def run_group(machine: Machine, group: Sequence[Stage], ends: float) -> Iterator[Found]:
    running = []
    for stage in group:
        began = machine.now()
        limit = min(began + stage.limit_s, ends)
        running.append(Under(stage, machine.start(stage), began, limit))
    while running:
        for one in list(running):
            late = machine.now() >= one.limit
            if one.process.over() or late:
                running.remove(one)
                seconds = machine.now() - one.began
                yield one.process.end(one.stage, seconds, late and not one.process.over())
        if running:
            machine.wait(min(one.limit for one in running))


# ---- this machine ----


@dataclass
class Child:
    """A process, and where its output goes."""

    process: subprocess.Popen
    output: Path

    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self, stage: Stage, seconds: float, late: bool) -> Found:
        if not self.over():
            kill(self.process)
        try:
            text = self.output.read_text(errors="replace")
        except OSError as error:
            text = str(error)
        return found(stage, text, self.process.returncode or 0, seconds, late=late)


class Here:
    """This machine. `command` makes a stage's, and `logs` gets a file of each one's output."""

    def __init__(
        self, command: Callable[[Stage], list[str]], environment: dict[str, str], logs: Path
    ) -> None:
        self.command, self.environment, self.logs = command, environment, logs

    now = staticmethod(time.monotonic)

    def start(self, stage: Stage) -> Child:
        output, command = self.logs / f"{stage.file}.log", self.command(stage)
        if not shutil.which(command[0]):  # a shell says so, and the stage fails
            command = ["sh", "-c", f"echo '{command[0]} is not there'; exit 1"]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment, **stage.environment},
            )
        return Child(process, output)

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, min(0.05, until - time.monotonic())))


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=3)  # one that is stuck in the driver does not end
