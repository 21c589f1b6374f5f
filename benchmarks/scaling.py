"""Our engine alone: time against threads, tokens, sequence length, rank, and number of adapters.

    python benchmarks/scaling.py threads --shape small
    python benchmarks/scaling.py threads --shape 0.6b --dtype bf16 --datums 2 --length 256 --new 16
    python benchmarks/scaling.py tokens length rank adapters --shape small

A table for each. Settings take turns, so that what else the machine does meets all of them; shown
are the best wall time, to which neighbours only add, the median CPU time of all threads, and how
much faster than the table's first row of its kind a unit of work was done by the wall. For threads
to mean anything, as many cores must be free."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers import DTYPES, SHAPES, checkpoint, hf_model
from tinsmith import _core, families

RANK = 32
ADAM = {
    "learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: a kind of work at a setting."""

    kind: str
    setting: int
    units: int  # of work in a call: tokens, or 1
    call: Callable[[], object]


class Bench:
    """The models, one for each number of threads, and the work that is done on them."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.options = options
        self.vocab = SHAPES[options.shape]["vocab_size"]
        self._folder = folder
        self._models: dict[int, _core.Model] = {}

    def model(self, threads: int = 1) -> _core.Model:
        """The model on a device of so many threads."""
        if threads not in self._models:
            dtype = DTYPES[self.options.dtype]
            loaded = families.load_model(self._folder, dtype=dtype, threads=threads)
            self._models[threads] = loaded.core
        return self._models[threads]

    def train(
        self, datums: int, length: int, rank: int = RANK, threads: int = 1
    ) -> Callable[[], object]:
        """forward_backward of random datums."""
        adapter = _core.Adapter(self.model(threads), rank=rank)
        rng = np.random.default_rng(0)
        tokens, targets = rng.integers(0, self.vocab, (2, datums * length)).astype(np.int32)
        lengths, ones = np.full(datums, length, np.int32), np.ones(datums, np.int32)

        def run() -> None:
            adapter.forward_backward(tokens, lengths, targets, ones, "cross_entropy", {}, {})
            adapter.clear_gradients()

        return run

    def optimize(self, rank: int) -> Callable[[], object]:
        """An optimizer's step, and a snapshot of what it made."""
        adapter = _core.Adapter(self.model(), rank=rank)

        def run() -> None:
            adapter.optim_step(**ADAM, normalization=None)
            adapter.snapshot()

        return run

    def decode(self, batch: int, adapters: int = 0, threads: int = 1) -> Callable[[], object]:
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

        return run


# ---- the tables: what each varies ----


def by_threads(bench: Bench) -> list[Case]:
    """A step of training, and decoding at three batch sizes."""
    o = bench.options
    cases = []
    for threads in o.threads:
        train = bench.train(o.datums, o.length, threads=threads)
        name = f"forward_backward {o.datums}x{o.length}"
        cases.append(Case(name, threads, o.datums * o.length, train))
        for batch in o.batches:
            decode = bench.decode(batch, threads=threads)
            cases.append(Case(f"decoding at batch {batch}", threads, batch * o.new, decode))
    return cases


def by_tokens(bench: Bench) -> list[Case]:
    """Batches of more and more datums of 128 tokens."""
    counts = [1, 2, 4, 8, 16, 32]
    return [Case("forward_backward", n * 128, n * 128, bench.train(n, 128)) for n in counts]


def by_length(bench: Bench) -> list[Case]:
    """2,048 tokens in datums of different lengths."""
    lengths = [32, 128, 512, 1024, 2048]
    return [Case("forward_backward", n, 2048, bench.train(2048 // n, n)) for n in lengths]


def by_rank(bench: Bench) -> list[Case]:
    """The options' batch at different ranks, and the optimizer with a snapshot."""
    o, ranks = bench.options, [1, 8, 32, 64, 128]
    tokens = o.datums * o.length
    cases = [
        Case("forward_backward", rank, tokens, bench.train(o.datums, o.length, rank))
        for rank in ranks
    ]
    return cases + [Case("optim_step, snapshot", rank, 1, bench.optimize(rank)) for rank in ranks]


def by_adapters(bench: Bench) -> list[Case]:
    """32 sequences that are decoded together, on the base model (0) or on so many adapters."""
    new = 32 * bench.options.new
    return [
        Case("decoding at batch 32", n, new, bench.decode(32, n)) for n in (0, 1, 2, 4, 8, 16, 32)
    ]


TABLES = {
    "threads": by_threads,
    "tokens": by_tokens,
    "length": by_length,
    "rank": by_rank,
    "adapters": by_adapters,
}


def measure(cases: Sequence[Case], rounds: int) -> list[tuple[float, float]]:
    """The best wall and the median CPU seconds of each, in turn; one round more warms up."""
    wall: list[list[float]] = [[] for _ in cases]
    cpu: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        for index, case in enumerate(cases):
            used, start = time.process_time(), time.perf_counter()
            case.call()
            if turn:
                wall[index].append(time.perf_counter() - start)
                cpu[index].append(time.process_time() - used)
    return [(min(w), statistics.median(c)) for w, c in zip(wall, cpu, strict=True)]


def show(name: str, cases: Sequence[Case], found: Sequence[tuple[float, float]]) -> None:
    """One table."""
    print(f"\n{'kind':32} {name:>8} {'wall, ms':>10} {'CPU, ms':>10} {'units/s':>11} {'times':>6}")
    first: dict[str, float] = {}
    for case, (wall, cpu) in sorted(zip(cases, found, strict=True), key=lambda item: item[0].kind):
        rate = case.units / wall
        times = rate / first.setdefault(case.kind, rate)
        row = f"{1e3 * wall:10.1f} {1e3 * cpu:10.1f} {rate:11.1f} {times:6.2f}"
        print(f"{case.kind:32} {case.setting:8} {row}")


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="of decoding")
    parser.add_argument("--datums", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new", type=int, default=32, help="tokens that are decoded")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = hf_model(options.shape, options.dtype)
    with checkpoint(model) as folder:
        del model
        bench = Bench(folder, options)
        print(f"{options.shape} {options.dtype}, best wall of {options.rounds} rounds")
        for name in options.tables:
            cases = TABLES[name](bench)
            show(name, cases, measure(cases, options.rounds))


if __name__ == "__main__":
    main()
