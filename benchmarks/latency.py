"""What another client waits for while the server reads, writes and copies hundreds of MB.

    python benchmarks/latency.py
    python benchmarks/latency.py --request 20 --adapter 50 --model 100   # MB; smaller

A process of its own asks for /healthz every 20 ms. The cases are a forward_backward request of
--request MB: in datums of 512 tokens, the last of which is refused, so that nothing is computed;
the same compressed; and in datums with 256 targets a token, whose log-probabilities are then read.
Then, with an adapter of --adapter MB (rank 32 of an 8B has 350), a run's creation, snapshot and
checkpoint; and the first request to a model of --model MB, which reads it. The other side is a
second server, which has nothing to do, asked in the same seconds: what it waits for is the machine.
Every reply of every round counts.

Two minutes and 4 GB of memory."""

import argparse
import http.client
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tinsmith
import zstandard
from report import Report
from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models import registry
from tinsmith.server.wire.messages import pb

EVERY = 0.02  # seconds from one /healthz to the next
AFTER_SECONDS = 0.3  # what a call leaves to be freed counts to it
VOCAB, CONTEXT, LENGTH, TARGETS = 512, 4096, 512, 256
SMALL = {"width": 512, "ffn": 1024, "layers": 10}  # the model that is trained
LARGE = {"width": 2048, "ffn": 8192}  # the one that is read, of as many layers as it needs
MB = 1_000_000


# ---- models ----


def make_model(folder: Path, width: int, ffn: int, layers: int) -> Path:
    """A folder with a Qwen3 of random weights in bfloat16; its heads are 64 wide."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": VOCAB - 1}}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": words}))
    core, family = _core.Model(*registry.read_config(folder)), registry.read_family(folder)
    forms = {
        family.tensor(slot, layer, index): (rows, cols)
        for slot, layer, index, rows, cols in core.slots
    }
    shapes = {
        name: (np.dtype(np.uint16), form[1:] if form[0] == 1 else form)
        for name, form in forms.items()
    }
    drawn = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    bits = safetensors_io.narrow(drawn, np.dtype(np.uint16))
    safetensors_io.write_each(
        folder / "model.safetensors", shapes, lambda name: np.resize(bits, shapes[name][1])
    )
    return folder


def matrix_bytes(width: int, ffn: int) -> int:
    """What a layer's matrices take in bfloat16."""
    return 2 * (4 * width * width + 3 * width * ffn)


def rank_of(size: int) -> int:
    """The rank at which an adapter on the small model has so many bytes."""
    width, ffn, layers = SMALL["width"], SMALL["ffn"], SMALL["layers"]
    a_rank = 4 * (layers * (8 * width + 3 * (width + ffn)) + width + VOCAB)
    return max(1, round(size / a_rank))


# ---- the other processes ----


def serve(models: dict[str, Path], folder: Path, threads: int, pipe: Connection) -> None:
    """A server, which sends its address, until something comes through the pipe."""
    with tinsmith.serve(
        models, checkpoints=folder, threads=threads, device="cpu", preload=False
    ) as backend:
        pipe.send(backend.url.removeprefix("http://"))
        pipe.recv()


def ping(address: str, pipe: Connection) -> None:
    """Asks for /healthz until something comes through the pipe, and then sends when each request
    began and how long it took."""
    link, found = http.client.HTTPConnection(address), []
    while not pipe.poll(EVERY):
        start = time.perf_counter()
        link.request("GET", "/api/v1/healthz")
        assert link.getresponse().read() == b'{"status":"ok"}'
        found.append((start, time.perf_counter() - start))
    pipe.send(found)


class Process:
    """A function in a process of its own, with a pipe to it; it ends when it is told to."""

    def __init__(self, work: Callable[..., None], *arguments: Any):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(*arguments, theirs), daemon=True)
        self._process.start()

    def ask(self) -> Any:
        """What it sends when it ends."""
        self.pipe.send(None)
        return self.pipe.recv()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self.pipe.send(None)
        self._process.join()


