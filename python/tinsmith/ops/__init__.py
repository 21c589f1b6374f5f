"""The engine's operations on your own arrays, with their gradients, for a loop in a notebook or for
one part of another trainer.

You pass rows of the vocabulary as logits (…, V), or as hidden states (…, D) with the head's weight
(V, D). The second form never holds all logits at once: 128 MiB of them at a time, 1 GiB on a GPU.

Arrays are NumPy's, or anything with `__dlpack__` (torch's, CuPy's, JAX's) in the memory of the CPU
or of an NVIDIA GPU. They are float32, bfloat16, or uint16 with bf16's bits, and C-contiguous; they
are read zero-copy. All arrays of a call must be on one device, but ids, labels, weights and
gradients may come from the CPU. Results have the first argument's kind and device; a gradient has
its input's type. Sums are float32. On a GPU, products and the gradient of logits are bf16: float32
is rounded to it.

`x_backward` takes the gradient of the result of `x`, then x's own arguments, and returns one
gradient for each differentiable array. tinsmith.torch has the same operations for torch, with
autograd. Calls release the GIL and take turns.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tinsmith import _core
from tinsmith.ops.arrays import (
    floats_near,
    gradient_like,
    on_host,
    result_like,
    row_ids,
    rows_name,
    scalar_like,
    shape_of_rows,
)
from tinsmith.ops.tensors import Array

__all__ = [
    "gather_logprobs",
    "gather_logprobs_backward",
    "generalized_jsd",
    "generalized_jsd_backward",
    "topk_logprobs",
    "weighted_cross_entropy",
    "weighted_cross_entropy_backward",
]

# Names from before 0.1, and the names of today.
RENAMED = {
    "linear_cross_entropy": "weighted_cross_entropy",
    "linear_cross_entropy_backward": "weighted_cross_entropy_backward",
}
Ids: TypeAlias = Array | Sequence[int] | Sequence[Sequence[int]]
Floats: TypeAlias = Array | Sequence[float] | Sequence[Sequence[float]]
IGNORED = -100  # rows with this label are ignored, as in Hugging Face
COLDEST, HOTTEST = 1e-30, 1e30  # limits of a temperature
K_MAX = (1 << 31) - 1
REDUCTIONS = ("batchmean", "sum", "mean", "none")


if not TYPE_CHECKING:  # a type checker would accept every attribute

    def __getattr__(name):
        now = RENAMED.get(name)
        said = f": tinsmith.ops.{now} is its name now" if now else ""
        raise AttributeError(f"module 'tinsmith.ops' has no attribute {name!r}{said}", name=name)


# ---- log-probabilities ----


def topk_logprobs(rows: Array, k: int, *, weight: Array | None = None) -> tuple[Any, Any]:
    """The k likeliest ids of each row, and their log-probabilities.

    Parameters
    ----------
    rows : array (..., V) or (..., D)
        Logits, or hidden states where `weight` is given.
    k : int
        From 0 to V.
    weight : array (V, D), optional
        The head's weight, which turns hidden states into logits.

    Returns
    -------
    ids : int32 array (..., k)
        The likeliest first; among equals, the lower id.
    logprobs : float32 array (..., k)
        In nats.

    Raises
    ------
    ValueError
        If k is larger than the vocabulary, or shapes do not fit.
    TypeError
        If an argument is no array, or of the wrong type.

    See Also
    --------
    gather_logprobs_backward : Takes these ids, for the gradient.

    Examples
    --------
    >>> ids, logprobs = tinsmith.ops.topk_logprobs(np.ones((3, 50), np.float32), 2)
    >>> ids[0].tolist(), logprobs.shape
    ([0, 1], (3, 2))
    """
    lead = shape_of_rows(rows, rows_name(weight))[:-1]
    ids, logprobs = _core.topk(rows, weight, k)
    return tuple(result_like(rows, x, (*lead, k)) for x in (ids, logprobs))


def gather_logprobs(rows: Array, ids: Ids, *, weight: Array | None = None) -> Any:
    """Log-probabilities of given ids.

    Parameters
    ----------
    rows : array (..., V) or (..., D)
        Logits, or hidden states where `weight` is given.
    ids : int array (...) or (..., K)
        One id or K of them for each row.
    weight : array (V, D), optional
        The head's weight, which turns hidden states into logits.

    Returns
    -------
    float32 array
        Of ids' shape, in nats.

    Raises
    ------
    IndexError
        If an id is not in the vocabulary.
    ValueError
        If shapes do not fit.
    TypeError
        If an argument is no array, or of the wrong type.

    Examples
    --------
    >>> hidden, weight = np.ones((3, 8), np.float32), np.ones((50, 8), np.float32)
    >>> tinsmith.ops.gather_logprobs(hidden, [0, 1, 2], weight=weight).round(3).tolist()
    [-3.9119999408721924, -3.9119999408721924, -3.9119999408721924]
    """
    return gather(rows, weight, ids).logprobs


def gather_logprobs_backward(
    grad: Floats, rows: Array, ids: Ids, *, weight: Array | None = None
) -> Any:
    """The gradient of `gather_logprobs`.

    Parameters
    ----------
    grad : float32 array
        The loss's derivative with respect to each log-probability, of ids' shape.
    rows, ids, weight
        As in `gather_logprobs`; so are the errors.

    Returns
    -------
    drows : array
        Of rows' shape and type.
    dweight : array
        Of weight's shape and type; only where `weight` is given.

    Examples
    --------
    >>> logits, ids = np.zeros((2, 4), np.float32), [3, 0]
    >>> tinsmith.ops.gather_logprobs_backward([1.0, 0.0], logits, ids).tolist()
    [[-0.25, -0.25, -0.25, 0.75], [0.0, 0.0, 0.0, 0.0]]
    """
    out = gather(rows, weight, ids, grad)
    return out.drows if weight is None else (out.drows, out.dweight)


def weighted_cross_entropy(hidden: Array, weight: Array, ids: Ids, weights: Floats) -> Any:
    """Tinker's cross_entropy: -Σ weights · log-probabilities of ids.

    Parameters
    ----------
    hidden : array (..., D)
        Hidden states.
    weight : array (V, D)
        The head's weight.
    ids : int array (...) or (..., K)
        The targets.
    weights : float32 array
        Of ids' shape.

    Returns
    -------
    float
        The sum, in nats; a 0-dimensional array if hidden is not NumPy's.

    Raises
    ------
    IndexError
        If an id is not in the vocabulary.
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> hidden, weight = np.ones((3, 8), np.float32), np.ones((50, 8), np.float32)
    >>> weights = [1.0, 0.0, 1.0]
    >>> round(tinsmith.ops.weighted_cross_entropy(hidden, weight, [0, 1, 2], weights), 3)
    7.824
    """
    logprobs = on_host(gather(hidden, weight, ids).logprobs, "logprobs", np.float32, hidden)
    w = _weights(weights, logprobs.shape, hidden)
    return scalar_like(hidden, -float(np.sum(w * logprobs, dtype=np.float64)))


def weighted_cross_entropy_backward(
    grad: float, hidden: Array, weight: Array, ids: Ids, weights: Floats
) -> tuple[Any, Any]:
    """The gradient of grad · `weighted_cross_entropy` for the same arguments, with the same errors.

    Returns
    -------
    dhidden, dweight : array
        Of hidden's and of weight's shape and type.

    Examples
    --------
    >>> hidden, weight = np.ones((3, 8), np.float32), np.ones((50, 8), np.float32)
    >>> dhidden, dweight = tinsmith.ops.weighted_cross_entropy_backward(
    ...     1.0, hidden, weight, [0, 1, 2], [1.0, 0.0, 1.0]
    ... )
    >>> dhidden.shape, dweight.shape
    ((3, 8), (50, 8))
    """
    lead = shape_of_rows(hidden, "hidden")[:-1]
    w = _weights(weights, row_ids(ids, lead, hidden).shape, hidden)
    out = gather(hidden, weight, ids, -float(grad) * w)
    return out.drows, out.dweight


def _weights(weights: Any, shape: tuple[int, ...], hidden: Any) -> np.ndarray:
    w = on_host(weights, "weights", np.float32, hidden)
    if w.shape != shape:
        raise ValueError(f"weights must be of ids' shape {shape}, not {w.shape}")
    return w


class Gathered(NamedTuple):
    """The result of gather: log-probabilities, the requested gradients, and each row's logΣexp of
    the logits as the sum of two numbers, (…, 2)."""

    logprobs: Any
    drows: Any
    dweight: Any
    lse: Any


def gather(
    rows: Any,
    weight: Any,
    ids: Any,
    grad: Any = None,
    *,
    lse: Any = None,
    want: tuple[bool, bool] = (True, True),
) -> Gathered:
    """Log-probabilities, and with `grad` the requested gradients, in one pass. With `lse` from an
    earlier call it computes the gradients only, which is faster."""
    own = row_ids(ids, shape_of_rows(rows, rows_name(weight))[:-1], rows)
    if grad is not None:
        grad = floats_near(grad, "grad", rows)
        if tuple(grad.shape) != own.shape:
            raise ValueError(f"grad must be of ids' shape {own.shape}, not {tuple(grad.shape)}")
    logprobs, drows, dweight, found = _core.gather(rows, weight, own.flat, own.K, grad, lse, *want)
    gradients = gradient_like(rows, drows), gradient_like(weight, dweight)
    if lse is not None:
        return Gathered(None, *gradients, lse)
    lead = tuple(rows.shape)[:-1]
    return Gathered(
        result_like(rows, logprobs, own.shape), *gradients, result_like(rows, found, (*lead, 2))
    )


# ---- divergence ----


class Divergence(NamedTuple):
    """The checked settings of generalized_jsd."""

    beta: float
    temperature: float
    reduction: str
    logits_are_probs: bool
    top_k: int
    token_clip: float

    @classmethod
    def checked(
        cls,
        beta: float,
        temperature: float,
        reduction: str,
        logits_are_probs: bool,
        top_k: int | None,
        token_clip: float | None,
    ) -> "Divergence":
        """The settings of generalized_jsd; ValueError names one that is out of range."""
        if not 0 <= beta <= 1:
            raise ValueError(f"beta must be in [0, 1], not {beta}")
        if not COLDEST <= temperature <= HOTTEST:
            raise ValueError(
                f"temperature must be a positive number, from {COLDEST:g} to {HOTTEST:g}, not "
                f"{temperature}"
            )
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
        if token_clip is not None and math.isnan(token_clip):
            raise ValueError("token_clip must be a number, not NaN")
        if top_k is not None and top_k > K_MAX:
            raise ValueError(f"top_k must be at most {K_MAX}, not {top_k}")
        k = 0 if top_k is None or top_k <= 0 or logits_are_probs else int(top_k)
        clip = math.inf if token_clip is None else float(token_clip)
        return cls(float(beta), float(temperature), reduction, bool(logits_are_probs), k, clip)


def generalized_jsd(
    student: Array | tuple[Array, Array],
    teacher: Array | tuple[Array, Array],
    labels: Ids | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Any:
    """The generalized Jensen-Shannon divergence of two distributions over the vocabulary.

    Names and meanings are OPSD's. Between β 0 and 1 it is β·KL(teacher‖m) + (1-β)·KL(student‖m),
    with m = (1-β)·student + β·teacher. The gradient goes to the student alone.

    Parameters
    ----------
    student, teacher : array (..., V), or a pair of arrays (..., D) and (V, D)
        Logits; or hidden states with the head's weight.
    labels : int array (...), optional
        Rows with the label -100 are ignored.
    beta : float
        From 0, KL(teacher‖student), to 1, KL(student‖teacher).
    temperature : float
        Divides both sides' logits; 1e-30 to 1e30.
    reduction : {"batchmean", "sum", "mean", "none"}
        The sum divided by the rows that are not ignored (without labels, by the first dimension);
        the sum; the sum divided by the number of terms; or the terms.
    logits_are_probs : bool
        Whether both sides are probabilities. Then neither temperature nor top_k is applied.
    top_k : int, optional
        Both sides are restricted to the teacher's top_k likeliest ids, and renormalized over them;
        among equals, the lower ids. None and 0: the whole vocabulary.
    token_clip : float, optional
        The upper limit of one term (one row and one id).

    Returns
    -------
    float
        In nats; a 0-dimensional array if student is not NumPy's. A mean of no rows is NaN. With
        reduction "none" an array (rows that are not ignored, V), without labels (..., V); with
        top_k, top_k columns. A term without mass is 0, even where a logit is -inf.

    Raises
    ------
    ValueError
        If a setting is out of range, or shapes do not fit.
    TypeError
        If an argument is no array, or of the wrong type.

    References
    ----------
    Agarwal et al., On-Policy Distillation of Language Models (GKD), arXiv:2306.13649.

    Examples
    --------
    >>> hidden, weight = np.ones((2, 8), np.float32), np.ones((4, 8), np.float32)
    >>> teacher, labels = np.zeros((2, 4), np.float32), [-100, 1]
    >>> loss = tinsmith.ops.generalized_jsd((hidden, weight), teacher, labels, top_k=3)
    >>> round(loss, 6), tinsmith.ops.generalized_jsd(teacher, teacher, reduction="none").shape
    (0.0, (2, 4))
    """
    how = Divergence.checked(beta, temperature, reduction, logits_are_probs, top_k, token_clip)
    return jsd(student, teacher, labels, how).loss


def generalized_jsd_backward(
    grad: float | Array,
    student: Array | tuple[Array, Array],
    teacher: Array | tuple[Array, Array],
    labels: Ids | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Any:
    """The gradient of grad · `generalized_jsd` for the same arguments, with the same errors.

    Parameters
    ----------
    grad : float or array
        Of the loss's shape: an array for reduction "none".
    student, teacher, labels, ...
        As in `generalized_jsd`.

    Returns
    -------
    dlogits, or (dhidden, dweight) where student is a pair : array
        Of the student's shapes and types.

    Examples
    --------
    >>> student, teacher = np.zeros((2, 4), np.float32), np.eye(2, 4, dtype=np.float32)
    >>> tinsmith.ops.generalized_jsd_backward(1.0, student, teacher).shape
    (2, 4)
    """
    how = Divergence.checked(beta, temperature, reduction, logits_are_probs, top_k, token_clip)
    out = jsd(student, teacher, labels, how, grad=grad)
    return out.drows if not isinstance(student, tuple) else (out.drows, out.dweight)


class JsdResult(NamedTuple):
    """The result of jsd: the loss in the student's kind of array, and the requested gradients."""

    loss: Any
    drows: Any
    dweight: Any


