"""Builds tools/card/smoke.c with the C compiler and runs it on a device's library, alone or under a
tool of compute-sanitizer.

    python -m tools.card.smoke --device cuda --out found
    python -m tools.card.smoke --device cuda --tiny --tool memcheck --out found
    python -m tools.card.smoke --build gpu_smoke        (and --program gpu_smoke elsewhere)

Its lines are passed on, and with --out the arrays of wrong results are left in a folder. Where a
check ends the program, the program is run again from the next check on. A tool adds a line of its
own, and its log stays in the folder. Exits with 2 if there is no such device, and with 1 where
something was wrong, the tool found something, the limit was reached, or the program can't be built;
then with the compiler's words."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support import op_devices

from . import ROOT
from .stages import TOOLS, program_of

CHECK_FAILED = 10  # and from here on, the program's exit code where a check could not go on
FOUND = 97  # compute-sanitizer's exit code where it found something
LOG_LINES = 40  # of a tool's log that are shown


def sources() -> list[str]:
    """The program's files, from the root on."""
    parts = sorted((ROOT / "tools/card/smoke").glob("*.c"))
    names = [str(path.relative_to(ROOT)) for path in parts]
    return ["tools/card/smoke.c", *names, "csrc/device/status.c"]


def build(folder: Path, name: str = "gpu_smoke") -> Path:
    """The program, in that folder; RuntimeError with the compiler's words."""
    out = folder.resolve() / name
    flags = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-pthread"]
    flags += [f"-DDEVICE_ABI={op_devices.setup_py().ABI}"]
    command = [os.environ.get("CC", "cc"), *flags, *sources(), "-o", str(out), "-ldl", "-lm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return out


def sanitizer() -> str:
    """compute-sanitizer's path."""
    if not (found := program_of("compute-sanitizer")):
        raise RuntimeError("compute-sanitizer was not found: it comes with the CUDA toolkit")
    return found


def end(process: subprocess.Popen) -> None:
    """Ends a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: Sequence[str | Path], limit_s: float) -> int | None:
    """A command's exit code, or None where it had not ended after so many seconds."""
    # A signal that comes while the program starts waits until it is known whom to end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    process = subprocess.Popen(command, start_new_session=True)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def run_tool(tool: str, command: Sequence[str | Path], out: Path, limit_s: float) -> int:
    """The program under a tool, and a line that says how it ended."""
    log, began = out / f"{tool}.txt", time.monotonic()
    log.unlink(missing_ok=True)
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--log-file", log]
    options += ["--target-processes", "application-only"]
    code = run([sanitizer(), *options, *command], limit_s)
    text = log.read_text(errors="replace") if log.exists() else ""
    row = {"op": tool, "seconds": round(time.monotonic() - began, 1), "log": str(log)}
    if code is None:
        row["wrong"] = f"{tool} had not ended after {limit_s:g} s"
    elif code == FOUND:
        lines = [line.lstrip("= ") for line in text.splitlines()]
        errors = [line for line in lines if line.startswith("ERROR SUMMARY")]
        row["wrong"] = f"{tool} found something: {errors[-1] if errors else 'see its log'}"
    elif code:
        row["wrong"] = f"{tool}: the program ended with {code}"
    if "wrong" in row:
        print("\n".join(text.splitlines()[:LOG_LINES]))
    print(json.dumps(row), flush=True)
    return int("wrong" in row)


def run_checks(command: Sequence[str | Path], limit_s: float) -> int:
    """The program, and again from behind each check that ended it."""
    ends, first, wrong = time.monotonic() + limit_s, 0, 0
    while True:
        code = run([*command, "--from", str(first)], ends - time.monotonic())
        if code is None or code < 0:
            how = f"had not ended after {limit_s:g} s" if code is None else f"ended with {code}"
            print(json.dumps({"op": "smoke", "wrong": f"the program {how}"}), flush=True)
            return 1
        if code < CHECK_FAILED or code - CHECK_FAILED < first:
            return wrong or code
        first, wrong = code - CHECK_FAILED + 1, 1


def smoke(args: argparse.Namespace, folder: Path) -> int:
    """Builds the program in a folder unless there is one, and runs it."""
    library = op_devices.core_library().parent / "libtinsmith_cuda.so"
    if args.device == "cuda-emulated":
        library = op_devices.emulated_library()
    program = args.program.resolve() if args.program else build(folder)
    size, packages = "tiny" if args.tiny else "real", ":".join(filter(None, sys.path))
    command = [program, library, size, packages, "--seed", str(args.seed)]
    if not args.tiny:
        command += ["--patience", str(args.patience)]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        command += ["--wrong", args.out.resolve()]
    if args.tool:
        return run_tool(args.tool, command, (args.out or folder).resolve(), args.limit)
    return run_checks(command, args.limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the emulator")
    parser.add_argument("--tool", choices=TOOLS, help="one of compute-sanitizer's")
    parser.add_argument("--out", type=Path, help="a folder for logs and wrong arrays")
    parser.add_argument("--program", type=Path, help="one that was built elsewhere")
    parser.add_argument("--build", type=Path, metavar="PATH", help="builds it there, and ends")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until it is ended")
    parser.add_argument(
        "--patience", type=int, default=15, help="seconds until one check is ended; 0: never"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the program is ended too
    try:
        if args.build:
            args.build.parent.mkdir(parents=True, exist_ok=True)
            build(args.build.parent, args.build.name)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            return smoke(args, Path(folder))
    except (RuntimeError, OSError) as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
