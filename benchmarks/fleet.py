"""1,000 users on up to 64 GPUs, simulated: which queue of a server with replicas is long first.

    python benchmarks/fleet.py

The front's costs are those that front.py has measured (front.json); a GPU's speeds are assumed, as
are the owner's link and buses. No GPU is asked: this is what the server's own rules do with those
figures. One process is the owner of all runs. A run's weights go from it to each replica that
samples or trains with them, once for each new version, and each replica that computed parts of a
call sends one sum back. The owner's engine reads weights, adds sums and takes optimizer steps, one
at a time. Samples of a run go to replicas by a hash of weights and prompt, parts to the replica
with the fewest requests.

A user of SFT repeats forward_backward of 32 × 512 tokens and an optimizer step; one of RL samples
64 groups of 8 answers of 256 tokens from the newest weights, and trains on them. After STEPS of
them for each user, on average, "steps/s" is the rate since the first. Shares are those of the time
in which a queue was busy: of the fronts' loop and interpreter, of the owner's link in both
directions, of the owner's engine, of the other GPUs. "one home" is the rate if each run's samples
and parts went to one replica. All runs fit on the owner's card. Several fronts would share the HTTP
of one owner, which no server does yet.

Some minutes of one core."""

import argparse
import heapq
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """What a GPU does of a model, in tokens a second, and the bytes of a run's gradient in f32."""

    train: float
    decode: float
    vector: float


GPUS = {
    "0.6B": Gpu(150e3, 20e3, 0.100 * GB),
    "8B": Gpu(12e3, 3e3, 0.369 * GB),
    "30B-A3B": Gpu(25e3, 4e3, 1.98 * GB),
}
LINK = 12.5 * GB  # bytes a second of the owner's, in each direction: 100 Gb/s
BUS = 25 * GB  # between a card and its host
MEMORY = 3000 * GB  # of a card; AdamW moves 7 vectors
ROWS, PARTS = 8192, 8  # of a micro-batch on a GPU; parts of a call
TURN = 0.2  # seconds of a job's turn on a device
LOAD = 1.25  # times the mean that a replica may have of samples
GROUPS, ANSWERS, ANSWER, PROMPT = 64, 8, 256, 94  # of a step of RL
STEPS = 2
THINK, PAUSE = 5.0, 0.2  # seconds between two steps: of RL, on average, and of SFT

# It yields what it waits for: a moment; (device, seconds) of work; or a list of other processes.
Process = Generator[Any, None, None]


# ---- the machine ----


class Simulation:
    """Processes, and what they wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Calls at a moment."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, call))

    def start(self, process: Process, then: Callable[[], None] = lambda: None) -> None:
        """Runs a process until it waits, and goes on when that has come."""
        try:
            wait = next(process)
        except StopIteration:
            then()
            return

        def go_on() -> None:
            self.start(process, then)

        if isinstance(wait, list):
            left = len(wait)

            def one_less() -> None:
                nonlocal left
                left -= 1
                if not left:
                    go_on()

            for other in wait:
                self.start(other, one_less)
        elif isinstance(wait, tuple):
            device, seconds = wait
            device.add(seconds, go_on)
        else:
            self.at(wait, go_on)

    def run(self, over: Callable[[], bool]) -> None:
        """Until it is over."""
        while not over():
            self.now, _, call = heapq.heappop(self._events)
            call()


class Queue:
    """Some servers, first come first served."""

    def __init__(self, simulation: Simulation, servers: int = 1):
        self._simulation, self._free = simulation, [0.0] * servers
        self._servers = servers
        self.spent = 0.0  # seconds of work, over its servers

    def serve(self, seconds: float) -> float:
        """The moment when a job that comes now is done."""
        done = max(self._simulation.now, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, done)
        self.spent += seconds / self._servers
        return done


class Device:
    """A GPU, whose jobs take turns."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self.spent = 0.0  # seconds of work
        self.waiting = 0  # parts that it was given
        self.samples = 0  # requests that it was given
        self.there: dict[Any, float] = {}  # when weights have come, by run and version

    def add(self, seconds: float, then: Callable[[], None]) -> None:
        """Queues a job."""
        self._jobs.append((seconds, then))
        if len(self._jobs) == 1:
            self._turn()

    def _turn(self) -> None:
        seconds, then = self._jobs[0]
        turn = min(seconds, TURN)
        self.spent += turn

        def over() -> None:
            self._jobs.popleft()
            if seconds > turn:
                self._jobs.append((seconds - turn, then))
            if self._jobs:
                self._turn()
            if seconds <= turn:
                then()

        self._simulation.at(self._simulation.now + turn, over)


