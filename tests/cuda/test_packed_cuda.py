"""Base weights of 8 and 4 bits on a GPU (cuda/product/gemm_quantized.cu, quantize.cu): every op
that reads one, in every type, against float64 on the widened numbers; few rows against many; and
the CPU's codes."""

import numpy as np
import pytest
from support import packed_weights
from support.emulated_mode import Mode
from support.expert_cases import make_grouped_linear, make_grouped_linear_backward
from support.op_cases import make_linear, make_linear_backward
from support.op_devices import PACKED, Frozen, device, from_bf16, set_mode, to_bf16
from support.op_tolerance import compare, run
from support.packed_cases import cases_by_op
from support.packed_weights import whole
from test_packed import kept

TYPES = ("int8", "int4", "q4_0", "q4_1", "mxfp4", "mxfp4_pairs")  # which kernels know
rng_of = np.random.default_rng


@pytest.fixture(params=("cuda", "cuda-emulated"))
def dev(request):
    return device(request.param)


@pytest.mark.parametrize("dtype", TYPES)
def test_each_op_is_its_formula_on_the_widened_weight(dev, dtype):
    for op, args in cases_by_op(dtype, deep=299, most=17).items():
        compare(dev, op, args)
    for number, (T, N, D) in enumerate([(0, 64, 64), (1, 1, 1), (2, 33, 551), (21, 130, 33)]):
        D = whole(dtype, D)
        plus, gap = ("", "y", "rows", "y")[number], (0, 3, 8, 40)[number]
        compare(dev, "linear", make_linear(rng_of(number), T, N, D, dtype, 1, plus, gap))
        back = make_linear_backward(rng_of(number), T, N, D, dtype, number % 2, gap)
        compare(dev, "linear_backward", back)


def made(dtype, T, N, D):
    """The products of T rows with a weight, forward and back, and how many rows each has."""
    args = make_linear(rng_of(0), T=T, N=N, D=D, dtype=dtype, bias=1)
    back = make_linear_backward(rng_of(0), T, N, D, dtype)
    return {
        "linear": (args, lambda n: {"x": args["x"][:n], "y": (n, N), "T": n}),
        "linear_backward": (back, lambda n: {"dy": back["dy"][:n], "dx": (n, D), "T": n}),
    }


BITWISE = ("int8", "int4", "q4_0", "q4_1", "mxfp4")


# Of 256 by 64, where they fill half of the card; of 64 by 64 (from 17 rows on); else of 16 by 32.
@pytest.mark.parametrize(
    ("dtype", "truncating"), [*((one, False) for one in BITWISE), ("int8", True), ("int4", True)]
)
def test_few_rows_have_the_bits_of_many_in_every_tiling(dtype, truncating):
    dev = device("cuda-emulated")
    set_mode(Mode(truncating=truncating))
    try:
        for op, (args, first) in made(dtype, 260, 104, whole(dtype, 296)).items():
            (many,) = run(dev, op, args).values()
            for rows in (1, 16, 30):
                (few,) = run(dev, op, args | first(rows)).values()
                np.testing.assert_array_equal(few, many[:rows], f"{op} {rows}")
    finally:
        set_mode()


@pytest.mark.parametrize("dtype", BITWISE)
def test_steps_of_k_take_turns_in_the_memory_that_they_have(dtype):
    """More of them than there is room for, of 1 row and of 30; 1,544 ends within a block."""
    dev = device("cuda-emulated")
    for rows, N in ((30, 65), (1, 65), (1, 455)):  # of 64 by 64, 16 by 32, 16 by 64
        args = make_linear(rng_of(0), rows, N, whole(dtype, 1544), dtype, bias=1)
        compare(dev, "linear", args)


