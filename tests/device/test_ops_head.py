"""What the general tests of test_ops.py do not see of logprob, sample and the optimizer: ties and
infinities, large vocabularies, the distribution of draws, and torch's own results."""

# ruff: noqa: C408 - changes to a Draw are keyword arguments, and read as such

import numpy as np
import pytest
import torch
from support import op_reference
from support.op_cases import draw, draws_make, make_square_sum
from support.op_devices import DEVICES, device
from support.op_tolerance import check, compare

pytestmark = pytest.mark.pairs

NO_LSE = np.zeros((1, 2))


@pytest.fixture(params=DEVICES)
def dev(request):
    return device(request.param)


def logprobs_of(dev, logits, ids, what="logp"):
    """The log-probability of an id in each row, or what else logprob writes."""
    (T, V), start = logits.shape, np.arange(len(logits) + 1, dtype=np.int32)
    return dev.call(
        "logprob", lse=(T, 2), logp=(T,), logits=logits, ids=ids, start=start, T=T, V=V
    )[what]


def lse_of(dev, logits):
    return logprobs_of(dev, logits, np.zeros(len(logits), np.int32), "lse")


# ---- logprob ----


def test_lse_of_a_large_vocabulary_is_exact_to_rounding(dev):
    logits = (np.random.default_rng(0).standard_normal((3, 151_936)) * 3).astype(np.float32)
    logits[1] = np.sort(logits[1])  # every block has a new largest
    logits[2, 100_000] = 90.0
    args = dict(
        logits=logits, ids=np.zeros(0, np.int32), start=np.zeros(4, np.int32), T=3, V=151_936
    )
    got = dev.call("logprob", lse=(3, 2), logp=(0,), **args)["lse"]
    np.testing.assert_allclose(got[:, 0], op_reference.logsumexp(logits.astype(float)), rtol=1.2e-7)
    assert not got[:, 1].any()


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
    got = dev.call("logprob", lse=(8, 2), logp=(8,), logits=logits, ids=ids, start=start, T=8, V=V)
    lse = torch.logsumexp(torch.from_numpy(logits).double(), -1).numpy()
    np.testing.assert_allclose(got["lse"].sum(axis=1), lse, rtol=1e-6)
    np.testing.assert_array_equal(got["logp"][[0, 1, 2, 5, 6]], [nan, 0.0, nan, 0.0, -inf])


HUGE = (0.0, 90.0, 240.0, 300.0, -1e3, 1e6, -1e6, 1e8, -1e20, 1e30)