# ---- the server ----


@dataclass(frozen=True)
class Cost:
    """Seconds of a call at the front: of HTTP and Python's other threads, and of the worker."""

    http: float
    worker: float


class Costs:
    """What calls cost, from front.py's file, on a machine that is `speed` times as fast."""

    def __init__(self, file: Path, speed: float = 1.0):
        told = json.loads(file.read_text())
        self.about, second = told["machine"], 1e3 * speed
        calls, step = told["calls"], told["step"]

        def cost(row: dict[str, float]) -> Cost:
            worker = row["worker"] - row["engine"]
            return Cost((row["event loop"] + row["others"]) / second, worker / second)

        self.train, self.optimize = (
            cost(calls["forward_backward, 1 × 16"]),
            cost(calls["optim_step"]),
        )
        self.snapshot = cost(calls["snapshot"])
        refused = cost(calls["forward_backward, 128 × 512, refused"])
        self.token = max(0.0, refused.http - self.train.http) / (128 * 512)
        self.share = step["two replicas"]["sharing"] / second
        short = cost(calls["sample, 16 + 1 tokens, at a replica"])
        long = cost(calls["sample, 16 + 8 × 128 tokens, at a replica"])
        drawn = max(0.0, long.http - short.http) / (8 * 128 - 1)
        self.sample = Cost(short.http + drawn * ANSWERS * ANSWER, long.worker)
        [idle] = (name for name in calls if "idle runs" in name)
        runs = int(idle.split()[-3])
        more = cost(calls[idle]).worker - self.train.worker
        self.run = max(0.0, more) / runs  # of each idle run, in a call


@dataclass(frozen=True)
class Case:
    """A table's row. `held` are idle runs; `home`: whether a run has one replica."""

    model: str
    kind: str
    gpus: int
    fronts: int
    held: int = 0
    home: bool = False


