"""The one bar that every op's results are held to (`check`), beside its formula in op_reference.py.

A device may err against float64 no more than the same formula in float32 NumPy, and a little.
"""

import hashlib
import pickle

import numpy as np
import torch

from support import op_reference, wrong_results
from support.case_seed import case_of
from support.op_devices import (
    KV_PAGE,
    OPS,
    Frozen,
    Memory,
    from_bf16,
    to_bf16,
)

# By how much a device's error may exceed that of float32 NumPy, relative to the norm of the result:
# some roundings of its own, by the bytes of its `real`: two of f32, or half a unit of bf16. Where
# `real` is bf16, a product of f32 matrices or of something rounded on the way is held to what torch
# makes of it in bf16, although its result may be f32.
EPSILON = {4: 2.0**-22, 2: 2.0**-9}
THROUGH_REAL = {
    "linear": {"y"},
    "lora": {"y0", "y1", "y2"},
    "lora_backward": {"dx", *(f"{k}{i}" for k in ("ds", "da") for i in range(3))},
    "head_lora": {"logits"},
}
# f32 inputs that such a device rounds before it multiplies them, as it does a base weight.
IN_LORA = {f"{k}{i}" for k in ("a", "b") for i in range(3)}
HELD_IN_REAL = {
    "lora": IN_LORA,
    "lora_backward": IN_LORA,
    "head_lora": {"a", "b"},
    "linear": {"bias"},
}


def error(got, exact) -> float:
    """‖got − exact‖ / ‖exact‖; infinities and NaN must be in the same places."""
    got, exact = np.asarray(got, float), np.asarray(exact, float)
    assert got.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    assert np.isfinite(got[finite]).all(), "not finite where the reference is"
    scale = np.linalg.norm(exact[finite]) or 1.0
    return float(np.linalg.norm(got[finite] - exact[finite]) / scale)


# What attention rounds where pages are in bf16, whatever `real` is: all that it multiplies. Its
# results are sums of terms of which one factor is made on the way (probabilities, and in backward
# ds), so each term errs by at most a rounding, 2⁻⁸.
IN_PAIRS = {
    "attention": {"q", "k_pages", "v_pages"},
    "attention_backward": {"q", "k", "v", "dy"},
}
THROUGH_PAIRS = {"attention": {"y"}, "attention_backward": {"dq", "dk", "dv"}}


# Types whose codes 16 bits hold exactly: forward, products of pairs round what they multiply alone.
# Those of whole numbers have some more of them.
SCALED = ("int8", "int4", "q4_0", "mxfp4", "mxfp4_pairs")
SCALED_WHOLE = (*SCALED, "q4_1", "q4_k", "q5_k", "q6_k")


# Products, whose sums run over one of these sizes, one term after another: each rounds, at random,
# which no library's f32 is bound to do as often.
PRODUCTS = {
    *("linear", "linear_backward", "lora", "lora_backward", "head", "head_lora", "matmul"),
    *("grouped_linear", "grouped_linear_backward", "grouped_matmul", "grouped_gradient"),
    "attention",  # a query and a key
}
SUMMED = ("T", "P", "D", "N", "V", "K", "E", *(f"N{i}" for i in range(3)))


# What tensor cores cut from a sum of K products, relative to it, is 1.1e-9·K to 1.3e-9·K for K up
# to 4096: cuda/emulator/stream.h computes it so, for normal numbers. Cuts all go towards zero: they
# grow with K, where roundings grow with its root.
CUT = 1.4e-9


def scores_size(args) -> float:
    """How large attention's scores are. An exponential errs, of itself, by what its score errs."""
    q, k = (np.sqrt(np.nanmean(np.square(args[name]))) for name in ("q", "k_pages"))
    return float(q * k)


def sum_error(dev, op, args) -> float:
    """What a product's longest sum may err by: half a unit of f32 times the root of its length, or
    what tensor cores cut."""
    longest = max((args.get(name, 0) for name in SUMMED), default=0) if op in PRODUCTS else 0
    rounded = 2.0**-25 * float(longest) ** 0.5
    if op == "attention" and args["T"]:
        rounded *= max(1.0, scores_size(args))
    return max(rounded, CUT * longest) if dev.truncates else rounded


def allowed(dev, op, name, exact, same, slack=0.0) -> float:
    """The bar of one result: what the same formula in float32 errs, plus EPSILON, plus `slack`."""
    kind = next(p.type for p in OPS[op] if p.name == name)
    in_real = kind == "real" or name in THROUGH_REAL.get(op, ())
    bar = error(dev.round(same) if in_real else same, exact) + slack
    bar += EPSILON[dev.c.real_bytes if in_real else 4]
    in_pairs = name in THROUGH_PAIRS.get(op, ()) and dev.c.cached_bytes < dev.c.real_bytes
    return bar + (2.0**-8 if in_pairs else 0.0)


def above(dev, op, name, got, exact, same, slack) -> wrong_results.Output | None:
    """One result if it is above its bar; whole numbers must be equal."""
    if not np.issubdtype(got.dtype, np.floating):
        equal = np.array_equal(got, exact)
        return None if equal else wrong_results.Output(name, got, np.asarray(exact), np.inf, 0.0)
    bar = allowed(dev, op, name, exact, same, slack)
    try:
        found = error(got, exact)
    except AssertionError:  # another shape, or not finite in other places
        found = np.inf
    return None if found <= bar else wrong_results.Output(name, got, exact, found, bar, same)


