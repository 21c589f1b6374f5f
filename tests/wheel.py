"""What an installed wheel must do, without the checkout on the path: its engine answers,
and its log-probabilities are float64's. The release's wheels are tested by it.

    python tests/wheel.py
"""

import numpy as np
from tinsmith import _core, ops

ROWS, WIDTH, VOCABULARY = 3, 8, 11


def main() -> None:
    assert _core.devices("cpu") == {"cpu": ""}
    random = np.random.default_rng(0)
    rows = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weight = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    ids, logprobs = ops.topk_logprobs(rows, weight, VOCABULARY)
    logits = rows.astype(float) @ weight.T.astype(float)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids, -1), atol=1e-5)
    print(f"the engine of {_core.__file__} answers")


if __name__ == "__main__":
    main()
