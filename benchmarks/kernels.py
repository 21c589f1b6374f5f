"""Registers, shared memory and spills of every CUDA kernel, as nvcc compiled them, in kernels.csv.

    TINSMITH_NVCC=nvcc pip install -e . && python benchmarks/kernels.py

setup.py keeps what nvcc says of each kernel (-Xptxas -v) beside the library; this program makes the
table of it that tests/test_kernels.py compares. Static shared memory only: what a launch asks for
comes on top. Names are demangled by c++filt, without their arguments."""

import argparse
import csv
import importlib.util
import re
import subprocess
from dataclasses import astuple, dataclass, fields
from pathlib import Path

TABLE = Path(__file__).parent / "kernels.csv"
LOG = "libtinsmith_cuda.log"  # setup.py's CUDA_LOG
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True, order=True)
class Kernel:
    """One kernel on one architecture; bytes, of a thread but for shared memory."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def log_path() -> Path:
    """Where setup.py put the log, beside tinsmith._core."""
    spec = importlib.util.find_spec("tinsmith._core")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("tinsmith._core is not built: pip install -e .")
    return Path(spec.origin).parent / LOG


def demangled(names: list[str]) -> list[str]:
    """C++ names without their arguments: rmsnorm_kernel<8, 4>."""
    out = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [re.sub(r"\(int\)|\(bool\)|^void |\(anonymous namespace\)::", "", line).split("(")[0]
            for line in out.splitlines()]  # fmt: skip


def parse(text: str) -> list[Kernel]:
    """What nvcc's log says of each kernel, in the order of names."""
    found = list(ENTRY.finditer(text))
    names = demangled([match["name"] for match in found]) if found else []
    kernels = []
    for name, match in zip(names, found, strict=True):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        sizes = [int(match[key]) for key in ("stack", "stores", "loads")]
        shared_bytes = int(shared[1]) if shared else 0
        kernels.append(Kernel(name, match["arch"], int(match["registers"]), shared_bytes, *sizes))
    return sorted(kernels)


def read(path: Path = TABLE) -> list[Kernel]:
    """The table that is kept."""
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [Kernel(row[0], row[1], *map(int, row[2:])) for row in rows]


def write(kernels: list[Kernel], path: Path = TABLE) -> None:
    """Replaces the table."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(field.name for field in fields(Kernel))
        out.writerows(astuple(kernel) for kernel in kernels)


def main() -> None:
    """Writes the table of the library that is installed, or of another log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, help="instead of the one beside the library")
    args = parser.parse_args()
    kernels = parse((args.log or log_path()).read_text())
    write(kernels)
    spilled = [one.kernel for one in kernels if one.spill_store_bytes or one.spill_load_bytes]
    print(f"{len(kernels)} kernels in {TABLE.name}, of which {len(spilled)} spill {spilled or ''}")


if __name__ == "__main__":
    main()
