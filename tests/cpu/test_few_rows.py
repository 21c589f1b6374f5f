"""Few rows at a time, as decoding has them, against many at once, as training has them: the same
bits, through every way that the CPU takes for either."""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np
import pytest
from support.op_cases import (
    make_attention,
    make_attention_backward,
    make_linear,
    make_linear_backward,
)
from support.op_devices import DEVICES, Span, device
from support.op_tolerance import compare, run

MANY = 100  # rows: more than cpu/product/gemv.c and gemv_backward.c take (64)
FEW = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 27, 40, 53, 63, 64, 65)


@pytest.fixture(params=[name for name in DEVICES if name.startswith("cpu")])
def dev(request):
    return device(request.param)


def first_rows(args, rows):
    """The arguments of linear with so many of its rows."""
    plus = None if args["plus"] is None else args["plus"][:rows]
    y = "plus" if args["y"] == "plus" else (rows, args["N"])
    return args | dict(x=args["x"][:rows], y=y, plus=plus, T=rows)


@pytest.mark.parametrize(
    "shape",
    [
        dict(N=131, D=900, dtype="bf16", bias=1),  # three blocks of inputs, a panel of 3 outputs
        dict(N=83, D=401, dtype="bf16", plus="rows"),  # an odd input: half a pair
        dict(N=64, D=768, dtype="f32", bias=1, plus="y"),
        dict(N=49, D=3, dtype="f32"),
        dict(N=33, D=385, dtype="f16"),
        dict(N=40, D=0, dtype="bf16", bias=1),
    ],
    ids=str,
)
def test_a_product_with_few_rows_has_the_bits_of_one_with_many(dev, shape):
    args = make_linear(np.random.default_rng(0), T=MANY, **shape)
    many = run(dev, "linear", args)["y"]
    for rows in FEW:
        few = run(dev, "linear", first_rows(args, rows))["y"]
        np.testing.assert_array_equal(few, many[:rows], str(rows))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows", [13, 64])
def test_inputs_that_are_packed_in_several_parts(dev, rows, dtype):
    args = make_linear(np.random.default_rng(0), T=66, N=35, D=5500, dtype=dtype, bias=1)
    few = compare(dev, "linear", first_rows(args, rows))["y"]
    np.testing.assert_array_equal(few, run(dev, "linear", args)["y"][:rows])


@pytest.mark.parametrize("name", ["cpu", "cpu-avx512bf16", "cpu-amx"])
def test_few_rows_on_several_threads(name):
    devices = [device(name, threads) for threads in (1, 2, 3)]
    args = make_linear(np.random.default_rng(0), T=5, N=700, D=900, dtype="bf16", bias=1)
    one, two, three = (run(dev, "linear", args)["y"] for dev in devices)
    np.testing.assert_array_equal(two, one)
    np.testing.assert_array_equal(three, one)


# Rows that fill one, two, three and four vectors of each instruction set, or nearly.
BACK = (1, 3, 4, 7, 8, 12, 14, 16, 17, 23, 24, 30, 32, 33, 40, 45, 48, 63, 64, 65)


def first_rows_back(args, rows):
    """The arguments of linear_backward with so many of its rows."""
    dx = args["dx"][:rows] if isinstance(args["dx"], np.ndarray) else (rows, args["D"])
    return args | dict(dy=args["dy"][:rows], dx=dx, T=rows)


@pytest.mark.parametrize(
    "shape",
    [
        dict(N=900, D=131, dtype="bf16"),  # three blocks of outputs, the last panel of 4
        dict(N=401, D=83, dtype="bf16", accumulate=1),  # an odd output: half a pair
        dict(N=768, D=64, dtype="f32", accumulate=1),
        dict(N=3, D=49, dtype="f32"),
        dict(N=385, D=33, dtype="f16"),
    ],
    ids=str,
)
def test_a_gradient_of_few_rows_has_the_bits_of_many(dev, shape):
    args = make_linear_backward(np.random.default_rng(0), T=MANY, **shape)
    many = compare(dev, "linear_backward", args)["dx"]
    for rows in BACK:
        few = run(dev, "linear_backward", first_rows_back(args, rows))["dx"]
        np.testing.assert_array_equal(few, many[:rows], str(rows))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_outputs_that_are_packed_in_several_parts(dev, dtype):
    # with AVX-512, 64 rows of 5,760 outputs are packed at once, or of twice as many in pairs
    args = make_linear_backward(np.random.default_rng(0), T=66, N=12300, D=17, dtype=dtype)
    few = compare(dev, "linear_backward", first_rows_back(args, 64))["dx"]
    np.testing.assert_array_equal(few, run(dev, "linear_backward", args)["dx"][:64])


@pytest.mark.parametrize("name", ["cpu", "cpu-avx512bf16", "cpu-amx"])
def test_a_gradient_of_few_rows_on_several_threads(name):
    args = make_linear_backward(np.random.default_rng(0), T=30, N=500, D=701, dtype="bf16")
    one, two, three = (
        run(device(name, threads), "linear_backward", args)["dx"] for threads in (1, 2, 3)
    )
    np.testing.assert_array_equal(two, one)
    np.testing.assert_array_equal(three, one)


@pytest.mark.parametrize("E", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_a_decoded_position_has_the_attention_of_a_trained_one(dev, E, heads):
    args = make_attention(
        np.random.default_rng(0), spans=((140, 0), (9, 60)), H=2 * heads, G=2, E=E
    )
    many = run(dev, "attention", args)
    wanted = [0, 1, 15, 16, 31, 32, 63, 64, 65, 80, 127, 128, 139, 140, 143, 144, 148]
    of_row = [Span(0, 1, s.pos + i, s.first) for s in args["spans"] for i in range(s.rows)]
    spans = [Span(i, 1, of_row[t].pos, of_row[t].first) for i, t in enumerate(wanted)]
    T = len(wanted)
    sizes = dict(y=(T, 2 * heads, E), lse=(T, 2 * heads), T=T, S=T)
    few = run(dev, "attention", args | sizes | dict(q=args["q"][wanted], spans=spans))
    np.testing.assert_array_equal(few["y"], many["y"][wanted])
    np.testing.assert_array_equal(few["lse"], many["lse"][wanted])


@pytest.mark.parametrize("E", [32, 64])
def test_attention_of_single_positions_is_its_formula(dev, E):
    spans = ((1, 0), (1, 15), (1, 63), (1, 64), (1, 200))
    compare(dev, "attention", make_attention(np.random.default_rng(0), spans, H=4, G=2, E=E))


def test_heads_that_are_too_wide_are_refused(dev):
    rng = np.random.default_rng(0)
    whole, back = make_attention(rng, ((2, 0),), 1, 1, 4098), ((2,), 1, 1, 258)
    for op, args, words in (
        ("attention", whole, r"4098 is more than the CPU's attention takes \(4096\)"),
        ("attention_backward", make_attention_backward(rng, *back), r"258 is more .* \(256\)"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(dev, op, args)
