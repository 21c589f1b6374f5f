"""Every op of every device against its formula in reference.py.

A device may err against float64 no more than the same formula in NumPy's float32 errs, and a little (`check`).
A row's result must be the same bit for bit alone, among others and in another order.
"""

import inspect
import sys

import numpy as np
import pytest
import torch
from engine import DEVICES, KV_PAGE, OPS, Draw, Frozen, Memory, Span, Unavailable, device, from_bf16, to_bf16

import reference

# What a device's error may exceed that of float32 NumPy by, relative to the norm of the result: some
# roundings of its own, by its `real`.
EPSILON = {4: 2.0**-22, 2: 2.0**-9}


@pytest.fixture(params=DEVICES)
def dev(request):
    try:
        return device(request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))


def error(got, exact) -> float:
    """‖got − exact‖ / ‖exact‖; infinities and NaN must be in the same places."""
    got, exact = np.asarray(got, float), np.asarray(exact, float)
    assert got.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    assert np.isfinite(got[finite]).all(), "not finite where the reference is"
    scale = np.linalg.norm(exact[finite]) or 1.0
    return float(np.linalg.norm(got[finite] - exact[finite]) / scale)


def check(dev, op, got, exact, same) -> None:
    """The one bar: got's error against float64 is at most that of the same formula in float32, plus EPSILON."""
    kinds = {p.name: p.type for p in OPS[op]}
    assert sorted(got) == sorted(exact), f"{op} gave {sorted(got)}, the reference {sorted(exact)}"
    for name, value in got.items():
        if not np.issubdtype(value.dtype, np.floating):
            np.testing.assert_array_equal(value, exact[name], err_msg=f"{op}: {name}")
            continue
        is_real = kinds[name] == "real"
        allowed = error(dev.round(same[name]) if is_real else same[name], exact[name])
        allowed += EPSILON[dev.c.real_bytes if is_real else 4]
        assert error(value, exact[name]) <= allowed, f"{op}: {name}"


# ---- arguments ----


def reference_args(dev, op, args, dtype) -> dict:
    """The arguments that a reference function takes, rounded as the device holds them."""
    out = {}
    for p in OPS[op]:
        value = args[p.name]
        if isinstance(value, tuple | str):
            continue
        if isinstance(value, Frozen):
            value = value.value
        if isinstance(value, np.ndarray) and p.type in ("real", "float", "frozen"):
            value = dev.round(value) if p.type == "real" else value.astype(np.float32)
            value = value.astype(dtype)
        out[p.name] = value
    return out


def page_size(value) -> int:
    """How many elements an array of pages has."""
    return int(np.prod(value.shape))


def put_pages(dev, k, v) -> tuple[Memory, Memory]:
    """Pages of a device filled by its kv_write; slots that are NaN in k stay NaN or are never written."""
    pages, _, G, E = k.shape
    empty = np.full(page_size(k), np.nan)
    k_pages, v_pages = dev.put(empty, "real"), dev.put(empty, "real")
    slot = np.flatnonzero(np.isfinite(k).all(axis=(2, 3)).ravel()).astype(np.int32)
    rows_k, rows_v = (x.reshape(pages * KV_PAGE, G, E)[slot] for x in (k, v))
    dev.call("kv_write", k_pages=k_pages, v_pages=v_pages, k=rows_k, v=rows_v, slot=slot, T=len(slot), G=G, E=E)
    return k_pages, v_pages


def run(dev, op, args) -> dict:
    """Calls an op; pages in the reference's order go through kv_write first."""
    if "k_pages" in args:
        k_pages, v_pages = put_pages(dev, args["k_pages"], args["v_pages"])
        args = args | {"k_pages": k_pages, "v_pages": v_pages}
    return dev.call(op, **args)


def compare(dev, op, args) -> dict:
    """Runs an op and holds it to the bar."""
    got = run(dev, op, args)
    formula = getattr(reference, op)
    exact = formula(**reference_args(dev, op, args, np.float64))
    same = formula(**reference_args(dev, op, args, np.float32))
    check(dev, op, got, exact, same)
    return got


def frozen(rng, rows, cols, dtype="f32") -> Frozen:
    value = rng.standard_normal((rows, cols)).astype(np.float32)
    if dtype == "bf16":
        value = from_bf16(to_bf16(value))
    elif dtype == "f16":
        value = value.astype(np.float16)
    return Frozen(value.astype(float), dtype)


def draw(V, **changes) -> Draw:
    rest = dict(seed=1, sample=0, pos=0, temperature=1.0, top_p=1.0, top_k=0, limit=V)
    return Draw(**(rest | changes))


# ---- one builder for each op: (rng, **size) → arguments; sizes has T = 0, T = 1, odd and larger ones ----

CASES = {}


def case(*sizes):
    def keep(build):
        CASES[build.__name__.removeprefix("make_")] = (build, sizes)
        return build

    return keep


TD = (dict(T=0, D=64), dict(T=1, D=1), dict(T=7, D=67), dict(T=3, D=2051), dict(T=41, D=1029))


@case(*(size | dict(dtype=dtype) for size in TD for dtype in ("f32", "bf16", "f16")))
def make_embed(rng, T, D, dtype):
    ids = rng.integers(0, 71, T).astype(np.int32)
    return dict(y=(T, D), ids=ids, w=frozen(rng, 71, D, dtype), T=T, V=71, D=D)


@case(*TD)
def make_gather(rng, T, D):
    return dict(y=(T, D), x=rng.standard_normal((11, D)), rows=rng.integers(0, 11, T).astype(np.int32), T=T, D=D)


