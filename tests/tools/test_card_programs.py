"""tools/card's own programs on the emulated GPU, each with an error that it must find: the C
program, the bits of products, and the times of ops."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import ROOT, op_devices

from tools.card import choice, facts, smoke

pytestmark = pytest.mark.slow

PROGRAMS = (["-m", "tools.card.smoke"], ["-m", "tools.card.choice"], ["benchmarks/cuda_ops.py"])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one[-1])
def test_its_programs_find_nothing_on_the_emulated_gpu(program: list[str]) -> None:
    op_devices.device("cuda-emulated")
    command = [sys.executable, *program, "--device", "cuda-emulated", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 4 and not any("wrong" in row for row in rows)


def test_bits_that_change_with_the_number_of_rows_are_found() -> None:
    """One bit of the last of 17 rows."""
    device = op_devices.Device("cuda-emulated")
    block = device.put(np.random.default_rng(0).standard_normal(9999, np.float32), "real")
    product = choice.Product(device, block, "linear", 48, 64)
    right = product.make

    def spoilt(to: op_devices.Memory, first: int, rows: int, by: op_devices.Device) -> None:
        right(to, first, rows, by)
        if rows == 17:
            made = to.read(rows * product.y_row)
            made[-1] ^= 1
            to.write(made)

    product.make = spoilt
    assert product.differing((1, 16, 17, 256, 300)) == [17]


def test_our_kernels_bits_are_compared_with_cublaslts() -> None:
    device = op_devices.Device("cuda-emulated")
    block = device.put(np.random.default_rng(0).standard_normal(9999, np.float32), "real")
    product = choice.Product(device, block, "linear", 48, 64)
    product.make(product.base, 0, choice.BASE, device)
    assert product.own_has_them(device)
    product.base.write(product.base.read(1) ^ 1)
    assert not product.own_has_them(device)


# A device with five slips: a wrong row of swiglu, a NaN in rotate's q, an element of rmsnorm's y
# that is not written, a bit of linear's y that is another one where there are 17 rows, and a route
# that ends the process, or if LOST the device.
SPOILT = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include "%(root)s/csrc/device/device.h"
static Device own;
static FailFunction *told;
static int lost;
static Status sync(Device *dev)
{
    return lost ? told(STATUS_DEVICE, "the \\"GPU\\" is lost") : own.sync(dev);
}
static void put(Device *dev, real *y, int at, uint16_t value)
{
    dev->upload(dev, (char *)y + 2 * at, &value, 2);
}
static void swiglu(Device *dev, real *y, const real *gate, const real *up, int T, int F, int step,
                   int other)
{
    own.swiglu(dev, y, gate, up, T, F, step, other);
    for (int i = 0; i < F; i++) put(dev, y, 83 * F + i, 0x4480); /* 1024 */
}
static void rotate(Device *dev, real *q, real *k, float *q_rstd, float *k_rstd, const real *q_raw,
                   const real *k_raw, const float *q_norm, const float *k_norm, const float *cosine,
                   const float *sine, int T, int H, int G, int E, int W, int q_step, int kv_step,
                   float eps)
{
    own.rotate(dev, q, k, q_rstd, k_rstd, q_raw, k_raw, q_norm, k_norm, cosine, sine, T, H, G, E, W,
               q_step, kv_step, eps);
    put(dev, q, 33 * H * E + 41, 0x7FC0);
}
static void rmsnorm(Device *dev, real *y, float *rstd, const real *x, const float *w, int T, int D,
                    float eps)
{
    own.rmsnorm(dev, y, rstd, x, w, T, D, eps);
    put(dev, y, 140 * D + 9, 0xFFFF);
}
static void linear(Device *dev, real *y, const real *x, const frozen *w, const float *bias,
                   const real *plus, int T, int N, int D, int step)
{
    uint16_t last;
    own.linear(dev, y, x, w, bias, plus, T, N, D, step);
    if (T != 17) return;
    dev->download(dev, &last, (char *)y + 2 * (16 * N + 5), 2);
    put(dev, y, 16 * N + 5, last ^ 1);
}
static void route(Device *dev, int32_t *chosen, float *share, const real *logits, int T, int X,
                  int K, int norm)
{
    if (!LOST) abort();
    lost = 1;
}
__attribute__((visibility("default")))
Status cuda_open(Device **dev, int ordinal, unsigned abi, FailFunction *fail,
                 const DeviceLibraries *libraries)
{
    DeviceOpen *open = (DeviceOpen *)dlsym(dlopen("%(library)s", RTLD_NOW), "cuda_open");
    Status status = open(dev, ordinal, abi, fail, libraries);
    if (status) return status;
    own = **dev, told = fail, (*dev)->sync = sync;
    (*dev)->swiglu = swiglu, (*dev)->rotate = rotate, (*dev)->rmsnorm = rmsnorm;
    (*dev)->linear = linear, (*dev)->route = route;
    return status;
}
"""


