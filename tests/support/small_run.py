"""What the tests of the server through the SDK share: a small run, its data, and its numbers."""

import numpy as np
import tinker
from conftest import logprobs, make_datum

ADAM = tinker.AdamParams(learning_rate=1e-3)
PROMPT = tinker.ModelInput.from_ints([10, 20, 30, 40, 50])


def make_client(service: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=seed).result()


def make_data() -> list[tinker.Datum]:
    return [
        make_datum([11, 12, 13, 14, 15], [12, 13, 14, 15, 16], weights=[0, 1, 1, 0.5, 1]),
        make_datum([21, 22, 23], [22, 23, 24], weights=[1, -1, 2]),
    ]


def train(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Some steps on the same data; the losses."""
    losses = []
    for _ in range(steps):
        output = client.forward_backward(make_data(), "cross_entropy")
        client.optim_step(ADAM)
        losses.append(output.result().metrics["loss:sum"])
    return losses


def read(client: tinker.TrainingClient) -> np.ndarray:
    """Log-probabilities that stand for the adapter's state."""
    return np.concatenate(logprobs(client.forward(make_data(), "cross_entropy").result()))


def sample(client: tinker.SamplingClient, count: int = 1, **params) -> list[list[int]]:
    reply = client.sample(PROMPT, count, tinker.SamplingParams(**params)).result()
    return [list(sequence.tokens) for sequence in reply.sequences]