# ---- the client ----


class Client:
    """The SDK's requests, by hand: in datums of any size, and without its own copies."""

    def __init__(self, address: str):
        self._link = http.client.HTTPConnection(address)
        self._session = self.post("/create_session", tags=[], sdk_version="0")["session_id"]
        self._runs = 0
        self._turns: dict[str, int] = {}

    def post(self, path: str, /, body: bytes = b"", coding: str = "identity", **fields: Any) -> Any:
        """A reply: a JSON object, or bytes."""
        headers = {"Content-Encoding": coding}
        self._link.request("POST", f"/api/v1{path}", body or json.dumps(fields), headers)
        reply = self._link.getresponse()
        content = reply.read()
        if path == "/retrieve_future" and reply.status == 408:
            return self.post(path, body, coding, **fields)
        assert reply.status == 200, content
        return json.loads(content) if content[:1] == b"{" else content

    def result(self, promise: dict[str, Any]) -> Any:
        """What was promised."""
        return self.post("/retrieve_future", request_id=promise["request_id"])

    def turn(self, path: str, run: str, /, **fields: Any) -> Any:
        """A run's next request, done."""
        self._turns[run] += 1
        return self.done(self.post(path, model_id=run, seq_id=self._turns[run], **fields))

    def done(self, promise: dict[str, Any]) -> Any:
        """What was promised, which is no error."""
        found = self.result(promise)
        assert isinstance(found, bytes) or "error" not in found, found
        return found

    def create(self, model: str, rank: int) -> str:
        """A new run."""
        self._runs += 1
        wanted = {"model_seq_id": self._runs, "base_model": model}
        body = wanted | {"session_id": self._session, "lora_config": {"rank": rank}}
        run = self.done(self.post("/create_model", **body))["model_id"]
        self._turns[run] = 0
        return run

    def unload(self, run: str) -> None:
        """Ends a run."""
        self.done(self.post("/unload_model", model_id=run))

    def head(self, run: str) -> bytes:
        """What makes datums the run's next request: messages one after another are one."""
        self._turns[run] += 1
        message = pb.ForwardBackwardRequest(
            model_id=run, seq_id=self._turns[run], loss_fn="cross_entropy"
        )
        return message.SerializeToString()


def make_data(count: int, length: int, targets: int, last: int) -> bytes:
    """Datums of a request, with weights; the last one's last token is given."""
    rng, message = np.random.default_rng(1), pb.ForwardBackwardRequest()
    shape = (length, targets) if targets > 1 else (length,)
    for number in range(count):
        datum = message.data.add()
        tokens = rng.integers(0, VOCAB, length, np.int32)
        tokens[-1] = last if number == count - 1 else tokens[-1]
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, array, code in (
            ("target_tokens", rng.integers(0, VOCAB, shape, np.int64), pb.DTYPE_INT64),
            ("weights", rng.random(shape, np.float32), pb.DTYPE_FLOAT32),
        ):
            tensor = pb.Tensor(dense=array.tobytes(), dtype=code, shape=shape)
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return message.SerializeToString()


# ---- the cases ----


Pings = list[tuple[float, float]]  # when each request began, and the seconds that it took


