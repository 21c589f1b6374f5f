"""benchmarks/gpu.py and the table of kernels run, beside torch and alone, on the emulated GPU,
with a tiny shape. No time is tested."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import alone
import pytest
from support import ROOT
from support.op_devices import emulated_library
from tinsmith import _core
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from tools.card import kernels

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "benchmarks" / "gpu.py"
TINY = (
    "--shapes tiny --length 16 --datums 2 --batches 1 2 --prompt 4 --new 3 --rounds 1 "
    "--head 40 64 512 --topk 4"
)
# A bare machine's Python: a program that imports one of these fails.
BARE = """
import runpy, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "torch", "transformers", "peft", "safetensors", "tokenizers", "huggingface_hub",
            "tinker", "starlette", "uvicorn", "httpx", "pytest", "zstandard", "matplotlib",
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(device: str, *options: str, bare: bool = False) -> subprocess.CompletedProcess:
    python = ["-c", BARE] if bare else ["-W", "ignore"]
    command = [sys.executable, *python, str(PROGRAM), "--device", device, *options, *TINY.split()]
    return subprocess.run(command, capture_output=True, text=True)


def run_ops(*options: str) -> dict[str, dict[str, Any]]:
    """The rows of cuda_ops.py, which needs NumPy only."""
    emulated_library()
    program = str(PROGRAM.with_name("cuda_ops.py"))
    command = [sys.executable, "-c", BARE, program, "--device", "cuda-emulated", "--tiny", *options]
    return rows_of(subprocess.run(command, capture_output=True, text=True))


def rows_of(done: subprocess.CompletedProcess) -> dict[str, dict[str, Any]]:
    """The lines of JSON, by what they are of."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["op"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_every_part_prints_both_sides() -> None:
    emulated_library()
    done = run("cuda-emulated")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    for what, sides in (("head ", "torch"), ("decode batch   2", "HF"), ("train", "PEFT")):
        shown = [row for row in rows if what in row]
        assert any("tinsmith" in row for row in shown), what
        assert any(sides in row for row in shown), what


def test_alone_it_needs_numpy_only_and_prints_every_figure() -> None:
    emulated_library()
    rows = rows_of(run("cuda-emulated", "--alone", bare=True))
    assert not any("wrong" in row for row in rows.values())
    names = list(rows)
    assert names.index("tiny training, 2 × 16") < names.index("tiny prefill, 2 × 4")
    train, plan = rows["tiny training, 2 × 16"], rows["tiny a step's plan"]
    assert train["tokens/s"] > 0 and 0 < train["MFU, %"] < 100 and train["GiB"] > 0
    assert 5.5 < train["loss a token"] < 7  # ln 512 is 6.2
    assert (plan["micro-batches"], plan["rows"], plan["kept"]) == (1, 32, 2)
    assert rows["tiny optimizer step"]["µs"] > 0
    for batch in (1, 2):
        plain, adapted = (
            rows[f"tiny decoding, batch {batch}, {name}"] for name in ("no adapter", "rank 32")
        )
        assert plain["tokens/s"] > 0 and plain["steps"] == plain["replayed"] == 3
        assert plain["context"] == adapted["context"]
        assert adapted["limit, tokens/s"] < plain["limit, tokens/s"]  # the adapter is read too


def test_alone_given_ceilings_are_not_measured() -> None:
    emulated_library()
    given = ("--parts", "decode", "--bandwidth", "1e-6", "--tflops", "1")
    done = run("cuda-emulated", "--alone", *given)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and not any("GB/s" in row for row in rows)
    assert not any("training" in row["op"] for row in rows)
    wrong = [row["wrong"] for row in rows if "decoding" in row["op"]]
    assert len(wrong) == 4 and all("% of 0 GB/s: more than all of it" in one for one in wrong)


@pytest.mark.parametrize("failing", ("random_core", "training"))
def test_alone_what_fails_is_a_row_and_the_rest_goes_on(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for it")

    made = SimpleNamespace(weight_bytes=1, notes=["slow"])
    monkeypatch.setattr(alone, "random_core", lambda *_: made)
    monkeypatch.setattr(alone, failing, fail)
    monkeypatch.setattr(alone, "decode", lambda *_: iter([alone.row("decoding")]))
    args = SimpleNamespace(
        **{"device": "cuda", "tflops": 1.0, "bandwidth": 1.0, "shapes": ["tiny"]},
        **{"parts": ["train", "decode"], "datums": 1, "length": 4},
    )
    assert alone.run(args) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["wrong"] for row in rows if "wrong" in row] == ["MemoryError: no memory for it"]
    assert any(row["op"] == "decoding" for row in rows) == (failing == "training")


def test_without_a_gpu_it_says_why() -> None:
    reason = _core.devices()["cuda"]
    if not reason:
        pytest.skip("this machine has a GPU")
    for options in ((), ("--alone",)):
        done = run("cuda", *options)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{reason}\n")


def test_ops_are_those_that_are_asked_for() -> None:
    rows = list(run_ops("--ops", "lora", "rmsnorm"))
    assert rows[1:] == [
        *("tiny rmsnorm", "tiny rmsnorm, backward"),
        *("tiny LoRA q k v, rank 32", "tiny LoRA q k v, backward"),
        *(f"tiny batch {batch}: LoRA q k v, rank 32" for batch in (1, 2)),
    ]


def test_the_table_of_kernels_counts_a_step_and_decoded_tokens() -> None:
    emulated_library()
    command = [sys.executable, "-m", "tools.card.kernels", "--device", "cuda-emulated", "--tiny"]
    rows = rows_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True))
    assert not any("wrong" in row for row in rows.values())
    for what in ("tiny training step", "tiny decoding 3, batch 1", "tiny decoding 3, batch 2"):
        parts = [rows[f"{what}: {kind}"]["calls"] for kind in ("kernels", "products", "copies")]
        assert rows[f"{what}: all"]["calls"] == sum(parts) and parts[0] > 0
    assert rows["tiny decoding 3, batch 2: all"]["replayed"] == 3


def test_launches_of_a_kernel_are_one_row() -> None:
    """Of what torch.profiler tells, the GPU's events alone."""
    names = ("void attention_kernel<Wide>(Attention)", "Memcpy DtoH (Device -> Pageable)")
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        FunctionEvent(id=0, name=name, thread=0, start_us=1.0, end_us=end, device_type=kind)
        for name, end, kind in (
            *((names[0], 3.0, gpu), (names[1], 2.0, gpu), (names[0], 3.5, gpu)),
            ("cudaLaunchKernel", 9.0, cpu),
        )
    ]
    profiler = object.__new__(kernels.Profiler)
    profiler.torch = __import__("torch")
    found = kernels.gathered(profiler.launches(events))
    assert found == [
        kernels.Kernel("attention_kernel<Wide>", 2, 4.5),
        kernels.Kernel("Memcpy DtoH ", 1, 1.0),
    ]
    assert kernels.plain("void (anonymous namespace)::f<(int)4>(float*)") == "f<"
