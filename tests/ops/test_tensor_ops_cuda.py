"""tinsmith.ops on arrays of a GPU, through the emulated one: values against float64, and DLPack's
promises: streams handed over, deleters called once, memory given back.

The bar is torch's: what the same formula errs in torch's bf16, and half a unit of bf16 more."""

import ctypes
import gc
import sys
import threading

import numpy as np
import pytest
import tinsmith.ops as ops
import tinsmith.torch as tt
import torch
from support import cuda_arrays, opsd_reference
from support.cuda_arrays import Tensor
from support.emulated_card import emulated_card
from support.op_devices import Device, emulated_library, from_bf16, to_bf16
from support.op_tolerance import EPSILON, error
from tinsmith import _core
from tinsmith.ops.arrays import Loan

N, V, D = 13, 301, 24
TYPES = ("f32", "bf16")


@pytest.fixture(autouse=True)
def emulated():
    emulated_library()
    _core.cuda_arrays_through("cuda-emulated")
    yield
    _core.cuda_arrays_through("cuda")


@pytest.fixture(scope="module")
def card():
    """The emulated card's free bytes, as a function."""
    device = Device("cuda-emulated")

    def free() -> int:
        free_bytes, all_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        device.c.memory(device.pointer, ctypes.byref(free_bytes), ctypes.byref(all_bytes))
        return free_bytes.value

    return free


def given(array, dtype):
    """(on the GPU, its float64) of an array in a type."""
    array = np.asarray(array, np.float32)
    held = to_bf16(array) if dtype == "bf16" else array
    return Tensor(held), (from_bf16(held) if dtype == "bf16" else array).astype(float)


def inputs(dtype, weight_dtype, seed=0, n=N, d=D):
    rng = np.random.default_rng(seed)
    (x, x64) = given(rng.standard_normal((n, d)), dtype)
    (w, w64) = given(rng.standard_normal((V, d)), weight_dtype)
    return (x, w), (x64, w64)


def value(tensor):
    assert isinstance(tensor, Tensor)
    return from_bf16(tensor.array) if tensor.dtype == np.uint16 else tensor.array


def holds(got, exact, in_bf16):
    """At most torch's error in bf16, and half a unit of it."""
    exact, in_bf16 = (t.detach().double().numpy() for t in (exact, in_bf16))
    assert error(value(got), exact) <= error(in_bf16, exact) + EPSILON[2]


def in_torch(function, *arrays):
    """function(*tensors) → (result, loss), in float64 and in bf16: the results and gradients."""
    both = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [torch.tensor(a).to(dtype).requires_grad_() for a in arrays]
        result, loss = function(*leaves)
        loss.backward()
        both.append((result, *(leaf.grad for leaf in leaves)))
    return zip(*both, strict=True)


# ---- values ----


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weight_dtype", TYPES)
@pytest.mark.parametrize("shape", [(N,), (N, 5)])
def test_gather_logprobs_of_hidden_states_and_its_gradients(dtype, weight_dtype, shape):
    (x, w), exact = inputs(dtype, weight_dtype)
    rng = np.random.default_rng(1)
    ids, grad = rng.integers(0, V, shape), rng.standard_normal(shape).astype("f4")

    def formula(x, w):
        logp = torch.log_softmax(x @ w.T, -1).gather(-1, torch.tensor(ids).reshape(N, -1))
        return logp, (logp * torch.tensor(grad).reshape(N, -1)).sum()

    logp, dx, dw = in_torch(formula, *exact)
    got = ops.gather_logprobs(x, ids, weight=w)
    assert got.shape == shape and got.dtype == np.float32
    holds(Tensor(got.array.reshape(N, -1)), *logp)
    for where in (lambda a: a, Tensor):  # ids and grad on the host, or beside the rows
        gdx, gdw = ops.gather_logprobs_backward(where(grad), x, where(ids), weight=w)
        assert (gdx.dtype, gdw.dtype) == (x.dtype, w.dtype)
        holds(gdx, *dx)
        holds(gdw, *dw)


