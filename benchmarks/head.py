"""tinsmith.ops beside torch eager, torch in chunks and NumPy: CPU seconds and peak memory.

    python benchmarks/head.py jsd --positions 512 1024
    python benchmarks/head.py topk gather --rounds 2 --plot head.svg
    python benchmarks/head.py loss --rows 2048
    python benchmarks/head.py first --rows 256

`jsd`: generalized_jsd of logits (positions, V) at beta 0.5 with the student's gradient, beside
OPSD's loss in torch (tests/support/opsd_reference.py). `topk` and `gather`: the 32 best, and the
log-probabilities of 20 ids a row with their gradient, of hidden states (1024, 1024) and a weight
(V, 1024) that is frozen or trained. `loss`: linear_cross_entropy of them with its gradients, beside
torch's, without and with its own chunks (LinearCrossEntropyOptions). `first`: the first call of jsd
and of loss in a process, a new one for each side, and its second. V is Qwen3's 151,936. The sides
of the other parts run in turn in one process; peak is what the resident set grew by above the
inputs during a call, gradients included. The roofline of the products is their flops, that of jsd
its logits and its gradient moved once.

At two rounds jsd takes two minutes and 12 GiB, topk and gather three each and 5 GiB, and loss of
2,048 rows six and 8 GiB; first of 256 rows two and 6 GiB."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinsmith.torch as tt
import torch
from peers import alternate, medians, parse, parser, seconds_and_peak
from report import Floor, Report, Table
from tinsmith import ops

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import opsd_reference

GIB = 2.0**30
Sides = tuple[tuple[torch.Tensor, ...], dict[str, Callable[[], object]]]


def compare(
    table: Table,
    case: str,
    sides: dict[str, Callable[[], object]],
    args: argparse.Namespace,
    floor: Floor | None,
    leaves: tuple[torch.Tensor, ...] = (),
) -> None:
    """Runs the sides in turn, without the gradients of earlier ones, into a case of the table."""

    def measure(call: Callable[[], object]) -> tuple[float, float]:
        for leaf in leaves:
            leaf.grad = None
        return seconds_and_peak(call, args.clock)

    found = alternate(sides, args.rounds, measure, warm_up=False)
    table.add(case, medians(found), floor)


def jsd_sides(args: argparse.Namespace, positions: int) -> Sides:
    """The student, and what makes its gradient."""
    student = torch.randn(positions, args.vocab).mul_(2).requires_grad_()
    teacher = student.detach() + torch.randn(positions, args.vocab)
    return (student,), {
        "tinsmith": lambda: tt.generalized_jsd(student, teacher).backward(),
        "torch eager": lambda: opsd_reference.generalized_jsd_loss(student, teacher).backward(),
    }


def jsd(report: Report, columns: dict[str, str]) -> None:
    """A case for each number of positions."""
    args, V = report.args, report.args.vocab
    table = report.table(
        f"Generalized JSD with gradient, β = 0.5, {V} logits", "positions", columns
    )
    for positions in args.positions:
        leaves, sides = jsd_sides(args, positions)
        if args.alone:
            del sides["torch eager"]
        gradient = positions * V * 4
        case = f"{positions}, gradient {gradient / GIB:.2f} GiB"
        compare(table, case, sides, args, report.floor(bytes=3 * gradient), leaves)


def in_chunks(x: torch.Tensor, w: torch.Tensor, make: Callable, rows: int = 256) -> None:
    """torch as a careful trainer writes it: a chunk of rows at a time, each one's gradient at
    once."""
    for i in range(0, len(x), rows):
        make(slice(i, i + rows), x[i : i + rows] @ w.T)


def topk(report: Report, columns: dict[str, str]) -> None:
    """The 32 best of each row."""
    args, V, n, d = report.args, report.args.vocab, report.args.rows, report.args.width
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
        "tinsmith": lambda: ops.topk_logprobs(x, 32, weight=w),
        "torch eager": lambda: torch.log_softmax(x @ w.T, -1).topk(32),
        "torch chunked": lambda: in_chunks(x, w, best),
        "NumPy": by_numpy,
    }
    table = report.table("The 32 best log-probabilities of a row", "rows × width × V", columns)
    compare(table, f"{n} × {d} × {V}", sides, args, report.floor(flops=2.0 * n * d * V))


def gather_in_numpy(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The gradient of the rows (N, D) of Σ log-probabilities, as one writes it in NumPy."""
    logits = x @ w.T
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - top)
    total = p.sum(-1, keepdims=True)
    np.take_along_axis(logits, ids, 1) - top - np.log(total)
    p *= -ids.shape[1] / total
    np.add.at(p, (np.arange(len(ids))[:, None], ids), 1)
    return p @ w


