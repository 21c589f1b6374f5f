"""A small loop as any Tinker SDK from 0.16 to 0.38 runs it, and the digest of all its numbers.

    TINKER_API_KEY=tml-local python tools/peers/sdk_loop.py URL MODEL

It uses nothing but the SDK that is on its path (`sdks.py` puts one there), so it names only what
all of them have. Two SDKs whose digests agree got the same bits.
"""

import hashlib
import sys

import numpy as np
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
PROMPT = [10, 20, 30, 40, 50]


def tensor(values: list, dtype: str, shape: list[int] | None = None) -> types.TensorData:
    """Flat numbers as the SDK's tensor."""
    return types.TensorData(data=values, dtype=dtype, shape=shape or [len(values)])


def datum(tokens: list[int], targets: types.TensorData, **inputs: types.TensorData) -> types.Datum:
    """A datum with its targets."""
    source = types.ModelInput.from_ints(tokens)
    return types.Datum(model_input=source, loss_fn_inputs={"target_tokens": targets, **inputs})


def plain() -> list[types.Datum]:
    """For cross_entropy: weights of any sign, none at all, and several targets a position."""
    weights = tensor([0.0, 1.0, -1.0, 0.5, 0.1], "float32")
    ids = tensor([12, 13, 14, 15, 16, 17], "int64", [3, 2])
    shares = tensor([0.25, 0.75, 1.0, 0.0, 0.3, 0.7], "float32", [3, 2])
    return [
        datum([11, 12, 13, 14, 15], tensor([12, 13, 14, 15, 16], "int64"), weights=weights),
        datum([21, 22, 23], tensor([22, 23, 24], "int64")),
        datum([31, 32, 33], ids, weights=shares),
    ]


def rewarded(logprobs: list[float]) -> list[types.Datum]:
    """For the policy losses."""
    return [
        datum(
            [11, 12, 13, 14, 15],
            tensor([12, 13, 14, 15, 16], "int64"),
            logprobs=tensor(logprobs, "float32"),
            advantages=tensor([1.0, -1.0, 0.0, 2.0, -0.5], "float32"),
        )
    ]


def values(found: types.ForwardBackwardOutput) -> list[float]:
    """The log-probabilities of an output, datum by datum."""
    return [value for one in found.loss_fn_outputs for value in one["logprobs"].data]


def there(client):
    """A client. Since SDK 0.34 a future comes first."""
    return client.result() if hasattr(client, "result") else client


class Digest:
    """The numbers of a loop."""

    def __init__(self) -> None:
        self._all = hashlib.sha256()

    def add(self, name: str, *numbers: float) -> None:
        """The numbers of a step, which is printed with its own digest."""
        bits = np.asarray(numbers, np.float64).tobytes()
        self._all.update(bits)
        print(f"{name:28} {len(numbers):4} numbers  {hashlib.sha256(bits).hexdigest()[:12]}")

    def output(self, name: str, found: types.ForwardBackwardOutput) -> None:
        """What a training call has answered."""
        self.add(name, *values(found), found.metrics["loss:sum"])

    def text(self) -> str:
        """Of all that was added."""
        return self._all.hexdigest()[:16]


def loop(service: tinker.ServiceClient, model: str) -> str:
    """Every call that the SDKs share; the digest."""
    digest = Digest()
    client = there(service.create_lora_training_client(model, rank=4, seed=1))
    for step in range(2):
        found = client.forward_backward(plain(), "cross_entropy").result()
        digest.output(f"forward_backward {step}", found)
        client.optim_step(ADAM).result()
    found = client.forward(plain()[:2], "cross_entropy").result()
    digest.output("forward", found)
    logprobs = [value - 0.1 for value in found.loss_fn_outputs[0]["logprobs"].data]
    for loss in ("importance_sampling", "ppo"):
        digest.output(loss, client.forward_backward(rewarded(logprobs), loss).result())
    client.optim_step(ADAM).result()
    found = client.forward_backward_custom(plain()[:2], custom).result()
    digest.add("custom", *values(found), found.metrics["square"])
    client.optim_step(ADAM).result()
    saved = client.save_state("state").result().path
    again = there(service.create_training_client_from_state(saved))
    digest.output("from_state", again.forward(plain(), "cross_entropy").result())
    saved = client.save_weights_for_sampler("sampler").result().path
    sample(there(service.create_sampling_client(saved)), digest)
    return digest.text()


def custom(data: list[types.Datum], logprobs: list):
    """A loss of one's own: the square of each log-probability."""
    loss = sum((row**2).sum() for row in logprobs)
    return loss, {"square": loss.item()}


def sample(client: tinker.SamplingClient, digest: Digest) -> None:
    """Samples, and a prompt's scores."""
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=5, stop=[0])
    found = client.sample(
        prompt=prompt,
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    for one in found.sequences:
        digest.add("sample", *one.tokens, *(one.logprobs or []))
    digest.add("prompt_logprobs", *(found.prompt_logprobs or [])[1:])
    rows = found.topk_prompt_logprobs or []
    pairs = [pair for row in rows for pair in row or []]
    digest.add("topk_prompt_logprobs", *(value for pair in pairs for value in pair))
    digest.add("compute_logprobs", *client.compute_logprobs(prompt).result()[1:])


if __name__ == "__main__":
    url, name = sys.argv[1:]
    print("result: digest", loop(tinker.ServiceClient(base_url=url), name))
