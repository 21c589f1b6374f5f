"""PEFT's LoRA folders, as training states, and merged into their base models.

A folder is adapter_config.json and adapter_model.safetensors; our checkpoints are such folders too.
A module's weight is W + alpha/r · B·A (alpha/√r with rsLoRA). PEFT's other features (DoRA, ranks by
pattern, biases, whole modules) change the maths, and are refused by name.

An imported adapter keeps its alpha. The engine trains groups of modules. If the folder lacks some
modules of a group, their matrices A and B are both zeros; the gradients are then zero, so they stay
zero. The hosted service's adapters are such folders as well, with a name of their own for the head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import checkpoint, config, families, meta, weights
from tinsmith.files.config import TIED
from tinsmith.files.lora import Average
from tinsmith.files.meta import Meta
from tinsmith.files.version import Version, read

# Keys that change the maths when they are set, and that are not handled.
REFUSED = (
    "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save",
    "layer_replication", "lora_bias", "trainable_token_indices", "target_parameters",
)  # fmt: skip

CONFIG_BYTES_MAX = 1 << 24


@dataclass(frozen=True)
class Lora:
    """The description of a PEFT folder; scale is alpha / rank."""

    folder: Path
    base_model: str
    rank: int
    alpha: float
    modules: tuple[str, ...]  # as the base model names them


def describe(version: Version) -> Lora:
    """A folder's description. FileNotFoundError and ValueError say what is missing or not known."""
    folder = version.folder
    for name in (checkpoint.CONFIG_FILE, checkpoint.ADAPTER_FILE):
        if not version.has(name):
            raise FileNotFoundError(f"{folder} has no {name}: it is no PEFT adapter's folder")
    file = folder / checkpoint.CONFIG_FILE
    with version.open(checkpoint.CONFIG_FILE) as opened:
        said = config.parse_json(file, opened.read(CONFIG_BYTES_MAX))
    if said.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {said.get('peft_type')!r:.60}; only LORA is known")
    for key in REFUSED:
        if said.get(key):
            raise ValueError(f"{file}: {key} is {said[key]!r:.60}, which is not supported")
    if said.get("bias", "none") != "none":
        raise ValueError(f"{file}: bias is {said['bias']!r:.60}; only none is supported")
    rank, alpha = config.count(file, said, "r"), config.number(file, said, "lora_alpha")
    alpha = alpha * (math.sqrt(rank) if said.get("use_rslora") else 1.0)
    with version.tensors(checkpoint.ADAPTER_FILE) as tensors:
        modules = _modules(folder, tensors, rank)
    base = str(said.get("base_model_name_or_path") or "")
    with np.errstate(over="ignore"):  # the engine refuses an infinite one
        return Lora(folder, base, rank, float(np.float32(alpha)), modules)  # as the engine keeps it


