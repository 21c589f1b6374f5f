"""What a layer gives a card to do, as the emulated one counts it: products that read one input are
one, residuals pass through products, and nothing is filled with zeros only to be added to."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import op_devices
from support.op_cases import frozen
from support.op_devices import Frozen, emulated_library
from support.sampler_loop import run
from support.tiny_models import SPECS, call, datum, error, make, randomize
from tinsmith import _core
from tinsmith.models.registry import load_model

# Rows of weights, and biases, that fill up what memory is aligned to: they lie behind one another.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 16}
NAMES = {"qwen3": 4, "qwen2": 8}  # with head norms, and with biases; key-value heads
DELTA = {"linear_num_value_heads": 4, "linear_value_head_dim": 32}
EXPERTS = {"qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32}}
DATA = [
    datum(np.arange(first, first + length, dtype=np.int32)) for first, length in ((3, 9), (20, 5))
]


def adapter_on(folder: Path, device: str) -> _core.Adapter:
    if device == "cuda-emulated":
        emulated_library()
    return randomize(_core.Adapter(load_model(folder, device=device).core, rank=4))


def written(path: Path, name: str, layers: int = 2) -> Path:
    sizes = {**SIZES, "num_key_value_heads": NAMES.get(name, 4), "num_hidden_layers": layers}
    sizes |= EXPERTS.get(name, {})
    if name == "qwen3_5":
        sizes |= {**DELTA, "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]}
    spec = SPECS[name]
    spec = replace(spec, config={**spec.config, **sizes}, dtype=torch.bfloat16)
    return make(spec, path / f"{name}-{layers}")


@pytest.fixture(scope="module")
def given() -> Callable[[], np.ndarray]:
    """How many kernels, products and copies the card has been given."""
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_given.restype = ctypes.c_int64
    return lambda: np.array([library.cuda_emulated_given(kind) for kind in range(3)])


def of_layer(
    given: Callable[[], np.ndarray], path: Path, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """What a layer gives to do: forward, and back."""

    def of_call(layers: int, backward: bool) -> np.ndarray:
        adapter = adapter_on(written(path, name, layers), "cuda-emulated")
        call(adapter, DATA, backward=backward)  # cuBLASLt's algorithms are picked
        before = given()
        call(adapter, DATA, backward=backward)
        return given() - before

    forward, both = (of_call(3, backward) - of_call(2, backward) for backward in (False, True))
    return forward, both - forward


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_makes_four_products_each_way(
    given: Callable[[], np.ndarray], tmp_path: Path, name: str
) -> None:
    """For q, k and v; attention's output; gate and up; down. And no copy. Two kernels add its
    gradients to the norm."""
    forward, back = of_layer(given, tmp_path, name)
    biases = int(name == "qwen2")  # rounded by one kernel for q, k and v
    assert forward.tolist() == [14 + biases, 4, 0]
    assert back.tolist() == [27, 4, 0]


def test_a_mixture_makes_one_product_of_all_gates_and_ups(
    given: Callable[[], np.ndarray], tmp_path: Path
) -> None:
    """By a kernel of our own. Other products are q, k and v's, attention's output's and the
    router's. The host fetches how many pairs each expert has."""
    forward, _ = of_layer(given, tmp_path, "qwen3_moe")
    assert forward.tolist() == [27, 3, 1]


def test_a_gated_delta_net_makes_one_product_of_its_input(
    given: Callable[[], np.ndarray], tmp_path: Path
) -> None:
    """For q, k, v, z, b and a; its output; gate and up; down."""
    forward, back = of_layer(given, tmp_path, "qwen3_5")
    assert forward.tolist() == [21, 4, 0]
    assert back.tolist() == [43, 4, 0]


@pytest.mark.parametrize("kept", ["bf16", "int4"])
@pytest.mark.parametrize("rows", [1, 70])
def test_a_joint_product_has_the_bits_of_single_ones(kept: str, rows: int) -> None:
    dev, rng = op_devices.device("cuda-emulated"), np.random.default_rng(3)
    widths, D = (64, 64, 128, 128, 8, 8), 64
    x, w = rng.standard_normal((rows, D)), frozen(rng, sum(widths), D, kept)
    step, given = sum(widths) + 24, {"bias": None, "plus": None, "T": rows, "D": D}

    def product(w: Frozen) -> np.ndarray:
        N = len(w.value)
        return dev.call("linear", y=(rows, N), x=x, w=w, N=N, step=step, **given)["y"]

    rows_of = [slice(end - N, end) for N, end in zip(widths, np.cumsum(widths), strict=True)]
    single = [product(Frozen(w.value[part], w.dtype)) for part in rows_of]
    np.testing.assert_array_equal(np.concatenate(single, axis=1), product(w))


@pytest.mark.parametrize("name", [*NAMES, "qwen3_5"])
def test_joint_products_give_what_single_ones_do(tmp_path: Path, name: str) -> None:
    """The CPU makes a product of each matrix."""
    found = []
    for device in ("cpu", "cuda-emulated"):
        adapter = adapter_on(written(tmp_path, name), device)
        logprobs, _ = call(adapter, DATA)
        found.append((np.concatenate(logprobs), adapter.read("gradients")))
        alone = np.concatenate([call(adapter, [one], backward=False)[0][0] for one in DATA])
        np.testing.assert_array_equal(alone, found[-1][0])
    (logprobs, gradients), (theirs, others) = found
    assert error(theirs, logprobs) < 0.02
    assert error(others, gradients) < 0.15  # bf16's, as where no product is joint


def test_what_joint_products_sample_has_the_trainers_logprobs(tmp_path: Path) -> None:
    """Decoded row by row over a page's border, and a prompt at once."""
    adapter = adapter_on(written(tmp_path, "qwen3_5"), "cuda-emulated")
    prompt = np.arange(3, 61, dtype=np.int32)
    asked = {"max_tokens": 9, "prompt_logprobs": True}
    result = run(_core.Sampler(adapter.model, tokens=1024), prompt, adapter, **asked)
    (sample,) = result["samples"]
    whole = np.concatenate([prompt, sample["tokens"]])
    (trained,), _ = call(adapter, [datum(whole[:-1], whole[1:])], backward=False)
    found = np.concatenate([result["prompt_logprobs"][1:], sample["logprobs"]])
    np.testing.assert_array_equal(found, trained)
