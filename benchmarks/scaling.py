"""Our engine alone: time against threads, tokens, sequence length, rank, and number of adapters.

    python benchmarks/scaling.py threads --threads 2 --clock wall
    python benchmarks/scaling.py threads --threads 2 --clock wall --shape 0.6b --length 128
    python benchmarks/scaling.py tokens length rank adapters --plot scaling.svg

A table for each kind of work. All settings of a kind of table take turns, so that what else the
machine does meets all of them; "of the first" is how many times the rate of the table's first row a
row's is. `threads` counts up to --threads in powers of two, by the wall, for which as many cores
must be free. The roofline counts the frozen products and attention.

The last of these takes a minute."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers import (
    CLOCKS,
    DTYPES,
    SHAPES,
    alternate,
    checkpoint,
    hf_model,
    medians,
    parse,
    parser,
    seconds_of,
)
from report import Floor, Report
from tinsmith import _core, families
from train import RANK, flops

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
            loaded = families.load_model(self._folder, dtype=dtype, threads=threads)
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
        return Case("forward_backward", setting, total, run, work, threads)

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

        return Case(f"Decoding at batch {batch}", setting, batch * new, run, threads=threads)


# ---- the tables: what each varies ----


def by_threads(bench: Bench) -> list[Case]:
    """A step of training, and decoding at the options' batch sizes."""
    o, cases = bench.options, []
    for threads in sorted({*(1 << n for n in range(o.threads.bit_length())), o.threads}):
        cases.append(bench.train(threads, o.datums, o.length, threads=threads))
        cases += [bench.decode(threads, batch, threads=threads) for batch in o.batches]
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
    """The roofline of a case's threads: by the wall, the report's is that of --threads cores."""
    args = report.args
    share = args.threads / (case.threads or args.threads) if args.clock == "wall" else 1
    return report.floor(flops=case.flops, dtype=args.dtype, scale=1e3 * share)


def measure(cases: Sequence[Case], rounds: int) -> list[dict[str, float]]:
    """Median ms of each by each of CLOCKS, the cases run in turn."""
    (_, cpu), (_, wall) = CLOCKS["cpu"], CLOCKS["wall"]

    def both(call: Callable[[], object]) -> tuple[float, float]:
        begin = cpu()
        seconds = seconds_of(call, wall)
        return cpu() - begin, seconds

    calls = {str(number): case.call for number, case in enumerate(cases)}
    found = medians(alternate(calls, rounds, both))
    return [{"cpu": 1e3 * used, "wall": 1e3 * seconds} for used, seconds in found.values()]


def show(report: Report, name: str, cases: Sequence[Case]) -> None:
    """A table for each kind of work."""
    args = report.args
    found = measure(cases, args.rounds)
    for kind in dict.fromkeys(case.kind for case in cases):
        of_kind = [(case, ms) for case, ms in zip(cases, found, strict=True) if case.kind == kind]
        other = "wall" if args.clock == "cpu" else "cpu"
        rate = f"{of_kind[0][0].unit}/{args.unit}"
        each, beside = (f"{CLOCKS[clock][0][:-1]}ms" for clock in (args.clock, other))
        columns = {each: ".2f", rate: ".1f", "of the first": ".2f", beside: ".2f"}
        title = f"{kind} against {name}, {args.shape} {args.dtype}"
        table = report.table(title, name, columns, plot=rate)
        first = 0.0
        for case, ms in of_kind:
            fast = 1e3 * case.units / ms[args.clock]
            first = first or fast
            figures = (ms[args.clock], fast, fast / first, ms[other])
            table.add(
                case.setting, {"tinsmith": figures}, floor(report, case) if case.flops else None
            )


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
