"""A server with replicas on two machines of a Ray cluster, whose cable is cut and mended. The other
machine is a network namespace, which needs root. On request; -s shows when what happened:

    pytest -n 0 -s tests/replicas/test_ray_network.py
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from support.programs import Programs
from test_replica_server import counted
from tinsmith.demo.demo import MODEL

NEEDS = {
    "the extra `ray`": find_spec("ray"),
    "root": os.geteuid() == 0,
    "`ip` of iproute2": shutil.which("ip"),
}
MISSING = ", ".join(name for name, there in NEEDS.items() if not there)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"it needs {MISSING}")]

SPACE, HERE, THERE = f"tinsmith{os.getpid()}", "10.77.213.1", "10.77.213.2"
CABLE = f"ts{os.getpid()}a", f"ts{os.getpid()}b"
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
STEPS, CUT, MENDED = 30, 10, 20  # of the recipe
CHECKS = {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789" * 4,
    "RAY_agent_register_timeout_ms": "300000",  # a busy machine starts it slowly
    **{f"RAY_health_check_{name}": str(value) for name, value in CHECKS.items()},
}


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr}")
    return done.stdout


def cable(state: str) -> None:
    """Cuts the cable at its far end ("down"), or mends it ("up")."""
    ip("-n", SPACE, "link", "set", CABLE[1], state)


@pytest.fixture
def there() -> Iterator[list[str]]:
    """The other machine: what begins a command on it."""
    try:
        ip("netns", "add", SPACE)
    except OSError as error:
        pytest.skip(str(error))
    try:
        ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1], "netns", SPACE)
        ip("addr", "add", f"{HERE}/30", "dev", CABLE[0])
        ip("link", "set", CABLE[0], "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", CABLE[1])
        ip("-n", SPACE, "link", "set", "lo", "up")
        cable("up")
        yield ["ip", "netns", "exec", SPACE]
    finally:
        for process in ip("netns", "pids", SPACE).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        ip("netns", "del", SPACE)


@pytest.fixture
def programs(there: list[str]) -> Iterator[Programs]:
    """Their folder has a short name: Ray's sockets are in it."""
    with (
        tempfile.TemporaryDirectory(prefix="ray") as name,
        Programs(Path(name), ENVIRONMENT | {"RAY_TMPDIR": name}) as made,
    ):
        yield made


def serve(programs: Programs, name: str, *words: str) -> str:
    """Starts a server; its address."""
    folder = str(programs.folder / f"{name}.saved")
    return programs.serve(name, str(MODEL), "--checkpoints", folder, *words)


def start_node(programs: Programs, name: str, where: list[str], *words: str) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    fixed = ["--block", "--num-cpus", "1", "--object-store-memory", str(100 << 20)]
    programs.start(name, *where, ray, "start", *fixed, *words)
    programs.said(name, "Ray runtime started")


def recipe(url: str, during: Callable[[int], None]) -> str:
    """The digest of all replies to a recipe. `during` is called while a step's calls wait."""
    digest = hashlib.sha256()
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        client = service.create_lora_training_client(str(MODEL), rank=8, seed=1).result()
        for number in range(STEPS):
            rng, loss = np.random.default_rng(number), LOSSES[number % 3]
            sampler = client.save_weights_and_get_sampling_client().result()
            params = tinker.SamplingParams(max_tokens=24, seed=number)
            drawn = [
                sampler.sample(tinker.ModelInput.from_ints([n, 5, 6]), 2, params) for n in range(4)
            ]
            called = client.forward_backward(data(rng, loss), loss)
            ended = client.optim_step(tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
            during(number)
            output = called.result()
            found: list[Any] = [output.metrics["loss:sum"], ended.result().metrics["grad_norm"]]
            found += [row["logprobs"].to_numpy().tobytes() for row in output.loss_fn_outputs]
            found += [[(s.tokens, s.logprobs) for s in one.result().sequences] for one in drawn]
            digest.update(repr(found).encode())
    return digest.hexdigest()


def data(rng: np.random.Generator, loss: str) -> list[tinker.Datum]:
    """Datums that are all eight parts of a call."""
    found = []
    for length in rng.integers(20, 200, size=24):
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 250, length)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.uniform(-1, 2, length).astype(np.float32)
        else:
            inputs["logprobs"] = -rng.uniform(4, 6, length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        prompt = tinker.ModelInput.from_ints(rng.integers(0, 250, length).tolist())
        found.append(tinker.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return found


def test_replies_are_those_of_one_process_when_the_cable_is_cut(
    programs: Programs, there: list[str]
) -> None:
    """Ray's health checks notice it. The other machine's node ends when the cable is mended, and
    the replica comes back when the node is started again."""
    expected = recipe(serve(programs, "one process"), lambda number: None)
    with socket.create_server((HERE, 0)) as free:
        port = str(free.getsockname()[1])
    head = ["--head", "--node-ip-address", HERE, "--port", port, "--include-dashboard", "false"]
    other = ["--address", f"{HERE}:{port}", "--node-ip-address", THERE]
    start_node(programs, "head", [], *head)
    start_node(programs, "other", there, *other)
    url = serve(programs, "server", "--ray", f"{HERE}:{port}", "--replicas", "3")
    same = 'tinsmith_replicas{state="same bits"}'
    assert counted(url, same) == 2

    def disturb(number: int) -> None:
        if number == CUT:
            cable("down")
            programs.tell("the cable is cut")
            programs.said("server", r"replica . \(.*\) is lost: The actor died because its node.*")
        if number == MENDED:
            assert counted(url, same) == 1
            cable("up")
            programs.said("other", "exit code=")
            start_node(programs, "other", there, *other)
            programs.said("server", "replica .* same bits again")

    assert recipe(url, disturb) == expected
    assert counted(url, same) == 2
    repeated = ("tinsmith_repeated_total", "tinsmith_parts_repeated_total")
    assert sum(counted(url, name) for name in repeated)
