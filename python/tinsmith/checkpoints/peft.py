"""PEFT's LoRA folders: as training states, and merged into their base models.

A folder is adapter_config.json and adapter_model.safetensors; our checkpoints are such folders too.
A module's weight is W + alpha/r · B·A (alpha/√r with rsLoRA). PEFT's other features (DoRA, rank
patterns, biases, whole modules) change the maths, and are refused by name.

An imported adapter keeps its alpha. The engine trains groups of modules. If the folder lacks some
modules of a group, both their matrices A and B are zero; then their gradients are zero, so they
stay zero. The hosted service's adapters are such folders too, with other names for the head and for
experts: a layer's experts are one tensor, and share A (of w1, w3) or B (of w2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints import checkpoint, meta
from tinsmith.checkpoints.lora import Average, factors
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.formats import config, safetensors_io
from tinsmith.formats.config import QUANTIZATION, TIED
from tinsmith.formats.folder_version import Version, read
from tinsmith.models import registry
from tinsmith.models.architecture import SPELLINGS, plain
from tinsmith.models.tensor_views import TensorView

# Keys that change the maths when they are set, and that are not supported.
REFUSED = (
    "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save",
    "layer_replication", "lora_bias", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "use_bdlora", "use_qalora", "kasa_config", "arrow_config",
    "monteclora_config",
)  # fmt: skip

# How A and B may be initialized. Other ways (pissa, olora, corda, loftq) also change the base
# model, each time that PEFT loads the folder.
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")

CONFIG_BYTES_MAX = 1 << 24


@dataclass(frozen=True)
class Lora:
    """The description of a PEFT folder; scale is alpha / rank."""

    folder: Path
    base_model: str
    rank: int
    alpha: float
    modules: Mapping[str, int]  # by name, how many matrices each has in one tensor, or 0


def describe(version: Version) -> Lora:
    """A folder's description. FileNotFoundError and ValueError say what is missing or unknown."""
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
    if (begins := said.get("init_lora_weights")) not in BEGINNINGS:
        raise ValueError(
            f"{file}: init_lora_weights is {begins!r:.60}, with which PEFT changes the base model; "
            "save the adapter with path_initial_model_for_weight_conversion, which keeps it"
        )
    if said.get("bias", "none") != "none":
        raise ValueError(f"{file}: bias is {said['bias']!r:.60}; only none is supported")
    rank, alpha = config.count(file, said, "r"), config.number(file, said, "lora_alpha")
    alpha = alpha * (math.sqrt(rank) if said.get("use_rslora") else 1.0)
    with version.tensors(checkpoint.ADAPTER_FILE) as tensors:
        modules = _modules(folder, tensors, rank)
    base = str(said.get("base_model_name_or_path") or "")
    with np.errstate(over="ignore"):  # the engine refuses infinity
        return Lora(folder, base, rank, float(np.float32(alpha)), modules)  # as the engine has it


def _modules(folder: Path, tensors: safetensors_io.Tensors, rank: int) -> dict[str, int]:
    names = _trained(tensors)
    if embedding := [name for name in names if ".lora_embedding_" in name]:
        raise ValueError(
            f"{folder} trains an embedding ({embedding[0]}); tinsmith trains attention, MLP and "
            "unembedding: leave the embedding out of target_modules"
        )
    if whole := [name for name in names if ".lora_" not in name]:
        raise ValueError(
            f"{folder} has {whole[0]}, a whole matrix; only LoRA's A and B are read. If it is the "
            "base model's, save the adapter with save_embedding_layers=False"
        )
    modules = (name.partition(".lora_")[0] for name in names)
    found = dict.fromkeys((module.removeprefix(checkpoint.PREFIX) for module in modules), 0)
    wanted = {checkpoint.matrix_name(module, letter) for module in found for letter in "AB"}
    odd = sorted(wanted ^ set(names))
    if odd:
        what = "has" if odd[0] in tensors else "lacks"
        raise ValueError(f"{folder} {what} {odd[0]}: each module should have a lora_A and a lora_B")
    for module in found:
        a, b = (tensors.entry(checkpoint.matrix_name(module, letter)).shape for letter in "AB")
        if 0 in (*a, *b):
            raise ValueError(f"{folder}: {module} has {a} and {b}: one of them is empty")
        together = len(a) == len(b) and (len(a) == 2 or (len(a) == 3 and 1 in (a[0], b[0])))
        if not together or a[-2] != rank or b[-1] != rank:
            raise ValueError(f"{folder}: {module} has {a} and {b}, which are not of rank {rank}")
        found[module] = max(a[0], b[0]) if len(a) == 3 else 0
    if not found:
        raise ValueError(f"{folder} has no matrices")
    return found