T, F, D = 150, 96, 64  # sizes of the program's `tiny`
EXPERTS = 13  # the number of the check that calls route


def ran_smoke(
    *arguments: str | Path, **environment: str
) -> tuple[int, dict[tuple[str, str], dict]]:
    """tools.card.smoke's exit code, and its lines by op and result."""
    command = [sys.executable, "-m", "tools.card.smoke", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in lines]
    assert rows or done.returncode == 0, done.stdout + done.stderr
    return done.returncode, {(row["op"], row.get("result", "")): row for row in rows}


@pytest.fixture(scope="module")
def smoke_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    op_devices.device("cuda-emulated")
    program = tmp_path_factory.mktemp("program") / "gpu_smoke"
    assert ran_smoke("--build", program)[0] == 0
    return program


def spoil(folder: Path, *, lost: int) -> Path:
    """The library of the device with slips."""
    facts = {"root": ROOT, "library": op_devices.emulated_library()}
    (folder / "spoilt.c").write_text(SPOILT % facts)
    command = ["cc", f"-DLOST={lost}", "-shared", "-fPIC", folder / "spoilt.c", "-ldl"]
    subprocess.run([*command, "-o", folder / "spoilt.so"], check=True)
    return folder / "spoilt.so"


@pytest.fixture(scope="module")
def spoilt(
    smoke_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[tuple[str, str], dict], Path]:
    """What the program says of the device with slips, and where it left the arrays."""
    folder = tmp_path_factory.mktemp("spoilt")
    library, out = spoil(folder, lost=0), folder / "out"
    out.mkdir()
    done = subprocess.run(
        [smoke_program, library, "tiny", "", "--wrong", out, "--seed", "5"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 10 + EXPERTS
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["op"], row.get("result", "")): row for row in rows}, out


