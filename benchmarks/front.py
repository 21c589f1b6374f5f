"""What a call costs the server's process, by thread, and what it costs to share one with a replica.

    python benchmarks/front.py --threads 2 --json benchmarks/front.json

The server runs in this process, on the demonstration's model; in another one, users make the SDK's
requests, all at once, each on a connection, a session and a run of its own. CPU milliseconds a
call: of the event loop, which speaks HTTP; of the worker, which runs the engine; and of all other
threads (history, disk, results, links to replicas). "engine" is the part of the worker's that
training calls spend in computing. The loop and the other threads are Python, so together they are
what one server can do. What healthz takes says how fast the machine is at such work just now.

The second table is a step, forward_backward of several micro-batches and optim_step, on a server
with two replicas: computed by this process, and shared with the other one. "sharing" is what the
worker spends on the call besides computing: weights are read, messages are pickled, sums are added.
The helper's engine also installs weights and sums; its other threads receive and send. MB are
those of the link in each direction. Samples at a replica are in the first table.

"both" is this process and the helper.
With --json the figures are also written to a file, for fleet.py. Some minutes."""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tinsmith
from latency import Client
from page import python_threads
from peers import parse, parser
from report import Report
from tinsmith.demo import demo
from tinsmith.engine import shared_call, training
from tinsmith.replicas import channel
from tinsmith.server.backend import Backend
from tinsmith.server.wire.messages import pb

RANK, SHARED_RANK = 8, 32
THREADS = {"tinsmith-server": "event loop", "tinsmith-worker": "worker"}
COLUMNS = ("in all", "event loop", "worker", "engine", "others")
SHARED = (
    "both", *COLUMNS, "sharing", "helper's engine", "helper's others", "MB to it", "MB back"
)  # fmt: skip
SHORT, LONG = (16, 1, 1), (16, 8, 128)  # a prompt's tokens, samples, their tokens


# ---- the client's side ----


class User(Client):
    """A connection with a session, a run and a sampler; each method makes one call."""

    def __init__(self, address: str, rank: int):
        super().__init__(address)
        self._run, self._samples, self._saves = self.create("m", rank), 0, 1
        asked = {"session_id": self._session, "sampling_session_seq_id": 1, "base_model": "m"}
        self._sampler = self.post("/create_sampling_session", **asked)["sampling_session_id"]

    def healthz(self) -> None:
        """The least that a request can be."""
        self._link.request("GET", "/healthz")
        self._link.getresponse().read()

    def open_session(self) -> None:
        """A new session."""
        self.post("/create_session", tags=[], sdk_version="0")

    def sample(self, prompt: int, count: int, tokens: int) -> None:
        """A request for samples from the base model, of so many tokens each."""
        self._samples += 1
        chunk = {"type": "encoded_text", "tokens": list(range(10, 10 + prompt))}
        asked = {"sampling_session_id": self._sampler, "seq_id": self._samples}
        asked |= {"prompt": {"chunks": [chunk]}, "num_samples": count}
        asked |= {"sampling_params": {"max_tokens": tokens, "stop": []}}
        self.done(self.post("/asample", **asked))

    def train(self, datums: int, length: int) -> None:
        """forward_backward."""
        body = self.head(self._run) + batch(datums, length)
        self.done(self.post("/forward_backward", body))

    def refused(self, datums: int, length: int) -> None:
        """forward_backward of a token that is no id: all is read, and nothing computed."""
        body = self.head(self._run) + batch(datums, length, last=1 << 20)
        assert "error" in self.result(self.post("/forward_backward", body))

    def optimize(self) -> None:
        """optim_step."""
        self.turn("/optim_step", self._run, adam_params={"learning_rate": 1e-3})

    def snapshot(self) -> None:
        """A sampler of the run's weights."""
        self._saves += 1
        self.turn("/save_weights_for_sampler", self._run, sampling_session_seq_id=self._saves)

    def step(self, datums: int, length: int) -> None:
        """One call of many tokens, and the optimizer's step."""
        self.train(datums, length)
        self.optimize()

    def make_runs(self, count: int) -> None:
        """Other runs."""
        for _ in range(count):
            self.create("m", 1)


@cache
def batch(datums: int, length: int, last: int = 0) -> bytes:
    """Datums of a request, which end in a token."""
    message, tokens = pb.ForwardBackwardRequest(), np.arange(length) % 200
    tokens[-1] = last
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.astype(np.int32).tobytes()
        for name, array, code in (
            ("target_tokens", np.zeros(length, np.int64), pb.DTYPE_INT64),
            ("weights", np.ones(length, np.float32), pb.DTYPE_FLOAT32),
        ):
            tensor = pb.Tensor(dense=array.tobytes(), dtype=code, shape=(length,))
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return message.SerializeToString()


