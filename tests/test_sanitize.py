"""tests/sanitize.sh, which runs the op tests under compute-sanitizer: what it starts, and what it
refuses in a sentence. The GPU and the program are stood in for by two scripts."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitize.sh"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A python that has a GPU, or gives GPU as the reason for none; a sanitizer that notes its
    arguments and finds something with the tool FINDS."""
    programs = {
        "python": '#!/bin/sh\necho "$GPU"\n',
        "compute-sanitizer": '#!/bin/sh\necho "ran $*"\n[ "$2" != "$FINDS" ]\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = f"{folder}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "GPU": "", "FINDS": "", **environment}
    return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True)


def test_all_four_tools_run_on_the_op_tests(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert [line.split()[2] for line in started] == [
        "memcheck",
        "racecheck",
        "initcheck",
        "synccheck",
    ]
    for line in started:
        assert "--error-exitcode 1" in line
        assert "python -m pytest" in line and "tests/test_ops.py tests/test_ops_head.py" in line
        assert "cuda and not emulated" in line


def test_a_tool_and_arguments_of_pytest_are_passed_on(folder: Path) -> None:
    done = run(folder, "racecheck", "--", "-x")
    assert done.stdout.count("ran ") == 1
    assert "--tool racecheck" in done.stdout and done.stdout.rstrip().endswith(" -x")


def test_a_finding_ends_it(folder: Path) -> None:
    done = run(folder, FINDS="racecheck")
    assert done.returncode == 1
    assert "racecheck found something" in done.stderr
    assert "initcheck" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("helgrind",), {}, "there is no tool 'helgrind'"),
        ((), {"COMPUTE_SANITIZER": "/nowhere"}, "compute-sanitizer was not found"),
        ((), {"GPU": "cuda: no NVIDIA driver"}, "cuda: no NVIDIA driver"),
    ],
)
def test_what_is_missing_is_said(
    folder: Path, arguments: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    done = run(folder, *arguments, **environment)
    assert done.returncode == 2 and sentence in done.stderr
    assert "ran " not in done.stdout