@pytest.mark.parametrize("dtype", TYPES)
def test_gather_logprobs_of_logits_and_its_gradient(dtype):
    rng = np.random.default_rng(2)
    logits, exact = given(rng.standard_normal((2, 5, V)) * 3, dtype)
    ids, grad = rng.integers(0, V, (2, 5, 3)), rng.standard_normal((2, 5, 3)).astype("f4")

    def formula(logits):
        logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids))
        return logp, (logp * torch.tensor(grad)).sum()

    logp, dlogits = in_torch(formula, exact)
    before = logits.array.copy()
    holds(ops.gather_logprobs(logits, ids), *logp)
    got = ops.gather_logprobs_backward(grad, logits, ids)
    assert got.dtype == logits.dtype and got.shape == logits.shape
    holds(got, *dlogits)
    np.testing.assert_array_equal(logits.array, before)  # borrowed, not written


@pytest.mark.parametrize("dtype", TYPES)
def test_topk_logprobs(dtype):
    logits, exact = given(np.random.default_rng(3).standard_normal((N, V)), dtype)
    ids, logp = ops.topk_logprobs(logits, 7)
    want = torch.log_softmax(torch.tensor(exact), -1).numpy()
    np.testing.assert_array_equal(ids.array, np.argsort(-want, kind="stable")[:, :7])
    np.testing.assert_allclose(logp.array, np.take_along_axis(want, ids.array, 1), atol=2e-6)
    (x, w), (x64, w64) = inputs(dtype, dtype)
    ids, logp = ops.topk_logprobs(x, 7, weight=w)
    want = torch.log_softmax(torch.tensor(x64 @ w64.T), -1).numpy()
    bound = 0.0 if dtype == "bf16" else 2.0**-8 * np.abs(x64 @ w64.T).max()
    np.testing.assert_allclose(logp.array, -np.sort(-want, 1)[:, :7], atol=2e-5 + bound)
    np.testing.assert_allclose(
        logp.array, np.take_along_axis(want, ids.array, 1), atol=2e-5 + bound
    )


def test_linear_cross_entropy_and_its_gradient():
    (x, w), exact = inputs("bf16", "bf16")
    rng = np.random.default_rng(4)
    ids, weights = rng.integers(0, V, (N, 2)), rng.random((N, 2)).astype("f4")

    def formula(x, w):
        logp = torch.log_softmax(x @ w.T, -1).gather(-1, torch.tensor(ids))
        loss = -(torch.tensor(weights) * logp).sum()
        return loss, loss

    loss, dx, dw = in_torch(formula, *exact)
    got = ops.weighted_cross_entropy(x, w, Tensor(ids), Tensor(weights))
    assert got.shape == ()
    holds(got, *loss)
    for got, want in zip(
        ops.weighted_cross_entropy_backward(1.0, x, w, ids, weights), (dx, dw), strict=True
    ):
        holds(got, *want)