class Server:
    """One owner, its replicas, and their users."""

    def __init__(self, case: Case, costs: Costs, users: int):
        self.case, self.costs, self.gpu = case, costs, GPUS[case.model]
        self.simulation = sim = Simulation()
        self.front = Queue(sim, case.fronts)
        self.python = self.front if case.fronts == 1 else Queue(sim)  # the owner's interpreter
        self.out, self.into = Queue(sim), Queue(sim)
        self.owner = Device(sim)
        self.helpers = [Device(sim) for _ in range(case.gpus - 1)]
        self._rng = random.Random(1)
        self._read: dict[Any, float] = {}
        self._users = users
        self.done: list[float] = []  # when steps ended
        for number in range(users):
            sim.start(self._user(number))

    def _call(self, cost: Cost, more: float = 0.0) -> Process:
        worker = cost.worker + self.costs.run * self.case.held
        if self.python is self.front:
            yield self.front.serve(cost.http + more + worker)
        else:
            yield self.front.serve(cost.http + more)
            yield self.python.serve(worker)

    def _user(self, run: int) -> Process:
        rng, version = self._rng, 0
        yield self.simulation.now + rng.random() * THINK
        while True:
            weights, version = (run, version), version + 1
            tokens = 32 * 512
            if self.case.kind == "RL":
                tokens = GROUPS * ANSWERS * (PROMPT + ANSWER)
                yield from self._call(self.costs.snapshot)
                yield [self._sampled(weights) for _ in range(GROUPS)]
            yield from self._trained(weights, tokens)
            yield from self._call(self.costs.optimize)
            yield self.owner, 7 * self.gpu.vector / MEMORY
            self.done.append(self.simulation.now)
            for helper in self.helpers:
                helper.there.pop(weights, None)
            self._read.pop(weights, None)
            pause = rng.expovariate(1 / THINK) if self.case.kind == "RL" else PAUSE
            yield self.simulation.now + pause

    def _home(self, run: int) -> Device:
        return self.helpers[run % len(self.helpers)]

    def _sampled(self, weights: tuple[int, int]) -> Process:
        """A group of answers."""
        yield from self._call(self.costs.sample)
        work = ANSWERS * ANSWER / self.gpu.decode
        if not self.helpers:
            yield self.owner, work
            return
        helper = self._home(weights[0]) if self.case.home else self._placed()
        helper.samples += 1
        yield from self._pulled(helper, weights)
        yield helper, work
        helper.samples -= 1

    def _placed(self) -> Device:
        """By hash, unless that replica has more than its share."""
        most = LOAD * sum(one.samples for one in self.helpers) / len(self.helpers)
        for _ in range(8):
            if (helper := self._rng.choice(self.helpers)).samples <= most:
                return helper
        return min(self.helpers, key=lambda one: one.samples)

    def _trained(self, weights: tuple[int, int], tokens: int) -> Process:
        """A forward_backward."""
        yield from self._call(self.costs.train, self.costs.token * tokens)
        if not self.helpers:
            yield self.owner, tokens / self.gpu.train
            return
        parts = min(PARTS, -(-tokens // ROWS))
        used: list[Device] = []
        yield [self._part(weights, tokens / parts, used) for _ in range(parts)]
        for _ in set(map(id, used)):
            yield self.into.serve(self.gpu.vector / LINK)
            yield self.owner, self.gpu.vector / BUS

    def _part(self, weights: tuple[int, int], tokens: float, used: list[Device]) -> Process:
        if self.case.home:
            helper = self._home(weights[0])
        else:
            helper = min(self.helpers, key=lambda one: one.waiting)
        helper.waiting += 1
        used.append(helper)
        yield self.python.serve(self.costs.share)
        yield from self._pulled(helper, weights)
        yield helper, tokens / self.gpu.train
        helper.waiting -= 1

    def _pulled(self, helper: Device, weights: tuple[int, int]) -> Process:
        """Weights come to a replica, unless they are there or on their way."""
        if weights not in helper.there:
            first = weights not in self._read
            if first:
                self._read[weights] = self.simulation.now
            done = self.out.serve(self.gpu.vector / LINK)
            helper.there[weights] = done
            if first:
                yield self.owner, self.gpu.vector / BUS
            yield done
            yield helper, self.gpu.vector / BUS
        elif helper.there[weights] > self.simulation.now:
            yield helper.there[weights]

    def _spent(self) -> dict[str, float]:
        devices = self.helpers or [self.owner]
        return {
            "front": max(self.front.spent, self.python.spent),
            "weights out": self.out.spent,
            "sums in": self.into.spent,
            "owner's engine": self.owner.spent if self.helpers else 0.0,
            "GPUs": sum(one.spent for one in devices) / len(devices),
        }

    def run(self) -> dict[str, float]:
        """Steps a second, and shares of the time."""
        sim, done = self.simulation, self.done
        sim.run(lambda: len(done) >= self._users)
        begin, before = sim.now, self._spent()
        sim.run(lambda: len(done) >= STEPS * self._users)
        seconds = sim.now - begin
        shares = {
            name: min(1.0, (spent - before[name]) / seconds)
            for name, spent in self._spent().items()
        }
        return {"steps/s": (STEPS - 1) * self._users / seconds} | shares


CASES = (
    Case("0.6B", "SFT", 8, 1),
    Case("0.6B", "SFT", 64, 1),
    Case("0.6B", "SFT", 64, 4),
    Case("0.6B", "RL", 64, 1),
    Case("0.6B", "RL", 64, 2),
    Case("8B", "SFT", 64, 1),
    Case("8B", "RL", 64, 1),
    Case("30B-A3B", "RL", 64, 1),
    Case("0.6B", "SFT", 1, 1, held=10_000),
)


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "front.json"
    parser.add_argument("--front", type=Path, default=default, help="front.py's --json")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast a front")
    args = parser.parse_args()
    costs = Costs(args.front, args.speed)
    print(f"Front, {args.speed:g} times as fast: {costs.about}\n")
    names = ("front", "weights out", "sums in", "owner's engine", "GPUs")
    columns = ["case", "fronts", "steps/s", *names, "first", "one home"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for case in CASES:
        rates = []
        for change in ({}, {"home": True}):
            other = Case(**(vars(case) | change))
            rates.append(Server(other, costs, args.users).run())
        found = rates[0]
        most = max(found[name] for name in names)
        first = ", ".join(name for name in names if found[name] > most - 0.01)
        held = f", {case.held} runs held" if case.held else ""
        gpus = f"{case.gpus} GPU{'s' if case.gpus > 1 else ''}"
        cells = [f"{case.model} {case.kind}, {gpus}{held}", str(case.fronts)]
        cells += [f"{found['steps/s']:.3g}", *(f"{100 * found[name]:.0f} %" for name in names)]
        cells += [first, f"{rates[1]['steps/s']:.3g}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
