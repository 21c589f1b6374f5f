"""Replicas on this machine: child processes, one for each GPU or each share of the CPU's cores.

The first replica is the owner, this process. On GPUs each has a card, and its memory; on the CPU
they divide the threads and the memory. A child is a new process of Python, never a fork of this
one, which has threads and perhaps a GPU's context. Its only tie is a socket: when that closes, it
exits; when it exits, that closes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tinsmith.engine.bases import memory_of
from tinsmith.engine.devices import GPUS, cards, kind_of, stages_of, take
from tinsmith.replicas.channel import Channel, Link
from tinsmith.replicas.crew import Ender, RemoteCrew
from tinsmith.replicas.messages import Start
from tinsmith.system.format import counted

AUTO, REPLICAS_MAX = "auto", 64
ADDRESS = re.compile(r"[^/\s]+:[0-9]{1,5}")  # of a Ray cluster
SILENT_SECONDS = 30.0  # after which a child hangs: it says each second that it lives
EXIT_SECONDS = 1.0  # that a child whose socket has closed gets to exit


def replicas_from(given: int | str) -> int | str:
    """A number of replicas, or AUTO. ValueError for anything else."""
    if given == AUTO:
        return AUTO
    with contextlib.suppress(ValueError):
        if 1 <= (count := int(given)) <= REPLICAS_MAX:
            return count
    raise ValueError(f"replicas are from 1 to {REPLICAS_MAX}, or {AUTO}; {given!r:.60} came")


def address_from(given: str) -> str:
    """A Ray cluster's address, or AUTO. ValueError for anything else."""
    if given == AUTO or ADDRESS.fullmatch(given):
        return given
    raise ValueError(
        f"a Ray cluster's address is HOST:PORT, or {AUTO} on one of its nodes; {given!r:.60} came"
    )


@dataclass(frozen=True)
class Share:
    """What one replica computes with."""

    device: str
    threads: int
    memory: int | None

    def __str__(self) -> str:
        gpu = kind_of(self.device) in GPUS
        return self.device if gpu else f"{self.device}, {counted(self.threads, 'thread')}"


def divide(
    replicas: int | str, device: str, threads: int = 0, memory: int | None = None
) -> list[Share]:
    """What each of `replicas` gets, the owner first. On GPUs each has as many as the device has
    stages. AUTO: all GPUs like the device's; one replica on the CPU. ValueError if there are too
    few GPUs."""
    if kind_of(device) in GPUS:
        rows, own = cards(kind_of(device)), stages_of(device)
        like = next(card for card in rows if card.device == own[0])
        if replicas == AUTO:
            rows = [card for card in rows if card[1::2] == like[1::2]]
        gpus = [*own, *(card.device for card in rows if card.device not in own)]
        count = len(gpus) // len(own) if replicas == AUTO else int(replicas)
        whose = f"{count} replicas" + f" of {len(own)} stages" * (len(own) > 1)
        gpus = take(gpus, count * len(own), whose)
        return [
            Share(",".join(gpus[n : n + len(own)]), threads, memory)
            for n in range(0, len(gpus), len(own))
        ]
    count = 1 if replicas == AUTO else int(replicas)
    if count == 1:
        return [Share(device, threads, memory)]
    cores, most = threads or len(os.sched_getaffinity(0)), memory or memory_of("cpu")
    return [
        Share(device, max(1, cores // count + (n < cores % count)), most and most // count)
        for n in range(count)
    ]


class Places(Protocol):
    """Where a server's replicas are. `own` is what the server itself computes with."""

    own: Share

    def begin(self, crew: RemoteCrew, start: Start) -> None:
        """Starts them, and adds them to the crew. `start` is what they have in common."""

    def wait(self) -> None:
        """Returns when all have got a place; RuntimeError if they get none."""

    def close(self) -> None:
        """Called after the crew is closed."""


class Here:
    """This machine, as Places."""

    def __init__(self, replicas: int | str, device: str, threads: int, memory: int | None):
        self.own, *self._others = divide(replicas, device, threads, memory)

    def begin(self, crew: RemoteCrew, start: Start) -> None:
        """See Places."""
        begin(crew, self._others, start)

    def wait(self) -> None:
        """See Places. Here they have it."""

    def close(self) -> None:
        """See Places."""


def begin(crew: RemoteCrew, shares: Sequence[Share], start: Start) -> None:
    """Starts a child for each share, and adds them to the crew. `start` is what they have in
    common."""
    for number, share in enumerate(shares, 2):
        own = replace(
            start,
            name=f"replica {number}",
            device=share.device,
            threads=share.threads,
            memory=share.memory,
        )
        crew.add(_begin_child, own, str(share))


def _begin_child() -> tuple[Link, Ender]:
    ours, theirs = socket.socketpair()
    with theirs:
        # The child finds packages where this process does. It is not in this terminal's group:
        # Ctrl-C is the owner's.
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith.replicas.child", str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return Channel(ours, SILENT_SECONDS), _ender(process)


def _ender(process: subprocess.Popen[bytes]) -> Ender:
    def end(by_itself: bool) -> str:
        try:
            code = process.wait(EXIT_SECONDS if by_itself else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return ""
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process has ended with exit code {code}"

    return end
