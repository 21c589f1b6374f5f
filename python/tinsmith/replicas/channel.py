"""A channel to another process of this machine: messages over a Unix socket, arrays beside it.

A message is pickled (protocol 5). Its arrays of OUTSIDE bytes and more are not in the pickle: they
are written to one anonymous file in memory (memfd), whose descriptor is sent with the message, and
the receiver maps it. So an array is copied once, nothing has a name that could be left behind, and
no limit of /dev/shm applies. A frame is

    HEADER: the pickle's bytes, the file's bytes (0: no file), the number of arrays outside
    the bytes of each of these arrays; they begin at multiples of ALIGNED in the file
    the pickle

`send` returns at once: a thread writes, because a process that hangs reads nothing. Whoever can
write to the socket can run code here, so both ends must be of one user: a socketpair.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import socket
import struct
import threading
from typing import Any, Protocol

OUTSIDE = 1 << 18  # bytes; each message with a file holds a descriptor while its arrays live
ALIGNED = 64
HEADER = struct.Struct("<QQQ")


class Link(Protocol):
    """What replicas need of a channel. Messages arrive whole and in order."""

    def send(self, message: Any) -> None:
        """Sends a message, from any thread, without waiting. After the end it does nothing."""

    def receive(self) -> Any:
        """The next message; EOFError after the other end has gone, or has been silent for too
        long."""

    def close(self) -> None:
        """Ends both directions. A waiting `receive` returns."""


class Channel:
    """A Link over a socket; see the file's header."""

    def __init__(self, end: socket.socket, silent_seconds: float = 0.0):
        """`silent_seconds` without a message are an end; 0: never."""
        self._socket = end
        if silent_seconds:
            whole = int(silent_seconds)
            wait = struct.pack("ll", whole, int((silent_seconds - whole) * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._unsent: queue.SimpleQueue[tuple[bytes, list[memoryview]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="tinsmith-channel", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """See Link. Arrays in the message must not change afterwards."""
        outside: list[memoryview] = []

        def inside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < OUTSIDE:
                return True
            outside.append(raw)
            return False

        pickled = pickle.dumps(message, protocol=5, buffer_callback=inside)
        held = sum(_aligned(raw.nbytes) for raw in outside)
        head = HEADER.pack(len(pickled), held, len(outside))
        sizes = struct.pack(f"<{len(outside)}Q", *(raw.nbytes for raw in outside))
        self._unsent.put((head + sizes + pickled, outside))

    def receive(self) -> Any:
        """See Link. Arrays that were outside may be written to; nobody else sees it."""
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, HEADER.size, 1)
            try:
                head += self._read(HEADER.size - len(head))
                length, held, count = HEADER.unpack(head)
                sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
                pickled = self._read(length)
                views = _mapped(fds[0], held, sizes) if count else []
            finally:
                for fd in fds:
                    os.close(fd)
        except BlockingIOError:
            raise EOFError("it has been silent for too long") from None
        except OSError as error:  # the other end died with unread messages, or this one is closed
            raise EOFError(f"the connection has ended: {error.strerror}") from None
        return pickle.loads(pickled, buffers=views)

    def close(self) -> None:
        """See Link."""
        with contextlib.suppress(OSError):  # the other end has gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._unsent.put(None)
        self._thread.join()
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        found, at = bytearray(size), 0
        while at < size:
            count = self._socket.recv_into(memoryview(found)[at:])
            if not count:
                raise EOFError("the connection has ended")
            at += count
        return found

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone; the reader sees it too
            while (item := self._unsent.get()) is not None:
                self._write_one(*item)
                del item

    def _write_one(self, frame: bytes, outside: list[memoryview]) -> None:
        if not outside:
            self._socket.sendall(frame)
            return
        fd = os.memfd_create("tinsmith")
        try:
            at = 0
            for raw in outside:
                os.lseek(fd, at, os.SEEK_SET)
                left = raw
                while left.nbytes:
                    left = left[os.write(fd, left) :]
                at += _aligned(raw.nbytes)
            os.ftruncate(fd, at)
            sent = socket.send_fds(self._socket, [frame[: HEADER.size]], [fd])
        finally:
            os.close(fd)
        self._socket.sendall(frame[sent:])


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _mapped(fd: int, held: int, sizes: tuple[int, ...]) -> list[memoryview]:
    """The arrays in a file, as memory of this process's own."""
    view, at, found = memoryview(mmap.mmap(fd, held, access=mmap.ACCESS_COPY)), 0, []
    for size in sizes:
        found.append(view[at : at + size])
        at += _aligned(size)
    return found
