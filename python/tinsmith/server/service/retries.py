"""Results of requests that may be retried, by their idempotency keys.

If no reply came, an SDK sends a request again with the same key. It then gets the first attempt's
result. A key belongs to one client, one path and one body. Another request with the same key is
refused: otherwise it would get the result of a request that it never made.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")

KEY = "x-idempotency-key"
KEPT_MAX = 1 << 12


@dataclass(frozen=True)
class _Made:
    request: bytes  # a digest of its path and body
    result: asyncio.Future[Any]


class Retries:
    """See the file's header. Only the server's event loop uses it."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _Made] = {}  # by owner and key

    async def once(
        self,
        owner: str,
        request: Request,
        body: dict[str, Any],
        make: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """A request's result, or its first attempt's. A failed request is executed again."""
        given = request.headers.get(KEY, uuid.uuid4().hex)
        text = json.dumps([request.url.path, body], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        key = owner, given
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = _Made(digest, asyncio.ensure_future(make()))
            known.result.add_done_callback(
                lambda done: (done.cancelled() or done.exception()) and self._made.pop(key, None)
            )
            while len(self._made) > KEPT_MAX:
                del self._made[next(iter(self._made))]
        if known.request != digest:
            raise ValueError(
                f"another request came with the {KEY} {given!r:.80}: each needs a key of its own"
            )
        return await asyncio.shield(known.result)
