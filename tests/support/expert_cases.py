"""Arguments for the ops of mixtures of experts, in the style of op_cases.py.

`LOADS` says how many pairs each expert has: none, one, a few, more than a tile, all of them.
"""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np

from support import op_reference
from support.delta_cases import CASES as CASES  # with those below
from support.op_cases import case, frozen, onto
from support.op_devices import Frozen

ROUTES = tuple(
    dict(T=T, X=X, K=K, norm=norm)
    for norm in (0, 1)
    for T, X, K in (
        *((0, 4, 2), (1, 1, 1), (3, 8, 3), (17, 128, 8), (5, 67, 32)),
        *((9, 200, 8), (2, 511, 4), (3, 1000, 6)),
    )
)


def logits_of(rng, T, X):
    """Some of them equal: of these the lower one comes first."""
    return np.round(rng.standard_normal((T, X)) * 4) / 4


@case(*ROUTES)
def make_route(rng, T, X, K, norm):
    sizes = dict(T=T, X=X, K=K, norm=norm)
    return dict(chosen=(T, K), share=(T, K), logits=logits_of(rng, T, X)) | sizes


@case(*ROUTES)
def make_route_backward(rng, T, X, K, norm):
    args = make_route(rng, T, X, K, norm)
    out = op_reference.route(args["logits"], K, norm)
    args |= dict(chosen=out["chosen"].astype(np.int32), share=out["share"])
    return args | dict(dlogits=(T, X), dshare=rng.standard_normal((T, K)))


def chosen_of(rng, T, X, K):
    """Different experts of each row; the first ones are chosen often, the last one never."""
    weight = 1.0 / np.arange(1, X + 1)
    weight[-1] = 0.0 if X > K else weight[-1]
    rows = [rng.choice(X, K, replace=False, p=weight / weight.sum()) for _ in range(T)]
    return np.array(rows, np.int32).reshape(T, K)


GROUPS = (
    *(dict(T=0, K=2, X=4), dict(T=1, K=1, X=1), dict(T=7, K=3, X=8)),
    *(dict(T=300, K=8, X=128), dict(T=301, K=5, X=1024)),
)


@case(*GROUPS)
def make_group(rng, T, K, X):
    P = T * K
    out = dict(pair=(P,), row=(P,), place=(P,), bounds=(X, 2))
    return out | dict(chosen=chosen_of(rng, T, X, K), T=T, K=K, X=X)


@case(*(s | dict(first=f, count=c) for s in GROUPS for f, c in ((0, s["T"]), (2, 3), (5, 0))))
def make_group_part(rng, T, K, X, first, count):
    out = op_reference.group(chosen_of(rng, T, X, K), K, X)
    bounds, row = (out[name].astype(np.int32) for name in ("bounds", "row"))
    return dict(part=(X, 2), bounds=bounds, row=row, X=X, first=first, count=count)


@case(
    *(
        dict(T=T, K=K, D=D, plus=plus)
        for plus in ("", "rows", "y")
        for T, K, D in ((0, 2, 8), (1, 1, 1), (7, 3, 67), (9, 8, 515))
    )
)
def make_unite(rng, T, K, D, plus):
    place = rng.permutation(T * K).astype(np.int32).reshape(T, K)
    y, x = onto("y", rng, (T, D), plus), rng.standard_normal((T * K, D))
    return y | dict(x=x, place=place, T=T, K=K, D=D)


LOADS = (
    *((0, 0), (1,), (0, 3, 0, 1), (5, 70, 0, 17, 2), (0, 0, 41), (1,) * 9),
    *((5, 150, 0, 17), (0, 35, 0, 0, 0, 2)),
)
SIZES = (
    *((64, 64), (1, 1), (97, 67), (33, 801), (130, 65), (64, 400)),
    *((136, 200), (328, 136)),
)


def bounds_of(load):
    last = np.cumsum(load)
    return np.stack([np.concatenate([[0], last[:-1]]), last], -1).astype(np.int32)


def experts(rng, count, N, D, dtype):
    each = [frozen(rng, N, D, dtype) for _ in range(count)]
    blocks = None if each[0].blocks is None else np.stack([one.blocks for one in each])
    return Frozen(np.stack([one.value for one in each]), dtype, blocks)


PRODUCTS = tuple(
    dict(load=load, N=N, D=D, dtype=dtype)
    for dtype in ("f32", "bf16", "f16")
    for load, (N, D) in zip(LOADS, SIZES, strict=True)
)


@case(*(size | dict(count=count) for size in PRODUCTS for count in (1, 2)))
def make_grouped_linear(rng, load, N, D, dtype="f32", count=1):
    P, X = sum(load), len(load)
    w, x = experts(rng, count * X, N, D, dtype), rng.standard_normal((P, D))
    bias = rng.standard_normal((count * X, N)) if dtype == "bf16" else None
    return dict(y=(count, P, N), x=x, w=w, step=0, bias=bias, bounds=bounds_of(load)) | dict(
        X=X, P=P, N=N, D=D, count=count
    )


