"""oneDNN's products as a peer, called in the package onednn-cpu-gomp, where it is installed."""

import ctypes
import importlib.metadata
from collections.abc import Callable

import numpy as np
import torch


def load() -> ctypes.CDLL | None:
    """The library of the package onednn-cpu-gomp, or None."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = sorted(str(f.locate()) for f in files if f.name.startswith("libdnnl.so"))
    return ctypes.CDLL(found[-1]) if found else None


def f32(library: ctypes.CDLL, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
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


def bf16(library: ctypes.CDLL, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
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