@pytest.mark.parametrize("dtype", BITWISE)
@pytest.mark.parametrize(("load", "N"), [((3, 0, 18), 65), ((2, 0, 390), 72)])
def test_a_product_has_the_bits_of_the_widened_weight(dev, dtype, load, N):
    """Of experts, whose products with bf16 weights have the same order of sums."""
    calls = {
        "grouped_linear": make_grouped_linear(rng_of(2), load, N, whole(dtype, 296), dtype, 2),
        "grouped_linear_backward": make_grouped_linear_backward(
            rng_of(3), load, N, whole(dtype, 97), dtype
        ),
    }
    for op, args in calls.items():
        wide = args | {"w": Frozen(args["w"].value)}
        (got,), (wanted,) = dev.call(op, **args).values(), dev.call(op, **wide).values()
        np.testing.assert_array_equal(got, wanted, op)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_codes_are_those_that_the_cpu_makes(dev, dtype):
    """Of whole blocks, of a part of one, of odd numbers, and of numbers in bf16 and f16."""
    w = rng_of(0).standard_normal((37, 301)).astype(np.float32)
    w[3], w[6] = 0.0, -0.0
    w[4] *= 1e-4
    w[5, 7] = 3e38  # larger than any scale reaches
    w[8] *= 1e-33
    for source, one in (("f32", w), ("bf16", from_bf16(to_bf16(w))), ("f16", w[8:])):
        host, kind = (np.float16(one), 2) if source == "f16" else (one, 0)
        host, kind = (to_bf16(one), 1) if source == "bf16" else (host, kind)
        one = host.astype(np.float32) if source == "f16" else one
        wanted = kept(device("cpu"), one, dtype)
        memory = dev.put_frozen(Frozen(one.astype(float), dtype))
        data, (rows, cols) = np.ascontiguousarray(host), one.shape
        dev.c.frozen_load(
            dev.pointer, memory.pointer, PACKED[dtype], data.ctypes.data, kind, rows, cols
        )
        ids = np.arange(rows, dtype=np.int32)
        args = {"y": (rows, cols), "ids": ids, "w": memory, "T": rows, "V": rows, "D": cols}
        got = dev.call("embed", **args)["y"]
        np.testing.assert_array_equal(got, from_bf16(to_bf16(wanted)), source)


def test_mxfp4s_smallest_scale_is_no_zero(dev):
    made_of = packed_weights.make(rng_of(0), 2, 32, "mxfp4")
    blocks = made_of.blocks.copy()
    blocks[:, 0] = 0
    powers = 2.0 ** (made_of.blocks[:, :1].astype(float) - 127)
    exact = np.float32(made_of.value / powers * 2.0**-127)
    memory = dev.put_frozen(Frozen(exact.astype(float), "mxfp4", blocks))
    ids = np.arange(2, dtype=np.int32)
    got = dev.call("embed", y=(2, 32), ids=ids, w=memory, T=2, V=2, D=32)["y"]
    np.testing.assert_array_equal(got, from_bf16(to_bf16(exact)))


def test_weights_that_lie_behind_one_another_are_one_if_their_types_are(dev):
    first, second = (rng_of(seed).standard_normal((8, 64)) for seed in (0, 1))
    size = {kind: dev.c.frozen_bytes(dev.pointer, PACKED[kind], 8, 64) for kind in ("int8", "int4")}
    for kinds, one in ((("int4", "int4"), 1), (("int4", "int8"), 0), (("int8", "int8"), 1)):
        memory = dev.put_frozen(Frozen(np.zeros((32, 64)), "int8"))  # room for both
        at = [memory.pointer.value, memory.pointer.value + size[kinds[0]]]
        for w, kind, place in zip((first, second), kinds, at, strict=True):
            data = np.ascontiguousarray(w, np.float32)
            dev.c.frozen_load(dev.pointer, place, PACKED[kind], data.ctypes.data, 0, 8, 64)
        dev.check(dev.c.sync(dev.pointer))
        assert dev.c.frozen_continues(dev.pointer, *at, 8, 64) == one, kinds


def test_an_address_that_is_loaded_again_has_its_new_type(dev):
    w = np.float32(rng_of(0).standard_normal((8, 64)))
    memory = dev.put_frozen(Frozen(w.astype(float), "int4"))
    room = dev.put_frozen(Frozen(np.zeros((16, 64)), "f32"))
    for kind, exact in (
        (PACKED["int4"], kept(device("cpu"), w, "int4")),
        (1, w),
        (PACKED["int8"], kept(device("cpu"), w, "int8")),
        (1, w),
    ):
        dtype = 1 if kind == 1 else 0
        data = to_bf16(w) if dtype else np.ascontiguousarray(w)
        dev.c.frozen_load(dev.pointer, room.pointer, kind, data.ctypes.data, dtype, 8, 64)
        ids = np.arange(8, dtype=np.int32)
        got = dev.call("embed", y=(8, 64), ids=ids, w=room, T=8, V=8, D=64)["y"]
        np.testing.assert_array_equal(got, from_bf16(to_bf16(exact)))
    assert memory.size_bytes < room.size_bytes
