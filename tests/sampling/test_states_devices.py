"""States that sequences keep, on every device: the trainer's log-probabilities, recorded steps,
and what one sequence copies from another."""

from typing import Any

import numpy as np
import pytest
from support.delta_model import core, tokens_of
from support.sampler_loop import finish
from support.tiny_models import DEVICE, assert_same, call, datum
from tinsmith import _core

pytestmark = pytest.mark.usefixtures("on")


def run(sampler: _core.Sampler, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, options in enumerate(asked):
        sampler.add(number, **options)
    return finish(sampler, *range(len(asked)))


@pytest.mark.parametrize("graphs", [True, False])
def test_sampled_tokens_have_the_trainers_logprobs(graphs: bool) -> None:
    """Sequences whose pages end at different times, two of which share a prompt; then they all
    begin again with what is kept."""
    sampler = _core.Sampler(core(), tokens=1 << 14, graphs=graphs)
    lengths = (1, 62, 63, 64, 65, 128, 128)
    asked = [
        {"prompt": tokens_of(length), "max_tokens": 6, "seed": seed}
        for seed, length in enumerate(lengths)
    ]
    results = run(sampler, asked)
    assert sampler.reused == 127
    _, replays = sampler.replays
    assert (replays > 0) == (graphs and DEVICE.get().startswith("cuda"))
    for result, options in zip(results, asked, strict=True):
        (sample,) = result["samples"]
        whole = np.concatenate([options["prompt"], sample["tokens"]])
        used = _core.Adapter(core(), rank=1)
        (found,), _ = call(used, [datum(whole[:-1], whole[1:])], backward=False)
        np.testing.assert_array_equal(sample["logprobs"], found[len(options["prompt"]) - 1 :])
    for again, result in zip(run(sampler, asked), results, strict=True):
        assert_same(again, result)
    assert sampler.reused > 127 + 3 * 64
