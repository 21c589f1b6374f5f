"""tools/card: what its commands run, in which order and for how long, and what they report of
stages that pass, fail, hang or find something."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
from support import ROOT, TESTS

from tools.card import __main__ as command
from tools.card import build, rehearse, report, runner, stages, variants
from tools.card.report import Found, Stage

pytestmark = pytest.mark.slow

HERE = "import json, sys, time, subprocess\n"
PARTS = pytest.mark.parametrize("part", stages.STAGES)


def shell(name: str, code: str, **more) -> Stage:
    """A stage that is a few lines of Python."""
    python = [sys.executable, "-c", HERE + code]
    return Stage(name, "tells", lambda _: python, **{"takes_s": 1.0, "limit_s": 60.0, **more})


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    arguments = ["first", "--device", "cuda-emulated", "--out", str(tmp_path / "out")]
    made = command.options_of(arguments)
    made.work = tmp_path / "work"
    for name in ("logs", "wrong"):
        (made.work / name).mkdir(parents=True)
    return made


def run(options: Namespace, *chosen: Stage) -> dict[str, dict]:
    """What the report says of the stages, by name."""
    command.run(options, chosen)
    said = json.loads((options.out / "report.json").read_text())
    return {one["name"]: one for one in said["stages"]}


# ---- running ----


def test_the_report_says_of_each_stage_how_it_ended(options: Namespace) -> None:
    said = run(
        options,
        shell("fine", "print(json.dumps({'op': 'a', 'µs': 1.5}))", reads="json"),
        shell("crash", "print('half way'); sys.stdout.flush(); import os; os.abort()"),
        shell("off", "print(json.dumps({'op': 'b', 'wrong': 'off by 1'}))", reads="json"),
        shell("slow", "print(json.dumps({'op': 'c', 'note': 'cuda: no algorithm'}))", reads="json"),
        shell("absent", "print('never')", needs=("a_package_that_is_nowhere",)),
        shell("card", "print('never')", real=True),
    )
    assert said["fine"]["state"] == "right" and said["fine"]["rows"] == [{"op": "a", "µs": 1.5}]
    assert said["crash"]["state"] == "failed" and "half way" in said["crash"]["text"]
    assert "exit code -6" in said["crash"]["summary"]
    assert said["off"]["state"] == "found something" and "off by 1" in said["off"]["summary"]
    assert said["absent"]["summary"] == "a_package_that_is_nowhere is not installed"
    assert said["card"]["summary"] == "it needs a real card"
    text = (options.out / "report.md").read_text()
    slower = text.index("## What is slower than it could be\n\n- cuda: no algorithm")
    assert text.index("## What is wrong") < slower < text.index("## fine")


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(options: Namespace) -> None:
    hangs = ["sh", "-c", "sleep 600 & echo $!; wait"]
    said = run(
        options,
        Stage("hangs", "tells", lambda _: hangs, 1.0, limit_s=5.0),
        shell("later", "print('still reached')"),
    )
    assert said["hangs"]["state"] == "cut off"
    assert said["later"]["summary"] == "still reached"
    status = Path(f"/proc/{int(said['hangs']['text'])}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        pass  # it was killed, and goes: the test's own limit ends this


def test_stages_of_a_group_run_side_by_side(options: Namespace, tmp_path: Path) -> None:
    """Each waits for the other's file."""
    code = "a, b = {!r}; open(a, 'w')\nwhile not __import__('os').path.exists(b): time.sleep(0.01)"
    files = [str(tmp_path / name) for name in "ab"]
    said = run(
        options,
        shell("one", code.format(tuple(files)), group="both"),
        shell("two", code.format(tuple(files[::-1])), group="both"),
    )
    assert {one["state"] for one in said.values()} == {"right"}


def test_without_its_device_nothing_else_is_tried(options: Namespace) -> None:
    said = run(
        options,
        shell("device", f"print('cuda: no GPU was found'); sys.exit({report.NO_DEVICE})"),
        shell("tests", "print('never')"),
    )
    assert list(said) == ["device"] and "cuda: no GPU was found" in said["device"]["summary"]


