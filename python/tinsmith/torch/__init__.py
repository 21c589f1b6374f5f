"""tinsmith.ops for torch: losses and log-probabilities with gradients, without the logits.

Each is made of torch operators (operators.py), so torch.compile, activation checkpointing, autocast
and DDP treat it as one of torch's own. A gradient is held once. Only torch.compile imports a
compiler. Tensors are on the CPU or on the first NVIDIA GPU, with any strides: a tensor that is not
contiguous is copied. float32 and bfloat16 are read without a copy; float16 and float64 are copied
and computed in float32. Gradients have their input's dtype. Log-probabilities and divergences are
float32, or float64 for float64 input. Gradients of gradients are refused. linear_cross_entropy and
LinearCrossEntropyLoss have torch's signatures.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith import ops
from tinsmith.torch import operators
from tinsmith.torch.operators import gathered, precise, wants

REDUCTIONS = ("none", "mean", "sum")


def _floating(x: Any, name: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of floating-point numbers, not {kind}")
    if not x.dim():
        raise ValueError(f"{name} must have at least one dimension: (…, V) or (…, D)")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func (grad, vmap and the like) goes through no custom operator of torch's: use "
            "torch.autograd.grad, and pass a batch's dimensions as they are"
        )


def _tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")


def _rows(rows: Any, weight: Any) -> None:
    """Checks rows and, unless it is None, the weight that turns them into logits."""
    _floating(rows, "logits" if weight is None else "hidden")
    if weight is not None:
        _floating(weight, "weight")


def gather_logprobs(rows: Tensor, ids: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Log-probabilities of given ids, differentiable in rows and weight.

    Parameters
    ----------
    rows : Tensor (..., V) or (..., D)
        Logits, or hidden states where `weight` is given.
    ids : Tensor (...) or (..., K)
        One id or K of them for each row.
    weight : Tensor (V, D), optional
        The head's weight, which turns hidden states into logits.

    Returns
    -------
    Tensor
        Of ids' shape, in nats.

    Raises
    ------
    IndexError
        If an id is not in the vocabulary.
    TypeError
        If an argument is no tensor, or of the wrong type.
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> nll = -tt.gather_logprobs(hidden[:, :-1], tokens[:, 1:], weight=head.weight)
    """
    _rows(rows, weight)
    _tensor(ids, "ids")
    return gathered(rows, weight, ids)[0]


