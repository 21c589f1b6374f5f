"""Our engine alone: time against threads, tokens, sequence length, rank, and number of adapters.

    python benchmarks/scaling.py threads --threads 2 --clock wall
    python benchmarks/scaling.py threads --threads 2 --clock wall --shape 0.6b --length 128
    python benchmarks/scaling.py tokens length rank adapters --plot scaling.svg

A table for each kind of work. All settings of a kind of table take turns, so that what else the
machine does meets all of them; "of the first" is how many times the rate of the table's first row a
row's is. `threads` counts up to --threads in powers of two, by the wall, for which as many cores
must be free. What a virtual machine's cores are changes from minute to minute, so in each round,
just before each case, registers or memory (whichever bounds the case) are given as many threads:
"machine" is how many times one thread's rate those reach, "of the machine's" the case's own times
over that, each the median over the rounds; they take the place of the % of roofline, which is
measured once. The roofline counts the products and attention.

The last of these takes a minute."""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import Probe
from peers import (
    CACHED,
    CLOCKS,
    DTYPES,
    RANK,
    SHAPES,
    checkpoint,
    flops,
    hf_model,
    matrices,
    parse,
    parser,
    seconds_of,
)
from report import Floor, Report
from tinsmith import _core
from tinsmith.models import registry

ADAM = {
    "learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: a kind of work at a setting."""

    kind: str
    setting: int
    units: int  # of work in a call
    call: Callable[[], object]
    flops: float = 0  # 0: the roofline is not known
    bytes: float = 0  # that come from memory
    threads: int = 0  # 0: --threads
    unit: str = "tokens"


class Bench:
    """The models, one for each number of threads, and the work that is done on them."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.options = options
        self.vocab = SHAPES[options.shape]["vocab_size"]
        self._folder = folder
        self._models: dict[int, _core.Model] = {}

    def model(self, threads: int = 0) -> _core.Model:
        """The model on a device of so many threads, or of --threads."""
        threads = threads or self.options.threads
        if threads not in self._models:
            dtype = DTYPES[self.options.dtype]
            loaded = registry.load_model(self._folder, dtype=dtype, threads=threads)
            self._models[threads] = loaded.core
        return self._models[threads]

    def train(
        self, setting: int, datums: int, length: int, rank: int = RANK, threads: int = 0
    ) -> Case:
        """forward_backward of random datums."""
        adapter = _core.Adapter(self.model(threads), rank=rank)
        rng = np.random.default_rng(0)
        tokens, targets = rng.integers(0, self.vocab, (2, datums * length)).astype(np.int32)
        lengths, ones = np.full(datums, length, np.int32), np.ones(datums, np.int32)

        def run() -> None:
            adapter.forward_backward(tokens, lengths, targets, ones, "cross_entropy", {}, {})
            adapter.clear_gradients()

        total = datums * length
        work = flops(self.options.shape, total, length)
        return Case("forward_backward", setting, total, run, work, threads=threads)

    def optimize(self, rank: int) -> Case:
        """An optimizer's step, and a snapshot of what it made."""
        adapter = _core.Adapter(self.model(), rank=rank)

        def run() -> None:
            adapter.optim_step(**ADAM, normalization=None)
            adapter.snapshot()

        return Case("optim_step, snapshot", rank, 1, run, unit="steps")

    def decode(self, setting: int, batch: int, adapters: int = 0, threads: int = 0) -> Case:
        """New tokens for so many sequences with prompts of 32, which share so many adapters."""
        model = self.model(threads)
        own = [_core.Adapter(model, rank=RANK, seed=seed) for seed in range(adapters)]
        new = self.options.new
        sampler = _core.Sampler(model, tokens=2 * batch * (32 + new))
        prompts = np.random.default_rng(0).integers(0, self.vocab, (batch, 32)).astype(np.int32)

        def run() -> None:
            for number, prompt in enumerate(prompts):
                adapter = own[number % adapters] if adapters else None
                sampler.add(number, prompt, adapter, max_tokens=new, seed=number)
            while sampler.active:
                sampler.step()
            for number in range(batch):
                sampler.take(number)

        layers, head = matrices(self.options.shape)
        work = 2.0 * batch * (layers * (32 + new) + head * new)
        size = {"f32": 4, "bf16": 2}[self.options.dtype] * (layers + head)
        read = size * new if size > CACHED else 0
        kind = f"Decoding at batch {batch}"
        return Case(kind, setting, batch * new, run, work, read, threads)


# ---- the tables: what each varies ----


def by_threads(bench: Bench) -> list[Case]:
    """A step of training, and decoding at the options' batch sizes."""
    o = bench.options
    counts = sorted({*(1 << n for n in range(o.threads.bit_length())), o.threads})
    cases = [bench.train(n, o.datums, o.length, threads=n) for n in counts]
    for batch in o.batches:
        cases += [bench.decode(n, batch, threads=n) for n in counts]
    return cases


def by_tokens(bench: Bench) -> list[Case]:
    """Batches of more and more datums of 128 tokens."""
    return [bench.train(n * 128, n, 128) for n in (1, 2, 4, 8, 16, 32)]


def by_length(bench: Bench) -> list[Case]:
    """2,048 tokens in datums of different lengths."""
    return [bench.train(n, 2048 // n, n) for n in (32, 128, 512, 1024, 2048)]


def by_rank(bench: Bench) -> list[Case]:
    """The options' batch at different ranks, and the optimizer with a snapshot."""
    o, ranks = bench.options, (1, 8, 32, 64, 128)
    cases = [bench.train(rank, o.datums, o.length, rank) for rank in ranks]
    return cases + [bench.optimize(rank) for rank in ranks]


def by_adapters(bench: Bench) -> list[Case]:
    """32 sequences that are decoded together, on the base model (0) or on so many adapters."""
    return [bench.decode(n, 32, n) for n in (0, 1, 2, 4, 8, 16, 32)]


KINDS = {
    "threads": by_threads,
    "tokens": by_tokens,
    "length": by_length,
    "rank": by_rank,
    "adapters": by_adapters,
}


def floor(report: Report, case: Case) -> Floor | None:
    """The roofline of --threads cores by the wall, or of one."""
    flops, read = case.flops, case.bytes
    return report.floor(flops=flops, bytes=read, dtype=report.args.dtype, scale=1e3)


@dataclass(frozen=True)
class Found:
    """A case's medians: ms by each of CLOCKS, and, in tables of threads, what the machine gave and
    the case's part of it."""

    cpu: float
    wall: float
    machine: float = 1.0
    of_machine: float = 1.0


def run(case: Case) -> Found:
    """One call."""
    (_, cpu), (_, wall) = CLOCKS["cpu"], CLOCKS["wall"]
    begin = cpu()
    seconds = seconds_of(case.call, wall)
    return Found(1e3 * (cpu() - begin), 1e3 * seconds)


def machine_gain(report: Report, case: Case, probe: Probe | None) -> float:
    """What the machine gives the case's threads just now; 1 for one thread."""
    bound = floor(report, case)
    if not probe or not bound or case.threads < 2:
        return 1.0 if case.threads == 1 else math.nan
    work = getattr(probe, report.args.dtype) if bound.bound == "compute" else probe.read
    return probe.gain(work, case.threads)


def measure(report: Report, cases: Sequence[Case], probe: Probe | None) -> list[Found]:
    """Medians of each case, the cases run in turn; with a probe beside what the machine gave."""
    rounds: list[list[Found]] = [[] for _ in cases]
    for case in cases:
        case.call()
    for _ in range(report.args.rounds):
        first: dict[str, float] = {}  # wall ms of one thread, of each kind
        for case, found in zip(cases, rounds, strict=True):
            gave = machine_gain(report, case, probe)
            one = run(case)
            own = first.setdefault(case.kind, one.wall) / one.wall
            found.append(Found(one.cpu, one.wall, gave, own / gave))
    fields = ("cpu", "wall", "machine", "of_machine")
    return [
        Found(*(statistics.median(getattr(one, name) for one in found) for name in fields))
        for found in rounds
    ]


def show(report: Report, name: str, cases: Sequence[Case]) -> None:
    """A table for each kind of work."""
    args, by_machine = report.args, name == "threads"
    probe = Probe(args.threads) if by_machine and report.roofline else None
    found = measure(report, cases, probe)
    for kind in dict.fromkeys(case.kind for case in cases):
        of_kind = [(case, f) for case, f in zip(cases, found, strict=True) if case.kind == kind]
        other = "wall" if args.clock == "cpu" else "cpu"
        rate = f"{of_kind[0][0].unit}/{args.unit}"
        each, beside = (f"{CLOCKS[clock][0][:-1]}ms" for clock in (args.clock, other))
        columns = {each: ".2f", rate: ".1f", "of the first": ".2f", beside: ".2f"}
        if by_machine:
            columns |= {"machine": ".2f", "of the machine's": ".2f"}
        title = f"{kind} against {name}, {args.shape} {args.dtype}"
        table = report.table(title, name, columns, plot=rate)
        first = 0.0
        for case, f in of_kind:
            ms = getattr(f, args.clock)
            fast = 1e3 * case.units / ms
            first = first or fast
            figures = (ms, fast, fast / first, getattr(f, other))
            if by_machine:
                figures += (f.machine, f.of_machine)
            least = floor(report, case) if case.flops and not by_machine else None
            table.add(case.setting, {"tinsmith": figures}, least)


def main() -> None:
    """Prints the tables that are asked for."""
    options = parser(__doc__, shape="small", dtype="bf16")
    add = options.add_argument
    add("kinds", nargs="+", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add("--batches", type=int, nargs="+", default=[1, 8, 32], help="of decoding")
    add("--datums", type=int, default=4)
    add("--length", type=int, default=512)
    add("--new", type=int, default=32, help="tokens that are decoded")
    args = parse(options)
    if "threads" in args.kinds and args.clock == "cpu":
        options.error("threads: CPU seconds add up over threads; give --clock wall")
    model = hf_model(args.shape, args.dtype)
    with checkpoint(model) as folder, Report(args, __doc__) as report:
        del model
        bench = Bench(folder, args)
        for kind in args.kinds:
            show(report, kind, KINDS[kind](bench))


if __name__ == "__main__":
    main()
