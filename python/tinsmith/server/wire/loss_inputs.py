"""Which inputs of a datum its loss reads, and what becomes of the others.

The engine's table says what a loss reads. Any other input would change nothing, whatever its sender
meant by it, so it is refused. TOLERATED are two that say which targets count, as weights and
advantages do: they are taken where these agree. UNUSED is what a recipe sends with a loss that has
no use for it.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.loss_names import meant

TARGETS = "target_tokens"
TOLERATED = ("mask", "weights")
# Together, a rollout: the cookbook's SDFT with topk=0 trains on it with cross_entropy.
UNUSED = {"cross_entropy": {"advantages", "logprobs"}}


def check_loss(name: str, known: Collection[str]) -> None:
    """ValueError for a loss that there is not, with what its name may have meant."""
    if name not in known:
        raise ValueError(f"unknown loss {name!r}; there are {sorted(known)}{meant(name, known)}")


def unread(where: str, row: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """The inputs that came and that the loss need not read; ValueError for one that nothing is
    known of."""
    reads = {TARGETS, *(item["name"] for item in row["inputs"])}
    reads |= {row["tokens"]} if row["tokens"] else set()
    unused, came = UNUSED.get(row["name"], set()), set(keys)
    others = sorted(came - reads - (unused if unused <= came else set()))
    for key in others:
        if key not in TOLERATED:
            near = difflib.get_close_matches(key, reads, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{where}: {row['name']} does not read {key!r:.100} of loss_fn_inputs; it reads "
                f"{sorted(reads)}{guess}"
            )
    return others


def check_mask(
    where: str, row: Mapping[str, Any], key: str, mask: NDArray[np.float32], gate: NDArray[Any]
) -> None:
    """ValueError where a mask is not 1 and the loss counts the target: multiplied with, it would
    change the loss. `gate` is the loss's own input whose zeros take targets out, or ones."""
    odd = np.flatnonzero((mask != 1) & (gate != 0))
    if len(odd):
        at, name = int(odd[0]), row["gate"]
        its = f", where {name} is {gate[at]:g}: multiply {name} by it, and" if name else ":"
        raise ValueError(
            f"{where}: {row['name']} does not read {key}, which is {mask[at]:g} at target {at}"
            f"{its} leave {key} out"
        )
