"""tests/first_card.py: what it reports of stages that pass, fail, hang or find something, and its
own programs on the emulated GPU, each with an error that it must find."""

import ast
import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import engine
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tools.card import __main__ as first_card
from tools.card import choice as card_bits
from tools.card import report as card_report
from tools.card import smoke as card_smoke
from tools.card.report import Stage

TESTS = Path(__file__).parent
PROGRAMS = (["-m", "tools.card.smoke"], ["-m", "tools.card.choice"], ["benchmarks/cuda_ops.py"])
HERE = "import json, sys, time, subprocess\n"


def shell(name: str, phase: str, code: str, **more) -> Stage:
    """A stage that is a few lines of Python."""
    return Stage(name, "tells", phase, lambda _: [sys.executable, "-c", HERE + code], 1.0, **more)


def options(out: Path, **more) -> Namespace:
    given = {"minutes": 1.0, "device": "cuda-emulated", "stages": None, "only": "", "out": out}
    return Namespace(**{**given, **more})


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *stages: Stage, **more) -> dict[str, dict]:
    """What the report says of the stages, by name."""
    monkeypatch.setattr(first_card, "STAGES", stages)
    first_card.run(options(out, **more))
    return {one["name"]: one for one in json.loads((out / "report.json").read_text())["stages"]}


def test_the_report_says_of_each_stage_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = run(
        monkeypatch,
        tmp_path,
        shell("fine", "alone", "print(json.dumps({'op': 'a', 'µs': 1.5}))", reads="json"),
        shell("crash", "tests", "print('half way'); sys.stdout.flush(); import os; os.abort()"),
        shell("off", "tests", "print(json.dumps({'op': 'b', 'wrong': 'off by 1'}))", reads="json"),
        shell("absent", "times", "print('never')", needs=("a_package_that_is_nowhere",)),
        shell("card", "tools", "print('never')", real=True),
    )
    assert said["fine"]["state"] == "right" and said["fine"]["rows"] == [{"op": "a", "µs": 1.5}]
    assert said["crash"]["state"] == "failed" and "half way" in said["crash"]["text"]
    assert "exit code -6" in said["crash"]["summary"]
    assert said["off"]["state"] == "found something" and "off by 1" in said["off"]["summary"]
    assert said["absent"]["summary"] == "a_package_that_is_nowhere is not installed"
    assert said["card"]["summary"] == "it needs a real card"
    text = (tmp_path / "report.md").read_text()
    assert text.index("## What is wrong") < text.index("## fine")


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    said = run(monkeypatch, tmp_path, shell("hangs", "alone", hangs), minutes=1.0)["hangs"]
    assert said["state"] == "cut off" and 5 < said["seconds"] < 12  # a tenth of a minute
    child = int(said["text"])
    status, end = Path(f"/proc/{child}/stat"), time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.02)


def test_without_its_device_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = run(
        monkeypatch,
        tmp_path,
        shell("device", "alone", "print('cuda: no GPU was found'); sys.exit(1)"),
        shell("tests", "tests", "print('never')"),
    )
    assert list(said) == ["device"] and "cuda: no GPU was found" in said["device"]["summary"]


CUT_OFF = """\
tests/test_ops.py::test_op[cuda-rmsnorm] PASSED                     [  3%]
[gw1] [ 10%] PASSED tests/test_ops.py::test_op[cuda-rope]
[gw0] [ 12%] FAILED tests/test_ops.py::test_op[cuda-linear a - b]
tests/test_ops.py::test_op[cuda-swiglu]
"""
WHOLE = (
    CUT_OFF
    + """\
=========================== short test summary info ============================
SKIPPED [2] tests/test_ops.py:3: there is no GPU
FAILED tests/test_ops.py::test_op[cuda-linear a - b] - assert 0.5 < 0.1
"""
)


@pytest.mark.parametrize(("text", "why"), [(CUT_OFF, "it failed"), (WHOLE, "assert 0.5 < 0.1")])
def test_tests_are_counted_also_where_they_were_cut_off(text: str, why: str) -> None:
    found = card_report.found(
        shell("ops", "tests", "", reads="pytest"), text, 1, 9.0, late=text is CUT_OFF
    )
    assert found.state == "found something"
    assert "2 passed, 1 failed" in found.summary
    assert found.rows == [{"test": "tests/test_ops.py::test_op[cuda-linear a - b]", "wrong": why}]


NOT_IMPORTED = """\
==================================== ERRORS ====================================
______________________ ERROR collecting tests/test_turns.py ______________________
ImportError while importing test module '/tests/test_turns.py'.
tests/test_turns.py:12: in <module>
    import tinker
E   ModuleNotFoundError: No module named 'tinker'
"""


def test_a_file_that_is_not_imported_is_told_beside_the_tests_that_ran() -> None:
    stage = shell("ops", "tests", "", reads="pytest")
    found = card_report.found(stage, NOT_IMPORTED + CUT_OFF, 1, 9.0, late=False)
    assert found.state == "found something"
    assert found.summary == "2 passed, 1 failed, 1 files were not tried"
    assert found.rows[0] == {
        "test": "tests/test_turns.py",
        "wrong": "ModuleNotFoundError: No module named 'tinker'",
    }