def pair(side: Any, name: str) -> tuple[Any, Any]:
    """Logits and None, or hidden states and the weight that turns them into logits."""
    if not isinstance(side, tuple):
        return side, None
    if len(side) != 2:
        raise TypeError(f"{name} must be logits or a pair (hidden, weight), not {len(side)} arrays")
    return side


def _keep(labels: Any, lead: tuple[int, ...], rows: Any) -> np.ndarray | None:
    """A byte for each row: whether it counts."""
    if labels is None:
        return None
    array = on_host(labels, "labels", np.int64, rows)
    if array.shape != lead:
        raise ValueError(f"labels must be {lead}, one for each row, not {array.shape}")
    return (array != IGNORED).astype(np.uint8).ravel()


def jsd(
    student: Any,
    teacher: Any,
    labels: Any,
    how: Divergence,
    *,
    grad: Any = None,
    want: tuple[bool, bool] = (True, True),
) -> JsdResult:
    """The loss, and with `grad` (of the loss's shape) the gradients in the same pass."""
    rows, weight = pair(student, "student")
    other, other_weight = pair(teacher, "teacher")
    if how.logits_are_probs and (weight is not None or other_weight is not None):
        raise ValueError("logits_are_probs needs probabilities, not hidden states and weights")
    shape, other_shape = shape_of_rows(rows, "student"), shape_of_rows(other, "teacher")
    lead = shape[:-1]
    if other_shape[:-1] != lead:
        raise ValueError(f"student has rows {lead}, teacher {other_shape[:-1]}")
    N, V = math.prod(lead), shape[-1] if weight is None else int(weight.shape[0])
    keep, each = _keep(labels, lead, rows), how.reduction == "none"
    kept = N if keep is None else int(keep.sum())
    width = how.top_k or V
    batch = (lead[0] if lead else 1) if keep is None else kept
    over = {"sum": 1, "none": 1, "mean": kept * width, "batchmean": batch}[how.reduction]
    out_shape = () if not each else (*lead, width) if keep is None else (kept, width)
    scale = None
    if grad is not None:
        grad = (
            np.asarray(grad) if isinstance(grad, float | int) else floats_near(grad, "grad", rows)
        )
        got = tuple(grad.shape)
        if got != out_shape:
            raise ValueError(f"grad must be of the loss's shape {out_shape}, not {got}")
        scale = grad if each else np.full(kept, float(grad) / max(over, 1), np.float32)
    settings = (how.beta, how.temperature, how.token_clip, how.top_k, how.logits_are_probs, each)
    loss, drows, dweight = _core.jsd(
        rows, weight, other, other_weight, keep, scale, settings, *want
    )
    loss = result_like(rows, loss, out_shape if each else (kept,))
    if not each:
        total = float(on_host(loss, "loss", np.float32, rows).sum(dtype=np.float64))
        loss = scalar_like(rows, total / over if over else math.nan)
    return JsdResult(loss, gradient_like(rows, drows), gradient_like(weight, dweight))
