"""The CPU's ops beside the best library call for each, on one thread, in one run.

    python benchmarks/ops.py --rounds 5

Products: in f32, from weights kept in bf16, and, where the processor has AVX512_BF16, of bf16 on
both sides, against oneDNN (dnnl_sgemm and its matmul primitive on a weight in its own order) where
the package onednn-cpu-gomp is installed, and torch. The head's ops: against torch's logsumexp,
topk, and multinomial on the same logits. Medians of CPU seconds, all sides in turn."""

import argparse
import ctypes
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers import interleave

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


def onednn() -> ctypes.CDLL | None:
    """The library of the package onednn-cpu-gomp, or None."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = sorted(str(f.locate()) for f in files if f.name.startswith("libdnnl.so"))
    return ctypes.CDLL(found[-1]) if found else None


def onednn_f32(library: ctypes.CDLL, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
    """y = x·wᵀ with oneDNN's one plain call."""
    y = np.empty((len(x), len(w)), np.float32)
    sizes = [ctypes.c_int64(n) for n in (len(x), len(w), x.shape[1])]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    strides = [ctypes.c_int64(n) for n in (x.shape[1], w.shape[1], len(w))]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, w, y)]

    def run() -> None:
        library.dnnl_sgemm(
            ctypes.c_char(b"N"), ctypes.c_char(b"T"), *sizes, one, pointers[0], strides[0],
            pointers[1], strides[1], zero, pointers[2], strides[2],
        )  # fmt: skip
        assert y is not None

    return run


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Floats as bf16, rounded to the nearest."""
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy()


def onednn_bf16(library: ctypes.CDLL, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
    """y (f32) = x·wᵀ of bf16 with oneDNN's matmul primitive, on a weight that it has brought to the
    order it likes best beforehand, and an x that is bf16 already."""
    CPU, BF16, F32, ANY, WEIGHTS_MD = 1, 2, 3, 1, 131  # oneDNN's numbers
    SRC, DST, WEIGHTS = 1, 17, 33
    Sizes = ctypes.c_int64 * 12

    class Argument(ctypes.Structure):
        _fields_ = [("number", ctypes.c_int), ("memory", ctypes.c_void_p)]

    def made(function: str, *args: object) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        status = getattr(library, function)(ctypes.byref(out), *args)
        assert status == 0, f"{function}: status {status}"
        return out

    def described(dims: tuple[int, int], kind: int, strides: tuple[int, int]) -> ctypes.c_void_p:
        name = "dnnl_memory_desc_create_with_strides"
        return made(name, 2, Sizes(*dims), kind, Sizes(*strides))

    def execute(primitive: ctypes.c_void_p, memory: dict[int, ctypes.c_void_p]) -> None:
        list_of = (Argument * len(memory))(*[Argument(k, v.value) for k, v in memory.items()])
        status = library.dnnl_primitive_execute(primitive, stream, len(memory), list_of)
        assert status == 0, f"dnnl_primitive_execute: status {status}"
        library.dnnl_stream_wait(stream)

    (T, D), N = x.shape, len(w)
    y, x16, w16 = np.empty((T, N), np.float32), bf16_bits(x), bf16_bits(w)
    engine = made("dnnl_engine_create", CPU, ctypes.c_size_t(0))
    stream = made("dnnl_stream_create", engine, 1)
    x_md, plain_md = described((T, D), BF16, (D, 1)), described((D, N), BF16, (1, D))
    any_md = made("dnnl_memory_desc_create_with_tag", 2, Sizes(D, N), BF16, ANY)
    y_md = described((T, N), F32, (N, 1))
    product = made("dnnl_matmul_primitive_desc_create", engine, x_md, any_md, None, y_md, None)
    library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
    w_md = ctypes.c_void_p(library.dnnl_primitive_desc_query_md(product, WEIGHTS_MD, 0))
    allocated = ctypes.c_void_p(-1)
    plain = made("dnnl_memory_create", plain_md, engine, ctypes.c_void_p(w16.ctypes.data))
    best = made("dnnl_memory_create", w_md, engine, allocated)
    reorder = made("dnnl_reorder_primitive_desc_create", plain_md, engine, w_md, engine, None)
    execute(made("dnnl_primitive_create", reorder), {SRC: plain, DST: best})
    memory = {
        SRC: made("dnnl_memory_create", x_md, engine, ctypes.c_void_p(x16.ctypes.data)),
        WEIGHTS: best,
        DST: made("dnnl_memory_create", y_md, engine, ctypes.c_void_p(y.ctypes.data)),
    }
    primitive = made("dnnl_primitive_create", product)
    execute(primitive, memory)
    wanted = x[0].astype(float) @ w.T.astype(float)
    assert np.abs(y[0] - wanted).max() < 0.05 * np.abs(wanted).max()

    def run() -> None:
        execute(primitive, memory)
        assert x16 is not None and y is not None

    return run


def repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    """The call so often that it can be timed."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def products(devices: dict[str, engine.Device], rounds: int) -> None:
    """One row a shape: ours with each element type of the weight, oneDNN, torch."""
    library = onednn()
    rng = np.random.default_rng(0)
    for T, N, D in PRODUCTS:
        x, w = rng.standard_normal((T, D)), rng.standard_normal((N, D))
        common = {"x": x, "y": (T, N), "bias": None, "T": T, "N": N, "D": D, "accumulate": 0}
        sides = {
            "f32": prepared(devices["f32"], "linear", w=engine.Frozen(w, "f32"), **common),
            "bf16 weights": prepared(
                devices["f32"], "linear", w=engine.Frozen(w, "bf16"), **common
            ),
        }
        x32, w32 = x.astype(np.float32), w.astype(np.float32)
        tx, tw = torch.from_numpy(x32), torch.from_numpy(w32)
        if library:
            sides["oneDNN f32"] = onednn_f32(library, x32, w32)
        sides["torch f32"] = lambda tx=tx, tw=tw: torch.nn.functional.linear(tx, tw)
        if "bf16" in devices:
            sides["bf16"] = prepared(
                devices["bf16"], "linear", w=engine.Frozen(w, "bf16"), **common
            )
            if library:
                sides["oneDNN bf16"] = onednn_bf16(library, x32, w32)
            bx, bw = tx.bfloat16(), tw.bfloat16()
            sides["torch bf16"] = lambda bx=bx, bw=bw: torch.nn.functional.linear(bx, bw)
        times = max(1, int(2e9 / (2.0 * T * N * D)))
        seconds = interleave({k: repeated(v, times) for k, v in sides.items()}, rounds)
        rates = {name: 2e-9 * T * N * D * times / value for name, value in seconds.items()}
        shown = ", ".join(f"{k} {v:6.1f}" for k, v in rates.items())
        print(f"linear {T:5} x {N:6} x {D:5}: GFLOP/s {shown}", flush=True)


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
    devices = {"f32": engine.Device("cpu", threads=1)}
    if engine.cpu_has("avx512bf16"):
        devices["bf16"] = engine.Device("cpu-avx512bf16", threads=1)
    head_ops(devices["f32"], args.rounds)
    products(devices, args.rounds)


if __name__ == "__main__":
    main()