def left(out: Path, op: str, result: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The rows that were left of a wrong result: their numbers, what came, and what is exact."""
    [facts] = out.glob(f"*-{op}-{result}.json")
    name = str(facts).removesuffix(".json")
    return (
        json.loads(facts.read_text())["rows"],
        np.load(f"{name}.got.npy"),
        np.load(f"{name}.exact.npy"),
    )


def test_the_smoke_program_sees_the_ops_that_are_wrong_and_no_others(spoilt) -> None:
    rows, out = spoilt
    wrong = {key for key, row in rows.items() if "wrong" in row}
    assert wrong == {
        ("swiglu", "y"),
        ("rope_table, rotate", "q"),
        ("rmsnorm", "y"),
        ("linear", "y of 17 rows"),
        ("experts", ""),
    }
    assert rows["experts", ""]["wrong"] == f"a signal ended it ({signal.SIGABRT:d})"
    assert len(list(out.glob("*.npy"))) == 2 * 4
    assert all(rows[key]["seed"] == 5 for key in wrong if key[1])


def test_the_smoke_program_tells_which_row_is_wrong(spoilt) -> None:
    rows, out = spoilt
    row = rows["swiglu", "y"]
    assert row["shape"] == [T, F] and row["sizes"] == {"T": T, "F": F}
    assert [index for index, _, _ in row["first"]] == list(range(83 * F, 83 * F + 8))
    assert (row["wrong_elements"], row["wrong_rows"], row["wrong_columns"]) == (F, 1, F)
    assert row["rows_16"] == {"3": 1} and row["rows_64"] == {"19": 1}
    assert row["columns_8"] == {"all": F // 8}
    assert row["columns_64"] == {str(i): 1 + (i < F % 64) for i in range(64)}
    assert (row["nan"], row["unwritten"]) == (0, 0) and row["error"] > row["bar"]
    numbers, got, exact = left(out, "swiglu", "y")
    assert got.shape == exact.shape == (len(numbers), F) and len(numbers) == row["compared_rows"]
    planted = numbers.index(83)
    assert (got[planted] == 1024).all() and np.abs(exact[planted]).max() < 100
    assert [value for _, _, value in row["first"]] == pytest.approx(exact[planted, :8], rel=1e-6)
    others = np.delete(got, planted, 0), np.delete(exact, planted, 0)
    np.testing.assert_allclose(*others, rtol=2**-8)


def test_the_smoke_program_tells_a_nan_in_a_row_that_is_not_among_those_compared(spoilt) -> None:
    rows, out = spoilt
    row = rows["rope_table, rotate", "q"]
    [[index, got, exact]] = row["first"]
    assert (index, got) == (33 * D + 41, "nan") and row["error"] == "nan"
    assert (row["nan"], row["unwritten"], row["wrong_elements"]) == (1, 0, 1)
    assert row["rows_16"] == {"1": 1} and row["rows_64"] == {"33": 1}
    assert row["columns_8"] == {"1": 1} and row["columns_64"] == {"41": 1}
    numbers, arrays, exacts = left(out, "rope_table--rotate", "q")
    assert np.isnan(arrays[numbers.index(33), 41]) and np.isnan(arrays).sum() == 1
    assert exacts[numbers.index(33), 41] == pytest.approx(exact, rel=1e-6)


def test_the_smoke_program_tells_what_was_not_written(spoilt) -> None:
    row = spoilt[0]["rmsnorm", "y"]
    [[index, got, _]] = row["first"]
    assert (index, got) == (140 * D + 9, "unwritten")
    assert (row["nan"], row["unwritten"], row["wrong_elements"]) == (0, 1, 1)
    assert row["rows_16"] == {"12": 1} and row["columns_64"] == {"9": 1}


def test_the_smoke_program_finds_bits_that_change_with_the_number_of_rows(spoilt) -> None:
    rows, out = spoilt
    row = rows["linear", "y of 17 rows"]
    [[index, got, exact]] = row["first"]
    assert index == 16 * F + 5 and got != exact and got == pytest.approx(exact, rel=2**-7)
    assert row["wrong_elements"] == 1 and row["rows_16"] == {"0": 1}
    numbers, arrays, exacts = left(out, "linear", "y-of-17-rows")
    assert numbers == list(range(17)) and np.argwhere(arrays != exacts).tolist() == [[16, 5]]


def test_the_smoke_program_tells_that_its_device_failed(smoke_program, tmp_path: Path) -> None:
    command = [smoke_program, spoil(tmp_path, lost=1), "tiny", "--only", "experts"]
    done = subprocess.run(command, capture_output=True, text=True)
    [row] = map(json.loads, done.stdout.splitlines())
    assert row["wrong"] == "the  GPU  is lost" and row["op"].startswith("dev->route(dev")
    assert done.returncode == 10 + EXPERTS


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


PROGRAM = """echo '{"op": "one", "result": "y"}'"""
LOG = 'while [ "$1" != --log-file ]; do shift; done; log=$2; shift 4'  # the program and its words
SANITIZERS = {
    "nothing": (f'{LOG}; echo "ERROR SUMMARY: 0 errors" >$log; exec "$@"', None),
    "something": (
        f'{LOG}; echo "========= ERROR SUMMARY: 3 errors" >$log; "$@"; exit 97',
        "memcheck found something: ERROR SUMMARY: 3 errors",
    ),
    "hangs": (f"{LOG}; echo half way >$log; sleep 600", "memcheck had not ended after 5 s"),
    "crash": ("exit 3", "memcheck: the program ended with 3"),
}


@pytest.mark.parametrize("kind", SANITIZERS)
def test_smoke_under_a_sanitizer_tells_how_it_ended(kind: str, tmp_path: Path) -> None:
    op_devices.device("cuda-emulated")
    text, wrong = SANITIZERS[kind]
    code, rows = ran_smoke(
        *("--device", "cuda-emulated", "--tiny", "--tool", "memcheck", "--out", tmp_path / "out"),
        *("--program", script(tmp_path / "program", PROGRAM)),
        *(("--limit", "5") if kind == "hangs" else ()),
        COMPUTE_SANITIZER=str(script(tmp_path / "sanitizer", text)),
    )
    row = rows["memcheck", ""]
    assert row.get("wrong") == wrong and code == int(wrong is not None)
    assert (("one", "y") in rows) == (kind in ("nothing", "something"))
    log = tmp_path / "out/memcheck.txt"  # .log is what the stage prints
    assert row["log"] == str(log) and log.exists() == (kind != "crash")


def test_smoke_goes_on_behind_a_check_that_ended_its_program(tmp_path: Path) -> None:
    op_devices.device("cuda-emulated")
    first, then = """*"--from 0") echo '{"op": "a"}'; exit 13""", """*) echo '{"op": "b"}'"""
    text = f'case "$*" in {first};; {then};; esac'
    program = script(tmp_path / "program", text)
    code, rows = ran_smoke("--device", "cuda-emulated", "--program", program)
    assert code == 1 and set(rows) == {("a", ""), ("b", "")}


def test_smoke_says_that_its_program_was_killed_or_hung(tmp_path: Path) -> None:
    op_devices.device("cuda-emulated")
    for text, wrong in (
        ("kill -KILL $$", "the program ended with -9"),
        ("sleep 600", "the program had not ended after 5 s"),
    ):
        program = script(tmp_path / "program", f"{PROGRAM}; {text}")
        code, rows = ran_smoke("--device", "cuda-emulated", "--program", program, "--limit", "5")
        assert code == 1 and rows["smoke", ""]["wrong"] == wrong
        assert ("one", "y") in rows


def test_a_smoke_that_is_ended_ends_its_program(tmp_path: Path) -> None:
    """Else a kernel that hangs would sit on the card through all that comes after."""
    op_devices.device("cuda-emulated")
    program = script(tmp_path / "program", "echo $$; exec sleep 600")
    command = [sys.executable, "-u", "-m", "tools.card.smoke", "--device", "cuda-emulated"]
    with subprocess.Popen(
        [*command, "--program", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as running:
        status = Path(f"/proc/{int(running.stdout.readline())}/stat")
        running.terminate()
    while status.exists() and status.read_text().split()[2] != "Z":
        pass  # it was killed, and goes: the test's own limit ends this


def test_the_smoke_program_tells_which_check_hangs(smoke_program: Path, tmp_path: Path) -> None:
    """One that takes a second of a device on which every swiglu takes two."""
    facts = {"root": ROOT, "library": op_devices.emulated_library()}
    (tmp_path / "slow.c").write_text(SLOW % facts)
    library = tmp_path / "slow.so"
    flags = ["-shared", "-fPIC", "-Wl,-Bsymbolic"]
    subprocess.run(["cc", *flags, tmp_path / "slow.c", "-o", library, "-ldl"], check=True)
    command = [smoke_program, library, "tiny", "--only", "swiglu", "--patience", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == f"it hung ({signal.SIGALRM:d})"
    assert done.returncode == 10 + 7  # the number of that check: those behind it are tried


# A device whose swiglu takes long.
SLOW = """
#include <dlfcn.h>
#include <unistd.h>
#include "%(root)s/csrc/device/device.h"
static void slow(Device *dev, real *y, const real *gate, const real *up, int T, int F, int step,
                 int other)
{
    for (int i = 0; i < 3000; i++) usleep(1000);
}
__attribute__((visibility("default")))
Status cuda_open(Device **dev, int ordinal, unsigned abi, FailFunction *fail,
                 const DeviceLibraries *libraries)
{
    DeviceOpen *open = (DeviceOpen *)dlsym(dlopen("%(library)s", RTLD_NOW), "cuda_open");
    Status status = open(dev, ordinal, abi, fail, libraries);
    if (!status) (*dev)->swiglu = slow;
    return status;
}
"""


# ---- what the machine is ----


def facts_of(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict]]:
    code = facts.main()
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["facts", "--device", "cuda-emulated"])


def test_a_first_product_that_fails_is_told_and_the_others_go_on(
    asked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: op_devices.Device, op: str, **args: object) -> None:
        raise RuntimeError("cublasLtMatmul failed with status 14")

    monkeypatch.setattr(op_devices.Device, "call", fails)
    code, rows = facts_of(capsys)
    assert code == 0
    assert rows[-1] == {
        "fact": "device",
        "value": "fails",
        "wrong": "cublasLtMatmul failed with status 14",
    }


def test_a_device_that_opens_without_cublaslt_alone_goes_on_without(
    asked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "cuda-emulated: cublasLtCreate failed with status 1"
    monkeypatch.setattr(facts._core, "devices", lambda name: {name: said})
    done = subprocess.CompletedProcess([], 0, "{'cuda-emulated': ''}\n")
    monkeypatch.setattr(facts.subprocess, "run", lambda *_, **__: done)
    code, rows = facts_of(capsys)
    (row,) = (row for row in rows if "set" in row)
    assert code == 0 and row["set"] == {"TINSMITH_CUBLASLT": "none"} and row["wrong"] == said
    done.stdout = "{'cuda-emulated': 'cuda-emulated: no GPU'}\n"
    assert facts.main() == facts.report.NO_DEVICE
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_library_of_other_files_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(op_devices, "core_library", lambda: tmp_path / "_core.so")
    assert not facts.stale()  # there is none: the device says so
    (tmp_path / "libtinsmith_cuda.so").write_text("of other files")
    assert facts.stale() == "libtinsmith_cuda.so was built from other files than these"


def test_the_smoke_program_refuses_another_seam(tmp_path: Path) -> None:
    op_devices.device("cuda-emulated")
    library = op_devices.emulated_library()
    setup = op_devices.setup_py()
    before = setup.ABI
    try:
        setup.ABI = "7u"
        program = smoke.build(tmp_path)
    finally:
        setup.ABI = before
    done = subprocess.run([program, library, "tiny"], capture_output=True, text=True)
    assert done.returncode == 2 and "cuda-emulated" in done.stdout
