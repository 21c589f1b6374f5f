"""A bf16 checkpoint computed in float32 and in bfloat16: tokens per CPU second, in one run.

    python benchmarks/dtypes.py --shape 0.6b

`dtype="auto"` takes what is faster on the processor at hand; this program shows whether it does. A
training step (LoRA rank 32), a prompt of 512 tokens, and decoding at batch 1, 8 and 32 from 64.
Three minutes and 3 GiB at 0.6b."""

from collections.abc import Callable
from typing import Any

import numpy as np
from peers import CLOCKS, RANK, SHAPES, alternate, checkpoint, hf_model, medians, parse, parser
from report import Report
from sample import prompt_source, sampler_side
from tinsmith import _core
from tinsmith.models import registry

SIDES = ("float32", "bfloat16")


def step(core: _core.Model, tokens: np.ndarray, clock: Callable[[], float]) -> Callable[[], Any]:
    """A call that times a training step on random tokens."""
    adapter = _core.Adapter(core, rank=RANK)
    lengths, ones = np.asarray([len(tokens) - 1], np.int32), np.ones(1, np.int32)

    def run() -> tuple[float]:
        start = clock()
        adapter.forward_backward(tokens[:-1], lengths, tokens[1:], ones, "cross_entropy", {}, {})
        seconds = clock() - start
        adapter.clear_gradients()
        return (seconds,)

    return run


def main() -> None:
    """A table of the work, and of decoding."""
    options = parser(__doc__, shape="small", dtype="bf16")
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--new", type=int, default=16)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parse(options)
    if reason := _core.devices()["cpu-bf16"]:
        options.error(f"nothing to compare: {reason}")
    clock, vocab = CLOCKS[args.clock][1], SHAPES[args.shape]["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocab, args.length + 1).astype(np.int32)
    with checkpoint(hf_model(args.shape, "bf16")) as folder:
        cores = {
            side: registry.load_model(folder, dtype=side, threads=args.threads).core
            for side in SIDES
        }
    with Report(args, __doc__) as report:
        rate = f"tokens/{args.unit}"
        table = report.table(f"{args.shape}, bf16 checkpoint", "work", {rate: ".1f"}, plot=rate)

        def add(what: str, count: int, sides: dict[str, Callable[[], Any]], place: int) -> None:
            found = medians(alternate(sides, args.rounds, lambda call: call()))
            table.add(what, {side: (count / found[side][place],) for side in SIDES})

        steps = {side: step(core, tokens, clock) for side, core in cores.items()}
        add(f"forward_backward 1×{args.length}", args.length, steps, 0)
        for batch, length, new in [(1, args.length, 2), *((n, 64, args.new) for n in args.batches)]:
            sides = {
                side: sampler_side(core, prompt_source(vocab, batch, length), new, clock)
                for side, core in cores.items()
            }
            if length == args.length:
                add(f"prefill of {length}", length, sides, 0)
            else:
                add(f"decoding, batch {batch}", batch * (new - 1), sides, 1)


if __name__ == "__main__":
    main()
