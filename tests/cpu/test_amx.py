"""Products on Intel's matrix unit (csrc/cpu/product/amx.c): the order of a sum that amx.h
describes, bit for bit, and that a row knows nothing of the others, at sizes around tiles, strips,
blocks of rows and chunks. What these products err by is in test_ops.py, test_few_rows.py and
test_packed.py."""

from collections.abc import Callable

import numpy as np
import pytest
from support.op_cases import make_linear, make_linear_backward
from support.op_devices import Frozen, device, from_bf16, to_bf16
from support.op_tolerance import compare, run

TILE, DEPTH, ROWS = 16, 32, 256  # rows of a tile, inputs of it, rows of a block
CHUNK, BACK_CHUNK = 2048, 1024  # inputs of a sum, forward and backward
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 255, 256, 257, 300)
MANY = 2 * ROWS + 45


@pytest.fixture
def dev():
    return device("cpu-amx")


def in_order(a: np.ndarray, b: np.ndarray, most: int, part: Callable[[int], int]) -> np.ndarray:
    """a (M, K) times b (N, K), both bf16 in float32: of 32 inputs those of part 0 in order from
    zero, those of part 1, their sum, and that added to the sum of those before; `most` of them."""
    total = np.zeros((len(a), len(b)), np.float32)
    for chunk in range(0, a.shape[1], most):
        sums = np.zeros_like(total)
        for first in range(chunk, min(chunk + most, a.shape[1]), DEPTH):
            last = min(first + DEPTH, chunk + most, a.shape[1])
            parts = np.zeros((2, *total.shape), np.float32)
            for k in range(first, last):  # a product of two bf16 is exact, and so is a float64 sum
                exact = np.multiply.outer(a[:, k].astype(float), b[:, k].astype(float))
                parts[part(k)] = exact + parts[part(k)]
            sums += parts[0] + parts[1]
        total = total + sums if chunk else sums
    return total


def narrow(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of bf16 within a factor of 16, whose sums of two products float64 holds."""
    return from_bf16(to_bf16(rng.uniform(1, 16, shape) * rng.choice([-1, 1], shape)))


@pytest.mark.parametrize("K", [1, 2, 31, 32, 33, 300, CHUNK, CHUNK + 1, 2 * CHUNK + 70])
def test_a_sum_has_the_order_that_is_written_down(dev, K):
    rng = np.random.default_rng(K)
    x, w = narrow(rng, 19, K), narrow(rng, 37, K)
    args = {"w": Frozen(w, "bf16"), "bias": None, "plus": None, "T": 19, "N": 37, "D": K}
    got = dev.call("linear", y=(19, 37), x=x, step=37, **args)["y"]
    np.testing.assert_array_equal(got, in_order(x, w, CHUNK, lambda k: k % 2))
    turned = {"w": Frozen(np.ascontiguousarray(w.T), "bf16"), "T": 19, "N": K, "D": 37}
    got = dev.call("linear_backward", dx=(19, 37), dy=x, accumulate=0, step=K, **turned)["dx"]
    np.testing.assert_array_equal(got, in_order(x, w, BACK_CHUNK, lambda k: k % 32 // 16))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "mxfp4", "q4_k"])
@pytest.mark.parametrize(("N", "D"), [(150, 768), (33, CHUNK + 256)])
def test_a_row_is_the_same_among_any_number(dev, N, D, dtype):
    args = make_linear(np.random.default_rng(0), T=MANY, N=N, D=D, dtype=dtype, bias=1)
    many = compare(dev, "linear", args)["y"]
    for rows in SIZES:
        few = run(dev, "linear", args | {"x": args["x"][:rows], "y": (rows, N), "T": rows})["y"]
        np.testing.assert_array_equal(few, many[:rows], str(rows))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "q4_k"])
@pytest.mark.parametrize(("N", "D"), [(800, 150), (CHUNK + 256, 33)])
def test_a_gradients_row_is_the_same_among_any_number(dev, N, D, dtype):
    if dtype == "q4_k":
        N, D = N // 256 * 256, 256
    args = make_linear_backward(np.random.default_rng(0), T=MANY, N=N, D=D, dtype=dtype)
    many = compare(dev, "linear_backward", args)["dx"]
    for rows in SIZES:
        part = args | {"dy": args["dy"][:rows], "dx": (rows, D), "T": rows}
        np.testing.assert_array_equal(run(dev, "linear_backward", part)["dx"], many[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_product_without_a_trace(dev, threads):
    other = device("cpu-amx", threads)
    for rows in (3, 70, MANY):
        args = make_linear(np.random.default_rng(0), T=rows, N=700, D=900, dtype="bf16", bias=1)
        one, same = (run(one, "linear", args)["y"] for one in (dev, other))
        np.testing.assert_array_equal(one, same)


def test_a_row_that_is_not_finite_keeps_that_to_itself(dev):
    rng = np.random.default_rng(0)
    args = make_linear(rng, T=40, N=45, D=77, dtype="bf16")
    clean = run(dev, "linear", args)["y"]
    x = args["x"].copy()
    x[5], x[38, 3] = np.nan, np.inf
    bad = run(dev, "linear", args | {"x": x})["y"]
    others = [row for row in range(40) if row not in (5, 38)]
    np.testing.assert_array_equal(bad[others], clean[others])
    assert np.isnan(bad[5]).all() and not np.isfinite(bad[38]).any()
