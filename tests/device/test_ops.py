"""Every op of every device against its formula in op_reference.py.

A device may err against float64 no more than the same formula in NumPy's float32 errs, and a little
(op_tolerance.check). A row's result must be the same bit for bit alone, among others and in another
order.
"""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import functools
import inspect
import re
import sys

import numpy as np
import pytest
from support import ROOT, op_reference, wrong_results
from support.expert_cases import CASES, bounds_of
from support.op_cases import causal, make_attention, make_attention_backward, make_lora_backward
from support.op_devices import DEVICES, KV_PAGE, OPS, Span, device, setup_py
from support.op_tolerance import compare, page_size, put_pages, run

CSRC = ROOT / "csrc"


@pytest.fixture(params=DEVICES)
def dev(request):
    return device(request.param)


# ---- all ops ----


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_reference_and_a_test(op):
    formula = getattr(op_reference, op, None)
    assert formula, f"{op} has no reference in op_reference.py"
    names = {p.name for p in OPS[op]}
    taken = {
        p.name
        for p in inspect.signature(formula).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    }
    assert taken <= names, f"reference.{op} takes {taken - names}, which ops.inc does not have"
    assert op in CASES or f"test_{op}" in vars(sys.modules[__name__]), (
        f"{op} has no case in test_ops.py"
    )


def test_sets_with_bf16_have_their_own_of_every_op_whose_file_knows_it():
    table = (CSRC / "cpu" / "table.c").read_text()
    own = set(re.findall(r"OWN\((\w+)\);", table))
    files = setup_py().files_of("avx512bf16")
    text = "".join((CSRC.parent / path).read_text() for path in files)
    assert own == set(OPS) & set(re.findall(r"^void CPU\((\w+)\)\(Device", text, re.M))


@pytest.mark.parametrize("op", CASES)
def test_op_matches_its_formula(dev, op):
    build, sizes = CASES[op]

    def attempt(number):
        compare(dev, op, build(np.random.default_rng(number), **sizes[number]))

    wrong_results.all_of(functools.partial(attempt, number) for number in range(len(sizes)))


# ---- a row's result depends on that row alone ----


def take_rows(op, args, rows):
    """The arguments with those rows of T, or P, in that order: everything of that first size."""
    size = "T" if "T" in args else "P"
    T, out = args[size], dict(args)
    for p in OPS[op]:
        value = args.get(p.name)
        if isinstance(value, tuple) and value[0] == T:
            out[p.name] = (len(rows), *value[1:])
        elif isinstance(value, np.ndarray) and len(value) == T:
            out[p.name] = value[rows]
        elif isinstance(value, list) and len(value) == T:
            out[p.name] = [value[t] for t in rows]
    return out | {size: len(rows)}


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
    """take_rows for attention: each row becomes a span of its own, at its position of its pages."""
    of_row = [Span(0, 1, s.pos + i, s.first) for s in args["spans"] for i in range(s.rows)]
    spans = [Span(i, 1, of_row[t].pos, of_row[t].first) for i, t in enumerate(rows)]
    out = take_rows(op, args | dict(spans=None, S=0), rows)
    return (
        out
        | dict(spans=spans, S=len(spans))
        | {k: args[k] for k in ("k_pages", "v_pages", "pages")}
    )


