"""Times some ops with the library of a variant (variants.py), which build.py has made.

python -m tools.card.variant own-128x256 --ops product head --device cuda"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import engine

from . import ROOT
from .variants import VARIANTS

LIBRARY = "libtinsmith_cuda.so"


def package_with(library: Path, folder: Path) -> Path:
    """A copy of the package that finds this library beside its core, as PYTHONPATH names it."""
    core = engine.core_library()
    package = folder / "tinsmith"
    shutil.copytree(core.parent, package, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(core, package / core.name)
    (package / LIBRARY).symlink_to(library)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[one.name for one in VARIANTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ops", nargs="+", required=True, help="words of the ops' names")
    parser.add_argument("--carried", type=Path, default=ROOT / "build" / "card")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    times = [sys.executable, "benchmarks/cuda_ops.py", "--device", args.device, "--shapes", "8b"]
    times += ["--rounds", "3", *(["--tiny"] if args.tiny else []), "--ops", *args.ops]
    library = (args.carried / f"{args.name}.so").resolve()
    if not library.exists():  # it is another only by a variable, or on the emulator
        return subprocess.run(times, cwd=ROOT).returncode
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(package_with(library, Path(folder))), *sys.path])
        return subprocess.run(times, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
