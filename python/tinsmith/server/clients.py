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
from tinsmith.engine.image_cache import IMAGE_TOKENS
from tinsmith.models.registry import find_model
from tinsmith.replicas.local import address_from, replicas_from
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
    api_key: str | Mapping[str, float] | None = None,
    allow_hosts: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    device: str = "auto",
    stages: int = 1,
    dtype: str = "auto",
    weights: str = "stored",
    weights_copy: bool = True,
    checkpoints: str | Path | None = None,
    threads: int = 0,
    memory: int | str | None = None,
    replicas: int | str = 1,
    mixed: bool = False,
    ray: str | None = None,
    preload: bool | None = None,
    seed: int | None = None,
    expire: bool = False,
    checkpoints_max: int | str | None = None,
    image_tokens: int = IMAGE_TOKENS,
) -> Backend:
    """Starts a server and returns it when it is ready; use it in a `with` statement.

    Parameters
    ----------
    models : dict, str, Path, or a list
        {name: folder}; or folders or names in the Hugging Face cache, which are then also the
        models' names.
    host : str
        The address to listen at.
    port : int
        0 takes a free one; see `.url`.
    api_key : str or dict, optional
        The key that clients must send, or {key: weight}: while several train, a key's runs get
        rows in proportion to its weight. Without it any key is accepted, and `host` must be this
        machine's loopback.
    allow_hosts : list of str
        Other names by which clients reach the server, besides `host`.
    allow_origins : list of str
        Origins of web pages that may use it.
    device, stages, dtype, weights, weights_copy, threads
        As in `tinsmith.Model`.
    checkpoints : str or Path, optional
        The folder that save_state writes to; no other server may use it. None: the folder in the
        user's data, which servers share.
    memory : int or str, optional
        The bytes that models, their caches and runs may take together, or text like "12G". None:
        nine tenths of the machine's or the card's. When memory runs short, idle models are evicted.
        A model's KV cache (with its prefix cache) takes up to a quarter of what its weights leave.
    replicas : int or "auto"
        How many processes compute, this one among them: each has a GPU, or its share of the cores
        and of `memory`. "auto" takes all GPUs of the device's kind. The results are the same.
    mixed : bool
        Whether replicas may join that give other bits.
    ray : str, optional
        The address of a running Ray cluster, of which this machine is a node, for the replicas:
        HOST:6379, or "auto". Each gets a GPU there, or as many CPUs as this process has threads.
        None: they are on this machine.
    preload : bool, optional
        Whether models are loaded before this returns. None: yes for a single model; several are
        loaded on first use.
    seed : int, optional
        Requests without their own seed draw the same each time the same run is made, also when it
        is resumed. None: random seeds.
    expire : bool
        Whether checkpoints are deleted when their ttl is over; otherwise a ttl is only recorded.
    checkpoints_max : int or str, optional
        The bytes that all checkpoints in the folder may take, or text like "50G". A save that would
        exceed it is refused.
    image_tokens : int
        The most tokens of an image, for models that take images.

    Returns
    -------
    Backend
        It has `.url`, and makes the SDK's ServiceClient with `.service_client()`.

    Raises
    ------
    FileNotFoundError, ValueError
        If a model can't be served.
    ImportError
        If a package of the server is not installed.

    Examples
    --------
    >>> with tinsmith.serve({"Qwen/Qwen3-0.6B": "path/to/Qwen3-0.6B"}) as backend:
    ...     service = backend.service_client()
    ...     client = service.create_lora_training_client("Qwen/Qwen3-0.6B").result()
    ...     client.get_info().model_data.model_name
    'Qwen/Qwen3-0.6B'
    """
    require_server()
    from tinsmith.server.backend import Backend
    from tinsmith.server.service.config import ServerConfig

    config = ServerConfig(
        find_models(models),
        checkpoints=checkpoints_folder(checkpoints),
        share_checkpoints=checkpoints is None,
        host=host,
        port=port,
        api_key=api_key,
        allow_hosts=allow_hosts,
        allow_origins=allow_origins,
        device=device,
        stages=stages,
        dtype=dtype,
        weights=weights,
        weights_copy=weights_copy,
        threads=threads,
        memory=None if memory is None else memory_from(memory),
        replicas=replicas_from(replicas),
        mixed=bool(mixed),
        ray=None if ray is None else address_from(ray),
        preload=preload,
        seed=seed,
        expire=expire,
        checkpoints_max=None if checkpoints_max is None else memory_from(checkpoints_max),
        image_tokens=image_tokens,
    )
    return Backend(config)


def require_server() -> None:
    """Raises ImportError with the fix if the server's packages are not installed."""
    packages = "httptools", "jinja2", "starlette", "tinker", "tokenizers", "uvicorn", "zstandard"
    for name in packages:
        if find_spec(name) is None:  # imported where needed; a server never imports all of tinker
            fix = f"the server needs {name}: {pip_install('server')}"
            raise ImportError(fix, name=name)


def find_models(models: Models) -> dict[str, Path]:
    """The folder of each model by its name."""
    if isinstance(models, Mapping):
        return {str(name): find_model(str(path), {}) for name, path in models.items()}
    names = [models] if isinstance(models, str | Path) else list(models)
    return {str(name): find_model(str(name), {}) for name in names}
