"""Replicas on a Ray cluster: joining it, and a place there for each of them.

The cluster runs already; nothing here starts or ends one. The server joins it as a driver. Each
replica is an actor with a GPU, or some CPUs, so one that has no place yet holds up no other. Ray
finds places and tells who is lost. It restarts and repeats nothing, because the crew does: a lost
replica's next actor waits in Ray's queue until a node has room. Without the cluster's head the
server goes on alone.

A server that ends, ends its actors. One that was killed leaves them, under its name: if it is
started again within ALONE_SECONDS it finds them, with their base models loaded. A server without a
name has actors that end with its process, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinsmith.engine.devices import GPUS, first_of, kind_of, stages_of
from tinsmith.engine.errors import sentence
from tinsmith.replicas.actor import GROUPS, Actor, ActorLink
from tinsmith.replicas.channel import Link
from tinsmith.replicas.crew import Ender, RemoteCrew
from tinsmith.replicas.local import AUTO, REPLICAS_MAX, Share
from tinsmith.replicas.messages import Start
from tinsmith.system.format import counted

PLACED_SECONDS = 120.0  # in which a new server's replicas must have got their places
HELD_SECONDS = 30.0  # in which this node must give the server a GPU
KNOCK_SECONDS = 10.0  # until a cluster's address answers
ALONE_SECONDS = 600.0  # after which an actor ends that has no server
ADOPTED_SECONDS = 10.0  # in which an actor must answer its next server
NAMESPACE = "tinsmith"  # of actors' names
VISIBLE = "CUDA_VISIBLE_DEVICES"
TLS = "RAY_USE_TLS=1, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"
TOKEN = "RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"


class Cluster:
    """A running cluster, as Places: this process joins it. Each replica has a GPU for each stage of
    a model, or as many threads as the server. No two servers may have one `name` at a time.
    RuntimeError says why not.

    On a node with GPUs the server's own are ones that Ray gives to nobody else, unless the device
    or CUDA_VISIBLE_DEVICES chooses them."""

    def __init__(
        self,
        address: str,
        replicas: int | str,
        device: str,
        threads: int,
        memory: int | None,
        name: str = "",
    ):
        if replicas == 1:
            raise ValueError("--ray is for several replicas: say --replicas N, or auto")
        self._joined = join(address)
        self._head = ray.get_runtime_context().gcs_address
        self._name, self._owner = name, secrets.token_hex(8)
        self._actors: list[Any] = []  # the replicas that have not ended
        self._held: Any = None
        try:
            if stages_of(device)[0] in GPUS and VISIBLE not in os.environ:
                device = self._own_cards(device)
        except BaseException:
            self.close()
            raise
        self.own = Share(device, threads, memory)
        gpu, cores = kind_of(device) in GPUS, len(os.sched_getaffinity(0))
        stages = len(stages_of(device))
        self._need = {"CPU": 1, "GPU": stages} if gpu else {"CPU": threads or cores}
        # Ray shows an actor on GPUs only its own.
        own = first_of(kind_of(device), stages) if gpu else device
        self._share = Share(own, threads if gpu else threads or cores, memory)
        self._count = self._room() if replicas == AUTO else int(replicas) - 1

    def begin(self, crew: RemoteCrew, start: Start) -> None:
        """See Places."""
        start, left = replace(start, **vars(self._share)), self._left()
        for number in range(2, self._count + 2):
            kept = partial(self._linked, left.pop()) if left else None
            crew.add(self._begin_actor, replace(start, name=f"replica {number}"), "on Ray", kept)
        for actor in left:
            ray.kill(actor)

    def wait(self) -> None:
        """See Places."""
        ready = [one.__ray_ready__.remote() for one in self._actors]
        found, waiting = ray.wait(ready, num_returns=len(ready), timeout=PLACED_SECONDS)
        if waiting:
            raise RuntimeError(
                f"{len(found)} of {len(ready)} replicas besides the server have a place on the "
                f"Ray cluster after {PLACED_SECONDS:.0f} s: each needs {shown(self._need)}; the "
                f"cluster's {counted(len(nodes()), 'node')} have {shown(ray.cluster_resources())}"
                f", of which {shown(ray.available_resources())} are free"
            )

    def close(self) -> None:
        """See Places. Leaves the cluster, if this has joined it."""
        if self._held is not None:
            ray.kill(self._held)
        if self._joined:
            ray.shutdown()

    def _room(self) -> int:
        """How many replicas the cluster's nodes have room for, besides the server."""
        room = 0
        for row in nodes():
            has = Counter(row["Resources"])
            if self._held is not None and row["NodeID"] == ray.get_runtime_context().get_node_id():
                has["GPU"] -= self._need.get("GPU", 0)
            room += min(int(has[name] // need) for name, need in self._need.items())
        return min(room, REPLICAS_MAX - 1)

    def _own_cards(self, device: str) -> str:
        """Takes GPUs of this node from Ray, if it knows of any; returns the device."""
        node, count = ray.get_runtime_context().get_node_id(), len(stages_of(device))
        if not any(row["Resources"].get("GPU") for row in nodes() if row["NodeID"] == node):
            return device
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        holder = ray.remote(num_cpus=0, num_gpus=count, max_restarts=0)(_Holder)
        self._held = holder.options(scheduling_strategy=here).remote()
        try:
            cards = ray.get(self._held.cards.remote(), timeout=HELD_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(
                f"Ray does not have {counted(count, 'GPU')} free on this node for the server "
                f"itself; to use what Ray doesn't know, set {VISIBLE}"
            ) from None
        kind = kind_of(device)
        return ",".join(f"{kind}:{card}".removesuffix(":0") for card in cards)

    def _left(self) -> list[Any]:
        """The actors that a server of this name has left, now of this one."""
        asked = {}
        for row in ray.util.list_named_actors(all_namespaces=True) if self._name else []:
            if row["namespace"] == NAMESPACE and row["name"].startswith(f"{self._name} "):
                with contextlib.suppress(ValueError):  # it has ended
                    actor = ray.get_actor(row["name"], NAMESPACE)
                    asked[actor.adopt.remote(self._owner)] = actor
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=ADOPTED_SECONDS)
        found = []
        for call, actor in asked.items():
            try:
                ray.get(call, timeout=0)
                found.append(actor)
            except ray.exceptions.RayError:  # it has died, or has no place yet
                ray.kill(actor)
        return found

    def _begin_actor(self) -> tuple[Link, Ender]:
        _knock(self._head)
        kind = ray.remote(
            num_cpus=self._need["CPU"],
            num_gpus=self._need.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups=GROUPS,
        )(Actor)
        if self._name:  # no two actors have one, and a lost one's may still be known
            name = f"{self._name} {secrets.token_hex(4)}"
            kind = kind.options(name=name, namespace=NAMESPACE, lifetime="detached")
        return self._linked(kind.remote(self._owner, os.environ.get("TINSMITH_ISA"), ALONE_SECONDS))

    def _linked(self, actor: Any) -> tuple[Link, Ender]:
        self._actors.append(actor)

        def end(by_itself: bool) -> str:
            if actor in self._actors:
                self._actors.remove(actor)
                with contextlib.suppress(OSError):
                    _knock(self._head)
                    ray.kill(actor)
            return ""

        return ActorLink(actor, self._owner), end


class _Holder:
    """Has GPUs, and does nothing with them."""

    def cards(self) -> list[str]:
        """Their ordinals."""
        return [str(card) for card in ray.get_gpu_ids()]


def join(address: str) -> bool:
    """Joins a running cluster; False if this process has already. RuntimeError says why it
    can't."""
    if ray.is_initialized():
        return False
    with _signals_kept():
        try:
            _knock(address, _compare_tls)
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                logging_level="ERROR",
            )
        except Exception as error:
            told = " ".join(sentence(error).split())[:500]
            if told.startswith("Failed to connect"):  # all that Ray says, after 20 s
                told += f"; it may want a token: {TOKEN}"
            raise RuntimeError(f"can't join the Ray cluster {address}: {told}") from None
    return True


def _knock(address: str, look: Callable[[socket.socket], None] | None = None) -> None:
    """OSError at once if nobody is at an address; Ray would wait, for ever if it had joined."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS) as found:
            if look is not None:
                look(found)


def _compare_tls(found: socket.socket) -> None:
    """RuntimeError if a cluster uses TLS and this process does not, or the other way round; Ray
    would wait for minutes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # Ray looks at it
    try:
        context.wrap_socket(found).close()
        there = True
    except OSError:
        there = False
    if there != (os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")):
        other = "it uses TLS, and this process does not" if there else "it does not use TLS"
        raise RuntimeError(f"{other}: see {TLS}")


def nodes() -> list[Mapping[str, Any]]:
    """Ray's rows of the nodes that are alive."""
    return [row for row in ray.nodes() if row["Alive"]]


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray handles SIGTERM of its own; the server does too."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def shown(resources: Mapping[str, float]) -> str:
    """Resources, for people: 3 CPUs and 1 GPU."""
    rows = {name: int(resources.get(name, 0)) for name in ("CPU", "GPU")}
    return " and ".join(counted(count, name) for name, count in rows.items() if count) or "nothing"
