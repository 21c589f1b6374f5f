"""Connections that ask for nothing, ask for ever, or do not read: others are answered meanwhile,
and the server lets go of them."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from support.waiting import until
from tinsmith.server.http import connections
from tinsmith.server.http.connections import ListeningSocket, Server

REPLY = 64 << 20
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


cut_off = threading.Event()


async def app(scope, receive, send) -> None:
    """Answers with its path; or, slowly read, with much; or, where the client waits, never."""
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        cut_off.set()
        return
    long = scope["path"] == "/long"
    body, count = (bytes(1 << 18), REPLY >> 18) if long else (scope["path"].encode(), 1)
    length = str(len(body) * count).encode()
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for index in range(count):
        await asyncio.sleep(0)
        late = scope["path"] == "/late"  # it says that this was all when its client knows already
        more = late or index < count - 1
        await send({"type": "http.response.body", "body": body, "more_body": more})
        if late:
            await asyncio.sleep(0.2)
            await send({"type": "http.response.body"})


class Clock:
    """The connections' own, which tests put forward."""

    passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def pass_time(self) -> None:
        """More than any connection is waited for."""
        self.passed += connections.HEAD_SECONDS + connections.READ_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(connections, "time", made)
    return made


@pytest.fixture
def running(clock: Clock) -> Iterator[Server]:
    """A server of the app, whose `address` is where it listens."""
    server = Server(app)
    with ListeningSocket(socket.AF_INET) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        server.address = listener.getsockname()
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield server
        server.should_exit = True
        thread.join()
    assert not server.server_state.connections


def connect(server: Server, data: bytes = b"") -> socket.socket:
    made = socket.create_connection(server.address, timeout=60)
    made.sendall(data)
    return made


def is_over(client: socket.socket, clock: Clock | None = None) -> bool:
    """Waits until the other side ends the connection; time passes meanwhile on a clock."""
    client.settimeout(0.1 if clock else 60)
    for _ in range(600):
        try:
            return client.recv(1) == b""
        except TimeoutError:
            if clock is None:
                return False
            clock.pass_time()
        except ConnectionError:
            return True
    return False


def reply(client: socket.socket) -> bool:
    """Reads the reply to HEAD."""
    came = b""
    while not came.endswith(b"\r\n\r\n/") and (piece := client.recv(1 << 16)):
        came += piece
    return b"200 OK" in came


def answers(server: Server) -> bool:
    return httpx.get("http://{}:{}/path".format(*server.address), timeout=60).text == "/path"


@pytest.mark.parametrize("sent", (b"", b"G", HEAD, HEAD + b"\r\n" + HEAD, b"\r\n"))
def test_a_head_that_does_not_come_ends_the_connection(
    running: Server, clock: Clock, sent: bytes
) -> None:
    with connect(running, sent) as client:
        if sent.count(b"Host") == 2:  # one was answered
            assert reply(client)
        assert is_over(client, clock)


def test_a_body_that_nobody_reads_must_end_too(running: Server, clock: Clock) -> None:
    with connect(running, b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n") as client:
        assert reply(client)
        assert is_over(client, clock)


def test_a_client_between_two_requests_is_waited_for(
    running: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, swept = connections.Connection.sweep, threading.Semaphore(0)

    def counted(connection: connections.Connection, now: float) -> None:
        sweep(connection, now)
        if now > moment:
            swept.release()

    with connect(running) as client:
        client.sendall(HEAD + b"\r\n")
        assert reply(client)
        clock.pass_time()
        moment = clock.monotonic()
        monkeypatch.setattr(connections.Connection, "sweep", counted)
        assert swept.acquire(timeout=60) and swept.acquire(timeout=60)
        client.sendall(HEAD + b"\r\n")
        assert reply(client)


@pytest.mark.parametrize("sent", (b"X-A: b\r\n", b"a"), ids=("many", "long"))
def test_a_head_without_an_end_is_not_kept(running: Server, sent: bytes) -> None:
    with connect(running, HEAD) as client, pytest.raises(ConnectionError):
        for _ in range(64):
            client.sendall(sent * ((1 << 20) // len(sent)))


def test_a_client_that_does_not_wait_for_replies_is_cut_off(running: Server) -> None:
    with connect(running, b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000) as client:
        while not is_over(client):
            pass
    assert answers(running)


def test_a_client_that_knows_a_replys_length_may_be_early(running: Server) -> None:
    with connect(running) as client:
        for _ in range(3):
            client.sendall(b"GET /late HTTP/1.1\r\nHost: a\r\n\r\n")
            came = b""
            while not came.endswith(b"\r\n\r\n/late"):
                piece = client.recv(1 << 16)
                assert piece, came
                came += piece


def test_a_client_that_leaves_a_second_request_behind_ends_the_first(running: Server) -> None:
    cut_off.clear()
    with connect(running, b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD + b"\r\n"):
        assert not cut_off.wait(0.2)
    assert cut_off.wait(60)
    assert answers(running)


def test_a_client_that_does_not_read_is_let_go_of(running: Server, clock: Clock) -> None:
    with connect(running, b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        until(lambda: running.server_state.connections)
        while running.server_state.connections:
            clock.pass_time()
            time.sleep(0.1)
        client.close()


def test_a_crowd_of_silent_connections_keeps_nobody_out(running: Server) -> None:
    running.server_state.count_max = 8
    with connect(running, HEAD + b"\r\n") as asked:
        assert reply(asked)
        crowd = [connect(running) for _ in range(40)]
        assert answers(running)
        for client in crowd[:30]:  # the oldest made room
            assert is_over(client)
        asked.sendall(HEAD + b"\r\n")  # not one that had asked something
        assert reply(asked)
        for client in crowd:
            client.close()


EXHAUSTED = """
import logging, resource, socket, time
from tinsmith.server.http.connections import ListeningSocket

logging.basicConfig(format="%(message)s")
with ListeningSocket(socket.AF_INET) as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    listener.setblocking(False)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(40)]
    highest = max(client.fileno() for client in clients)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, 4096))
    for client in clients:
        try:
            listener.accept()
            raise SystemExit("accepted")
        except BlockingIOError:
            pass
        client.settimeout(60)
        assert client.recv(1) == b""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    last = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    accepted.sendall(b"welcome")
    assert last.recv(100) == b"welcome"
"""


def test_without_descriptors_clients_are_turned_away_and_it_is_said_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXHAUSTED],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "all the files and connections open" in done.stderr
