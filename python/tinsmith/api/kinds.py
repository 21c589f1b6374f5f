"""The types of the arguments: texts, ids and numbers, of one sequence and of several.

One sequence is an array (anything with __dlpack__) or a list of numbers, which may have images
among them; several are a list or a tuple of these. A result has the arguments' kind of array. No
type can express that, so it is Any.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, SupportsFloat, TypeAlias, TypeVar

from tinsmith.api.images import Image
from tinsmith.ops.tensors import Array

Ids: TypeAlias = Sequence[int | Image] | Array  # (N,)
Targets: TypeAlias = Ids | Sequence[Sequence[int]]  # (N,) or (N, K)
Numbers: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | Array  # shaped like Targets
Prompt: TypeAlias = str | Ids
Config: TypeAlias = Mapping[str, SupportsFloat | None]  # loss_fn_config

SomeIds = TypeVar("SomeIds", bound=Ids)  # list[SomeIds] takes a list of any one of them
SomePrompt = TypeVar("SomePrompt", bound=Prompt)

LossFn: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "dapo", "dppo", "cispo", "dro", "gspo",
    "stable_reinforce",
]  # fmt: skip
Normalization: TypeAlias = Literal["num_loss_tokens", "num_sequences"]
