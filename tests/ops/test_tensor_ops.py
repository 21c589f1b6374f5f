"""tinsmith.ops: log-probabilities and divergences of one's own arrays, against float64.

Sizes are such that the chunk loop is cut (CHUNK rows at a vocabulary of V), that rows do not fill a
vector, and that hidden states and weights come in both element types."""

# ruff: noqa: C408 - settings are keyword arguments, and read as such

import threading
from pathlib import Path

import numpy as np
import pytest
import tinsmith.ops as ops
import torch
from support import op_reference, opsd_reference
from support.op_devices import from_bf16, to_bf16
from tinsmith import _core

N, V, D = 13, 301, 21


def hidden_and_weight(dtype="f32", n=N, v=V, d=D, seed=0):
    """(hidden, weight) as given, and in float64."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((n, d)).astype("f4"), rng.standard_normal((v, d)).astype("f4")
    if dtype == "f32":
        return (x, w), (x.astype(float), w.astype(float))
    x, w = to_bf16(x), to_bf16(w)
    return (x, w), (from_bf16(x).astype(float), from_bf16(w).astype(float))


def close(got, exact, dtype="f32", rtol=2e-5):
    """Norms: f32 sums, or those rounded to bf16 at the end."""
    got = from_bf16(got) if got.dtype == np.uint16 else got
    assert got.shape == exact.shape
    error = np.linalg.norm(got - exact) / (np.linalg.norm(exact) or 1)
    assert error < (rtol if dtype == "f32" else 4e-3), error


# ---- log-probabilities ----


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("k", [0, 1, 32, V])
def test_topk_logprobs(dtype, k):
    (x, w), (x64, w64) = hidden_and_weight(dtype)
    logp = op_reference.log_softmax(x64 @ w64.T)
    ids, got = ops.topk_logprobs(x, k, weight=w)
    assert ids.dtype == np.int32 and ids.shape == got.shape == (N, k)
    np.testing.assert_allclose(got, -np.sort(-logp, axis=1)[:, :k], atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(logp, ids, axis=1), got, atol=2e-5)
    again = ops.topk_logprobs((x64 @ w64.T).astype(np.float32), k)
    np.testing.assert_allclose(again[1], got, atol=2e-5)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 5)])
def test_gather_logprobs_and_its_gradient(dtype, shape):
    (x, w), (x64, w64) = hidden_and_weight(dtype)
    rng = np.random.default_rng(1)
    ids, grad = rng.integers(0, V, shape), rng.standard_normal(shape).astype("f4")
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x64, w64))
    logp = torch.log_softmax(tx @ tw.T, dim=-1).gather(-1, torch.tensor(ids).reshape(N, -1))
    (logp * torch.tensor(grad).reshape(N, -1)).sum().backward()
    got = ops.gather_logprobs(x, ids, weight=w)
    np.testing.assert_allclose(got, logp.detach().numpy().reshape(shape), atol=2e-5)
    dx, dw = ops.gather_logprobs_backward(grad, x, ids, weight=w)
    assert dx.dtype == x.dtype and dw.dtype == w.dtype
    close(dx, tx.grad.numpy(), dtype)
    close(dw, tw.grad.numpy(), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gather_logprobs_of_logits_and_its_gradient(dtype):
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((2, 5, V)) * 3).astype("f4")
    given = to_bf16(logits) if dtype == "bf16" else logits
    exact = (from_bf16(given) if dtype == "bf16" else given).astype(float).reshape(10, V)
    ids, grad = rng.integers(0, V, (2, 5, 3)), rng.standard_normal((2, 5, 3)).astype("f4")
    start = np.arange(0, 31, 3)
    args = dict(logits=exact, ids=ids.ravel(), start=start)
    logp = op_reference.logprob(**args)
    np.testing.assert_allclose(
        ops.gather_logprobs(given, ids), logp["logp"].reshape(2, 5, 3), atol=2e-6
    )
    want = op_reference.logprob_backward(lse=logp["lse"], dlogp=grad.ravel(), **args)["dlogits"]
    got = ops.gather_logprobs_backward(grad, given, ids)
    assert got.dtype == given.dtype
    close(got, want.reshape(2, 5, V), dtype)


def test_weighted_cross_entropy_is_tinkers_sum():
    (x, w), (x64, w64) = hidden_and_weight()
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, V, (N, 4)), rng.random((N, 4)).astype("f4")
    weights[2] = 0
    logp = np.take_along_axis(op_reference.log_softmax(x64 @ w64.T), ids, axis=1)
    loss = ops.weighted_cross_entropy(x, w, ids, weights)
    np.testing.assert_allclose(loss, -(weights * logp).sum(), rtol=1e-6)
    got = ops.weighted_cross_entropy_backward(0.5, x, w, ids, weights)
    want = ops.gather_logprobs_backward((-0.5 * weights).astype("f4"), x, ids, weight=w)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not got[0][2].any()


def test_chunks_change_no_bit_and_bound_the_memory():
    """A vocabulary so large that 128 MiB hold 60 rows: 130 rows are three chunks."""
    n, v, d = 130, 550_000, 8
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((n, d)).astype("f4"), rng.standard_normal((v, d)).astype("f4")
    ids = rng.integers(0, v, n)
    whole = ops.gather_logprobs(x, ids, weight=w)
    some = [70, 3, 129]
    np.testing.assert_array_equal(ops.gather_logprobs(x[some], ids[some], weight=w), whole[some])
    grad = np.zeros(n, np.float32)
    grad[some] = 1  # in each chunk one
    dx, dw = ops.gather_logprobs_backward(grad, x, ids, weight=w)
    alone, part = ops.gather_logprobs_backward(grad[some], x[some], ids[some], weight=w)
    np.testing.assert_array_equal(alone, dx[some])
    assert part.any(axis=1).all()
    np.testing.assert_allclose(dw, part, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_and_one(n):
    (x, w), _ = hidden_and_weight(n=n)
    ids = np.zeros(n, np.int64)
    assert ops.gather_logprobs(x, ids, weight=w).shape == (n,)
    dx, dw = ops.gather_logprobs_backward(np.ones(n, np.float32), x, ids, weight=w)
    assert dx.shape == (n, D) and dw.shape == (V, D)
    if not n:
        assert not dw.any()
    assert ops.topk_logprobs(x, 3, weight=w)[0].shape == (n, 3)
    assert ops.generalized_jsd((x, w), (x, w), reduction="sum") == pytest.approx(0, abs=1e-6)


# ---- divergence ----

SETTINGS = [
    *(dict(beta=beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)),
    *(dict(reduction=r) for r in ops.REDUCTIONS),
    dict(beta=0.0, temperature=2.5),
    dict(beta=0.3, top_k=7),
    dict(beta=1.0, top_k=1, reduction="sum"),
    dict(beta=0.5, token_clip=0.003, temperature=0.7),
    dict(beta=0.1, reduction="none", top_k=5),
    dict(logits_are_probs=True),
    dict(logits_are_probs=True, beta=0.0, reduction="mean"),
    dict(logits_are_probs=True, beta=1.0, reduction="none", token_clip=0.01),
]


def logits_of(settings, shape, seed=0):
    rng = np.random.default_rng(seed)
    student = (rng.standard_normal(shape) * 2).astype("f4")
    teacher = (student + rng.standard_normal(shape)).astype("f4")
    if settings.get("logits_are_probs"):
        student, teacher = (torch.tensor(x).softmax(-1).numpy() for x in (student, teacher))
    return student, teacher


def oracle(student, teacher, labels, settings, grad=None):
    """OPSD's loss in float64, and its gradient."""
    x = torch.tensor(np.asarray(student, float), requires_grad=True)
    y = torch.tensor(np.asarray(teacher, float))
    labels = None if labels is None else torch.tensor(labels)
    loss = opsd_reference.generalized_jsd_loss(x, y, labels, **settings)
    loss.backward(torch.ones_like(loss) if grad is None else torch.tensor(grad, dtype=loss.dtype))
    return loss.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("with_labels", [False, True], ids=["all rows", "labels"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_generalized_jsd_is_opsds(settings, with_labels):
    shape = (3, 4, 101)
    student, teacher = logits_of(settings, shape)
    labels = np.random.default_rng(5).integers(-1, 2, shape[:2]) if with_labels else None
    labels = None if labels is None else np.where(labels < 0, -100, labels)
    plain, _ = oracle(student, teacher, labels, settings)
    grad = np.random.default_rng(6).standard_normal(plain.shape).astype("f4")
    loss, gradient = oracle(student, teacher, labels, settings, grad)
    got = ops.generalized_jsd(student, teacher, labels, **settings)
    np.testing.assert_allclose(got, loss, rtol=3e-6, atol=1e-8)
    dstudent = ops.generalized_jsd_backward(grad, student, teacher, labels, **settings)
    close(dstudent, gradient, rtol=3e-6)


@pytest.mark.parametrize("settings", [dict(beta=0.1), dict(beta=1.0), dict(top_k=9)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_generalized_jsd_of_hidden_states_and_weights(settings, dtype):
    (x, w), (x64, w64) = hidden_and_weight(dtype)
    (y, u), (y64, u64) = hidden_and_weight(dtype, d=D + 4, seed=1)
    labels = np.array([-100, 3] * N)[:N]
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x64, w64))
    loss = opsd_reference.generalized_jsd_loss(
        tx @ tw.T, torch.tensor(y64 @ u64.T), torch.tensor(labels), **settings
    )
    loss.backward()
    got = ops.generalized_jsd((x, w), (y, u), labels, **settings)
    np.testing.assert_allclose(got, loss.item(), rtol=2e-5)
    dx, dw = ops.generalized_jsd_backward(1.0, (x, w), (y, u), labels, **settings)
    close(dx, tx.grad.numpy(), dtype)
    close(dw, tw.grad.numpy(), dtype)
    mixed = ops.generalized_jsd((x, w), (y64 @ u64.T).astype("f4"), labels, **settings)
    np.testing.assert_allclose(mixed, loss.item(), rtol=2e-5)


def test_generalized_jsd_gradient_by_finite_differences():
    student, teacher = (x.astype(np.float64) for x in logits_of({}, (4, 19)))
    d, h = np.random.default_rng(7).standard_normal((4, 19)), 1e-2
    settings = dict(beta=0.3, temperature=1.3, reduction="mean")
    gradient = ops.generalized_jsd_backward(
        1.0, student.astype("f4"), teacher.astype("f4"), **settings
    )
    sides = [
        ops.generalized_jsd((student + s * h * d).astype("f4"), teacher.astype("f4"), **settings)
        for s in (1, -1)
    ]
    np.testing.assert_allclose(np.sum(gradient * d), (sides[0] - sides[1]) / (2 * h), rtol=2e-3)


def test_a_masked_row_may_hold_anything():
    student, teacher = logits_of({}, (3, 50))
    labels = np.array([1, -100, 1])
    clean = ops.generalized_jsd(student, teacher, labels)
    student[1] = np.nan
    assert ops.generalized_jsd(student, teacher, labels) == clean
    gradient = ops.generalized_jsd_backward(1.0, student, teacher, labels)
    assert not gradient[1].any() and np.isfinite(gradient).all()


def test_no_label_that_counts_gives_nan_as_opsd_does():
    student, teacher = logits_of({}, (2, 30))
    labels = np.full(2, -100)
    assert np.isnan(ops.generalized_jsd(student, teacher, labels))
    assert not ops.generalized_jsd_backward(1.0, student, teacher, labels).any()


# ---- mistakes ----

X, W, IDS = np.zeros((4, 6), np.float32), np.zeros((9, 6), np.float32), np.zeros(4, np.int64)
MISTAKES = {
    "k": (lambda: ops.topk_logprobs(X, 10, weight=W), ValueError, "vocabulary's 9, not 10"),
    "k < 0": (lambda: ops.topk_logprobs(X, -1), ValueError, "not -1"),
    "f64": (lambda: ops.topk_logprobs(X.astype(float), 2), TypeError, "logits.*not float64"),
    "ints": (lambda: ops.topk_logprobs(X.astype(int), 2), TypeError, "not of integers"),
    "list": (lambda: ops.topk_logprobs([[1.0]], 1), TypeError, "not list"),
    "order": (lambda: ops.topk_logprobs(X.T, 1), ValueError, "logits must be C-contiguous"),
    "width": (lambda: ops.gather_logprobs(X, IDS, weight=W[:, :5].copy()), ValueError, r"\(V, 6\)"),
    "ids": (lambda: ops.gather_logprobs(X, IDS[:3], weight=W), ValueError, r"\(4,\).*not \(3,\)"),
    "float ids": (lambda: ops.gather_logprobs(X, X[:, 0], weight=W), TypeError, "whole numbers"),
    "id": (
        lambda: ops.gather_logprobs(X, IDS + 9, weight=W),
        IndexError,
        r"ids\[0\] is 9.*has 9 ids",
    ),
    "huge id": (
        lambda: ops.gather_logprobs(X, IDS + 2**40, weight=W),
        IndexError,
        "no vocabulary has",
    ),
    "grad": (
        lambda: ops.gather_logprobs_backward(X[0, :3], X, IDS, weight=W),
        ValueError,
        r"grad must be of ids' shape \(4,\), not \(3,\)",
    ),
    "weights": (
        lambda: ops.weighted_cross_entropy(X, W, IDS, np.ones((4, 2))),
        ValueError,
        r"weights must be of ids' shape \(4,\), not \(4, 2\)",
    ),
    "renamed": (lambda: ops.linear_cross_entropy, AttributeError, "weighted_cross_entropy is its"),
    "beta": (lambda: ops.generalized_jsd(X, X, beta=1.5), ValueError, r"\[0, 1\], not 1.5"),
    "beta nan": (lambda: ops.generalized_jsd(X, X, beta=np.nan), ValueError, "not nan"),
    "temperature": (lambda: ops.generalized_jsd(X, X, temperature=-1), ValueError, "not -1"),
    "a cold temperature": (
        lambda: ops.generalized_jsd(X, X, temperature=1e-40),
        ValueError,
        "from 1e-30 to 1e.30, no",
    ),
    "reduction": (lambda: ops.generalized_jsd(X, X, reduction="max"), ValueError, "not 'max'"),
    "clip": (lambda: ops.generalized_jsd(X, X, token_clip=np.nan), ValueError, "NaN"),
    "top_k": (lambda: ops.generalized_jsd(X, X, top_k=7), ValueError, "vocabulary's 6, not 7"),
    "setting": (lambda: ops.generalized_jsd(X, X, betta=1), TypeError, "betta"),
    "rows": (lambda: ops.generalized_jsd(X, X[:3]), ValueError, r"\(4,\), teacher \(3,\)"),
    "vocabulary": (lambda: ops.generalized_jsd((X, W), X), ValueError, "9, teacher 4 over 6"),
    "labels": (lambda: ops.generalized_jsd(X, X, IDS[:3]), ValueError, r"labels must be \(4,\)"),
    "probs": (
        lambda: ops.generalized_jsd((X, W), (X, W), logits_are_probs=True),
        ValueError,
        "logits_are_probs",
    ),
    "pair": (lambda: ops.generalized_jsd((X, W, W), X), TypeError, "not 3 arrays"),
    "loss grad": (
        lambda: ops.generalized_jsd_backward(np.ones(2), X, X),
        ValueError,
        r"loss's shape \(\), not \(2,\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake):
    call, kind, sentence = MISTAKES[mistake]
    with pytest.raises(kind, match=sentence):
        call()


# ---- threads ----


def test_a_small_call_does_not_read_the_machines_memory():
    """That took nine tenths of its time: files of /proc and of the control groups at each call."""
    file = Path("/proc/self/io")
    if not file.exists():
        pytest.skip("this system does not count a process's reads")

    def reads():
        return int(dict(line.split(": ") for line in file.read_text().splitlines())["syscr"])

    logits = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    ops.topk_logprobs(logits, 5)
    before = reads()
    for _ in range(100):
        ops.topk_logprobs(logits, 5)
    assert reads() - before < 100


def test_calls_from_many_threads_take_turns_and_let_go_of_the_gil():
    (x, w), _ = hidden_and_weight(n=64, v=20_000, d=64)
    ids = np.arange(64)
    want, seen, ticks, done = ops.gather_logprobs(x, ids, weight=w), [], [], threading.Event()

    def work():
        seen.extend(ops.gather_logprobs(x, ids, weight=w) for _ in range(4))

    def tick():
        while not done.is_set():
            ticks.append(len(seen))

    threads = [threading.Thread(target=work) for _ in range(3)]
    watch = threading.Thread(target=tick)
    for thread in [watch, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watch.join()
    assert len(seen) == 12 and len(ticks) > 12
    for got in seen:
        np.testing.assert_array_equal(got, want)


def test_a_failed_call_leaves_the_device_usable():
    with pytest.raises(IndexError):
        _core.gather(X, W, np.full(4, -1, np.int32), 1, None, None, False, False)
    assert ops.gather_logprobs(X, IDS, weight=W).shape == (4,)
