"""LoRA's gradients, whose two products by dy are made from one block of it after the other
(csrc/cpu/product/lora.c): sizes of several blocks both ways, and the bits of one product at a
time."""

import numpy as np
import pytest
from support.op_cases import make_lora, make_lora_backward
from support.op_devices import ISAS, device
from support.op_tolerance import compare

BLOCK = 384  # rows and columns of a block: DEPTH
T, WIDTHS, D = 2 * BLOCK + 31, (4 * BLOCK + 99, 70), 67  # more than the block of two threads


@pytest.fixture(params=ISAS)
def dev(request):
    return device(f"cpu-{request.param}")


@pytest.mark.parametrize("R", [5, 32, 40])
def test_gradients_of_several_blocks(dev, R):
    args = make_lora_backward(np.random.default_rng(0), T, WIDTHS, D, R)
    compare(dev, "lora_backward", args)


def rows_of(args, first, last):
    """The arguments of lora_backward with some of its rows; ds is new."""
    part = args | {"T": last - first, "x": args["x"][first:last], "dx": args["dx"][first:last]}
    for i, _ in enumerate(WIDTHS):
        part |= {name: args[name][first:last] for name in (f"y{i}", f"s{i}")}
        part[f"ds{i}"] = (last - first, args["R"])
    return part


@pytest.mark.parametrize("R", [5, 40])
def test_a_rows_gradient_does_not_know_the_other_blocks(dev, R):
    args = make_lora_backward(np.random.default_rng(1), T, WIDTHS, D, R)
    whole = dev.call("lora_backward", **args)
    for first, last in ((0, 1), (BLOCK - 1, BLOCK + 1), (T - 20, T)):
        some = dev.call("lora_backward", **rows_of(args, first, last))
        for name in ("ds0", "ds1", "dx"):
            np.testing.assert_array_equal(some[name], whole[name][first:last], name)


def test_a_sum_over_rows_is_its_blocks_in_their_order(dev):
    args = make_lora_backward(np.random.default_rng(2), T, WIDTHS, D, 8)
    whole = dev.call("lora_backward", **args)
    part = dict(args)
    for first in range(0, T, BLOCK):
        own = rows_of(part, first, min(first + BLOCK, T))
        got = dev.call("lora_backward", **own)
        part |= {name: got[name] for name in ("da0", "da1", "db0", "db1")}
    for name in ("db0", "db1"):
        np.testing.assert_array_equal(part[name], whole[name], name)


@pytest.mark.parametrize("name", ["cpu", "cpu-avx512bf16", "cpu-amx"])
def test_blocks_are_the_same_on_any_number_of_threads(name):
    args = make_lora_backward(np.random.default_rng(3), 2 * T, WIDTHS, D, 32)
    one, *others = (device(name, n).call("lora_backward", **args) for n in (1, 2, 3))
    for other in others:
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key], key)


@pytest.mark.parametrize("R", [3, 32, 33, 130])
def test_one_matrix_has_the_bits_that_it_has_in_a_group(dev, R):
    args = make_lora(np.random.default_rng(4), 40, (33, 33), 900, R)
    both = dev.call("lora", **args)
    alone = {k: v for k, v in args.items() if not k.endswith("1")} | {"count": 1}
    got = compare(dev, "lora", alone)
    for key in ("s0", "y0"):
        np.testing.assert_array_equal(got[key], both[key], key)
