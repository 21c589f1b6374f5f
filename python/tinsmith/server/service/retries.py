"""What was made for requests that may be sent again, by their idempotency keys.

An SDK sends a request again, with its key, where no reply came. It is then answered with what the
first one made. A key is one client's, for one path and one body. Another request with it is
refused, because it would be told that something was made which never was.
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
        """What a request makes, or has made. One that failed is tried again."""
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
