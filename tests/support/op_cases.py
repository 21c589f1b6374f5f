"""Arguments for every op of csrc/device/ops.inc.

Each `make_<op>` makes the arguments of engine.Device.call for one size; its sizes stand above it,
with T = 0, T = 1, odd and larger ones. test_ops.py walks CASES; a row of ops.inc that is missing
fails there.
"""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np

from support import op_reference, packed_weights
from support.case_seed import remembered
from support.op_devices import (
    KV_PAGE,
    PACKED,
    Draw,
    Frozen,
    Jsd,
    Patches,
    Span,
    from_bf16,
    to_bf16,
)


def frozen(rng, rows, cols, dtype="f32") -> Frozen:
    if dtype in PACKED:
        return packed_weights.make(rng, rows, cols, dtype)
    value = rng.standard_normal((rows, cols)).astype(np.float32)
    if dtype == "bf16":
        value = from_bf16(to_bf16(value))
    elif dtype == "f16":
        value = value.astype(np.float16)
    return Frozen(value.astype(float), dtype)


def draw(**changes) -> Draw:
    rest = dict(seed=1, sample=0, pos=0, temperature=1.0, top_p=1.0, top_k=0)
    return Draw(**(rest | changes))


# ---- one builder for each op: (rng, **size) → arguments ----

CASES = {}


def case(*sizes):
    def keep(build):
        op = build.__name__.removeprefix("make_")
        build = remembered(op, build)
        CASES[op] = (build, sizes)
        return build

    return keep


TD = tuple(
    dict(T=T, D=D)
    for T, D in ((0, 64), (1, 1), (7, 67), (9, 128), (3, 2051), (2, 1032), (41, 1029))
)


@case(*(size | dict(dtype=dtype) for size in TD for dtype in ("f32", "bf16", "f16")))
def make_embed(rng, T, D, dtype):
    ids = rng.integers(0, 71, T).astype(np.int32)
    return dict(y=(T, D), ids=ids, w=frozen(rng, 71, D, dtype), T=T, V=71, D=D)


@case(*TD)
def make_gather(rng, T, D):
    return dict(
        y=(T, D),
        x=rng.standard_normal((11, D)),
        rows=rng.integers(0, 11, T).astype(np.int32),
        T=T,
        D=D,
    )


@case(*TD)
def make_scatter(rng, T, D):
    rows = rng.permutation(53)[:T].astype(np.int32)
    return dict(y=rng.standard_normal((53, D)), x=rng.standard_normal((T, D)), rows=rows, T=T, D=D)


@case(*(size | dict(K=K) for size in TD for K in (1, 4)))
def make_blend(rng, T, D, K):
    ids, weights = rng.integers(0, 31, (T, K)).astype(np.int32), rng.standard_normal((T, K))
    y, table = rng.standard_normal((T, D)), rng.standard_normal((31, D))
    return dict(y=y, table=table, ids=ids, weights=weights, T=T, K=K, D=D)


# Blocks of several shapes and one of one patch; a patch for more than one job; odd sizes; the sizes
# of Qwen's towers last.
@case(
    dict(rows=0, cols=4, side=16, merge=2, frames=2),
    dict(rows=1, cols=1, side=1, merge=1, frames=1),
    dict(rows=3, cols=6, side=5, merge=3, frames=1),
    dict(rows=4, cols=2, side=7, merge=1, frames=3),
    dict(rows=2, cols=2, side=64, merge=2, frames=1),
    dict(rows=6, cols=10, side=16, merge=2, frames=2),
)
def make_patches(rng, rows, cols, side, merge, frames):
    mean, std = rng.uniform(0.3, 0.6, 3).astype(np.float32), rng.uniform(0.2, 0.6, 3)
    three = type(Patches().mean)
    how = Patches(rows, cols, side, merge, frames, 1 / 255, three(*mean), three(*std))
    pixels = rng.integers(0, 256, (rows * side, cols * side, 3)).astype(np.uint8)
    return dict(y=(rows * cols, 3 * frames * side * side), pixels=pixels, how=how)


def onto(name, rng, shape, plus):
    """A result, and what is added to it: rows of their own, or those in the result's memory."""
    rows = rng.standard_normal(shape) if plus else None
    return {name: "plus" if plus == name else shape, "plus": rows}


