"""Replicas on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from conftest import make_datum
from support.programs import Programs
from support.waiting import until
from test_replica_parts import Called
from test_replica_server import counted, replies
from tinsmith.cli.commands import main
from tinsmith.engine.replica import Replica, ReplicaLost
from tinsmith.replicas.remote import Remote
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
from ray.cluster_utils import Cluster as Machines  # noqa: E402
from tinsmith.cli import ray_report  # noqa: E402
from tinsmith.replicas import cluster as cluster_module  # noqa: E402
from tinsmith.replicas.actor import GROUPS, Actor, ActorLink  # noqa: E402
from tinsmith.replicas.cluster import Cluster, join  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_log_monitor": False}


@pytest.fixture(scope="module")
def head() -> Iterator[Machines]:
    """A cluster of a node with a CPU; it says that it has two GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short path: sockets are in it
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))  # other clusters of this machine use /tmp/ray
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
        patch.setenv("RAY_agent_register_timeout_ms", "300000")  # a busy machine starts it slowly
        patch.setenv("RAY_health_check_failure_threshold", "7")
        more = {"num_gpus": 2, "include_dashboard": False, "no_monitor": True}
        made = Machines(initialize_head=True, head_node_args=NODE | more)
        yield made
        join(made.address)
        until(lambda: not named())  # all servers have ended their actors
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machines(head: Machines) -> Machines:
    """A cluster of two nodes, with a CPU each."""
    if not head.worker_nodes:
        head.add_node(**NODE)
    return head


def serve(model: Path, folder: Path, replicas: int, address: str | None) -> Backend:
    return Backend(
        ServerConfig(
            {"tiny": model},
            checkpoints=folder,
            device="cpu",
            threads=1,
            replicas=replicas,
            ray=address,
        )
    )


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The replies of one process."""
    with serve(tiny_model_dir, tmp_path_factory.mktemp("one"), 1, None) as backend:
        return replies(backend)


@pytest.fixture
def backend(machines: Machines, tiny_model_dir: Path, tmp_path: Path) -> Iterator[Backend]:
    """A server with two replicas on the cluster."""
    with serve(tiny_model_dir, tmp_path, 3, machines.address) as made:
        assert [one.state for one in made.crew.all] == ["same bits"] * 2
        assert all(one.place.endswith(" cpu, 1 thread") for one in made.crew.all)
        yield made
    assert not ray.is_initialized()


def lose_a_node(machines: Machines) -> None:
    machines.remove_node(next(iter(machines.worker_nodes)), allow_graceful=False)


def lost(replicas: list[Remote]) -> Remote:
    """That which is lost."""
    until(lambda: any(one.state == "lost" for one in replicas))
    return next(one for one in replicas if one.state == "lost")


class Front:
    """A server in a process of its own, as `replies` wants it."""

    def __init__(self, url: str):
        self.url = url

    def service_client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key="tml-local")


def named() -> list[str]:
    """The names of servers' actors that are alive."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    return sorted(row["name"] for row in rows if row["namespace"] == "tinsmith")


def processes() -> set[int]:
    """Theirs."""
    actors = [ray.get_actor(name, "tinsmith") for name in named()]
    return set(ray.get([one.__ray_call__.remote(lambda self: os.getpid()) for one in actors]))


