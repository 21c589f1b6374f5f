"""Chooses the engine's device to run on."""

import sys
from functools import cache

from tinsmith import _core


def choose_device(name: str) -> str:
    """The device to run on; "auto" is the CPU, and says once on stderr why it is not cuda.

    cuda is taken only by its name: its kernels have been executed by the emulator alone, and no
    card has yet confirmed their numbers.
    """
    found = _core.devices()
    if name == "auto":
        _say_cpu(found["cuda"] or "ask for --device cuda by name: no card has tested it yet")
        return "cpu"
    if name not in found:
        raise ValueError(f"there is no device {name!r}; there are {sorted(found)} and 'auto'")
    if found[name]:
        raise RuntimeError(f"the device {name} can't be used: {found[name]}")
    return name


@cache
def _say_cpu(reason: str) -> None:
    """Says it once in a process."""
    print(f"tinsmith computes on the CPU ({reason})", file=sys.stderr)