TND = (
    (0, 64, 64),
    (1, 1, 1),
    (1, 97, 67),
    (2, 33, 801),
    (7, 130, 65),
    (19, 64, 400),
    (343, 37, 45),
)


@case(
    *(
        dict(T=T, N=N, D=D, dtype=dtype, bias=bias, plus=plus, gap=gap)
        for T, N, D in TND
        for dtype, bias, plus, gap in (
            ("f32", 0, "", 0),
            ("bf16", 1, "y", 0),
            ("f32", 1, "rows", 3),
            ("f16", 0, "y", 8),
            ("bf16", 0, "rows", 0),
            ("bf16", 0, "", 40),
        )
    )
)
def make_linear(rng, T, N, D, dtype="f32", bias=0, plus="", gap=0):
    return dict(
        **onto("y", rng, (T, N), plus),
        x=rng.standard_normal((T, D)),
        w=frozen(rng, N, D, dtype),
        bias=rng.standard_normal(N) if bias else None,
        T=T,
        N=N,
        D=D,
        step=N + gap,
    )


@case(
    *(
        dict(T=T, N=N, D=D, dtype=dtype, accumulate=accumulate, gap=gap)
        for T, N, D in TND
        for dtype, accumulate, gap in (
            ("f32", 0, 0),
            ("bf16", 1, 0),
            ("f16", 0, 8),
            ("bf16", 0, 0),
            ("f32", 1, 3),
            ("bf16", 0, 40),
        )
    )
)
def make_linear_backward(rng, T, N, D, dtype="f32", accumulate=0, gap=0):
    dx = rng.standard_normal((T, D)) if accumulate else (T, D)
    dy, w = rng.standard_normal((T, N)), frozen(rng, N, D, dtype)
    return dict(dx=dx, dy=dy, w=w, T=T, N=N, D=D, step=N + gap, accumulate=accumulate)


@case(
    *(
        dict(M=M, N=N, K=K, a_turned=a_turned, b_turned=b_turned, b_bf16=b_bf16, accumulate=add)
        for M, N, K in (*TND, (130, 64, 401), (65, 96, 0))
        for a_turned, b_turned, b_bf16, add in (
            (0, 1, 0, 0),
            (0, 1, 1, 1),
            (0, 0, 0, 1),
            (0, 0, 1, 0),
            (1, 0, 0, 1),
            (1, 1, 1, 0),
        )
        if M
    )
)
def make_matmul(rng, M, N, K, a_turned, b_turned, b_bf16, accumulate):
    half = to_bf16(rng.standard_normal((N, K) if b_turned else (K, N)))
    b = half if b_bf16 else from_bf16(half)  # exact in either
    return dict(
        c=rng.standard_normal((M, N)) if accumulate else (M, N),
        a=rng.standard_normal((K, M) if a_turned else (M, K)),
        b=b.view(np.uint8).ravel(),
        a_turned=a_turned,
        b_turned=b_turned,
        b_bf16=b_bf16,
        M=M,
        N=N,
        K=K,
        accumulate=accumulate,
    )


TNDR = tuple(
    dict(T=T, N=N, D=D, R=R) for (T, N, D), R in zip(TND, (4, 1, 6, 8, 5, 32, 2), strict=True)
)


def make_group(rng, T, widths, D, R, gap=0) -> tuple[np.ndarray, dict]:
    """The input of a group of LoRA matrices, and y, its step, a, b and N of each."""
    x, group = rng.standard_normal((T, D)), {}
    for i, N in enumerate(widths):
        group[f"y{i}"], group[f"N{i}"] = rng.standard_normal((T, N)), N
        group[f"step{i}"] = N + gap
        group[f"a{i}"], group[f"b{i}"] = rng.standard_normal((D, R)), rng.standard_normal((R, N))
    return x, group


# Alone; three of different widths; more rows, columns and inputs than one tile or one slice has.
GROUPS = (
    *(dict(T=s["T"], widths=(s["N"],), D=s["D"], R=s["R"]) for s in TNDR),
    dict(T=5, widths=(70, 33, 33), D=67, R=8),
    dict(T=130, widths=(72, 136), D=1096, R=72),
    dict(T=31, widths=(70, 33), D=67, R=8, gap=3),
    dict(T=67, widths=(72, 136), D=136, R=16, gap=200),
    # of cuda/product/lora.cu: rows of two slices, inputs and outputs of three; slices of more than
    # 512
    dict(T=530, widths=(1100, 136), D=1032, R=32),
    dict(T=5, widths=(8250,), D=8250, R=8),
)