@case(*TD)
def make_scatter(rng, T, D):
    rows = rng.permutation(53)[:T].astype(np.int32)
    return dict(y=rng.standard_normal((53, D)), x=rng.standard_normal((T, D)), rows=rows, T=T, D=D)


@case(*TD)
def make_add(rng, T, D):
    return dict(y=rng.standard_normal((T, D)), x=rng.standard_normal((T, D)), T=T, D=D)


TND = ((0, 64, 64), (1, 1, 1), (1, 97, 67), (2, 33, 801), (7, 130, 65), (19, 64, 400), (343, 37, 45))


@case(
    *(
        dict(T=T, N=N, D=D, dtype=dtype, bias=bias, accumulate=accumulate)
        for T, N, D in TND
        for dtype, bias, accumulate in (("f32", 0, 0), ("bf16", 1, 0), ("f32", 1, 1), ("f16", 0, 1), ("bf16", 0, 0))
    )
)
def make_linear(rng, T, N, D, dtype="f32", bias=0, accumulate=0):
    return dict(
        y=rng.standard_normal((T, N)) if accumulate else (T, N),
        x=rng.standard_normal((T, D)),
        w=frozen(rng, N, D, dtype),
        bias=rng.standard_normal(N) if bias else None,
        T=T,
        N=N,
        D=D,
        accumulate=accumulate,
    )


@case(
    *(
        dict(T=T, N=N, D=D, dtype=dtype, accumulate=accumulate)
        for T, N, D in TND
        for dtype, accumulate in (("f32", 0), ("bf16", 1), ("f16", 0), ("bf16", 0))
    )
)
def make_linear_backward(rng, T, N, D, dtype="f32", accumulate=0):
    dx = rng.standard_normal((T, D)) if accumulate else (T, D)
    dy, w = rng.standard_normal((T, N)), frozen(rng, N, D, dtype)
    return dict(dx=dx, dy=dy, w=w, T=T, N=N, D=D, accumulate=accumulate)


TNDR = tuple(dict(T=T, N=N, D=D, R=R) for (T, N, D), R in zip(TND, (4, 1, 3, 8, 5, 32, 2), strict=True))


@case(*TNDR)
def make_lora(rng, T, N, D, R):
    y, x = rng.standard_normal((T, N)), rng.standard_normal((T, D))
    a, b = rng.standard_normal((D, R)), rng.standard_normal((R, N))
    return dict(y=y, s=(T, R), x=x, a=a, b=b, T=T, N=N, D=D, R=R, scale=0.75)


@case(*(size | dict(dx=dx) for size in TNDR for dx in (True, False)))
def make_lora_backward(rng, T, N, D, R, dx=True):
    x, a, b = rng.standard_normal((T, D)), rng.standard_normal((D, R)), rng.standard_normal((R, N))
    return dict(
        dx=rng.standard_normal((T, D)) if dx else None,
        da=rng.standard_normal((D, R)),
        db=rng.standard_normal((R, N)),
        ds=(T, R),
        dy=rng.standard_normal((T, N)),
        x=x,
        s=x @ a,
        a=a,
        b=b,
        T=T,
        N=N,
        D=D,
        R=R,
        scale=0.75,
    )


@case(*TD)
def make_rmsnorm(rng, T, D):
    return dict(y=(T, D), rstd=(T,), x=rng.standard_normal((T, D)), w=rng.standard_normal(D), T=T, D=D, eps=1e-5)


@case(*(size | dict(D=max(size["D"], 3)) for size in TD))  # of D = 1 the gradient is rounding alone
def make_rmsnorm_backward(rng, T, D):
    dx, dy, x = rng.standard_normal((3, T, D))
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1) + 1e-5)
    return dict(dx=dx, dy=dy, x=x, w=rng.standard_normal(D), rstd=rstd, T=T, D=D)


