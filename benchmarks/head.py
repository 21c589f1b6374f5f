"""tinsmith.ops beside torch eager, torch in chunks and NumPy: CPU seconds and peak memory.

    python benchmarks/head.py jsd --positions 512 1024
    python benchmarks/head.py topk --rounds 2
    python benchmarks/head.py gather --rounds 2

`jsd`: generalized_jsd of logits (positions, V) at beta 0.5 with the student's gradient, beside
OPSD's loss in torch (tests/opsd.py). `topk` and `gather`: the 32 best, and the log-probabilities of
20 ids a row with their gradient, of hidden states (1024, 1024) and a weight (V, 1024) that is
frozen or trained. V is Qwen3's 151,936. All sides run in turn in one process; peak is what the
resident set grew by above the inputs during a call, gradients included."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinsmith.torch as tt
import torch
from tinsmith import ops

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import opsd

V = 151_936
GIB = 2.0**30


def status(field: str) -> float:
    """A size of /proc/self/status in GiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / GIB
    raise KeyError(field)


def measure(call: Callable[[], object], leaves: list[torch.Tensor]) -> tuple[float, float]:
    """CPU seconds of a call, and by how many GiB the resident set grew at its peak."""
    for leaf in leaves:
        leaf.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, start = status("VmRSS"), time.process_time()
    call()
    return time.process_time() - start, status("VmHWM") - before


def compare(
    title: str, sides: dict[str, Callable[[], object]], rounds: int, *leaves: torch.Tensor
) -> None:
    """Runs the sides in turn and prints each one's median, and its ratio to the first."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            figures[name].append(measure(call, list(leaves)))
    first = None
    for name, runs in figures.items():
        seconds = statistics.median(s for s, _ in runs)
        peak = statistics.median(p for _, p in runs)
        first = first or seconds
        print(
            f"{title:44} {name:20} {seconds:8.2f} cpu-s {peak:6.2f} GiB {seconds / first:6.1f}×",
            flush=True,
        )


def jsd(positions: int, rounds: int, with_torch: bool) -> None:
    student = torch.randn(positions, V).mul_(2).requires_grad_()
    teacher = student.detach() + torch.randn(positions, V)

    def of_torch() -> None:
        opsd.generalized_jsd_loss(student, teacher).backward()

    def ours() -> None:
        tt.generalized_jsd(student, teacher).backward()

    gradient = positions * V * 4 / GIB
    sides = {"tinsmith": ours} | ({"torch eager": of_torch} if with_torch else {})
    compare(f"jsd {positions} × {V}, gradient {gradient:.2f} GiB", sides, rounds, student)


def in_chunks(x: torch.Tensor, w: torch.Tensor, make: Callable, rows: int = 256) -> None:
    """torch as a careful trainer writes it: a chunk of rows at a time, each one's gradient at
    once."""
    for i in range(0, len(x), rows):
        make(slice(i, i + rows), x[i : i + rows] @ w.T)


def topk(n: int, d: int, rounds: int) -> None:
    x, w = torch.randn(n, d) * 0.5, torch.randn(V, d) * 0.05
    a, b = x.numpy(), w.numpy()

    def best(_: slice, logits: torch.Tensor) -> None:
        (logits - torch.logsumexp(logits, -1, keepdim=True)).topk(32)

    def by_numpy() -> None:
        logits = a @ b.T
        top = logits.max(-1, keepdims=True)
        lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        near = np.argpartition(logits, -32)[:, -32:]
        np.sort(np.take_along_axis(logits, near, 1) - lse)

    sides = {
        "tinsmith": lambda: ops.topk_logprobs(x, w, 32),
        "torch eager": lambda: torch.log_softmax(x @ w.T, -1).topk(32),
        "torch chunked": lambda: in_chunks(x, w, best),
        "NumPy": by_numpy,
    }
    compare(f"topk 32, {n} × {d} × {V}", sides, rounds)


def gather(n: int, d: int, rounds: int, trained: bool) -> None:
    x = (torch.randn(n, d) * 0.5).requires_grad_()
    w = (torch.randn(V, d) * 0.05).requires_grad_(trained)
    ids, ones = torch.randint(0, V, (n, 20)), torch.ones(n, 20)

    def chunk(rows: slice, logits: torch.Tensor) -> None:
        torch.log_softmax(logits, -1).gather(-1, ids[rows]).sum().backward()

    sides = {
        "gather_logprobs": lambda: tt.gather_logprobs(x, w, ids).sum().backward(),
        "linear_cross_entropy": lambda: tt.linear_cross_entropy(x, w, ids, ones).backward(),
        "torch eager": lambda: chunk(slice(0, n), x @ w.T),
        "torch chunked": lambda: in_chunks(x, w, chunk),
    }
    kind = "trained" if trained else "frozen"
    compare(f"20 ids, gradient, {kind} weight", sides, rounds, x, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["jsd", "topk", "gather"])
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="jsd without torch's side")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.what == "topk":
        topk(args.rows, 1024, args.rounds)
    elif args.what == "gather":
        for trained in (False, True):
            gather(args.rows, 1024, args.rounds, trained)
    else:
        for positions in args.positions:
            jsd(positions, args.rounds, not args.alone)


if __name__ == "__main__":
    main()
