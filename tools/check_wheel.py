"""What an installed wheel must do, without the checkout on the path: its engine's log-probabilities
are float64's, and the demo's model learns. The release's wheels are tested by it.

    python tools/check_wheel.py [--cuda]

--cuda: it must have the CUDA device's library too, whatever this machine's GPU says of it."""

import sys
from pathlib import Path

import numpy as np
import tinsmith
from tinsmith import _core, ops

ROWS, WIDTH, VOCABULARY = 3, 8, 11
TOKENS, WEIGHTS = np.arange(5, 25), np.ones(19, np.float32)


def answers() -> None:
    """The log-probabilities of a product, beside float64's."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weight = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    ids, logprobs = ops.topk_logprobs(rows, VOCABULARY, weight=weight)
    logits = rows.astype(float) @ weight.T.astype(float)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids, -1), atol=1e-5)


def learns() -> tuple[float, float]:
    """The demo model's loss in nats on a sequence, before and after a step on it."""
    model = tinsmith.Model(Path(tinsmith.__file__).parent / "demo" / "model", device="cpu")
    adapter = model.lora(rank=4)

    def loss() -> float:
        return float(
            adapter.forward_backward(TOKENS[:-1], TOKENS[1:], np.ones(19, np.float32)).loss
        )

    before = loss()
    adapter.optim_step(learning_rate=1e-2)
    return before, loss()


def main() -> None:
    assert _core.devices("cpu") == {"cpu": ""}
    if "--cuda" in sys.argv[1:]:
        assert (Path(_core.__file__).parent / "libtinsmith_cuda.so").is_file()
        reason = _core.devices("cuda")["cuda"]
        assert "can't be loaded" not in reason and "install tinsmith again" not in reason, reason
    answers()
    before, after = learns()
    assert after < before, (before, after)
    print(f"{_core.__file__} answers, and a step takes a loss from {before:.2f} to {after:.2f}")


if __name__ == "__main__":
    main()
