"""What the in-process API's calls return. A repr shows the shapes of arrays, not their numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from tinsmith.api import plots
from tinsmith.api.names import Explained
from tinsmith.chat.text import CONTEXT, Reading, load_tokenizer, pieces
from tinsmith.ops.tensors import to_ids

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # an array, or a list of them for a list of sequences
    Arrays = TypeVar("Arrays", covariant=True, default=Any)
else:
    from typing import TypeVar

    Arrays = TypeVar("Arrays", covariant=True)

SHOWN_MAX = 3  # arrays of a list in a repr
REPR_MAX = 80  # characters of anything else
INTERNAL = frozenset({"core", "ending", "engine"})  # for advanced use: not offered by dir


def shape_of(value: Any) -> str:
    """An array's type and shape, float32[16, 20]; of a list, those of its first arrays."""
    if isinstance(value, list | tuple):
        shown = [shape_of(item) for item in value[:SHOWN_MAX]]
        more = len(value) - len(shown)
        return f"[{', '.join(shown)}{f', … {more} more' if more else ''}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if not hasattr(value, "shape"):
        return shorten(repr(value), REPR_MAX)
    dtype = str(value.dtype).rpartition(".")[2]  # torch.float32
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class Public(Explained):
    """dir() lists a class's public names, without INTERNAL."""

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

    Attributes
    ----------
    loss : float
        The sum over all targets, in nats if the loss is measured in nats.
    logprobs : float32 array of the targets' shape and kind, or a list of them
        The targets' log-probabilities, in nats.

    Examples
    --------
    >>> out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
    >>> round(out.loss, 3) == round(-float(out.logprobs.sum()), 3)
    True
    """

    loss: float
    logprobs: Arrays

    def _repr_html_(self) -> str | None:
        return plots.curves(repr(self), {"log-probability": _several(self.logprobs)}, "position")


@dataclass(frozen=True, repr=False)
class DistillOutput(ForwardBackwardOutput[Arrays]):
    """The result of `generalized_jsd` and `generalized_jsd_topk`.

    Attributes
    ----------
    loss, logprobs
        Those of ForwardBackwardOutput.
    divergences : float32 array (N,), or a list of them
        At each position, before weighting, in nats; 0 where the weight is 0.

    Examples
    --------
    >>> row = [55, 73, 327]
    >>> adapter.generalized_jsd(row[:-1], row[1:], [1, 1], row).divergences.shape
    (2,)
    """

    divergences: Arrays

    def _repr_html_(self) -> str | None:
        return plots.curves(repr(self), {"divergence": _several(self.divergences)}, "position")


@dataclass(frozen=True, repr=False)
class OptimStepOutput(Result):
    """The result of `optim_step`.

    Attributes
    ----------
    grad_norm : float
        Of the gradient before clipping, after normalization.
    grad_norm_clipped : float
        Of the gradient after both.
    weight_norm : float
        Of the weights after the step.
    loss : float
        The summed loss of the calls whose gradients the step used.
    loss_tokens, loss_sequences : float
        Of these calls, the tokens and sequences with a gradient that was not zero.

    Examples
    --------
    >>> out = adapter.forward_backward([[55, 73], [327]], [[73, 327], [310]])
    >>> step = adapter.optim_step()
    >>> step.loss_tokens, step.loss_sequences
    (3.0, 2.0)
    """

    grad_norm: float
    grad_norm_clipped: float
    weight_norm: float
    loss: float
    loss_tokens: float
    loss_sequences: float


class History(Public, Sequence[OptimStepOutput]):
    """The optimizer steps of an adapter, oldest first; a notebook shows their curves.

    Examples
    --------
    >>> for _ in range(3):
    ...     out = adapter.forward_backward([55, 73, 327], [73, 327, 310])
    ...     step = adapter.optim_step(learning_rate=1e-2)
    >>> adapter.history
    <tinsmith.History: 3 steps, loss from ... to ...>
    >>> adapter.history[-1] == step
    True
    """

    def __init__(self, steps: Sequence[OptimStepOutput]):
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, index: int) -> OptimStepOutput: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: int | slice) -> "OptimStepOutput | History":
        return History(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        if not self._steps:
            return "<tinsmith.History: no steps>"
        first, last = (shape_of(self._steps[place].loss) for place in (0, -1))
        return f"<tinsmith.History: {len(self)} steps, loss from {first} to {last}>"

    def _repr_html_(self) -> str | None:
        losses = [step.loss / max(step.loss_tokens, 1.0) for step in self]
        norms = [step.grad_norm for step in self]
        return plots.curves(repr(self), {"loss a token": [losses], "grad_norm": [norms]}, "step")


@dataclass(frozen=True, repr=False)
class TopKLogprobs(Result):
    """The K likeliest ids at each position, the likeliest first.

    Attributes
    ----------
    ids : int32 array (N, K)
    logprobs : float32 array (N, K)
        In nats. Both have the kind of the tokens' array.

    Examples
    --------
    >>> top = model.topk_logprobs("What time is it?", 3)
    >>> top.ids.shape, bool((top.logprobs[:, 0] >= top.logprobs[:, 1]).all())
    ((4, 3), True)
    """

    ids: Any
    logprobs: Any


@dataclass(frozen=True)
class Ending:
    """How a sequence is decoded to text: with a folder's tokenizer, after the prompt's last tokens,
    without the stop id or stop string."""

    folder: Path
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    prompt: tuple[int, ...] = ()
    lead: str = ""  # a first character of a chat answer that belongs to the template

    def behind(self, prompt: NDArray[np.int32], lead: str = "") -> "Ending":
        """The same, after a prompt of ids (N,)."""
        return replace(self, prompt=tuple(prompt[-CONTEXT:].tolist()), lead=lead)

    def read(self, tokens: list[int]) -> tuple[str, str | None]:
        """The text of a sequence's tokens, and the stop string that ended it, if any."""
        tokenizer = load_tokenizer(self.folder)
        reading = Reading(tokenizer, self.prompt, self.texts, self.ids, lead=self.lead)
        text = "".join(map(reading.add, tokens)) + reading.end()
        return text, reading.found


