"""What the tests of the face share: sequences, soft targets, and all that training may change."""

import numpy as np
import tinsmith

RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(3, 280, length).astype(np.int32) for length in (17, 40, 5)]
PROMPT = [10, 20, 30, 40]


def state(adapter: tinsmith.Adapter) -> list[bytes]:
    """Everything that training an adapter changes."""
    vectors = [adapter.core.read(what).tobytes() for what in ("weights", "gradients", "m", "v")]
    return [*vectors, repr((adapter.step, adapter.core.pending)).encode()]


def soft_batch(k: int = 3) -> tuple[list, list, list]:
    """Sequences with (N, K) targets and weights."""
    inputs = [row[:-1] for row in TOKENS]
    targets = [RNG.integers(3, 280, (len(row), k)).astype(np.int32) for row in inputs]
    weights = [RNG.random((len(row), k)).astype(np.float32) for row in inputs]
    return inputs, targets, weights
