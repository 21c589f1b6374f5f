"""The channel between an owner and a replica: arrays of any size, and peers that die or hang."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.waiting import until
from tinsmith.replicas.channel import HEADER, OUTSIDE, Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_arrive_whole_and_in_order(ends) -> None:
    one, other = ends
    rng = np.random.default_rng(0)
    sizes = [0, 1, 7, OUTSIDE // 4 - 1, OUTSIDE // 4, OUTSIDE // 4 + 1, 3 * OUTSIDE + 5]
    arrays = [rng.random(size).astype(np.float32) for size in sizes]
    strided = rng.random((2, 4 * OUTSIDE))[:, ::2]
    messages = [("first", arrays), "between", {"again": arrays[::-1], "strided": strided}]
    for message in messages:
        one.send(message)
    found = [other.receive() for _ in messages]
    assert found[0][0] == "first" and found[1] == "between"
    for sent, got in ((arrays, found[0][1]), (arrays[::-1], found[2]["again"])):
        assert all(map(np.array_equal, sent, got))
    np.testing.assert_array_equal(found[2]["strided"], strided)


def test_a_received_array_is_the_receivers_own(ends) -> None:
    one, other = ends
    array = np.ones(OUTSIDE, np.float32)
    one.send(array)
    other.receive()[:] = 2
    one.send(array)
    got = other.receive()
    assert got.flags.writeable and (got == 1).all() and (array == 1).all()


def test_nothing_stays_open_when_the_arrays_are_gone(ends) -> None:
    one, other = ends
    before = descriptors()
    for _ in range(5):
        one.send(np.zeros(OUTSIDE, np.float32))
    found = [other.receive() for _ in range(5)]
    assert descriptors() == before + 5
    del found
    assert descriptors() == before


@pytest.mark.parametrize("share", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("outside", (False, True))
def test_a_peer_that_dies_within_a_message_is_an_end(share: float, outside: bool) -> None:
    """In its head, or in the rest."""
    near, far = socket.socketpair()
    channel = Channel(near)
    head = HEADER.pack(1000, 64 if outside else 0, int(outside))
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64)
    sent = (head + b"x" * 500)[: int(len(head) * 2 * share) or 3]
    socket.send_fds(far, [sent], [fd] if outside else [])
    os.close(fd)
    far.close()
    before = descriptors()
    with pytest.raises(EOFError, match="the connection has ended"):
        channel.receive()
    assert descriptors() == before
    channel.close()


def test_a_peer_that_reads_nothing_stops_nobody() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    for _ in range(100):
        channel.send(b"x" * OUTSIDE)
    channel.close()
    far.close()


def test_silence_is_an_end() -> None:
    near, far = socket.socketpair()
    channel = Channel(near, silent_seconds=0.05)
    with pytest.raises(EOFError, match="silent for too long"):
        channel.receive()
    channel.close()
    far.close()


def test_closing_wakes_who_receives(ends) -> None:
    one, _ = ends
    ended = threading.Event()

    def receive() -> None:
        try:
            one.receive()
        except EOFError:
            ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    one.close()
    until(ended.is_set)
    thread.join()
