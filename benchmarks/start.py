"""From the start of a process to the end of its first forward_backward, on the demo model.

    python benchmarks/start.py

Two ways: `tinsmith.Model` in a fresh Python, and `tinsmith serve`, up to its end, with a client who
speaks HTTP without the SDK. Then what of it is imports, and beside them that of `tinker`, which a
client of the SDK pays before its first request. CPU seconds are those of the processes, of which
all share the cores; beside the median is the best wall time, because neighbours only add to it.

Half a minute."""

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
from functools import partial
from typing import Any

import numpy as np
from peers import alternate, parse, parser
from report import Report
from tinsmith.demo import demo
from tinsmith.server.wire.messages import pb

IDS = list(range(5, 105))
QUIET = os.environ | {"PYTHONWARNINGS": "ignore"}
MODEL = f"""
import tinsmith
adapter = tinsmith.Model({str(demo.MODEL)!r}, device="cpu").lora(rank=32)
ids = list(range(5, 105))
assert adapter.forward_backward(ids, ids).loss > 0
"""


def run_model() -> None:
    """A fresh Python with tinsmith.Model."""
    subprocess.run([sys.executable, "-c", MODEL], env=QUIET, check=True)


def run_import(module: str) -> None:
    """A fresh Python that imports a module."""
    subprocess.run([sys.executable, "-c", f"import {module}"], env=QUIET, check=True)


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
            env=QUIET,
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


def measure(call: Callable[[], None]) -> dict[str, float]:
    """Seconds of a call by each of peers.CLOCKS, CPU seconds being its children's."""
    start, used = time.perf_counter(), cpu_of_children()
    call()
    return {"wall": time.perf_counter() - start, "cpu": cpu_of_children() - used}


CASES: dict[str, dict[str, Callable[[], None]]] = {
    "first forward_backward": {"tinsmith.Model": run_model, "tinsmith serve": run_server},
    "import": {
        name: partial(run_import, name)
        for name in ("tinsmith", "tinsmith.server.backend", "numpy", "tinker")
    },
}


def main() -> None:
    """A case for the first step, and one for the imports."""
    args = parse(parser(__doc__))
    sides = {name: call for case in CASES.values() for name, call in case.items()}
    with Report(args, __doc__, roofline=False) as report:
        columns = {args.unit: ".2f", "best wall, s": ".2f"}
        table = report.table("A fresh process", "up to", columns, plot=args.unit)
        found = alternate(sides, args.rounds, measure, warm_up=False)
        for case, names in CASES.items():
            rows = {}
            for name in names:
                wall, used = ([run[clock] for run in found[name]] for clock in ("wall", args.clock))
                rows[name] = (statistics.median(used), min(wall))
            table.add(case, rows)


if __name__ == "__main__":
    main()