@case(*GROUPS)
def make_lora(rng, T, widths, D, R, gap=0):
    x, group = make_group(rng, T, widths, D, R, gap)
    group |= {f"s{i}": (T, R) for i in range(len(widths))}
    return group | dict(count=len(widths), x=x, T=T, D=D, R=R, scale=0.75)


@case(*(size | dict(dx=dx) for size in GROUPS for dx in (True, False)))
def make_lora_backward(rng, T, widths, D, R, dx=True, gap=0):
    x, group = make_group(rng, T, widths, D, R, gap)
    for i, N in enumerate(widths):
        group |= {f"s{i}": x @ group[f"a{i}"], f"ds{i}": (T, R)}
        group |= {f"da{i}": rng.standard_normal((D, R)), f"db{i}": rng.standard_normal((R, N))}
    dx = rng.standard_normal((T, D)) if dx else None
    return group | dict(dx=dx, count=len(widths), x=x, T=T, D=D, R=R, scale=0.75)


@case(*TD)
def make_rmsnorm(rng, T, D):
    return dict(
        y=(T, D),
        rstd=(T,),
        x=rng.standard_normal((T, D)),
        w=rng.standard_normal(D),
        T=T,
        D=D,
        eps=1e-5,
    )


# Of D = 1 the gradient is rounding alone.
@case(*(s | dict(D=max(s["D"], 3), plus=plus) for s in TD for plus in ("", "rows", "dx")))
def make_rmsnorm_backward(rng, T, D, plus="dx"):
    dx, (dy, x) = onto("dx", rng, (T, D), plus), rng.standard_normal((2, T, D))
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1) + 1e-5)
    return dx | dict(dy=dy, x=x, w=rng.standard_normal(D), rstd=rstd, T=T, D=D)


# Of D = 1 nothing is left but the bias. A mean that is large beside what is left is taken away
# first.
@case(*TD, *(dict(T=3, D=D, mean=mean) for D in (67, 4608) for mean in (0.0, 30.0)))
def make_layernorm(rng, T, D, mean=0.5):
    x, (w, b) = rng.standard_normal((T, D)) + mean, rng.standard_normal((2, D))
    return dict(y=(T, D), x=x, w=w, b=b, T=T, D=D, eps=1e-6)