@dataclass
class Case:
    """The stretches of time that one case took, round by round."""

    stretches: list[tuple[float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # that its calls took

    def add(self, call: Callable[[], Any]) -> Any:
        """One round: a call, and a moment after it."""
        start = time.perf_counter()
        found = call()
        self.seconds.append(time.perf_counter() - start)
        time.sleep(AFTER_SECONDS)
        self.stretches.append((start, time.perf_counter()))
        return found

    def figures(self, pings: Pings) -> tuple[float, ...]:
        """The worst, 99th percentile and median of the requests that were on their way then, in ms;
        the seconds of one call, and how many requests there were."""
        found = [
            1e3 * seconds
            for start, seconds in pings
            if any(start + seconds > begin and start < end for begin, end in self.stretches)
        ]
        p99, seconds = float(np.percentile(found, 99)), statistics.mean(self.seconds)
        return max(found), p99, statistics.median(found), seconds, len(found)


class Cases(defaultdict[str, Case]):
    """The cases by their names."""

    def __init__(self) -> None:
        super().__init__(Case)

    def add(self, name: str, call: Callable[[], Any]) -> Any:
        """One round of a case."""
        return self[name].add(call)


def requests(client: Client, cases: Cases, run: str, size: int, rounds: int) -> None:
    """The cases of large forward_backward requests."""
    count = max(2, size // (LENGTH * 16))
    refused = make_data(count, LENGTH, 1, last=VOCAB)
    wide = make_data(max(1, size // (LENGTH * (TARGETS * 12 + 4))), LENGTH, TARGETS, last=0)
    squeezed = zstandard.ZstdCompressor(level=1)
    for _ in range(rounds):
        body = client.head(run) + refused
        promise = cases.add("request", lambda body=body: client.post("/forward_backward", body))
        assert f"datum {count - 1}: model_input has id {VOCAB}" in client.result(promise)["error"]
        body = squeezed.compress(client.head(run) + refused)
        cases.add(
            "request, zstd", lambda body=body: client.post("/forward_backward", body, coding="zstd")
        )
        body = client.head(run) + wide
        name = f"request, {TARGETS} targets"
        promise = cases.add(name, lambda body=body: client.post("/forward_backward", body))
        client.done(promise)
        cases.add("its result", lambda promise=promise: client.done(promise))


def adapters(client: Client, cases: Cases, size: int, rounds: int) -> None:
    """The cases of a large adapter."""
    for number in range(rounds):
        run = cases.add("create", lambda: client.create("small", rank_of(size)))
        cases.add(
            "snapshot",
            lambda run=run, number=number: client.turn(
                "/save_weights_for_sampler", run, sampling_session_seq_id=number
            ),
        )
        cases.add("save", lambda run=run: client.turn("/save_weights", run, path="saved"))
        cases.add("unload", lambda run=run: client.unload(run))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in (("request", 100), ("adapter", 350), ("model", 1000)):
        parser.add_argument(f"--{name}", type=float, default=size, metavar="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engine; 1 if not given")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the table too")
    args = parser.parse_args()
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    args.clock, args.said = "wall", f"all of {args.rounds} rounds, wall time"
    return args


def main() -> None:
    """Measures every case, and prints a row for each."""
    args = options()
    layers = max(1, round(args.model * MB / matrix_bytes(**LARGE)))
    columns = {"worst, ms": ".1f", "99 %, ms": ".1f", "median, ms": ".2f", "takes, s": ".2f"}
    with tempfile.TemporaryDirectory() as name, Report(args, __doc__, roofline=False) as report:
        folder, cases = Path(name), Cases()
        models = {
            "small": make_model(folder / "small", **SMALL),
            "large": make_model(folder / "large", **LARGE, layers=layers),
        }
        with ExitStack() as open_:
            servers = {
                side: open_.enter_context(Process(serve, models, folder / side, args.threads))
                for side in ("busy", "idle")
            }
            addresses = {side: server.pipe.recv() for side, server in servers.items()}
            client = Client(addresses["busy"])
            run = client.create("small", 8)
            pingers = {
                side: open_.enter_context(Process(ping, address))
                for side, address in addresses.items()
            }
            time.sleep(2)  # until they have begun
            requests(client, cases, run, int(args.request * MB), args.rounds)
            adapters(client, cases, int(args.adapter * MB), args.rounds)
            cases.add("open", lambda: client.create("large", 8))
            pings = {side: pinger.ask() for side, pinger in pingers.items()}
        table = report.table("Replies of /healthz", "case", columns | {"replies": ".0f"})
        for name, case in cases.items():
            table.add(name, {side: case.figures(found) for side, found in pings.items()})


if __name__ == "__main__":
    main()
