"""Registers, shared memory, spills and instructions of every CUDA kernel, in kernels.csv.

    TINSMITH_NVCC=nvcc pip install -e . && python benchmarks/kernels.py

setup.py keeps what nvcc says of each kernel (-Xptxas -v) beside the library, whose machine code is
read by cuobjdump and nvdisasm. tests/device/test_kernels.py compares the table. Static shared
memory only: what a launch asks for comes on top. Names are demangled by c++filt, without their
arguments.

Instructions are static; the NOPs that fill a kernel's end are left out. "mma" are products in
tensor cores (HMMA). A loop is all that lies between a branch backwards and its target. The one that
counts holds the most mma, and is the shortest of those that do; where no loop holds any, it is the
whole kernel. What a loop holds but mostly jumps over is counted; what it jumps to outside
is not."""

import argparse
import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

TABLE = Path(__file__).parent / "kernels.csv"
LIBRARY = "libtinsmith_cuda.so"  # setup.py's CUDA_LIBRARY
LOG = ".log"  # its CUDA_LOG, beside it
TOOLS = ("cuobjdump", "nvdisasm")  # the first calls the second
TOOLS_OF_PIP = "nvidia/cu13/bin"  # in the folder of packages
CUDA_HOME = "/usr/local/cuda/bin"
ABSENT = (
    "The machine code is read by cuobjdump and nvdisasm, and {absent} was not found. "
    "Install both: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
ARCH = re.compile(r"\s*code for (\w+)")
FUNCTION = re.compile(r"\s*Function : (\S+)")
# /*0070*/  @!P0 BRA 0x360 ;
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\w+)[^;]*?(\w*)\s*;")


@dataclass(frozen=True)
class Code:
    """How many instructions a kernel has; the loop is the one with the most mma."""

    instructions: int = 0
    mma: int = 0
    loop_mma: int = 0
    instructions_per_mma: float = 0.0  # in that loop


@dataclass(frozen=True, order=True)
class Kernel:
    """One kernel on one architecture; bytes, of a thread but for shared memory. Then its Code."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    instructions: int = 0
    mma: int = 0
    loop_mma: int = 0
    instructions_per_mma: float = 0.0


def library_path() -> Path:
    """Where setup.py put the CUDA device, beside tinsmith._core."""
    spec = importlib.util.find_spec("tinsmith._core")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("tinsmith._core is not built: pip install -e .")
    return Path(spec.origin).parent / LIBRARY


def tools_path() -> str:
    """PATH with the folders where NVIDIA's tools may be besides; FileNotFoundError says what to
    install."""
    packages = [str(Path(folder) / TOOLS_OF_PIP) for folder in sys.path]
    path = os.pathsep.join([os.environ.get("PATH", ""), *packages, CUDA_HOME])
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if absent:
        raise FileNotFoundError(ABSENT.format(absent=" or ".join(absent)))
    return path


def demangled(names: list[str]) -> list[str]:
    """C++ names without their arguments: rmsnorm_kernel<8, 4>."""
    out = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [re.sub(r"\(int\)|\(bool\)|^void |\(anonymous namespace\)::", "", line).split("(")[0]
            for line in out.splitlines()]  # fmt: skip


def parse(text: str) -> dict[tuple[str, str], Kernel]:
    """What nvcc's log says of each kernel, by its mangled name and architecture, in the order of
    the kernels. No instructions yet."""
    found = list(ENTRY.finditer(text))
    names = demangled([match["name"] for match in found]) if found else []
    kernels = {}
    for name, match in zip(names, found, strict=True):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        sizes = [int(match[key]) for key in ("stack", "stores", "loads")]
        kernels[match["name"], match["arch"]] = Kernel(
            name, match["arch"], int(match["registers"]), int(shared[1]) if shared else 0, *sizes
        )
    return dict(sorted(kernels.items(), key=lambda item: item[1]))


def count(code: list[tuple[int, str, str]]) -> Code:
    """Of one kernel's instructions, in order: address, operation, last operand."""
    while code[-1][1] == "NOP":
        code = code[:-1]
    at = [address for address, _, _ in code]
    products = [address for address, operation, _ in code if operation == "HMMA"]
    targets = [
        (int(operand, 16), address)
        for address, operation, operand in code
        if operation == "BRA" and operand.startswith("0x")
    ]

    def inside(addresses: list[int], span: tuple[int, int]) -> int:
        return bisect_right(addresses, span[1]) - bisect_left(addresses, span[0])

    loops = [span for span in targets if span[0] < span[1] and inside(products, span)]
    loop = max(
        loops or [(at[0], at[-1])], key=lambda span: (inside(products, span), -inside(at, span))
    )
    mma = inside(products, loop)
    return Code(len(at), len(products), mma, round(inside(at, loop) / mma, 2) if mma else 0.0)


def disassembled(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str], Code]]:
    """cuobjdump -sass, line by line: each kernel's mangled name and architecture, and its Code."""
    arch, name, code = "", "", []
    for line in lines:
        if match := INSTRUCTION.match(line):
            code.append((int(match[1], 16), match[2], match[3]))
        elif match := ARCH.match(line) or FUNCTION.match(line):
            if code:
                yield (name, arch), count(code)
            code = []
            if match.re is ARCH:
                arch = match[1]
            else:
                name = match[1]
    if code:
        yield (name, arch), count(code)


def codes(library: Path, *options: str) -> dict[tuple[str, str], Code]:
    """The instructions of the kernels in a library: of all, or of those that options choose."""
    path = tools_path()
    command = [shutil.which("cuobjdump", path=path), "-sass", *options, library]
    with subprocess.Popen(
        command,
        env=os.environ | {"PATH": path},  # it looks for nvdisasm there
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # warns of each part of the library without them
        text=True,
    ) as tool:
        found = dict(disassembled(tool.stdout))
    if tool.returncode or not found:
        raise RuntimeError(f"{' '.join(map(str, command))} found no kernel ({tool.returncode})")
    return found


def read(path: Path = TABLE) -> list[Kernel]:
    """The table that is kept."""
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [Kernel(row[0], row[1], *map(int, row[2:-1]), float(row[-1])) for row in rows]


def write(kernels: list[Kernel], path: Path = TABLE) -> None:
    """Replaces the table."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(field.name for field in fields(Kernel))
        out.writerows(astuple(kernel) for kernel in kernels)


def main() -> None:
    """Writes the table of the library that is installed, or of another one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="another one, with its log beside it")
    library = parser.parse_args().library or library_path()
    try:
        log = library.with_suffix(LOG).read_text()
        found = codes(library)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    kernels = [replace(kernel, **vars(found[key])) for key, kernel in parse(log).items()]
    write(kernels)
    spilled = [one.kernel for one in kernels if one.spill_store_bytes or one.spill_load_bytes]
    products = sum(one.mma > 0 for one in kernels)
    print(f"{len(kernels)} kernels in {TABLE.name}, of which {products} have products in tensor "
          f"cores and {len(spilled)} spill {spilled or ''}")  # fmt: skip


if __name__ == "__main__":
    main()
