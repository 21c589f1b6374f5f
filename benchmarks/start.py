"""From the start of a process to the end of its first forward_backward, on the demo model.

    python benchmarks/start.py --rounds 5

Two ways: `tinsmith.Model` in a fresh Python, and `tinsmith serve` with a client that speaks HTTP
without the SDK. Beside them what `import tinker` takes, which a client of the SDK pays before its
first request. Wall seconds, of which the best round is shown because neighbours only add to them,
and the median CPU seconds of the processes."""

import argparse
import http.client
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tinsmith.demo import demo
from tinsmith.messages import pb

IDS = list(range(5, 105))
MODEL = f"""
import tinsmith
adapter = tinsmith.Model({str(demo.MODEL)!r}, device="cpu").lora(rank=32)
ids = list(range(5, 105))
assert adapter.forward_backward(ids, ids).loss > 0
"""


def run_model() -> None:
    """A fresh Python with tinsmith.Model."""
    subprocess.run([sys.executable, "-c", MODEL], check=True)


def run_import(module: str) -> None:
    """A fresh Python that imports a module."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def post(link: http.client.HTTPConnection, path: str, body: Any) -> Any:
    """A request's JSON, or its bytes."""
    plain = isinstance(body, dict)
    link.request("POST", f"/api/v1{path}", json.dumps(body) if plain else body)
    reply = link.getresponse()
    content = reply.read()
    assert reply.status == 200, content
    return json.loads(content) if content[:1] == b"{" else content


def run_server() -> None:
    """`tinsmith serve` and a client's first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tinsmith.cli", "serve", f"demo={demo.MODEL}", "--checkpoints", folder]
        server = subprocess.Popen(
            [sys.executable, *command, "--port", "0", "--device", "cpu"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            said = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
            assert said is not None
            first_step(http.client.HTTPConnection(said[1], int(said[2])))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def first_step(link: http.client.HTTPConnection) -> None:
    """What a client sends up to the end of its first forward_backward."""
    session = post(link, "/create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": "demo"}
    made = post(link, "/create_model", wanted | {"lora_config": {"rank": 32}})
    post(link, "/retrieve_future", {"request_id": made["request_id"]})
    message = pb.ForwardBackwardRequest(
        model_id=made["model_id"], seq_id=1, loss_fn="cross_entropy"
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(IDS, "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.asarray(IDS, "<i8").tobytes(), pb.DTYPE_INT64
    promised = post(link, "/forward_backward", message.SerializeToString())
    done = post(link, "/retrieve_future", {"request_id": promised["request_id"]})
    assert pb.ForwardBackwardOutput.FromString(done).metrics["loss:sum"] > 0


def cpu_of_children() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints one row a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    ways: dict[str, Callable[[], None]] = {
        "tinsmith.Model, first forward_backward": run_model,
        "tinsmith serve, first forward_backward, its end": run_server,
        "of these: import tinsmith": lambda: run_import("tinsmith"),
        "of these: import tinsmith.server": lambda: run_import("tinsmith.server"),
        "beside them: import numpy": lambda: run_import("numpy"),
        "beside them: import tinker (the SDK)": lambda: run_import("tinker"),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, call in ways.items():
            start, used = time.perf_counter(), cpu_of_children()
            call()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(cpu_of_children() - used)
    print(f"{'best or median of ' + str(options.rounds):50} {'wall, s':>8} {'CPU, s':>8}")
    for name in ways:
        print(f"{name:50} {min(wall[name]):8.2f} {statistics.median(cpu[name]):8.2f}")


if __name__ == "__main__":
    main()