def test_seven_files_come_back_whatever_there_was(options: Namespace) -> None:
    wrong, choice = options.work / "wrong", options.work / "choice.jsonl"
    (wrong / "op.npz").write_bytes(b"1" * 1000)
    (wrong / "huge.npz").write_bytes(b"1" * (command.FILES_MOST + 1))
    choice.write_text('{"width": 4096}\n')
    row = "print(json.dumps({'op': 'attention_kernel', 'calls': 36, 'µs': 12.5}))"
    run(options, shell("kernels 8b", row, reads="json"))
    assert (options.out / "ncu.txt").read_text() == command.NO_RECORD
    assert {file.name for file in options.out.iterdir()} == {
        *("report.md", "report.json", "choice.jsonl", "profile.txt", "ncu.txt"),
        *("logs.tgz", "wrong.tgz"),
    }
    assert (options.out / "choice.jsonl").read_text() == choice.read_text()
    assert "attention_kernel" in (options.out / "profile.txt").read_text()
    with tarfile.open(options.out / "wrong.tgz") as archive:
        assert archive.getnames() == ["op.npz"]
    with tarfile.open(options.out / "logs.tgz") as archive:
        assert archive.getnames() == ["kernels-8b.log"]
    assert all(file.stat().st_size <= 16 << 20 for file in options.out.iterdir())


def test_a_program_that_is_not_there_is_told(options: Namespace) -> None:
    absent = Stage("absent", "tells", lambda _: ["/nowhere/experiments"], 1.0, 60.0)
    said = run(options, absent, shell("later", "print('still reached')"))
    assert said["absent"]["state"] == "failed"
    assert "/nowhere/experiments is not there" in said["absent"]["summary"]
    assert said["later"]["state"] == "right"


def test_what_the_device_needs_is_set_for_all_that_follows(options: Namespace) -> None:
    row = "print(json.dumps({'fact': 'device', 'set': {'TINSMITH_CUBLASLT': 'none'}}))"
    shown = "import os; print(json.dumps({'value': os.environ['TINSMITH_CUBLASLT']}))"
    said = run(options, shell("device", row, reads="json"), shell("later", shown, reads="json"))
    assert said["later"]["rows"] == [{"value": "none"}]


