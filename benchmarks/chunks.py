"""What exactness costs: the gated delta rule page by page, beside a chunk-parallel scan.

    python benchmarks/chunks.py

The engine sums each row of a page over the rows before it one by one, so that training, prefill in
any pieces and decoding agree to the bit. The other side (chunks.c) solves for a page's rows in
blocks, with products of matrices, and gives that up; it is shown with its fastest block. Both are
built with the same compiler from the same products and run on one thread. The error of each is from
the plain recurrence in float64, of one head. Ten seconds; needs a C compiler."""

import ctypes
import os
import shlex
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peers import interleave, parse, parser
from report import Report

ROOT = Path(__file__).parent.parent
SOURCES = (
    *(
        f"cpu/product/{name}.c"
        for name in ("amx", "gemm", "gemm_quantized", "gemm_tiled", "gemv_backward", "tile")
    ),
    *(f"cpu/runtime/{name}.c" for name in ("cpu", "pool", "transpose")),
    "cpu/weights/packed.c",
    *("device/dtype.c", "device/status.c"),
)
FLAGS = ["-std=c11", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi"]
FLAGS += ["-DCPU_ISA=native", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
BLOCKS = (16, 32, 64)
PAGE = 64
SHAPES = {"0.8B": (16, 16), "4B": (16, 32), "27B": (16, 48)}  # key heads, value heads
WIDTH = 128

Array = NDArray[np.float32]


def built(folder: Path) -> ctypes.CDLL:
    """chunks.c and what it needs of the engine."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *FLAGS, ROOT / "benchmarks/chunks.c"]
    command += [ROOT / "csrc" / name for name in SOURCES]
    subprocess.run([*command, "-o", folder / "chunks.so", "-lm"], check=True)
    return ctypes.CDLL(str(folder / "chunks.so"))


class Layer:
    """Random inputs as a layer has them, and room for what comes out."""

    def __init__(self, c: ctypes.CDLL, tokens: int, heads: tuple[int, int]) -> None:
        rng = np.random.default_rng(0)
        self.c, self.sizes = c, (tokens, *heads, WIDTH, WIDTH)
        keys, values = (tokens, heads[0], WIDTH), (tokens, heads[1], WIDTH)
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in (keys, keys, values))
        q /= np.linalg.norm(q, axis=-1, keepdims=True) * WIDTH**0.5
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        beta = rng.uniform(0.05, 0.95, values[:2]).astype(np.float32)
        decay = -rng.exponential(0.05, values[:2]).astype(np.float32)
        self.inputs = (q, k, v, beta, decay)
        self.y, self.w = np.empty(values, np.float32), np.empty(values, np.float32)
        self.pages = np.empty((tokens // PAGE + 1, heads[1], WIDTH, WIDTH), np.float32)

    def run(self, block: int) -> Array:
        """y, summed in blocks of so many rows; 0: as the engine sums."""
        arrays = (self.y, self.w, self.pages, *self.inputs)
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in arrays)
        if self.c.delta_run(*pointers, *self.sizes, block):
            raise MemoryError("no memory for the scratch")
        return self.y

    def error(self, block: int) -> float:
        """Of the last value head, from the recurrence in float64."""
        q, k, v, beta, decay = (array[:, -1].astype(np.float64) for array in self.inputs)
        state, found = np.zeros((WIDTH, WIDTH)), []
        for t in range(len(q)):
            state = state * np.exp(decay[t])
            state += np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
            found.append(state.T @ q[t])
        exact = np.array(found)
        return float(np.abs(self.run(block)[:, -1] - exact).max() / np.abs(exact).max())


def main() -> None:
    """A row a shape and length."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    args = parse(options)
    with tempfile.TemporaryDirectory() as folder, Report(args, __doc__) as report:
        c = built(Path(folder))
        rate = f"tokens/{args.unit}"
        columns = {rate: ".0f", "error": ".1e", "rows at once": "d"}
        table = report.table("A layer's rule", "case", columns, plot=rate)
        for name, heads in SHAPES.items():
            for tokens in args.tokens:
                layer = Layer(c, tokens, heads)
                sides = {block: partial(layer.run, block) for block in (0, *BLOCKS)}
                found = interleave(sides, args.rounds, clock=args.clock)
                best = min(BLOCKS, key=lambda block: found[block])
                rows = {"pages": 0, "chunks": best}
                table.add(
                    f"{name}, {tokens}",
                    {
                        side: (tokens / found[block], layer.error(block), block or 1)
                        for side, block in rows.items()
                    },
                )


if __name__ == "__main__":
    main()
