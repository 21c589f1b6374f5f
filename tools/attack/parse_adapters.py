"""Attacks what reads an adapter's folder, ours and PEFT's, mutated: the configuration and the
safetensors files, whose numbers are read into an adapter that is used again and again. adapters.py
also trains on what it reads; meta.json is another program's. The files are in memory.

A folder is refused with a sentence, and the report says by which function: then the adapter is as
it was, to the bit. Or it is read, and then all numbers are finite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.models.registry import Family

from tools.attack import adapters, common, memory, tiny
from tools.attack.common import Attempt, One

KEPT = ("weights", "m", "v")


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace() as root:
        loaded = tiny.load(tiny.make(root / "model"))
        ours = adapters.saved(root / "saved", loaded)
        theirs = {name: ours[name] for name in (checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE)}
        adapter = Kept(_core.Adapter(loaded.core, rank=2, seed=3))

        def one(attempt: Attempt) -> str:
            rng = attempt.rng
            files = dict(rng.choice((ours, theirs)))
            for _ in range(rng.choice((1, 1, 2))):
                adapters.mutate(attempt, files)
            if rng.random() < 0.9:
                adapters.rehash(files)
            memory.put(files)
            if rng.random() < 0.2:
                return _described()
            optimizer = checkpoint.META_FILE in files and rng.random() < 0.7
            return adapter.load(loaded.family, optimizer=optimizer)

        with memory.reading():
            yield one


def _described() -> str:
    """What peft.load_meta says of the folder, which is enough for a run to begin with it."""
    try:
        found = peft._meta_of(memory.Version())
    except Exception as error:
        common.refusal(error)
        return f"refused by {common.where(error)}"
    if not (found.rank > 0 and 0 < found.alpha < float("inf")):
        raise common.Failure(f"it is described as {found}")
    return "described"


class Kept:
    """The adapter, and its state."""

    def __init__(self, adapter: _core.Adapter):
        self.adapter = adapter
        self.state = self._look()

    def _look(self) -> list[Any]:
        vectors = (self.adapter.read(what) for what in KEPT)
        return [self.adapter.step, self.adapter.pending, *vectors]

    def load(self, family: Family, *, optimizer: bool) -> str:
        """Reads the folder as peft.load_into does."""
        try:
            peft._load_version(memory.Version(), family, self.adapter, optimizer=optimizer)
        except Exception as error:
            common.refusal(error)
            if not all(map(np.array_equal, self._look(), self.state)):
                raise common.Failure("the adapter has changed") from error
            return f"refused by {common.where(error)}"
        self.state = self._look()
        for what, vector in zip(KEPT, self.state[2:], strict=True):
            if _core.first_bad(vector) >= 0:
                raise common.Failure(f"{what} is not finite")
        return f"taken {'with' if optimizer else 'without'} its optimizer"
