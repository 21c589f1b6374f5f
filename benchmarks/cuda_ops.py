"""How long each of the CUDA device's ops takes, held to what this card copies and multiplies.

    python benchmarks/cuda_ops.py --shapes 0.6b 8b

A line of JSON for each op: microseconds (median of rounds, by CUDA events around `--launches`
calls, in turn on so many sets of memory that none is found in the card's cache), and the share of
the roofline: the longer of the time in which the card's own copy moves the
op's bytes, each input read once and each output written once, and that in which its largest product
makes the op's flops. Both ceilings are measured first. Training's ops have `--rows` rows of
sequences of `--length`; decoding's, a row for each of `--batches` sequences with `--length` keys.
NumPy is enough. With --device cuda-emulated the clock is the host's, and no figure counts."""

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import engine

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
    """An op at one shape: what it does, in flops and bytes, and its arguments."""

    what: str
    op: str
    flops: float
    bytes: float
    args: dict


class Clock:
    """Microseconds of work that was queued, by the driver's events on the device's stream; by the
    host's clock where there is no driver."""

    def __init__(self, device: engine.Device):
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


def normal(*shape: int) -> np.ndarray:
    """Random floats, the same for the same shape."""
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def weight(rows: int, cols: int) -> engine.Frozen:
    return engine.Frozen(normal(rows, cols) / cols**0.5, "bf16")


