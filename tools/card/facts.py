"""What is on this machine, a line of JSON for each fact: the first stage of both commands.

Exits 1 with the device's own sentence where it can't be opened."""

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys

import engine
import numpy as np
from tinsmith import _core

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="makes no difference here")
    args = parser.parse_args()
    say("machine", f"{platform.platform()}, Python {platform.python_version()}")
    for package in PACKAGES:
        say(package, version(package))
    for tool in ("nvcc", "ncu", "compute-sanitizer", "cc"):
        say(tool, shutil.which(tool) or "not on PATH")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30)
        for line in (shown.stdout or shown.stderr).strip().splitlines():
            say("nvidia-smi", line)
    if args.device == "cuda-emulated":
        engine.emulated_library()
    reason = _core.devices(args.device)[args.device]
    if reason:
        print(reason)
        return 1
    device = engine.Device(args.device)
    free, everything = engine.SIZE(), engine.SIZE()
    device.c.memory(device.pointer, engine.ctypes.byref(free), engine.ctypes.byref(everything))
    say("device", f"{device.c.name.decode()}: {free.value / 2**30:.2f} GiB free of "
        f"{everything.value / 2**30:.2f}")  # fmt: skip
    say("its own memory", f"{device.c.own_bytes / 2**20:.1f} MiB")
    say("library", (device.c.library or b"none").decode())
    for note in device.notes:
        say("slower than it could be", "", note=note)
    x, w = np.eye(32), np.arange(1024.0).reshape(32, 32) % 7
    args = {"x": x, "w": engine.Frozen(w, "bf16"), "bias": None, "plus": None}
    y = device.call("linear", y=(32, 32), **args, T=32, N=32, D=32)["y"]
    wrong = "" if (y == w.T).all() else "a product with the identity is not the weight"
    say("first product", "right" if not wrong else "wrong", **({"wrong": wrong} if wrong else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