@case(*(size | dict(accumulate=accumulate) for size in PRODUCTS for accumulate in (0, 1)))
def make_grouped_linear_backward(rng, load, N, D, dtype="f32", accumulate=0):
    P, X = sum(load), len(load)
    dx = rng.standard_normal((P, D)) if accumulate else (P, D)
    dy, w = rng.standard_normal((P, N)), experts(rng, X, N, D, dtype)
    sizes = dict(X=X, P=P, N=N, D=D, accumulate=accumulate)
    return dict(dx=dx, dy=dy, w=w, step=0, bounds=bounds_of(load)) | sizes


# A step of 0 has one matrix for all, which `whole` has without experts too.
MATMULS = tuple(
    dict(load=load, N=N, D=D, turned=turned, accumulate=accumulate, whole=whole)
    for turned, accumulate, whole in ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1))
    for load, (N, D) in zip(LOADS, SIZES, strict=True)
)


@case(*MATMULS)
def make_grouped_matmul(rng, load, N, D, turned=0, accumulate=0, whole=0):
    P, X = sum(load), 1 if whole else len(load)
    w = rng.standard_normal((X, N, D) if turned else (X, D, N))
    y, x = rng.standard_normal((P, N)), rng.standard_normal((P, D))
    sizes = dict(X=X, P=P, N=N, D=D, scale=0.5, accumulate=accumulate, turned=turned)
    bounds = None if whole else bounds_of(load)
    return dict(y=y, x=x, w=w, step=N * D, bounds=bounds) | sizes


@case(
    *(
        dict(load=load, N=N, D=D, whole=whole)
        for whole in (0, 1)
        for load, (N, D) in zip(LOADS, SIZES, strict=True)
    )
)
def make_grouped_gradient(rng, load, N, D, whole=0):
    P, X = sum(load), 1 if whole else len(load)
    x, dy = rng.standard_normal((P, D)), rng.standard_normal((P, N))
    dw, bounds = rng.standard_normal((X, D, N)), None if whole else bounds_of(load)
    return dict(dw=dw, step=N * D, x=x, dy=dy, bounds=bounds, X=X, P=P, N=N, D=D, scale=0.5)


PF = (
    *(dict(P=P, F=F) for P, F in ((0, 8), (1, 1), (6, 67), (14, 1501))),
    *(dict(P=P, F=F, gap=gap) for P, F, gap in ((6, 67, 3), (14, 72, 72))),
)


def share_of(rng, P, paired):
    """Shares, one of them 0, and where each row's is."""
    share = rng.random((P // 2, 2) if paired else P)
    share.ravel()[:1] = 0.0
    pair = rng.permutation(P).astype(np.int32) if paired else None
    return dict(share=share, pair=pair)


SHARED = tuple(
    size | dict(paired=paired, limit=limit)
    for size in PF
    for paired in (0, 1)
    for limit in (0.0, 7.0)
    if not (paired and size["P"] % 2)
)


@case(*SHARED)
def make_swiglu_share(rng, P, F, paired, limit, gap=0):
    gate, up = rng.standard_normal((2, P, F)) * 8
    sizes = dict(P=P, F=F, step=F + gap, limit=limit)
    return dict(y=(P, F), gate=gate, up=up) | sizes | share_of(rng, P, paired)


@case(*(size | dict(alias=alias) for size in SHARED for alias in (False, True)))
def make_swiglu_share_backward(rng, P, F, paired, limit, alias=False, gap=0):
    dy, gate, up = rng.standard_normal((3, P, F)) * 5
    own = share_of(rng, P, paired)
    outputs = dict(dgate="gate", dup="up") if alias else dict(dgate=(P, F), dup=(P, F))
    outputs |= dict(dshare=own["share"].shape)
    sizes = dict(P=P, F=F, step=F + gap, limit=limit)
    return outputs | dict(dy=dy, gate=gate, up=up) | sizes | own


BIASES = tuple(dict(T=T, K=K, X=8, D=D) for T, K, D in ((0, 2, 8), (1, 1, 1), (7, 3, 515)))


@case(*BIASES)
def make_share_bias(rng, T, K, X, D):
    args = dict(chosen=chosen_of(rng, T, X, K), bias=rng.standard_normal((X, D)), T=T, K=K, D=D)
    return args | dict(y=rng.standard_normal((T, D)), share=rng.random((T, K)))


@case(*BIASES)
def make_share_bias_backward(rng, T, K, X, D):
    args = dict(chosen=chosen_of(rng, T, X, K), bias=rng.standard_normal((X, D)), T=T, K=K, D=D)
    return args | dict(dy=rng.standard_normal((T, D)), dshare=rng.standard_normal((T, K)))


@case(dict(T=0, H=2, E=8), dict(T=1, H=1, E=1), dict(T=7, H=6, E=34))
def make_sink(rng, T, H, E):
    y, lse = rng.standard_normal((T, H, E)), rng.standard_normal((T, H)) * 30
    return dict(y=y, lse=lse, sinks=rng.standard_normal(H) * 10, T=T, H=H, E=E)


@case(dict(n=0), dict(n=1), dict(n=67))
def make_sigmoid(rng, n):
    return dict(y=(n,), x=rng.standard_normal(n) * 8, n=n)


@case(dict(n=0), dict(n=1), dict(n=67))
def make_sigmoid_backward(rng, n):
    return dict(dx=(n,), dy=rng.standard_normal(n), y=rng.random(n), n=n)
