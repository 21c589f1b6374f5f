"""Builds tools/card/smoke.c with the C compiler and runs it on a device's library.

    python -m tools.card.smoke --device cuda

Its lines are passed on. Exits as it does, or with 1 and the compiler's words."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import engine

SOURCES = ("tools/card/smoke.c", "csrc/device/status.c")


def build(folder: Path) -> Path:
    """The program, in that folder; RuntimeError with the compiler's words."""
    out = folder / "gpu_smoke"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", f"-DDEVICE_ABI={engine.setup_py().ABI}"]
    command = [os.environ.get("CC", "cc"), *flags, *SOURCES, "-o", str(out), "-ldl", "-lm"]
    done = subprocess.run(command, cwd=engine.ROOT, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the emulator")
    args = parser.parse_args()
    library = engine.core_library().parent / "libtinsmith_cuda.so"
    if args.device == "cuda-emulated":
        library = engine.emulated_library()
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = build(Path(folder))
        except (RuntimeError, OSError) as error:
            print(error)
            return 1
        size, packages = "tiny" if args.tiny else "real", ":".join(filter(None, sys.path))
        return subprocess.run([program, library, size, packages]).returncode


if __name__ == "__main__":
    sys.exit(main())