def clients(url: str, users: int, rank: int, pipe: Connection) -> None:
    """The users' process. It is told (method, times, arguments) for all users at once, until it is
    told nothing."""
    made = [User(url.removeprefix("http://"), rank) for _ in range(users)]
    with ThreadPoolExecutor(users) as pool:
        pipe.send(None)
        while told := pipe.recv():
            name, times, arguments = told

            def make(user: User, name=name, times=times, arguments=arguments) -> None:
                for _ in range(times):
                    getattr(user, name)(*arguments)

            list(pool.map(make, made))
            pipe.send(None)


@contextmanager
def asking(backend: Backend, users: int, rank: int) -> Iterator[Callable[..., None]]:
    """The users' process, as a function that has all of them make calls and waits for them."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=clients, args=(backend.url, users, rank, theirs), daemon=True)
    process.start()
    theirs.close()

    def ask(name: str, times: int, *arguments: Any) -> None:
        ours.send((name, times, arguments))
        ours.recv()

    ours.recv()
    try:
        yield ask
    finally:
        ours.send(None)
        process.join()


# ---- the server's side ----


class Meter:
    """Counts what is not a thread's: the engine's CPU seconds of training calls, those of sharing
    them, and the bytes of links."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts from here on."""
        compute, steps = shared_call.compute_part, shared_call.SharedCall.steps
        write, read, mapped = channel.Channel._write_one, channel.Channel._read, channel._mapped

        def shared(call: Any, compute: Any) -> Iterator[Any]:
            before = self.counts["engine"]
            loss = yield from self._timed(steps(call, compute), "steps")
            spent = self.counts.pop("steps") - (self.counts["engine"] - before)
            self.counts["sharing"] += spent
            return loss

        def count_sent(link: Any, frame: bytes, outside: list[memoryview]) -> None:
            self.counts["MB to it"] += (len(frame) + sum(one.nbytes for one in outside)) / 1e6
            write(link, frame, outside)

        def count_read(link: Any, size: int) -> bytearray:
            self.counts["MB back"] += size / 1e6
            return read(link, size)

        def count_mapped(fd: int, held: int, sizes: tuple[int, ...]) -> list[memoryview]:
            self.counts["MB back"] += held / 1e6
            return mapped(fd, held, sizes)

        def computed(*given: Any) -> Iterator[Any]:
            return self._timed(compute(*given), "engine")

        with (
            mock.patch.object(shared_call, "compute_part", computed),
            mock.patch.object(training, "compute_part", computed),
            mock.patch.object(shared_call.SharedCall, "steps", shared),
            mock.patch.object(channel.Channel, "_write_one", count_sent),
            mock.patch.object(channel.Channel, "_read", count_read),
            mock.patch.object(channel, "_mapped", count_mapped),
        ):
            yield

    def _timed(self, work: Any, name: str) -> Iterator[Any]:
        """A generator, of whose own time the CPU seconds are counted."""
        while True:
            begin = time.thread_time()
            try:
                found = next(work)
            except StopIteration as end:
                return end.value
            finally:
                self.counts[name] += time.thread_time() - begin
            yield found


def helper_seconds(backend: Backend) -> dict[str, float]:
    """CPU seconds of the helper's threads: of those beside the one that receives, the busiest is
    its engine's."""
    if not backend.crew.all:
        return {}
    process = backend.crew.all[0].alive.process
    spent = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{process}/task").iterdir()
    }
    engine = max(time for thread, time in spent.items() if thread != process)
    return {"helper's engine": engine, "helper's others": sum(spent.values()) - engine}


