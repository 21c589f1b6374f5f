"""tinsmith.torch: the operations as autograd functions, against torch eager in float64."""

# ruff: noqa: C408 - settings are keyword arguments, and read as such

import inspect
import subprocess
import sys

import pytest
import tinsmith.torch as tt
import torch
from support import opsd_reference
from tinsmith import ops

N, V, D = 11, 203, 17


def leaves(*shapes, dtype=torch.float32, seed=0):
    """Tensors with gradients, and the same in float64."""
    torch.manual_seed(seed)
    ours = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    return ours, [x.detach().double().requires_grad_() for x in ours]


def same(ours, exact, bf16=False):
    for a, b in zip(ours, exact, strict=True):
        assert a.grad.dtype == a.dtype
        error = (a.grad.double() - b.grad).norm() / b.grad.norm()
        assert error < (5e-3 if bf16 else 2e-5), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [None, 4])
def test_gather_logprobs(dtype, K):
    (x, w), (x64, w64) = leaves((N, D), (V, D), dtype=dtype)
    ids = torch.randint(0, V, (N,) if K is None else (N, K))
    by = torch.randn(ids.shape)
    out = tt.gather_logprobs(x, ids, weight=w)
    (out * by).sum().backward()
    exact = torch.log_softmax(x64 @ w64.T, -1).gather(-1, ids.reshape(N, -1)).reshape(ids.shape)
    (exact * by).sum().backward()
    torch.testing.assert_close(out.double(), exact, atol=3e-5, rtol=1e-5)
    same((x, w), (x64, w64), dtype == torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, N), (2, N, 1), (2, N, 6)])
def test_gather_logprobs_under_a_frozen_weight(shape):
    (x, w), (x64, w64) = leaves((2, N, D), (V, D))
    w.requires_grad_(False)
    ids = torch.randint(0, V, shape, dtype=torch.int32)
    by = torch.randn(shape)
    (tt.gather_logprobs(x, ids, weight=w) * by).sum().backward()
    exact = torch.log_softmax(x64 @ w64.T, -1).gather(-1, ids.long().reshape(2, N, -1))
    (exact.reshape(shape) * by).sum().backward()
    same((x,), (x64,))
    assert w.grad is None


def test_topk_logprobs_and_its_gradient():
    (x, w), (x64, w64) = leaves((N, D), (V, D))
    ids, logp = tt.topk_logprobs(x, 8, weight=w)
    exact = torch.log_softmax(x64 @ w64.T, -1).topk(8)
    assert torch.equal(ids.long(), exact.indices) and not ids.requires_grad
    (logp**2).sum().backward()
    (exact.values**2).sum().backward()
    same((x, w), (x64, w64))
    with torch.no_grad():
        assert not tt.topk_logprobs(x, 8, weight=w)[1].requires_grad


def test_linear_cross_entropy():
    (x, w), (x64, w64) = leaves((N, D), (V, D))
    ids, weights = torch.randint(0, V, (N, 3)), torch.rand(N, 3)
    loss = tt.weighted_cross_entropy(x, w, ids, weights)
    (3 * loss).backward()
    exact = -(torch.log_softmax(x64 @ w64.T, -1).gather(-1, ids) * weights).sum()
    (3 * exact).backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    same((x, w), (x64, w64))


SETTINGS = [
    dict(),
    dict(beta=0.0, temperature=1.5),
    dict(beta=1.0, reduction="sum"),
    dict(beta=0.9, top_k=12, reduction="mean"),
    dict(beta=0.1, token_clip=0.01, reduction="none"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "hidden"])
def test_generalized_jsd(settings, fused):
    (x, w, y), (x64, w64, y64) = leaves((2, N, D), (V, D), (2, N, D))
    labels = torch.randint(0, 2, (2, N)) * 101 - 100
    if fused:
        loss = tt.generalized_jsd((x, w), (y, w), labels, **settings)
    else:
        loss = tt.generalized_jsd(x @ w.T, y @ w.T, labels, **settings)
    teacher = (y64 @ w64.T).detach()
    exact = opsd_reference.generalized_jsd_loss(x64 @ w64.T, teacher, labels, **settings)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-5, atol=1e-8)
    (loss**2).sum().backward()
    (exact**2).sum().backward()
    same((x, w), (x64, w64))
    assert y.grad is None


def test_every_generalized_jsd_has_opsds_parameters_in_its_order():
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    theirs = parameters(opsd_reference.generalized_jsd_loss)
    assert parameters(tt.generalized_jsd) == parameters(ops.generalized_jsd) == theirs
    assert parameters(ops.generalized_jsd_backward)[1:] == theirs


def test_a_frozen_weight_gets_no_gradient():
    (x, w), _ = leaves((N, D), (V, D))
    w.requires_grad_(False)
    tt.generalized_jsd((x, w), (x, w)).backward()
    assert w.grad is None and x.grad is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_no_gradient_is_computed_for_a_frozen_weight(frozen, monkeypatch):
    (x, w), _ = leaves((N, D), (V, D), dtype=torch.bfloat16)
    w.requires_grad_(not frozen)
    out, asked, gather = tt.gather_logprobs(x, torch.arange(N), weight=w), [], tt.ops.gather

    def told(*arguments, **options):
        asked.append(options["want"])
        return gather(*arguments, **options)

    monkeypatch.setattr(tt.ops, "gather", told)
    out.sum().backward()
    assert asked == [(True, not frozen)]


def test_only_tinsmith_torch_imports_torch():
    code = "import sys, tinsmith, tinsmith.ops; assert 'torch' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
