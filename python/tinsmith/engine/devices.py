"""Chooses the engine's device to run on."""

import sys

from tinsmith import _core


def choose_device(name: str) -> str:
    """The device to run on; "auto" is the CPU, and says on stderr why it is not cuda.

    cuda is taken only by its name: its kernels have been executed by the emulator alone, and no
    card has yet confirmed their numbers.
    """
    found = _core.devices()
    if name == "auto":
        reason = found["cuda"] or "ask for --device cuda by name: no card has tested it yet"
        print(f"tinsmith: running on the CPU ({reason})", file=sys.stderr)
        return "cpu"
    if name not in found:
        raise ValueError(f"there is no device {name!r}; there are {sorted(found)} and 'auto'")
    if found[name]:
        raise RuntimeError(f"the device {name} can't be used: {found[name]}")
    return name
