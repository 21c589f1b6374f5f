"""tests/sanitize.sh, which runs the op tests under compute-sanitizer: what it starts, and what it
refuses in a sentence. The GPU and the program are stood in for by two scripts."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitize.sh"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

# Notes its arguments, and waits until as many others as MEET have begun, which shows that they run
# side by side. Finds something with the tool FINDS, and never ends with the tool HANGS.
SANITIZER = """#!/bin/sh
echo "ran $*"
[ "$2" = "$HANGS" ] && exec sleep 60
touch "$SEEN/$2"
while [ "$(ls "$SEEN" | wc -l)" -lt "$MEET" ]; do sleep 0.01; done
[ "$2" != "$FINDS" ] || { echo "========= a race"; exit 1; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A python3 that has a GPU, or gives GPU as the reason for none; and the sanitizer."""
    programs = {"python3": '#!/bin/sh\necho "$GPU"\n', "compute-sanitizer": SANITIZER}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path, seen, out = f"{folder}:{os.environ['PATH']}", folder / "seen", folder / "out"
    seen.mkdir()
    env = {**os.environ, "PATH": path, "SEEN": str(seen), "SANITIZE_OUT": str(out), "MEET": "1"}
    env |= {"GPU": "", "FINDS": "", "HANGS": "", **environment}
    return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=50)


def log(folder: Path, tool: str) -> str:
    return (folder / "out" / f"{tool}.log").read_text()


def test_all_four_tools_run_side_by_side_on_the_op_tests(folder: Path) -> None:
    done = run(folder, MEET="4")
    assert done.returncode == 0, done.stderr
    for tool in TOOLS:
        assert f"== {tool}: nothing found" in done.stdout
        line = log(folder, tool)
        assert f"--tool {tool} --error-exitcode 1" in line
        assert "python3 -m pytest" in line and "tests/test_ops.py tests/test_ops_head.py" in line
        assert "cuda and not emulated" in line


def test_a_tool_and_arguments_of_pytest_are_passed_on(folder: Path) -> None:
    done = run(folder, "racecheck", "--", "-x")
    assert done.returncode == 0 and done.stdout.count("== ") == 1
    assert "--tool racecheck" in log(folder, "racecheck")
    assert log(folder, "racecheck").rstrip().endswith(" -x")


def test_a_finding_is_shown_and_the_other_tools_go_on(folder: Path) -> None:
    done = run(folder, FINDS="racecheck")
    assert done.returncode == 1
    assert "== racecheck: found something" in done.stdout and "= a race" in done.stdout
    for tool in ("memcheck", "initcheck", "synccheck"):
        assert f"== {tool}: nothing found" in done.stdout


def test_a_tool_that_does_not_end_is_stopped(folder: Path) -> None:
    done = run(folder, HANGS="initcheck", SANITIZE_LIMIT="1")
    assert done.returncode == 1
    assert "== initcheck: stopped after 1 s" in done.stdout
    assert "== synccheck: nothing found" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("helgrind",), {}, "there is no tool 'helgrind'"),
        ((), {"COMPUTE_SANITIZER": "/nowhere"}, "compute-sanitizer was not found"),
        ((), {"GPU": "cuda: no NVIDIA driver"}, "cuda: no NVIDIA driver"),
        ((), {"SANITIZE_LIMIT": "1h"}, "SANITIZE_LIMIT must be seconds"),
    ],
)
def test_what_is_missing_is_said(
    folder: Path, arguments: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    done = run(folder, *arguments, **environment)
    assert done.returncode == 2 and sentence in done.stderr
    assert not (folder / "out").exists()