@dataclass(frozen=True, repr=False)
class SampledSequence(Result):
    """One drawn sequence. Its arrays have the kind of the prompt.

    Attributes
    ----------
    tokens : int32 array (n,)
        Including the stop token if there is one.
    logprobs : float32 array (n,)
        In nats, of the distribution that each token was drawn from.
    stop_reason : str
        "stop" or "length".
    topk_ids, topk_logprobs : arrays (n, K), or None
        None unless you pass topk_logprobs.

    Examples
    --------
    >>> [answer] = model.sampler().sample("What time is it?", max_tokens=5, stop=[])
    >>> len(answer.tokens), answer.logprobs.shape, answer.stop_reason
    (5, (5,), 'length')
    """

    tokens: Any
    logprobs: Any
    stop_reason: str
    topk_ids: Any = None
    topk_logprobs: Any = None
    ending: Ending | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The tokens' text after the prompt, without special tokens and without the stop string.

        Raises
        ------
        RuntimeError
            If the package tokenizers is not installed.
        ValueError
            If the model has no tokenizer that can be read.

        Examples
        --------
        >>> [answer] = model.sampler().sample("What time is it?", max_tokens=5, stop=[])
        >>> answer.text == model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        True
        """
        if self.ending is None:
            raise ValueError("this sequence was not drawn by a model: it has no tokenizer")
        return self.ending.read(to_ids(self.tokens, "tokens").tolist())[0]

    @property
    def stop(self) -> str | int | None:
        """The stop string or stop id that ended it; None if it reached its length.

        Examples
        --------
        >>> [answer] = model.sampler().sample("What time is it?", max_tokens=5, stop=[])
        >>> answer.stop is None
        True
        """
        tokens = to_ids(self.tokens, "tokens").tolist()
        if self.ending is None or self.stop_reason != "stop":
            return None
        found = self.ending.read(tokens)[1] if self.ending.texts else None
        return int(tokens[-1]) if found is None else found

    def _repr_html_(self) -> str | None:
        if self.ending is None:
            return None
        try:
            tokenizer = load_tokenizer(self.ending.folder)
        except (RuntimeError, ValueError):  # the plain repr is shown instead
            return None
        tokens = to_ids(self.tokens, "tokens").tolist()
        shown = pieces(tokenizer, tokens, self.ending.prompt)
        return plots.shaded(repr(self), shown, self.logprobs)


@dataclass(frozen=True, repr=False)
class ChatAnswer(SampledSequence):
    """The result of `Model.chat`: a sampled sequence with its prompt and its message.

    Attributes
    ----------
    prompt : int32 array (N,), or a list
        The prompt's ids; if it has images, a list of ids and of `Image`s.
    message : dict
        The answer as a message, to append to the conversation: its role, content, and tool_calls if
        any.

    Examples
    --------
    >>> answer = model.chat("What time is it?", max_tokens=8)
    >>> tokens = [*answer.prompt, *answer.tokens]  # to score, or to train on
    >>> model.logprobs(tokens).shape == (len(tokens) - 1,)
    True
    """

    prompt: Any = None
    message: dict[str, Any] = field(default_factory=dict)