ROW_OPS = {
    "embed": dict(T=7, D=67, dtype="bf16"),
    "gather": dict(T=7, D=67),
    "blend": dict(T=7, D=67, K=4),
    "linear": dict(T=7, N=131, D=900, dtype="bf16", bias=1),
    "linear_backward": dict(T=7, N=900, D=131, dtype="bf16"),
    "lora": dict(T=7, widths=(131, 66), D=901, R=5),
    "lora_backward": dict(T=7, widths=(131, 601), D=65, R=5),
    "rmsnorm": dict(T=7, D=2051),
    "rmsnorm_backward": dict(T=7, D=2051),
    "layernorm": dict(T=7, D=2051),
    "rope_table": dict(T=7, E=34, A=3, turned=1),
    "rotate": dict(T=7, H=3, G=2, E=34, W=34, norm=1),
    "rotate_backward": dict(T=7, H=3, G=2, E=34, W=34, norm=1),
    "swiglu": dict(T=7, F=67),
    "swiglu_backward": dict(T=7, F=67),
    "route": dict(T=7, X=67, K=5, norm=0),
    "route_backward": dict(T=7, X=67, K=5, norm=0),
    "unite": dict(T=7, K=3, D=67, plus="rows"),
    "swiglu_share": dict(P=7, F=67, paired=0, limit=0.0),
    "swiglu_share_backward": dict(P=7, F=667, paired=0, limit=7.0),
    "share_bias": dict(T=7, K=3, X=8, D=67),
    "share_bias_backward": dict(T=7, K=3, X=8, D=667),
    "sink": dict(T=7, H=3, E=34),
    "attention": dict(spans=((3, 100), (3, 0), (1, 65)), H=6, G=2, E=34),
    "head": dict(T=7, V=131, D=900, dtype="bf16"),
    "head_lora": dict(T=7, V=131, D=65, R=5),
    "logprob": dict(T=7, V=2051),
    "logprob_backward": dict(T=7, V=2051),
    "topk_logprob": dict(T=7, V=2051, K=33),
    "jsd": dict(T=7, V=2051, kind=dict(beta=0.3)),
    "temper": dict(T=7, V=2051),
    "sample": dict(V=1001, levels=0),
}
TAKE = {"logprob": take_targets, "logprob_backward": take_targets, "attention": take_queries}
SUMS = {f"{name}{i}" for name in ("da", "db") for i in range(3)}  # belong to all rows


def rows_of(args, name, value, rows):
    """Those rows of an output; targets' log-probabilities go with their rows."""
    if name == "logp" and "start" in args:
        own = [np.arange(args["start"][t], args["start"][t + 1]) for t in rows]
        return value[np.concatenate(own).astype(int)]
    return value[rows]


@pytest.mark.parametrize("op", ROW_OPS)
def test_row_is_the_same_bit_for_bit_whatever_its_neighbours(dev, op):
    args = CASES[op][0](np.random.default_rng(0), **ROW_OPS[op])
    whole = run(dev, op, args)
    some = list(range(args["T"] if "T" in args else args["P"]))
    batches = [[t] for t in some[:7]] + [
        some[::-1],
        some[1::2],
        some * 3,
        [some[-1]] * 17,
        some * 50,
    ]
    for rows in batches:
        part = run(dev, op, TAKE.get(op, take_rows)(op, args, rows))
        for name in part.keys() - SUMS:
            np.testing.assert_array_equal(
                part[name], rows_of(args, name, whole[name], rows), f"{op}: {name} {rows}"
            )


@pytest.mark.parametrize("E", [64, 66, 128, 200, 256])
def test_attention_of_a_row_alone_is_that_of_a_prompt_bit_for_bit(dev, E):
    """Decoding and prefill of a GPU are blocks of different shapes; in several chunks each."""
    spans = ((2, 299), (3, 62))
    args = make_attention(np.random.default_rng(E), spans, H=4, G=2, E=E, grows=4.0)
    whole = run(dev, "attention", args)
    for rows in ([0], [1, 4], [2, 3]):
        part = run(dev, "attention", take_queries("attention", args, rows))
        for name in part:
            np.testing.assert_array_equal(part[name], whole[name][rows], f"{name} {rows}")


GROUPED = ("grouped_linear", "grouped_linear_backward", "grouped_matmul")


