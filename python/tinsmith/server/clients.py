"""Starts a server from Python: in a notebook, a script or a test.

`serve` runs the server in threads of the calling process, so you may use it inside a running event
loop. It gives you the SDK's own ServiceClient. The server's modules are imported only when `serve`
is called, so `import tinsmith` needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.engine.bases import memory_from
from tinsmith.models.registry import find_model
from tinsmith.system.home import checkpoints_folder
from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from tinsmith.server.backend import Backend

Models = str | Path | Sequence[str | Path] | Mapping[str, str | Path]


def serve(
    models: Models,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    allow_hosts: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "stored",
    weights_copy: bool = True,
    checkpoints: str | Path | None = None,
    threads: int = 0,
    memory: int | str | None = None,
    preload: bool | None = None,
    seed: int | None = None,
    expire: bool = False,
    checkpoints_max: int | str | None = None,
) -> Backend:
    """Starts a server and returns it when it is ready; use it in a `with` statement.

    models: {name: folder}; or folders or names in the Hugging Face cache, which are then also the
    models' names. port: 0 takes a free one; see `.url`. api_key: what clients must send; without it
    any key will do, and `host` must be this machine's loopback. allow_hosts: names by which clients
    know the server, beside `host`. allow_origins: web pages that may use it. checkpoints: the
    folder that save_state writes to, this server's alone; by default that of the user's data, which
    servers share. dtype: the type of products with base weights: "float32", "bfloat16", or "auto",
    which is bfloat16 for a bf16 model where that is faster on this processor, else float32, where
    weights of 8 to 4 bits (not FP8 and NF4) take inputs rounded to 16 bits. weights: what base
    weights are kept in, "stored" (as they come), "bf16", "int8" or "int4". weights_copy: whether
    int8 or int4 weights of a large model are kept in the user's cache, where later loads find them.
    threads: 0 takes all cores. memory: the bytes that models, their caches and runs may take
    together, also as text like "12G"; None is nine tenths of the machine's or the card's.
    When memory runs short, idle models are evicted. A model's cache of keys and values fills up to
    a quarter of what its weights leave, and keeps what prompts may begin with again (prefix cache).
    preload: whether models are loaded before this returns. By default one model alone is, and
    several are loaded on first use. seed: requests without a seed of their own draw the same each
    time the same run is made, also when it is resumed. Without it they draw afresh.
    expire: whether checkpoints are deleted when their ttl is over; by default a ttl is only a mark.
    checkpoints_max: the bytes that all checkpoints in the folder may take, also as text like "50G";
    a save that would pass it is refused.

        >>> with tinsmith.serve({"Qwen/Qwen3-0.6B": "path/to/Qwen3-0.6B"}) as backend:
        ...     service = backend.service_client()
        ...     client = service.create_lora_training_client("Qwen/Qwen3-0.6B").result()
        ...     client.get_info().model_data.model_name
        'Qwen/Qwen3-0.6B'

    Raises FileNotFoundError and ValueError with a sentence for a model that can't be served.
    """
    require_server()
    from tinsmith.server.backend import Backend

    return Backend(
        find_models(models),
        checkpoints=checkpoints_folder(checkpoints),
        share_checkpoints=checkpoints is None,
        host=host,
        port=port,
        api_key=api_key,
        allow_hosts=allow_hosts,
        allow_origins=allow_origins,
        device=device,
        dtype=dtype,
        weights=weights,
        weights_copy=weights_copy,
        threads=threads,
        memory=None if memory is None else memory_from(memory),
        preload=preload,
        seed=seed,
        expire=expire,
        checkpoints_max=None if checkpoints_max is None else memory_from(checkpoints_max),
    )


def require_server() -> None:
    """Raises ImportError with the fix where the server's packages are not installed."""
    packages = "httptools", "jinja2", "starlette", "tinker", "tokenizers", "uvicorn", "zstandard"
    for name in packages:
        if find_spec(name) is None:  # imported where needed; all of tinker never by a server
            fix = f"the server needs {name}: {pip_install('server')}"
            raise ImportError(fix, name=name)


def find_models(models: Models) -> dict[str, Path]:
    """The folder of each model by its name."""
    if isinstance(models, Mapping):
        return {str(name): find_model(str(path), {}) for name, path in models.items()}
    names = [models] if isinstance(models, str | Path) else list(models)
    return {str(name): find_model(str(name), {}) for name in names}
