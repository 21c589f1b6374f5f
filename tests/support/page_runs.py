"""Runs for the page's tests: what a client did on the demonstration's model, and saw of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import make_datum
from tinsmith.chat.text import load_tokenizer
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.demo.demo import MODEL
from tinsmith.engine.call_log import Call
from tinsmith.server.backend import Backend

ADAM = tinker.AdamParams(learning_rate=2e-3, beta2=0.95)
QUESTION = "<|im_start|>user\nHow do I get from Porto to Lima?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Action: get_route\nfrom: Porto, to: Lima<|im_end|>"
MARKUP = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
LONG = "s-long:train:0"
LONG_STEPS = 2400


@dataclass
class Runs:
    """The runs by what they are, and what the client saw of them."""

    taught: str  # trained, sampled, and scored by the base model; it has failed once, and saved
    markup: str  # the same of markup, which is its name too
    empty: str  # no step yet
    samples: list[tinker.SampledSequence]
    teacher: list[float]  # log-probabilities of the first sample's tokens
    last: dict[str, float]  # the optimizer's metrics of the last step
    client: tinker.TrainingClient  # of `taught`


def ids(text: str) -> list[int]:
    return load_tokenizer(MODEL).encode(text, add_special_tokens=False).ids


def datum(prompt: str, answer: str) -> tinker.Datum:
    """A prompt without weight, and an answer with."""
    before, behind = ids(prompt), ids(answer)
    tokens = before + behind
    weights = np.arange(1, len(tokens)) >= len(before)
    return make_datum(tokens[:-1], tokens[1:], weights=weights * 1.0)


def learned(prompt: list[int], sample: Any, teacher: list[float]) -> tinker.Datum:
    """A sample whose advantages are the teacher's log-probabilities minus its own."""
    tokens = [*prompt, *sample.tokens]
    zeros = np.zeros(len(prompt) - 1)
    past = np.concatenate([zeros, sample.logprobs])
    advantages = np.concatenate([zeros, np.asarray(teacher) - sample.logprobs])
    return make_datum(tokens[:-1], tokens[1:], logprobs=past, advantages=advantages)


def step(client: tinker.TrainingClient) -> dict[str, float]:
    """A step of cross-entropy; the optimizer's metrics."""
    client.forward_backward([datum(QUESTION, ANSWER)] * 2, "cross_entropy")
    return client.optim_step(ADAM).result().metrics


def work(backend: Backend, service: tinker.ServiceClient) -> Runs:
    """Trains, samples, distills, fails and saves."""
    make = service.create_lora_training_client
    about = {"recipe": "routes", "dataset": "synthetic <b>"}
    client = make(str(MODEL), rank=8, seed=1, user_metadata=about).result()
    for _ in range(3):
        step(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(ids(QUESTION))
    params = tinker.SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    samples = sampler.sample(prompt, 2, params).result().sequences
    base = service.create_sampling_client(base_model=str(MODEL)).result()
    whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *samples[0].tokens])
    scores = base.compute_logprobs(whole).result()[prompt.length :]
    client.forward_backward([learned(prompt.to_ints(), samples[0], scores)], "importance_sampling")
    last = client.optim_step(ADAM).result().metrics
    client.save_state("kept").result()
    client.save_weights_for_sampler("gone-soon", ttl_seconds=3600).result()
    with pytest.raises(tinker.TinkerError):
        client.forward([datum(QUESTION, ANSWER)], "no_such_loss").result()
    other = make(str(MODEL), rank=2, seed=2, user_metadata={"name": MARKUP, MARKUP: MARKUP})
    other.result().forward_backward([datum(QUESTION, MARKUP)], "cross_entropy")
    other.result().optim_step(ADAM).result()
    empty = make(str(MODEL), rank=2, seed=3).result()
    for number in range(4):
        parts = {f"time/part_{part}": 0.5 for part in range(9)}
        values = {"reward": number / 4, "env/right": number / 8, **parts}
        backend.history.log(client.model_id, number, values)
    backend.notifier.flush()
    names = client.model_id, other.result().model_id, empty.model_id
    return Runs(*names, list(samples), scores, last, client)


def many(backend: Backend) -> None:
    """A run of so many steps that the history keeps every second, the last with a warning."""
    for number in range(LONG_STEPS):
        began = 10.0 * number
        report = {"loss": 4000.0 / (number + 100), "loss_tokens": 8.0, "grad_norm": 1.0}
        facts = {
            "at": 1e9,
            "step": number,
            "arrived": began,
            "began": began + 2,
            "ended": began + 6,
        }
        backend.history(
            Call("optim_step", LONG, base="elsewhere", request=AdamParams(), result=report, **facts)
        )
    _, about = backend.history.about(LONG) or (0.0, {})
    assert about["steps"] == LONG_STEPS
    warning = "weights grew by a factor of 2000"
    track = backend.history._open[LONG]
    track.about["warning"] = {"at": 1e9, "step": LONG_STEPS - 1, "detail": warning}
    track.changed = True
