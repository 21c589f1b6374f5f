"""Models with gated delta networks against transformers in float64, on sequences around the pages
by which they are summed: log-probabilities, gradients, and ten steps of AdamW."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import (
    SPECS,
    call,
    cpu_only,
    cut,
    datum,
    error,
    logprobs,
    reference,
    targets_of,
    tokens_of,
)
from support.training_cases import ADAM, adapter_of, batch, check, torch_losses

pytestmark = [pytest.mark.usefixtures("on"), cpu_only]
NAMES = [name for name in SPECS if name.startswith("qwen3_5")]


@pytest.mark.parametrize("length", (1, 3, 63, 64, 65, 128, 200))
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_of_every_token_at_lengths_around_a_page(name: str, length: int) -> None:
    vocab = SPECS[name].config["vocab_size"]
    one = datum(tokens_of(name, length), np.tile(np.arange(vocab), (length, 1)))
    (found,), _ = call(adapter_of(name, seed=1, rank=1), [one], backward=False)
    with torch.no_grad():
        plain = targets_of(logprobs(reference(name), one.tokens), one).numpy()
    adapter = adapter_of(name, rank=1)
    adapter.write("weights", np.zeros(adapter.size, np.float32))
    (base,), _ = call(adapter, [one], backward=False)
    assert np.abs(base - plain).max() < 5e-5
    assert error(found, plain) > 0.01  # what an adapter changes would have been seen


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_sequences_that_end_around_a_page(name: str) -> None:
    check(name, adapter_of(name, rank=3), batch(name, (65, 63, 64, 3, 200)))


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_on_pages_equal_torch(name: str) -> None:
    data = [replace(one, inputs={}) for one in batch(name, (70, 5))]
    adapter, start = adapter_of(name, rank=4), adapter_of(name, rank=4)
    losses = []
    for _ in range(10):
        losses.append(call(adapter, data)[1])
        adapter.optim_step(**ADAM)
    wanted, _, matrices = torch_losses(name, start, data, 10, ADAM, torch.float64)
    assert losses[9] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    for key, matrix in cut(adapter, adapter.read("weights")).items():
        assert error(matrix, matrices[key]) < 2e-4, key