def _trained(tensors: safetensors_io.Tensors) -> list[str]:
    """A folder's tensors, without the frozen head that PEFT saves besides the head's matrices."""
    heads = {family.matrix("head", -1) for family in registry.FAMILIES}
    ignored = {f"{checkpoint.PREFIX}{head}.base_layer.weight" for head in heads}
    return [name for name in tensors if name not in ignored]


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
    """The switch (attn, mlp, unembed) that trains the modules with a name, over all families."""
    found = {}
    for family in registry.FAMILIES:
        for slot, group in _core.slot_groups().items():
            if slot in family.names:
                for module in (family.module(slot, 0), family.matrix(slot, 0)):
                    found[module.rpartition(".")[2]] = group
    for ours, others in SPELLINGS.items():
        if ours in found:
            found |= {other.rpartition(".")[2]: found[ours] for other in others}
    return found


@dataclass(frozen=True)
class Loaded:
    """The content of a folder in one version; with the optimizer also its run's average."""

    meta: Meta
    adapter: _core.Adapter
    average: Average | None


def load(
    folder: Path,
    loaded: registry.LoadedModel,
    *,
    optimizer: bool,
    created: str | None = None,
    kind: str | None = None,
) -> Loaded:
    """A new adapter from a checkpoint or a PEFT folder, with optimizer `kind`, or else the
    checkpoint's; ValueError if the folder's creation time is not the expected one."""

    def load_one(version: Version) -> Loaded:
        found = _meta_of(version)
        if created not in (None, found.created):
            raise ValueError(
                f"{folder} is another checkpoint than the one that was asked for: it was saved "
                "again since; ask for it again"
            )
        adapter = replace(found.lora, optimizer=kind or found.optimizer).adapter(loaded.core)
        average = _load_version(version, loaded.family, adapter, optimizer=optimizer)
        return Loaded(found, adapter, average)

    return read(folder, load_one)


def load_adapter(folder: Path, loaded: registry.LoadedModel, *, optimizer: bool) -> _core.Adapter:
    """The adapter of `load`."""
    return load(folder, loaded, optimizer=optimizer).adapter


def load_into(
    folder: Path, family: registry.Family, adapter: _core.Adapter, *, optimizer: bool
) -> Average | None:
    """checkpoint.load_into, for PEFT folders too; with optimizer, returns the average that its run
    keeps."""
    return read(
        folder, lambda version: _load_version(version, family, adapter, optimizer=optimizer)
    )


