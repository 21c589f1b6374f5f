"""tinsmith.ops as torch operators, with shape rules and gradients: the parts of torch/__init__.py.

A loss that is one number computes its gradient in the forward pass, while the logits are in memory;
each backward only scales it. Log-probabilities under a frozen weight W keep p·W, which has the
hidden states' shape: their gradient is Σ_k g_k·(W[ids_k] − p·W). Otherwise backward computes the
logits again, with the logΣexp that forward kept. The last backward overwrites what was kept, so a
gradient is held once. Gradients of gradients are refused.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.library import define, get_ctx, impl, infer_schema, register_autograd, register_fake

from tinsmith import ops

F = TypeVar("F", bound=Callable)
READ = (torch.float32, torch.bfloat16)  # dtypes that the engine reads without a copy
PART = 1024  # rows, or ids, that torch multiplies at a time

# Whether the running backward pass keeps its graph. A torch that cannot tell gets copies.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


# ---- shared helpers ----


def _operator(name: str) -> Callable[[F], F]:
    """As torch.library.custom_op, but without its import of torch._dynamo at the first call."""

    def made(compute: F) -> F:
        schema = infer_schema(compute, mutates_args=())
        define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        impl(name, "CompositeExplicitAutograd", compute)
        return getattr(torch.ops.tinsmith, name.partition("::")[2]).default

    return made


def _ready(x: Tensor) -> Tensor:
    """A tensor that the engine can read: a copy if the strides or the dtype require one."""
    x = x.detach().contiguous()
    return x if x.dtype in READ else x.float()


def _some(x: Tensor | None) -> Tensor | None:
    return None if x is None else _ready(x)


def _kept(x: Tensor | None, like: Tensor) -> Tensor:
    """An optional result: empty for None, which an operator's schema can't return."""
    return like.new_empty(0) if x is None else x


def precise(x: Tensor) -> torch.dtype:
    """The dtype of log-probabilities."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _engine(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in READ else torch.float32


def wants(*tensors: Tensor | None) -> list[bool]:
    """Which tensors will need a gradient."""
    on = torch.is_grad_enabled()
    return [on and x is not None and x.requires_grad for x in tensors]


def _twice(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "tinsmith has no gradients of gradients: use torch.nn.functional for a loss that is "
        "differentiated twice"
    )


def _is_free(kept: Tensor) -> bool:
    """Whether backward may overwrite what forward kept: it is not needed again, no gradient of this
    gradient is wanted, and no compiler is tracing."""
    return type(kept) is Tensor and not torch.is_grad_enabled() and not _keeps_graph()


@_operator("tinsmith::scaled")
def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * by.to(gradient.device)).to(dtype)


@register_fake("tinsmith::scaled")
def _(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


register_autograd("tinsmith::scaled", _twice)


def _times(kept: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    if not _is_free(kept):
        return _scaled(kept, by, dtype)
    kept = kept.detach()
    return (kept if by.is_cpu and by == 1 else kept.mul_(by.to(kept.device))).to(dtype)


def _first_kept(ctx: Any, inputs: tuple, output: tuple) -> None:
    """setup_context of a loss with its gradients: (rows, weight, …) -> (loss, drows, dweight)."""
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:2]]
    ctx.wanted = inputs[-2:]
    ctx.rest = len(inputs) - 2
    ctx.set_materialize_grads(False)  # otherwise the gradients' own gradients would be zeros
    ctx.save_for_backward(*output[1:])


def _first_scaled(ctx: Any, grad: Tensor, *others: Any) -> tuple:
    found = (
        _times(kept, grad, dtype) if wanted and grad is not None else None
        for kept, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    )
    return (*found, *[None] * ctx.rest)


def _gradients_like(rows: Tensor, weight: Tensor | None, want: tuple[bool, bool]) -> list[Tensor]:
    """Empty tensors in the shapes and dtypes of the engine's gradients."""
    return [
        x.new_empty(x.shape, dtype=_engine(x)) if x is not None and wanted else rows.new_empty(0)
        for x, wanted in zip((rows, weight), want, strict=True)
    ]


# ---- log-probabilities ----


def _parts(count: int) -> list[slice]:
    return [slice(i, i + PART) for i in range(0, count, PART)]


def _flat(shares: Tensor) -> Tensor:
    """Shares as a matrix: one row for all rows, or one for each."""
    return shares.detach().reshape(-1, shares.shape[-1])


def _mixed(shares: Tensor, weight: Tensor, to: torch.dtype) -> Tensor:
    """Σ_v s_v·W[v] of each row of shares (n, V), without a copy of the weight."""
    mixed = weight.new_zeros((len(shares), weight.shape[1]), dtype=to)
    for ids in _parts(len(weight)):
        mixed.addmm_(shares[:, ids].to(to), weight.detach()[ids].to(to))
    return mixed


