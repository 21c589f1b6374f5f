"""How long each of the CUDA device's ops takes, held to what this card copies and multiplies.

    python benchmarks/cuda_ops.py --shapes 8b 0.6b
    python benchmarks/cuda_ops.py --shapes 8b --ops attention lora --rounds 1 --launches 4

A line of JSON for each op: microseconds (median of rounds, by CUDA events around `--launches`
calls, in turn on so many sets of memory that none is found in the card's cache), and the share of
the roofline: the longer of the time in which the card's own copy moves the
op's bytes, each input read once and each output written once, and that in which its largest product
makes the op's flops. Both ceilings are measured first. Training's ops have `--rows` rows of
sequences of `--length`; decoding's, a row for each of `--batches` sequences with `--keys` keys.
--ops keeps those in whose name or description one of the texts is, as a profiler wants it.

Nothing large is made on the host: one block of random bf16 numbers is uploaded, and the card's own
copies of it are every array of numbers, also those that an op writes. Read as float32 they are as
random. NumPy is enough. With --device cuda-emulated the clock is the host's: no figure counts."""

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from ours import BLOCK, random_block

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import op_devices

SHAPES = {  # width, heads, key-value heads, head width, ffn
    "tiny": (64, 4, 2, 16, 96),
    "0.6b": (1024, 16, 8, 128, 3072),
    "1.7b": (2048, 16, 8, 128, 6144),
    "4b": (2560, 32, 8, 128, 9728),
    "8b": (4096, 32, 8, 128, 12288),
}
VOCAB, RANK, TOPK = 151_936, 32, 32
F32, REAL = 4, 2
PRODUCT = 8192  # rows, columns and depth of the product that is the ceiling
COPY_BYTES = 1 << 30
CACHED_BYTES, SETS_MOST = 256 << 20, 8  # sets of memory that are taken in turn


@dataclass(frozen=True)
class Case:
    """An op at one shape: what it does, in flops and bytes, and its arguments, of which an array of
    random numbers is its shape."""

    what: str
    op: str
    flops: float
    bytes: float
    args: dict


class Clock:
    """Microseconds of work that was queued, by the driver's events on the device's stream; by the
    host's clock where there is no driver."""

    def __init__(self, device: op_devices.Device):
        self.device, self.driver, self.events = device, None, []
        if device.name.startswith("cuda") and device.name != "cuda-emulated":
            self.driver = ctypes.CDLL("libcuda.so.1")
            self.events = [ctypes.c_void_p(), ctypes.c_void_p()]
            for event in self.events:
                self.asked("cuEventCreate", ctypes.byref(event), 0)
            self.stream = ctypes.c_void_p(device.c.stream(device.pointer))

    def asked(self, name: str, *arguments: object) -> None:
        """Calls the driver; RuntimeError where it fails."""
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with code {code}")

    def once(self, call: Callable[[], None], times: int) -> float:
        """Microseconds a call of `times` calls in a row."""
        if self.driver is None:
            began = time.perf_counter()
            for _ in range(times):
                call()
            self.device.check(self.device.c.sync(self.device.pointer))
            return 1e6 * (time.perf_counter() - began) / times
        first, last = self.events
        self.asked("cuEventRecord", first, self.stream)
        for _ in range(times):
            call()
        self.asked("cuEventRecord", last, self.stream)
        self.device.check(self.device.c.sync(self.device.pointer))
        elapsed = ctypes.c_float()
        self.asked("cuEventElapsedTime", ctypes.byref(elapsed), first, last)
        return 1e3 * elapsed.value / times

    def median(self, call: Callable[[], None], rounds: int, times: int) -> float:
        """The median of some rounds, after one that is not counted."""
        self.once(call, 1)
        return statistics.median(self.once(call, times) for _ in range(rounds))


