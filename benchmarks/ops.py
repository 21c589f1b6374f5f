"""The CPU's ops beside the best library call for each, on one thread, in one run.

    python benchmarks/ops.py --plot ops.svg

The head's ops: against torch's logsumexp and gather, topk, and softmax and multinomial on the same
logits. Products: against oneDNN where the package onednn-cpu-gomp is installed (dnnl_sgemm in f32,
in bf16 its matmul primitive on a weight in its own order), and torch in f32 and bf16. The engine
rounds x to bf16 in a product with a bf16 weight where the processor has such a product ("bf16");
else it widens the weight.

Experts' products: the rows of a batch over many experts' matrices, beside one product of as many
flops with a dense matrix. Takes three minutes."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onednn
import torch
from peers import CACHED, interleave, parse, parser
from report import Report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import op_devices

PRODUCTS = [  # T, N, D of the 0.6B shape: training, a chunk of the head, LoRA, decoding
    (1024, 3072, 1024),
    (512, 1024, 3072),
    (256, 151936, 1024),
    (1024, 32, 1024),
    (32, 3072, 1024),
    (1, 3072, 1024),
    (1, 151936, 1024),
]
CHOSEN = 8  # experts of a row, as in Qwen3-30B-A3B


def repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    """The call so often that it can be timed."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def bf16_device(device: op_devices.Device, threads: int) -> op_devices.Device:
    """The device whose products with bf16 weights are bf16's; the other where there is none."""
    try:
        return op_devices.Device("cpu-bf16", threads=threads)
    except op_devices.Unavailable:
        return device


def products(report: Report, device: op_devices.Device, pairs: op_devices.Device) -> None:
    """A case a shape: both element types of the weight, oneDNN, torch."""
    library, args = onednn.load(), report.args
    rng = np.random.default_rng(0)
    columns = {args.unit[:-1] + "µs": ".1f", f"GFLOP/{args.unit}": ".1f"}
    for dtype in ("f32", "bf16"):
        table = report.table(f"linear, {dtype} weight", "T × N × D", columns, f"GFLOP/{args.unit}")
        for T, N, D in args.product or PRODUCTS:
            x, w = rng.standard_normal((T, D)), rng.standard_normal((N, D))
            common = {"x": x, "y": (T, N), "bias": None, "plus": None, "T": T, "N": N, "D": D}
            place = pairs if dtype == "bf16" else device
            weight = op_devices.Frozen(w, dtype)
            sides = {"tinsmith": place.prepared("linear", w=weight, **common)}
            kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
            tx, tw = (torch.from_numpy(array).to(kind) for array in (x, w))
            if library:
                side = {"f32": onednn.f32, "bf16": onednn.bf16}[dtype]
                sides["oneDNN"] = side(library, x.astype(np.float32), w.astype(np.float32))
            sides["torch"] = lambda tx=tx, tw=tw: torch.nn.functional.linear(tx, tw)
            times = max(1, int(args.flops / (2.0 * T * N * D)))
            calls = {name: repeated(call, times) for name, call in sides.items()}
            seconds = interleave(calls, args.rounds, clock=args.clock)
            size = {"f32": 4, "bf16": 2}[dtype] * N * D
            read = size if size > CACHED else 0
            table.add(
                f"{T} × {N} × {D}",
                {
                    name: (1e6 * value / times, 2e-9 * T * N * D * times / value)
                    for name, value in seconds.items()
                },
                report.floor(flops=2.0 * T * N * D, bytes=read, dtype=dtype, scale=1e6),
            )