@case(
    *(
        size | dict(A=A, turned=turned)
        for size in (dict(T=0, E=8), dict(T=1, E=2), dict(T=7, E=34), dict(T=61, E=128))
        for A, turned in ((1, 0), (3, 1), (2, 1), (3, 0))
    )
)
def make_rope_table(rng, T, E, A=1, turned=0):
    inv_freq = 10000.0 ** (-np.arange(E // 2) / (E / 2))
    pos = rng.integers(0, 130_000, (T, A)).astype(np.int32)
    axis = rng.integers(0, A, E // 2).astype(np.int32) if turned else None
    out = dict(cosine=(T, E // 2), sine=(T, E // 2))
    return out | dict(pos=pos, axis=axis, inv_freq=inv_freq, T=T, W=E, A=A, scale=1.125)


HEADS = (
    dict(T=0, H=2, G=1, E=8, W=8),
    dict(T=1, H=1, G=1, E=2, W=2),
    dict(T=7, H=3, G=1, E=34, W=34),
    dict(T=41, H=4, G=2, E=128, W=128),
    dict(T=5, H=3, G=3, E=64, W=16),
    dict(T=3, H=2, G=1, E=10, W=2),
    dict(T=3, H=2, G=1, E=256, W=64),
    dict(T=9, H=2, G=1, E=64, W=64, gaps=(128, 192)),
    dict(T=9, H=3, G=2, E=34, W=34, gaps=(3, 1)),
)


@case(*(size | dict(norm=norm) for size in HEADS for norm in (0, 1)))
def make_rotate(rng, T, H, G, E, W, norm, gaps=(0, 0)):
    angle = rng.uniform(-3, 3, (T, W // 2))
    args = dict(cosine=np.cos(angle), sine=np.sin(angle), T=T, H=H, G=G, E=E, W=W, eps=1e-5)
    args |= dict(q_step=H * E + gaps[0], kv_step=G * E + gaps[1])
    for name, heads in (("q", H), ("k", G)):
        args |= {name: (T, heads, E), f"{name}_raw": rng.standard_normal((T, heads, E))}
        args |= {f"{name}_rstd": (T, heads) if norm else None}
        args |= {f"{name}_norm": rng.standard_normal(E) if norm else None}
    return args


# Of two numbers the gradient of a norm is rounding alone.
@case(*(size | dict(norm=norm) for size in HEADS for norm in (0, 1) if size["E"] > 2 or not norm))
def make_rotate_backward(rng, T, H, G, E, W, norm, gaps=(0, 0)):
    args = make_rotate(rng, T, H, G, E, W, norm, gaps)
    del args["eps"]
    for name in "qk":
        raw = args[f"{name}_raw"]
        args |= {f"d{name}": rng.standard_normal(args.pop(name))}
        if norm:
            args[f"{name}_rstd"] = 1 / np.sqrt(np.mean(raw * raw, axis=-1) + 1e-5)
    return args


@case(
    *(
        dict(n=n, exact=exact, alias=alias)
        for n in (0, 1, 67, 72, 100_003)
        for exact in (0, 1)
        for alias in (False, True)
    )
)
def make_gelu(rng, n, exact, alias=False):
    return dict(y="x" if alias else (n,), x=rng.standard_normal(n) * 3, n=n, exact=exact)


TE = (dict(T=0, E=8), dict(T=1, E=1), dict(T=7, E=67), dict(T=12, E=256))


@case(*TE)
def make_halve(rng, T, E):
    return dict(a=(T, E), b=(T, E), x=rng.standard_normal((T, 2 * E)), T=T, E=E)


@case(*TE)
def make_join(rng, T, E):
    a, b = rng.standard_normal((2, T, E))
    return dict(x=(T, 2 * E), a=a, b=b, T=T, E=E)


TD_GATE = (dict(T=0, D=8), dict(T=1, D=1), dict(T=7, D=67), dict(T=11, D=1501))


@case(*TD_GATE)
def make_gate(rng, T, D):
    x, gate = rng.standard_normal((2, T, D)) * 8
    return dict(y=(T, D), x=x, gate=gate, T=T, D=D)


@case(*(size | dict(alias=alias) for size in TD_GATE for alias in (False, True)))
def make_gate_backward(rng, T, D, alias=False):
    dy, x, gate = rng.standard_normal((3, T, D)) * 3
    return dict(dx="dy" if alias else (T, D), dgate=(T, D), dy=dy, x=x, gate=gate, T=T, D=D)


TF = (
    *(dict(T=T, F=F) for T, F in ((0, 8), (1, 1), (7, 67), (5, 72), (11, 1501))),
    *(dict(T=T, F=F, gaps=(gap, gap)) for T, F, gap in ((7, 67, 3), (9, 72, 72), (11, 1501, 1501))),
    *(dict(T=9, F=72, gaps=gaps) for gaps in ((8, 0), (0, 40), (3, 0), (0, 5))),
)


@case(*TF)
def make_swiglu(rng, T, F, gaps=(0, 0)):
    gate, up = rng.standard_normal((2, T, F)) * 8
    steps = dict(gate_step=F + gaps[0], up_step=F + gaps[1])
    return dict(y=(T, F), gate=gate, up=up, T=T, F=F) | steps


@case(*(size | dict(alias=alias) for size in TF for alias in (False, True)))
def make_swiglu_backward(rng, T, F, alias=False, gaps=(0, 0)):
    dy, gate, up = rng.standard_normal((3, T, F)) * 3
    outputs = dict(dgate="gate", dup="up") if alias else dict(dgate=(T, F), dup=(T, F))
    steps = dict(gate_step=F + gaps[0], up_step=F + gaps[1])
    return outputs | dict(dy=dy, gate=gate, up=up, T=T, F=F) | steps


def make_pages(rng, seen, G, E):
    """Pages for sequences of so many keys, in random order, with NaN where there is no key."""
    count = [(n + KV_PAGE - 1) // KV_PAGE for n in seen]
    pages = rng.permutation(sum(count) + 2)[: sum(count)].astype(np.int32)
    first = np.cumsum([0, *count])
    k, v = np.full((2, sum(count) + 2, KV_PAGE, G, E), np.nan)
    for s, n in enumerate(seen):
        own = pages[first[s] : first[s + 1]]
        for j in range(n):
            k[own[j // KV_PAGE], j % KV_PAGE], v[own[j // KV_PAGE], j % KV_PAGE] = (
                rng.standard_normal((2, G, E))
            )
    return k, v, pages, first


# Heads in fours, at widths that the kernels know, beyond the borders of
# cuda/attention/attention.cu: tiles of 32 (E = 128: 16, 256: 8) queries of such a group, pages of
# 64 keys, and chunks that begin at each 256 keys up to 2,048, at 8,192 each 1,024, and so on. A
# long span has cases of its own as well: beside short ones, whose y are larger, its error would
# count for little.
LONG_SPANS = (
    dict(spans=((150, 0), (37, 230), (1, 300)), H=4, G=1, E=128),
    dict(spans=((40, 500), (70, 0), (5, 250)), H=8, G=2, E=128, window=100),
    dict(spans=((17, 2040),), H=4, G=1, E=128),  # into the ninth chunk
    dict(spans=((70, 300), (130, 0)), H=8, G=2, E=64),
    dict(spans=((21, 250), (70, 0)), H=4, G=1, E=256),
    # decoding: one chunk, nine and forty
    dict(spans=((1, 200), (1, 2100), (1, 30_800)), H=4, G=1, E=128),
    dict(spans=((1, 30_800),), H=4, G=1, E=128),
    dict(spans=((1, 2100),), H=8, G=2, E=128, grows=0.1),  # tops rise from chunk to chunk
    dict(spans=((1, 2100), (1, 700), (1, 299)), H=4, G=1, E=128, window=300),
)

# Spans whose rows see each other, as a vision tower's patches do: of one row, of more and fewer
# than a page, a tile and a chunk, behind other keys, and of widths that are no multiple of 16.
WHOLE_SPANS = (
    dict(spans=(), H=2, G=2, E=72),
    dict(spans=((1, 0),), H=2, G=2, E=2),
    dict(spans=((1, 0), (150, 0), (64, 0)), H=2, G=2, E=72),
    dict(spans=((300, 0), (7, 0)), H=3, G=3, E=64),
    dict(spans=((65, 0), (33, 70), (1, 9)), H=4, G=2, E=72),
    dict(spans=((5, 0), (140, 3)), H=2, G=1, E=34),
    dict(spans=((70, 0), (129, 0)), H=2, G=2, E=128),
    dict(spans=((75, 260),), H=2, G=1, E=256),
    dict(spans=((90, 0), (37, 0)), H=2, G=2, E=96, grows=1.5),
)


@case(
    dict(spans=(), H=2, G=1, E=8),
    dict(spans=((1, 0),), H=1, G=1, E=2),
    dict(spans=((1, 200), (1, 63), (1, 64)), H=6, G=2, E=34),
    dict(spans=((5, 0), (1, 70), (3, 62)), H=4, G=4, E=16),
    dict(spans=((133, 0), (37, 100)), H=4, G=2, E=32),
    dict(spans=((1, 200), (1, 63), (1, 64)), H=6, G=2, E=34, window=65),
    dict(spans=((5, 0), (1, 70), (3, 62)), H=4, G=4, E=16, window=1),
    dict(spans=((133, 0), (37, 100)), H=4, G=2, E=32, window=50),
    dict(spans=((3, 300), (1, 5)), H=4, G=2, E=256),  # several chunks of the widest head
    dict(spans=((1, 300), (1, 5)), H=4, G=2, E=256),
    dict(spans=((40, 20),), H=2, G=1, E=128),  # rows of two groups of warps
    dict(spans=((1, 70), (1, 9)), H=2, G=1, E=128),
    dict(spans=((9, 60),), H=4, G=1, E=98, window=20),
    dict(spans=((9, 70),), H=4, G=2, E=200),
    dict(spans=((2, 110),), H=2, G=1, E=64, grows=1.5),  # tops rise within a chunk
    dict(spans=((2, 120),), H=2, G=1, E=66, grows=1.5),
    dict(spans=((1, 110), (1, 66)), H=2, G=1, E=64, grows=1.5),
    *LONG_SPANS,
    *(size | dict(whole=1) for size in WHOLE_SPANS),
)
def make_attention(rng, spans, H, G, E, window=0, grows=0.0, whole=0):
    k, v, pages, first = make_pages(rng, [rows + pos for rows, pos in spans], G, E)
    row = np.cumsum([0, *(rows for rows, _ in spans)])
    T = int(row[-1])
    for s in range(len(spans)):  # keys of later pages are so much larger
        for n, page in enumerate(pages[first[s] : first[s + 1]]):
            k[page] *= 1 + grows * n
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
        window=window,
        whole=whole,
    )


def causal(q, k, v, lengths, G, window=0):
    """y and lse of attention of packed sequences from position 0, by the reference's attend."""
    y, lse = np.zeros_like(q), np.zeros(q.shape[:2])
    row = 0
    for length in lengths:
        for i in range(length):
            for h in range(q.shape[1]):
                g = h * G // q.shape[1]
                keys = slice(row + op_reference.first_seen(i, window), row + i + 1)
                y[row + i, h], lse[row + i, h] = op_reference.attend(
                    q[row + i, h], k[keys, g], v[keys, g]
                )
        row += length
    return y, lse


@case(
    dict(lengths=(), H=2, G=1, E=8),
    dict(lengths=(1,), H=1, G=1, E=2),
    dict(lengths=(5, 1, 9), H=6, G=2, E=34),
    dict(lengths=(71, 33), H=4, G=4, E=16),
    dict(lengths=(130,), H=4, G=2, E=32),
    dict(lengths=(5, 1, 9), H=6, G=2, E=34, window=3),
    dict(lengths=(71, 33), H=4, G=4, E=16, window=2),
    dict(lengths=(200,), H=4, G=2, E=32, window=65),
    dict(lengths=(37, 5), H=2, G=1, E=256),
    dict(lengths=(40, 7), H=4, G=1, E=64),
    dict(lengths=(40, 7), H=3, G=1, E=128),
    dict(lengths=(37,), H=2, G=1, E=98, window=9),
    dict(lengths=(5, 9), H=6, G=2, E=34, gaps=(4, 68)),
    dict(lengths=(71, 33), H=4, G=2, E=64, gaps=(256, 384)),
    # more than two tiles of 64 (E = 256: 32) keys, and of 32 (8) queries of four heads
    dict(lengths=(300, 70, 131), H=4, G=1, E=128),
    dict(lengths=(150, 5, 97), H=8, G=2, E=128, window=50),
    dict(lengths=(200,), H=4, G=1, E=128, window=130),
    dict(lengths=(131, 40), H=4, G=1, E=256),
    dict(lengths=(70, 180), H=8, G=2, E=64, window=65, gaps=(1024, 256)),
)
def make_attention_backward(rng, lengths, H, G, E, window=0, gaps=(0, 0)):
    T = sum(lengths)
    row = np.cumsum([0, *lengths])
    q, dy = rng.standard_normal((2, T, H, E)) * 1.5
    k, v = rng.standard_normal((2, T, G, E))
    y, lse = causal(q, k, v, lengths, G, window)
    spans = [Span(int(row[s]), length, 0, 0) for s, length in enumerate(lengths)]
    out = dict(dq=(T, H, E), dk=(T, G, E), dv=(T, G, E))
    sizes = dict(S=len(spans), T=T, H=H, G=G, E=E, window=window)
    sizes |= dict(q_step=H * E + gaps[0], kv_step=G * E + gaps[1])
    return out | dict(dy=dy, y=y, lse=lse, q=q, k=k, v=v, spans=spans, **sizes)


@case(*(dict(T=T, V=V, D=D, dtype=dtype) for T, V, D in TND for dtype in ("f32", "bf16")))
def make_head(rng, T, V, D, dtype="f32"):
    return dict(
        logits=(T, V), x=rng.standard_normal((T, D)), w=frozen(rng, V, D, dtype), T=T, V=V, D=D
    )


@case(*(dict(T=s["T"], V=s["N"], D=s["D"], R=s["R"]) for s in TNDR))
def make_head_lora(rng, T, V, D, R):
    x, group = make_group(rng, T, (V,), D, R)
    sizes = dict(T=T, V=V, D=D, R=R, scale=0.75)
    return dict(logits=group["y0"], s=(T, R), x=x, a=group["a0"], b=group["b0"], **sizes)


TV = (dict(T=0, V=8), dict(T=1, V=1), dict(T=7, V=67), dict(T=5, V=2050), dict(T=2, V=32_003))


# More than one, two and three of cuda/head/logprob.cu's parts of 8,192 logits, in rows that quads
# fit. In place, blocks wait there for those of the row before.
TV_PARTS = (dict(T=40, V=8196), dict(T=5, V=16_388), dict(T=3, V=24_580))


@case(*TV, *TV_PARTS)
def make_logprob(rng, T, V):
    targets = rng.integers(0, 4, T)  # some rows have none
    start = np.cumsum([0, *targets]).astype(np.int32)
    ids = rng.integers(0, min(V, 3), start[-1]).astype(np.int32)  # few enough to repeat
    logits = rng.standard_normal((T, V)) * 4
    logits[:, 5::7] = -np.inf
    return dict(lse=(T, 2), logp=(int(start[-1]),), logits=logits, ids=ids, start=start, T=T, V=V)


@case(
    *(size | dict(alias=alias) for size in TV for alias in (False, True)),
    *(dict(T=7, V=67, first=first) for first in (1, 2, 50)),
    *(size | dict(alias=alias) for size in TV_PARTS for alias in (False, True)),
)
def make_logprob_backward(rng, T, V, alias=False, first=0):
    args = make_logprob(rng, T, V)
    del args["logp"]
    lse, dlogp = op_reference.logprob(**args)["lse"], rng.standard_normal(len(args["ids"]))
    if first:  # ids before the logits, among them, and behind them
        args["ids"] = rng.choice([first - 1, first, first + V - 1, first + V], len(args["ids"]))
        args["ids"] = args["ids"].astype(np.int32)
    out = dict(dlogits="logits" if alias else (T, V), lse=lse, dlogp=dlogp, first=first)
    return args | out


@case(
    *(
        dict(T=size["T"], V=size["V"], K=K, levels=levels)
        for size in TV
        for K in (0, 1, 7, 32, 65, 2050)
        for levels in (0, 9)
        if size["V"] >= K
    )
)
def make_topk_logprob(rng, T, V, K, levels=0):
    logits = rng.standard_normal((T, V)).astype(np.float32) * 4
    if levels:  # few values: ties
        logits = np.round(logits * levels / 16) + 0.0
    lse = op_reference.parts(op_reference.logsumexp(logits) if T else np.zeros(0))
    return dict(ids=(T, K), logp=(T, K), logits=logits, lse=lse, T=T, V=V, K=K)


def divergence(**changes) -> Jsd:
    rest = dict(beta=0.5, temperature=1.0, clip=np.inf, top_k=0, probs=0, each=0)
    return Jsd(**(rest | changes))


JSD_KINDS = (
    dict(),
    dict(beta=0.0),
    dict(beta=1.0, temperature=2.0),
    dict(beta=0.1, temperature=0.6, clip=0.004),
    dict(beta=0.9, top_k=1),
    dict(beta=0.5, top_k=6, temperature=1.7),
    dict(beta=0.0, clip=0.01),
    dict(beta=1.0, clip=0.01, top_k=40),
    dict(beta=0.3, each=1, temperature=0.5),
    dict(beta=0.7, each=1, top_k=9),
    dict(beta=0.5, probs=1),
    dict(beta=0.0, probs=1, clip=0.02),
    dict(beta=1.0, probs=1, each=1),
)


@case(
    *(
        size | dict(kind=kind, scaled=scaled, alias=alias)
        for size in (*TV, dict(T=19, V=1234))
        for kind in JSD_KINDS
        for scaled, alias in ((True, False), (True, True), (False, False))
        if kind.get("top_k", 0) <= size["V"]
    )
)
def make_jsd(rng, T, V, kind, scaled=True, alias=False):
    how = divergence(**kind)
    student = rng.standard_normal((T, V)) * 2
    # from nearly the student's to far from it
    teacher = student + rng.standard_normal((T, V)) * np.geomspace(0.01, 6, max(T, 1))[:T, None]
    if how.probs:
        student, teacher = (
            np.exp(x - op_reference.logsumexp(x)[:, None]) for x in (student, teacher)
        )
        student[:, 3::11] = 0
    else:
        teacher += rng.standard_normal((T, 1))
        teacher[:, 5::7] = student[:, 5::7] = -np.inf  # what a mask leaves out on both sides
    loss = (T, how.top_k or V) if how.each else (T,)
    scale = rng.standard_normal(loss) if scaled else None
    dstudent = ("student" if alias else (T, V)) if scaled else None
    arrays = dict(loss=loss, dstudent=dstudent, student=student, teacher=teacher, scale=scale)
    return arrays | dict(how=how, T=T, V=V)


@case(*TV, dict(T=3, V=40_001))
def make_temper(rng, T, V):
    draws = [draw(temperature=(0.0, 1.0, 0.7)[t % 3]) for t in range(T)]
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


def draws_make(kinds, each=1) -> list[Draw]:
    """Some draws with each kind of cut, every one with a number of its own."""
    return [
        draw(seed=(77 << 40) + 5, sample=i, pos=3 * j, **kind)
        for i, kind in enumerate(kinds)
        for j in range(each)
    ]


@case(
    *(dict(V=V, levels=levels) for V in (1, 3, 67, 1001, 5003) for levels in (0, 9)),
    dict(V=0, levels=0),
)
def make_sample(rng, V, levels):
    draws = draws_make(KINDS, each=3) if V else []
    T, V = len(draws), V or 9
    logits = rng.standard_normal((T, V)).astype(np.float32) * 2
    if levels:
        logits = np.round(logits * levels / 16) + 0.0
    lse = op_reference.logsumexp(logits.astype(float)).astype(np.float32) if T else np.zeros(0)
    lse = op_reference.parts(lse)
    return dict(ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)


N = (dict(n=0), dict(n=1), dict(n=67), dict(n=100_003))


@case(*N)
def make_widen(rng, n):
    half = to_bf16(rng.standard_normal(n) * 10.0 ** rng.integers(-40, 38, n))
    return dict(y=(n,), x=half.view(np.uint8), n=n)


@case(*N)
def make_narrow(rng, n):
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-40, 38, n)).astype(np.float32)
    x.view(np.uint32)[::3] &= 0xFFFF8000  # a third lie in the middle of two
    return dict(y=(2 * n,), x=x, n=n)


@case(*N, dict(n=4_500_001))
def make_square_sum(rng, n):
    return dict(total=np.array([0.5]), g=rng.standard_normal(n), n=n)


@case(*N)
def make_accumulate(rng, n):
    return dict(y=rng.standard_normal(n), x=rng.standard_normal(n), n=n)


@case(*N)
def make_add(rng, n):
    return dict(y=rng.standard_normal(n), x=rng.standard_normal(n), n=n)


@case(*N)
def make_average(rng, n):
    y, x = rng.standard_normal((2, n))
    return dict(y=y, x=x, n=n, scale=0.5, rate=0.125)


@case(*(size | dict(step=step, alias=step > 1) for size in N for step in (1, 1000)))
def make_adamw(rng, n, step, alias):
    w, m, g = rng.standard_normal((3, n))
    scalars = dict(step=step, scale=0.5, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1)
    return dict(w="before" if alias else (n,), m=m, v=rng.random(n), before=w, g=g, n=n) | scalars


@case(*(size | dict(step=step) for size in (*N, dict(n=4_500_001)) for step in (1, 1000)))
def make_adamw_norm(rng, n, step):
    same = make_adamw(rng, n, step, True)
    return {key: value for key, value in same.items() if key != "w"} | dict(total=np.array([0.5]))


GRAMS = tuple(
    dict(n=n, R=R, turned=turned)
    for n, R in ((0, 4), (1, 1), (7, 5), (129, 3), (300, 32), (1027, 19), (65, 67))
    for turned in (0, 1)
)


@case(*GRAMS)
def make_gram(rng, n, R, turned):
    x = rng.standard_normal((R, n) if turned else (n, R))
    return dict(c=rng.standard_normal((R, R)), x=x, n=n, R=R, turned=turned)


@case(*(size | dict(alias=alias) for size in GRAMS for alias in (0, 1)))
def make_mix(rng, n, R, turned, alias):
    before, x = rng.standard_normal((2, *((R, n) if turned else (n, R))))
    k = rng.standard_normal((R, R))
    y = "before" if alias else before.shape
    return dict(y=y, before=before, x=x, k=k, n=n, R=R, turned=turned)