def test_a_server_that_was_killed_finds_its_replicas_again(
    machines: Machines, tiny_model_dir: Path, tmp_path: Path, expected: list[Any]
) -> None:
    """With other settings it starts them anew. They end when it is told to end, also meanwhile."""
    saved = str(tmp_path / "saved")
    words = f"tiny={tiny_model_dir}", "--ray", machines.address, "--checkpoints", saved
    with Programs(tmp_path) as programs:
        serve = partial(programs.serve, "server", *words, "--replicas")
        join(machines.address)
        front = Front(serve("3"))
        assert replies(front) == expected
        begun = processes()
        assert len(begun) == 2
        parts = 'tinsmith_replica_parts_total{replica="replica 2"}'
        before = counted(front.url, parts)
        service = front.service_client()
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        tokens = list(range(3, 103))
        data = [make_datum(tokens, [*tokens[1:], 7], weights=[1.0] * 100)] * 400
        calls = [client.forward_backward(data, "cross_entropy") for _ in range(6)]
        until(lambda: counted(front.url, parts) > before)
        programs.end("server", signal.SIGKILL)
        serve("3", "--port", front.url.rpartition(":")[2])
        with pytest.raises(ValueError, match="the server was started again"):
            calls[-1].result()
        service.close("success")  # a server that was started again does not know it
        programs.said("server", "replica 3 of 3: .*, same bits, found again")
        assert processes() == begun
        assert replies(front) == expected
        programs.end("server", signal.SIGKILL)
        programs.start_server("server", *words, "--replicas", "2", "--memory", "2G")
        programs.said("server", "is started anew: .* other settings")
        programs.end("server")
        until(lambda: not named())
        until(lambda: not any(Path(f"/proc/{one}").exists() for one in begun))
    ray.shutdown()


def test_an_actor_has_one_owner_and_ends_when_it_has_none(head: Machines) -> None:
    join(head.address)
    kind = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(Actor)
    actor = kind.remote("first", None, 600.0)
    link = ActorLink(actor, "first")
    ray.get(actor.adopt.remote("second"))
    with pytest.raises(EOFError, match="another server has this replica"):
        link.receive()
    link.close()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(kind.remote("first", None, 0.01).hear.remote("first"))
    ray.shutdown()


