"""Adapters on disk: PEFT's files and the optimizer's state, written and read as a whole.

A checkpoint is a folder. adapter_model.safetensors and adapter_config.json use the hosted service's
names; PEFT loads them directly unless experts are trained. optimizer.safetensors has the
optimizer's moments, the step, accumulated gradients, and the average of the weights if the run
keeps one. meta.json is written last, with the size and SHA-256 of each file. All numbers are
float32, bit for bit. A checkpoint appears whole or not at all: it is written to a temporary folder
beside its place, read back, every file and folder synced, then moved (disk.py). It is read in one
version (folder_version.py), and all of it is checked before an adapter is changed.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints import encryption
from tinsmith.checkpoints.lora import Average, factors
from tinsmith.checkpoints.meta import (
    ADAPTER_FILE,
    CONFIG_FILE,
    COUNT_MAX,
    META_FILE,
    OPTIMIZER_FILE,
    SHAPE,
    VERSION,
    Meta,
    as_meta,
    content_of,
)
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.formats import safetensors_io
from tinsmith.formats.folder_version import Version, read
from tinsmith.models import registry
from tinsmith.models.architecture import plain
from tinsmith.system import disk

log = logging.getLogger("tinsmith")

PREFIX = "base_model.model."  # in PEFT's names of a base model's modules
AVERAGE = "average"  # the average of the weights, in OPTIMIZER_FILE
SMALL_BYTES = 1 << 14  # for the JSON files, besides their Meta

Vectors = dict[str, NDArray[np.float32]]
File = tuple[Mapping[str, NDArray[np.float32]], dict[str, str]]  # tensors and metadata
PendingGradient = tuple[float, float, float]  # _core.Adapter.pending
# A context manager that reserves bytes for something to be written at a path.
Reserve = Callable[[int, Path], contextlib.AbstractContextManager[None]]


def anywhere(size: int, place: Path) -> contextlib.AbstractContextManager[None]:
    """The Reserve of a disk without a limit."""
    return contextlib.nullcontext()


# ---- saving ----


def save(
    folder: Path | str,
    family: registry.Family,
    adapter: _core.Adapter,
    meta: Meta,
    *,
    optimizer: bool,
    average: Average | None = None,
    overwrite: bool = False,
    going: Callable[[], object] = lambda: None,
    reserve: Reserve = anywhere,
) -> None:
    """Writes a checkpoint, with matrices named as in the base model's family. When it returns, the
    checkpoint is on disk. With optimizer, also the average of the weights, if the run keeps one.

    Raises FileExistsError if one exists, unless overwrite; ValueError for numbers that are not
    finite; OSError if it can't be written; what `reserve` raises, which is called before anything
    is written; and what `going` raises, which is called between two files. After an error the place
    is unchanged, and nothing of the new checkpoint is left.
    """
    folder = Path(folder)
    _check_place(folder, meta.kind, overwrite)
    vectors = {"weights": _read_finite(adapter, "weights")}
    if optimizer:
        vectors |= _optimizer_vectors(adapter, average)
    files = _files(family, adapter, vectors)
    size = _size(files, meta)
    with reserve(size, folder), disk.unfinished(folder, size=size) as temporary:
        used = average if optimizer else None
        _write_files(temporary, family, adapter, meta, files, used, going)
        going()
        disk.sync(temporary)
        disk.put(temporary, folder, overwrite=overwrite)


def _check_place(folder: Path, kind: str, overwrite: bool) -> None:
    """Only an adapter's folder is overwritten: never, by mistake, a home folder."""
    if folder.exists() and not overwrite:
        # The SDK's calls that save for sampling and export have no such argument.
        way = " or pass overwrite=True" if kind == "weights" else ""
        raise FileExistsError(f"the checkpoint {folder} exists; choose another name{way}")
    if not folder.exists() or (folder / META_FILE).exists() or (folder / CONFIG_FILE).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} is no adapter's folder: it has neither {META_FILE} nor {CONFIG_FILE}, and "
            "is not overwritten"
        )


def _optimizer_vectors(adapter: _core.Adapter, average: Average | None) -> Vectors:
    """The state that the next step needs besides the weights."""
    state = {what: _read_finite(adapter, what) for what in OPTIMIZERS[adapter.optimizer].state}
    gradients = _read_finite(adapter, "gradients")
    if gradients.any():
        state["gradients"] = gradients
    if average is not None:
        state[AVERAGE] = _read_finite(average.adapter, "weights")
    if not all(map(math.isfinite, adapter.pending)):
        raise ValueError(f"the checkpoint was not written: the loss so far is {adapter.pending[0]}")
    return state


