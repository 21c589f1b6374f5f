"""Which case an op's arguments are: the seed that drew them, and the sizes of their builder.

A builder of op_cases.py is given a generator and sizes, and gives arrays. Whoever finds a wrong
result later has the arrays alone. So the last case of each op is remembered here with weak
references to its arrays, by which it is known again; no test has to hand it on.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """How an op's arguments were made; `seed` is a sentence where a number does not tell it."""

    seed: str
    sizes: dict[str, Any]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.sizes.items())
        return f"seed {self.seed}: {sizes}"


_last: dict[str, tuple[Case, list[weakref.ref]]] = {}


def seed_of(rng: np.random.Generator) -> str:
    """The seed of a generator, and whether it has drawn before."""
    bits = rng.bit_generator
    fresh = bits.state == type(bits)(bits.seed_seq.entropy).state
    return f"{bits.seed_seq.entropy}{'' if fresh else ' (after other draws)'}"


def remembered(op: str, build: Callable[..., dict]) -> Callable[..., dict]:
    """A builder whose last case is known to case_of."""
    _, *names = inspect.signature(build).parameters

    @functools.wraps(build)
    def built(*args: Any, **sizes: Any) -> dict:
        rng, *rest = args
        seed, made = seed_of(rng), build(*args, **sizes)
        case = Case(seed, dict(zip(names, rest, strict=False)) | sizes)
        _last[op] = case, [weakref.ref(array) for array in arrays_of(made)]
        return made

    return built


def arrays_of(args: dict) -> list:
    """What an op's arguments are known again by: arrays, and base weights."""
    return [one for one in args.values() if isinstance(one, np.ndarray) or hasattr(one, "kept")]


def case_of(op: str, args: dict) -> Case:
    """The case that an op's arguments are. If no builder made them, their numbers are told."""
    case, arrays = _last.get(op, (None, []))
    given = {id(array) for array in arrays_of(args)}
    own = [id(array()) in given for array in arrays]
    if case and any(own):
        return case if all(own) else Case(f"{case.seed} (and changed)", case.sizes)
    numbers = {name: one for name, one in args.items() if isinstance(one, int | float)}
    return Case("not known", numbers)