def gather(report: Report, columns: dict[str, str]) -> None:
    """20 log-probabilities of each row with their gradient, under a frozen and a trained weight."""
    args, V, n, d = report.args, report.args.vocab, report.args.rows, report.args.width
    title = f"Log-probabilities of 20 ids a row with gradient, {n} × {d} × {V}"
    table = report.table(title, "weight", columns)
    for trained in (kind == "trained" for kind in args.weights):
        x = (torch.randn(n, d) * 0.5).requires_grad_()
        w = (torch.randn(V, d) * 0.05).requires_grad_(trained)
        ids, ones = torch.randint(0, V, (n, 20)), torch.ones(n, 20)

        def chunk(rows: slice, logits: torch.Tensor, ids: torch.Tensor = ids) -> None:
            torch.log_softmax(logits, -1).gather(-1, ids[rows]).sum().backward()

        sides = {
            "gather_logprobs": lambda x=x, w=w, i=ids: (
                tt.gather_logprobs(x, i, weight=w).sum().backward()
            ),
            "weighted_cross_entropy": lambda x=x, w=w, i=ids, o=ones: tt.weighted_cross_entropy(
                x, w, i, o
            ).backward(),
            "torch eager": lambda x=x, w=w, chunk=chunk: chunk(slice(0, n), x @ w.T),
            "torch chunked": lambda x=x, w=w, chunk=chunk: in_chunks(x, w, chunk),
        }
        if not trained:
            arrays = x.detach().numpy(), w.numpy(), ids.numpy()
            sides["NumPy"] = lambda arrays=arrays: gather_in_numpy(*arrays)
        floor = report.floor(flops=(3 if trained else 2) * 2.0 * n * d * V)
        compare(table, "trained" if trained else "frozen", sides, args, floor, (x, w))


def loss_sides(args: argparse.Namespace, trained: bool = True) -> Sides:
    """Hidden states and weight, and what makes their gradients."""
    x = (torch.randn(args.rows, args.width) * 0.5).requires_grad_()
    w = (torch.randn(args.vocab, args.width) * 0.05).requires_grad_(trained)
    given = x, w, torch.randint(0, args.vocab, (args.rows,))
    chunks = torch.nn.LinearCrossEntropyOptions()

    def torchs(**options: object) -> None:
        torch.nn.functional.linear_cross_entropy(*given, **options).backward()

    return (x, w), {
        "tinsmith": lambda: tt.linear_cross_entropy(*given).backward(),
        "torch": torchs,
        "torch, its chunks": lambda: torchs(options=chunks),
    }


def loss(report: Report, columns: dict[str, str]) -> None:
    """The cross-entropy of a training step, under a frozen and a trained weight."""
    args, V, n, d = report.args, report.args.vocab, report.args.rows, report.args.width
    title = f"Linear cross-entropy, forward and backward, {n} × {d} × {V}"
    table = report.table(title, "rows and weight", columns)
    for trained in (kind == "trained" for kind in args.weights):
        leaves, sides = loss_sides(args, trained)
        floor = report.floor(flops=(3 if trained else 2) * 2.0 * n * d * V)
        case = f"{n} rows, {'trained' if trained else 'frozen'}"
        compare(table, case, sides, args, floor, leaves)


def first(report: Report, _: dict[str, str]) -> None:
    """A process's first call of a loss with its gradients, and its second."""
    args = report.args
    columns = {f"first, {args.unit}": ".2f", f"second, {args.unit}": ".2f", "peak, GiB": ".2f"}
    table = report.table("The first call of a process", "case", columns)
    positions, V = args.positions[0], args.vocab
    by_bytes = report.floor(bytes=12 * positions * V)
    by_flops = report.floor(flops=6.0 * args.rows * args.width * V)
    for case, rows, torchs, floor in (
        ("jsd", positions, "torch eager", by_bytes),
        ("loss", args.rows, "torch", by_flops),
    ):
        found = {name: in_a_child(case, name) for name in ("tinsmith", torchs)}
        table.add(f"{case} of {rows} rows", found, floor)


def in_a_child(case: str, side: str) -> list[float]:
    """What `twice` prints in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--case", case]
    done = subprocess.run([*command, "--side", side], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def twice(args: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds of a side's first and second call, and GiB at the first one's peak."""
    leaves, sides = jsd_sides(args, args.positions[0]) if args.case == "jsd" else loss_sides(args)
    seconds, peak = seconds_and_peak(sides[args.side], args.clock)
    for leaf in leaves:
        leaf.grad = None
    return seconds, seconds_and_peak(sides[args.side], args.clock)[0], peak


def main() -> None:
    """A table for each part."""
    options = parser(__doc__, rounds=3)
    add = options.add_argument
    parts = {"jsd": jsd, "topk": topk, "gather": gather, "loss": loss, "first": first}
    add("parts", nargs="+", choices=parts, help="what to compare")
    add("--positions", type=int, nargs="+", default=[512, 1024], help="of jsd")
    add("--rows", type=int, default=1024, help="of topk, gather and loss")
    add("--width", type=int, default=1024, help="of their hidden states")
    kinds = ["frozen", "trained"]
    add("--weights", nargs="+", choices=kinds, default=kinds, help="of gather and loss")
    add("--vocab", type=int, default=151_936)
    add("--alone", action="store_true", help="jsd without torch's side")
    for name in ("--case", "--side"):
        add(name, help=argparse.SUPPRESS)
    args = parse(options)
    torch.manual_seed(0)
    if args.side:
        print(json.dumps(twice(args)))
        return
    with Report(args, __doc__) as report:
        for part in args.parts:
            parts[part](report, {args.unit: ".2f", "peak, GiB": ".2f"})


if __name__ == "__main__":
    main()
