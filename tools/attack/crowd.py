"""Overload: clients that vanish, never send, or never read, beside one that means well.

An input is a group of such clients: raw connections that do one thing wrong, each at a place in its
request that is drawn. Some stay connected while the next groups come. After each group the server
must say that it is well, over a new connection, and the clean client must get the same bits. At the
end all of them leave, and nothing of theirs may be left.
"""

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import httpx
import zstandard
from tinsmith.server.backend import Backend
from tinsmith.server.http import connections
from tinsmith.server.service import bodies

from tools.attack.common import Attempt, Failure, One
from tools.attack.served import SECONDS, Clean, served

STAYING = 150  # connections that stay open at most
PATIENCE = 2.0  # seconds: the server's, for what else takes it a minute
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset


class Crowd:
    """The clients that are connected to a server."""

    def __init__(self, backend: Backend, clean: Clean):
        self._backend, self._clean = backend, clean
        port = int(backend.url.rpartition(":")[2])
        self._address = "127.0.0.1", port
        self._host = f"Host: 127.0.0.1:{port}\r\nX-API-Key: tml-crowd\r\n"
        self._staying: list[socket.socket] = []
        self._sampler = self._make_sampler()
        self._number = 0

    def _make_sampler(self) -> str:
        with httpx.Client(base_url=f"{self._backend.url}/api/v1", timeout=SECONDS) as http:
            http.headers["X-API-Key"] = "tml-crowd"
            session = http.post("/create_session", json={"tags": [], "user_metadata": {}}).json()
            asked = session | {"sampling_session_seq_id": 0, "base_model": "m"}
            reply = http.post("/create_sampling_session", json=asked).raise_for_status()
            return reply.json()["sampling_session_id"]

    # ---- what a client sends ----

    def _head(self, path: str, *lines: str) -> bytes:
        more = "".join(f"{line}\r\n" for line in lines)
        return f"POST /api/v1{path} HTTP/1.1\r\n{self._host}{more}\r\n".encode()

    def _sample(self, rng: random.Random) -> bytes:
        """A request to sample, large in what it asks for."""
        self._number += 1
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice((3, 30, 90)))]
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": self._number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "num_samples": rng.choice((1, 1, 4, 16)),
            "sampling_params": {"max_tokens": rng.choice((1, 4, 16)), "stop": []},
            "topk_prompt_logprobs": rng.choice((0, 0, 20, 200)),
            "prompt_logprobs": rng.random() < 0.5,
        }
        text = json.dumps(body).encode()
        return self._head("/asample", f"Content-Length: {len(text)}") + text

    def _poll(self, rng: random.Random) -> bytes:
        number = rng.randrange(max(self._number, 1)) + 1
        text = json.dumps({"request_id": f"{self._sampler}:seq:{number}"}).encode()
        return self._head("/retrieve_future", f"Content-Length: {len(text)}") + text

    def _promise(self, rng: random.Random) -> bytes:
        path = rng.choice(("/asample", "/forward_backward", "/create_session", "/telemetry"))
        size = rng.choice((10, 1 << 16, 1 << 23, 1 << 27, 1 << 30, 1 << 40))
        sent = min(rng.choice((0, 1, 5000, 1 << 16, 1 << 20)), size - 1)
        return self._head(path, f"Content-Length: {size}") + b" " * sent

    def _chunks(self, rng: random.Random) -> bytes:
        path = rng.choice(("/asample", "/forward_backward", "/create_session"))
        piece = b"1\r\n[\r\n" * rng.choice((1, 1000, 20_000))
        last = rng.choice((b"", b"0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n"))
        return self._head(path, "Transfer-Encoding: chunked") + piece + last

    def _packed(self, rng: random.Random) -> bytes:
        text = rng.choice((b"[]," * (1 << 20), b" " * (1 << 25), b'{"a":' * (1 << 18)))
        body = zstandard.ZstdCompressor().compress(text)
        lines = "Content-Encoding: zstd", f"Content-Length: {len(body)}"
        return self._head(rng.choice(("/asample", "/forward_backward")), *lines) + body

    def _garbage(self, rng: random.Random) -> bytes:
        return rng.randbytes(rng.choice((1, 100, 5000)))

    def _heads(self, rng: random.Random) -> bytes:
        line = b"X-%d: " % rng.randrange(9) + b"y" * rng.choice((1, 1000, 60_000)) + b"\r\n"
        return b"GET /api/v1/healthz HTTP/1.1\r\n" + line * rng.choice((1, 3, 50))

    def _eager(self, rng: random.Random) -> bytes:
        """Requests that do not wait for replies."""
        each = rng.choice((self._poll, self._sample))
        return b"".join(each(rng) for _ in range(rng.choice((2, 20, 200))))

    # ---- one group ----

    def one(self, attempt: Attempt) -> str:
        rng = attempt.rng
        makes: tuple[Callable[[random.Random], bytes], ...] = (
            self._sample, self._poll, self._promise, self._chunks, self._packed, self._garbage,
            self._heads, self._eager, lambda rng: b"",
        )  # fmt: skip
        make = rng.choice(makes)
        count = rng.choice((1, 3, 10, 40))
        how = rng.choice(("closes", "resets", "ends", "stays", "reads"))
        data = [make(rng) for _ in range(count)]
        cut = rng.random() < 0.3
        attempt.note(f"{count} clients: {make.__name__}, then {how}, cut {cut}", data[0][:300])
        for each in data:
            self._send(each[: rng.randrange(len(each) + 1)] if cut else each, how, rng)
        while len(self._staying) > STAYING:
            self._staying.pop(0).close()
        begin = time.monotonic()
        try:
            reply = httpx.get(f"{self._backend.url}/api/v1/healthz", timeout=SECONDS)
        except httpx.TimeoutException:
            raise Failure(f"healthz did not answer in {SECONDS:g} s") from None
        if reply.json() != {"status": "ok"}:
            raise Failure(f"healthz said {reply.text}")
        self._clean.check()
        slow = time.monotonic() - begin > 5
        return f"{how}, slowly" if slow else how

    def _send(self, data: bytes, how: str, rng: random.Random) -> None:
        client = socket.socket()
        if rng.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(SECONDS)
        client.connect(self._address)
        client.settimeout(0.5)  # the server need not read all of it
        with contextlib.suppress(OSError):
            client.sendall(data)
            if how == "ends":
                client.shutdown(socket.SHUT_WR)
            if how == "reads":
                reply = client.recv(1 << 16)
                if reply.startswith(b"HTTP/1.1 5"):
                    raise Failure(f"a status above 499: {reply[:300]!r}")
        if how == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if how in ("closes", "resets", "reads"):
            client.close()
        else:
            self._staying.append(client)

    def close(self) -> None:
        """All of them leave; Failure if the server keeps connections."""
        for client in self._staying:
            client.close()
        open_ = self._backend._server.server_state.connections
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if sum(not one.served for one in list(open_)) == 0:
                return
            time.sleep(0.05)
        raise Failure(f"the server keeps {len(open_)} connections")


@contextlib.contextmanager
def attack() -> Iterator[One]:
    """A server that loses patience in seconds."""
    with (
        patch.object(connections, "HEAD_SECONDS", PATIENCE),
        patch.object(connections, "READ_SECONDS", PATIENCE),
        patch.object(bodies, "PACE_SECONDS", PATIENCE),
        served(poll_seconds=PATIENCE) as (backend, clean),
    ):
        crowd = Crowd(backend, clean)
        yield crowd.one
        crowd.close()