def test_a_replica_with_other_bits_is_refused(
    head: Machines, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instruction set is the one that the server's environment names."""
    monkeypatch.setenv("TINSMITH_ISA", "generic")
    with pytest.raises(RuntimeError, match=r"replica 2 .*its instruction set is generic"):
        serve(tiny_model_dir, tmp_path, 2, head.address)
    assert not ray.is_initialized()


def test_a_server_with_too_few_replicas_does_not_listen(
    head: Machines, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PLACED_SECONDS", 0.1)
    has = r"each needs 1 CPU; the cluster's \d nodes? have \d CPUs? and 2 GPUs, of which .* free"
    with pytest.raises(RuntimeError, match=rf"\d of 4 replicas .* after 0 s: {has}"):
        serve(tiny_model_dir, tmp_path, 5, head.address)
    assert not ray.is_initialized()


def test_a_server_on_a_gpu_has_one_that_no_replica_gets(head: Machines) -> None:
    found = Cluster(head.address, "auto", "cuda", 0, None)
    try:
        assert found.own.device in ("cuda", "cuda:1")
        assert ray.available_resources()["GPU"] == 1
        assert found._count == 1
    finally:
        found.close()
    assert not ray.is_initialized()


def test_a_server_may_have_another_gpu(head: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its user has chosen."""
    for device, visible in (("cuda:1", None), ("cuda", "0")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = Cluster(head.address, 2, device, 0, None)
        try:
            assert found.own.device == device
        finally:
            found.close()


def test_who_has_joined_a_cluster_stays(head: Machines) -> None:
    ray.init(head.address, log_to_driver=False)
    assert not join(head.address)
    Cluster(head.address, "auto", "cpu", 1, None).close()
    assert ray.is_initialized()
    ray.shutdown()


def test_messages_stay_in_order_and_silence_is_an_end(head: Machines) -> None:
    class Silent:
        """An actor that speaks once. Inside a function, for Ray to send its code."""

        def __init__(self) -> None:
            self.messages = [["hello"]]
            self.told: list[Any] = []

        def tell(self, owner: str, messages: list[Any]) -> None:
            self.told += messages

        def hear(self, owner: str) -> list[Any]:
            if not self.messages:
                threading.Event().wait()
            return self.messages.pop()

        def all(self) -> list[Any]:
            return self.told

    join(head.address)
    kind = ray.remote(concurrency_groups={"tell": 1, "hear": 1})(Silent)
    actor = kind.options(num_cpus=0).remote()
    link = ActorLink(actor, "me", silent_seconds=0.1)
    for number in range(1000):
        link.send(number)
    assert link.receive() == "hello"
    with pytest.raises(EOFError, match="silent"):
        link.receive()
    until(lambda: len(ray.get(actor.all.remote())) == 1000)
    assert ray.get(actor.all.remote()) == list(range(1000))
    ray.kill(actor)
    with pytest.raises(EOFError, match="killed"):
        ActorLink(actor, "me").receive()
    link.close()
    ray.shutdown()


def test_a_cluster_that_is_not_there_is_a_sentence_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"can't join the Ray cluster .*: Connection refused"):
        join("127.0.0.1:1")


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl")
def test_tls_on_one_side_alone_is_a_sentence_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = str(tmp_path / "key"), str(tmp_path / "cert")
    made = "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=ray"
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def answer(server: socket.socket, encrypted: bool) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as found:
            if encrypted:
                context.wrap_socket(found, server_side=True).close()

    for encrypted, told in ((True, "it uses TLS, and this"), (False, "it does not use TLS")):
        monkeypatch.setenv("RAY_USE_TLS", str(int(not encrypted)))
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=answer, args=(server, encrypted))
            thread.start()
            with pytest.raises(RuntimeError, match=rf"{told}.*: see RAY_USE_TLS=1"):
                join(f"127.0.0.1:{server.getsockname()[1]}")
            thread.join()


def test_one_replica_needs_no_cluster() -> None:
    with pytest.raises(ValueError, match="say --replicas N, or auto"):
        Cluster("auto", 1, "cpu", 1, None)


def test_doctor_tells_of_each_node(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ray", machines.address]) == 0
    told = capsys.readouterr().out.partition("\nray ")[2].splitlines()
    assert told[0].startswith(f"{ray.__version__}: ") and "2 GPUs; a token is not used" in told[0]
    assert sum("; the same code, the same instruction set; " in line for line in told) >= 2
    head = [line for line in told if "1 CPU and 2 GPUs; " in line]
    assert len(head) == 1 and head[0].endswith(" within 91 s")  # 7 × (3 + 10)
    assert not any(" notices " in line for line in told if line not in head)
    assert not ray.is_initialized()
    join(machines.address)
    told = ray_report._told(ray.put(ray_report.facts() | {"code": "0123"}), ray_report.facts())
    assert told.startswith("another code, 0123, the same instruction set; ")
    ray.shutdown()


def test_replies_are_those_of_one_process_also_when_a_node_is_lost(
    machines: Machines, backend: Backend, expected: list[Any]
) -> None:
    """The replica of that node starts again when the cluster has another one."""
    assert replies(backend) == expected
    before = backend.crew.all
    assert all(one.weights_bytes for one in before)
    assert replies(backend, partial(lose_a_node, machines)) == expected
    assert lost(before).name not in [one.name for one in backend.crew.replicas]
    assert replies(backend) == expected
    machines.add_node(**NODE)
    until(lambda: len(backend.crew.replicas) == 2)
    assert [one.state for one in backend.crew.all] == ["same bits"] * 2
    assert replies(backend) == expected


def test_parts_of_calls_are_those_of_one_process_also_when_a_node_is_lost(
    machines: Machines, backend: Backend
) -> None:
    expected = Called(backend.worker, 1).whole()
    called, (first, second) = Called(backend.worker, 1), backend.crew.all
    at: dict[Replica, list[int]] = {first: [0, 1, 2, 6], second: [3, 4, 5, 7]}
    asked = {part: called.ask(one, part) for one, parts in at.items() for part in parts}
    results = [asked[part].result() for part in range(8)]
    assert called.gathered(results, at) == expected

    called = Called(backend.worker, 1)
    asked = {part: called.ask(one, part) for one, parts in at.items() for part in parts}
    results = [asked[part].result() for part in range(8)]
    lose_a_node(machines)
    gone = lost([first, second])
    with pytest.raises(ReplicaLost, match=f"{gone.name} is lost: "):
        gone.take(called.weights, called.request.call, [8]).result()
    other = first if gone is second else second
    for part in at[gone]:
        results[part] = called.ask(other, part).result()
    assert called.gathered(results, {other: list(range(8))}) == expected