@case(dict(T=0, E=8), dict(T=1, E=2), dict(T=7, E=34), dict(T=61, E=128))
def make_rope_table(rng, T, E):
    inv_freq = 10000.0 ** (-np.arange(E // 2) / (E / 2))
    pos = rng.integers(0, 130_000, T).astype(np.int32)
    return dict(cosine=(T, E // 2), sine=(T, E // 2), pos=pos, inv_freq=inv_freq, T=T, E=E, scale=1.125)


THE = (dict(T=0, H=2, E=8), dict(T=1, H=1, E=2), dict(T=7, H=3, E=34), dict(T=41, H=4, E=128))


@case(*THE)
def make_rope(rng, T, H, E):
    angle = rng.uniform(-3, 3, (T, E // 2))
    return dict(x=rng.standard_normal((T, H, E)), cosine=np.cos(angle), sine=np.sin(angle), T=T, H=H, E=E)


@case(*THE)
def make_rope_backward(rng, **size):
    args = make_rope(rng, **size)
    return {"dx": args.pop("x")} | args


TF = (dict(T=0, F=8), dict(T=1, F=1), dict(T=7, F=67), dict(T=11, F=1501))


@case(*TF)
def make_swiglu(rng, T, F):
    gate, up = rng.standard_normal((2, T, F)) * 8
    return dict(y=(T, F), gate=gate, up=up, T=T, F=F)


@case(*(size | dict(alias=alias) for size in TF for alias in (False, True)))
def make_swiglu_backward(rng, T, F, alias=False):
    dy, gate, up = rng.standard_normal((3, T, F)) * 3
    outputs = dict(dgate="gate", dup="up") if alias else dict(dgate=(T, F), dup=(T, F))
    return outputs | dict(dy=dy, gate=gate, up=up, T=T, F=F)


def make_pages(rng, seen, G, E):
    """Pages for sequences of the given numbers of keys, shuffled, with NaN where there is no key."""
    count = [(n + KV_PAGE - 1) // KV_PAGE for n in seen]
    pages = rng.permutation(sum(count) + 2)[: sum(count)].astype(np.int32)
    first = np.cumsum([0, *count])
    k, v = np.full((2, sum(count) + 2, KV_PAGE, G, E), np.nan)
    for s, n in enumerate(seen):
        own = pages[first[s] : first[s + 1]]
        for j in range(n):
            k[own[j // KV_PAGE], j % KV_PAGE], v[own[j // KV_PAGE], j % KV_PAGE] = rng.standard_normal((2, G, E))
    return k, v, pages, first


@case(
    dict(spans=(), H=2, G=1, E=8),
    dict(spans=((1, 0),), H=1, G=1, E=2),
    dict(spans=((1, 200), (1, 63), (1, 64)), H=6, G=2, E=34),
    dict(spans=((5, 0), (1, 70), (3, 62)), H=4, G=4, E=16),
    dict(spans=((133, 0), (37, 100)), H=4, G=2, E=32),
)
def make_attention(rng, spans, H, G, E):
    k, v, pages, first = make_pages(rng, [rows + pos for rows, pos in spans], G, E)
    row = np.cumsum([0, *(rows for rows, _ in spans)])
    T = int(row[-1])
    own = [Span(int(row[s]), rows, pos, int(first[s])) for s, (rows, pos) in enumerate(spans)]
    return dict(
        y=(T, H, E),
        lse=(T, H),
        q=rng.standard_normal((T, H, E)) * 2,
        k_pages=k,
        v_pages=v,
        spans=own,
        pages=pages,
        S=len(own),
        T=T,
        H=H,
        G=G,
        E=E,
    )


def causal(q, k, v, lengths, G):
    """y and lse of attention of packed sequences from position 0, by the reference's attend."""
    y, lse = np.zeros_like(q), np.zeros(q.shape[:2])
    row = 0
    for length in lengths:
        for i in range(length):
            for h in range(q.shape[1]):
                g, keys = h * G // q.shape[1], slice(row, row + i + 1)
                y[row + i, h], lse[row + i, h] = reference.attend(q[row + i, h], k[keys, g], v[keys, g])
        row += length
    return y, lse


@case(
    dict(lengths=(), H=2, G=1, E=8),
    dict(lengths=(1,), H=1, G=1, E=2),
    dict(lengths=(5, 1, 9), H=6, G=2, E=34),
    dict(lengths=(71, 33), H=4, G=4, E=16),
    dict(lengths=(130,), H=4, G=2, E=32),
)
def make_attention_backward(rng, lengths, H, G, E):
    T = sum(lengths)
    row = np.cumsum([0, *lengths])
    q, dy = rng.standard_normal((2, T, H, E)) * 1.5
    k, v = rng.standard_normal((2, T, G, E))
    y, lse = causal(q, k, v, lengths, G)
    spans = [Span(int(row[s]), length, 0, 0) for s, length in enumerate(lengths)]
    out = dict(dq=(T, H, E), dk=(T, G, E), dv=(T, G, E))
    return out | dict(dy=dy, y=y, lse=lse, q=q, k=k, v=v, spans=spans, S=len(spans), T=T, H=H, G=G, E=E)


@case(*(dict(T=T, V=V, D=D, dtype=dtype) for T, V, D in TND for dtype in ("f32", "bf16")))
def make_head(rng, T, V, D, dtype="f32"):
    return dict(logits=(T, V), x=rng.standard_normal((T, D)), w=frozen(rng, V, D, dtype), T=T, V=V, D=D)


@case(*(dict(T=s["T"], V=s["N"], D=s["D"], R=s["R"]) for s in TNDR))
def make_head_lora(rng, T, V, D, R):
    args = make_lora(rng, T, V, D, R)
    del args["N"]
    return {"logits": args.pop("y"), "V": V} | args


TV = (dict(T=0, V=8), dict(T=1, V=1), dict(T=7, V=67), dict(T=5, V=2050), dict(T=2, V=32_003))


@case(*TV)
def make_logprob(rng, T, V):
    targets = rng.integers(0, 4, T)  # some rows have none
    start = np.cumsum([0, *targets]).astype(np.int32)
    ids = rng.integers(0, min(V, 3), start[-1]).astype(np.int32)  # few enough to repeat
    logits = rng.standard_normal((T, V)) * 4
    logits[:, 5::7] = -np.inf
    return dict(lse=(T,), logp=(int(start[-1]),), logits=logits, ids=ids, start=start, T=T, V=V)


@case(*(size | dict(alias=alias) for size in TV for alias in (False, True)))
def make_logprob_backward(rng, T, V, alias=False):
    args = make_logprob(rng, T, V)
    del args["logp"]
    lse, dlogp = reference.logprob(**args)["lse"], rng.standard_normal(len(args["ids"]))
    return args | dict(dlogits="logits" if alias else (T, V), lse=lse, dlogp=dlogp)


@case(
    *(
        dict(T=size["T"], V=size["V"], K=K, levels=levels)
        for size in TV
        for K in (0, 1, 7, 32, 65, 2050)
        for levels in (0, 9)
        if K <= size["V"]
    )
)
def make_topk_logprob(rng, T, V, K, levels=0):
    logits = rng.standard_normal((T, V)).astype(np.float32) * 4
    if levels:  # few values: ties
        logits = np.round(logits * levels / 16) + 0.0
    lse = reference.logsumexp(logits) if T else np.zeros(0)
    return dict(ids=(T, K), logp=(T, K), logits=logits, lse=lse, T=T, V=V, K=K)


@case(*TV, dict(T=3, V=40_001))
def make_temper(rng, T, V):
    draws = [draw(V, temperature=(0.0, 1.0, 0.7)[t % 3]) for t in range(T)]
    return dict(logits=rng.standard_normal((T, V)), draws=draws, T=T, V=V)


KINDS = (
    dict(),
    dict(temperature=0.0),
    dict(top_k=1),
    dict(top_k=5),
    dict(top_p=0.0),
    dict(top_p=0.63),
    dict(top_k=20, top_p=0.9),
    dict(top_k=300),
    dict(top_k=300, top_p=0.777),
    dict(top_p=0.9999),
)


def draws_make(V, kinds, limits) -> list[Draw]:
    """Each kind of cut with each limit, every one with a number of its own."""
    return [
        draw(V, seed=(77 << 40) + 5, sample=i, pos=3 * j, limit=limit, **kind)
        for i, kind in enumerate(kinds)
        for j, limit in enumerate(limits)
    ]


@case(*(dict(V=V, levels=levels) for V in (1, 3, 67, 1001, 5003) for levels in (0, 9)), dict(V=0, levels=0))
def make_sample(rng, V, levels):
    draws = draws_make(V, KINDS, sorted({V, max(1, V - 3), V // 2 + 1})) if V else []
    T, V = len(draws), V or 9
    logits = rng.standard_normal((T, V)).astype(np.float32) * 2
    if levels:
        logits = np.round(logits * levels / 16) + 0.0
    lse = reference.logsumexp(logits.astype(float)).astype(np.float32) if T else np.zeros(0)
    return dict(ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)


N = (dict(n=0), dict(n=1), dict(n=67), dict(n=100_003))


@case(*N, dict(n=4_500_001))
def make_square_sum(rng, n):
    return dict(total=np.array([0.5]), g=rng.standard_normal(n), n=n)


@case(*N)
def make_accumulate(rng, n):
    return dict(y=rng.standard_normal(n), x=rng.standard_normal(n), n=n)


@case(*(size | dict(step=step) for size in N for step in (1, 1000)))
def make_adamw(rng, n, step):
    w, m, g = rng.standard_normal((3, n))
    scalars = dict(step=step, scale=0.5, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    return dict(w=w, m=m, v=rng.random(n), g=g, n=n) | scalars


# ---- all ops ----


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_reference_and_a_test(op):
    formula = getattr(reference, op, None)
    assert formula, f"{op} has no reference in reference.py"
    names = {p.name for p in OPS[op]}
    taken = {p.name for p in inspect.signature(formula).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert taken <= names, f"reference.{op} takes {taken - names}, which ops.inc does not have"
    assert op in CASES or f"test_{op}" in vars(sys.modules[__name__]), f"{op} has no case in test_ops.py"


@pytest.mark.parametrize("op", CASES)
def test_op_matches_its_formula(dev, op):
    build, sizes = CASES[op]
    for number, size in enumerate(sizes):
        compare(dev, op, build(np.random.default_rng(number), **size))


# ---- a row's result depends on that row alone ----


def take_rows(op, args, rows):
    """The arguments with those rows of T, in that order: everything whose first size is T."""
    T, out = args["T"], dict(args)
    for p in OPS[op]:
        value = args[p.name]
        if isinstance(value, tuple) and value[0] == T:
            out[p.name] = (len(rows), *value[1:])
        elif isinstance(value, np.ndarray) and len(value) == T:
            out[p.name] = value[rows]
        elif isinstance(value, list) and len(value) == T:
            out[p.name] = [value[t] for t in rows]
    return out | dict(T=len(rows))


def take_targets(op, args, rows):
    """take_rows for the ops whose rows have targets."""
    start = args["start"]
    own = np.concatenate([np.arange(start[t], start[t + 1]) for t in rows]).astype(int)
    new = np.cumsum([0, *(start[t + 1] - start[t] for t in rows)]).astype(np.int32)
    out = take_rows(op, {k: v for k, v in args.items() if k != "start"} | {"start": None}, rows)
    out |= dict(ids=args["ids"][own], start=new)
    if "dlogp" in args:
        return out | dict(dlogp=args["dlogp"][own])
    return out | dict(logp=(len(own),))


def take_queries(op, args, rows):
    """take_rows for attention: each row becomes a span of its own, at the same position of the same pages."""
    of_row = [Span(0, 1, s.pos + i, s.first) for s in args["spans"] for i in range(s.rows)]
    spans = [Span(i, 1, of_row[t].pos, of_row[t].first) for i, t in enumerate(rows)]
    out = take_rows(op, args | dict(spans=None, S=0), rows)
    return out | dict(spans=spans, S=len(spans)) | {k: args[k] for k in ("k_pages", "v_pages", "pages")}


ROW_OPS = {
    "embed": dict(T=7, D=67, dtype="bf16"),
    "gather": dict(T=7, D=67),
    "add": dict(T=7, D=67),
    "linear": dict(T=7, N=131, D=900, dtype="bf16", bias=1),
    "linear_backward": dict(T=7, N=900, D=131, dtype="bf16"),
    "lora": dict(T=7, N=131, D=901, R=5),
    "lora_backward": dict(T=7, N=131, D=65, R=5),
    "rmsnorm": dict(T=7, D=2051),
    "rmsnorm_backward": dict(T=7, D=2051),
    "rope_table": dict(T=7, E=34),
    "rope": dict(T=7, H=3, E=34),
    "rope_backward": dict(T=7, H=3, E=34),
    "swiglu": dict(T=7, F=67),
    "swiglu_backward": dict(T=7, F=67),
    "attention": dict(spans=((3, 100), (3, 0), (1, 65)), H=6, G=2, E=34),
    "head": dict(T=7, V=131, D=900, dtype="bf16"),
    "head_lora": dict(T=7, V=131, D=65, R=5),
    "logprob": dict(T=7, V=2051),
    "logprob_backward": dict(T=7, V=2051),
    "topk_logprob": dict(T=7, V=2051, K=33),
    "temper": dict(T=7, V=2051),
    "sample": dict(V=1001, levels=0),
}
TAKE = {"logprob": take_targets, "logprob_backward": take_targets, "attention": take_queries}
SUMS = {"da", "db"}  # belong to all rows


def rows_of(args, name, value, rows):
    """Those rows of an output; targets' log-probabilities go with their rows."""
    if name == "logp" and "start" in args:
        own = [np.arange(args["start"][t], args["start"][t + 1]) for t in rows]
        return value[np.concatenate(own).astype(int)]
    return value[rows]


@pytest.mark.parametrize("op", ROW_OPS)
def test_row_is_the_same_bit_for_bit_whatever_its_neighbours(dev, op):
    args = CASES[op][0](np.random.default_rng(0), **ROW_OPS[op])
    whole, T = run(dev, op, args), args["T"]
    some = list(range(T))
    batches = [[t] for t in some[:7]] + [some[::-1], some[1::2], some * 3, [some[-1]] * 17, some * 50]
    for rows in batches:
        part = run(dev, op, TAKE.get(op, take_rows)(op, args, rows))
        for name in part.keys() - SUMS:
            np.testing.assert_array_equal(part[name], rows_of(args, name, whole[name], rows), f"{op}: {name} {rows}")


def test_attention_backward_of_a_sequence_is_the_same_whatever_its_neighbours(dev):
    lengths = (5, 71, 1, 33)
    args = make_attention_backward(np.random.default_rng(0), lengths, H=6, G=2, E=34)
    whole, bounds = run(dev, "attention_backward", args), np.cumsum([0, *lengths])
    for order in ([0], [1], [2], [3], [3, 2, 1, 0], [1, 1, 3]):
        rows = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in order])
        begin = np.cumsum([0, *(lengths[s] for s in order)])
        spans = [Span(int(begin[i]), lengths[s], 0, 0) for i, s in enumerate(order)]
        some = take_rows("attention_backward", args | dict(spans=None), rows) | dict(spans=spans, S=len(spans))
        part = run(dev, "attention_backward", some)
        for name, value in part.items():
            np.testing.assert_array_equal(value, whole[name][rows], f"{name} {order}")


# ---- the reference's own gradients, by finite differences in float64 ----


def assert_slope(loss, inputs, gradients):
    """⟨gradient, d⟩ equals the change of loss along a random d, for every input that has a gradient."""
    rng = np.random.default_rng(5)
    for name, gradient in gradients.items():
        d, h = rng.standard_normal(inputs[name].shape), 1e-5
        ahead, behind = (loss(**inputs | {name: inputs[name] + side * h * d}) for side in (1, -1))
        np.testing.assert_allclose(np.sum(gradient * d), (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


def test_reference_rmsnorm_backward_is_the_gradient():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 11))
    w = rng.standard_normal(11)
    rstd = reference.rmsnorm(x=x, w=w, eps=1e-5)["rstd"]
    dx = reference.rmsnorm_backward(dx=np.zeros_like(x), dy=dy, x=x, w=w, rstd=rstd)["dx"]
    assert_slope(lambda x: np.sum(dy * reference.rmsnorm(x=x, w=w, eps=1e-5)["y"]), dict(x=x), dict(x=dx))


def test_reference_rope_backward_is_the_gradient():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 2, 8))
    table = dict(zip(("cosine", "sine"), rng.standard_normal((2, 3, 4)), strict=True))
    dx = reference.rope_backward(dx=dy, **table)["dx"]
    assert_slope(lambda x: np.sum(dy * reference.rope(x=x, **table)["x"]), dict(x=x), dict(x=dx))


def test_reference_swiglu_backward_is_the_gradient():
    gate, up, dy = np.random.default_rng(0).standard_normal((3, 3, 9))
    out = reference.swiglu_backward(dy=dy, gate=gate, up=up)
    gradients = dict(gate=out["dgate"], up=out["dup"])
    assert_slope(lambda gate, up: np.sum(dy * reference.swiglu(gate=gate, up=up)["y"]), dict(gate=gate, up=up), gradients)


def test_reference_linear_and_lora_backward_are_the_gradients():
    args = make_lora_backward(np.random.default_rng(0), T=4, N=5, D=6, R=3)
    w, zero = np.random.default_rng(1).standard_normal((5, 6)), np.zeros((4, 5))
    args |= {name: np.zeros_like(args[name]) for name in ("dx", "da", "db")}

    def loss(x, a, b):
        y = reference.linear(x=x, w=w, bias=None, accumulate=0)["y"]
        return np.sum(args["dy"] * reference.lora(y=y + zero, x=x, a=a, b=b, scale=args["scale"])["y"])

    out = reference.lora_backward(**args)
    dx = reference.linear_backward(dx=out["dx"], dy=args["dy"], w=w, accumulate=1)["dx"]
    assert_slope(loss, {k: args[k] for k in "xab"}, dict(x=dx, a=out["da"], b=out["db"]))


def test_reference_attention_backward_is_the_gradient():
    lengths = (5, 3)
    args = make_attention_backward(np.random.default_rng(0), lengths, H=4, G=2, E=6)

    def loss(q, k, v):
        return np.sum(args["dy"] * causal(q, k, v, lengths, 2)[0])

    out = reference.attention_backward(**args)
    assert_slope(loss, {k: args[k] for k in "qkv"}, dict(q=out["dq"], k=out["dk"], v=out["dv"]))


def test_reference_attention_over_pages_is_attention_over_rows():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 70, 2, 6))
    pages = np.full((2, 2, KV_PAGE, 2, 6), np.nan)
    where = np.arange(70) + np.where(np.arange(70) < KV_PAGE, KV_PAGE, -KV_PAGE)  # page 1, then page 0
    written = reference.kv_write(k_pages=pages[0], v_pages=pages[1], k=k, v=v, slot=where)
    got = reference.attention(q=q, spans=[Span(0, 70, 0, 0)], pages=np.array([1, 0]), H=2, G=2, **written)
    y, lse = causal(q, k, v, (70,), 2)
    np.testing.assert_allclose(got["y"], y, rtol=1e-12)
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-12)


def test_reference_logprob_backward_is_the_gradient():
    rng = np.random.default_rng(0)
    logits, ids, start = rng.standard_normal((3, 7)), np.array([1, 1, 6, 2]), np.array([0, 3, 3, 4])
    dlogp, lse = rng.standard_normal(4), reference.logsumexp(logits)
    dlogits = reference.logprob_backward(logits=logits, lse=lse, dlogp=dlogp, ids=ids, start=start)["dlogits"]

    def loss(logits):
        return np.sum(dlogp * reference.logprob(logits=logits, ids=ids, start=start)["logp"])

    assert_slope(loss, dict(logits=logits), dict(logits=dlogits))


# ---- the cache ----


def cpu_pages(dev, k_pages, v_pages, like):
    """The CPU's pages in the reference's order."""
    if not dev.name.startswith("cpu"):
        pytest.skip("only the CPU's order of pages is known here; attention's tests cover the others")
    pages, _, G, E = like.shape
    size = page_size(like) * dev.c.real_bytes
    k = dev.decode(k_pages.read(size), "real", (pages, G, E, KV_PAGE)).transpose(0, 3, 1, 2)
    v = dev.decode(v_pages.read(size), "real", (pages, G, KV_PAGE, E)).transpose(0, 2, 1, 3)
    return {"k_pages": k, "v_pages": v}


@pytest.mark.parametrize(("T", "G", "E"), [(0, 1, 8), (1, 1, 1), (7, 3, 34), (150, 2, 16)])
def test_kv_write(dev, T, G, E):
    rng = np.random.default_rng(0)
    k, v = (dev.round(x) for x in rng.standard_normal((2, T, G, E)))
    before = dev.round(rng.standard_normal((4, KV_PAGE, G, E)))
    slot = rng.permutation(4 * KV_PAGE)[:T].astype(np.int32)
    k_pages, v_pages = put_pages(dev, before, before)
    dev.call("kv_write", k_pages=k_pages, v_pages=v_pages, k=k, v=v, slot=slot, T=T, G=G, E=E)
    k_pages.assert_guarded("k_pages")
    v_pages.assert_guarded("v_pages")
    exact = reference.kv_write(k_pages=before, v_pages=before, k=k, v=v, slot=slot)
    for name, value in cpu_pages(dev, k_pages, v_pages, before).items():
        np.testing.assert_array_equal(value, exact[name], name)


@pytest.mark.parametrize("count", [0, 1, 33, KV_PAGE])
def test_kv_copy(dev, count):
    k, v = (dev.round(x) for x in np.random.default_rng(0).standard_normal((2, 4, KV_PAGE, 3, 17)))
    k_pages, v_pages = put_pages(dev, k, v)
    sizes = {"from": 2, "to": 0, "count": count, "G": 3, "E": 17}
    dev.call("kv_copy", k_pages=k_pages, v_pages=v_pages, **sizes)
    exact = reference.kv_copy(k_pages=k, v_pages=v, **sizes)
    for name, value in cpu_pages(dev, k_pages, v_pages, k).items():
        np.testing.assert_array_equal(value, exact[name], name)


def test_attention_reads_a_copied_page(dev):
    args = make_attention(np.random.default_rng(0), spans=((2, 30),), H=4, G=2, E=16)
    k_pages, v_pages = put_pages(dev, args["k_pages"], args["v_pages"])
    whole = dev.call("attention", **args | dict(k_pages=k_pages, v_pages=v_pages))
    source = int(args["pages"][0])
    target = (source + 1) % len(args["k_pages"])
    dev.call("kv_copy", k_pages=k_pages, v_pages=v_pages, **{"from": source, "to": target, "count": 32}, G=2, E=16)
    moved = dict(k_pages=k_pages, v_pages=v_pages, pages=np.array([target], np.int32))
    np.testing.assert_array_equal(dev.call("attention", **args | moved)["y"], whole["y"])


# ---- logprob ----


def test_lse_of_a_large_vocabulary_is_exact_to_rounding(dev):
    logits = (np.random.default_rng(0).standard_normal((3, 151_936)) * 3).astype(np.float32)
    logits[1] = np.sort(logits[1])  # every block has a new largest
    logits[2, 100_000] = 90.0
    args = dict(logits=logits, ids=np.zeros(0, np.int32), start=np.zeros(4, np.int32), T=3, V=151_936)
    got = dev.call("logprob", lse=(3,), logp=(0,), **args)["lse"]
    np.testing.assert_allclose(got, reference.logsumexp(logits.astype(float)), rtol=1.2e-7)


def test_logprob_of_infinite_and_nan_logits_is_torchs(dev):
    inf, nan, V = np.inf, np.nan, 2500
    logits = np.zeros((8, V), np.float32)
    logits[0] = -inf
    logits[1], logits[1, 2000] = -inf, -1000.0
    logits[2, 7] = inf
    logits[3, 2100] = nan
    logits[4] = nan
    logits[5], logits[5, 3], logits[5, 2400] = -inf, -2000.0, 300.0
    logits[6, [1, 1500]] = -inf, inf
    logits[7], logits[7, 9] = -inf, nan
    start = np.arange(9, dtype=np.int32)
    ids = np.array([0, 2000, 7, 0, 0, 2400, 0, 0], np.int32)
    got = dev.call("logprob", lse=(8,), logp=(8,), logits=logits, ids=ids, start=start, T=8, V=V)
    lse = torch.logsumexp(torch.from_numpy(logits).double(), -1).numpy()
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-6)
    np.testing.assert_array_equal(got["logp"][[0, 1, 2, 5, 6]], [nan, 0.0, nan, 0.0, -inf])


def test_logprob_backward_of_a_row_without_weight_is_zero_whatever_its_logits(dev):
    logits, lse = np.full((3, 37), np.nan), np.full(3, np.nan)
    start = np.array([0, 0, 2, 3], np.int32)
    args = dict(logits=logits, lse=lse, dlogp=np.array([1.0, -1.0, 0.0]), ids=np.array([4, 4, 9], np.int32), start=start)
    got = dev.call("logprob_backward", dlogits=(3, 37), **args, T=3, V=37)["dlogits"]
    np.testing.assert_array_equal(got, np.zeros((3, 37)))


def test_topk_puts_nan_last_and_the_lower_id_first(dev):
    nan, inf = np.nan, np.inf
    logits = np.array([[nan, 1, 2, 2, nan, -inf, 0.0, -0.0, 2, inf]], np.float32)
    got = dev.call("topk_logprob", ids=(1, 10), logp=(1, 10), logits=logits, lse=np.zeros(1), T=1, V=10, K=10)
    np.testing.assert_array_equal(got["ids"], [[9, 2, 3, 8, 1, 6, 7, 5, 0, 4]])
    np.testing.assert_array_equal(got["logp"], logits[:, got["ids"][0]])
    many = np.full((1, 1000), nan, np.float32)
    many[0, [700, 300]] = 1, 1
    got = dev.call("topk_logprob", ids=(1, 3), logp=(1, 3), logits=many, lse=np.zeros(1), T=1, V=1000, K=3)
    np.testing.assert_array_equal(got["ids"], [[300, 700, 0]])


def test_topk_equals_torchs_on_a_large_vocabulary(dev):
    logits = np.random.default_rng(0).standard_normal((2, 151_936)).astype(np.float32)
    logits[1].sort()  # every logit gets into the heap
    lse = np.zeros(2)
    got = dev.call("topk_logprob", ids=(2, 32), logp=(2, 32), logits=logits, lse=lse, T=2, V=151_936, K=32)
    np.testing.assert_array_equal(got["logp"], torch.topk(torch.from_numpy(logits), 32).values.numpy())
    np.testing.assert_array_equal(np.take_along_axis(logits, got["ids"], 1), got["logp"])


# ---- sample ----


def test_philox_is_random123s():
    assert reference.philox((0,) * 4, (0,) * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert reference.philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert reference.philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def sample_many(dev, row, T, **changes):
    """T draws from one row of logits."""
    V = len(row)
    logits = np.repeat(row[None].astype(np.float32), T, axis=0)
    lse = np.repeat(reference.logsumexp(logits[:1].astype(float)), T)
    draws = [draw(V, sample=t % 256, pos=t // 256, **changes) for t in range(T)]
    return dev.call("sample", ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)


@pytest.mark.parametrize("cut", [dict(), dict(top_k=11), dict(top_p=0.8), dict(limit=20)])
def test_sample_draws_each_id_as_often_as_it_is_likely(dev, cut):
    row, T = (np.random.default_rng(3).standard_normal(37) * 1.2).astype(np.float32).astype(float), 20_000
    got = sample_many(dev, row, T, **cut)
    own = reference.kept(row, draw(37, **cut))
    p = np.exp(row[own]) / np.exp(row[own]).sum()
    count = np.bincount(got["ids"], minlength=37)
    assert count.sum() == count[own].sum() == T
    chi_square = np.sum((count[own] - T * p) ** 2 / (T * p))
    degrees = len(own) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 8, chi_square


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (700, 1.0), (0, 0.9), (0, 0.999), (400, 0.8), (2, 0.01)])
def test_sample_keeps_exactly_what_top_k_and_top_p_say(dev, top_k, top_p):
    rng = np.random.default_rng(1)
    for row in (rng.standard_normal(1500), np.round(rng.standard_normal(1500) * 2), np.zeros(1500)):
        row = (row + 0.0).astype(np.float32).astype(float)
        own = reference.kept(row, draw(1500, top_k=top_k, top_p=top_p))
        got = sample_many(dev, row, 300, top_k=top_k, top_p=top_p)
        assert np.isin(got["ids"], own).all()
        # the mass of the kept is in every logp, so a set that is wrong by one id shows
        np.testing.assert_allclose(got["logp"], row[got["ids"]] - reference.logsumexp(row[own][None]), atol=3e-6)


def test_sample_of_a_large_vocabulary(dev):
    rng, V = np.random.default_rng(2), 600_001  # more than 512 parts of 1024 ids
    row = rng.standard_normal(V).astype(np.float32).astype(float)
    kinds = [dict(), dict(top_k=50), dict(top_k=9000), dict(top_p=0.4), dict(temperature=0.0)]
    draws, T = draws_make(V, kinds, [V]), len(kinds)
    logits = np.repeat(row[None].astype(np.float32), T, axis=0)
    lse = reference.logsumexp(logits.astype(float)).astype(np.float32)
    compare(dev, "sample", dict(ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V))


def test_sample_greedy_takes_the_lowest_of_equals_and_never_nan(dev):
    rows = np.zeros((4, 100), np.float32)
    rows[0, [40, 60]] = 3
    rows[1] = np.nan
    rows[2, 99], rows[2, 7], rows[2, 8] = np.inf, np.nan, -0.0
    rows[3] = -np.inf
    draws = [draw(99, temperature=0.0, top_k=2) for _ in rows]
    got = dev.call("sample", ids=(4,), logp=(4,), logits=rows, lse=np.full(4, 5.0), draws=draws, T=4, V=100)
    np.testing.assert_array_equal(got["ids"], [40, 0, 0, 0])
    np.testing.assert_array_equal(got["logp"], [-2.0, np.nan, -5.0, -np.inf])


def test_sample_without_cuts_gives_the_trainers_logp_bit_for_bit(dev):
    logits, T, V = np.random.default_rng(0).standard_normal((9, 301)).astype(np.float32), 9, 301
    draws = [draw(V, sample=t, limit=V - t, top_k=V if t % 2 else -1) for t in range(T)]
    none, start = np.zeros(0, np.int32), np.zeros(T + 1, np.int32)
    lse = dev.call("logprob", lse=(T,), logp=(0,), logits=logits, ids=none, start=start, T=T, V=V)["lse"]
    drawn = dev.call("sample", ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)
    start = np.arange(T + 1, dtype=np.int32)
    train = dev.call("logprob", lse=(T,), logp=(T,), logits=logits, ids=drawn["ids"], start=start, T=T, V=V)
    np.testing.assert_array_equal(drawn["logp"], train["logp"])


def test_sample_of_a_row_without_mass_gives_its_largest(dev):
    rows = np.full((3, 50), -np.inf, np.float32)
    rows[1, 9] = np.inf
    rows[2, [4, 5]] = np.nan, 1.0
    for changes in (dict(), dict(top_k=5), dict(top_p=0.5), dict(top_k=5, top_p=0.5)):
        draws = [draw(50, **changes) for _ in rows]
        lse = np.array([-np.inf, np.inf, np.nan])
        got = dev.call("sample", ids=(3,), logp=(3,), logits=rows, lse=lse, draws=draws, T=3, V=50)
        np.testing.assert_array_equal(got["ids"], [0, 9, 5])


def test_sample_depends_on_seed_sample_and_pos_only(dev):
    row = np.zeros(1000)
    seen = {}
    for changes in (dict(seed=1), dict(seed=1 << 40), dict(seed=2), dict(seed=1)):
        ids = sample_many(dev, row, 600, **changes)["ids"]
        assert seen.setdefault(changes["seed"], ids.tolist()) == ids.tolist()
        assert len(set(ids)) > 350  # 600 draws from 1000: 451 expected
    assert len({tuple(ids) for ids in seen.values()}) == 3


# ---- the optimizer ----


def test_adamw_follows_torchs_over_ten_steps(dev):
    rng, n = np.random.default_rng(0), 1003
    w = rng.standard_normal(n).astype(np.float32)
    scalars = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    ours = dict(w=w, m=np.zeros(n, np.float32), v=np.zeros(n, np.float32))
    peers = []
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.from_numpy(w.copy()).to(dtype))
        rest = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
        peers.append((weight, torch.optim.AdamW([weight], lr=3e-3, **rest)))
    for step in range(1, 11):
        g = rng.standard_normal(n).astype(np.float32)
        ours = dev.call("adamw", **ours, g=g, n=n, step=step, scale=0.25, **scalars)
        for weight, optimizer in peers:
            weight.grad = torch.from_numpy(g * np.float32(0.25)).to(weight.dtype)
            optimizer.step()
    same, exact = ({"w": weight.detach().numpy()} for weight, _ in peers)
    for state, name in (("exp_avg", "m"), ("exp_avg_sq", "v")):
        for values, (weight, optimizer) in zip((same, exact), peers, strict=True):
            values[name] = optimizer.state[weight][state].numpy()
    check(dev, "adamw", ours, exact, same)


def test_square_sum_is_the_same_whatever_the_threads(dev):
    args = make_square_sum(np.random.default_rng(0), n=1_000_003)
    sums = {float(device(dev.name, threads).call("square_sum", **args)["total"][0]) for threads in (1, 2, 3)}
    assert len(sums) == 1


def test_square_sum_neither_overflows_nor_vanishes(dev):
    g = np.array([1e30, 1e-30] * 9, np.float32)
    for part in (g[::2], g[1::2]):
        total = dev.call("square_sum", total=np.zeros(1), g=part, n=9)["total"]
        np.testing.assert_allclose(total, np.sum(part.astype(float) ** 2), rtol=1e-12)
