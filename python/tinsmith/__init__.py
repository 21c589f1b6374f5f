"""tinsmith: a local backend for the Tinker API, with its engine in C.

    with tinsmith.serve({"Qwen/Qwen3-0.6B": "path/to/the/model"}) as backend:
        client = backend.service_client()  # the tinker SDK's own ServiceClient

    model = tinsmith.Model("path/to/the/model")  # the same in this process, on NumPy or torch
    adapter = model.lora(rank=32)

    tinsmith.log(step=3, reward=0.7)  # a training loop's own numbers, on the server's page

`import tinsmith` needs NumPy only. The engine alone is `tinsmith._core`.
"""

from tinsmith import ops as ops
from tinsmith.api.adapter import Adapter
from tinsmith.api.client_log import log
from tinsmith.api.images import Image
from tinsmith.api.model import Model
from tinsmith.api.results import (
    ChatAnswer,
    DistillOutput,
    ForwardBackwardOutput,
    History,
    OptimStepOutput,
    SampledSequence,
    TopKLogprobs,
)
from tinsmith.api.sampler import Sampler
from tinsmith.api.tokenizer import Tokenizer
from tinsmith.server.clients import serve

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "ChatAnswer",
    "DistillOutput",
    "ForwardBackwardOutput",
    "History",
    "Image",
    "Model",
    "OptimStepOutput",
    "SampledSequence",
    "Sampler",
    "Tokenizer",
    "TopKLogprobs",
    "__version__",
    "log",
    "serve",
]


def __dir__() -> list[str]:
    return [*__all__, "ops"]