@pytest.mark.parametrize("op", GROUPED)
@pytest.mark.parametrize(("N", "D"), [(131, 515), (136, 1032)])
def test_pair_is_the_same_bit_for_bit_whoever_shares_its_expert(dev, op, N, D):
    args = CASES[op][0](np.random.default_rng(0), load=(5, 0, 70, 17), N=N, D=D)
    whole = dev.call(op, **args)
    name, given = ("dx", "dy") if "dx" in whole else ("y", "x")
    rng = np.random.default_rng(1)
    for counts in ((1, 0, 0, 0), (0, 0, 1, 1), (3, 0, 40, 2), (2, 0, 69, 17)):
        rows = [
            first + rng.permutation(last - first)[:count]
            for (first, last), count in zip(args["bounds"], counts, strict=True)
        ]
        rows = np.concatenate(rows).astype(int)
        some = args | {given: args[given][rows], "bounds": bounds_of(counts), "P": len(rows)}
        some[name] = (
            args[name][rows]
            if isinstance(args[name], np.ndarray)
            else (*args[name][:-2], len(rows), args[name][-1])
        )
        np.testing.assert_array_equal(dev.call(op, **some)[name], whole[name][..., rows, :])


def test_attention_backward_of_a_sequence_is_the_same_whatever_its_neighbours(dev):
    lengths = (5, 71, 1, 33)
    args = make_attention_backward(np.random.default_rng(0), lengths, H=6, G=2, E=34)
    whole, bounds = run(dev, "attention_backward", args), np.cumsum([0, *lengths])
    for order in ([0], [1], [2], [3], [3, 2, 1, 0], [1, 1, 3]):
        rows = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in order])
        begin = np.cumsum([0, *(lengths[s] for s in order)])
        spans = [Span(int(begin[i]), lengths[s], 0, 0) for i, s in enumerate(order)]
        some = take_rows("attention_backward", args | dict(spans=None), rows) | dict(
            spans=spans, S=len(spans)
        )
        part = run(dev, "attention_backward", some)
        for name, value in part.items():
            np.testing.assert_array_equal(value, whole[name][rows], f"{name} {order}")


# ---- what is not a number ----


@pytest.mark.parametrize("norm", (0, 1))
def test_a_nan_among_the_routers_logits_reaches_the_shares_whoever_is_chosen(dev, norm):
    T, X, K = 6, 67, 3
    args = CASES["route"][0](np.random.default_rng(0), T=T, X=X, K=K, norm=norm)
    whole = dev.call("route", **args)
    for row, column in ((1, 0), (2, X - 1), (4, int(whole["chosen"][4][0]))):
        args["logits"][row, column] = np.nan
    got = dev.call("route", **args)
    assert np.isnan(got["share"][[1, 2, 4]]).all()
    assert all(len({*row}) == K and 0 <= min(row) <= max(row) < X for row in got["chosen"])
    for name in ("chosen", "share"):
        np.testing.assert_array_equal(got[name][[0, 3, 5]], whole[name][[0, 3, 5]], name)


@pytest.mark.parametrize("limit", (0.0, 7.0))
@pytest.mark.parametrize("name", ("gate", "up"))
def test_a_nan_in_the_gated_unit_stays_nan_and_does_not_become_the_limit(dev, name, limit):
    P, F = 3, 40
    sizes = dict(P=P, F=F, paired=0, limit=limit)
    args = CASES["swiglu_share_backward"][0](np.random.default_rng(0), **sizes)
    args[name][1, 20] = np.nan
    inputs = ("gate", "up", "share", "pair", "P", "F", "limit")
    got = dev.call("swiglu_share", y=(P, F), **{key: args[key] for key in inputs})["y"]
    back = dev.call("swiglu_share_backward", **args)
    at = np.zeros((P, F), bool)
    at[1, 20] = True
    for array in (got, back["dgate"]):
        np.testing.assert_array_equal(np.isnan(array), at)
    np.testing.assert_array_equal(np.isnan(back["dshare"]).ravel(), [False, True, False])


# ---- the reference's own gradients, by finite differences in float64 ----


