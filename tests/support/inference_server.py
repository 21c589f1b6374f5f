"""What the tests of OpenAI's and Anthropic's APIs share: a server with a small model, and a
checkpoint that answers with a tool call."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker
from conftest import make_datum
from tinsmith.chat.chat import Chat
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

from support.chat_models import CALL, WEATHER, make_model

ASKED = [{"role": "user", "content": "Weather in Zürich?"}]
SAID = f"I look 你 😀.\n{CALL}<|im_end|>"


@contextmanager
def serve(root: Path) -> Iterator[tuple[Backend, str]]:
    """A server on one model by the names `tiny` and `other`, and the path of a checkpoint trained
    to say SAID to ASKED."""
    folder = make_model(root / "model")
    models = {"tiny": folder, "other": folder}
    with Backend(
        ServerConfig(models, checkpoints=root / "saved", device="cpu", threads=1)
    ) as backend:
        with backend.service_client() as client:
            trainer = client.create_lora_training_client("tiny", rank=16, seed=1).result()
            chat = Chat(folder)
            prompt, said = chat.prompt(ASKED, [WEATHER]), chat.encode(SAID)
            tokens = prompt + said
            weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said)
            datum = make_datum(tokens[:-1], tokens[1:], weights=weights)
            for _ in range(80):
                trainer.forward_backward([datum], "cross_entropy")
                trainer.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
            trainer.save_state("weather").result()
            path = trainer.save_weights_for_sampler("weather").result().path
        yield backend, path


def drawn(backend: Backend, model: str, prompt: list[int], count: int = 1, **params: Any) -> list:
    """The sequences that the SDK samples for the same."""
    place = {"model_path": model} if model.startswith("tinker") else {"base_model": model}
    with backend.service_client() as client:
        sampler = client.create_sampling_client(**place).result()
        given = tinker.SamplingParams(**params)
        return sampler.sample(tinker.ModelInput.from_ints(prompt), count, given).result().sequences
