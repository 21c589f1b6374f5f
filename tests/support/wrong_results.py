"""What a wrong result tells those who mend it, who may not have the card that gave it.

`told` says where it is wrong: its first wrong elements; wrong rows and columns by their remainders,
which show the borders of tiles and fragments; what is NaN; and what nothing has written. `kept`
leaves the arrays in a folder (leftovers.py). `fail` does both for an op's results.

How far an element may be off follows from the bar of the whole result, which is relative to its
norm. An element's share of the bar is allowed·|exact|, or allowed times the root of the mean square
where that is more: a small element is a sum of large terms, and errs as they do. Rounding takes few
elements beyond several shares, and none beyond FAR: of a normal distribution one in 5·10⁸ would be.
So those beyond FAR are wrong. If there are none, the error is spread over many elements, and those
beyond SPREAD shares are told. There must be some: Σ (SPREAD·share)² <= (allowed·norm)².
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.case_seed import Case
from support.leftovers import folder
from support.op_devices import POISON, UNWRITTEN

FAR, SPREAD = 6.0, 0.5**0.5
FIRST = 8  # elements that are told
RUNS = 12  # of remainders that are told
KEPT_BYTES = 4 << 20  # of a file, before it is compressed
KEPT_FILES = 4  # of one op: a kernel that is wrong everywhere must not fill the folder
ALIGN = 64  # a part that is cut out begins at a multiple of it, so that remainders stay


@dataclass(frozen=True)
class Output:
    """A result above its bar; `same` is the same formula's in float32. Whole numbers have a bar of
    0."""

    name: str
    got: np.ndarray
    exact: np.ndarray
    error: float
    allowed: float
    same: np.ndarray | None = None


# ---- which elements ----


def wrong_elements(got: Any, exact: Any, allowed: float) -> tuple[np.ndarray, float]:
    """Which elements are wrong, and beyond how many shares they are; see the head of this file."""
    with np.errstate(invalid="ignore", over="ignore"):
        got, exact = np.asarray(got, float), np.asarray(exact, float)
        finite = np.isfinite(exact) & np.isfinite(got)
        different = ~finite & (got != exact) & ~(np.isnan(got) & np.isnan(exact))
        own = exact[np.isfinite(exact)]
        mean = (np.linalg.norm(own) or 1.0) / max(own.size, 1) ** 0.5
        share = allowed * np.maximum(np.abs(exact), mean)
        off = np.where(finite, np.abs(got - exact), 0.0)
    for times in (FAR, SPREAD):
        mask = different | (finite & (off > times * share))
        if mask.any():
            return mask, times
    return different, FAR


def unwritten(got: np.ndarray) -> np.ndarray:
    """Which elements have the bits that an output is filled with before an op."""
    got = np.ascontiguousarray(got)
    if got.dtype == np.float32:
        return got.view(np.uint32) == UNWRITTEN.view(np.uint32)
    if got.dtype.itemsize == 1:  # any byte may be that one
        return np.zeros(got.shape, bool)
    return got == np.full(got.itemsize, POISON, np.uint8).view(got.dtype)[0]


def remainders(numbers: np.ndarray, modulus: int) -> str:
    """How many numbers have each remainder, equal counts together: "0-15 ×4, 33 ×1"."""
    count = np.bincount(numbers % modulus, minlength=modulus)
    begin = np.flatnonzero(np.diff(count, prepend=-1))
    runs = []
    for first, last in zip(begin, [*begin[1:] - 1, modulus - 1], strict=True):
        if count[first]:
            span = f"{first}" if first == last else f"{first}-{last}"
            runs.append(f"{span} ×{count[first]}")
    more = f", and {len(runs) - RUNS} more" if len(runs) > RUNS else ""
    return ", ".join(runs[:RUNS]) + more


# ---- telling ----


def places(table: np.ndarray, shape: tuple[int, ...]) -> list[str]:
    """Rows and columns of a table of wrong elements, by their remainders. Where an array has more
    axes, a row is a head of a token; tiles may be of tokens, so these are told too."""
    rows, columns = (np.flatnonzero(table.any(axis=axis)) for axis in (1, 0))
    axes = [("rows", rows, (16, 64)), ("columns", columns, (8, 64))]
    if len(shape) > 2:
        tokens = np.unique(rows // np.prod(shape[1:-1], dtype=int))
        axes.append(("first axis", tokens, (16, 64)))
    count = f"in {len(rows)} of {table.shape[0]} rows, {len(columns)} of {table.shape[1]} columns"
    by = [
        f"  {what} {'; '.join(f'mod {n}: {remainders(numbers, n)}' for n in moduli)}"
        for what, numbers, moduli in axes
    ]
    return [count, *by]


def told(output: Output) -> str:
    """Where a result is wrong, in a few lines."""
    name, got, exact = output.name, np.asarray(output.got), np.asarray(output.exact)
    if got.shape != exact.shape:
        return f"{name}: has shape {got.shape}, and not {exact.shape}"
    mask, times = wrong_elements(got, exact, output.allowed)
    nan, left = np.isnan(np.asarray(got, float)), unwritten(got)
    beyond = f" beyond {times:.2g} shares of the bar" if output.allowed else ""
    count, *by = places(mask.reshape(-1, mask.shape[-1]), mask.shape)
    lines = [
        f"{name} {got.shape}: error {output.error:.3g}, bar {output.allowed:.3g}",
        f"  wrong: {mask.sum()} of {mask.size} elements{beyond}, {count}; "
        f"{nan.sum()} are NaN; {left.sum()} are what was there before the op",
        *by,
    ]
    for at in map(tuple, np.argwhere(mask)[:FIRST]):
        lines.append(f"    {tuple(map(int, at))}: {got[at]:.9g}, exact {exact[at]:.9g}")
    return "\n".join(lines)


def fail(op: str, device: str, case: Case, outputs: Sequence[Output], args: dict) -> None:
    """Fails with all that is known of an op's wrong results. The first line tells the most: lists
    of failures show no other."""
    bars = ", ".join(f"{one.name} {one.error:.3g} > {one.allowed:.3g}" for one in outputs)
    where = kept(op, device, case, outputs, args)
    # By the process, the log of cuBLASLt's choices (cuda/product/choices.cuh) tells the algorithm.
    made = f"{op}: {bars} on {device} in process {os.getpid()}, {case}"
    lines = [made, *map(told, outputs), *filter(None, [where])]
    raise AssertionError("\n".join(lines))


def all_of(attempts: Iterable[Callable[[], Any]]) -> None:
    """Makes all of them, although one fails: which ones are right tells as much. Then fails as the
    first one did, with the first lines of the others."""
    failures, count = [], 0
    for attempt in attempts:
        count += 1
        try:
            attempt()
        except AssertionError as error:
            failures.append(error)
    if not failures:
        return
    others = [f"  {str(one).partition(chr(10))[0]}" for one in failures[1:]]
    head = f"{len(failures)} of {count} are wrong; the others:"
    raise AssertionError("\n".join([f"{failures[0]}", head, *others])) from failures[0]


# ---- keeping ----


def kept(op: str, device: str, case: Case, outputs: Sequence[Output], args: dict) -> str:
    """Leaves an op's wrong results, and its inputs where they are small, in a file that is named
    by op and case. Says where, or "" where no folder is named."""
    place = folder()
    if place is None:
        return ""
    if len(list(place.glob(f"{op}-*.npz"))) >= KEPT_FILES:
        return f"not kept: there are {KEPT_FILES} files of {op} in {place}"
    arrays, about = {}, {"op": op, "device": device, "seed": case.seed, "parts": {}}
    about |= {"sizes": {name: str(one) for name, one in case.sizes.items()}}
    about |= {"test": os.environ.get("PYTEST_CURRENT_TEST", "")}
    about |= {"bars": {one.name: [one.error, one.allowed] for one in outputs}}
    for one in outputs:
        part, first = cut(one, KEPT_BYTES * 3 // 4 // len(outputs))
        arrays |= {f"{kind}.{one.name}": array for kind, array in part.items()}
        about["parts"][one.name] = {"shape": list(np.shape(one.got)), "first": first}
    left = KEPT_BYTES - sum(array.nbytes for array in arrays.values())
    for name, array in sorted(inputs_of(args).items(), key=lambda item: item[1].nbytes):
        left -= array.nbytes
        if left >= 0:
            arrays[f"in.{name}"] = array
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{op} {device} {case}".replace(op, "", 1))
    digest = zlib.crc32(f"{case} {about['test']}".encode())
    path = place / f"{op}-{words.strip('-')[:80]}-{digest:08x}.npz"
    with path.with_suffix(".part").open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
    path.with_suffix(".part").replace(path)
    return f"kept: {path}"


def cut(output: Output, most_bytes: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """A result's arrays, whole if they are small; else as rows and columns from the first wrong
    ones on. And the row and the column they begin with, of (all other axes, the last one)."""
    arrays = {"got": output.got, "exact": output.exact, "float32": output.same}
    arrays = {kind: np.asarray(one) for kind, one in arrays.items() if one is not None}
    if output.got.shape != output.exact.shape:
        return {}, []
    each_bytes = sum(one.itemsize for one in arrays.values())
    if each_bytes * output.got.size <= most_bytes:
        return arrays, [0, 0]
    mask, _ = wrong_elements(output.got, output.exact, output.allowed)
    mask = mask.reshape(-1, mask.shape[-1])
    row, column = (int(mask.any(axis=axis).argmax()) // ALIGN * ALIGN for axis in (1, 0))
    most = most_bytes // each_bytes
    columns = min(mask.shape[1] - column, max(most // ALIGN, ALIGN))
    part = np.s_[row : row + most // columns, column : column + columns]
    return {k: one.reshape(mask.shape)[part] for k, one in arrays.items()}, [row, column]


def inputs_of(args: dict) -> dict[str, np.ndarray]:
    """An op's arguments that can be kept as arrays."""
    out = {}
    for name, value in args.items():
        if isinstance(value, np.ndarray):
            out[name] = value
        elif hasattr(value, "kept"):  # a base weight
            out[name] = value.value
        elif isinstance(value, list) and value and hasattr(value[0], "_fields_"):
            fields = [field for field, _ in value[0]._fields_]
            out[name] = np.array([[float(getattr(one, f)) for f in fields] for one in value])
        elif isinstance(value, int | float):
            out[name] = np.array(value)
    return out
