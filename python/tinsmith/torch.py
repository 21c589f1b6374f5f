"""tinsmith.ops as autograd functions. Besides losses/, this is the only module that imports torch.

If a gradient will be needed, the losses compute it in the forward pass, while the logits are in
memory; backward multiplies it. Log-probabilities under a frozen weight W do the same. Their
gradient is Σ_k g_k·(W[ids_k] − p·W), so they keep p·W, which has the hidden states' shape.
Otherwise the log-probabilities' backward computes the logits again, with the logΣexp that forward
kept: one number a row. Tensors are on the CPU or on the first NVIDIA GPU, float32 or bfloat16.
Gradients of gradients are not supported.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tinsmith import ops


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor | None, ids: torch.Tensor
    ) -> Any:
        ctx.first, grad = None, None
        frozen = weight is not None and ctx.needs_input_grad[:2] == (True, False)
        if frozen and ids.numel() and rows.dtype == weight.dtype == torch.float32:
            grad = torch.zeros(ids.shape, device=rows.device).reshape(rows[..., 0].numel(), -1)
            grad[:, 0] = 1
            grad = grad.reshape(ids.shape)
        out = ops.gather(rows.detach(), _plain(weight), ids, grad, want=(True, False))
        if grad is not None:
            ctx.first = out.drows  # W[ids_0] − p·W
        ctx.save_for_backward(rows, weight, ids, out.lse)
        return out.logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight, ids, lse = ctx.saved_tensors
        if ctx.first is not None:
            return _from_first(ctx.first, weight, ids, grad), None, None
        want = ctx.needs_input_grad[:2]
        out = ops.gather(rows.detach(), _plain(weight), ids, grad.contiguous(), lse=lse, want=want)
        return out.drows, out.dweight, None


def _from_first(
    first: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Σ_k g_k·(W[ids_k] − p·W) from the one of k = 0."""
    rows = first.reshape(-1, first.shape[-1])
    g = grad.reshape(len(rows), -1)
    targets = ids.reshape(len(rows), -1).to(weight.device, torch.long)
    total = g.sum(-1, keepdim=True)
    drows = total * rows
    if g.shape[1] > 1:
        bag = torch.nn.functional.embedding_bag
        drows += bag(targets, weight, per_sample_weights=g.contiguous(), mode="sum")
        drows -= total * weight[targets[:, 0]]
    return drows.reshape(first.shape)


class _Scaled(torch.autograd.Function):
    """A scalar loss with gradients made in the forward pass: `make` gives (loss, gradients)."""

    @staticmethod
    def forward(ctx: Any, make: Any, *inputs: torch.Tensor | None) -> torch.Tensor:
        loss, ctx.gradients = make(ctx.needs_input_grad[1:])
        return torch.tensor(loss, dtype=torch.float32, device=inputs[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("backward a second time: the gradients of this loss were given away")
        gradients, ctx.gradients = ctx.gradients, None
        by = float(grad)
        return None, *(g if g is None or by == 1 else g.mul_(by) for g in gradients)


class _JsdTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Any, rest: tuple) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.rest = rest
        return _jsd(rows, weight, rest).loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        out = _jsd(rows, weight, ctx.rest, grad.contiguous(), ctx.needs_input_grad[:2])
        return out.drows, out.dweight, None


def _jsd(
    rows: torch.Tensor, weight: Any, rest: tuple, grad: Any = None, want: Any = (True, True)
) -> ops.JsdResult:
    teacher, labels, how = rest
    student = rows.detach() if weight is None else (rows.detach(), weight.detach())
    return ops.jsd(student, teacher, labels, how, grad=grad, want=tuple(want))


def gather_logprobs(rows: torch.Tensor, *weight_and_ids: torch.Tensor) -> torch.Tensor:
    """gather_logprobs(hidden, weight, ids) or gather_logprobs(logits, ids); see tinsmith.ops."""
    weight, ids = (None, *weight_and_ids)[-2:]
    return _Gather.apply(rows, weight, ids)


def topk_logprobs(rows: torch.Tensor, *weight_and_k: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_logprobs(hidden, weight, k) or topk_logprobs(logits, k) -> (ids, logprobs); see
    tinsmith.ops. If a gradient is needed, the ids are found first and then gathered."""
    weight, k = (None, *weight_and_k)[-2:]
    arguments = (k,) if weight is None else (weight.detach(), k)
    ids, logprobs = ops.topk_logprobs(rows.detach(), *arguments)
    wanted = rows.requires_grad or (weight is not None and weight.requires_grad)
    if torch.is_grad_enabled() and wanted:
        logprobs = _Gather.apply(rows, weight, ids)
    return ids, logprobs


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """-Σ weights·logprobs(ids), differentiable in hidden and weight; see tinsmith.ops."""

    def make(needs: tuple[bool, ...]) -> tuple[float, tuple]:
        x, w = hidden.detach(), weight.detach()
        by = weights.detach().to(x.device, torch.float32).contiguous()
        if by.shape != ids.shape:
            raise ValueError(f"weights must be of ids' shape {tuple(ids.shape)}, not {by.shape}")
        grad = -by if any(needs) else None
        out = ops.gather(x, w, ids, grad, want=needs)
        loss = -(by.double() * out.logprobs).sum()
        return float(loss), (out.drows, out.dweight)

    return _Scaled.apply(make, hidden, weight)


def generalized_jsd(
    student: Any, teacher: Any, labels: Any = None, **settings: Any
) -> torch.Tensor:
    """OPSD's divergence. The gradient goes to the student alone: logits or (hidden, weight). See
    tinsmith.ops.generalized_jsd for all arguments."""
    how = ops.Divergence.checked(**settings)
    rows, weight = student if isinstance(student, tuple) else (student, None)
    teacher = tuple(map(_plain, teacher)) if isinstance(teacher, tuple) else _plain(teacher)
    rest = (teacher, labels, how)
    if how.reduction == "none":
        return _JsdTerms.apply(rows, weight, rest)

    def make(needs: tuple[bool, ...]) -> tuple[float, tuple]:
        out = _jsd(rows, weight, rest, 1.0 if any(needs) else None, needs)
        return float(out.loss), (out.drows, out.dweight)

    return _Scaled.apply(make, rows, weight)
