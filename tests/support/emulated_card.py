"""The emulated card as a test wants it; afterwards it is itself again, whatever is still on it."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

from support.emulated_mode import MODES
from support.op_devices import emulated_library, set_mode

CardMaker = Callable[..., None]
MIB = 1 << 20


@contextlib.contextmanager
def emulated_card() -> Iterator[CardMaker]:
    """Sets the first card's free memory, and what else is told of it."""
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_card.argtypes = [ctypes.c_size_t, *[ctypes.c_int] * 3]

    def make(size: int = 2048 * MIB, driver: int = 13000, major: int = 9, minor: int = 0) -> None:
        library.cuda_emulated_card(size, driver, major, minor)

    try:
        yield make
    finally:
        library.cuda_emulated_itself()


@contextlib.contextmanager
def emulated_cards(count: int) -> Iterator[ctypes.CDLL]:
    """The emulated device's library, with several cards, whose work waits until the host does."""
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_used.restype = ctypes.c_size_t
    library.cuda_emulated_cards(count)
    set_mode(MODES["lazy"])
    try:
        yield library
    finally:
        library.cuda_emulated_cards(1)
        set_mode()