def in_turn(calls: list[Callable[[], None]]) -> Callable[[], None]:
    """A call that is each of these in turn."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


class Block:
    """Random numbers on the device, of which all arrays are made."""

    def __init__(self, device: op_devices.Device, numbers: int):
        host = random_block(numbers, 1.0)
        self.memory, self.at = op_devices.Memory(device, host.nbytes), 0
        self.memory.write(host)

    def array(self, shape: tuple[int, ...]) -> op_devices.Repeats:
        """Another array, from another place of the block on."""
        self.at += self.memory.size_bytes // 7 // 16 * 16
        return op_devices.Repeats(self.memory, shape, self.at)

    def placed(self, args: dict) -> dict:
        """An op's arguments, with arrays for shapes."""
        shapes = {name: one for name, one in args.items() if isinstance(one, tuple)}
        return args | {name: self.array(shape) for name, shape in shapes.items()}


def whole_spans(rows: int, length: int) -> list[op_devices.Span]:
    """Sequences of `length` rows, from position 0, whose pages follow one another."""
    pages = -(-length // op_devices.KV_PAGE)
    count = rows // length
    return [op_devices.Span(i * length, length, 0, i * pages, -1) for i in range(count)]


def pointwise(shape: str, rows: int) -> Iterator[Case]:
    """Norms, the gated unit and the optimizer, of a layer."""
    D, _, _, _, F = SHAPES[shape]
    T, one = rows, REAL * rows
    x, wide = (T, D), (T, F)
    ones, rstd = np.ones(D, np.float32), np.ones(T, np.float32)
    both = 2 * one * D
    size = {"T": T, "D": D}
    yield Case(
        "rmsnorm",
        "rmsnorm",
        4.0 * T * D,
        both,
        {"y": (T, D), "rstd": (T,), "x": x, "w": ones, "eps": 1e-6, **size},
    )
    yield Case(
        "rmsnorm, backward",
        "rmsnorm_backward",
        8.0 * T * D,
        2 * both,
        {"dx": "plus", "plus": x, "dy": x, "x": x, "w": ones, "rstd": rstd, **size},
    )
    gated = {"gate": wide, "up": wide, "T": T, "F": F}
    yield Case("swiglu", "swiglu", 5.0 * T * F, 3.0 * one * F, {"y": (T, F), **gated})
    yield Case(
        "swiglu, backward",
        "swiglu_backward",
        10.0 * T * F,
        5.0 * one * F,
        {"dgate": (T, F), "dup": (T, F), "dy": wide, **gated},
    )
    n = RANK * 7 * (D + F)
    yield Case(
        "AdamW of a layer's LoRA",
        "adamw",
        12.0 * n,
        7.0 * F32 * n,
        {
            **{"w": (n,), "m": (n,), "v": np.ones(n, np.float32), "before": "w", "g": (n,)},
            **{"n": n, "step": 3, "scale": 1.0, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95},
            **{"eps": 1e-8, "weight_decay": 0.0},
        },
    )


def products(shape: str, rows: int) -> Iterator[Case]:
    """A layer's products with base weights, forward and backward."""
    D, H, G, E, F = SHAPES[shape]
    T = rows
    matrices = {"q": (H * E, D), "k": (G * E, D), "o": (D, H * E), "gate": (F, D), "down": (D, F)}
    for name, (N, K) in matrices.items():
        sizes = {"T": T, "N": N, "D": K, "w": (N, K)}
        moved = REAL * (float(T) * (N + K) + N * K)
        yield Case(
            f"product {name}, {N} × {K}",
            "linear",
            2.0 * T * N * K,
            moved,
            {"y": (T, N), "x": (T, K), "bias": None, "plus": None, **sizes},
        )
        yield Case(
            f"product {name}, backward",
            "linear_backward",
            2.0 * T * N * K,
            moved,
            {"dx": (T, K), "dy": (T, N), "accumulate": 0, **sizes},
        )


def lora(shape: str, rows: int, beside: str = "") -> Iterator[Case]:
    """LoRA beside q, k and v, forward and backward."""
    D, H, G, E, _ = SHAPES[shape]
    T, one = rows, REAL * rows
    widths = (H * E, G * E, G * E)
    fields: dict = {}
    back: dict = {}
    for i, N in enumerate(widths):
        fields |= {f"y{i}": (T, N), f"s{i}": (T, RANK), f"a{i}": (D, RANK), f"b{i}": (RANK, N)}
        back |= {f"da{i}": (D, RANK), f"db{i}": (RANK, N), f"ds{i}": (T, RANK)}
        fields[f"N{i}"] = N
    sizes = {"count": len(widths), "x": (T, D), "T": T, "D": D, "R": RANK, "scale": 1.0}
    columns = sum(widths)
    yield Case(
        f"{beside}LoRA q k v, rank {RANK}",
        "lora",
        2.0 * T * RANK * (3 * D + columns),
        one * (D + 2.0 * columns) + F32 * RANK * (3.0 * D + columns),
        {**fields, **sizes},
    )
    yield Case(
        f"{beside}LoRA q k v, backward",
        "lora_backward",
        4.0 * T * RANK * (3 * D + columns),
        one * (3.0 * D + columns),
        {**fields, **back, "dx": (T, D), **sizes},
    )


def attention(shape: str, rows: int, length: int) -> Iterator[Case]:
    """Rotating, the pages of keys and values, and attention of sequences, forward and backward."""
    _, H, G, E, _ = SHAPES[shape]
    T, one = rows, REAL * rows
    table = (T, E // 2)
    q, k, v = (T, H, E), (T, G, E), (T, G, E)
    ones = np.ones(E, np.float32)
    raw = {"q_raw": q, "k_raw": k, "q_norm": ones, "k_norm": ones, "cosine": table, "sine": table}
    raw |= {"T": T, "H": H, "G": G, "E": E, "W": E}
    numbers = float(T) * (H + G) * E
    yield Case(
        "norm and rope of q and k",
        "rotate",
        7.0 * numbers,
        2.0 * REAL * numbers,
        {
            **{"q": (T, H, E), "k": (T, G, E), "q_rstd": (T, H), "k_rstd": (T, G), "eps": 1e-6},
            **raw,
        },
    )
    yield Case(
        "the same, backward",
        "rotate_backward",
        11.0 * numbers,
        3.0 * REAL * numbers,
        {
            **{"dq": q, "dk": k, "q_rstd": np.ones((T, H), np.float32)},
            **{"k_rstd": np.ones((T, G), np.float32), **raw},
        },
    )
    spans = whole_spans(T, length)
    pages = np.arange(len(spans) * -(-length // op_devices.KV_PAGE), dtype=np.int32)
    slots = np.arange(T, dtype=np.int32)  # whole pages: length is a multiple of them
    keys = len(pages) * op_devices.KV_PAGE
    yield Case(
        "keys and values to pages",
        "kv_write",
        0.0,
        4.0 * one * G * E,
        {
            **{"k_pages": (keys, G, E), "v_pages": (keys, G, E), "k": k, "v": v},
            **{"slot": slots, "T": T, "G": G, "E": E},
        },
    )
    pairs = float(T) * length / 2
    heads = {"S": len(spans), "T": T, "H": H, "G": G, "E": E, "window": 0}
    yield Case(
        f"attention, sequences of {length}",
        "attention",
        4.0 * pairs * H * E,
        one * E * (2.0 * H + 2 * G),
        {
            **{"y": (T, H, E), "lse": (T, H), "q": q, "k_pages": (keys, G, E)},
            **{"v_pages": (keys, G, E), "spans": spans, "pages": pages, **heads, "whole": 0},
        },
    )
    yield Case(
        "attention, backward",
        "attention_backward",
        10.0 * pairs * H * E,
        one * E * (4.0 * H + 4 * G),
        {
            **{"dq": (T, H, E), "dk": (T, G, E), "dv": (T, G, E), "dy": q, "y": q},
            **{"lse": np.full((T, H), 9.0, np.float32), "q": q, "k": k, "v": v, "spans": spans},
            **heads,
        },
    )


def lse_of(rows: int, vocab: int) -> np.ndarray:
    """logΣexp of rows of normal random logits, as the head leaves it."""
    return np.tile(np.float32([np.log(vocab) + 0.5, 0.0]), (rows, 1))


def head(shape: str, vocab: int, chunk_bytes: int) -> Iterator[Case]:
    """A chunk of the head's rows."""
    D = SHAPES[shape][0]
    T = min(2048, max(1, chunk_bytes // (F32 * vocab)))
    logits, ids, lse = (T, vocab), np.arange(T, dtype=np.int32), lse_of(T, vocab)
    start = np.arange(T + 1, dtype=np.int32)
    chunk, size = float(F32) * T * vocab, {"T": T, "V": vocab}
    common = {"logits": logits, **size}
    rows = f"{T} rows"
    yield Case(
        f"head, {rows}",
        "head",
        2.0 * T * vocab * D,
        chunk + REAL * vocab * D,
        {"logits": (T, vocab), "x": (T, D), "w": (vocab, D), "D": D, **size},
    )
    told = {"ids": ids, "start": start}
    yield Case(
        "log-probabilities",
        "logprob",
        2.0 * T * vocab,
        chunk,
        {"lse": (T, 2), "logp": (T,), **told, **common},
    )
    yield Case(
        "log-probabilities, backward",
        "logprob_backward",
        2.0 * T * vocab,
        1.5 * chunk,
        {"dlogits": (T, vocab), "lse": lse, "dlogp": (T,), "first": 0, **told, **common},
    )
    yield Case(
        f"top {TOPK}",
        "topk_logprob",
        2.0 * T * vocab,
        chunk,
        {"ids": (T, TOPK), "logp": (T, TOPK), "lse": lse, "K": TOPK, **common},
    )
    how = op_devices.Jsd(0.5, 1.0, float("inf"), 0, 0, 0)
    yield Case(
        "JSD with its gradient",
        "jsd",
        20.0 * T * vocab,
        2.5 * chunk,
        {
            **{"loss": (T,), "dstudent": (T, vocab), "student": logits, "teacher": logits},
            **{"scale": np.ones(T, np.float32), "how": how, **size},
        },
    )


def decoding(shape: str, vocab: int, batch: int, length: int) -> Iterator[Case]:
    """What a layer does with a row of each of `batch` sequences, and drawing their tokens."""
    D, H, G, E, F = SHAPES[shape]
    B, pages = batch, -(-length // op_devices.KV_PAGE)
    for name, N, K in (("q", H * E, D), ("gate", F, D), ("down", D, F)):
        sizes = {"T": B, "N": N, "D": K, "w": (N, K)}
        yield Case(
            f"batch {B}: product {name}",
            "linear",
            2.0 * B * N * K,
            float(REAL) * (N * K + B * (N + K)),
            {"y": (B, N), "x": (B, K), "bias": None, "plus": None, **sizes},
        )
    spans = [op_devices.Span(i, 1, length - 1, i * pages, -1) for i in range(B)]
    held = B * pages * op_devices.KV_PAGE
    yield Case(
        f"batch {B}: attention over {length} keys",
        "attention",
        4.0 * B * length * H * E,
        float(REAL) * 2 * B * length * G * E,
        {
            **{"y": (B, H, E), "lse": (B, H), "q": (B, H, E)},
            **{"k_pages": (held, G, E), "v_pages": (held, G, E), "spans": spans},
            **{"pages": np.arange(B * pages, dtype=np.int32), "S": B, "T": B, "H": H, "G": G},
            **{"E": E, "window": 0, "whole": 0},
        },
    )
    yield next(lora(shape, B, f"batch {B}: "))
    draws = [op_devices.Draw(1, 0, t, 1.0, 1.0, -1) for t in range(B)]
    yield Case(
        f"batch {B}: drawing",
        "sample",
        3.0 * B * vocab,
        float(F32) * B * vocab,
        {
            **{"ids": (B,), "logp": (B,), "logits": (B, vocab), "draws": draws},
            **{"lse": lse_of(B, vocab), "T": B, "V": vocab},
        },
    )


def ceilings(
    device: op_devices.Device, clock: Clock, block: Block, rounds: int, launches: int, tiny: bool
) -> tuple[float, float]:
    """Flops and bytes a microsecond of the card's largest product and of its copy."""
    N = 256 if tiny else PRODUCT
    args = {"y": (N, N), "x": (N, N), "w": (N, N), "bias": None, "plus": None}
    product = device.prepared("linear", **block.placed(args), T=N, N=N, D=N)
    flops = 2.0 * N**3 / clock.median(product, rounds, launches)
    size = COPY_BYTES >> 10 if tiny else COPY_BYTES
    to, source = (op_devices.Memory(device, size, block.array((size,))) for _ in range(2))

    def copy() -> None:
        device.c.copy(device.pointer, to.pointer, source.pointer, size)

    moved = 2.0 * size / clock.median(copy, rounds, launches)
    ceiling = {"TFLOP/s": flops / 1e6, "GB/s": moved / 1e3}
    print(
        json.dumps({"op": f"product {N}³, and a copy of {size >> 20} MiB", **ceiling}), flush=True
    )
    return flops, moved


def card_ceilings(name: str, rounds: int, launches: int, tiny: bool) -> tuple[float, float]:
    """The same, for a program that has no device of its own."""
    device = op_devices.Device(name)
    block = Block(device, BLOCK >> 10 if tiny else BLOCK)
    found = ceilings(device, Clock(device), block, rounds, launches, tiny)
    del block  # memory goes before its device
    device.c.close(device.pointer)
    return found


def all_cases(args: argparse.Namespace, chunk_bytes: int) -> Iterator[Case]:
    """Of all shapes, those that --ops asks for."""
    for shape in args.shapes:
        layer = (shape, args.rows)
        parts = [pointwise(*layer), products(*layer), lora(*layer)]
        parts += [attention(*layer, args.length), head(shape, args.vocab, chunk_bytes)]
        parts += [decoding(shape, args.vocab, batch, args.keys) for batch in args.batches]
        for case in itertools.chain.from_iterable(parts):
            case = replace(case, what=f"{shape} {case.what}")
            if not args.ops or any(one in f"{case.op} {case.what}" for one in args.ops):
                yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "0.6b"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--length", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--keys", type=int, default=1024, help="of a sequence that decodes")
    parser.add_argument("--ops", nargs="+", help="only those that have one of these texts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the emulator")
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.rows, args.length, args.batches = ["tiny"], 128, 64, [1, 2]
        args.vocab, args.rounds, args.launches, args.keys = 512, 1, 1, 64
    if args.length % op_devices.KV_PAGE or args.rows % args.length:
        parser.error("--length is a multiple of 64, and --rows one of --length")
    try:
        device = op_devices.Device(args.device)
    except op_devices.Unavailable as reason:
        print(reason)
        return 1
    chunk = 1 << 20 if args.tiny else device.c.chunk_bytes
    clock, block = Clock(device), Block(device, BLOCK >> 10 if args.tiny else BLOCK)
    flops, moved = ceilings(device, clock, block, args.rounds, args.launches, args.tiny)
    for case in all_cases(args, chunk):
        sets = min(SETS_MOST, 1 + int(CACHED_BYTES / case.bytes)) if not args.tiny else 1
        calls = [device.prepared(case.op, **block.placed(case.args)) for _ in range(sets)]
        taken = clock.median(in_turn(calls), args.rounds, args.launches)
        floor = max(case.flops / flops, case.bytes / moved)
        bound = "compute" if case.flops / flops > case.bytes / moved else "memory"
        row = {"op": case.what, "µs": taken, "floor, µs": floor}
        row |= {"% of roofline": 100 * floor / taken, "bound": bound}
        row |= {"TFLOP/s": case.flops / taken / 1e6, "GB/s": case.bytes / taken / 1e3}
        print(json.dumps(row), flush=True)
    for note in device.notes:
        print(json.dumps({"op": "note", "note": note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
