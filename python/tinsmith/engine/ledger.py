"""What holds memory on base models: a table of holds with running sums.

Whoever takes or frees memory says so here, once. The sums that every request needs (all bytes, and
those that nothing can free) are kept up to date with each change, so none of them walks the table.
Only the sentence of a refusal, which names the largest holds, does.
"""

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hold:
    """Memory on a base model besides its weights.

    pins: its data would be lost with the model, unless it `moves`. yields: it is dropped anyway as
    soon as memory is short. moves: its data can be moved elsewhere first, as an idle run's to disk.
    trains: it needs a training step's memory, which all such holds of a model share."""

    base: Path
    bytes: int
    what: str
    pins: bool
    yields: bool = False
    moves: bool = False
    trains: bool = False

    @property
    def stays(self) -> bool:
        """Whether nothing frees its bytes as long as its owner keeps them."""
        return self.pins and not self.yields and not self.moves


class Ledger:
    """See the file's header. A hold has a key that its owner chooses."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, Hold] = {}
        self.bytes = 0  # of all holds
        self.staying = 0  # of those that stay
        self._pinned: Counter[Path] = Counter()  # holds that pin a base model
        self._staying: Counter[Path] = Counter()  # of these, those that stay
        self._training: Counter[Path] = Counter()  # holds that train
        self._training_staying: Counter[Path] = Counter()  # of these, those that do not move

    def set(self, key: Hashable, hold: Hold) -> None:
        """Adds a hold, or replaces the one of that key."""
        self.drop(key)
        self._holds[key] = hold
        self._count(hold, 1)

    def drop(self, key: Hashable) -> None:
        """Removes a hold, if there is one."""
        hold = self._holds.pop(key, None)
        if hold is not None:
            self._count(hold, -1)

    def pinned(self, base: Path) -> bool:
        """Whether evicting a base model now would lose data."""
        return base in self._pinned

    def pinned_for_good(self, base: Path) -> bool:
        """Whether it would after all that yields or moves has gone."""
        return base in self._staying

    def trains(self, base: Path) -> bool:
        """Whether a base model's step must fit."""
        return base in self._training

    def trains_for_good(self, base: Path) -> bool:
        """Whether it must after all that moves has gone."""
        return base in self._training_staying

    def all(self) -> list[Hold]:
        """All holds, in a walk."""
        return list(self._holds.values())

    def largest(self, count: int) -> list[Hold]:
        """The holds of the most bytes, in a walk."""
        return heapq.nlargest(count, self._holds.values(), key=lambda hold: hold.bytes)

    def _count(self, hold: Hold, by: int) -> None:
        self.bytes += by * hold.bytes
        self.staying += by * hold.bytes * hold.stays
        for counter, counts in (
            (self._pinned, hold.pins),
            (self._staying, hold.stays),
            (self._training, hold.trains),
            (self._training_staying, hold.trains and not hold.moves),
        ):
            if counts:
                counter[hold.base] += by
                if not counter[hold.base]:
                    del counter[hold.base]
