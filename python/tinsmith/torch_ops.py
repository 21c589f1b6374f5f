"""tinsmith.ops as operators of torch, with shape rules and gradients: what torch.py is made of.

A loss that is one number computes its gradient in the forward pass, while the logits are in
memory; backward multiplies it, as often as it is called. Log-probabilities under a frozen weight W
keep p·W, which has the hidden states' shape: their gradient is Σ_k g_k·(W[ids_k] − p·W). Otherwise
backward computes the logits again, with the logΣexp that forward kept. Gradients of gradients are
refused.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.library import custom_op, get_ctx, register_autograd

from tinsmith import ops

READ = (torch.float32, torch.bfloat16)  # what the engine reads without a copy


# ---- what all operators share ----


def _ready(x: Tensor) -> Tensor:
    """As the engine reads it: a copy if the strides or the dtype ask for one."""
    x = x.detach().contiguous()
    return x if x.dtype in READ else x.float()


def _some(x: Tensor | None) -> Tensor | None:
    return None if x is None else _ready(x)


def _kept(x: Tensor | None, like: Tensor) -> Tensor:
    """A result that an operator may lack: its type has no word for None."""
    return like.new_empty(0) if x is None else x


def precise(x: Tensor) -> torch.dtype:
    """The dtype of log-probabilities."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _engine(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in READ else torch.float32


def wants(*tensors: Tensor | None) -> list[bool]:
    """Whose gradient will be needed."""
    on = torch.is_grad_enabled()
    return [on and x is not None and x.requires_grad for x in tensors]


def _twice(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "tinsmith has no gradients of gradients: use torch.nn.functional for a loss that is "
        "differentiated twice"
    )


@custom_op("tinsmith::scaled", mutates_args=())
def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * by.to(gradient.device)).to(dtype)