def test_logprobs_of_huge_logits_lose_no_digits(dev):
    rng, V = np.random.default_rng(0), 3001
    steps = np.maximum(np.abs(np.array(HUGE)) * 1e-7, 0.5)[:, None]
    logits = (np.array(HUGE)[:, None] + rng.standard_normal((len(HUGE), V)) * steps).astype("f4")
    T, ids = len(HUGE), rng.integers(0, V, len(HUGE)).astype(np.int32)
    relative = logits.astype(float) - logits.max(axis=1, keepdims=True).astype(float)
    exact = op_reference.log_softmax(relative)
    own = np.arange(T)
    bar = {"rtol": 1e-6, "atol": 1.6e-5}  # below 256, half of lse's last place
    lse, logp = (logprobs_of(dev, logits, ids, what) for what in ("lse", "logp"))
    np.testing.assert_allclose(logp, exact[own, ids], **bar)
    assert (lse[:, 1] != 0).any() and not lse[:3, 1].any()  # ordinary logits keep their bits
    shape = {"logits": logits, "lse": lse, "T": T, "V": V}
    top = dev.call("topk_logprob", ids=(T, 5), logp=(T, 5), K=5, **shape)
    np.testing.assert_allclose(top["logp"], exact[own[:, None], top["ids"]], **bar)
    many = dev.call("topk_logprob", ids=(T, V), logp=(T, V), K=V, **shape)
    np.testing.assert_allclose(many["logp"], exact[own[:, None], many["ids"]], **bar)
    for kind in ({}, {"top_p": 0.6}, {"top_k": 40}, {"temperature": 0.0}):
        draws = [draw(sample=t, **kind) for t in range(T)]
        drawn = dev.call("sample", ids=(T,), logp=(T,), draws=draws, **shape)
        train = logprobs_of(dev, logits, drawn["ids"])
        if not {"top_p", "top_k"} & set(kind):  # the sampler's are the trainer's, bit for bit
            np.testing.assert_array_equal(drawn["logp"], train)
        kept = [op_reference.kept(row, one) for row, one in zip(relative, draws, strict=True)]
        mass = [np.exp(exact[t, ids]).sum() if kind else 1.0 for t, ids in enumerate(kept)]
        if kind.get("temperature") != 0.0:
            wanted = exact[own, drawn["ids"]] - np.log(mass)
            np.testing.assert_allclose(drawn["logp"], wanted, rtol=1e-5, atol=5e-5)
    start, dlogp = np.arange(T + 1, dtype=np.int32), np.ones(T)
    call = {"dlogits": (T, V), "dlogp": dlogp, "ids": ids, "start": start, "first": 0}
    got = dev.call("logprob_backward", **call, **shape)["dlogits"]
    wanted = -np.exp(exact)
    wanted[own, ids] += 1.0
    limit = 5e-5 if dev.real == np.float32 else 5e-3
    np.testing.assert_allclose(got, wanted, rtol=limit, atol=1e-9)


def test_logprob_backward_of_a_row_without_weight_is_zero_whatever_its_logits(dev):
    logits, lse = np.full((3, 37), np.nan), np.full((3, 2), np.nan)
    start = np.array([0, 0, 2, 3], np.int32)
    args = dict(
        logits=logits,
        lse=lse,
        dlogp=np.array([1.0, -1.0, 0.0]),
        ids=np.array([4, 4, 9], np.int32),
        start=start,
    )
    got = dev.call("logprob_backward", dlogits=(3, 37), **args, T=3, V=37, first=0)["dlogits"]
    np.testing.assert_array_equal(got, np.zeros((3, 37)))


def test_topk_puts_nan_last_and_the_lower_id_first(dev):
    nan, inf = np.nan, np.inf
    logits = np.array([[nan, 1, 2, 2, nan, -inf, 0.0, -0.0, 2, inf]], np.float32)
    got = dev.call(
        "topk_logprob",
        ids=(1, 10),
        logp=(1, 10),
        logits=logits,
        lse=np.zeros((1, 2)),
        T=1,
        V=10,
        K=10,
    )
    np.testing.assert_array_equal(got["ids"], [[9, 2, 3, 8, 1, 6, 7, 5, 0, 4]])
    np.testing.assert_array_equal(got["logp"], logits[:, got["ids"][0]])
    many = np.full((1, 1000), nan, np.float32)
    many[0, [700, 300]] = 1, 1
    got = dev.call(
        "topk_logprob", ids=(1, 3), logp=(1, 3), logits=many, lse=np.zeros((1, 2)), T=1, V=1000, K=3
    )
    np.testing.assert_array_equal(got["ids"], [[300, 700, 0]])


def test_topk_equals_torchs_on_a_large_vocabulary(dev):
    logits = np.random.default_rng(0).standard_normal((2, 151_936)).astype(np.float32)
    logits[1].sort()  # every logit gets into the heap
    lse = np.zeros((2, 2))
    got = dev.call(
        "topk_logprob", ids=(2, 32), logp=(2, 32), logits=logits, lse=lse, T=2, V=151_936, K=32
    )
    np.testing.assert_array_equal(
        got["logp"], torch.topk(torch.from_numpy(logits), 32).values.numpy()
    )
    np.testing.assert_array_equal(np.take_along_axis(logits, got["ids"], 1), got["logp"])


