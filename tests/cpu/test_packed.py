"""Base weights of 8 to 4 bits on the CPU (csrc/cpu/weights/packed.h): every op that reads one, in
every type, against float64 on the widened numbers; and against the bits of the same weight in f32,
where the inputs of a product stay f32."""

import contextlib

import numpy as np
import pytest
from support import packed_weights
from support.op_cases import make_linear, make_linear_backward
from support.op_devices import ISAS, PACKED, Frozen, Unavailable, device
from support.op_tolerance import compare, run
from support.packed_cases import cases_by_op
from support.packed_weights import whole

rng_of = np.random.default_rng
MANY = 100  # rows: more than cpu/product/gemv.c takes


@pytest.fixture(params=[*ISAS, "int16-avx2", "int16-avx512", "int16-avx512vnni"])
def dev(request):
    return device(f"cpu-{request.param}")


@pytest.mark.parametrize("dtype", PACKED)
def test_each_op_is_its_formula_on_the_widened_weight(dev, dtype):
    for op, args in cases_by_op(dtype, deep=75, most=70).items():
        compare(dev, op, args)
    for number, (T, N, D) in enumerate([(0, 64, 64), (1, 1, 1), (2, 33, 801), (67, 130, 33)]):
        D = whole(dtype, D)
        compare(dev, "linear", make_linear(rng_of(number), T, N, D, dtype, 1, number % 2))
        compare(dev, "linear_backward", make_linear_backward(rng_of(number), T, N, D, dtype))


@pytest.mark.parametrize("dtype", PACKED)
def test_few_rows_have_the_bits_of_many(dev, dtype):
    args = make_linear(rng_of(0), T=MANY, N=131, D=whole(dtype, 900), dtype=dtype, bias=1)
    many = run(dev, "linear", args)["y"]
    for rows in (1, 2, 3, 7, 12, 13, 14, 27, 64, 65):
        for part in (slice(rows), slice(MANY - rows, MANY)):  # the last ones, too
            some = {"x": args["x"][part], "y": (rows, 131), "T": rows}
            few = run(dev, "linear", args | some)["y"]
            np.testing.assert_array_equal(few, many[part], str(rows))


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("isa", ISAS[:3])
def test_a_product_has_the_bits_of_the_widened_weight(isa, dtype):
    dev, D = device(f"cpu-{isa}"), whole(dtype, 1201)
    for T in (1, 70):
        calls = {
            "linear": make_linear(rng_of(0), T, 35, D, dtype, 1, 1),
            "linear_backward": make_linear_backward(rng_of(0), T, 35, D, dtype, 1),
        }
        for op, args in calls.items():
            wide = args | {"w": Frozen(args["w"].value)}
            (got,), (wanted,) = dev.call(op, **args).values(), dev.call(op, **wide).values()
            np.testing.assert_array_equal(got, wanted, f"{op} {T}")


@pytest.mark.parametrize("dtype", PACKED)
def test_one_instruction_gives_the_bits_of_two(dtype):
    """AVX512_VNNI adds a product of whole numbers to a sum, which AVX-512 multiplies first."""
    two, one = (device(f"cpu-int16-{isa}") for isa in ("avx512", "avx512vnni"))
    for rows in (1, 2, 5, 9, MANY):
        args = make_linear(rng_of(rows), rows, N=131, D=whole(dtype, 900), dtype=dtype, bias=1)
        wanted, got = (run(dev, "linear", args)["y"] for dev in (two, one))
        np.testing.assert_array_equal(got, wanted, str(rows))


@pytest.mark.parametrize("dtype", ["int8", "int4", "q4_1", "q6_k"])
@pytest.mark.parametrize("name", ["cpu", "cpu-int16", "cpu-avx512bf16", "cpu-amx"])
def test_any_number_of_threads_gives_the_same_bits(name, dtype):
    calls = {
        "linear": make_linear(rng_of(0), T=5, N=700, D=whole(dtype, 928), dtype=dtype, bias=1),
        "linear_backward": make_linear_backward(rng_of(0), 70, 300, whole(dtype, 448), dtype),
    }
    for op, args in calls.items():
        one, *others = (device(name, threads).call(op, **args) for threads in (1, 2, 3))
        for other in others:
            for key, value in one.items():
                np.testing.assert_array_equal(value, other[key], f"{op} {key}")


