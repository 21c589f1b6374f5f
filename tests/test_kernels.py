"""No CUDA kernel spills, and none needs more registers than in the table that is kept: what nvcc
said of each when this package was built, against benchmarks/kernels.csv."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import kernels
from kernels import Kernel

MORE_REGISTERS = 8  # one step of their allocation: more may cost a block its place
AGAIN = "python benchmarks/kernels.py writes the table anew, where that is meant"

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z12adamw_kernelILi4EEvPfS0_S0_PKfl4Step' for 'sm_80'
ptxas info    : Function properties for _Z12adamw_kernelILi4EEvPfS0_S0_PKfl4Step
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 37 registers, used 0 barriers, 424 bytes cmem[0]
ptxas info    : Compiling entry function '_Z14lse_row_kernelPf' for 'sm_90a'
ptxas info    : Function properties for _Z14lse_row_kernelPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem
"""


def worse(found: list[Kernel], kept: list[Kernel]) -> list[str]:
    """Sentences of what is not as it was, or never may be."""
    before = {(one.kernel, one.arch): one for one in kept}
    said = []
    for one in found:
        name, was = f"{one.kernel} on {one.arch}", before.pop((one.kernel, one.arch), None)
        if one.spill_store_bytes or one.spill_load_bytes:
            said.append(f"{name} spills {one.spill_store_bytes} bytes")
        if was is None:
            said.append(f"{name} is not in the table")
        elif one.registers > was.registers + MORE_REGISTERS:
            said.append(f"{name} has {one.registers} registers, it had {was.registers}")
        elif one.shared_bytes != was.shared_bytes:
            said.append(f"{name} has {one.shared_bytes} bytes of shared memory, not as before")
    return said + [f"{kernel} on {arch} is no more" for kernel, arch in before]


def test_no_kernel_spills_or_grew() -> None:
    log = kernels.log_path()
    if not log.exists() or not kernels.parse(log.read_text()):
        pytest.skip("libtinsmith_cuda.so was not built here: nvcc was not found")
    assert not worse(kernels.parse(log.read_text()), kernels.read()), AGAIN


def test_the_table_that_is_kept_has_no_spills_on_either_architecture() -> None:
    kept = kernels.read()
    assert {one.arch for one in kept} == {"sm_80", "sm_90a"}
    assert not worse(kept, kept)


def test_the_compilers_log_is_read() -> None:
    assert kernels.parse(LOG) == [
        Kernel("adamw_kernel<4>", "sm_80", 37, 0, 0, 0, 0),
        Kernel("lse_row_kernel", "sm_90a", 255, 128, 16, 8, 12),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spill_load_bytes": 4}, "k on sm_90a spills"),
        ({"registers": 49}, "k on sm_90a has 49 registers, it had 40"),
        ({"shared_bytes": 1}, "shared memory"),
        ({"kernel": "new"}, "new on sm_90a is not in the table"),
    ],
)
def test_what_got_worse_is_said(change: dict, sentence: str) -> None:
    was = Kernel("k", "sm_90a", 40, 0, 0, 0, 0)
    assert not worse([was], [was])
    assert sentence in worse([Kernel(**vars(was) | change)], [was])[0]
