"""The CPU's ways of making a product of many rows (csrc/cpu/product/gemm_tiled.c, lora.c,
attention.c): packed tiles, one panel without packing, a group's columns side by side, blocks of 64
queries. Sizes are such that each is taken, and what they give is what few rows give, bit for
bit."""

import numpy as np
import pytest
from support.op_cases import make_attention_backward, make_lora, make_lora_backward, make_matmul
from support.op_devices import ISAS, device
from support.op_tolerance import compare

K = 901  # three blocks of the sum; odd, so that the last pair is not whole


@pytest.fixture(params=ISAS)
def dev(request):
    return device(f"cpu-{request.param}")


@pytest.mark.parametrize("a_turned", [0, 1])
@pytest.mark.parametrize("b_turned", [0, 1])
@pytest.mark.parametrize("b_bf16", [0, 1])
def test_product_is_the_same_for_few_rows_many_and_one_panel(dev, a_turned, b_turned, b_bf16):
    rng = np.random.default_rng(0)
    args = make_matmul(rng, 365, 100, K, a_turned, b_turned, b_bf16, accumulate=1)
    whole = compare(dev, "matmul", args)["c"]
    b = args["b"].view(np.uint16 if b_bf16 else np.float32)
    b = b.reshape((100, K) if b_turned else (K, 100))
    for rows, columns in ((1, 100), (16, 100), (17, 100), (40, 33), (365, 31), (365, 7), (30, 32)):
        a = args["a"][:, :rows] if a_turned else args["a"][:rows]
        part = b[:columns] if b_turned else b[:, :columns]
        some = args | {"M": rows, "N": columns, "a": a, "c": args["c"][:rows, :columns]}
        some["b"] = np.ascontiguousarray(part).view(np.uint8).ravel()
        got = dev.call("matmul", **some)["c"]
        np.testing.assert_array_equal(got, whole[:rows, :columns], f"{rows} × {columns}")


GROUPS = [(1, 8), (17, 8), (230, 5), (230, 40), (40, 130)]  # T, R; 3 × 130 columns exceed a block


def alone(args: dict, i: int) -> dict:
    """Matrix i of a group by itself."""
    shared = {k: v for k, v in args.items() if not k[-1].isdigit()}
    own = {f"{k[:-1]}0": v for k, v in args.items() if k[-1] == str(i)}
    return shared | own | {"count": 1}


@pytest.mark.parametrize(("T", "R"), GROUPS)
def test_lora_of_a_group_is_each_matrix_alone(dev, T, R):
    args = make_lora(np.random.default_rng(0), T, (131, 64, 33), K, R)
    got = compare(dev, "lora", args)
    for i in range(3):
        for name, value in dev.call("lora", **alone(args, i)).items():
            np.testing.assert_array_equal(got[f"{name[:-1]}{i}"], value, f"{name[:-1]}{i}")


@pytest.mark.parametrize(("T", "R"), [*GROUPS, (800, 8)])  # 800 rows: three blocks of the sum
def test_lora_gradients_of_a_group_are_each_matrix_alone(dev, T, R):
    args = make_lora_backward(np.random.default_rng(0), T, (131, 64, 33), 301, R)
    got = compare(dev, "lora_backward", args)
    for i in range(3):
        for name, value in dev.call("lora_backward", **alone(args, i)).items():
            if name != "dx":
                np.testing.assert_array_equal(got[f"{name[:-1]}{i}"], value, f"{name[:-1]}{i}")


@pytest.mark.parametrize("op", ["lora", "lora_backward"])
def test_lora_is_the_same_on_any_number_of_threads(op):
    make = {"lora": make_lora, "lora_backward": make_lora_backward}[op]
    args = make(np.random.default_rng(0), 700, (131, 64, 33), 601, 8)
    one, three = (device("cpu", threads).call(op, **args) for threads in (1, 3))
    for name, value in one.items():
        np.testing.assert_array_equal(value, three[name], name)


@pytest.mark.parametrize("E", [32, 34, 128, 256])
def test_attention_backward_of_whole_and_broken_blocks(dev, E):
    lengths = (1, 63, 64, 65, 200)
    args = make_attention_backward(np.random.default_rng(0), lengths, H=4, G=2, E=E)
    compare(dev, "attention_backward", args)