def test_every_code_of_8_bits_is_its_number(dev):
    """−128 too, which a file may have: each of 256 codes meets a single 1."""
    codes = np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    scale = np.full((8, 1), 0.5, np.float16).view(np.uint8)
    blocks = np.concatenate([scale, codes.view(np.uint8)], axis=1)
    w = Frozen(codes / 2, "int8", blocks)
    for T in (1, 3, 8, 32):
        args = make_linear(rng_of(0), T, 8, 32, "int8") | {"w": w, "x": np.eye(32)[-T:]}
        np.testing.assert_array_equal(run(dev, "linear", args)["y"], codes.T[-T:] / 2, str(T))


@pytest.mark.parametrize("dtype", ["int8", "int4", "mxfp4"])
def test_odd_inputs_are_no_odd_outputs(dev, dtype):
    """Zeros, small and large numbers, and what is no number, which alone comes out as none."""
    T, N, D = 9, 40, whole(dtype, 100)
    x = rng_of(1).standard_normal((T, D)).astype(np.float32)
    x[1] = 0.0
    x[2, 32:64] = -0.0
    x[3, 5] = 1e30  # the others of its block are nothing beside it
    x[4] *= 1e-38
    x[5, D - 1] = np.nan
    x[6, 40] = np.inf
    x[7, 0], x[7, 1] = -np.inf, np.nan
    args = make_linear(rng_of(0), T, N, D, dtype) | {"x": x}
    for rows in (range(T), *([row] for row in range(T))):
        some = {"x": x[list(rows)], "y": (len(rows), N), "T": len(rows)}
        y = run(dev, "linear", args | some)["y"]
        for row, got in zip(rows, y, strict=True):
            if not np.isfinite(x[row]).all():
                assert not np.isfinite(got).any(), row
                if row == 6:  # infinite numbers have their signs, where they do not become NaN
                    same = np.sign(got) == np.sign(args["w"].value[:, 40])
                    assert (same | np.isnan(got)).all()
            else:
                exact = x[row].astype(float) @ args["w"].value.T
                bar = 1e-4 if not dev.pairs else 0.02
                bar = bar * np.linalg.norm(exact) + 1e-32  # so small a number may be zero
                assert np.linalg.norm(got - exact) <= bar, row


# ---- what is made of wide numbers ----


def kept(dev, value, dtype):
    """The numbers that a weight of wide numbers is, once it is kept in a type."""
    rows, cols = value.shape
    ids = np.arange(rows, dtype=np.int32)
    w = dev.put_frozen(Frozen(value, dtype))
    return dev.call("embed", y=(rows, cols), ids=ids, w=w, T=rows, V=rows, D=cols)["y"]


