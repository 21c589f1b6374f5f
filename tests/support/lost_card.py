"""A test that loses the GPU, or hangs, fails alone: others go on in a new process.

After an error that says SENTENCE (cuda/runtime/cuda.cu) a process can't use its GPU again, so
every test after it would fail. Under pytest-xdist the worker ends itself then, once the failure's
report is sent; xdist replaces it. It must end before xdist hears that the test is complete: what
xdist then takes for the test that crashed is the first that is not, and that is the guilty one.

With --dist loadfile, xdist gives a test that crashed to the next worker again, until it replaces
none any more. `Once` does not. It also serves tests that hang, whose worker pytest-timeout's method
"thread" ends, or pytest's faulthandler_exit_on_timeout, which does not need the interpreter's lock.

What ended a worker is left in the folder as well (leftovers.py), in ended.jsonl, and why a test
failed in failed.jsonl.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.leftovers import noted

SENTENCE = "The GPU is lost to this process"
ENDED, FAILED = "ended.jsonl", "failed.jsonl"
LONGEST = 4000  # characters of a failure


def register(config: pytest.Config) -> None:
    """Adds the hooks; without xdist's workers, none of them does anything."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    config.pluginmanager.register(Worker(worker) if worker else Controller())


def line_of(error: BaseException | None) -> str:
    """What an error, or one that led to it, says of a lost GPU; or ""."""
    found, left = set(), [error]
    while left:
        one = left.pop()
        if one is None or id(one) in found:
            continue
        found.add(id(one))
        if lines := [line for line in str(one).splitlines() if SENTENCE in line]:
            return lines[0]
        left += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return ""


class Worker:
    """In a process that runs tests."""

    def __init__(self, name: str):
        self.name = name

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        """Marks the report of a test whose error says that the GPU is lost; the mark travels."""
        report = yield
        report.lost = line_of(call.excinfo.value if call.excinfo else None)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Iterator[None]:
        """Ends the process behind such a report, which all others have sent or kept by then."""
        yield
        if line := getattr(report, "lost", ""):
            noted(ENDED, {"test": report.nodeid, "worker": self.name, "why": line})
            os._exit(1)


class Controller:
    """In the process that gives tests to the others."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if line := getattr(report, "lost", ""):
            self.lost[report.nodeid] = line
        if report.failed:  # of a run that is cut off, pytest tells no reasons
            noted(FAILED, {"test": report.nodeid, "why": report.longreprtext[-LONGEST:]})

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Says of a worker that has ended itself why it has."""
        if line := self.lost.get(crashitem):
            report.longrepr = f"its worker has ended itself: {line}"
        else:
            noted(ENDED, {"test": crashitem, "why": str(report.longrepr)})

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Callable) -> Any:
        """xdist's own for everything but --dist loadfile."""
        return once(config, log) if config.getvalue("dist") == "loadfile" else None


def once(config: pytest.Config, log: Callable) -> Any:
    """xdist's scheduler of whole files, which does not give out again what crashed."""
    from xdist.scheduler import LoadFileScheduling

    class Once(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            """The test that a worker crashed in. The others of its files are given out again."""
            files = self.assigned_work.pop(node)
            left = [(file, test) for file in files.values() for test in file if not file[test]]
            if not left:
                return None
            file, crashed = left[0]
            file[crashed] = True
            again = {name: one for name, one in files.items() if not all(one.values())}
            self.workqueue.update(again)
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Once(config, log)