def test_files_that_tests_are_writing_do_not_end_the_command(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one.npz", "half.part", "gone.npz"):
        (options.work / "wrong" / name).write_bytes(b"1")
    stat = Path.stat

    def going(path: Path, **more) -> object:
        if path.name == "gone.npz":
            raise FileNotFoundError(path)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", going)
    command.pack(options.out / "wrong.tgz", options.work / "wrong")
    with tarfile.open(options.out / "wrong.tgz") as archive:
        assert archive.getnames() == ["one.npz"]


def test_ncu_reads_its_own_record_once(options: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu, asked = options.work / "ncu", options.work / "asked"
    ncu.write_text(f'#!/bin/sh\necho "$*" >>{asked}\necho "of page $4"\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("NCU", str(ncu))
    (options.work / "logs" / "counters.ncu-rep").write_text("a record")
    run(options, shell("one", "pass"), shell("two", "pass"))
    assert (options.out / "ncu.txt").read_text() == "of page details\n"
    assert (options.work / "logs" / "counters.csv").read_text() == "of page source\n"
    assert len(asked.read_text().splitlines()) == 2


def test_a_stage_gets_what_its_row_and_the_command_say(options: Namespace) -> None:
    code = "import os; print(json.dumps({k: v for k, v in os.environ.items() if 'TINSMITH' in k}))"
    more = {"reads": "json", "environment": {"TINSMITH_CUBLASLT": "none"}}
    (row,) = run(options, shell("variables", code, **more))["variables"]["rows"]
    assert row["TINSMITH_CUBLASLT"] == "none"
    assert row["TINSMITH_CUDA_LOG"] == str(options.work / "choice.jsonl")
    assert row["TINSMITH_WRONG"] == str(options.work / "wrong")


# ---- the tables ----


@PARTS
def test_all_stages_are_reached_in_time(part: str) -> None:
    seconds = stages.SECONDS[part] - stages.ENDING_S
    machine, found = rehearse.pretend(stages.STAGES[part], seconds)
    assert rehearse.lost(found) == "-"
    assert machine.now() <= seconds


def test_own_speed_is_known_in_three_minutes() -> None:
    machine, _ = rehearse.pretend(stages.FIRST, stages.SECONDS["first"])
    later = list(machine.began)[list(machine.began).index("experiments") + 1]
    assert machine.began[later] <= 180


@pytest.mark.parametrize("times", (rehearse.SLOWER, rehearse.HANGS))
@pytest.mark.parametrize("stage", stages.FIRST, ids=lambda stage: stage.name)
def test_one_stage_that_is_slow_or_hangs_costs_no_other(stage: Stage, times: float) -> None:
    seconds = stages.SECONDS["first"] - stages.ENDING_S
    _, found = rehearse.pretend(stages.FIRST, seconds, stage.name, times)
    assert {one.name for one in found if one.state != "right"} <= {stage.name}


def test_what_no_time_is_left_for_is_told() -> None:
    _, found = rehearse.pretend(stages.FIRST, 60.0)
    states = {one.name: one.state for one in found}
    assert len(states) == len(stages.FIRST)
    assert states["smoke"] == "right" and states["step 8b"] == "cut off"
    assert states["experiments"] == states["sanitizer memcheck"] == "not begun"


@PARTS
def test_a_rehearsals_table_has_a_row_for_each_stage(part: str) -> None:
    rows = rehearse.rows(stages.STAGES[part], stages.SECONDS[part])
    assert [row["stage"] for row in rows] == [stage.name for stage in stages.STAGES[part]]


@PARTS
def test_names_of_stages_and_of_their_files_differ(part: str) -> None:
    table = stages.STAGES[part]
    assert len({stage.file for stage in table}) == len({s.name for s in table}) == len(table)
    assert all(stage.takes_s < stage.limit_s for stage in table)
    assert table[0].name == "device"


@pytest.mark.parametrize("stage", stages.FIRST + stages.SECOND, ids=lambda stage: stage.name)
def test_a_stage_says_what_its_files_import(stage: Stage, options: Namespace) -> None:
    """Where a file asked for more than its stage, none of them would run."""
    files = [part for part in stage.command(options) if part.startswith("tests/")]
    known = {"torch", "transformers", "peft", "safetensors", "tinker", "starlette", "httpx"}
    for file in files:
        assert imported(ROOT / file) & known <= set(stage.needs), file


def imported(path: Path, seen: set[Path] | None = None) -> set[str]:
    """The packages that a file of the tests imports at its top, and those that it imports."""
    seen = set() if seen is None else seen
    found = set()
    if path in seen or not path.is_file():
        return found
    seen.add(path)
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = TESTS / f"{name.replace('.', '/')}.py"
            found |= {name.partition(".")[0]} | imported(file, seen)
    return found


def test_on_a_card_only_tests_of_the_card_are_chosen(tmp_path: Path) -> None:
    """Those of the emulated one tell nothing there, and take the minutes to build it."""
    names = [f"tests/{file}.py" for file in (*stages.OPS, *stages.SAMPLING)]
    rules = ["-o", "addopts=", "--collect-only", "-q", "-p", "no:cacheprovider"]
    chosen = ["-k", stages.only(command.options_of(["first", "--out", str(tmp_path)]))]
    line = [
        sys.executable,
        "-m",
        "pytest",
        *rules,
        *chosen,
        *names,
        "tests/cuda/test_cuda_device.py",
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == set(names)
    assert all(re.search(r"[\[-]cuda[\]-]", test) for test in tests)


def asked(tmp_path: Path, *arguments: str) -> Namespace:
    return command.options_of([*arguments, "--out", str(tmp_path / "out")])


def test_the_tests_to_repeat_are_those_that_are_named(tmp_path: Path) -> None:
    (again,) = (stage for stage in stages.SECOND if stage.name == "again")
    assert stages.missing(again, asked(tmp_path, "second")) == "--only names no tests"
    options = asked(tmp_path, "second", "--only", "lora or jsd")
    assert not stages.missing(again, options)
    assert stages.only(options) == f"({stages.REAL}) and (lora or jsd)"


def test_stages_are_chosen_by_how_their_names_begin(tmp_path: Path) -> None:
    chosen = command.chosen_of(asked(tmp_path, "first", "--stages", "step", "smoke"))
    assert [stage.name for stage in chosen] == [
        *("device", "smoke", "step 8b", "step 0.6b", "step 1.7b", "step 4b"),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--stages", "step 0.6B"), "no stage begins with 'step 0.6B'; there are device, smoke,"),
        (("--out", ""), "--out is empty: name the folder"),
        (("--out", __file__), "--out: "),
        (("--out", "/proc/nowhere"), "--out: "),
    ],
)
def test_a_wrong_command_line_is_told(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.options_of(["first", "--out", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_was_not_carried_is_passed_over(tmp_path: Path) -> None:
    """And not timed as if it were another library."""
    options = asked(tmp_path, "second", "--carried", str(tmp_path))
    (deep,) = (stage for stage in stages.SECOND if stage.name == "variant own-deep")
    assert stages.missing(deep, options).startswith("own-deep.so was not carried")
    (tmp_path / "own-deep.so").write_text("a library")
    assert not stages.missing(deep, options)
    line = deep.command(options)
    assert line[line.index("--library") + 1] == str(tmp_path / "own-deep.so")


def test_the_kernels_that_ncu_looks_at_are_there() -> None:
    text = "".join(file.read_text() for file in (ROOT / "cuda").rglob("*.cu"))
    defined = set(re.findall(r"\b(\w+_kernel)\(", text))
    assert set(stages.KERNELS) <= defined


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda one: one.name)
def test_what_a_variant_changes_stands_in_its_file_once(
    variant: variants.Variant, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "cuda", tmp_path, dirs_exist_ok=True)
    build.changed(variant, tmp_path)
    if variant.changes:
        before = (ROOT / "cuda" / variant.file).read_text()
        assert (tmp_path / variant.file).read_text() != before


# ---- reading and writing ----

CUT_OFF = """\
tests/device/test_ops.py::test_op[cuda-rmsnorm] PASSED                     [  3%]
[gw1] [ 10%] PASSED tests/device/test_ops.py::test_op[cuda-rope]
[gw0] [ 12%] FAILED tests/device/test_ops.py::test_op[cuda-linear a - b]
tests/device/test_ops.py::test_op[cuda-swiglu]
"""
WHOLE = (
    CUT_OFF
    + """\
=========================== short test summary info ============================
SKIPPED [2] tests/device/test_ops.py:3: there is no GPU
FAILED tests/device/test_ops.py::test_op[cuda-linear a - b] - assert 0.5 < 0.1
"""
)
ENDED = "worker 'gw3' crashed while running 'tests/device/test_ops.py::test_op[cuda-attention]'\n"
NOT_IMPORTED = """\
==================================== ERRORS ====================================
______________________ ERROR collecting tests/binding/test_turns.py ______________________
ImportError while importing test module '/tests/test_turns.py'.
tests/binding/test_turns.py:12: in <module>
    import tinker
E   ModuleNotFoundError: No module named 'tinker'
"""


def read(text: str, code: int = 1, late: bool = False) -> Found:
    return report.found(shell("ops", "", reads="pytest"), text, code, 9.0, late=late)


@pytest.mark.parametrize(("text", "why"), [(CUT_OFF, "it failed"), (WHOLE, "assert 0.5 < 0.1")])
def test_tests_are_counted_also_where_they_were_cut_off(text: str, why: str) -> None:
    found = read(text, late=text is CUT_OFF)
    assert found.state == "found something"
    assert "2 passed, 1 failed" in found.summary
    assert found.rows == [
        {"test": "tests/device/test_ops.py::test_op[cuda-linear a - b]", "wrong": why}
    ]


def test_a_test_that_ended_its_process_is_named() -> None:
    found = read(CUT_OFF + ENDED)
    assert "1 ended their process" in found.summary
    assert found.rows[-1] == {
        "test": "tests/device/test_ops.py::test_op[cuda-attention]",
        "wrong": "it hung, or crashed, and ended its process",
    }


def test_a_file_that_is_not_imported_is_told_beside_the_tests_that_ran() -> None:
    found = read(NOT_IMPORTED + CUT_OFF)
    assert found.state == "found something"
    assert found.summary == "2 passed, 1 failed, 1 files were not tried"
    assert found.rows[0] == {
        "test": "tests/binding/test_turns.py",
        "wrong": "ModuleNotFoundError: No module named 'tinker'",
    }


def test_a_run_without_a_test_is_no_success() -> None:
    found = read("no tests ran in 0.01s\n", 5)
    assert found.state == "failed" and "no tests ran" in found.summary


def test_a_group_is_what_follows_under_one_name() -> None:
    table = [shell(name, "", group=group) for name, group in {"a": "", "b": "x", "c": "x"}.items()]
    assert [[one.name for one in group] for group in runner.groups(table)] == [
        *(["a"], ["b", "c"]),
    ]
