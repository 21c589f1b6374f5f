"""A short part of the attack programs on the engine: no input may crash or be told as a bug."""

import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
from support import ROOT

from tools.attack import common

# Inputs of each: about two seconds on an idle core.
PROGRAMS = {
    "models": 300, "adapters": 150, "capsules": 500, "calls": 150, "parse_models": 2000,
    "parse_adapters": 2000, "parse_graphs": 200, "chat": 300, "schedules": 12,
    "images": 1000,
}  # fmt: skip
ALIKE = {"schedules"}  # whose inputs are all good, and end in one way


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on graphs that nobody would write
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_attack_finds_nothing(name: str) -> None:
    report = common.run(import_module(f"tools.attack.{name}"), count=PROGRAMS[name])
    print(report)
    assert not report.failures, "\n".join(report.failures)
    assert report.count == PROGRAMS[name] and len(report.outcomes) > (name not in ALIKE)


def test_what_an_attack_finds_is_told_with_the_command_that_makes_it_again() -> None:
    def one(attempt: common.Attempt) -> str:
        attempt.note("number", attempt.number)
        if attempt.number == 3:
            raise KeyError("x")
        return common.refusal(ValueError("x" if attempt.number == 4 else "a good sentence"))

    program = SimpleNamespace(__name__="attack.sample", attack=lambda: nullcontext(one))
    report = common.run(program, count=6)
    assert report.outcomes == {"refused": 4} and len(report.failures) == 2
    assert "KeyError: 'x'" in report.failures[0] and "number 3" in report.failures[0]
    assert "python -m tools.attack sample --seed 0 --first 3 --count 1" in report.failures[0]
    assert "not a sentence" in report.failures[1]


def test_the_command_runs_a_program_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "tools.attack", "parse_listings", "--count", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 inputs from number 0 of seed 0" in done.stdout and "; 0 failures" in done.stdout
