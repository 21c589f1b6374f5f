"""The weights that requests without a session sample from: each names a base model or a checkpoint.

The worker samples from sampling sessions. Here each name gets one, which is opened with its first
request. A checkpoint's adapter is read then, and evicted by least use as every snapshot is. Only
the server's event loop uses this.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path

from tinsmith.checkpoints.meta import Meta
from tinsmith.engine.worker import Worker


class Targets:
    """See the file's header. `requests` counts them, for the seeds of those that have none."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._open: dict[str, tuple[str, str]] = {}  # the session, and the checkpoint's creation
        self._count = 0
        self.requests = 0

    def base(self, base: str) -> str:
        """The key of a base model."""
        return self._begin(base, "", lambda name: self._worker.open_base(name, base))

    def checkpoint(self, path: str, base: str, folder: Path, meta: Meta) -> str:
        """The key of a checkpoint, which gets another session where it was written again."""
        return self._begin(
            f"{base};{path}",
            meta.created,
            lambda name: self._worker.open_checkpoint(name, base, folder, meta.created),
        )

    def session(self, key: str) -> str:
        """A key's session as it is now: another one, if the checkpoint was written again while a
        request waited for its turn."""
        return self._open[key][0]

    def _begin(self, key: str, created: str, begin: Callable[[str], None]) -> str:
        known = self._open.get(key)
        if known is None or known[1] != created:
            if known is not None:
                self._worker.forget([], [known[0]])
            name, self._count = f"inference:{self._count}", self._count + 1
            begin(name)
            self._open[key] = name, created
        return key


def handle_session(handle: str) -> str | None:
    """The sampling session in a SamplingClient's handle; None where the text is none."""
    try:
        content = json.loads(base64.urlsafe_b64decode(handle))
    except ValueError:
        return None
    session = content.get("sampling_session_id") if isinstance(content, dict) else None
    return session if isinstance(session, str) else None