# ---- sample ----


def test_philox_is_random123s():
    assert op_reference.philox((0,) * 4, (0,) * 2) == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    ones = 0xFFFFFFFF
    assert op_reference.philox((ones,) * 4, (ones,) * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert op_reference.philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def sample_many(dev, row, T, **changes):
    """T draws from one row of logits."""
    V = len(row)
    logits = np.repeat(row[None].astype(np.float32), T, axis=0)
    lse = op_reference.parts(np.repeat(op_reference.logsumexp(logits[:1].astype(float)), T))
    draws = [draw(sample=t % 256, pos=t // 256, **changes) for t in range(T)]
    return dev.call("sample", ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)


@pytest.mark.parametrize("cut", [dict(), dict(top_k=11), dict(top_p=0.8)])
def test_sample_draws_each_id_as_often_as_it_is_likely(dev, cut):
    """Fewer where a draw is slow: which id each one must give is what test_ops.py compares."""
    T = 20_000 if "emulated" not in dev.name else 5_000
    row = np.random.default_rng(3).standard_normal(37) * 1.2
    row = row.astype(np.float32).astype(float)
    got = sample_many(dev, row, T, **cut)
    own = op_reference.kept(row, draw(**cut))
    p = np.exp(row[own]) / np.exp(row[own]).sum()
    count = np.bincount(got["ids"], minlength=37)
    assert count.sum() == count[own].sum() == T
    chi_square = np.sum((count[own] - T * p) ** 2 / (T * p))
    degrees = len(own) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 8, chi_square


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, 1.0), (700, 1.0), (0, 0.9), (0, 0.999), (400, 0.8), (2, 0.01)]
)
def test_sample_keeps_exactly_what_top_k_and_top_p_say(dev, top_k, top_p):
    rng = np.random.default_rng(1)
    for row in (rng.standard_normal(1500), np.round(rng.standard_normal(1500) * 2), np.zeros(1500)):
        row = (row + 0.0).astype(np.float32).astype(float)
        own = op_reference.kept(row, draw(top_k=top_k, top_p=top_p))
        got = sample_many(dev, row, 300, top_k=top_k, top_p=top_p)
        assert np.isin(got["ids"], own).all()
        # the mass of the kept is in every logp, so a set that is wrong by one id shows
        np.testing.assert_allclose(
            got["logp"], row[got["ids"]] - op_reference.logsumexp(row[own][None]), atol=3e-6
        )


def test_sample_of_a_large_vocabulary(dev):
    rng, V = np.random.default_rng(2), 600_001  # more than 512 parts of 1024 ids
    row = rng.standard_normal(V).astype(np.float32).astype(float)
    kinds = [dict(), dict(top_k=50), dict(top_k=9000), dict(top_p=0.4), dict(temperature=0.0)]
    draws, T = draws_make(kinds), len(kinds)
    logits = np.repeat(row[None].astype(np.float32), T, axis=0)
    lse = op_reference.parts(op_reference.logsumexp(logits.astype(float)).astype(np.float32))
    compare(dev, "sample", dict(ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V))


def test_sample_greedy_takes_the_lowest_of_equals_and_never_nan(dev):
    rows = np.zeros((4, 100), np.float32)
    rows[0, [40, 60]] = 3
    rows[1] = np.nan
    rows[2, 7], rows[2, 8] = np.nan, -0.0
    rows[3] = -np.inf
    draws = [draw(temperature=0.0, top_k=2) for _ in rows]
    got = dev.call(
        "sample",
        ids=(4,),
        logp=(4,),
        logits=rows,
        lse=op_reference.parts(np.full(4, 5.0)),
        draws=draws,
        T=4,
        V=100,
    )
    np.testing.assert_array_equal(got["ids"], [40, 0, 0, 0])
    np.testing.assert_array_equal(got["logp"], [-2.0, np.nan, -5.0, -np.inf])


