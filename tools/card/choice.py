"""Whether a row of a product has the same bits at every number of rows, on the card itself: the
trainer and the sampler rely on it (cuda/product/matmul.cu). And whether our own kernel has
cuBLASLt's bits.

    python -m tools.card.choice --device cuda

Tries each product of Qwen3's shapes with a base weight, forward and backward, and the head: the
rows of M = 256 are the first 256 rows of every larger M and contain those of every smaller one. A
line of JSON for each product; `wrong` says at which numbers of rows bits differ. Operands are made
on the card and compared there, by torch where there is one. TINSMITH_CUDA_LOG gets cuBLASLt's
trials."""

import argparse
import ctypes
import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
from cuda_ops import BLOCK, Block
from support import op_devices

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 200, 255, 256, 257, 511, 1000)
LARGE = (2048, 8192)
BASE = 256
HEAD_ROWS = 1000  # at most: a row of its result is long
PRODUCTS = {  # N, D by shape: q k v, o, gate and up, down, as a layer has them
    "0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "1.7b": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "4b": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
}
HEADS = {"0.6b": (151936, 1024), "8b": (151936, 4096)}
TINY = ((48, 64), (64, 40))


class Part(op_devices.Memory):
    """Some of another memory, from a byte on; it lives no longer than that one."""

    def __init__(self, whole: op_devices.Memory, at: int):
        self.whole, self.device = whole, whole.device
        self.pointer = op_devices.VOID(whole.pointer.value + at)
        self.size_bytes = whole.size_bytes - at

    def __del__(self):
        pass


def on_card(memory: op_devices.Memory, bytes_: int):
    """Device memory as an array that can be compared where it lies."""
    if memory.device.name == "cuda-emulated":
        return np.ctypeslib.as_array((ctypes.c_uint8 * bytes_).from_address(memory.pointer.value))
    if not importlib.util.find_spec("torch"):
        return memory.read(bytes_)
    import torch

    what = {"shape": (bytes_,), "typestr": "|u1", "version": 3}
    what["data"] = (memory.pointer.value, False)
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=what), device="cuda")


class Product:
    """A product with any number of rows, its operands and two results on the card."""

    def __init__(
        self, device: op_devices.Device, block: op_devices.Memory, op: str, N: int, D: int
    ):
        most = HEAD_ROWS if op == "head" else LARGE[-1]
        self.device, self.op, self.N, self.D = device, op, N, D
        self.inputs, self.outputs = (N, D) if op == "linear_backward" else (D, N)
        self.x_row, self.y_row = 2 * self.inputs, (4 if op == "head" else 2) * self.outputs
        self.w = device.place(parameter(op, "w"), op_devices.Repeats(block, (N, D), 98))[0]
        self.x, self.base, self.other = (
            op_devices.Memory(device, size, op_devices.Repeats(block, (), 0))
            for size in (most * self.x_row, BASE * self.y_row, most * self.y_row)
        )

    def make(self, to: op_devices.Memory, first: int, rows: int, device: op_devices.Device) -> None:
        """The product of some rows of x."""
        x, sizes = Part(self.x, first * self.x_row), {"T": rows, "D": self.D}
        if self.op == "head":
            args = {"logits": to, "x": x, "V": self.N}
        elif self.op == "linear":
            args = {"y": to, "x": x, "bias": None, "plus": None, "N": self.N, "step": self.N}
        else:
            args = {"dx": to, "dy": x, "accumulate": 0, "N": self.N, "step": self.N}
        device.bind(self.op, {**args, "w": self.w, **sizes}).run()
        device.check(device.c.sync(device.pointer))

    def same(self, rows: int, first: int) -> bool:
        """Whether `other` has the bits of `base`, from its row `first` on."""
        size, base = min(rows, BASE - first) * self.y_row, Part(self.base, first * self.y_row)
        return bool((on_card(base, size) == on_card(self.other, size)).all())

    def differing(self, rows: tuple[int, ...]) -> list[int]:
        """The numbers of rows at which some row's bits are others than at BASE rows."""
        self.make(self.base, 0, BASE, self.device)
        found = []
        for count in rows:
            first = 0 if count >= BASE else (BASE - count) // 2  # small ones from the middle
            self.make(self.other, first, count, self.device)
            if not self.same(count, first):
                found.append(count)
        return found

    def own_has_them(self, own: op_devices.Device) -> bool:
        """Whether our own kernel makes BASE rows of the same bits."""
        self.make(self.other, 0, BASE, own)
        return self.same(BASE, 0)


def parameter(op: str, name: str) -> op_devices.Param:
    return next(p for p in op_devices.OPS[op] if p.name == name)


def own_device(name: str, device: op_devices.Device) -> op_devices.Device:
    """The same card, without cuBLASLt."""
    give = device.library.device_libraries
    give.argtypes = [ctypes.c_char_p] * 3
    give(b"none", b"", None)
    return op_devices.Device(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=PRODUCTS, default=["8b", "0.6b"])
    parser.add_argument("--tiny", action="store_true", help="small products, for the emulator")
    args = parser.parse_args()
    device = op_devices.Device(args.device)
    own = own_device(args.device, device)
    products = [one for shape in args.shapes for one in PRODUCTS[shape]]
    heads = [HEADS[shape] for shape in args.shapes if shape in HEADS]
    rows = (*ROWS, *LARGE)
    if args.tiny:
        products, heads, rows = TINY, ((320, 64),), (1, 2, 17, 256, 257)
    block = Block(device, BLOCK >> 10 if args.tiny else BLOCK).memory
    bad = False
    cases = [("head", *one) for one in heads]
    cases += [(op, *one) for one in products for op in ("linear", "linear_backward")]
    for op, N, D in cases:
        product = Product(device, block, op, N, D)
        tried = tuple(count for count in rows if op != "head" or count <= HEAD_ROWS)
        found = product.differing(tried)
        row = {"product": f"{op} {N} × {D}", "numbers of rows": len(tried)}
        row["our kernel's bits are these"] = product.own_has_them(own)
        if found:
            row["wrong"] = f"{op} {N} × {D}: a row has other bits at {found} rows than at {BASE}"
        bad |= bool(found)
        print(json.dumps(row), flush=True)
    for note in device.notes:
        print(json.dumps({"note": note}), flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
