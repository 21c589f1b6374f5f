"""The modes of the emulated GPU, and which of them a test runs in.

Each test has a mode of its own, which a hash of its name chooses: every run of the suite covers all
modes, whichever processes run it in whatever order, and a test that failed fails again alone.
TINSMITH_EMULATE_TURN=n moves each test on by n modes. So as many runs as there are modes put every
test in every mode, and later ones repeat that with other seeds. TINSMITH_EMULATE=MODE puts all
tests in one, and MODE:SEED in one random order. While a test runs, that variable names its own
mode: engine.set_mode reads it, and so do the programs that the test starts."""

import dataclasses
import os
import zlib
from dataclasses import dataclass

MODE, TURN = "TINSMITH_EMULATE", "TINSMITH_EMULATE_TURN"


@dataclass(frozen=True)
class Mode:
    """What the emulator shows beyond a kernel's own errors."""

    lazy: bool = False  # work waits until the host waits for it
    truncating: bool = False  # tensor cores cut their sums
    order: int = 3  # of warps and blocks, emulate::Order: forward, reversed and random in turn
    seed: int = 0  # of what is random in the order


MODES = {
    "eager": Mode(),
    "lazy": Mode(lazy=True),
    "truncating": Mode(truncating=True),
    "reversed": Mode(order=1),
    "random": Mode(order=2),
    "forward": Mode(order=0),
    "lazy,truncating": Mode(lazy=True, truncating=True),
}
BY_NAME = ("eager", "lazy", "truncating", "reversed", "random")  # those that tests are spread over


def mode_called(said: str) -> Mode:
    """The mode that MODE or MODE:SEED names; eager without a name."""
    name, _, seed = said.partition(":")
    if (name and name not in MODES) or not (seed or "0").isdecimal():
        raise ValueError(f"{MODE} is {said!r}: it is MODE or MODE:SEED, of {', '.join(MODES)}")
    return dataclasses.replace(MODES[name or "eager"], seed=int(seed or 0))


def mode_now() -> Mode:
    """That of the test."""
    return mode_called(os.environ.get(MODE, ""))


def turn_called(said: str) -> int:
    """The number of a turn."""
    if not (said or "0").isdecimal():
        raise ValueError(f"{TURN} is {said!r}: it is a number from 0 on")
    return int(said or 0)


class Choice:
    """Chooses by what the variables say when the tests begin."""

    def __init__(self) -> None:
        self.forced, self.turn = os.environ.get(MODE, ""), turn_called(os.environ.get(TURN, ""))
        mode_called(self.forced)

    def of(self, test: str) -> str:
        """A test's MODE:SEED."""
        name, _, seed = self.forced.partition(":")
        place = zlib.crc32(test.encode()) + self.turn
        own_seed = zlib.crc32(f"{self.turn} {test}".encode())
        return f"{name or BY_NAME[place % len(BY_NAME)]}:{seed or own_seed}"