def topk_logprobs(rows: Tensor, k: int, *, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of each row, and their log-probabilities, which are differentiable.

    If a gradient is needed, the ids are found first and then gathered.

    Parameters
    ----------
    rows : Tensor (..., V) or (..., D)
        Logits, or hidden states where `weight` is given.
    k : int
        From 0 to V.
    weight : Tensor (V, D), optional
        The head's weight, which turns hidden states into logits.

    Returns
    -------
    ids : int32 Tensor (..., k)
        The likeliest first; among equals, the lower id.
    logprobs : Tensor (..., k)
        In nats.

    Raises
    ------
    TypeError
        If an argument is of the wrong type.
    ValueError
        If k is larger than the vocabulary, or shapes do not fit.

    Examples
    --------
    >>> ids, logprobs = tt.topk_logprobs(teacher_hidden, 32, weight=teacher_head.weight)
    """
    _rows(rows, weight)
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k must be a whole number, not {type(k).__name__}")
    ids, logprobs = operators.topk(rows.detach(), None if weight is None else weight.detach(), k)
    if any(wants(rows, weight)):
        logprobs = gathered(rows, weight, ids)[0]
    return ids, logprobs


# ---- cross-entropy ----


def weighted_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Tinker's cross_entropy: -Σ weights · log-probabilities of ids, in nats.

    Differentiable in hidden and weight.

    Parameters
    ----------
    hidden : Tensor (..., D)
        Hidden states.
    weight : Tensor (V, D)
        The head's weight.
    ids : Tensor (...) or (..., K)
        The targets.
    weights : Tensor
        Of ids' shape; otherwise ValueError.

    Returns
    -------
    Tensor
        The sum, 0-dimensional.

    Examples
    --------
    >>> loss = tt.weighted_cross_entropy(hidden, head.weight, ids, mask.float())
    """
    _rows(hidden, weight)
    _tensor(ids, "ids")
    _tensor(weights, "weights")
    if weights.shape != ids.shape:
        shapes = tuple(ids.shape), tuple(weights.shape)
        raise ValueError("weights must be of ids' shape {}, not {}".format(*shapes))
    return operators.cross_entropy(hidden, weight, ids, weights, *wants(hidden, weight))[0]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy without the logits.

    torch's `options`, and weights with more dimensions, are not supported.

    Parameters
    ----------
    input : Tensor (..., D)
        Hidden states.
    linear_weight : Tensor (V, D)
        The head's weight.
    target : Tensor (...) or (..., V)
        Ids, or probabilities in a floating-point dtype.
    linear_bias : Tensor (V,), optional
        With a bias, linear_weight is copied.
    weight : Tensor (V,), optional
        A factor for each id, without a gradient.
    reduction : {"mean", "sum", "none"}
        The mean is weighted by `weight` of the targets that are not ignored.
    ignore_index : int, optional
        Targets equal to it are left out; None: -100.
    label_smoothing : float
        In [0, 1].

    Returns
    -------
    Tensor
        One number, or (...) for "none", in nats; in input's dtype, under autocast float32.

    Raises
    ------
    IndexError
        If an id is not in the vocabulary.
    TypeError, ValueError
        If an argument does not fit.

    Examples
    --------
    >>> loss = tt.linear_cross_entropy(hidden[:, :-1], head.weight, tokens[:, 1:])
    """
    soft = _check(input, linear_weight, target, linear_bias, weight, reduction, label_smoothing)
    if soft and ignore_index is not None:
        raise ValueError("ignore_index is for targets that are ids; these are probabilities")
    hidden, matrix = input, linear_weight
    if linear_bias is not None:
        hidden = torch.cat([input, input.new_ones((*input.shape[:-1], 1))], -1)
        matrix = torch.cat([linear_weight, linear_bias[:, None]], -1)
    autocast = torch.is_autocast_enabled(input.device.type)
    with torch.autocast(input.device.type, enabled=False):
        if soft:
            each = _soft(hidden, matrix, target, weight, label_smoothing)
            loss = {"none": lambda: each, "sum": each.sum, "mean": each.mean}[reduction]()
        else:
            ignored = -100 if ignore_index is None else ignore_index
            loss = _hard(hidden, matrix, target, weight, reduction, ignored, label_smoothing)
    return loss.float() if autocast else loss.to(input.dtype)


def _check(
    hidden: Tensor,
    matrix: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    smoothing: float,
) -> bool:
    """Checks the arguments; returns whether the targets are probabilities."""
    _floating(hidden, "input")
    _floating(matrix, "linear_weight")
    lead, D, V = tuple(hidden.shape[:-1]), hidden.shape[-1], matrix.shape[0]
    if matrix.dim() != 2 or matrix.shape[1] != D:
        raise ValueError(f"linear_weight must be (V, {D}), not {tuple(matrix.shape)}")
    for name, x in (("linear_bias", bias), ("weight", weight)):
        if x is not None and tuple(x.shape) != (V,):
            raise ValueError(f"{name} must be ({V},), not {tuple(x.shape)}")
    if weight is not None and weight.requires_grad:
        raise ValueError("weight gets no gradient: pass weight.detach()")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], not {smoothing}")
    soft = target.is_floating_point()
    expected = (*lead, V) if soft else lead
    if tuple(target.shape) != expected:
        what = "probabilities" if soft else "ids"
        raise ValueError(f"target of {what} must be {expected}, not {tuple(target.shape)}")
    return soft


def _hard(
    hidden: Tensor,
    matrix: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignored: int,
    smoothing: float,
) -> Tensor:
    """For ids: (1−ε)·w[y]·nll − ε/V·Σ_v w[v]·logp[v]."""
    target = target.long()  # in uint8, -100 would be an id
    counts = target != ignored
    ids = torch.where(counts, target, 0)
    if weight is None:
        by = counts.to(torch.float32)
    else:
        by = torch.where(counts, weight.to(torch.float32)[ids], 0.0)
    if not smoothing and reduction != "none":
        total = weighted_cross_entropy(hidden, matrix, ids, by)
        return _mean(total, by) if reduction == "mean" else total
    shares = None
    if smoothing:
        shares = _shares(hidden, matrix.new_zeros(len(matrix)), weight, smoothing)
    logp, smooth = gathered(hidden, matrix, ids, shares)
    each = -by * logp
    if smoothing:
        each = (1 - smoothing) * each + torch.where(counts, smooth, 0.0)
    if reduction == "none":
        return each
    return _mean(each.sum(), by) if reduction == "mean" else each.sum()


def _mean(total: Tensor, by: Tensor) -> Tensor:
    """As in torch: NaN with zero gradients if nothing counts."""
    count = by.sum()
    nothing = count == 0
    return total / torch.where(nothing, 1.0, count) + torch.where(nothing, math.nan, 0.0)


def _soft(
    hidden: Tensor, matrix: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    """For probabilities: -Σ_v w[v]·((1−ε)·t[v] + ε/V)·logp[v] of each row."""
    none = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return gathered(hidden, matrix, none, _shares(hidden, target, weight, smoothing))[1]


def _shares(hidden: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """w·((1−ε)·t + ε/V) for targets t (…, V); no copy if that equals t."""
    if smoothing:
        target = (target.to(precise(hidden)) * (1 - smoothing)).add_(smoothing / target.shape[-1])
    return target if weight is None else target.to(precise(hidden)) * weight


class LinearCrossEntropyLoss(nn.Module):
    """torch.nn.LinearCrossEntropyLoss without the logits: a Linear and the loss of its output.

    Input (..., in_features), target (...) ids or (..., num_classes) probabilities. The rest is as
    in linear_cross_entropy. The weight is `linear.weight`.

    Examples
    --------
    >>> criterion = tt.LinearCrossEntropyLoss(1024, 151_936)
    >>> criterion.linear.weight = model.lm_head.weight
    >>> criterion(hidden[:, :-1], tokens[:, 1:]).backward()
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input (…, in_features): one number, or (…,) for "none"."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


# ---- divergence ----


def generalized_jsd(
    student: Tensor | tuple[Tensor, Tensor],
    teacher: Tensor | tuple[Tensor, Tensor],
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Tensor:
    """OPSD's divergence of student and teacher. The gradient goes to the student alone.

    Parameters
    ----------
    student, teacher : Tensor (..., V), or a pair of Tensors (..., D) and (V, D)
        Logits; or hidden states with the head's weight.
    labels, beta, temperature, reduction, logits_are_probs, top_k, token_clip
        As in `tinsmith.ops.generalized_jsd`; so are the errors and the reference.

    Returns
    -------
    Tensor
        One number, or the terms for reduction "none", in nats.

    Examples
    --------
    >>> loss = tt.generalized_jsd((x, head.weight), (y, teacher.weight), labels, top_k=32)
    """
    how = ops.Divergence.checked(beta, temperature, reduction, logits_are_probs, top_k, token_clip)
    (rows, weight), (other, other_weight) = (
        ops.pair(student, "student"),
        ops.pair(teacher, "teacher"),
    )
    for one, name in ((rows, "student"), (other, "teacher")):
        _floating(one, name)
    for matrix in (weight, other_weight):
        if matrix is not None:
            _floating(matrix, "weight")
    other = other.detach()
    other_weight = None if other_weight is None else other_weight.detach()
    sides = rows, weight, other, other_weight, labels
    beta, temperature, reduction, probs, k, clip = how
    if reduction == "none":
        return operators.jsd_terms(*sides, beta, temperature, probs, k, clip)
    needs = wants(rows, weight)
    return operators.jsd_loss(*sides, beta, temperature, reduction, probs, k, clip, *needs)[0]
