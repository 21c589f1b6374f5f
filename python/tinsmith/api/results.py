"""What the in-process API's calls return. A repr shows the shapes of arrays, not their numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

SHOWN_MAX = 3  # arrays of a list in a repr
INTERNAL = frozenset({"core", "engine"})  # for advanced use: not offered by dir

Arrays = TypeVar("Arrays", covariant=True)  # an array, or for a list of sequences a list of them


def shape_of(value: Any) -> str:
    """An array's type and shape, float32[16, 20]; of a list, those of its first arrays."""
    if isinstance(value, list | tuple):
        shown = [shape_of(item) for item in value[:SHOWN_MAX]]
        more = len(value) - len(shown)
        return f"[{', '.join(shown)}{f', … {more} more' if more else ''}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if not hasattr(value, "shape"):
        return repr(value)
    dtype = str(value.dtype).rpartition(".")[2]  # torch.float32
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


class Public:
    """What dir offers: a class's public names, without what is inside."""

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name[0] != "_" and name not in INTERNAL]


@dataclass(frozen=True, repr=False)
class Result(Public):
    """The common part of the dataclasses below."""

    def __repr__(self) -> str:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
        shown = [f"{name}={shape_of(one)}" for name, one in values.items() if one is not None]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class ForwardBackwardOutput(Result, Generic[Arrays]):
    """The result of `forward_backward`.

    loss: the sum over all targets, in nats if the loss is measured in nats. logprobs: the targets'
    log-probabilities, in the targets' shape and kind, float32; a list for a list."""

    loss: float
    logprobs: Arrays


@dataclass(frozen=True, repr=False)
class DistillOutput(ForwardBackwardOutput[Arrays]):
    """The result of `generalized_jsd`.

    divergences: of each position, before its weight; (N,) float32, 0 where the weight is 0."""

    divergences: Arrays


@dataclass(frozen=True, repr=False)
class OptimStepOutput(Result):
    """The result of `optim_step`.

    grad_norm: of the gradient before clipping, after normalization. grad_norm_clipped: after both.
    weight_norm: of the weights after the step. loss: the sum of the losses of the calls behind the
    step. loss_tokens and loss_sequences: the tokens and sequences of these calls with a gradient
    that was not zero."""

    grad_norm: float
    grad_norm_clipped: float
    weight_norm: float
    loss: float
    loss_tokens: float
    loss_sequences: float


@dataclass(frozen=True, repr=False)
class TopKLogprobs(Result):
    """The K most likely ids at each position, the likeliest first.

    ids (N, K): int32. logprobs (N, K): float32, in nats. Both have the kind of the tokens' array.
    """

    ids: Any
    logprobs: Any


@dataclass(frozen=True, repr=False)
class SampledSequence(Result):
    """One drawn sequence.

    tokens (n,): int32, with the stop token if there is one. logprobs (n,): float32, in nats, of the
    distribution that each token was drawn from. stop_reason: "stop" or "length". topk_ids and
    topk_logprobs: (n, K) if you asked for them, else None. Arrays have the kind of the prompt.
    """

    tokens: Any
    logprobs: Any
    stop_reason: str
    topk_ids: Any = None
    topk_logprobs: Any = None
