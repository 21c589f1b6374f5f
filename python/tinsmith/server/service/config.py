"""The settings of a server, as tinsmith.serve and the commands make them."""

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from tinsmith.engine.bases import memory_of
from tinsmith.engine.engine import GAP_SECONDS
from tinsmith.engine.image_cache import IMAGE_TOKENS
from tinsmith.server.http.overload import QUEUE_BYTES_MAX, Queue

# Besides the memory limit: the engine's queue and unread results take at most 1 / QUEUE_SHARE of it
# each, and incoming bodies half of that.
QUEUE_SHARE = 8
RESULTS_BYTES_MIN = 1 << 26  # some 16,000 small results, even if memory is small


@dataclass(frozen=True)
class ServerConfig:
    """See tinsmith.serve for what each setting means."""

    models: Mapping[str, Path]
    _: KW_ONLY
    checkpoints: Path
    share_checkpoints: bool = False  # whether other servers may use the folder too
    checkpoints_max: int | None = None
    image_tokens: int = IMAGE_TOKENS  # the most of an image
    expire: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | Mapping[str, float] | None = field(default=None, repr=False)
    allow_hosts: Collection[str] = ()
    allow_origins: Collection[str] = ()
    device: str = "auto"
    stages: int = 1
    dtype: str = "auto"
    weights: str = "stored"
    weights_copy: bool = True
    threads: int = 0
    memory: int | None = None
    replicas: int | str = 1  # "auto": see tinsmith.serve
    mixed: bool = False
    ray: str | None = None  # the address of a cluster for the replicas
    preload: bool | None = None
    seed: int | None = None
    queue: Queue | None = None  # None: one with queue_bytes
    poll_seconds: float = 20.0  # the SDK ends a poll after 45 s
    gap_seconds: float = GAP_SECONDS

    @property
    def queue_bytes(self) -> int:
        """The bytes that may wait for the engine: a share of the server's memory."""
        room = memory_of("cpu") if self.memory is None else self.memory
        return min(QUEUE_BYTES_MAX, (room or QUEUE_BYTES_MAX) // QUEUE_SHARE)

    @property
    def results_bytes(self) -> int:
        """The bytes that results may take until they are read."""
        return max(self.queue_bytes, RESULTS_BYTES_MIN)