def _load_version(
    version: Version, family: registry.Family, adapter: _core.Adapter, *, optimizer: bool
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
    adapter.write("weights", flat)  # first: they may be refused
    adapter.clear_gradients()
    for what in OPTIMIZERS[adapter.optimizer].state:
        adapter.write(what, np.zeros(adapter.size, np.float32))
    adapter.step, adapter.pending = 0, (0.0, 0.0, 0.0)
    return None


@dataclass
class _Target:
    """One matrix of an adapter in PEFT's shape. `common`: all experts of its `layer`, (slot,
    layer), share it. `source` is the tensor that filled it."""

    view: NDArray[np.float32]
    layer: tuple[str, int]
    common: bool
    source: str = ""


def _read_matrices(
    folder: Path,
    tensors: safetensors_io.Tensors,
    family: registry.Family,
    adapter: _core.Adapter,
) -> NDArray[np.float32]:
    """An adapter's weights from a folder's matrices. If modules share a tensor of the base model,
    each gets the whole's A, and their Bs are concatenated. Experts come one by one, or a layer's in
    one tensor."""
    flat = np.zeros(adapter.size, np.float32)
    targets = _targets(family, adapter, flat)
    for name in _trained(tensors):
        module, _, letter = name.removeprefix(checkpoint.PREFIX).rpartition(".lora_")
        array = tensors[name]
        into = targets.get((plain(module), letter[:1], array.ndim), [])
        if not into:
            raise ValueError(f"{folder} has {name}, this adapter or base model does not")
        first = into[0].view.shape
        split = array.ndim == 2 and letter[:1] == "B"
        rows = sum(one.view.shape[0] for one in into) if split else first[0]
        needed = (len(into), *first) if array.ndim == 3 else (rows, first[1])
        if array.shape != needed:
            raise ValueError(f"{name}: file has {array.shape}, the adapter needs {needed}")
        safetensors_io.check_finite(array, f"{folder}: {name}")
        row = 0
        for index, one in enumerate(into):
            part = array[index] if array.ndim == 3 else array[row : row + len(one.view)]
            row += len(one.view) if split else 0
            _fill(folder, name, one, safetensors_io.widen(part))
    _check_whole(folder, [one for into in targets.values() for one in into])
    return flat


def _fill(folder: Path, name: str, target: _Target, matrix: NDArray[np.float32]) -> None:
    if target.source and not target.common:
        raise ValueError(f"{folder} has {target.source} and {name}, which are one matrix")
    if target.source and not np.array_equal(target.view, matrix):
        raise ValueError(
            f"{folder} has {target.source} and {name}, which differ: all experts of a layer have "
            "this matrix in common"
        )
    target.view[:], target.source = matrix, name


def _check_whole(folder: Path, targets: Sequence[_Target]) -> None:
    """ValueError if a layer's experts have their shared matrix but some lack their own: it would
    give those a gradient."""
    filled = {one.layer: one.source for one in targets if one.common and one.source}
    for one in targets:
        if one.layer in filled and not one.source:
            raise ValueError(
                f"{folder} has {filled[one.layer]}, but not all experts of layer {one.layer[1]}: "
                "tinsmith trains all or none"
            )


def _targets(
    family: registry.Family, adapter: _core.Adapter, flat: NDArray[np.float32]
) -> dict[tuple[str, str, int], list[_Target]]:
    """The matrices that a folder's tensor fills, by its module's plain name, its letter and its
    number of axes: one matrix, or those of all modules that share a tensor, or one for all experts,
    or one each."""
    found: dict[tuple[str, str, int], list[_Target]] = {}
    experts: dict[tuple[str, int], int] = {}
    every = factors(adapter)
    for one in every:
        experts[one.slot, one.layer] = max(one.count, experts.get((one.slot, one.layer), 0))
    for one in every:
        where, view = (one.slot, one.layer), one.view(flat)
        module = plain(family.module(one.slot, one.layer, one.index))
        if not one.count:
            target = _Target(view, where, False)
            for name in {module, plain(family.matrix(one.slot, one.layer, one.index))}:
                found.setdefault((name, one.letter, 2), []).append(target)
            continue
        own = [_Target(part, where, common=one.count < experts[where]) for part in view]
        found[module, one.letter, 3] = own
        for index in range(experts[where]):
            name = plain(family.matrix(one.slot, one.layer, index))
            found[name, one.letter, 2] = [own[index if one.count > 1 else 0]]
    return found


# ---- merged ----

ROWS = 1024  # of a matrix that are merged at a time


@dataclass(frozen=True)
class ModuleMatrix:
    """Matrix number `index` of a module. Its weight is one entry of a tensor, or all of it."""

    module: str
    index: int
    place: TensorView | None


def merge(
    base: np.ndarray,
    adapter: Mapping[str, np.ndarray],
    parts: Sequence[ModuleMatrix],
    scale: float,
    dtype: np.dtype[Any],
) -> np.ndarray:
    """A tensor plus the matrices of its modules, in a type."""
    merged = safetensors_io.convert(base, dtype)
    taken: set[tuple[int | None, int]] = set()
    for part in parts:
        a, b = (_matrix(adapter, part, letter) for letter in "AB")
        source, target = (part.place.view_in(one) if part.place else one for one in (base, merged))
        if source.shape != (b.shape[0], a.shape[1]):
            raise ValueError(
                f"{part.module} is {source.shape} in the base model, but "
                f"{(b.shape[0], a.shape[1])} in the adapter: it belongs to another model"
            )
        matrix = part.place.matrix if part.place else None
        lines = {(matrix, line) for line in (part.place.lines if part.place else range(len(b)))}
        if taken & lines:
            raise ValueError(
                f"the adapter has matrices for {part.module} and others for rows of it"
            )
        taken |= lines
        for row in range(0, len(b), ROWS):
            rows = slice(row, row + ROWS)
            summed = safetensors_io.widen(source[rows]) + np.float32(scale) * (b[rows] @ a)
            target[rows] = safetensors_io.narrow(summed, dtype)
    return merged


def _matrix(adapter: Mapping[str, np.ndarray], part: ModuleMatrix, letter: str) -> np.ndarray:
    array = adapter[checkpoint.matrix_name(part.module, letter)]
    if array.ndim == 3:
        array = array[part.index if len(array) > 1 else 0]
    return safetensors_io.widen(array)


def options(config: Mapping[str, Any], *, untied: bool) -> dict[str, Any]:
    """config.json of a merged model: a trained head is no longer tied to the embedding, in each
    part that has the key, and nothing is quantised."""
    content = {key: part for key, part in config.items() if key != QUANTIZATION}
    for key, part in config.items():
        if untied and isinstance(part, dict) and part.get(TIED):
            content[key] = {**part, TIED: False}
    return {**content, TIED: False} if untied else content
