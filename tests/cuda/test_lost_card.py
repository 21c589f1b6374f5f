"""A test that loses the GPU or hangs in C is named, and costs no other test (lost_card.py): pytest
with workers on a small folder of tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import TESTS
from support.leftovers import VARIABLE
from support.lost_card import ENDED, FAILED, SENTENCE, line_of

CONFTEST = """
from support import lost_card

def pytest_configure(config):
    lost_card.register(config)
"""
INNOCENT = """
import ctypes, pytest
lost = []

@pytest.mark.parametrize("n", range(6))
def test_before(n):
    assert not lost

{guilty}

@pytest.mark.parametrize("n", range(6))
def test_after(n):
    assert not lost
"""
LOSES = f"""
def test_guilty():
    lost.append(1)
    raise RuntimeError("cuda: a kernel failed. {SENTENCE}: start the server again")
"""
IN_SETUP = """
@pytest.fixture
def card():
    lost.append(1)
    try:
        raise RuntimeError("cuda: a kernel failed. SENTENCE: start the server again")
    except RuntimeError as error:
        raise ValueError("no model") from error

def test_guilty(card):
    pass
""".replace("SENTENCE", SENTENCE)
HANGS = """
def test_guilty():
    ctypes.CDLL(None).pause()
"""
HANGS_WITH_THE_LOCK = HANGS.replace("CDLL", "PyDLL")
THREAD = ("timeout=4", "timeout_method=thread")
DUMP = ("faulthandler_timeout=4", "faulthandler_exit_on_timeout=true")
KNOWS_DUMP = pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 ends the process")


def run(folder: Path, guilty: str, *rules: str) -> tuple[dict[str, list[str]], str]:
    """Runs a guilty test among innocent ones of two files: the tests by how they ended, and all
    that was printed."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_a.py").write_text(INNOCENT.format(guilty=guilty))
    (folder / "test_b.py").write_text(INNOCENT.format(guilty=""))
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"PYTHONPATH": str(TESTS), "COLUMNS": "300", VARIABLE: str(folder / "left")}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *rules, "."]
    made = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=300)
    ends: dict[str, list[str]] = {}
    summary = made.stdout.partition("short test summary info")[2]
    for end, name in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", summary, re.M):
        ends.setdefault(end, []).append(name)
    return ends, made.stdout + made.stderr


GUILTY = "test_a.py::test_guilty"
OTHERS = sorted(
    f"test_{file}.py::test_{when}[{n}]"
    for file in "ab"
    for when in ("before", "after")
    for n in range(6)
)


def left_in(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "left" / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("dist", "guilty", "end"),
    [("load", LOSES, "FAILED"), ("loadfile", IN_SETUP, "ERROR")],
    ids=["test", "fixture"],
)
def test_a_lost_gpu_costs_the_test_that_lost_it(
    tmp_path: Path, dist: str, guilty: str, end: str
) -> None:
    ends, text = run(tmp_path, guilty, "-n", "2", "--dist", dist, "--max-worker-restart=3")
    assert sorted(ends.pop("PASSED")) == OTHERS, text
    assert {name for names in ends.values() for name in names} == {GUILTY}
    assert GUILTY in ends[end]
    assert text.count("replacing crashed worker") == 1
    assert re.search(rf"FAILED {GUILTY} - its worker has ended itself: .*{SENTENCE}", text)
    for name in (ENDED, FAILED):
        row = left_in(tmp_path, name)[0]
        assert row["test"] == GUILTY and SENTENCE in row["why"]


def test_without_workers_no_process_ends_itself(tmp_path: Path) -> None:
    ends, text = run(tmp_path, LOSES, "-p", "no:xdist")
    after = [f"test_a.py::test_after[{n}]" for n in range(6)]
    assert sorted(ends["FAILED"]) == sorted([GUILTY, *after]), text
    assert len(ends["PASSED"]) == 18


@pytest.mark.parametrize(
    ("dist", "guilty", "rules"),
    [
        ("load", HANGS, THREAD),
        pytest.param("loadfile", HANGS_WITH_THE_LOCK, DUMP, marks=KNOWS_DUMP),
    ],
    ids=["load", "locked"],
)
def test_a_test_that_hangs_in_c_is_named_and_the_others_run(
    tmp_path: Path, dist: str, guilty: str, rules: tuple[str, ...]
) -> None:
    options = [part for rule in rules for part in ("-o", rule)]
    limit = "--max-worker-restart=3"
    ends, text = run(tmp_path, guilty, "-n", "2", "--dist", dist, limit, *options)
    assert sorted(ends["PASSED"]) == OTHERS, text
    assert ends["FAILED"] == [GUILTY]
    assert re.search(rf"FAILED {GUILTY} - worker 'gw\d' crashed while running '{GUILTY}'", text)
    assert [row["test"] for row in left_in(tmp_path, ENDED)] == [GUILTY]
    if rules is DUMP:  # says where it hung
        assert re.search(r"test_a.py\", line \d+ in test_guilty", text)


def test_a_lost_gpu_is_found_behind_other_errors() -> None:
    inner = RuntimeError(f"first\ncuda: {SENTENCE}: start again\nlast")
    for chained in (ExceptionGroup("two", [ValueError("other"), inner]), inner):
        outer = ValueError("no model")
        outer.__cause__ = chained
        assert line_of(outer) == f"cuda: {SENTENCE}: start again"
    outer.__cause__, inner.__context__ = inner, outer  # a circle ends
    assert line_of(ValueError("The GPU is busy")) == line_of(None) == ""
    assert line_of(outer) == f"cuda: {SENTENCE}: start again"


def test_the_sentence_is_the_one_that_the_device_says() -> None:
    assert f"{SENTENCE}: " in (TESTS.parent / "cuda/runtime/cuda.cu").read_text()