def check(dev, op, got, exact, same, slack=0.0, args=None) -> None:
    """The bar: got errs at most as much as the same formula in float32 does, plus EPSILON, plus
    `slack`. `args`, of the call, are told and kept where it errs more."""
    assert sorted(got) == sorted(exact), f"{op} gave {sorted(got)}, the reference {sorted(exact)}"
    found = [above(dev, op, n, value, exact[n], same[n], slack) for n, value in got.items()]
    if outputs := list(filter(None, found)):
        args = args or {}
        wrong_results.fail(op, dev.name, case_of(op, args), outputs, args)


# ---- arguments ----


def in_whole_numbers(x) -> np.ndarray:
    """Rows as cpu/product/gemm_quantized.h rounds them where it multiplies whole numbers: each 32
    inputs to 16 bits of the largest of them."""
    x = np.asarray(x, np.float32)
    wide = np.pad(x, [(0, 0), (0, -x.shape[1] % 32)])
    blocks = wide.reshape(len(x), wide.shape[1] // 32, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    each = np.divide(32767, largest, out=np.zeros_like(largest), where=largest > 2.0**-110)
    rounded = np.rint(blocks * each).astype(float) * (largest / np.float32(32767)).astype(float)
    return rounded.reshape(wide.shape)[:, : x.shape[1]]


def reference_args(dev, op, args, dtype) -> dict:
    """The arguments that a reference function takes, rounded as the device holds them."""
    out = {}
    weight = args.get("w")
    narrow = dev.pairs and op != "embed" and isinstance(weight, Frozen) and weight.kept > 0
    forward = isinstance(weight, Frozen) and op != "embed" and not op.endswith("_backward")
    exact = narrow and forward and weight.dtype in SCALED
    whole = dev.whole and forward and weight.dtype in SCALED_WHOLE
    for p in OPS[op]:
        value = args.get(p.name)
        if isinstance(value, tuple | str):
            continue
        if isinstance(value, Frozen):
            value = dev.round_frozen(value.value)
            value = from_bf16(to_bf16(value)).astype(float) if narrow and not exact else value
        if isinstance(value, np.ndarray) and p.type in ("real", "cached", "float", "frozen"):
            if narrow and p.name in ("x", "dy"):
                value = from_bf16(to_bf16(value))
            held = p.type == "real" or p.name in HELD_IN_REAL.get(op, ())
            value = dev.round(value) if held else value.astype(np.float32)
            value = dev.round_cached(value) if p.name in IN_PAIRS.get(op, ()) else value
            rounds = whole and p.name == "x"
            value = (in_whole_numbers(value) if rounds else value).astype(dtype)
        out[p.name] = value
    return out


def page_size(value) -> int:
    """How many elements an array of pages has."""
    return int(np.prod(value.shape))


def put_pages(dev, k, v) -> tuple[Memory, Memory]:
    """Pages of a device, filled by its kv_write; slots that are NaN in k stay NaN."""
    pages, _, G, E = k.shape
    empty = np.full(page_size(k), np.nan)
    k_pages, v_pages = dev.put(empty, "cached"), dev.put(empty, "cached")
    slot = np.flatnonzero(np.isfinite(k).all(axis=(2, 3)).ravel()).astype(np.int32)
    rows_k, rows_v = (x.reshape(pages * KV_PAGE, G, E)[slot] for x in (k, v))
    dev.call(
        "kv_write",
        k_pages=k_pages,
        v_pages=v_pages,
        k=rows_k,
        v=rows_v,
        slot=slot,
        T=len(slot),
        G=G,
        E=E,
    )
    return k_pages, v_pages


def run(dev, op, args) -> dict:
    """Calls an op; pages in the reference's order go through kv_write first."""
    if "k_pages" in args:
        k_pages, v_pages = put_pages(dev, args["k_pages"], args["v_pages"])
        args = args | {"k_pages": k_pages, "v_pages": v_pages}
    return dev.call(op, **args)


RESULTS: dict[bytes, dict[str, np.ndarray]] = {}
RESULTS_MAX = 1024


def result(op: str, args: dict) -> dict[str, np.ndarray]:
    """A formula's, made once for arguments that most devices have alike."""
    key = hashlib.blake2b(pickle.dumps((op, args))).digest()
    if key not in RESULTS:
        if len(RESULTS) == RESULTS_MAX:
            RESULTS.clear()
        RESULTS[key] = getattr(op_reference, op)(**args)
    return RESULTS[key]


def compare(dev, op, args) -> dict:
    """Runs an op and holds it to the bar."""
    got = run(dev, op, args)
    exact = result(op, reference_args(dev, op, args, np.float64))
    same = result(op, reference_args(dev, op, args, np.float32))
    if dev.c.real_bytes == 2 and op in THROUGH_REAL and args["T"]:
        torchs = getattr(op_reference, op)(
            **in_torch_bf16(reference_args(dev, op, args, np.float32))
        )
        kept = THROUGH_REAL[op] & torchs.keys()
        same = same | {name: torchs[name].float().numpy() for name in kept}
    check(dev, op, got, exact, same, sum_error(dev, op, args), args)
    return got


def in_torch_bf16(args) -> dict:
    """The same arguments as tensors of bfloat16: products' formulas run on them as they are."""
    return {
        name: torch.from_numpy(value).bfloat16() if isinstance(value, np.ndarray) else value
        for name, value in args.items()
    }
