"""The gradient of log-probabilities where forward has told each row's logΣexp: the logits are made
again stretch by stretch of the vocabulary (csrc/functional/tensor_ops.c, STRETCH, 3,456 ids), and
what comes of it is what the whole rows give."""

import numpy as np
import pytest
import tinsmith.ops as ops
import tinsmith.torch as tt
import torch
from support import cuda_arrays, op_reference
from support.op_devices import emulated_library, from_bf16, to_bf16
from tinsmith import _core

STRETCH = 3456
V, D, N = 2 * STRETCH + 711, 21, 13  # two stretches and a part


def inputs(dtype="f32", n=N, v=V, d=D, k=5):
    """hidden, weight, ids that repeat and that begin and end a stretch, and their gradient."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((n, d)).astype("f4"), rng.standard_normal((v, d)).astype("f4")
    some = [i for i in (0, STRETCH - 1, STRETCH, 2 * STRETCH - 1, 2 * STRETCH, v - 1) if i < v]
    ids, grad = rng.choice(some, (n, k)), rng.standard_normal((n, k)).astype("f4")
    grad[1:2] = 0
    if dtype == "bf16":
        x, w = to_bf16(x), to_bf16(w)
    return x, w, ids, grad


def widened(x):
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(float)


def exact_gradients(x, w, ids, grad):
    """In float64, from the formula."""
    x, w = widened(x), widened(w)
    start = np.arange(len(x) + 1) * ids.shape[1]
    logits = x @ w.T
    args = {"logits": logits, "ids": ids.ravel(), "start": start}
    lse = op_reference.logsumexp(logits)
    lse = op_reference.parts(lse)
    dlogits = op_reference.logprob_backward(lse=lse, dlogp=grad.ravel().astype(float), **args)
    return lse, dlogits["dlogits"] @ w, dlogits["dlogits"].T @ x


def error(got, exact):
    return np.linalg.norm(widened(got) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_stretches_give_what_whole_rows_give(dtype):
    x, w, ids, grad = inputs(dtype)
    lse, dx, dw = exact_gradients(x, w, ids, grad)
    forward = ops.gather(x, w, ids)
    np.testing.assert_allclose(forward.lse, lse, rtol=1e-6)
    got = ops.gather(x, w, ids, grad, lse=forward.lse)
    whole = ops.gather(x, w, ids, grad)
    assert got.logprobs is None and got.drows.dtype == x.dtype and got.dweight.dtype == w.dtype
    np.testing.assert_array_equal(got.drows, whole.drows)
    np.testing.assert_array_equal(got.dweight, whole.dweight)
    bar = 2e-5 if dtype == "f32" else 4e-3
    assert error(got.drows, dx) < bar and error(got.dweight, dw) < bar
    assert not widened(got.drows)[1].any()


def test_more_rows_than_a_chunk_of_stretches_has():
    x, w, ids, grad = inputs(n=9800, v=STRETCH + 5, d=3, k=1)
    lse, dx, dw = exact_gradients(x, w, ids, grad)
    got = ops.gather(x, w, ids, grad, lse=lse.astype("f4"))
    assert error(got.drows, dx) < 2e-5 and error(got.dweight, dw) < 2e-5
    some = [9799, 3, 9709, 9708]
    few = ops.gather(x[some], w, ids[some], grad[some], lse=lse[some].astype("f4"))
    np.testing.assert_array_equal(few.drows, got.drows[some])


@pytest.mark.parametrize("want", [(True, False), (False, True), (False, False)])
def test_only_what_is_wanted_is_made(want):
    x, w, ids, grad = inputs()
    lse = ops.gather(x, w, ids).lse
    got = ops.gather(x, w, ids, grad, lse=lse, want=want)
    both = ops.gather(x, w, ids, grad, lse=lse)
    for one, other, wanted in zip(got[1:3], both[1:3], want, strict=True):
        if wanted:
            np.testing.assert_array_equal(one, other)
        else:
            assert one is None


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logits_whose_lse_is_known(dtype):
    logits = np.random.default_rng(1).standard_normal((4, 301)).astype("f4") * 3
    logits = to_bf16(logits) if dtype == "bf16" else logits
    ids, grad = np.array([[0, 0], [300, 4], [7, 8], [1, 2]]), np.ones((4, 2), "f4")
    lse = ops.gather(logits, None, ids).lse
    got = ops.gather(logits, None, ids, grad, lse=lse)
    np.testing.assert_array_equal(got.drows, ops.gather_logprobs_backward(grad, logits, ids))


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_and_one(n):
    x, w, ids, grad = inputs(n=n, k=1)
    got = ops.gather(x, w, ids, grad, lse=ops.gather(x, w, ids).lse)
    assert got.drows.shape == (n, D) and got.dweight.shape == (V, D)
    assert bool(got.dweight.any()) == bool(n)


def test_what_does_not_fit_is_refused():
    x, w, ids, grad = inputs()
    with pytest.raises(ValueError, match="lse must be float32 with 26 numbers; it has 24"):
        ops.gather(x, w, ids, grad, lse=np.zeros((N - 1, 2), "f4"))
    with pytest.raises(ValueError, match="only a gradient is to be had"):
        ops.gather(x, w, ids, lse=np.zeros((N, 2), "f4"))
    with pytest.raises(IndexError, match="the vocabulary has 7623 ids"):
        ops.gather(x, w, ids + V, grad, lse=np.zeros((N, 2), "f4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_under_a_trained_weight(dtype):
    torch.manual_seed(0)
    x, w = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((2, N, D), (V, D)))
    x64, w64 = (a.detach().double().requires_grad_() for a in (x, w))
    ids, by = torch.randint(0, V, (2, N, 3)), torch.randn(2, N, 3)
    (tt.gather_logprobs(x, ids, weight=w) * by).sum().backward()
    (torch.log_softmax(x64 @ w64.T, -1).gather(-1, ids) * by).sum().backward()
    for one, exact in ((x, x64), (w, w64)):
        error = (one.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < (5e-3 if dtype == torch.bfloat16 else 2e-5)


def test_gradients_are_finite_differences():
    x, w, ids, grad = inputs(n=2, d=4)
    got = ops.gather(x, w, ids, grad, lse=ops.gather(x, w, ids).lse)

    def loss(x64, w64):
        logp = op_reference.log_softmax(x64 @ w64.T)
        return (np.take_along_axis(logp, ids, axis=1) * grad).sum()

    rng, step = np.random.default_rng(2), 1e-5
    for _ in range(3):
        u, v = rng.standard_normal(x.shape), rng.standard_normal(w.shape)
        up, down = (loss(x + s * u, w + s * v) for s in (step, -step))
        want = (got.drows * u).sum() + (got.dweight * v).sum()
        assert (up - down) / (2 * step) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_on_a_gpu(dtype):
    emulated_library()
    v = STRETCH + 71
    x, w, ids, grad = inputs(dtype, n=5, v=v, d=16)
    lse, dx, dw = exact_gradients(x, w, ids, grad)
    _core.cuda_arrays_through("cuda-emulated")
    try:
        there = cuda_arrays.Tensor(x), cuda_arrays.Tensor(w)
        forward = ops.gather(*there, ids)
        got = ops.gather(*there, ids, grad, lse=forward.lse)
    finally:
        _core.cuda_arrays_through("cuda")
    np.testing.assert_allclose(forward.lse.array, lse, rtol=1e-2)
    for one, exact in ((got.drows, dx), (got.dweight, dw)):
        assert error(one.array, exact) < 1e-2
