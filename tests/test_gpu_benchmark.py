"""benchmarks/gpu.py runs: on the emulated GPU with a tiny shape, every part of it, both sides."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine import emulated_library
from tinsmith import _core

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
TINY = (
    "--shapes tiny --length 16 --datums 2 --batches 1 2 --prompt 4 --new 3 --rounds 1 "
    "--head 40 64 512 --topk 4"
)


def run(device: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--device", device, *TINY.split()]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_part_prints_both_sides() -> None:
    emulated_library()
    done = run("cuda-emulated")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    for what, sides in (("head ", "torch"), ("decode batch   2", "HF"), ("train", "PEFT")):
        shown = [row for row in rows if what in row]
        assert any("tinsmith" in row for row in shown), what
        assert any(sides in row for row in shown), what


def test_without_a_gpu_it_says_why() -> None:
    reason = _core.devices()["cuda"]
    if not reason:
        pytest.skip("this machine has a GPU")
    done = run("cuda")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{reason}\n")
