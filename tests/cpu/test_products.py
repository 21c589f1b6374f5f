"""Products with frozen weights that are larger than anything that the CPU packs or keeps at once
(csrc/cpu/product/gemm.c): several chunks of the sum, blocks of rows and groups of panels, on any
number of threads. Each is compared with float64, and with the bits of fewer rows."""

import numpy as np
import pytest
from support.op_cases import make_linear, make_linear_backward
from support.op_devices import ISAS, device
from support.op_tolerance import compare

# rows, outputs, inputs: of four chunks of pairs, or of ten of floats, the last pair half; more
# rows than are packed at once; two groups of panels, the last panel narrow.
LONG, TALL, SMALL = (70, 150, 3601), (523, 131, 1000), (66, 35, 1153)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [LONG, TALL, SMALL], ids=str)
def test_linear_of_several_chunks(isa, dtype, shape):
    dev = device(f"cpu-{isa}", 0)
    T, N, D = shape
    args = make_linear(np.random.default_rng(0), T, N, D, dtype, bias=1, plus="rows")
    many = compare(dev, "linear", args)["y"]
    for rows in (1, 13, 65):
        few = args | {"x": args["x"][:rows], "y": (rows, N), "plus": args["plus"][:rows], "T": rows}
        np.testing.assert_array_equal(dev.call("linear", **few)["y"], many[:rows], str(rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [LONG, TALL, SMALL], ids=str)
def test_linear_backward_of_several_chunks(isa, dtype, shape):
    dev = device(f"cpu-{isa}", 0)
    T, D, N = shape  # the sum is over N
    args = make_linear_backward(np.random.default_rng(0), T, N, D, dtype, accumulate=1)
    many = compare(dev, "linear_backward", args)["dx"]
    for rows in (1, 13, 65):
        few = args | {"dy": args["dy"][:rows], "dx": args["dx"][:rows], "T": rows}
        got = dev.call("linear_backward", **few)["dx"]
        np.testing.assert_array_equal(got, many[:rows], str(rows))


@pytest.mark.parametrize("name", ["cpu", "cpu-avx512bf16", "cpu-amx"])
@pytest.mark.parametrize("shape", [LONG, TALL, (300, 400, 1400)], ids=str)
def test_any_cut_into_jobs_gives_the_same_bits(name, shape):
    T, N, D = shape
    rng = np.random.default_rng(0)
    calls = {
        "linear": make_linear(rng, T, N, D, "bf16", bias=1),
        "linear_backward": make_linear_backward(rng, T, D, N, "bf16", accumulate=1),
    }
    for op, args in calls.items():
        one, *others = (device(name, threads).call(op, **args) for threads in (1, 2, 3, 7))
        for other in others:
            for key, value in one.items():
                np.testing.assert_array_equal(value, other[key], f"{op} {key}")