def _mix_rows(drows: Tensor, weight: Tensor, shares: Tensor, grad: Tensor) -> None:
    """Adds the part of −Σ_v s_v·(h·W[v]) to the gradient of rows h in place: autograd would hold
    the two parts and their sum."""
    drows, to = drows.view(-1, drows.shape[-1]), precise(drows)
    mixed = _mixed(_flat(shares), weight, to).expand(drows.shape)
    g = grad.detach().to(drows.device, to).reshape(-1, 1)
    for part in _parts(len(drows)):
        drows[part] -= g[part] * mixed[part]


def _mix_weight(dweight: Tensor, rows: Tensor, shares: Tensor, grad: Tensor) -> None:
    """The same for the gradient of the weight."""
    to, each = precise(rows), _flat(shares)
    x = rows.detach().reshape(-1, rows.shape[-1]).to(to)
    g = grad.detach().to(x.device, to).reshape(-1, 1)
    pull = g.T @ x if shares.dim() == 1 else g * x
    for ids in _parts(len(dweight)):
        dweight[ids] -= each[:, ids].to(to).T @ pull


@_operator("tinsmith::gather")
def _gather(
    rows: Tensor, weight: Tensor | None, ids: Tensor, shares: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of ids (…, K) or (…,); −Σ_v s_v·logprob_v (…,) of shares s (V,) or (…, V);
    each row's logΣexp as the sum of two numbers (…, 2); and W[ids_0] − p·W if that is wanted."""
    x, w = _ready(rows), _some(weight)
    grad = soft = None
    if first:
        grad = torch.zeros(ids.shape, device=rows.device).reshape(x[..., 0].numel(), -1)
        grad[:, 0] = 1
        grad = grad.reshape(ids.shape)
    out = ops.gather(x, w, ids.detach().contiguous(), grad, want=(True, False))
    to = precise(rows)
    if shares is not None and weight is not None:
        mixed, flat = _mixed(_flat(shares), weight, to), rows.detach().reshape(-1, rows.shape[-1])
        dot = flat.to(to) @ mixed[0] if shares.dim() == 1 else mixed.mul_(flat).sum(-1)
        lse = out.lse.to(torch.float64).sum(-1).to(to)
        soft = shares.detach().sum(-1, dtype=to) * lse - dot.reshape(lse.shape)
    first_kept = _kept(out.drows if first else None, rows)
    return out.logprobs.to(to), _kept(soft, rows), out.lse, first_kept


@register_fake("tinsmith::gather")
def _(
    rows: Tensor, weight: Tensor | None, ids: Tensor, shares: Tensor | None, first: bool
) -> tuple[Tensor, ...]:
    lead, to = rows.shape[:-1], precise(rows)
    return (
        rows.new_empty(ids.shape, dtype=to),
        rows.new_empty(0) if shares is None else rows.new_empty(lead, dtype=to),
        rows.new_empty((*lead, 2), dtype=torch.float32),
        rows.new_empty(rows.shape if first else 0, dtype=_engine(rows) if first else rows.dtype),
    )


@_operator("tinsmith::gather_backward")
def _gather_backward(
    rows: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    shares: Tensor | None,
    grad: Tensor,
    grad_soft: Tensor,
    lse: Tensor,
    want_rows: bool,
    want_weight: bool,
    want_shares: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, weight and shares (…, V). An id -1 stands for −logΣexp."""
    lead, want = rows.shape[:-1], (want_rows, want_weight)
    ids = ids.detach().reshape(*lead, -1).to(torch.int64)
    by = [grad.reshape(ids.shape)]
    if shares is not None:
        ids = torch.cat([ids, ids.new_full((*lead, 1), -1)], -1)
        by.append(-(grad_soft * shares.sum(-1, dtype=grad_soft.dtype)).reshape(*lead, 1))
    by = torch.cat([g.detach().to(rows.device, torch.float32) for g in by], -1).contiguous()
    out = ops.gather(_ready(rows), _some(weight), ids, by, lse=lse.detach().contiguous(), want=want)
    found = zip((out.drows, out.dweight), (rows, weight), want, strict=True)
    drows, dweight = [d.to(x.dtype) if wanted and d is not None else None for d, x, wanted in found]
    dshares = None
    if shares is not None and weight is not None:
        if drows is not None:
            _mix_rows(drows, weight, shares, grad_soft)
        if dweight is not None:
            _mix_weight(dweight, rows, shares, grad_soft)
        if want_shares:
            to = precise(rows)
            dshares = rows.detach().to(to) @ weight.detach().to(to).T
            dshares.sub_(lse.sum(-1, keepdim=True)).mul_(-grad_soft.detach()[..., None])
            dshares = dshares.to(shares.dtype)
    return _kept(drows, rows), _kept(dweight, rows), _kept(dshares, rows)


@register_fake("tinsmith::gather_backward")
def _(
    rows: Tensor, weight: Tensor | None, ids: Tensor, shares: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    found = zip((rows, weight, shares), rest[-3:], strict=True)
    got = [x if wanted else None for x, wanted in found]
    return tuple(rows.new_empty(0) if x is None else x.new_empty(x.shape) for x in got)


def _finish_first(
    first: Tensor,
    weight: Tensor,
    ids: Tensor,
    shares: Tensor | None,
    grad: Tensor,
    grad_soft: Tensor,
) -> Tensor:
    """The gradient of rows, computed in place in `first`, W[ids_0] − p·W, in float32: the sum of
    g_k·(W[ids_k] − p·W), and with shares also _mix_rows's part and g·Σ_v s_v·p·W."""
    first, weight = first.detach(), weight.detach()
    rows = first.view(-1, first.shape[-1])
    by = grad.detach().to(rows.device, torch.float32).reshape(len(rows), -1)
    targets = ids.reshape(len(rows), -1).to(rows.device, torch.long)
    total = by.sum(-1, keepdim=True)
    if shares is not None:
        of_lse = grad_soft.detach() * shares.detach().sum(-1, dtype=torch.float32)
        total = total - of_lse.reshape(-1, 1)
    rows *= total
    by = torch.cat([by[:, :1] - total, by[:, 1:]], -1)
    if by.any():
        for part in _parts(len(rows)):
            bag = targets[part], weight
            rows[part] += nn.functional.embedding_bag(*bag, per_sample_weights=by[part], mode="sum")
    if shares is not None:
        _mix_rows(first, weight, shares, grad_soft)
    return first


@_operator("tinsmith::from_first")
def _from_first(
    first: Tensor,
    weight: Tensor,
    ids: Tensor,
    shares: Tensor | None,
    grad: Tensor,
    grad_soft: Tensor,
) -> Tensor:
    return _finish_first(first.clone(), weight, ids, shares, grad, grad_soft)


@register_fake("tinsmith::from_first")
def _(first: Tensor, *rest: Any) -> Tensor:
    return first.new_empty(first.shape)


register_autograd("tinsmith::gather_backward", _twice)
register_autograd("tinsmith::from_first", _twice)


def _gather_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    rows, weight, ids, shares, ctx.first = inputs
    _, _, lse, first = output
    ctx.set_materialize_grads(False)  # otherwise a gradient of `first` would be zeros
    ctx.save_for_backward(rows, weight, ids, shares, lse, first)


def _gather_grad(ctx: Any, grad: Tensor | None, grad_soft: Tensor | None, *others: Any) -> tuple:
    rows, weight, ids, shares, lse, first = ctx.saved_tensors
    grad = lse.new_zeros(ids.shape) if grad is None else grad
    grad_soft = lse.new_zeros(lse.shape[:-1]) if grad_soft is None else grad_soft
    want = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if ctx.first:
        finish = _finish_first if _is_free(first) else _from_first
        found: Any = finish(first, weight, ids, shares, grad, grad_soft), None, None
    else:
        found = _gather_backward(rows, weight, ids, shares, grad, grad_soft, lse, *want)
    drows, dweight, dshares = [d if on else None for d, on in zip(found, want, strict=True)]
    return drows, dweight, None, dshares, None


register_autograd("tinsmith::gather", _gather_grad, setup_context=_gather_setup)


def gathered(
    rows: Tensor, weight: Tensor | None, ids: Tensor, shares: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids, and −Σ_v s_v·logprob_v of shares s (V,) or (…, V), differentiable.
    Shares (V,) have no gradient."""
    first = False
    if weight is not None and rows.dtype == weight.dtype == torch.float32 and ids.numel():
        first = wants(rows, weight, shares) == [True, False, False]
    return _gather(rows, weight, ids, shares, first)[:2]


@_operator("tinsmith::topk")
def topk(rows: Tensor, weight: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    weight = None if weight is None else _ready(weight)
    ids, logprobs = ops.topk_logprobs(_ready(rows), k, weight=weight)
    return ids, logprobs.to(precise(rows))


@register_fake("tinsmith::topk")
def _(rows: Tensor, weight: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    shape = (*rows.shape[:-1], k)
    return rows.new_empty(shape, dtype=torch.int32), rows.new_empty(shape, dtype=precise(rows))


# ---- cross-entropy ----


@_operator("tinsmith::cross_entropy")
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


@register_fake("tinsmith::cross_entropy")
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


register_autograd("tinsmith::cross_entropy", _first_scaled, setup_context=_first_kept)


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


@_operator("tinsmith::jsd")
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


@register_fake("tinsmith::jsd")
def _(rows: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty((), dtype=precise(rows)), *_gradients_like(rows, weight, rest[-2:])


register_autograd("tinsmith::jsd", _first_scaled, setup_context=_first_kept)


@_operator("tinsmith::jsd_terms")
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


@register_fake("tinsmith::jsd_terms")
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


@_operator("tinsmith::jsd_terms_backward")
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


@register_fake("tinsmith::jsd_terms_backward")
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


register_autograd("tinsmith::jsd_terms_backward", _twice)
register_autograd("tinsmith::jsd_terms", _terms_grad, setup_context=_terms_setup)