def assert_slope(loss, inputs, gradients):
    """⟨gradient, d⟩ equals the change of loss along a random d, for each input with a gradient."""
    rng = np.random.default_rng(5)
    for name, gradient in gradients.items():
        d, h = rng.standard_normal(inputs[name].shape), 1e-5
        ahead, behind = (loss(**inputs | {name: inputs[name] + side * h * d}) for side in (1, -1))
        np.testing.assert_allclose(
            np.sum(gradient * d), (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8
        )


def test_reference_rmsnorm_backward_is_the_gradient():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 11))
    w = rng.standard_normal(11)
    rstd = op_reference.rmsnorm(x=x, w=w, eps=1e-5)["rstd"]
    dx = op_reference.rmsnorm_backward(dy=dy, x=x, w=w, rstd=rstd, plus=None)["dx"]
    assert_slope(
        lambda x: np.sum(dy * op_reference.rmsnorm(x=x, w=w, eps=1e-5)["y"]), dict(x=x), dict(x=dx)
    )


@pytest.mark.parametrize("normed", (False, True))
def test_reference_rotate_backward_is_the_gradient(normed):
    rng = np.random.default_rng(0)
    heads = {"q": (3, 2, 10), "k": (3, 1, 10)}
    raw, dy = ({n: rng.standard_normal(size) for n, size in heads.items()} for _ in range(2))
    both = dict(zip(("cosine", "sine"), rng.standard_normal((2, 3, 4)), strict=True)) | dict(W=8)
    both |= {f"{n}_norm": rng.standard_normal(10) if normed else None for n in heads}

    def rotate(q, k):
        return op_reference.rotate(q_raw=q, k_raw=k, eps=1e-5, **both)

    rstd = {f"{n}_rstd": rotate(**raw).get(f"{n}_rstd") for n in heads}
    inputs = {f"d{n}": dy[n] for n in heads} | {f"{n}_raw": raw[n] for n in heads}
    out = op_reference.rotate_backward(**inputs, **rstd, **both)
    assert_slope(
        lambda q, k: sum(np.sum(dy[n] * rotate(q, k)[n]) for n in heads),
        raw,
        {n: out[f"d{n}"] for n in heads},
    )


def test_reference_swiglu_backward_is_the_gradient():
    gate, up, dy = np.random.default_rng(0).standard_normal((3, 3, 9))
    out = op_reference.swiglu_backward(dy=dy, gate=gate, up=up)
    gradients = dict(gate=out["dgate"], up=out["dup"])
    assert_slope(
        lambda gate, up: np.sum(dy * op_reference.swiglu(gate=gate, up=up)["y"]),
        dict(gate=gate, up=up),
        gradients,
    )


@pytest.mark.parametrize("norm", (0, 1))
def test_reference_route_backward_is_the_gradient(norm):
    rng = np.random.default_rng(0)
    logits, dshare = rng.standard_normal((4, 9)), rng.standard_normal((4, 3))
    out = op_reference.route(logits, 3, norm)
    dlogits = op_reference.route_backward(dshare, out["chosen"], logits, norm)["dlogits"]
    assert_slope(
        lambda logits: np.sum(dshare * op_reference.route(logits, 3, norm)["share"]),
        dict(logits=logits),
        dict(logits=dlogits),
    )


@pytest.mark.parametrize("pair", (None, np.array([2, 0, 3, 1])))
@pytest.mark.parametrize("limit", (0.0, 1.0))
def test_reference_swiglu_share_backward_is_the_gradient(pair, limit):
    rng = np.random.default_rng(0)
    gate, up, dy = rng.standard_normal((3, 4, 9))
    inputs = dict(gate=gate, up=up, share=rng.random(4))
    out = op_reference.swiglu_share_backward(dy=dy, pair=pair, P=4, limit=limit, **inputs)
    gradients = {name: out[f"d{name}"] for name in inputs}
    forward = functools.partial(op_reference.swiglu_share, pair=pair, P=4, limit=limit)
    assert_slope(lambda **given: np.sum(dy * forward(**given)["y"]), inputs, gradients)


