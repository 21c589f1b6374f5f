"""Times some ops on a shape of 8B, with a library of a variant (variants.py) if one is named.

python -m tools.card.variant --library build/card/own-deep.so --ops product head"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support import op_devices

from . import ROOT

LIBRARY = "libtinsmith_cuda.so"


def package_with(library: Path, folder: Path) -> Path:
    """A copy of the package that finds this library beside its core, as PYTHONPATH names it."""
    core = op_devices.core_library()
    package = folder / "tinsmith"
    shutil.copytree(core.parent, package, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(core, package / core.name)
    (package / LIBRARY).symlink_to(library.resolve(strict=True))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ops", nargs="+", required=True, help="words of the ops' names")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    times = [sys.executable, "benchmarks/cuda_ops.py", "--device", args.device, "--shapes", "8b"]
    times += ["--rounds", "3", *(["--tiny"] if args.tiny else []), "--ops", *args.ops]
    with tempfile.TemporaryDirectory() as folder:
        other = [str(package_with(args.library, Path(folder)))] if args.library else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*other, *sys.path])}
        return subprocess.run(times, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