def seconds(backend: Backend, meter: Meter) -> Counter[str]:
    """CPU seconds so far by SHARED, and what the meter counts."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for thread, spent in python_threads(threading.get_native_id()).items():
        found[THREADS.get(names.get(thread, ""), "others")] += spent
    found["in all"] = sum(found.values())
    helper = helper_seconds(backend)
    found["both"] = found["in all"] + sum(helper.values())
    found.update(helper)
    found.update(meter.counts)
    return found


def measure(
    server: tuple[Backend, Meter],
    call: Callable[[], None],
    calls: int,
    waves: int,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """What each of a wave's calls takes, on average: CPU milliseconds, and MB. Before each wave
    `prepare` is called."""
    found: Counter[str] = Counter()
    for _ in range(waves):
        prepare()
        before = seconds(*server)
        call()
        found.update(seconds(*server))
        found.subtract(before)
    return {n: found[n] / calls / waves * (1 if "MB" in n else 1e3) for n in SHARED}


def medians(rows: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float]:
    """Those of some rounds."""
    return {name: statistics.median(row[name] for row in rows) for name in names}


@contextmanager
def serving(replicas: int) -> Iterator[tuple[Backend, Meter]]:
    """A server, with one thread for each replica."""
    meter = Meter()
    with (
        tempfile.TemporaryDirectory() as folder,
        tinsmith.serve(
            {"m": demo.MODEL}, checkpoints=folder, device="cpu", threads=replicas, replicas=replicas
        ) as backend,
        meter.counting(),
    ):
        while backend.crew.all and not backend.crew.all[0].alive.process:
            time.sleep(0.01)
        yield backend, meter


def show_calls(args: argparse.Namespace, report: Report) -> dict[str, dict[str, float]]:
    """The first table."""
    columns = dict.fromkeys((f"{name}, cpu-ms" for name in COLUMNS), ".2f")
    table = report.table("A call", "call", columns, plot="in all, cpu-ms")
    kept = {}

    def row(case: str, name: str, *given: int, after: tuple[Any, ...] = ()) -> None:
        """`after`: what is made before each call and not counted."""
        times = 1 if after else args.calls
        prepare = partial(ask, *after) if after else lambda: None
        call = partial(ask, name, times, *given)
        prepare()
        call()
        waves = args.calls // times
        rounds = [
            measure(server, call, args.users * times, waves, prepare) for _ in range(args.rounds)
        ]
        kept[case] = medians(rounds, COLUMNS)
        table.add(case, {"tinsmith": tuple(kept[case].values())})

    with serving(1) as server, asking(server[0], args.users, RANK) as ask:
        row("healthz", "healthz")
        row("create_session", "open_session")
        row("sample, 16 + 1 tokens", "sample", *SHORT)
        row("sample, 16 + 8 × 128 tokens", "sample", *LONG)
        row("forward_backward, 1 × 16", "train", 1, 16)
        row("forward_backward, 128 × 512, refused", "refused", 128, 512)
        row("optim_step", "optimize", after=("train", 1, 1, 16))
        row("snapshot", "snapshot")
        ask("make_runs", 1, args.runs // args.users)
        row(f"forward_backward, 1 × 16, {args.runs} idle runs", "train", 1, 16)
    with serving(2) as server, asking(server[0], args.users, RANK) as ask:
        crew = server[0].crew
        with mock.patch.object(crew, "choose", lambda *_: crew.all[0]):
            row("sample, 16 + 1 tokens, at a replica", "sample", *SHORT)
            row("sample, 16 + 8 × 128 tokens, at a replica", "sample", *LONG)
    return kept


def show_sharing(args: argparse.Namespace, report: Report) -> dict[str, dict[str, float]]:
    """The second table."""
    units = (name if "MB" in name else f"{name}, cpu-ms" for name in SHARED)
    title = f"A step of {args.datums} × {args.length} tokens, rank {SHARED_RANK}"
    table = report.table(title, "case", dict.fromkeys(units, ".2f"), plot="both, cpu-ms")
    found: dict[str, list[dict[str, float]]] = {"one process": [], "two replicas": []}
    with serving(2) as server, asking(server[0], 1, SHARED_RANK) as ask:
        crew = server[0].crew
        replicas = {"one process": [], "two replicas": crew.replicas}
        for number in range(args.rounds + 1):
            for side, those in replicas.items():
                with mock.patch.object(crew, "replicas", those):
                    step = measure(server, lambda: ask("step", 1, args.datums, args.length), 1, 1)
                if number:  # the first is a warm-up
                    found[side].append(step)
    kept = {side: medians(rows, SHARED) for side, rows in found.items()}
    table.add("a step", {side: tuple(figures.values()) for side, figures in kept.items()})
    return kept


def main() -> None:
    """Both tables."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, default=16, help="at once (%(default)s)")
    options.add_argument("--calls", type=int, default=12, help="of each user (%(default)s)")
    options.add_argument("--runs", type=int, default=1000, help="idle ones (%(default)s)")
    options.add_argument("--datums", type=int, default=16, help="of a shared call (%(default)s)")
    options.add_argument("--length", type=int, default=512, help="of each (%(default)s)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parse(options)
    with Report(args, __doc__, roofline=False) as report:
        figures = {"calls": show_calls(args, report), "step": show_sharing(args, report)}
        if args.json:
            about = {"machine": report.machine}
            args.json.write_text(json.dumps(about | figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
