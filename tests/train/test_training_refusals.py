"""What training refuses, in a sentence, on every device: the adapter is then as it was."""

from typing import Any

import numpy as np
import pytest
from support.tiny_models import call, cpu_only, loaded
from support.training_cases import ADAM, adapter_of, batch
from tinsmith import _core

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]


def plain(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call, with some of them replaced."""
    arguments = {
        "tokens": np.arange(6, dtype=np.int32),
        "lengths": np.array([4, 2], np.int32),
        "targets": np.arange(6, dtype=np.int32),
        "counts": np.array([1, 1], np.int32),
        "loss": "cross_entropy",
        "inputs": {"weights": np.ones(6, np.float32)},
        "config": {},
    }
    return arguments | changes


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def policy(**changes: Any) -> dict[str, np.ndarray]:
    inputs = {"logprobs": np.zeros(6, np.float32), "advantages": np.ones(6, np.float32)}
    return {name: array for name, array in (inputs | changes).items() if array is not None}


def weights(*values: float) -> dict[str, np.ndarray]:
    return {"weights": np.array(values, np.float32)}


ONES = np.ones(161, np.int32)
WIDE = {"counts": ints(2, 1), "targets": np.arange(10, dtype=np.int32)}
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "tokens with gaps": (
        ValueError, "tokens must be C-contiguous", {"tokens": np.arange(12, dtype=np.int32)[::2]},
    ),
    "tokens in another byte order": (
        ValueError, "tokens .* of native byte order", {"tokens": np.arange(6, dtype=">i4")},
    ),
    "tokens of another type": (
        TypeError, "tokens must be a one-dimensional int32", {"tokens": np.arange(6)},
    ),
    "tokens of two dimensions": (
        TypeError, "not 2-dimensional int32", {"tokens": np.zeros((2, 3), np.int32)},
    ),
    "token too large": (IndexError, "131", {"tokens": ints(0, 1, 131, 3, 4, 5)}),
    "token negative": (IndexError, "-1", {"tokens": ints(0, 1, 2, 3, 4, -1)}),
    "target too large": (IndexError, "500", {"targets": ints(0, 1, 2, 3, 4, 500)}),
    "target negative": (IndexError, "-100", {"targets": ints(-100, 1, 2, 3, 4, 5)}),
    "empty datum": (ValueError, "datum 1 is empty", {"lengths": ints(6, 0)}),
    "negative length": (ValueError, "datum 1", {"lengths": ints(8, -2)}),
    "lengths too short": (ValueError, "tokens", {"lengths": ints(4, 1)}),
    "lengths too long": (ValueError, "tokens", {"lengths": ints(4, 3)}),
    "no targets a token": (ValueError, "datum 1 has 0 targets", {"counts": ints(1, 0)}),
    "too few targets": (ValueError, "targets", {"targets": ints(0, 1, 2)}),
    "too many targets": (ValueError, "targets", {"counts": ints(1, 3)}),
    "weights too short": (ValueError, "weights", {"inputs": weights(1, 1, 1, 1, 1)}),
    "weight NaN": (ValueError, "weights.*nan", {"inputs": weights(1, 1, np.nan, 1, 1, 1)}),
    "weight infinite": (ValueError, "weights.*inf", {"inputs": weights(1, 1, 1, 1, 1, np.inf)}),
    "unknown loss": (ValueError, "no loss is called 'magic'", {"loss": "magic"}),
    "unknown input": (ValueError, "wieghts", {"inputs": {"wieghts": np.ones(6, np.float32)}}),
    "unknown key": (ValueError, "beta", {"config": {"beta": 1.0}}),
    "no advantages": (
        ValueError, "ppo.*advantages", {"loss": "ppo", "inputs": policy(advantages=None)},
    ),
    "advantage NaN": (
        ValueError,
        "advantages.*nan",
        {"loss": "ppo", "inputs": policy(advantages=np.full(6, np.nan, np.float32))},
    ),
    "logprob infinite": (
        ValueError,
        "logprobs.*-inf",
        {"loss": "ppo", "inputs": policy(logprobs=np.full(6, -np.inf, np.float32))},
    ),
    "many targets for ppo": (
        ValueError,
        "datum 0 has 2 targets a position; ppo takes one",
        WIDE | {"loss": "ppo", "inputs": {key: np.ones(10, np.float32) for key in policy()}},
    ),
    "clip not a number": (
        ValueError,
        "clip_low_threshold",
        {"loss": "ppo", "inputs": policy(), "config": {"clip_low_threshold": float("nan")}},
    ),
    "no beta": (ValueError, "dro needs beta", {"loss": "dro", "inputs": policy()}),
    "a difference of probabilities above 1": (
        ValueError,
        "dppo: delta is a difference of probabilities, from 0 to 1, not 1.5",
        {"loss": "dppo", "inputs": policy(), "config": {"delta": 1.5}},
    ),
    "a mean of no tokens": (
        FloatingPointError,
        "gspo is not finite",
        {"loss": "gspo", "inputs": policy(sequence_ratio_mask=np.zeros(6, np.float32))},
    ),
    "a threshold NaN": (
        ValueError,
        "clip_low_threshold at position 0 is nan",
        {"loss": "cispo", "inputs": policy(clip_low_threshold=np.full(6, np.nan, np.float32))},
    ),
    "longer than the context": (
        ValueError,
        "161.*160",
        {"tokens": ONES, "targets": ONES, "lengths": ints(161), "counts": ints(1), "inputs": {}},
    ),
    "a loss that overflows": (
        FloatingPointError,
        "importance_sampling is.*-inf",
        {
            "loss": "importance_sampling",
            "inputs": policy(logprobs=np.full(6, -1e4, np.float32)),
        },
    ),
    "a gradient that overflows": (
        FloatingPointError, "finite", {"inputs": weights(*[3e38] * 6)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_error_adds_nothing_and_says_why(case: str) -> None:
    kind, sentence, changes = BAD[case]
    adapter = adapter_of("qwen3")
    call(adapter, batch("qwen3"))
    before = [adapter.read(what) for what in ("weights", "gradients", "m", "v")]
    with pytest.raises(kind, match=sentence):
        adapter.forward_backward(**plain(**changes))
    for old, what in zip(before, ("weights", "gradients", "m", "v"), strict=True):
        np.testing.assert_array_equal(adapter.read(what), old)
    _, loss = adapter.forward_backward(**plain())  # still usable
    assert np.isfinite(loss)
    clean = adapter_of("qwen3")
    call(clean, batch("qwen3"))
    clean.forward_backward(**plain())
    assert adapter.optim_step(**ADAM) == clean.optim_step(**ADAM)
    np.testing.assert_array_equal(adapter.read("weights"), clean.read("weights"))


def test_an_empty_batch_is_an_error_or_nothing() -> None:
    adapter = adapter_of("qwen3")
    empty = np.zeros(0, np.int32)
    arguments = plain(tokens=empty, lengths=empty, targets=empty, counts=empty, inputs={})
    with pytest.raises(ValueError, match="datum"):
        adapter.forward_backward(**arguments)
    assert not adapter.read("gradients").any()


@pytest.mark.parametrize("what", ("weights", "gradients", "m", "v"))
def test_only_finite_vectors_of_the_right_size_are_written(what: str) -> None:
    adapter = adapter_of("qwen3")
    flat = np.random.default_rng(0).random(adapter.size).astype(np.float32)
    adapter.write(what, flat)
    np.testing.assert_array_equal(adapter.read(what), flat)
    for bad in (np.float32("nan"), np.float32("inf")):
        broken = flat.copy()
        broken[-1] = bad
        with pytest.raises(ValueError, match="finite"):
            adapter.write(what, broken)
    with pytest.raises(ValueError, match=str(adapter.size)):
        adapter.write(what, flat[:-1])
    np.testing.assert_array_equal(adapter.read(what), flat)
    with pytest.raises(ValueError, match="moments"):
        adapter.read("moments")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -3}, "rank"),
        ({"rank": 5000}, "rank 5000 is more than 4096"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"attn": False, "mlp": False, "unembed": False}, "nothing to train|train"),
        ({"step_tokens": -1}, "step_tokens"),
    ],
)
def test_a_bad_adapter_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _core.Adapter(loaded("qwen3").core, **{"rank": 4, **options})


def test_a_snapshot_stays_and_is_not_trained() -> None:
    adapter = adapter_of("qwen3")
    before = adapter.read("weights")
    snapshot = adapter.snapshot()
    call(adapter, batch("qwen3"))
    adapter.optim_step(**ADAM)
    assert not np.array_equal(adapter.read("weights"), before)
    np.testing.assert_array_equal(snapshot.read("weights"), before)
    with pytest.raises(ValueError, match="snapshot"):
        call(snapshot, batch("qwen3"))
    with pytest.raises(ValueError, match="snapshot"):
        snapshot.optim_step(**ADAM)


@cpu_only
def test_what_the_machine_can_never_hold_is_refused_in_a_sentence() -> None:
    config = dict(loaded("qwen3").core.config) | {"vocab": 1 << 24, "width": 1 << 17}
    freq = np.ones(int(config["head_width"]) // 2, np.float32)
    with pytest.raises(MemoryError, match=r"the base model needs .* MiB .* memory in all"):
        _core.Model(config, freq).load("final_norm", -1, np.ones(1 << 17, np.float32))
