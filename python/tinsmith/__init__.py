"""tinsmith: a local backend for the Tinker API, with its engine in C.

    with tinsmith.serve({"Qwen/Qwen3-0.6B": "path/to/the/model"}) as backend:
        client = backend.service_client()  # the tinker SDK's own ServiceClient

The engine alone is `tinsmith._core`: base models, LoRA adapters and samplers on NumPy arrays.
"""

from tinsmith.clients import serve

__all__ = ["serve"]
