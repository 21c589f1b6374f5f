"""Arguments for the ops of gated delta networks, in the style of op_cases.py.

Their spans keep nothing; test_delta.py has those that do.
"""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np

from support import op_reference
from support.op_cases import CASES as CASES  # with those below
from support.op_cases import case
from support.op_devices import KV_PAGE, Span, from_bf16, to_bf16

LENGTHS = ((), (1,), (5, 1, 9), (63, 64, 65), (2, 128, 3), (200,))


def whole(lengths):
    """Spans of whole sequences that keep nothing."""
    row = np.cumsum([0, *lengths])
    return [Span(int(row[s]), length, 0, 0, -1) for s, length in enumerate(lengths)]


# The last has channels for more than one of a processor's jobs.
CONVS = (
    *(dict(lengths=n, C=C) for n, C in zip(LENGTHS, (8, 1, 67, 64, 35, 530), strict=True)),
    dict(lengths=(5, 40), C=64, gap=72),
    dict(lengths=(33, 2), C=24, gap=5),
)


@case(*CONVS)
def make_conv(rng, lengths, C, gap=0):
    T = sum(lengths)
    sizes = dict(spans=whole(lengths), S=len(lengths), T=T, C=C, x_step=C + gap, step=0)
    x, w = rng.standard_normal((T, C)) * 2, rng.standard_normal((C, 4))
    return dict(y=(T, C), start=None, ring=None, x=x, w=w) | sizes


@case(*CONVS)
def make_conv_backward(rng, lengths, C, gap=0):
    args = make_conv(rng, lengths, C, gap)
    for name in ("y", "start", "ring", "step"):
        del args[name]
    return args | dict(dx=args["x"].shape, dy=rng.standard_normal(args["x"].shape))


TH = (
    *(dict(T=T, H=H) for T, H in ((0, 4), (1, 1), (33, 6), (70, 32))),
    dict(T=33, H=6, gap=11),
)


@case(*TH)
def make_delta_gates(rng, T, H, gap=0):
    b, a = rng.standard_normal((2, T, H)) * 4
    a[:1] += 120  # e to this power is no float32
    rate, bias = np.log(rng.uniform(0.01, 16, H)), rng.standard_normal(H)
    return dict(beta=(T, H), decay=(T, H), b=b, a=a, rate=rate, bias=bias, T=T, H=H, step=H + gap)


@case(*TH)
def make_delta_gates_backward(rng, T, H, gap=0):
    args = make_delta_gates(rng, T, H, gap)
    dbeta, ddecay = rng.standard_normal((2, T, H))
    del args["beta"], args["decay"]
    return args | dict(db=(T, H), da=(T, H), dbeta=dbeta, ddecay=ddecay)


HEADS = (
    dict(G=1, H=1, N=32, E=32),
    dict(G=1, H=2, N=32, E=32),
    dict(G=2, H=4, N=64, E=32),
    dict(G=2, H=2, N=32, E=96),
    dict(G=1, H=3, N=32, E=64),
    dict(G=2, H=4, N=128, E=128),
)
DELTAS = tuple(dict(lengths=n) | heads for n, heads in zip(LENGTHS, HEADS, strict=True))


@case(*DELTAS)
def make_delta(rng, lengths, G, H, N, E):
    T = sum(lengths)
    q, k = rng.standard_normal((2, T, G, N))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    # exact in any device's real, so that w and pages, which backward is given, belong to them
    whole_v = rng.standard_normal((T, H, E))
    q, k, v = (from_bf16(to_bf16(x)).astype(float) for x in (q / N**0.5, k, whole_v))
    sizes = dict(spans=whole(lengths), S=len(lengths), T=T, G=G, H=H, N=N, E=E, step=0)
    return dict(
        y=(T, H, E),
        w=(T, H, E),
        pages=(T // KV_PAGE, H, N, E),
        state=None,
        open=None,
        q=q,
        k=k,
        v=v,
        beta=rng.uniform(0, 1, (T, H)),
        decay=-(rng.uniform(0, 1.5, (T, H)) ** 4),
        **sizes,
    )


@case(*DELTAS)
def make_delta_backward(rng, **size):
    args = make_delta(rng, **size)
    for name in ("y", "state", "open", "step"):
        del args[name]
    found = op_reference.delta(**args)
    kept = dict(w=found["w"], pages=np.nan_to_num(found["pages"]))
    out = dict(dq=args["q"].shape, dk=args["k"].shape, dv=args["v"].shape)
    out |= dict(dbeta=args["beta"].shape, ddecay=args["decay"].shape)
    return args | out | dict(dy=rng.standard_normal(args["v"].shape), **kept)