def whole_spans(rows: int, length: int) -> list[engine.Span]:
    """Sequences of `length` rows, from position 0, whose pages follow one another."""
    pages = -(-length // engine.KV_PAGE)
    count = rows // length
    return [engine.Span(i * length, length, 0, i * pages, -1) for i in range(count)]


def pointwise(shape: str, rows: int) -> Iterator[Case]:
    """Norms, the gated unit and the optimizer, of a layer."""
    D, _, _, _, F = SHAPES[shape]
    T, one = rows, REAL * rows
    x, wide = normal(T, D), normal(T, F)
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
    moments = normal(RANK * 7 * (D + F))
    n = len(moments)
    yield Case(
        "AdamW of a layer's LoRA",
        "adamw",
        12.0 * n,
        7.0 * F32 * n,
        {
            **{"w": moments, "m": moments * 0.1, "v": moments**2, "before": "w", "g": moments},
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
        sizes = {"T": T, "N": N, "D": K, "w": weight(N, K)}
        moved = REAL * (float(T) * (N + K) + N * K)
        yield Case(
            f"product {name}, {N} × {K}",
            "linear",
            2.0 * T * N * K,
            moved,
            {"y": (T, N), "x": normal(T, K), "bias": None, "plus": None, **sizes},
        )
        yield Case(
            f"product {name}, backward",
            "linear_backward",
            2.0 * T * N * K,
            moved,
            {"dx": (T, K), "dy": normal(T, N), "accumulate": 0, **sizes},
        )


def lora(shape: str, rows: int) -> Iterator[Case]:
    """LoRA beside q, k and v, forward and backward."""
    D, H, G, E, _ = SHAPES[shape]
    T, one, x = rows, REAL * rows, normal(rows, D)
    widths = (H * E, G * E, G * E)
    fields: dict = {}
    back: dict = {}
    for i, N in enumerate(widths):
        a, b = normal(D, RANK), normal(RANK, N)
        fields |= {f"y{i}": normal(T, N), f"s{i}": (T, RANK), f"a{i}": a, f"b{i}": b, f"N{i}": N}
        back |= {f"y{i}": normal(T, N), f"s{i}": normal(T, RANK), f"ds{i}": (T, RANK)}
        back |= {f"a{i}": a, f"b{i}": b, f"da{i}": np.zeros_like(a), f"db{i}": np.zeros_like(b)}
        back |= {f"N{i}": N}
    sizes = {"count": len(widths), "x": x, "T": T, "D": D, "R": RANK, "scale": 1.0}
    columns = sum(widths)
    yield Case(
        f"LoRA q k v, rank {RANK}",
        "lora",
        2.0 * T * RANK * (3 * D + columns),
        one * (D + 2.0 * columns),
        {**fields, **sizes},
    )
    yield Case(
        "LoRA q k v, backward",
        "lora_backward",
        4.0 * T * RANK * (3 * D + columns),
        one * (3.0 * D + columns),
        {**back, "dx": normal(T, D), **sizes},
    )


def attention(shape: str, rows: int, length: int) -> Iterator[Case]:
    """Rotating, the pages of keys and values, and attention of sequences, forward and backward."""
    _, H, G, E, _ = SHAPES[shape]
    T, one = rows, REAL * rows
    table = normal(T, E // 2)
    q, k, v = normal(T, H, E), normal(T, G, E), normal(T, G, E) * 0.5
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
    pages = np.arange(len(spans) * -(-length // engine.KV_PAGE), dtype=np.int32)
    slots = np.arange(T, dtype=np.int32)  # whole pages: length is a multiple of them
    keys = len(pages) * engine.KV_PAGE
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
            **{"y": (T, H, E), "lse": (T, H), "q": q, "k_pages": normal(keys, G, E)},
            **{"v_pages": normal(keys, G, E), "spans": spans, "pages": pages, **heads},
        },
    )
    yield Case(
        "attention, backward",
        "attention_backward",
        10.0 * pairs * H * E,
        one * E * (4.0 * H + 4 * G),
        {
            **{"dq": (T, H, E), "dk": (T, G, E), "dv": (T, G, E), "dy": q * 0.1, "y": q * 0.1},
            **{"lse": np.full((T, H), 9.0, np.float32), "q": q, "k": k, "v": v, "spans": spans},
            **heads,
        },
    )


def head(shape: str, vocab: int, chunk_bytes: int) -> Iterator[Case]:
    """A chunk of the head's rows."""
    D = SHAPES[shape][0]
    T = min(2048, max(1, chunk_bytes // (F32 * vocab)))
    logits, ids = normal(T, vocab), np.arange(T, dtype=np.int32)
    lse = np.stack([np.log(np.exp(logits.astype(float)).sum(1)), np.zeros(T)], 1)
    start = np.arange(T + 1, dtype=np.int32)
    chunk, size = float(F32) * T * vocab, {"T": T, "V": vocab}
    common = {"logits": logits, **size}
    rows = f"{T} rows"
    yield Case(
        f"head, {rows}",
        "head",
        2.0 * T * vocab * D,
        chunk + REAL * vocab * D,
        {"logits": (T, vocab), "x": normal(T, D), "w": weight(vocab, D), "D": D, **size},
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
        {"dlogits": (T, vocab), "lse": lse, "dlogp": normal(T), "first": 0, **told, **common},
    )
    yield Case(
        f"top {TOPK}",
        "topk_logprob",
        2.0 * T * vocab,
        chunk,
        {"ids": (T, TOPK), "logp": (T, TOPK), "lse": lse, "K": TOPK, **common},
    )
    how = engine.Jsd(0.5, 1.0, float("inf"), 0, 0, 0)
    yield Case(
        "JSD with its gradient",
        "jsd",
        20.0 * T * vocab,
        2.5 * chunk,
        {
            **{"loss": (T,), "dstudent": (T, vocab), "student": logits, "teacher": logits * 0.9},
            **{"scale": np.ones(T, np.float32), "how": how, **size},
        },
    )


def decoding(shape: str, vocab: int, batch: int, length: int) -> Iterator[Case]:
    """What a layer does with a row of each of `batch` sequences, and drawing their tokens."""
    D, H, G, E, F = SHAPES[shape]
    B, pages = batch, -(-length // engine.KV_PAGE)
    for name, N, K in (("q", H * E, D), ("gate", F, D), ("down", D, F)):
        sizes = {"T": B, "N": N, "D": K, "w": weight(N, K)}
        yield Case(
            f"batch {B}: product {name}",
            "linear",
            2.0 * B * N * K,
            float(REAL) * (N * K + B * (N + K)),
            {"y": (B, N), "x": normal(B, K), "bias": None, "plus": None, **sizes},
        )
    spans = [engine.Span(i, 1, length - 1, i * pages, -1) for i in range(B)]
    held = B * pages * engine.KV_PAGE
    yield Case(
        f"batch {B}: attention over {length} keys",
        "attention",
        4.0 * B * length * H * E,
        float(REAL) * 2 * B * length * G * E,
        {
            **{"y": (B, H, E), "lse": (B, H), "q": normal(B, H, E)},
            **{"k_pages": normal(held, G, E), "v_pages": normal(held, G, E), "spans": spans},
            **{"pages": np.arange(B * pages, dtype=np.int32), "S": B, "T": B, "H": H, "G": G},
            **{"E": E, "window": 0},
        },
    )
    logits = normal(B, vocab)
    lse = np.stack([np.log(np.exp(logits.astype(float)).sum(1)), np.zeros(B)], 1)
    draws = [engine.Draw(1, 0, t, 1.0, 1.0, -1, vocab) for t in range(B)]
    yield Case(
        f"batch {B}: drawing",
        "sample",
        3.0 * B * vocab,
        float(F32) * B * vocab,
        {
            **{"ids": (B,), "logp": (B,), "logits": logits, "lse": lse, "draws": draws},
            **{"T": B, "V": vocab},
        },
    )


def ceilings(device: engine.Device, clock: Clock, args: argparse.Namespace) -> tuple[float, float]:
    """Flops and bytes a microsecond of the card's largest product and of its copy."""
    N = 256 if args.tiny else PRODUCT
    product = device.prepared(
        "linear", y=(N, N), x=normal(N, N), w=weight(N, N), bias=None, plus=None, T=N, N=N, D=N
    )
    flops = 2.0 * N**3 / clock.median(product, args.rounds, args.launches)
    size = COPY_BYTES >> 10 if args.tiny else COPY_BYTES
    to, source = engine.Memory(device, size), engine.Memory(device, size)

    def copy() -> None:
        device.c.copy(device.pointer, to.pointer, source.pointer, size)

    moved = 2.0 * size / clock.median(copy, args.rounds, args.launches)
    ceiling = {"TFLOP/s": flops / 1e6, "GB/s": moved / 1e3}
    print(
        json.dumps({"op": f"product {N}³, and a copy of {size >> 20} MiB", **ceiling}), flush=True
    )
    return flops, moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "8b"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--length", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the emulator")
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.rows, args.length, args.batches = ["tiny"], 128, 64, [1, 2]
        args.vocab, args.rounds, args.launches = 512, 1, 1
    if args.length % engine.KV_PAGE or args.rows % args.length:
        parser.error("--length is a multiple of 64, and --rows one of --length")
    try:
        device = engine.Device(args.device)
    except engine.Unavailable as reason:
        print(reason)
        return 1
    chunk = 1 << 20 if args.tiny else device.c.chunk_bytes
    clock = Clock(device)
    flops, moved = ceilings(device, clock, args)
    for shape in args.shapes:
        layer = (shape, args.rows)
        parts = [pointwise(*layer), products(*layer), lora(*layer)]
        parts += [attention(*layer, args.length), head(shape, args.vocab, chunk)]
        parts += [decoding(shape, args.vocab, batch, args.length) for batch in args.batches]
        for case in (case for part in parts for case in part):
            sets = min(SETS_MOST, 1 + int(CACHED_BYTES / case.bytes)) if not args.tiny else 1
            calls = [device.prepared(case.op, **case.args) for _ in range(sets)]
            taken = clock.median(in_turn(calls), args.rounds, args.launches)
            floor = max(case.flops / flops, case.bytes / moved)
            bound = "compute" if case.flops / flops > case.bytes / moved else "memory"
            row = {"op": f"{shape} {case.what}", "µs": taken, "floor, µs": floor}
            row |= {"% of roofline": 100 * floor / taken, "bound": bound}
            row |= {"TFLOP/s": case.flops / taken / 1e6, "GB/s": case.bytes / taken / 1e3}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
