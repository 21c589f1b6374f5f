"""Builds here, without a card, what the card's machine is given: it compiles nothing.

    python -m tools.card.build

Into build/card go the C program, the experiments and a library of each variant; core and the CUDA
library are those of the package, built as `pip install -e .` builds them. Prints what is to be
carried, and how large it is: 64 MiB at most, with the checkout."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support import op_devices

from . import ROOT, facts, smoke
from .variants import VARIANTS, Variant

CARRIED = ROOT / "build" / "card"
MOST = 64 << 20
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"


def changed(variant: Variant, folder: Path) -> None:
    """Makes a variant's changes in a copy of cuda/; ValueError where one does not fit."""
    for before, after in variant.changes.items():
        file = folder / variant.file
        text = file.read_text()
        if (count := text.count(before)) != 1:
            raise ValueError(f"{variant.name}: {before!r} stands {count} times in {file}")
        file.write_text(text.replace(before, after))


def hopper_flags(flags: list[str]) -> list[str]:
    """nvcc's flags for a Hopper alone."""
    return [HOPPER, *(flag for flag in flags if not flag.startswith("-gencode"))]


def library_of(variant: Variant, nvcc: str, out: Path) -> None:
    """A variant's library: the whole device, as cuda/ would be with the variant's changes."""
    setup = op_devices.setup_py()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "cuda", folder / "cuda")
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        changed(variant, folder / "cuda")
        compile_with = [nvcc, *hopper_flags(setup.NVCC_FLAGS)]
        link_with = [*setup.NVCC_LINK, *setup.nvcc_libraries(nvcc), "-Xlinker=--strip-all"]
        setup.ROOT = folder
        try:
            smaller = setup.nvcc_smaller(nvcc)
            reason = setup.cuda_build(out, folder / "objects", compile_with, link_with, *smaller)
        finally:
            setup.ROOT = ROOT
    if reason:
        raise RuntimeError(f"{variant.name}: {reason}")


def experiments(nvcc: str, out: Path) -> None:
    source = ROOT / "tools" / "card" / "experiments.cu"
    flags = [
        "-std=c++17",
        "-O2",
        "--fmad=false",
        HOPPER,
        *op_devices.setup_py().nvcc_libraries(nvcc),
    ]
    subprocess.run([nvcc, *flags, "-o", str(out), str(source)], check=True)


def sizes() -> list[tuple[str, int]]:
    """What travels, in bytes: the checkout's files and what is carried beside them."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    checkout = sum((ROOT / name).stat().st_size for name in names if (ROOT / name).is_file())
    package = ROOT / "python" / "tinsmith"
    built = [*sorted(package.glob("*.so")), *sorted(CARRIED.iterdir())]
    return [("the checkout", checkout)] + [
        (str(file.relative_to(ROOT)), file.stat().st_size) for file in built
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-variants", action="store_true", help="they take minutes each")
    args = parser.parse_args()
    nvcc = op_devices.setup_py().nvcc_asked()
    if not nvcc:
        print("TINSMITH_NVCC must name nvcc: TINSMITH_NVCC=nvcc python -m tools.card.build")
        return 1
    if reason := facts.stale():
        print(f"{reason}: TINSMITH_NVCC=nvcc pip install -e .")
        return 1
    CARRIED.mkdir(parents=True, exist_ok=True)
    smoke.build(CARRIED)
    experiments(nvcc, CARRIED / "experiments")
    for variant in VARIANTS:
        if variant.changes and not args.without_variants:
            library_of(variant, nvcc, CARRIED / f"{variant.name}.so")
    total = 0
    for name, size in sizes():
        total += size
        print(f"{size / 2**20:8.2f} MiB  {name}")
    print(f"{total / 2**20:8.2f} MiB  of {MOST >> 20} in all")
    return int(total > MOST)


if __name__ == "__main__":
    sys.exit(main())
