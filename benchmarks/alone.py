"""gpu.py --alone: what our side does on a GPU, without torch or a peer, in lines of JSON.

Weights are random and made on the card (ours.py). Training comes first: tokens a second of one
forward_backward, its share of the card's peak, memory, how the step is divided, and the optimizer's
step. Then decoding with and without an adapter; its floor is the time in which the card reads the
weights, the adapter and the cache once a step. `wrong` says what can't be: a loss that is not
finite, tokens that are missing, or more than the card can do. What fails is a row too, and the rest
goes on."""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator

from ours import Decoding, random_adapter, random_core, training
from peers import RANK, SHAPES, flops, matrices
from tinsmith import _core

WARM_UPS = 2  # the engine's choices of algorithms, and the card's clocks
FAILURES = (RuntimeError, MemoryError, ValueError, FloatingPointError)  # of the engine


def row(op: str, wrong: str = "", **figures: object) -> bool:
    """Prints one; whether nothing is wrong with it."""
    found = {"op": op} | figures | ({"wrong": wrong} if wrong else {})
    print(json.dumps(found, ensure_ascii=False), flush=True)
    return not wrong


def above(percent: float, what: str) -> str:
    """What is wrong with a share of the most there can be."""
    return "" if percent <= 100 else f"{percent:.1f} % of {what}: more than all of it"


def train(args: argparse.Namespace, shape: str, core: _core.Model) -> Iterator[bool]:
    """The rows of training."""
    call = training(core, shape, args.datums, args.length)
    for _ in range(WARM_UPS):
        call.step()
    timed = [call.timed() for _ in range(args.rounds)]
    seconds, optimizer = map(statistics.median, zip(*timed, strict=True))
    total = args.datums * args.length
    work = flops(shape, total, args.length) / 1e12 / seconds
    plan = core.plan(RANK)
    share = 100 * work / args.tflops
    wrong = above(share, f"{args.tflops:.0f} TFLOP/s")
    if not math.isfinite(call.loss):
        wrong = f"the loss is {call.loss}"
    yield row(
        f"{shape} training, {args.datums} × {args.length}",
        wrong,
        **{"tokens/s": total / seconds, "MFU, %": share, "TFLOP/s": work, "s": seconds},
        **{"GiB": (plan["all"] - plan["free"]) / 2**30, "loss a token": call.loss},
    )
    rows = min(plan["step_tokens"], total)
    plan = core.plan(RANK, rows)
    yield row(
        f"{shape} a step's plan",
        **{"micro-batches": call.micro_batches, "rows": rows},
        **{"layers": SHAPES[shape]["num_hidden_layers"], "kept": plan["kept"]},
        **{"attention kept": plan["attention_kept"]},
        **{f"{name}, GiB": plan[name] / 2**30 for name in ("weights", "step", "adapter", "own")},
    )
    yield row(f"{shape} optimizer step", **{"µs": 1e6 * optimizer, "weights": call.adapter.size})


def decode(args: argparse.Namespace, shape: str, core: _core.Model) -> Iterator[bool]:
    """The rows of decoding, the largest batch first: it has all prompts."""
    adapter = random_adapter(core)
    batches = sorted(args.batches, reverse=True)
    bench = Decoding(core, shape, batches[0], args.prompt, args.new)
    seconds = bench.prefill()
    yield row(
        f"{shape} prefill, {batches[0]} × {args.prompt}",
        **{"tokens/s": batches[0] * args.prompt / seconds, "s": seconds},
    )
    cached = core.plan(RANK)["kv_token"]
    for batch in batches:
        for name, one in (("no adapter", None), (f"rank {RANK}", adapter)):
            found = bench.measured(batch, one, args.new)
            spent = sum(found.seconds)
            read = 2.0 * sum(matrices(shape, batch)) + batch * cached * found.context
            read += 4.0 * one.size if one else 0.0
            limit = batch * args.bandwidth * 1e9 / read
            rate = found.tokens / spent
            wrong = above(100 * rate / limit, f"{args.bandwidth:.0f} GB/s")
            if found.tokens != batch * args.new:
                wrong = f"{found.tokens} tokens were drawn, not {batch * args.new}"
            yield row(
                f"{shape} decoding, batch {batch}, {name}",
                wrong,
                **{"tokens/s": rate, "% of bandwidth": 100 * rate / limit},
                **{"limit, tokens/s": limit, "ms": 1e3 * statistics.median(found.seconds)},
                **{"slowest, ms": 1e3 * max(found.seconds), "context": found.context},
                **{"replayed": found.replayed, "steps": args.new},
            )


def ceilings(args: argparse.Namespace) -> None:
    """Fills in what was not given of the card's peak and bandwidth, as measured on it."""
    if args.tflops and args.bandwidth:
        return
    import cuda_ops

    tiny = args.device == "cuda-emulated"
    product, copied = cuda_ops.card_ceilings(args.device, rounds=3, launches=5, tiny=tiny)
    args.tflops = args.tflops or product / 1e6
    args.bandwidth = args.bandwidth or copied / 1e3


def run(args: argparse.Namespace) -> int:
    """All rows; 1 if something is wrong."""
    parts, right = {"train": train, "decode": decode}, True
    ceilings(args)
    for shape in args.shapes:
        start = time.perf_counter()
        try:
            core = random_core(shape, args.device)
        except FAILURES as error:
            right = row(f"{shape} weights", f"{type(error).__name__}: {error}")
            continue
        seconds, size = time.perf_counter() - start, core.weight_bytes / 2**30
        row(f"{shape} weights made on the card", **{"s": seconds, "GiB": size})
        for name in (name for name in parts if name in args.parts):
            try:
                right = all([*parts[name](args, shape, core)]) and right
            except FAILURES as error:
                right = row(f"{shape} {name}", f"{type(error).__name__}: {error}")
        for note in core.notes:
            row(f"{shape} note", note=note)
    return int(not right)