def test_sample_without_cuts_gives_the_trainers_logp_bit_for_bit(dev):
    logits, T, V = np.random.default_rng(0).standard_normal((9, 301)).astype(np.float32), 9, 301
    draws = [draw(sample=t, top_k=V if t % 2 else -1) for t in range(T)]
    none, start = np.zeros(0, np.int32), np.zeros(T + 1, np.int32)
    lse = dev.call(
        "logprob", lse=(T, 2), logp=(0,), logits=logits, ids=none, start=start, T=T, V=V
    )["lse"]
    drawn = dev.call("sample", ids=(T,), logp=(T,), logits=logits, lse=lse, draws=draws, T=T, V=V)
    start = np.arange(T + 1, dtype=np.int32)
    train = dev.call(
        "logprob", lse=(T, 2), logp=(T,), logits=logits, ids=drawn["ids"], start=start, T=T, V=V
    )
    np.testing.assert_array_equal(drawn["logp"], train["logp"])


def test_sample_of_a_row_without_mass_gives_its_largest(dev):
    rows = np.full((3, 50), -np.inf, np.float32)
    rows[1, 9] = np.inf
    rows[2, [4, 5]] = np.nan, 1.0
    for changes in (dict(), dict(top_k=5), dict(top_p=0.5), dict(top_k=5, top_p=0.5)):
        draws = [draw(**changes) for _ in rows]
        lse = op_reference.parts(np.array([-np.inf, np.inf, np.nan]))
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
        ours = dev.call(
            "adamw",
            **ours | dict(w=(n,), before=ours["w"]),
            g=g,
            n=n,
            step=step,
            scale=0.25,
            **scalars,
        )
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
    sums = {
        float(device(dev.name, threads).call("square_sum", **args)["total"][0])
        for threads in (1, 2, 3)
    }
    assert len(sums) == 1


def test_square_sum_neither_overflows_nor_vanishes(dev):
    g = np.array([1e30, 1e-30] * 9, np.float32)
    for part in (g[::2], g[1::2]):
        total = dev.call("square_sum", total=np.zeros(1), g=part, n=9)["total"]
        np.testing.assert_allclose(total, np.sum(part.astype(float) ** 2), rtol=1e-12)


@pytest.mark.parametrize("turned", (0, 1))
def test_gram_and_mix_are_computed_in_double(dev, turned):
    """Of columns that differ by less than f32 can tell in their products."""
    rng, n, R = np.random.default_rng(0), 517, 21
    x = (1 + 1e-4 * rng.standard_normal((n, R))).astype(np.float32)
    small, wide = rng.standard_normal((R, R)), x.astype(float)
    sizes = dict(x=x.T.copy() if turned else x, n=n, R=R, turned=turned)
    found = dev.call("gram", c=np.zeros((R, R)), **sizes)["c"]
    np.testing.assert_allclose(found, wide.T @ wide, rtol=1e-13)
    assert (found == found.T).all()
    product = wide @ (small.T if turned else small)
    before = np.ascontiguousarray(product.T if turned else product, np.float32)
    mixed = dev.call("mix", y=before.shape, before=before, k=small, **sizes)["y"]
    left = before - (product.T if turned else product)  # what f32 has lost of the product
    np.testing.assert_allclose(mixed, left, atol=1e-12)


def test_gram_and_mix_are_the_same_whatever_the_threads(dev):
    rng, n, R = np.random.default_rng(0), 3001, 37
    x = rng.standard_normal((n, R))
    found = set()
    for threads in (1, 2, 3):
        on = device(dev.name, threads)
        sizes = dict(x=x, n=n, R=R, turned=0)
        gram = on.call("gram", c=np.zeros((R, R)), **sizes)["c"]
        mixed = on.call("mix", y=(n, R), before=x, k=gram / n, **sizes)["y"]
        found.add(gram.tobytes() + mixed.tobytes())
    assert len(found) == 1
