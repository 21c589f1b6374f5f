"""Models whose base weights are kept in 8 or 4 bits, on a GPU: each is the model of the numbers
that its codes mean in bf16, and its samples are the trainer's."""

import numpy as np
import pytest
import torch
from support.op_devices import device
from support.tiny_models import as_double, error, folder, place_of
from support.tiny_models import logprobs as in_transformers
from test_quantized_model import TYPES, logprobs, sample_and_train, tokens_of, trained, widened
from tinsmith.models.registry import load_model
from transformers import AutoModelForCausalLM

on_gpus = pytest.mark.parametrize("on", ("cuda", "cuda-emulated"), indirect=True)
SEEDS = range(4)


@pytest.mark.parametrize(("name", "kind"), [("qwen3-tied", "int8"), ("qwen3_moe", "int4")])
def test_a_model_is_that_of_the_numbers_its_weights_are_kept_as(name: str, kind: str) -> None:
    """To the bit where the products with bf16 weights have the order of sums that blocks have: that
    of cuBLASLt's stand-in."""
    device("cuda-emulated")
    model = load_model(folder(name), weights=kind, device="cuda-emulated")
    assert set(model.packed.values()) == ({"int8"} if kind == "int8" else {"int8", "int4"})
    wide = load_model(widened(name, kind), device="cuda-emulated")
    assert model.core.weight_bytes < wide.core.weight_bytes
    for got, wanted in zip(trained(model, (37, 1)), trained(wide, (37, 1)), strict=True):
        np.testing.assert_array_equal(got, wanted)


@on_gpus
@pytest.mark.parametrize("kind", TYPES)
def test_log_probabilities_err_no_more_than_torchs_in_bf16(on: str, kind: str) -> None:
    place = widened("llama", kind)
    model, exact_model = load_model(folder("llama"), weights=kind, device=on), as_double(place)
    torchs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    ratios = []
    for seed in SEEDS:
        tokens = tokens_of(model, 40, seed)
        places = torch.arange(39), torch.from_numpy(tokens[1:].astype(np.int64))
        with torch.no_grad():
            exact, half = (in_transformers(one, tokens)[places] for one in (exact_model, torchs))
        ours = error(logprobs(model, tokens), exact.numpy())
        ratios.append(np.log(ours / error(half.float().numpy(), exact.numpy())))
    assert np.exp(np.mean(ratios)) < 1.05


@on_gpus
@pytest.mark.parametrize(("name", "kind"), [("llama", "int4"), ("qwen3_moe", "int8")])
def test_samples_have_the_trainers_log_probabilities(on: str, name: str, kind: str) -> None:
    sample_and_train(load_model(folder(name), weights=kind, device=on), samples=2)


def test_a_files_blocks_stay_where_a_kernel_knows_them() -> None:
    """Of Q4_K, Q6_K and Q8_0 the last."""
    device("cuda-emulated")
    place = place_of("qwen3", "q4_k")
    model, wide = (
        load_model(place, weights=one, device="cuda-emulated") for one in ("stored", "bf16")
    )
    assert set(model.packed.values()) == {"int8"} and not wide.packed
    tokens = tokens_of(model, 20)
    np.testing.assert_array_equal(logprobs(model, tokens), logprobs(wide, tokens))
