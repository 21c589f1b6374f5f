"""The CPU's ops beside the best library call for each, on one thread, in one run.

    python benchmarks/ops.py --rounds 5

Products: against oneDNN's dnnl_sgemm where the package onednn-cpu-gomp is installed, and torch. The
head's ops: against torch's logsumexp, topk, and multinomial on the same logits. Medians of CPU
seconds, both sides in turn."""

import argparse
import ctypes
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers import PEAK_GFLOPS, interleave

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import engine

PRODUCTS = [  # T, N, D of the 0.6B shape: training, a chunk of the head, LoRA, decoding
    (1024, 3072, 1024),
    (512, 1024, 3072),
    (256, 151936, 1024),
    (1024, 32, 1024),
    (32, 3072, 1024),
    (1, 3072, 1024),
    (1, 151936, 1024),
]


def prepared(device: engine.Device, op: str, **args: object) -> Callable[[], None]:
    """A call of one op on memory that is placed once."""
    values = {}
    for param in engine.OPS[op]:
        value = args[param.name]
        if param.pointer and not isinstance(value, engine.Memory):
            value = device.place(param, value)[0]
        values[param.name] = value
    pointers = [v.pointer if isinstance(v, engine.Memory) else v for v in values.values()]
    function = getattr(device.c, op)
    keep = list(values.values())  # the memory lives as long as the call

    def run() -> None:
        assert keep
        function(device.pointer, *pointers)

    return run


def onednn_sgemm() -> Callable[..., int] | None:
    """dnnl_sgemm out of the package onednn-cpu-gomp, or None."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = sorted(str(f.locate()) for f in files if f.name.startswith("libdnnl.so"))
    return ctypes.CDLL(found[-1]).dnnl_sgemm if found else None


def onednn_side(sgemm: Callable[..., int], x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
    """y = x·wᵀ with oneDNN's one plain call."""
    y = np.empty((len(x), len(w)), np.float32)
    sizes = [ctypes.c_int64(n) for n in (len(x), len(w), x.shape[1])]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    strides = [ctypes.c_int64(n) for n in (x.shape[1], w.shape[1], len(w))]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, w, y)]

    def run() -> None:
        sgemm(
            ctypes.c_char(b"N"), ctypes.c_char(b"T"), *sizes, one, pointers[0], strides[0],
            pointers[1], strides[1], zero, pointers[2], strides[2],
        )  # fmt: skip
        assert y is not None

    return run


def repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    """The call so often that it can be timed."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def products(device: engine.Device, rounds: int) -> None:
    """One row a shape: both element types of the weight, oneDNN, torch."""
    sgemm = onednn_sgemm()
    rng = np.random.default_rng(0)
    for T, N, D in PRODUCTS:
        x, w = rng.standard_normal((T, D)), rng.standard_normal((N, D))
        common = {"x": x, "y": (T, N), "bias": None, "T": T, "N": N, "D": D, "accumulate": 0}
        sides = {
            "f32": prepared(device, "linear", w=engine.Frozen(w, "f32"), **common),
            "bf16": prepared(device, "linear", w=engine.Frozen(w, "bf16"), **common),
        }
        x32, w32 = x.astype(np.float32), w.astype(np.float32)
        if sgemm:
            sides["oneDNN f32"] = onednn_side(sgemm, x32, w32)
        tx, tw = torch.from_numpy(x32), torch.from_numpy(w32)
        sides["torch f32"] = lambda tx=tx, tw=tw: torch.nn.functional.linear(tx, tw)
        times = max(1, int(2e9 / (2.0 * T * N * D)))
        seconds = interleave({k: repeated(v, times) for k, v in sides.items()}, rounds)
        rates = {name: 2e-9 * T * N * D * times / value for name, value in seconds.items()}
        shown = ", ".join(
            f"{k} {v:6.1f} ({100 * v / PEAK_GFLOPS:3.0f} %)" for k, v in rates.items()
        )
        print(f"linear {T:5} x {N:6} x {D:5}: GFLOP/s {shown}")


def head_ops(device: engine.Device, rounds: int) -> None:
    """logprob, topk_logprob and sample on a chunk of logits."""
    T, V, K = 64, 151936, 32
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((T, V)).astype(np.float32) * 3
    ids, start = rng.integers(0, V, T), np.arange(T + 1)
    lse = np.log(np.exp(logits.astype(float)).sum(1)).astype(np.float32)
    draws = [engine.Draw(1, 0, t, 1.0, 1.0, -1, V) for t in range(T)]
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
            prepared(device, "logprob", lse=(T,), logp=(T,), ids=ids, start=start, **common),
            torch_logprob,
        ),
        f"topk_logprob K={K}": (
            prepared(device, "topk_logprob", ids=(T, K), logp=(T, K), lse=lse, K=K, **common),
            torch_topk,
        ),
        "sample": (
            prepared(device, "sample", ids=(T,), logp=(T,), lse=lse, draws=draws, **common),
            torch_sample,
        ),
    }
    for name, (ours, theirs) in pairs.items():
        seconds = interleave({"ours": ours, "torch": theirs}, rounds)
        print(
            f"{name:18} {T} x {V}: {1e3 * seconds['ours']:7.2f} ms, torch "
            f"{1e3 * seconds['torch']:7.2f} ms, ratio {seconds['torch'] / seconds['ours']:.2f}"
        )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = engine.Device("cpu", threads=1)
    head_ops(device, args.rounds)
    products(device, args.rounds)


if __name__ == "__main__":
    main()