def share(value, exact):
    return float(np.sqrt(np.sum((value - exact) ** 2) / np.sum(exact**2)))


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.0055), ("int4", 0.0736)])
def test_the_error_of_a_code(dev, dtype, most):
    gguf = pytest.importorskip("gguf")
    w = rng_of(0).standard_normal((256, 512)).astype(np.float32)
    found = share(kept(dev, w, dtype), w)
    assert found < most
    kind = gguf.GGMLQuantizationType["Q8_0" if dtype == "int8" else "Q4_1"]
    assert found <= 1.01 * share(gguf.dequantize(gguf.quantize(w, kind), kind), w)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_every_instruction_set_makes_the_same_codes(dtype):
    """Of whole blocks, of a part of one, and of fewer rows than a panel has."""
    w = rng_of(0).standard_normal((67, 205)).astype(np.float32)
    wanted = kept(device("cpu-generic"), w, dtype)
    for isa in ISAS[1:]:
        with contextlib.suppress(Unavailable):  # this machine lacks it
            np.testing.assert_array_equal(kept(device(f"cpu-{isa}"), w, dtype), wanted, isa)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_made_of_odd_numbers(dev, dtype):
    w = rng_of(0).standard_normal((35, 70)).astype(np.float32)
    w[3] = 0.0
    w[4] *= 1e-4
    w[5, 7] = 3e38  # larger than any scale reaches
    w[6] = -0.0
    got = kept(dev, w, dtype)
    assert np.isfinite(got).all()
    assert (got[3] == 0).all() and (got[6] == 0).all()
    assert share(got[4], w[4]) < 0.1
    assert got[5, 7] > 1e5 and (np.sign(got[5, 7]) == 1)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bf16_and_f16_are_taken_as_they_are(dev, dtype):
    from support.op_devices import from_bf16, to_bf16

    w = rng_of(0).standard_normal((40, 100)).astype(np.float32)
    for source, exact in (("bf16", from_bf16(to_bf16(w))), ("f16", np.float16(w))):
        exact = exact.astype(np.float32)
        host = to_bf16(w) if source == "bf16" else np.float16(w)
        memory = dev.put_frozen(Frozen(exact, dtype))
        size = memory.size_bytes
        wanted = memory.read(size)
        dev.c.frozen_load(
            dev.pointer,
            memory.pointer,
            PACKED[dtype],
            host.ctypes.data,
            {"bf16": 1, "f16": 2}[source],
            40,
            100,
        )
        np.testing.assert_array_equal(memory.read(size), wanted, source)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_a_files_blocks_are_the_numbers_that_gguf_makes_of_them(dev, name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    w = rng_of(0).standard_normal((37, 96)).astype(np.float32)
    w[2, :32] = 0.0
    blocks = gguf.quantize(w, kind)
    dtype = "int8" if name == "Q8_0" else name.lower()
    exact = gguf.dequantize(blocks, kind)
    memory = dev.put_frozen(Frozen(exact.astype(float), dtype, blocks))
    ids = np.arange(37, dtype=np.int32)
    got = dev.call("embed", y=(37, 96), ids=ids, w=memory, T=37, V=37, D=96)["y"]
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_large_blocks_are_the_numbers_that_gguf_makes_of_them(dev, name):
    gguf = pytest.importorskip("gguf")
    rows, cols = 37, 512
    made = packed_weights.make(rng_of(0), rows, cols, name.lower())
    exact = gguf.dequantize(made.blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(made.value, exact)
    ids = np.arange(rows, dtype=np.int32)
    got = dev.call("embed", y=(rows, cols), ids=ids, w=made, T=rows, V=rows, D=cols)["y"]
    np.testing.assert_array_equal(got, exact)


def test_fp8s_numbers_are_torchs_and_each_is_widened_to_itself(dev):
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(packed_weights.LEVELS["fp8"], exact)
    exact = np.where(np.isfinite(exact), exact, np.copysign(480, exact)).reshape(1, 256)
    heads = np.ones((8, 1), np.float32).view(np.uint8)
    blocks = np.concatenate([heads, codes.reshape(8, 32)], -1).reshape(1, -1)
    memory = dev.put_frozen(Frozen(exact.astype(float), "fp8", blocks))
    ids = np.zeros(1, np.int32)
    got = dev.call("embed", y=(1, 256), ids=ids, w=memory, T=1, V=1, D=256)["y"]
    np.testing.assert_array_equal(got, exact)


def test_mxfp4s_smallest_scale_is_no_zero(dev):
    made = packed_weights.make(rng_of(0), 2, 32, "mxfp4")
    blocks = made.blocks.copy()
    blocks[:, 0] = 0
    exact = np.float32(made.value / 2.0 ** (made.blocks[:, :1].astype(float) - 127) * 2.0**-127)
    memory = dev.put_frozen(Frozen(exact.astype(float), "mxfp4", blocks))
    got = dev.call("embed", y=(2, 32), ids=np.arange(2, dtype=np.int32), w=memory, T=2, V=2, D=32)
    np.testing.assert_array_equal(got["y"], exact)