def _read_finite(adapter: _core.Adapter, what: str) -> NDArray[np.float32]:
    """One of an adapter's vectors; ValueError if it could not be loaded again."""
    flat = adapter.read(what)
    safetensors_io.check_finite(flat, f"the checkpoint was not written: the adapter's {what}")
    return flat


def _files(family: registry.Family, adapter: _core.Adapter, vectors: Vectors) -> dict[str, File]:
    """The tensor files of a checkpoint."""
    named = dict(matrices(family, adapter, vectors["weights"]))
    state = {what: flat for what, flat in vectors.items() if what != "weights"}
    facts = {"step": str(adapter.step), "pending": json.dumps(adapter.pending)}
    files: dict[str, File] = {ADAPTER_FILE: (named, {"format": "pt"})}
    if state:
        files[OPTIMIZER_FILE] = (state, facts)
    return files


def _size(files: Mapping[str, File], meta: Meta) -> int:
    """An upper bound of a checkpoint's size in bytes."""
    sizes = [safetensors_io.size(tensors, about) for tensors, about in files.values()]
    said = SMALL_BYTES + 2 * len(json.dumps(dataclasses.asdict(meta), indent=2))
    return said + sum(encryption.sealed_size(size, meta.recipients) for size in (*sizes, 0))


def _write_files(
    folder: Path,
    family: registry.Family,
    adapter: _core.Adapter,
    meta: Meta,
    files: Mapping[str, File],
    average: Average | None,
    going: Callable[[], object],
) -> None:
    for name, (tensors, about) in files.items():
        going()
        safetensors_io.write(folder / name, tensors, about)
    going()
    _check_written(folder, files)
    disk.write_json(folder / CONFIG_FILE, _peft_config(family, adapter, meta))
    going()
    sealed = encryption.seal(folder, [*files, CONFIG_FILE], meta.recipients)
    content = {
        "version": VERSION,
        **dataclasses.asdict(meta),
        "model": {key: adapter.model.config[key] for key in SHAPE},
        "gradient": {"parts": _core.PARTS, "step_tokens": adapter.step_tokens},
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
            for name in sealed
        },
    }
    if average is not None:
        content["average"] = {"decay": average.decay}
    as_meta(content)
    disk.write_json(folder / META_FILE, content)


def _check_written(folder: Path, files: Mapping[str, File]) -> None:
    """Reads files as a load does, and compares them bit for bit with what was to be written."""
    with Version(folder) as version:
        for name, (written, about) in files.items():
            with version.tensors(name) as tensors:
                same = set(tensors) == set(written) and tensors.metadata == about
                if not same or not all(_same(tensors[key], written[key]) for key in written):
                    raise OSError(f"{folder / name} does not give back what was written to it")


def _same(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    bits = (np.ascontiguousarray(array).view(np.uint32) for array in (one, other))
    return np.array_equal(*bits)


def _peft_config(family: registry.Family, adapter: _core.Adapter, meta: Meta) -> dict[str, Any]:
    slots = dict.fromkeys(slot for slot, *_ in adapter.layout)
    modules = (family.module(slot, 0).rpartition(".")[2] for slot in slots)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": meta.base_model,
        "revision": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(modules)),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }


