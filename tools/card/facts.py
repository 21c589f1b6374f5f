"""What is on this machine, a line of JSON for each fact: the first stage of both commands.

What is wrong is a row too, so that the other stages go on. Exits NO_DEVICE, with the device's own
sentence, where it can't be opened, nor without cuBLASLt."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys

import numpy as np
from support import op_devices
from tinsmith import _core

from . import report

PACKAGES = (
    "numpy", "pytest", "pytest-xdist", "pytest-timeout", "torch", "transformers", "peft",
    "safetensors",
)  # fmt: skip
QUERY = (
    "name,driver_version,memory.total,memory.used,compute_cap,clocks.sm,clocks.mem,temperature.gpu"
)


def say(fact: str, value: object, **more: object) -> None:
    print(json.dumps({"fact": fact, "value": value, **more}), flush=True)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine() -> None:
    """What is there beside the device."""
    say("machine", f"{platform.platform()}, Python {platform.python_version()}")
    for package in PACKAGES:
        say(package, version(package))
    for tool in ("nvcc", "ncu", "compute-sanitizer", "cc"):
        say(tool, shutil.which(tool) or "not on PATH")
    if not shutil.which("nvidia-smi"):
        return
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10)
        lines = (shown.stdout or shown.stderr).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [str(error)]
    for line in lines:
        say("nvidia-smi", line)


def stale() -> str:
    """What is wrong with a library that is not made of the files that are here."""
    setup, library = (
        op_devices.setup_py(),
        op_devices.core_library().with_name("libtinsmith_cuda.so"),
    )
    made = setup.cuda_is(library, setup.cuda_digest(setup.NVCC_FLAGS))
    return (
        ""
        if made or not library.exists()
        else "libtinsmith_cuda.so was built from other files than these"
    )


def device(name: str) -> None:
    """What the device says of itself, and a first product."""
    found = op_devices.Device(name)
    free, everything = op_devices.SIZE(), op_devices.SIZE()
    found.c.memory(
        found.pointer, op_devices.ctypes.byref(free), op_devices.ctypes.byref(everything)
    )
    gib = f"{free.value / 2**30:.2f} GiB free of {everything.value / 2**30:.2f}"
    say("device", f"{found.c.name.decode()}: {gib}")
    say("its own memory", f"{found.c.own_bytes / 2**20:.1f} MiB")
    say("library", (found.c.library or b"none").decode())
    x, w = np.eye(32), np.arange(1024.0).reshape(32, 32) % 7
    args = {"x": x, "w": op_devices.Frozen(w, "bf16"), "bias": None, "plus": None}
    y = found.call("linear", y=(32, 32), **args, T=32, N=32, D=32)["y"]
    right = bool((y == w.T).all())
    more = {} if right else {"wrong": "a product with the identity is not the weight"}
    say("first product", "right" if right else "wrong", **more)
    for note in found.notes:
        say("slower than it could be", "", note=note)


def opened(name: str) -> str:
    """Why a device can't be opened; where it can without cuBLASLt, later stages go without."""
    reason = _core.devices(name)[name]
    if not reason or os.environ.get("TINSMITH_CUBLASLT"):
        return reason
    command = [sys.executable, "-c", f"from tinsmith import _core; print(_core.devices({name!r}))"]
    environment = {**os.environ, "TINSMITH_CUBLASLT": "none"}
    without = subprocess.run(command, env=environment, capture_output=True, text=True)
    if without.stdout.strip() != repr({name: ""}):
        return reason
    say("device", "opens without cuBLASLt", set={"TINSMITH_CUBLASLT": "none"}, wrong=reason)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="makes no difference here")
    args = parser.parse_args()
    machine()
    if args.device == "cuda-emulated":
        op_devices.emulated_library()
    elif reason := stale():
        say("library", "old", wrong=reason)
    if reason := opened(args.device):
        print(reason)
        return report.NO_DEVICE
    try:
        device(args.device)
    except (RuntimeError, AssertionError, op_devices.Unavailable) as error:  # the other stages tell
        say("device", "fails", wrong=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