@_scaled.register_fake
def _(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


register_autograd(_scaled, _twice)


def _first_kept(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Of a loss with its gradients: (rows, weight, …) -> (loss, drows, dweight)."""
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:2]]
    ctx.wanted = inputs[-2:]
    ctx.rest = len(inputs) - 2
    ctx.save_for_backward(*output[1:])


def _first_scaled(ctx: Any, grad: Tensor, *others: Any) -> tuple:
    found = (
        _scaled(kept, grad, dtype) if wanted else None
        for kept, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    )
    return (*found, *[None] * ctx.rest)


def _gradients_like(rows: Tensor, weight: Tensor | None, want: tuple[bool, bool]) -> list[Tensor]:
    """The shapes and dtypes in which the engine gives gradients."""
    return [
        x.new_empty(x.shape, dtype=_engine(x)) if x is not None and wanted else rows.new_empty(0)
        for x, wanted in zip((rows, weight), want, strict=True)
    ]


# ---- log-probabilities ----


@custom_op("tinsmith::gather", mutates_args=())
def _gather(
    rows: Tensor, weight: Tensor | None, ids: Tensor, first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of ids (…, K) or (…,), each row's logΣexp (…,), it as the sum of two
    numbers (…, 2), and W[ids_0] − p·W if that is wanted."""
    x, w = _ready(rows), _some(weight)
    grad = None
    if first:
        grad = torch.zeros(ids.shape, device=rows.device).reshape(x[..., 0].numel(), -1)
        grad[:, 0] = 1
        grad = grad.reshape(ids.shape)
    out = ops.gather(x, w, ids.detach().contiguous(), grad, want=(True, False))
    to = precise(rows)
    lse = out.lse.to(torch.float64).sum(-1).to(to)
    return out.logprobs.to(to), lse, out.lse, _kept(out.drows if first else None, rows)


@_gather.register_fake
def _(rows: Tensor, weight: Tensor | None, ids: Tensor, first: bool) -> tuple[Tensor, ...]:
    lead, to = rows.shape[:-1], precise(rows)
    return (
        rows.new_empty(ids.shape, dtype=to),
        rows.new_empty(lead, dtype=to),
        rows.new_empty((*lead, 2), dtype=torch.float32),
        rows.new_empty(rows.shape if first else 0, dtype=_engine(rows) if first else rows.dtype),
    )


@custom_op("tinsmith::gather_backward", mutates_args=())
def _gather_backward(
    rows: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    grad: Tensor,
    grad_lse: Tensor,
    lse: Tensor,
    want_rows: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weight. An id -1 stands for −logΣexp."""
    lead = rows.shape[:-1]
    ids = ids.detach().reshape(*lead, -1).to(torch.int64)
    both = torch.cat([ids, ids.new_full((*lead, 1), -1)], -1)
    by = [grad.reshape(ids.shape), -grad_lse.reshape(*lead, 1)]
    by = torch.cat([g.detach().to(rows.device, torch.float32) for g in by], -1).contiguous()
    want = (want_rows, want_weight)
    out = ops.gather(
        _ready(rows), _some(weight), both, by, lse=lse.detach().contiguous(), want=want
    )
    found = zip((out.drows, out.dweight), (rows, weight), want, strict=True)
    got = [d.to(x.dtype) if wanted and d is not None else None for d, x, wanted in found]
    return _kept(got[0], rows), _kept(got[1], rows)


@_gather_backward.register_fake
def _(
    rows: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    grad: Tensor,
    grad_lse: Tensor,
    lse: Tensor,
    want_rows: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    got = [rows if want_rows else None, weight if want_weight else None]
    return tuple(rows.new_empty(0) if x is None else x.new_empty(x.shape) for x in got)


@custom_op("tinsmith::from_first", mutates_args=())
def _from_first(
    first: Tensor, weight: Tensor, ids: Tensor, grad: Tensor, grad_lse: Tensor
) -> Tensor:
    """Σ_k g_k·(W[ids_k] − p·W) + g·p·W from the one of k = 0, in float32."""
    rows = first.detach().reshape(-1, first.shape[-1])
    g = grad.detach().float().reshape(len(rows), -1)
    targets, weight = ids.reshape(len(rows), -1).to(weight.device, torch.long), weight.detach()
    of_lse = grad_lse.detach().float().reshape(-1, 1)
    total = g.sum(-1, keepdim=True) - of_lse
    drows = total * rows
    bag = nn.functional.embedding_bag
    if g.shape[1] > 1:
        drows += bag(targets, weight, per_sample_weights=g.contiguous(), mode="sum")
        drows -= g.sum(-1, keepdim=True) * weight[targets[:, 0]]
    if of_lse.any():
        drows += of_lse * weight[targets[:, 0]]
    return drows.reshape(first.shape)


@_from_first.register_fake
def _(first: Tensor, weight: Tensor, ids: Tensor, grad: Tensor, grad_lse: Tensor) -> Tensor:
    return first.new_empty(first.shape)


register_autograd(_gather_backward, _twice)
register_autograd(_from_first, _twice)


def _gather_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    rows, weight, ids, ctx.first = inputs
    _, _, lse, first = output
    ctx.save_for_backward(rows, weight, ids, lse, first)


def _gather_grad(ctx: Any, grad: Tensor, grad_lse: Tensor, *others: Any) -> tuple:
    rows, weight, ids, lse, first = ctx.saved_tensors
    if ctx.first:
        return _from_first(first, weight, ids, grad, grad_lse), None, None, None
    want = ctx.needs_input_grad[:2]
    found = _gather_backward(rows, weight, ids, grad, grad_lse, lse, *want)
    return *(d if wanted else None for d, wanted in zip(found, want, strict=True)), None, None


register_autograd(_gather, _gather_grad, setup_context=_gather_setup)


def gathered(rows: Tensor, weight: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids and each row's logΣexp, both differentiable."""
    first = False
    if weight is not None and rows.dtype == weight.dtype == torch.float32 and ids.numel():
        first = wants(rows, weight) == [True, False]
    return _gather(rows, weight, ids, first)[:2]


@custom_op("tinsmith::topk", mutates_args=())
def topk(rows: Tensor, weight: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    arguments = (k,) if weight is None else (_ready(weight), k)
    ids, logprobs = ops.topk_logprobs(_ready(rows), *arguments)
    return ids, logprobs.to(precise(rows))


@topk.register_fake
def _(rows: Tensor, weight: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    shape = (*rows.shape[:-1], k)
    return rows.new_empty(shape, dtype=torch.int32), rows.new_empty(shape, dtype=precise(rows))


# ---- cross-entropy ----


@custom_op("tinsmith::cross_entropy", mutates_args=())
def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-Σ weights·logprobs and its gradients, in the dtypes that the engine computes in."""
    by = weights.detach().to(hidden.device, torch.float32).contiguous()
    want = (want_hidden, want_weight)
    ids = ids.detach().contiguous()
    out = ops.gather(_ready(hidden), _ready(weight), ids, -by if any(want) else None, want=want)
    loss = -(by.double() * out.logprobs).sum()
    return loss.to(precise(hidden)), _kept(out.drows, hidden), _kept(out.dweight, hidden)


@cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _gradients_like(hidden, weight, (want_hidden, want_weight))
    return hidden.new_empty((), dtype=precise(hidden)), *gradients


register_autograd(cross_entropy, _first_scaled, setup_context=_first_kept)


# ---- divergence ----


def _jsd(
    rows: Tensor,
    weight: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    labels: Tensor | None,
    how: ops.Divergence,
    grad: Any = None,
    want: tuple[bool, bool] = (True, True),
) -> ops.JsdResult:
    x, w, y, u = _ready(rows), _some(weight), _ready(teacher), _some(teacher_weight)
    labels = None if labels is None else labels.detach().contiguous()
    student, other = x if w is None else (x, w), y if u is None else (y, u)
    return ops.jsd(student, other, labels, how, grad=grad, want=want)


@custom_op("tinsmith::jsd", mutates_args=())
def jsd_loss(
    rows: Tensor,
    weight: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    labels: Tensor | None,
    beta: float,
    temperature: float,
    reduction: str,
    logits_are_probs: bool,
    top_k: int,
    token_clip: float,
    want_rows: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    how = ops.Divergence(beta, temperature, reduction, logits_are_probs, top_k, token_clip)
    want = (want_rows, want_weight)
    grad = 1.0 if any(want) else None
    out = _jsd(rows, weight, teacher, teacher_weight, labels, how, grad, want)
    loss = out.loss.to(rows.device, precise(rows))
    return loss, _kept(out.drows, rows), _kept(out.dweight, rows)


@jsd_loss.register_fake
def _(rows: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty((), dtype=precise(rows)), *_gradients_like(rows, weight, rest[-2:])


register_autograd(jsd_loss, _first_scaled, setup_context=_first_kept)


@custom_op("tinsmith::jsd_terms", mutates_args=())
def jsd_terms(
    rows: Tensor,
    weight: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    labels: Tensor | None,
    beta: float,
    temperature: float,
    logits_are_probs: bool,
    top_k: int,
    token_clip: float,
) -> Tensor:
    how = ops.Divergence(beta, temperature, "none", logits_are_probs, top_k, token_clip)
    loss = _jsd(rows, weight, teacher, teacher_weight, labels, how).loss
    return loss.to(precise(rows))


@jsd_terms.register_fake
def _(
    rows: Tensor,
    weight: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    labels: Tensor | None,
    beta: float,
    temperature: float,
    logits_are_probs: bool,
    top_k: int,
    token_clip: float,
) -> Tensor:
    width = top_k or (rows.shape[-1] if weight is None else weight.shape[0])
    lead = rows.shape[:-1] if labels is None else (get_ctx().new_dynamic_size(),)
    return rows.new_empty((*lead, width), dtype=precise(rows))


@custom_op("tinsmith::jsd_terms_backward", mutates_args=())
def _jsd_terms_backward(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    labels: Tensor | None,
    beta: float,
    temperature: float,
    logits_are_probs: bool,
    top_k: int,
    token_clip: float,
    want_rows: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    how = ops.Divergence(beta, temperature, "none", logits_are_probs, top_k, token_clip)
    by, want = grad.detach().float().contiguous(), (want_rows, want_weight)
    out = _jsd(rows, weight, teacher, teacher_weight, labels, how, by, want)
    found = zip((out.drows, out.dweight), (rows, weight), strict=True)
    return tuple(_kept(None if d is None else d.to(x.dtype), rows) for d, x in found)


@_jsd_terms_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    got = [x if wanted else None for x, wanted in zip((rows, weight), rest[-2:], strict=True)]
    return tuple(rows.new_empty(0) if x is None else x.new_empty(x.shape) for x in got)


def _terms_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.how = inputs[5:]


def _terms_grad(ctx: Any, grad: Tensor) -> tuple:
    want = ctx.needs_input_grad[:2]
    found = _jsd_terms_backward(grad, *ctx.saved_tensors, *ctx.how, *want)
    return *(d if wanted else None for d, wanted in zip(found, want, strict=True)), *[None] * 8


register_autograd(_jsd_terms_backward, _twice)
register_autograd(jsd_terms, _terms_grad, setup_context=_terms_setup)
