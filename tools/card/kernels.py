"""A training step and some decoded tokens by kernel: calls, microseconds, and share of each.

    python -m tools.card.kernels --shape 8b --device cuda

A line of JSON for each kernel of one training step (forward_backward and the optimizer's), and of
`--new` tokens decoded with an adapter at each batch; then one with the wall time of the same work
while nobody looks, and the gap: what no kernel takes of it. torch.profiler looks, which sees the
kernels of every library in the process. Those of a replayed graph are seen where CUDA tells them.
If it does not, there are fewer than layers: the steps are run without graphs, and `replayed` is 0.
The emulated GPU tells neither times nor names: kernels, products and copies are counted there."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from ours import Decoded, Decoding, random_adapter, random_core, training
from peers import SHAPES
from tinsmith import _core

NAME_MOST = 120  # characters of a kernel's name

Call = Callable[[], object]


@dataclass
class Kernel:
    """All launches of one kernel."""

    name: str
    calls: int = 0
    microseconds: float = 0.0


def plain(name: str) -> str:
    """A kernel's name without what it returns and takes."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.sub(r"(?<=.)\(.*", "", name, flags=re.S)[:NAME_MOST]


def gathered(launches: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Kernels by name, of launches and their microseconds; the longest first."""
    found: dict[str, Kernel] = {}
    for name, microseconds in launches:
        kernel = found.setdefault(plain(name), Kernel(plain(name)))
        kernel.calls += 1
        kernel.microseconds += microseconds
    return sorted(found.values(), key=lambda one: -one.microseconds)


class Profiler:
    """torch's, of the GPU alone."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.kernels(torch.cuda.synchronize)  # its own beginning takes a second

    def kernels(self, call: Call) -> list[Kernel]:
        """What a call launches."""
        profiler, synchronize = self.torch.profiler, self.torch.cuda.synchronize
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
            call()
            synchronize()
        return gathered(self.launches(seen.events()))

    def launches(self, events: Iterable) -> Iterable[tuple[str, float]]:
        """The name and the microseconds of each event of the GPU."""
        gpu = self.torch.autograd.DeviceType.CUDA
        for event in events:
            if event.device_type == gpu:
                yield event.name, event.time_range.elapsed_us()


@dataclass
class Counter:
    """What the emulated card is given, by kind."""

    given: Callable[[], list[int]]
    kinds: tuple[str, ...] = field(default=("kernels", "products", "copies"))

    def kernels(self, call: Call) -> list[Kernel]:
        """What a call gives it to do, in no time."""
        before = self.given()
        call()
        counts = (now - then for now, then in zip(self.given(), before, strict=True))
        return [Kernel(name, calls) for name, calls in zip(self.kinds, counts, strict=True)]


def emulated_counter() -> Counter:
    """That of the emulated card, which is built if it has to be."""
    import ctypes

    from support import op_devices

    count = ctypes.CDLL(str(op_devices.emulated_library())).cuda_emulated_given
    count.restype = ctypes.c_int64
    return Counter(lambda: [count(kind) for kind in range(3)])


def table(what: str, kernels: list[Kernel], wall: float, **more: object) -> None:
    """Prints a row for each kernel, and the one that holds them against the wall's time."""
    total = sum(one.microseconds for one in kernels)
    for one in kernels:
        row = {"op": f"{what}: {one.name}", "calls": one.calls, "µs": one.microseconds}
        row["share, %"] = 100 * one.microseconds / total if total else 0.0
        row["µs a call"] = one.microseconds / one.calls if one.calls else 0.0
        print(json.dumps(row, ensure_ascii=False))
    row = {"op": f"{what}: all", "calls": sum(one.calls for one in kernels), "µs": total}
    row |= {"wall, µs": wall, "gap, µs": wall - total, **more}
    if not row["calls"]:
        row["wrong"] = f"{what}: the profiler saw no kernel"
    print(json.dumps(row, ensure_ascii=False), flush=True)


def wall_of(call: Call) -> float:
    """Microseconds of a call, which returns when the GPU is done."""
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


class Decoder:
    """Sequences that decode, some steps at a time."""

    def __init__(
        self,
        core: _core.Model,
        adapter: _core.Adapter,
        args: argparse.Namespace,
        batch: int,
        graphs: bool,
    ):
        sizes = args.shape, batch, args.prompt, 2 * args.new
        self.bench = Decoding(core, *sizes, graphs=graphs)
        self.bench.prefill()
        self.bench.begin(batch, adapter)
        self.new = args.new
        self.least = args.new * SHAPES[args.shape]["num_hidden_layers"]

    def step(self) -> None:
        """`new` tokens of each sequence."""
        self.bench.run(self.new, Decoded())

    def table(self, what: str, profiler: Profiler | Counter) -> list[Kernel]:
        """Prints their kernels, unless there are too few to be all."""
        wall, replays = wall_of(self.step), self.bench.sampler.replays[1]
        kernels = profiler.kernels(self.step)
        if sum(one.calls for one in kernels) >= self.least:
            replayed = self.bench.sampler.replays[1] - replays
            table(what, kernels, wall, steps=self.new, replayed=replayed)
            return kernels
        return []


def run(args: argparse.Namespace, profiler: Profiler | Counter) -> None:
    """All tables of a shape."""
    core = random_core(args.shape, args.device)
    call = training(core, args.shape, args.datums, args.length)
    for _ in range(2):
        call.step()
    wall = float(np.median([wall_of(call.step) for _ in range(3)]))
    table(f"{args.shape} training step", profiler.kernels(call.step), wall)
    del call  # with the memory of its step
    adapter = random_adapter(core)
    for batch in args.batches:
        what = f"{args.shape} decoding {args.new}, batch {batch}"
        for graphs in (True, False):
            if Decoder(core, adapter, args, batch, graphs).table(what, profiler):
                break
        else:
            table(what, [], 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--shape", choices=SHAPES, default="8b")
    add("--datums", type=int, default=4)
    add("--length", type=int, default=2048)
    add("--batches", type=int, nargs="+", default=[1, 32])
    add("--prompt", type=int, default=1024)
    add("--new", type=int, default=20)
    add("--tiny", action="store_true", help="small sizes, for the emulator")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.datums, args.length, args.batches = "tiny", 2, 16, [1, 2]
        args.prompt, args.new = 4, 3
    counter = emulated_counter() if args.device == "cuda-emulated" else None
    if reason := _core.devices(args.device)[args.device]:
        print(reason)
        return 1
    run(args, counter or Profiler())
    return 0


if __name__ == "__main__":
    sys.exit(main())
