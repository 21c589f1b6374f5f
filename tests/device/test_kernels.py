"""No CUDA kernel spills, and none needs more registers or instructions than in the table that is
kept: what nvcc said of each when this package was built, and the machine code that it made, against
benchmarks/kernels.csv. Of the machine code only COUNTED is read, which takes a third of a second a
kernel."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import kernels
import pytest
from kernels import Code, Kernel

MORE_REGISTERS = 8  # one step of their allocation: more may cost a block its place
MORE_INSTRUCTIONS = 1.05  # of one build of nvcc to the next, say
COUNTED = re.compile(
    r"(attention|(keys|queries)_backward)_kernel<Shape<\d+, true|product_kernel<"
    r"|packed_kernel<Tiling<256.*>, 4, .*real>|few_kernel<.*>, 1, real>|gemm_kernel<.*, true>$"
)
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

SASS = """
	code for sm_75
	code for sm_80
		Function : _Z1aPf
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   HFMA2.MMA R2, -RZ, RZ, 0, 0 ;       /* 0x0000000000027919 */
                                                                       /* 0x000e220000002100 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x000000000000794d */
        /*0020*/              @!P0 BRA 0x10 ;                          /* 0x000000000000794d */
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8.reuse, R12, R4 ; /* 0x0 */
        /*0040*/                   NOP ;                               /* 0x000000000000794d */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x000000000000794d */
        /*0060*/             @!UP1 BRA 0x30 ;                          /* 0x000000000000794d */
        /*0070*/               @P0 BRA 0x20 ;                          /* 0x000000000000794d */
        /*0080*/                   FADD R2, R2, 1 ;                    /* 0x000000000000794d */
        /*0090*/               @P1 BRA 0x80 ;                          /* 0x000000000000794d */
        /*00a0*/                   EXIT ;                              /* 0x000000000000794d */
        /*00b0*/                   BRA 0xb0;                           /* 0x000000000000794d */
        /*00c0*/                   NOP;                                /* 0x0000000000007918 */
		..........


	code for sm_90a
		Function : _Z1aPf
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x000000000000794d */
        /*0010*/               @P0 BRA.U.ANY 0x30 ;                    /* 0x000000000000794d */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x000000000000794d */
        /*0030*/                   EXIT ;                              /* 0x000000000000794d */
		Function : _Z1bPf
        /*0000*/                   EXIT ;                              /* 0x000000000000794d */
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
        elif one.instructions:  # they were counted
            said += slower(one, was)
    return said + [f"{kernel} on {arch} is no more" for kernel, arch in before]


def slower(one: Kernel, was: Kernel) -> list[str]:
    """Sentences of what is more in a kernel's machine code than it was."""
    name, said = f"{one.kernel} on {one.arch}", []
    if one.instructions > was.instructions * MORE_INSTRUCTIONS:
        said.append(f"{name} has {one.instructions} instructions, it had {was.instructions}")
    if (one.mma, one.loop_mma) != (was.mma, was.loop_mma):
        said.append(
            f"{name} has {one.mma} mma, {one.loop_mma} of them in its loop: it had {was.mma}, "
            f"{was.loop_mma}"
        )
    elif one.instructions_per_mma > was.instructions_per_mma * MORE_INSTRUCTIONS:
        ratios = f"{one.instructions_per_mma} instructions for each mma, it had"
        said.append(f"{name} has {ratios} {was.instructions_per_mma}")
    return said


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], Kernel]:
    """The kernels of the library that is here, by mangled name and architecture."""
    log = kernels.library_path().with_suffix(kernels.LOG)
    found = kernels.parse(log.read_text()) if log.exists() else {}
    if not found:
        pytest.skip("libtinsmith_cuda.so was not built here: TINSMITH_NVCC=nvcc asks for it")
    return found


def test_no_kernel_spills_or_grew(built: dict[tuple[str, str], Kernel]) -> None:
    assert not worse(list(built.values()), kernels.read()), AGAIN


def test_no_kernel_has_more_instructions(built: dict[tuple[str, str], Kernel]) -> None:
    kept = [one for one in kernels.read() if one.arch == "sm_90a" and COUNTED.match(one.kernel)]
    assert len(kept) == 26 and all(one.loop_mma for one in kept)
    chosen = {one.kernel for one in kept}
    wanted = {
        (name, arch): one
        for (name, arch), one in built.items()
        if arch == "sm_90a" and one.kernel in chosen
    }
    names = ",".join(name for name, _ in wanted)
    try:
        found = kernels.codes(kernels.library_path(), "-arch", "sm_90a", "-fun", names)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    counted = [replace(one, **vars(found[key])) for key, one in wanted.items()]
    assert not worse(counted, kept), AGAIN


def test_the_table_that_is_kept_has_no_spills_on_either_architecture() -> None:
    kept = kernels.read()
    assert {one.arch for one in kept} == {"sm_80", "sm_90a"}
    assert not worse(kept, kept)


def test_the_compilers_log_is_read() -> None:
    assert kernels.parse(LOG) == {
        ("_Z12adamw_kernelILi4EEvPfS0_S0_PKfl4Step", "sm_80"): Kernel(
            "adamw_kernel<4>", "sm_80", 37, 0, 0, 0, 0
        ),
        ("_Z14lse_row_kernelPf", "sm_90a"): Kernel("lse_row_kernel", "sm_90a", 255, 128, 16, 8, 12),
    }


def test_instructions_are_counted() -> None:
    """Of three loops with mma, two hold two of them: the shorter counts, with its NOP. Without a
    loop the kernel counts."""
    assert dict(kernels.disassembled(SASS.splitlines())) == {
        ("_Z1aPf", "sm_80"): Code(12, 3, 2, 2.0),
        ("_Z1aPf", "sm_90a"): Code(4, 2, 2, 2.0),
        ("_Z1bPf", "sm_90a"): Code(1, 0, 0, 0.0),
    }


def test_where_the_tools_are_absent_the_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(kernels, "CUDA_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"cuobjdump or nvdisasm was not .*: pip install"):
        kernels.codes(tmp_path)
    folder = tmp_path / kernels.TOOLS_OF_PIP
    folder.mkdir(parents=True)
    for tool in kernels.TOOLS:
        (folder / tool).write_text("#!/bin/sh\nexit 3\n")
        (folder / tool).chmod(0o755)
    with pytest.raises(RuntimeError, match=r"cuobjdump -sass .* found no kernel \(3\)"):
        kernels.codes(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spill_load_bytes": 4}, "k on sm_90a spills"),
        ({"registers": 49}, "k on sm_90a has 49 registers, it had 40"),
        ({"shared_bytes": 1}, "shared memory"),
        ({"kernel": "new"}, "new on sm_90a is not in the table"),
        ({"instructions": 106}, "k on sm_90a has 106 instructions, it had 100"),
        ({"mma": 5}, "k on sm_90a has 5 mma, 4 of them in its loop: it had 8, 4"),
        ({"instructions_per_mma": 10.6}, "has 10.6 instructions for each mma, it had 10.0"),
    ],
)
def test_what_got_worse_is_said(change: dict, sentence: str) -> None:
    was = Kernel("k", "sm_90a", 40, 0, 0, 0, 0, 100, 8, 4, 10.0)
    assert not worse([was], [was])
    assert sentence in worse([Kernel(**vars(was) | change)], [was])[0]