def random_load(rng: np.random.Generator, experts: int, rows: int) -> np.ndarray:
    """How many rows each expert gets, where every row of a batch chooses CHOSEN at random."""
    chosen = [rng.permutation(experts)[:CHOSEN] for _ in range(rows // CHOSEN)]
    return np.bincount(np.concatenate(chosen), minlength=experts)


def experts_products(report: Report, device: op_devices.Device, pairs: op_devices.Device) -> None:
    """Grouped products forward and back, and dense ones of as many flops, for each element type.

    An expert has ROWS rows in the mean; matrices come from memory, as in a model's step."""
    args, rng = report.args, np.random.default_rng(0)
    X, mean, N, D = args.experts
    T = 512
    load = random_load(rng, X, X * mean)
    P, last = int(load.sum()), np.cumsum(load)
    bounds = np.stack([last - load, last], -1).astype(np.int32)
    wide = D * P // T  # the dense product's depth
    w = rng.standard_normal((X, N, D)).astype(np.float32)
    dense = rng.standard_normal((N, wide)).astype(np.float32)
    x, dy = rng.standard_normal((P, D)), rng.standard_normal((P, N))
    dense_x, dense_dy = rng.standard_normal((T, wide)), rng.standard_normal((T, N))
    columns = {args.unit[:-1] + "ms": ".1f", f"GFLOP/{args.unit}": ".1f"}
    flops = 2.0 * P * N * D
    name = f"Experts: {P} rows over {X} of {N} × {D}, and a dense product of as many flops"
    table = report.table(name, "product", columns, f"GFLOP/{args.unit}")
    for dtype, place in (("f32", device), ("bf16", pairs)):
        frozen = op_devices.Frozen(w, dtype)
        one = {"w": place.put_frozen(frozen), "step": place.frozen_step(frozen), "bounds": bounds}
        one |= {"X": X, "P": P, "N": N, "D": D}
        all_of = {"w": op_devices.Frozen(dense, dtype), "T": T, "N": N, "D": wide}
        prepared = place.prepared
        sides = {
            "x·wᵀ": {
                "tinsmith": prepared("grouped_linear", y=(1, P, N), x=x, bias=None, count=1, **one),
                "dense": prepared("linear", y=(T, N), x=dense_x, bias=None, plus=None, **all_of),
            },
            "dy·w": {
                "tinsmith": prepared(
                    "grouped_linear_backward", dx=(P, D), dy=dy, accumulate=0, **one
                ),
                "dense": prepared(
                    "linear_backward", dx=(T, wide), dy=dense_dy, accumulate=0, **all_of
                ),
            },
        }
        for product, calls in sides.items():
            seconds = interleave(calls, args.rounds, clock=args.clock)
            table.add(
                f"{product}, {dtype}",
                {side: (1e3 * value, 1e-9 * flops / value) for side, value in seconds.items()},
                report.floor(
                    flops=flops, bytes=w.size * {"f32": 4, "bf16": 2}[dtype], dtype=dtype, scale=1e3
                ),
            )


def head_ops(report: Report, device: op_devices.Device) -> None:
    """logprob, topk_logprob and sample on a chunk of logits."""
    T, V, K = report.args.head
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((T, V)).astype(np.float32) * 3
    ids, start = rng.integers(0, V, T), np.arange(T + 1)
    lse = np.log(np.exp(logits.astype(float)).sum(1)).astype(np.float32)
    lse = np.stack([lse, np.zeros_like(lse)], axis=1)  # as the ops have it
    draws = [op_devices.Draw(1, 0, t, 1.0, 1.0, -1) for t in range(T)]
    common = {"logits": logits, "T": T, "V": V}
    tensor, index = torch.from_numpy(logits), torch.from_numpy(ids)[:, None]

    def torch_logprob() -> None:
        tensor.gather(1, index) - torch.logsumexp(tensor, 1, keepdim=True)

    def torch_topk() -> None:
        torch.topk(tensor, K, dim=1)

    def torch_sample() -> None:
        torch.multinomial(torch.softmax(tensor, 1), 1)

    pairs = {
        "logprob": (
            device.prepared("logprob", lse=(T, 2), logp=(T,), ids=ids, start=start, **common),
            torch_logprob,
        ),
        f"topk_logprob, K = {K}": (
            device.prepared("topk_logprob", ids=(T, K), logp=(T, K), lse=lse, K=K, **common),
            torch_topk,
        ),
        "sample": (
            device.prepared("sample", ids=(T,), logp=(T,), lse=lse, draws=draws, **common),
            torch_sample,
        ),
    }
    args = report.args
    table = report.table(f"The head's ops, {T} × {V} logits", "op", {args.unit[:-1] + "ms": ".2f"})
    for name, sides in pairs.items():
        both = dict(zip(("tinsmith", "torch"), sides, strict=True))
        seconds = interleave(both, args.rounds, clock=args.clock)
        floor = report.floor(bytes=4.0 * T * V, scale=1e3)
        table.add(name, {side: 1e3 * value for side, value in seconds.items()}, floor)


def main() -> None:
    """The tables."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", type=int, nargs=3, default=(64, 151936, 32), help="T, V and K of the head's ops")
    add("--product", type=int, nargs=3, action="append", help="T, N and D; may come again")
    add(
        "--experts",
        type=int,
        nargs=4,
        default=(128, 32, 768, 2048),
        help="how many, rows of each in the mean, N and D",
    )
    add("--flops", type=float, default=2e9, help="of the calls that are timed together")
    args = parse(options)
    device = op_devices.Device("cpu", threads=args.threads)
    with Report(args, __doc__) as report:
        head_ops(report, device)
        pairs = bf16_device(device, args.threads)
        products(report, device, pairs)
        experts_products(report, device, pairs)


if __name__ == "__main__":
    main()