@pytest.mark.parametrize("stage", first_card.STAGES, ids=lambda stage: stage.name)
def test_a_stage_says_what_its_files_import(stage: Stage) -> None:
    """Where a file asked for more than its stage, none of them would run."""
    files = [part for part in stage.command(options(Path())) if part.startswith("tests/test_")]
    known = {"torch", "transformers", "peft", "safetensors", "tinker", "starlette", "httpx"}
    for file in files:
        assert imported(engine.ROOT / file) & known <= set(stage.needs), file


def imported(path: Path, seen: set[Path] | None = None) -> set[str]:
    """The packages that a file of the tests imports at its top, and those that it imports."""
    seen = set() if seen is None else seen
    found = set()
    if path in seen or not path.is_file():
        return found
    seen.add(path)
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            package = name.partition(".")[0]
            found |= {package} | imported(TESTS / f"{package}.py", seen)
    return found


def test_on_a_card_only_tests_of_the_card_are_chosen() -> None:
    """Those of the emulated one tell nothing there, and take the minutes to build it."""
    names = [f"tests/test_{file}.py" for file in (*first_card.OPS, *first_card.SAMPLING)]
    rules = ["-o", "addopts=", "--collect-only", "-q", "-p", "no:cacheprovider"]
    chosen = ["-k", first_card.only(options(Path(), device="cuda"))]
    command = [sys.executable, "-m", "pytest", *rules, *chosen, *names, "tests/test_cuda_device.py"]
    done = subprocess.run(command, cwd=engine.ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == set(names)
    assert all(re.search(r"[\[-]cuda[\]-]", test) for test in tests)


def test_a_run_without_a_test_is_no_success() -> None:
    stage = shell("ops", "tests", "", reads="pytest")
    found = card_report.found(stage, "no tests ran in 0.01s\n", 5, 1.0, late=False)
    assert found.state == "failed" and "no tests ran" in found.summary


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one[-1])
def test_its_programs_find_nothing_on_the_emulated_gpu(program: list[str]) -> None:
    engine.device("cuda-emulated")
    command = [sys.executable, *program, "--device", "cuda-emulated", "--tiny"]
    done = subprocess.run(command, cwd=engine.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 4 and not any("wrong" in row for row in rows)


def test_bits_that_change_with_the_number_of_rows_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fake:
        inputs, BASE = 4, card_bits.BASE

        @staticmethod
        def bits(x: np.ndarray) -> np.ndarray:
            changed = x.copy()
            if len(x) == 17:
                changed[16, 3] *= 1 + 2.0**-20
            return changed.view(np.uint32)

    assert card_bits.Product.differing(Fake(), (1, 16, 17, 256, 300)) == [17]


# A device whose swiglu leaves one row of zeros.
SPOILT = """
#include <dlfcn.h>
#include "%(root)s/csrc/device/device.h"
static void (*right)(Device *, real *, const real *, const real *, int, int, int, int);
static void spoilt(Device *dev, real *y, const real *gate, const real *up, int T, int F, int step,
                   int other)
{
    right(dev, y, gate, up, T, F, step, other);
    dev->zero(dev, (char *)y + dev->real_bytes * F, dev->real_bytes * F);
}
__attribute__((visibility("default")))
Status cuda_open(Device **dev, int ordinal, unsigned abi, FailFunction *fail,
                 const DeviceLibraries *libraries)
{
    DeviceOpen *open = (DeviceOpen *)dlsym(dlopen("%(library)s", RTLD_NOW), "cuda_open");
    Status status = open(dev, ordinal, abi, fail, libraries);
    if (!status) right = (*dev)->swiglu, (*dev)->swiglu = spoilt;
    return status;
}
"""


def test_the_smoke_program_sees_an_op_that_is_wrong(tmp_path: Path) -> None:
    engine.device("cuda-emulated")
    facts = {"root": engine.ROOT, "library": engine.emulated_library()}
    (tmp_path / "spoilt.c").write_text(SPOILT % facts)
    library = tmp_path / "spoilt.so"
    command = ["cc", "-shared", "-fPIC", tmp_path / "spoilt.c", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [card_smoke.build(tmp_path), library, "tiny"], capture_output=True, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert [row["op"] for row in rows if "wrong" in row] == ["swiglu, swiglu_backward"]


def test_the_smoke_program_refuses_another_seam(tmp_path: Path) -> None:
    engine.device("cuda-emulated")
    library = engine.emulated_library()
    setup = engine.setup_py()
    before = setup.ABI
    try:
        setup.ABI = "7u"
        program = card_smoke.build(tmp_path)
    finally:
        setup.ABI = before
    done = subprocess.run([program, library, "tiny"], capture_output=True, text=True)
    assert done.returncode == 2 and "cuda-emulated" in done.stdout