def test_reference_linear_and_lora_backward_are_the_gradients():
    args = make_lora_backward(np.random.default_rng(0), T=4, widths=(5, 3), D=6, R=3)
    w = np.random.default_rng(1).standard_normal((5, 6))
    args |= {k: np.zeros_like(args[k]) for k in ("dx", "da0", "db0", "da1", "db1")}
    inputs = {k: args[k] for k in ("x", "a0", "b0", "a1", "b1")}

    def loss(**given):
        y0 = op_reference.linear(x=given["x"], w=w, bias=None, plus=None)["y"]
        start = dict(y0=y0, y1=np.zeros((4, 3)), count=2, scale=args["scale"])
        out = op_reference.lora(**start, **given)
        return np.sum(args["y0"] * out["y0"]) + np.sum(args["y1"] * out["y1"])

    out = op_reference.lora_backward(**args)
    dx = op_reference.linear_backward(dx=out["dx"], dy=args["y0"], w=w, accumulate=1)["dx"]
    gradients = {k: out[f"d{k}"] for k in ("a0", "b0", "a1", "b1")}
    assert_slope(loss, inputs, dict(x=dx) | gradients)


@pytest.mark.parametrize("window", [0, 1, 3])
def test_reference_attention_backward_is_the_gradient(window):
    lengths = (5, 3)
    args = make_attention_backward(np.random.default_rng(0), lengths, H=4, G=2, E=6, window=window)

    def loss(q, k, v):
        return np.sum(args["dy"] * causal(q, k, v, lengths, 2, window)[0])

    out = op_reference.attention_backward(**args)
    assert_slope(loss, {k: args[k] for k in "qkv"}, dict(q=out["dq"], k=out["dk"], v=out["dv"]))


def test_reference_sink_is_one_more_logit():
    rng = np.random.default_rng(0)
    logits, v = rng.standard_normal((3, 2, 5)), rng.standard_normal((5, 4))
    sinks, lse = rng.standard_normal(2), np.logaddexp.reduce(logits, -1)
    y = np.exp(logits - lse[..., None]) @ v
    both = np.concatenate([logits, np.broadcast_to(sinks[:, None], (3, 2, 1))], -1)
    whole = np.logaddexp.reduce(both, -1)
    got = op_reference.sink(y, lse, sinks)
    np.testing.assert_allclose(got["lse"], whole, rtol=1e-12)
    np.testing.assert_allclose(got["y"], np.exp(logits - whole[..., None]) @ v, rtol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 66])
def test_reference_attention_over_pages_is_attention_over_rows(window):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 70, 2, 6))
    pages = np.full((2, 2, KV_PAGE, 2, 6), np.nan)
    where = np.arange(70) + np.where(
        np.arange(70) < KV_PAGE, KV_PAGE, -KV_PAGE
    )  # page 1, then page 0
    written = op_reference.kv_write(k_pages=pages[0], v_pages=pages[1], k=k, v=v, slot=where)
    got = op_reference.attention(
        q=q, spans=[Span(0, 70, 0, 0)], pages=np.array([1, 0]), H=2, G=2, window=window, **written
    )
    y, lse = causal(q, k, v, (70,), 2, window)
    np.testing.assert_allclose(got["y"], y, rtol=1e-12)
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-12)


def test_reference_logprob_backward_is_the_gradient():
    rng = np.random.default_rng(0)
    logits, ids, start = rng.standard_normal((3, 7)), np.array([1, 1, 6, 2]), np.array([0, 3, 3, 4])
    dlogp, lse = rng.standard_normal(4), op_reference.parts(op_reference.logsumexp(logits))
    dlogits = op_reference.logprob_backward(
        logits=logits, lse=lse, dlogp=dlogp, ids=ids, start=start
    )["dlogits"]

    def loss(logits):
        return np.sum(dlogp * op_reference.logprob(logits=logits, ids=ids, start=start)["logp"])

    assert_slope(loss, dict(logits=logits), dict(logits=dlogits))


