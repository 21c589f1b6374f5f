"""Every op on the emulated GPU with warps and blocks run forward, in reverse and at random: the
same bits each time. Left alone the emulator takes the three in turn, by launch and block."""

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.emulated_mode import MODES
from support.expert_cases import CASES
from support.op_devices import device, emulated_library, set_mode
from support.op_tolerance import run

ORDERS = {name: MODES[name].order for name in ("forward", "reversed", "random")}


@pytest.fixture
def set_order() -> Iterator[Callable[[int], None]]:
    """Sets the emulator's order, which is the mode's again afterwards."""
    choose = ctypes.CDLL(str(emulated_library())).cuda_emulated_order
    yield choose
    set_mode()


@pytest.mark.parametrize("op", CASES)
def test_an_ops_bits_are_the_same_in_every_order_of_warps(
    set_order: Callable[[int], None], op: str
) -> None:
    build, sizes = CASES[op]
    for number, size in enumerate(sizes):
        results = {}
        for name, order in ORDERS.items():
            set_order(order, number)
            args = build(np.random.default_rng(number), **size)
            results[name] = run(device("cuda-emulated"), op, args)
        for name, found in results.items():
            for key, value in found.items():
                wanted = results["forward"][key]
                np.testing.assert_array_equal(value, wanted, f"{op} {size}: {key}, {name}")