def _modules(folder: Path, tensors: weights.Tensors, rank: int) -> tuple[str, ...]:
    names = _trained(tensors)
    modules = (name.partition(".lora_")[0] for name in names)
    found = dict.fromkeys(module.removeprefix(checkpoint.PREFIX) for module in modules)
    wanted = {checkpoint.matrix_name(module, letter) for module in found for letter in "AB"}
    odd = sorted(wanted ^ set(names))
    if odd:
        what = "has" if odd[0] in tensors else "lacks"
        raise ValueError(f"{folder} {what} {odd[0]}: each module should have a lora_A and a lora_B")
    for module in found:
        a, b = (tensors.entry(checkpoint.matrix_name(module, letter)).shape for letter in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise ValueError(f"{folder}: {module} has {a} and {b}, which are not of rank {rank}")
    if not found:
        raise ValueError(f"{folder} has no matrices")
    return tuple(found)


def _trained(tensors: weights.Tensors) -> list[str]:
    """A folder's tensors, without the frozen head that PEFT writes beside the head's matrices."""
    return [name for name in tensors if not name.endswith(".base_layer.weight")]


# ---- as a training state ----


def load_meta(folder: Path) -> Meta:
    """A checkpoint's Meta, or an equivalent one for a PEFT folder."""
    return read(folder, _meta_of)


def _meta_of(version: Version) -> Meta:
    if version.has(checkpoint.META_FILE):
        return meta.as_meta(meta.content_of(version))
    lora = describe(version)
    last = {module.rpartition(".")[2] for module in lora.modules}
    groups = _groups()
    unknown = sorted(last - set(groups))
    if unknown:
        names = ", ".join(unknown)
        raise ValueError(f"{version.folder} trains {names:.200}, which tinsmith can't")
    changed = version.stat(checkpoint.ADAPTER_FILE).st_mtime
    return Meta(
        base_model=lora.base_model,
        rank=lora.rank,
        alpha=lora.alpha,
        seed=0,
        **dict.fromkeys(groups.values(), False) | {groups[name]: True for name in last},
        kind="weights",
        step=0,
        user_metadata={},
        created=datetime.fromtimestamp(changed, UTC).isoformat(),
        ttl_seconds=None,
    )


def _groups() -> dict[str, str]:
    """The switch (attn, mlp, unembed) that trains the modules of a name, of all families."""
    found = {}
    for family in families.FAMILIES:
        for slot, group in _core.slot_groups().items():
            if slot in family.names:
                tensor = family.tensor(slot, 0).removesuffix(".weight")
                for module in (family.module(slot, 0), tensor):
                    found[module.rpartition(".")[2]] = group
    return found


@dataclass(frozen=True)
class Loaded:
    """What a folder holds, all of one version; with the optimizer also its run's average."""

    meta: Meta
    adapter: _core.Adapter
    average: Average | None


def load(
    folder: Path, loaded: families.LoadedModel, *, optimizer: bool, created: str | None = None
) -> Loaded:
    """A new adapter with the numbers of a checkpoint or of a PEFT folder; ValueError where it was
    not created when it should have been."""

    def load_one(version: Version) -> Loaded:
        found = _meta_of(version)
        if created not in (None, found.created):
            raise ValueError(
                f"{folder} is another checkpoint than the one that was asked for: it was saved "
                "again since; ask for it again"
            )
        adapter = found.lora.adapter(loaded.core)
        average = _load_version(version, loaded.family, adapter, optimizer=optimizer)
        return Loaded(found, adapter, average)

    return read(folder, load_one)


def load_adapter(folder: Path, loaded: families.LoadedModel, *, optimizer: bool) -> _core.Adapter:
    """The adapter of `load`."""
    return load(folder, loaded, optimizer=optimizer).adapter


def load_into(
    folder: Path, family: families.Family, adapter: _core.Adapter, *, optimizer: bool
) -> Average | None:
    """checkpoint.load_into, for a PEFT folder too; with optimizer the average that its run
    keeps."""
    return read(
        folder, lambda version: _load_version(version, family, adapter, optimizer=optimizer)
    )


def _load_version(
    version: Version, family: families.Family, adapter: _core.Adapter, *, optimizer: bool
) -> Average | None:
    folder = version.folder
    if version.has(checkpoint.META_FILE):
        average = checkpoint.average_of(version, adapter) if optimizer else None
        checkpoint.load_version(version, family, adapter, optimizer=optimizer)
        return average
    if optimizer:
        raise ValueError(
            f"{folder} is PEFT's, without an optimizer's state: load its weights alone"
        )
    lora = describe(version)
    if (lora.rank, lora.alpha) != (adapter.rank, adapter.alpha):
        raise ValueError(
            f"{folder} has rank {lora.rank} and alpha {lora.alpha:g}, this adapter has "
            f"{adapter.rank} and {adapter.alpha:g}"
        )
    with version.tensors(checkpoint.ADAPTER_FILE) as tensors:
        flat = _read_matrices(folder, tensors, family, adapter)
    adapter.clear_gradients()
    for what in ("m", "v"):
        adapter.write(what, np.zeros(adapter.size, np.float32))
    adapter.write("weights", flat)
    adapter.step, adapter.pending = 0, (0.0, 0.0, 0.0)
    return None


def _read_matrices(
    folder: Path, tensors: weights.Tensors, family: families.Family, adapter: _core.Adapter
) -> NDArray[np.float32]:
    """An adapter's weights out of a folder's matrices. Where modules share a tensor of the base
    model, a matrix A of the whole is that of each, and a B is theirs behind one another."""
    flat = np.zeros(adapter.size, np.float32)
    filled: dict[int, str] = {}
    views = _views(family, adapter, flat)
    for name in _trained(tensors):
        module, _, letter = name.removeprefix(checkpoint.PREFIX).rpartition(".lora_")
        into = views.get((families.plain(module), letter[:1]), {})
        if not into:
            raise ValueError(f"{folder} has {name}, this adapter or base model does not")
        shapes = [view.shape for view in into.values()]
        rows = sum(shape[0] for shape in shapes) if letter[:1] == "B" else shapes[0][0]
        array, needed = tensors[name], (rows, shapes[0][1])
        if array.shape != needed:
            raise ValueError(f"{name}: file has {array.shape}, the adapter needs {needed}")
        weights.check_finite(array, f"{folder}: {name}")
        row = 0
        for offset, view in into.items():
            if offset in filled:
                raise ValueError(f"{folder} has {filled[offset]} and {name}, which are one matrix")
            filled[offset] = name
            view[:] = weights.widen(array[row : row + len(view)])
            row += len(view) if letter[:1] == "B" else 0
    return flat


def _views(
    family: families.Family, adapter: _core.Adapter, flat: NDArray[np.float32]
) -> dict[tuple[str, str], dict[int, NDArray[np.float32]]]:
    """The matrices, in PEFT's shape and by their offset, that a folder's matrix fills, by its
    module's plain name and its letter: one, or those of all modules that share a tensor."""
    found: dict[tuple[str, str], dict[int, NDArray[np.float32]]] = {}
    for slot, layer, index, letter, offset, rows, cols in adapter.layout:
        view = flat[offset : offset + rows * cols].reshape(rows, cols).T
        tensor = family.tensor(slot, layer, index).removesuffix(".weight")
        for name in (family.module(slot, layer, index), tensor):
            found.setdefault((families.plain(name), letter), {})[offset] = view
    return found


# ---- merged ----

ROWS = 1024  # of a matrix that are merged at a time


def merge(
    base: np.ndarray,
    adapter: Mapping[str, np.ndarray],
    parts: Sequence[tuple[str, families.Place | None]],
    scale: float,
    dtype: np.dtype[Any],
) -> np.ndarray:
    """A tensor with the matrices of modules added, in a type; each module's weight is at its place
    in the tensor, or all of it."""
    merged, end = weights.convert(base, dtype), 0
    for module, place in sorted(parts, key=lambda part: part[1].first if part[1] else 0):
        a, b = (weights.widen(adapter[checkpoint.matrix_name(module, letter)]) for letter in "AB")
        shape = (place.rows, place.cols) if place else base.shape
        if shape != (b.shape[0], a.shape[1]):
            raise ValueError(
                f"{module} is {shape} in the base model, but {(b.shape[0], a.shape[1])} in the "
                "adapter: it belongs to another model"
            )
        first = place.first if place else 0
        if first < end:
            raise ValueError(f"the adapter has matrices for {module} and others for rows of it")
        end = first + len(b)
        for row in range(0, len(b), ROWS):
            some = b[row : row + ROWS]
            rows = slice(first + row, first + row + len(some))
            whole = weights.widen(base[rows]) + np.float32(scale) * (some @ a)
            merged[rows] = weights.narrow(whole, dtype)
    return merged


def options(config: Mapping[str, Any], *, untied: bool) -> dict[str, Any]:
    """config.json of a merged model: a head that was trained is not the embedding any more, in any
    part of it that says so."""
    content = dict(config)
    for key, part in config.items():
        if untied and isinstance(part, dict) and part.get(TIED):
            content[key] = {**part, TIED: False}
    return {**content, TIED: False} if untied else content
