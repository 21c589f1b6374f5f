"""The crew of threads under the thread sanitizer; races.sh runs the engine and the server so."""

import subprocess
from pathlib import Path

import pytest
from support import ROOT

SOURCES = ("tests/cpu/crew.c", "csrc/cpu/runtime/pool.c", "csrc/device/status.c")
RACED = 66  # the sanitizer's exit code


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """crew.c, built for the sanitizer."""
    program = tmp_path_factory.mktemp("crew") / "crew"
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    command = ["gcc", *flags, "-fsanitize=thread", *(ROOT / name for name in SOURCES)]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    if "tsan" in built.stderr:
        pytest.skip(f"gcc has no thread sanitizer here: {built.stderr:.200}")
    assert not built.returncode, built.stderr
    return program


@pytest.mark.parametrize(("callers", "threads"), ((1, 4), (4, 4), (4, 2)))
def test_callers_and_the_crew_do_not_race(crew: Path, callers: int, threads: int) -> None:
    command = [crew, str(callers), str(threads), "0.7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr + done.stdout
    assert int(done.stdout.split()[0]) > 0 and done.stdout.endswith(" jobs are right\n")


def test_a_race_of_a_jobs_pieces_is_told(crew: Path) -> None:
    command = [crew, "1", "4", "0.5", "race"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == RACED and "data race" in done.stderr