SETTINGS = (
    {"beta": 0.0},
    {"beta": 0.5, "temperature": 0.7, "reduction": "sum"},
    {"beta": 1.0, "top_k": 9},
    {"beta": 0.3, "token_clip": 0.01, "reduction": "mean"},
    {"beta": 0.5, "reduction": "none"},
    {"beta": 0.5, "reduction": "none", "top_k": 5},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_generalized_jsd_of_logits_and_its_gradient(dtype, labelled, settings):
    rng = np.random.default_rng(5)
    student, s64 = given(rng.standard_normal((3, 5, V)) * 2, dtype)
    teacher, t64 = given(rng.standard_normal((3, 5, V)) * 2, dtype)
    labels = rng.integers(0, V, (3, 5)) if labelled else None
    if labelled:
        labels[0, :2] = labels[2, 3] = -100
    given_labels = None if labels is None else torch.tensor(labels)
    ours = ops.generalized_jsd(student, teacher, labels, **settings)
    grad = rng.standard_normal(ours.shape).astype("f4") if ours.shape else np.float32(0.8)

    def formula(student):
        loss = opsd_reference.generalized_jsd_loss(
            student, torch.tensor(t64).to(student.dtype), given_labels, **settings
        )
        return loss, (loss * torch.tensor(grad).reshape(loss.shape)).sum()

    loss, dlogits = in_torch(formula, s64)
    shape = ours.shape
    holds(ours, *(each.reshape(shape) for each in loss))
    for where in (lambda a: a, Tensor) if shape else (float,):
        got = ops.generalized_jsd_backward(where(grad), student, teacher, labels, **settings)
        assert got.dtype == student.dtype and got.shape == student.shape
        holds(got, *dlogits)
        if labelled:
            assert not value(got)[labels == -100].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_generalized_jsd_of_hidden_states_and_its_gradients(dtype):
    (x, w), exact = inputs(dtype, dtype)
    (y, u), (y64, u64) = inputs(dtype, dtype, seed=9, d=40)
    y64 = y64 / 2
    y = given(y64, dtype)[0]

    def formula(x, w):
        teacher = torch.tensor(y64).to(x.dtype) @ torch.tensor(u64).to(x.dtype).T
        loss = opsd_reference.generalized_jsd_loss((x @ w.T)[None], teacher[None], reduction="sum")
        return loss, loss

    loss, dx, dw = in_torch(formula, *exact)
    holds(ops.generalized_jsd((x, w), (y, u), reduction="sum"), *loss)
    gdx, gdw = ops.generalized_jsd_backward(1.0, (x, w), (y, u), reduction="sum")
    holds(gdx, *dx)
    holds(gdw, *dw)


def test_logits_of_a_student_beside_hidden_states_of_a_wider_teacher():
    rng = np.random.default_rng(6)
    student, s64 = given(rng.standard_normal((N, V)), "f32")
    (y, u), (y64, u64) = inputs("f32", "f32", d=V - 1)
    want = opsd_reference.generalized_jsd_loss(
        torch.tensor(s64)[None], torch.tensor(y64 @ u64.T)[None], reduction="sum"
    )
    got = float(ops.generalized_jsd(student, (y, u), reduction="sum").array)
    assert got == pytest.approx(float(want), rel=2.0**-7)
    host = ops.generalized_jsd(student.array, (y.array, u.array), reduction="sum")
    assert host == pytest.approx(float(want), rel=1e-5)


def test_no_row_sees_the_cut_of_chunks():
    """Three chunks of 128 MiB of logits, each row as it is alone. The weight is rounded in memory
    that the device reserves for its ops: more than it has before it is told."""
    n, v, d = 130, 550_000, 8
    rng = np.random.default_rng(7)
    x, w = to_bf16(rng.standard_normal((n, d))), rng.standard_normal((v, d)).astype(np.float32)
    ids = rng.integers(0, v, n)
    whole = ops.gather_logprobs(Tensor(x), ids, weight=Tensor(w)).array
    for i in (0, 60, 61, 129):
        one = ops.gather_logprobs(Tensor(x[i : i + 1]), ids[i : i + 1], weight=Tensor(w)).array
        assert one[0] == whole[i]


@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_may_begin_at_any_element(dtype):
    """As a slice of rows of odd width does: no load of 16 bytes begins there."""

    def shifted(tensor):
        whole = np.zeros(tensor.array.size + 1, tensor.dtype)
        whole[1:] = tensor.array.ravel()
        return Tensor(whole[1:].reshape(tensor.shape))

    (x, w), _ = inputs(dtype, dtype)
    logits, _ = given(np.random.default_rng(8).standard_normal((N, V + 3)), dtype)
    ids, grad = np.arange(N), np.linspace(-1, 1, N, dtype=np.float32)
    for rows, weight in ((x, w), (logits, None)):
        want = ops.gather_logprobs_backward(grad, rows, ids, weight=weight)
        moved = weight if weight is None else shifted(weight)
        got = ops.gather_logprobs_backward(grad, shifted(rows), ids, weight=moved)
        for a, b in zip(*((r if weight is not None else (r,)) for r in (got, want)), strict=True):
            np.testing.assert_array_equal(a.array, b.array)


def test_threads_take_turns_and_drop_results_meanwhile():
    (x, w), _ = inputs("bf16", "bf16")
    want = ops.topk_logprobs(x, 5, weight=w)[1].array
    wrong = []

    def work():
        for _ in range(20):
            if not np.array_equal(ops.topk_logprobs(x, 5, weight=w)[1].array, want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_and_one(n):
    (x, w), _ = inputs("bf16", "f32", n=n)
    ids = np.arange(n)
    assert ops.gather_logprobs(x, ids, weight=w).shape == (n,)
    dx, dw = ops.gather_logprobs_backward(np.ones(n, "f4"), x, ids, weight=w)
    assert dx.shape == (n, D) and dw.shape == (V, D)
    assert n or not dw.array.any()
    assert ops.topk_logprobs(x, 0, weight=w)[0].shape == (n, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_tensors_and_gradients_stay_on_their_device(device, dtype):
    _core.cuda_arrays_through("cuda")
    if device == "cuda" and (_core.devices()["cuda"] or not torch.cuda.is_available()):
        pytest.skip("no GPU, or no torch for it")
    rng = np.random.default_rng(10)
    x, w, teacher = (rng.standard_normal(shape) for shape in ((N, D), (V, D), (N, V)))
    x, w, teacher = (torch.tensor(a).to(dtype).double().numpy() for a in (x, w, teacher))
    ids, weights = torch.tensor(rng.integers(0, V, (N, 3))), torch.tensor(rng.random((N, 3)))

    def formula(x, w):
        logits = x @ w.T
        logp = torch.log_softmax(logits, -1).gather(-1, ids)
        other = torch.tensor(teacher).to(x.dtype)
        jsd = opsd_reference.generalized_jsd_loss(logits[None], other[None], reduction="sum")
        return logp, -(weights * logp).sum() + jsd + logp.sum()

    want = in_torch(formula, x, w)
    gx, gw = (torch.tensor(a, dtype=dtype, device=device).requires_grad_() for a in (x, w))
    there, other = ids.to(device), torch.tensor(teacher, dtype=dtype, device=device)
    logp = tt.gather_logprobs(gx, there, weight=gw)
    loss = tt.weighted_cross_entropy(gx, gw, there, weights.to(device)) + logp.sum()
    (loss + tt.generalized_jsd((gx, gw), other, reduction="sum")).backward()
    frozen = tt.gather_logprobs(gx, there, weight=gw.detach())
    ours = (logp, gx.grad, gw.grad)
    for got, (exact, half) in zip(ours, want, strict=True):
        assert got.device.type == device
        holds(Tensor(got.detach().float().cpu().numpy()), exact, half)
    assert torch.equal(frozen, logp)


# ---- the protocol ----


def test_producers_are_told_the_engines_stream():
    (x, w), _ = inputs("f32", "bf16")
    cuda_arrays.streams.clear()
    ops.topk_logprobs(x, 3, weight=w)
    ops.topk_logprobs(x, 3, weight=w)
    handle = cuda_arrays.streams[0]
    assert handle > 2  # 0 to 2 are CUDA's default streams
    assert cuda_arrays.streams == [handle] * 4


def test_what_was_borrowed_is_given_back_once_after_failures_too():
    (x, w), _ = inputs("f32", "f32")
    for call, error_type in (
        (lambda: ops.topk_logprobs(x, 3, weight=w), None),
        (lambda: ops.topk_logprobs(x, V + 1, weight=w), ValueError),
        (lambda: ops.gather_logprobs(x, np.full(N, V), weight=w), IndexError),
    ):
        cuda_arrays.deleted.clear()
        if error_type:
            with pytest.raises(error_type):
                call()
        else:
            call()
        assert cuda_arrays.deleted == [1, 1]


def test_results_are_lent_until_they_are_given_back(card):
    """What is released is free from the card's next work on."""
    x, one = Tensor(np.ones((256, 1024), np.float32)), 256 * 1000 * 4
    held = _core.topk(x, None, 1000)
    before = card()
    ids, logp = _core.topk(x, None, 1000)
    taken = card()
    assert before - taken >= 2 * one
    references = sys.getrefcount(ids)
    capsules = [_core.dlpack_lend(ids, True, kind, (256_000,)) for kind in (True, False)]
    assert sys.getrefcount(ids) == references + 2
    with pytest.raises(ValueError, match="shape must be of 256000 elements"):
        _core.dlpack_lend(ids, True, True, (3, 4))
    del ids, logp
    capsules.pop()  # never taken: the capsule itself gives it back
    other = _core.topk(x, None, 1000)
    assert card() <= taken - one  # the other capsule still has ids
    capsules.pop()
    del other
    last = _core.topk(x, None, 1000)
    assert card() == taken
    assert held and last


def test_a_lender_says_what_it_can_not_do():
    loan = Loan(_core.topk(Tensor(np.ones((2, 9), np.float32)), None, 3)[0], (2, 3))
    assert loan.__dlpack_device__() == (2, 0)
    for stream in (None, -1, 1, 2, 1234567):
        assert "dltensor_versioned" in repr(loan.__dlpack__(stream=stream, max_version=(1, 0)))
    assert '"dltensor"' in repr(loan.__dlpack__(stream=1))
    with pytest.raises(ValueError, match="pass 1 or 2"):
        loan.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="where it lies"):
        loan.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="as it is"):
        loan.__dlpack__(copy=True)


def test_hundreds_of_calls_leave_the_cards_memory_as_it_was(card):
    (x, w), _ = inputs("bf16", "bf16")
    ids = np.arange(N)

    def calls(n):
        for _ in range(n):
            ops.gather_logprobs_backward(np.ones(N, "f4"), x, ids, weight=w)
            with pytest.raises(IndexError):
                ops.gather_logprobs(x, ids + V, weight=w)

    calls(2)
    gc.collect()
    before, references = card(), [sys.getrefcount(a) for a in (x, w, ids, x.array)]
    cuda_arrays.deleted.clear()
    calls(300)
    gc.collect()
    assert card() == before
    assert [sys.getrefcount(a) for a in (x, w, ids, x.array)] == references
    assert len(cuda_arrays.deleted) == 1200


# ---- what is refused ----


def test_arrays_of_two_devices_are_refused():
    (x, w), _ = inputs("f32", "f32")
    mixed = r"weight is in the memory of {}, and other arrays of this call in that of {}"
    with pytest.raises(ValueError, match=mixed.format(r"the CPU", r"CUDA \(device 0\)")):
        ops.topk_logprobs(x, 3, weight=w.array)
    with pytest.raises(ValueError, match=mixed.format(r"CUDA \(device 0\)", "the CPU")):
        ops.topk_logprobs(x.array, 3, weight=w)
    with pytest.raises(
        ValueError,
        match=r"hidden is in the memory of CUDA \(device 1\), and .*:1: there is no such GPU",
    ):
        ops.topk_logprobs(Tensor(x.array, number=1), 3, weight=w)
    ids = np.zeros(N, np.int64)
    with pytest.raises(ValueError, match=r"ids is not in the memory of the CPU$"):
        ops.gather_logprobs(x.array, Tensor(ids), weight=w.array)
    with pytest.raises(ValueError, match="ids is not in the memory of the CPU, nor where the rows"):
        ops.gather_logprobs(x, Tensor(ids, number=1), weight=w)


def test_a_producer_without_streams_is_refused():
    class Old(Tensor):
        def __dlpack__(self):
            raise AssertionError("nobody waited for its stream")

    with pytest.raises(TypeError, match="stream"):
        ops.topk_logprobs(Old(np.ones((2, 9), np.float32)), 3)


def test_without_the_device_the_sentence_is_that_of_devices():
    _core.cuda_arrays_through("cuda")
    reason = _core.devices()["cuda"]
    if not reason:
        pytest.skip("this machine has the device")
    with pytest.raises(ValueError) as caught:
        ops.topk_logprobs(Tensor(np.ones((2, 9), np.float32)), 3)
    assert str(caught.value) == f"logits is in the memory of CUDA (device 0), and {reason}"


def test_memory_that_the_card_has_not_is_a_sentence(card):
    (x, w), _ = inputs("bf16", "bf16")
    ops.topk_logprobs(x, 3, weight=w)
    (more, w), _ = inputs("bf16", "bf16", n=8 << 10)
    before = card()
    with emulated_card() as make:
        make(1000)
        with pytest.raises(MemoryError, match="MiB"):
            ops.topk_logprobs(more, 3, weight=w)
    assert card() >= before
    assert ops.topk_logprobs(x, 3, weight=w)[0].shape == (N, 3)
