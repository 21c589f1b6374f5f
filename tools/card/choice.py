"""Whether a row of a product has the same bits whatever the number of rows beside it, on a device.

    python -m tools.card.choice --device cuda

Every product with a base weight of Qwen3's shapes, forward and backward, and the head: the rows of
M = 256 are the first 256 rows of every larger M and contain those of every smaller one. A line of
JSON for each product; `wrong` says at which numbers of rows bits differ."""

import argparse
import json
import sys

import engine
import numpy as np

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, 255, 256, 257, 511, 1000)
LARGE = (2048, 8192)
PRODUCTS = (  # N, D: q, k, o, gate, down of 0.6B, 1.7B, 4B, 8B
    *((2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
    *((2048, 2048), (6144, 2048), (2048, 6144)),
    *((4096, 2560), (1024, 2560), (2560, 4096), (9728, 2560), (2560, 9728)),
    *((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)),
)
HEADS = ((151936, 1024), (151936, 4096))
BASE = 256


class Product:
    """A weight on the device, and its product with any number of rows."""

    def __init__(self, device: engine.Device, op: str, N: int, D: int):
        rng = np.random.default_rng(N + D)
        self.device, self.op, self.sizes = device, op, {"N": N, "D": D}
        self.weight = device.put_frozen(
            engine.Frozen(rng.standard_normal((N, D), np.float32), "bf16")
        )
        self.inputs = N if op == "linear_backward" else D

    def bits(self, x: np.ndarray) -> np.ndarray:
        """The result's bytes, a row of them for each row of x."""
        args = {"T": len(x), **self.sizes, "w": self.weight}
        if self.op == "head":
            args["V"] = args.pop("N")
            out = self.device.call("head", logits=(len(x), args["V"]), x=x, **args)["logits"]
        elif self.op == "linear":
            args |= {"bias": None, "plus": None}
            out = self.device.call("linear", y=(len(x), self.sizes["N"]), x=x, **args)["y"]
        else:
            args |= {"accumulate": 0, "dx": (len(x), self.sizes["D"]), "dy": x}
            out = self.device.call("linear_backward", **args)["dx"]
        return out.view(np.uint32)

    def differing(self, rows: tuple[int, ...]) -> list[int]:
        """The numbers of rows at which some row's bits are others than at BASE rows."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal((max(*rows, BASE), self.inputs), np.float32)
        base = self.bits(x[:BASE])
        found = []
        for count in rows:
            first = 0 if count >= BASE else (BASE - count) // 2  # small ones from the middle
            got = self.bits(x[first : first + count])
            same = min(count, BASE)
            if (got[:same] != base[first : first + same]).any():
                found.append(count)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small products, for the emulator")
    args = parser.parse_args()
    device = engine.Device(args.device)
    products, heads = (((48, 64), (64, 40)), ((320, 64),)) if args.tiny else (PRODUCTS, HEADS)
    rows = (1, 2, 17, 256, 257) if args.tiny else (*ROWS, *LARGE)
    bad = 0
    cases = [(op, *one) for one in products for op in ("linear", "linear_backward")]
    cases += [("head", *one) for one in heads]
    for op, N, D in cases:
        tried = tuple(count for count in rows if op != "head" or count <= 1000)
        found = Product(device, op, N, D).differing(tried)
        row = {"op": op, "N": N, "D": D, "numbers of rows": len(tried)}
        if found:
            row["wrong"] = f"{op} {N} × {D}: a row has other bits at {found} rows than at {BASE}"
        bad += bool(found)
        print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