# ---- the cache ----


def pages_of(dev, k_pages, v_pages, like):
    """A device's pages in the reference's order."""
    pages, _, G, E = like.shape
    size = page_size(like) * dev.c.cached_bytes
    k = dev.decode(k_pages.read(size), "cached", (pages, G, -1))
    v = dev.decode(v_pages.read(size), "cached", (pages, G, -1))
    if dev.name.startswith("cuda"):
        k, v = (x.reshape(pages, G, KV_PAGE, E).transpose(0, 2, 1, 3) for x in (k, v))
    else:  # the CPU keeps keys by column, and where a lane has two numbers, keys two by two
        joined = 4 // dev.c.cached_bytes
        k = k.reshape(pages, G, E // joined, KV_PAGE, joined).transpose(0, 3, 1, 2, 4)
        v = v.reshape(pages, G, KV_PAGE // joined, E, joined).transpose(0, 2, 4, 1, 3)
    return {"k_pages": k.reshape(like.shape), "v_pages": v.reshape(like.shape)}


@pytest.mark.parametrize(
    ("T", "G", "E", "gap"),
    [(0, 1, 8, 0), (1, 1, 2, 0), (7, 3, 34, 0), (150, 2, 16, 0), (7, 3, 34, 5), (9, 2, 16, 96)],
)
def test_kv_write(dev, T, G, E, gap):
    rng = np.random.default_rng(0)
    k, v = (dev.round_cached(x) for x in rng.standard_normal((2, T, G, E)))
    before = dev.round_cached(rng.standard_normal((4, KV_PAGE, G, E)))
    slot = rng.permutation(4 * KV_PAGE)[:T].astype(np.int32)
    k_pages, v_pages = put_pages(dev, before, before)
    sizes = dict(T=T, G=G, E=E, v_step=G * E + gap)
    dev.call("kv_write", k_pages=k_pages, v_pages=v_pages, k=k, v=v, slot=slot, **sizes)
    k_pages.assert_guarded("k_pages")
    v_pages.assert_guarded("v_pages")
    exact = op_reference.kv_write(k_pages=before, v_pages=before, k=k, v=v, slot=slot)
    for name, value in pages_of(dev, k_pages, v_pages, before).items():
        np.testing.assert_array_equal(value, exact[name], name)


@pytest.mark.parametrize("count", [0, 1, 33, KV_PAGE])
def test_kv_copy(dev, count):
    numbers = np.random.default_rng(0).standard_normal((2, 4, KV_PAGE, 3, 18))
    k, v = (dev.round_cached(x) for x in numbers)
    k_pages, v_pages = put_pages(dev, k, v)
    sizes = {"from": 2, "to": 0, "count": count, "G": 3, "E": 18}
    dev.call("kv_copy", k_pages=k_pages, v_pages=v_pages, **sizes)
    exact = op_reference.kv_copy(k_pages=k, v_pages=v, **sizes)
    for name, value in pages_of(dev, k_pages, v_pages, k).items():
        np.testing.assert_array_equal(value, exact[name], name)


def test_attention_reads_a_copied_page(dev):
    args = make_attention(np.random.default_rng(0), spans=((2, 30),), H=4, G=2, E=16)
    k_pages, v_pages = put_pages(dev, args["k_pages"], args["v_pages"])
    whole = dev.call("attention", **args | dict(k_pages=k_pages, v_pages=v_pages))
    source = int(args["pages"][0])
    target = (source + 1) % len(args["k_pages"])
    dev.call(
        "kv_copy",
        k_pages=k_pages,
        v_pages=v_pages,
        **{"from": source, "to": target, "count": 32},
        G=2,
        E=16,
    )
    moved = dict(k_pages=k_pages, v_pages=v_pages, pages=np.array([target], np.int32))
    np.testing.assert_array_equal(dev.call("attention", **args | moved)["y"], whole["y"])