def matrices(
    family: registry.Family, adapter: _core.Adapter, flat: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The name of each matrix in an adapter's file, and a view of it in PEFT's shape."""
    for one in factors(adapter):
        yield matrix_name(family.module(one.slot, one.layer, one.index), one.letter), one.view(flat)


def matrix_name(module: str, letter: str) -> str:
    """PEFT's name of one of a module's matrices, A or B."""
    return f"{PREFIX}{module}.lora_{letter}.weight"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- loading ----


def load_adapter(
    folder: Path | str, loaded: registry.LoadedModel, *, optimizer: bool
) -> _core.Adapter:
    """A new adapter on a base model, with a checkpoint's weights."""

    def load(version: Version) -> _core.Adapter:
        content = content_of(version)
        _check_model(version.folder, content, loaded.core)
        adapter = as_meta(content).lora.adapter(loaded.core)
        load_version(version, loaded.family, adapter, optimizer=optimizer)
        return adapter

    return read(Path(folder), load)


def load_into(
    folder: Path | str, family: registry.Family, adapter: _core.Adapter, *, optimizer: bool
) -> None:
    """Loads a checkpoint into an adapter.

    With optimizer also its moments, its step and accumulated gradients, so that a run continues bit
    for bit; without, all of these are as in a new adapter. ValueError for another shape of base
    model or adapter, for another optimizer's state, and for damaged files; then the adapter is
    unchanged.
    """
    read(
        Path(folder),
        lambda version: load_version(version, family, adapter, optimizer=optimizer),
    )


def load_version(
    version: Version, family: registry.Family, adapter: _core.Adapter, *, optimizer: bool
) -> None:
    """load_into, from an open version."""
    folder, content = version.folder, content_of(version)
    meta = as_meta(content)
    _check_model(folder, content, adapter.model)
    for what, found, needed in (
        ("rank", meta.rank, adapter.rank),
        ("alpha", float(np.float32(meta.alpha)), adapter.alpha),
    ):
        if found != needed:
            raise ValueError(f"{folder} has {what} {found}, this adapter has {what} {needed}")
    with _open_checked(version, content, ADAPTER_FILE) as tensors:
        state = {"weights": _read_weights(folder, tensors, family, adapter)}
    step, pending = 0, (0.0, 0.0, 0.0)
    if optimizer:
        _check_optimizer(folder, meta, adapter)
        with _open_checked(version, content, OPTIMIZER_FILE) as tensors:
            moments, step, pending = _read_optimizer(folder, tensors, adapter)
        state |= moments
    zeros = np.zeros(adapter.size, np.float32)
    adapter.write("weights", state.pop("weights"))  # first: they may be refused
    adapter.clear_gradients()
    none = dict.fromkeys(OPTIMIZERS[adapter.optimizer].state, zeros)
    for what, flat in (none | state).items():
        adapter.write(what, flat)
    adapter.step, adapter.pending = step, pending
    if optimizer:
        _continue_sums(folder, content.get("gradient"), adapter)


def _continue_sums(folder: Path, said: dict[str, int] | None, adapter: _core.Adapter) -> None:
    """The adapter sums gradients as the checkpoint's run did, if its micro-batches fit here.
    Otherwise, and for an older checkpoint, a call's sum may differ in its last bits."""
    if said is None:
        return
    parts, tokens = said["parts"], said["step_tokens"]
    planned = adapter.model.plan(adapter.rank, tokens)
    fits = planned["step"] + planned["scratch"] <= planned["step_most"]
    if fits:
        adapter.step_tokens = tokens
    if not fits or parts != _core.PARTS:
        log.warning(
            "%s sums gradients in %d parts of micro-batches of %d tokens; here it is %d parts of "
            "%d tokens, so that the last bits of the next gradients may differ",
            folder, parts, tokens, _core.PARTS, adapter.step_tokens,
        )  # fmt: skip


def load_average(folder: Path | str, adapter: _core.Adapter) -> Average | None:
    """The average that a checkpoint's run keeps besides its adapter; None if it keeps none, or the
    folder is PEFT's. Errors as in load_into."""
    return read(Path(folder), lambda version: average_of(version, adapter))


def average_of(version: Version, adapter: _core.Adapter) -> Average | None:
    """load_average, from an open version."""
    if not version.has(META_FILE) and version.has(CONFIG_FILE):
        return None
    content = content_of(version)
    said = content.get("average")
    if said is None:
        return None
    _check_optimizer(version.folder, as_meta(content), adapter)
    file = version.folder / OPTIMIZER_FILE
    with _open_checked(version, content, OPTIMIZER_FILE) as tensors:
        if AVERAGE not in tensors:
            raise ValueError(f"{file} lacks the average that {META_FILE} names")
        _read_optimizer(version.folder, tensors, adapter)
        average = Average(adapter.snapshot(), float(said["decay"]))
        average.adapter.write("weights", tensors[AVERAGE].copy())
    return average


def open_adapter(version: Version) -> safetensors_io.Tensors:
    """The matrices of a checkpoint, checked against its meta.json, or of a PEFT folder."""
    if version.has(META_FILE):
        return _open_checked(version, content_of(version), ADAPTER_FILE)
    return version.tensors(ADAPTER_FILE)


def _check_model(folder: Path, content: Mapping[str, Any], core: _core.Model) -> None:
    for key in SHAPE:
        if content["model"][key] != core.config[key]:
            found, needed = f"{content['model'][key]:g}", f"{core.config[key]:g}"
            raise ValueError(
                f"{folder} is for a base model with {key} {found}, this one has {key} {needed}"
            )


def _check_optimizer(folder: Path, meta: Meta, adapter: _core.Adapter) -> None:
    if meta.optimizer != adapter.optimizer:
        raise ValueError(
            f"{folder} has the state of {meta.optimizer}, this adapter is trained with "
            f"{adapter.optimizer}: load its weights alone"
        )


def _open_checked(
    version: Version, content: Mapping[str, Any], name: str
) -> safetensors_io.Tensors:
    """One file of a checkpoint, checked against its size and hash in meta.json."""
    folder, said = version.folder, content["files"].get(name)
    if said is None and name + encryption.SUFFIX in content["files"]:
        raise ValueError(f"{folder} is encrypted: decrypt its files with age -d, and load those")
    if said is None:
        raise ValueError(f"{folder} was saved without {name}")
    with version.open(name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size != said["bytes"]:
            raise ValueError(f"{folder / name} should be {said['bytes']} bytes, found {size}")
        if hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
            where = f"its SHA-256 is not the one in {META_FILE}"
            raise ValueError(f"{folder / name} is damaged: {where}")
    return version.tensors(name)


def _plain(name: str) -> str:
    """A matrix's canonical name: Qwen3.5's head had another module name."""
    return PREFIX + plain(name.removeprefix(PREFIX))


def _read_weights(
    folder: Path,
    tensors: safetensors_io.Tensors,
    family: registry.Family,
    adapter: _core.Adapter,
) -> NDArray[np.float32]:
    flat = np.empty(adapter.size, np.float32)
    views = {_plain(name): view for name, view in matrices(family, adapter, flat)}
    names = {_plain(name): name for name in tensors}
    different = sorted(set(views) ^ set(names))
    if different:
        where = "the file" if different[0] in names else "this adapter"
        raise ValueError(f"{folder} is for other matrices: only {where} has {different[0]}")
    for known, view in views.items():
        name = names[known]
        entry = tensors.entry(name)
        if (entry.dtype, entry.shape) != ("F32", view.shape):
            found, needed = f"{entry.dtype} {entry.shape}", f"F32 {view.shape}"
            raise ValueError(f"{name}: file has {found}, the adapter needs {needed}")
        safetensors_io.check_finite(tensors[name], f"{folder}: {name}")
        view[:] = tensors[name]
    return flat


def _read_optimizer(
    folder: Path, tensors: safetensors_io.Tensors, adapter: _core.Adapter
) -> tuple[Vectors, int, PendingGradient]:
    """The state that the next step needs besides the weights and their average."""
    file, size = folder / OPTIMIZER_FILE, adapter.size
    state = OPTIMIZERS[adapter.optimizer].state
    if not {*state} <= set(tensors) <= {*state, "gradients", AVERAGE}:
        raise ValueError(f"{file} should have {' and '.join(state)}, has {list(tensors)!r:.200}")
    for name in tensors:
        entry = tensors.entry(name)
        if (entry.dtype, entry.shape) != ("F32", (size,)):
            found = f"{entry.dtype} {entry.shape}"
            raise ValueError(f"{name}: file has {found}, the adapter needs F32 {(size,)}")
        safetensors_io.check_finite(tensors[name], f"{folder}: its {name}")
    step = tensors.metadata.get("step", "")
    if not re.fullmatch("[0-9]{1,10}", step) or int(step) > COUNT_MAX:
        raise ValueError(f"{file} has the step {step!r:.40}")
    pending = _read_pending(file, tensors.metadata.get("pending", "[0, 0, 0]"))
    return {name: tensors[name].copy() for name in tensors if name != AVERAGE}, int(step), pending


def _read_pending(file: Path, text: str) -> PendingGradient:
    try:
        loss, tokens, sequences = (float(number) for number in json.loads(text))
    except (TypeError, ValueError, OverflowError, RecursionError):
        loss, tokens, sequences = math.nan, 0.0, 0.0
    if not all(map(math.isfinite, (loss, tokens, sequences))) or min(tokens, sequences) < 0:
        raise ValueError(f"{file} has {text!r:.80} for the calls behind its gradients")
    return loss, tokens, sequences
