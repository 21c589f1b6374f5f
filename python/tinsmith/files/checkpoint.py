"""Adapters on disk: PEFT's files, the optimizer's state, and the folders that tinker:// paths name.

A checkpoint is a folder: adapter_model.safetensors and adapter_config.json, which PEFT loads as
they are; optimizer.safetensors with AdamW's moments, the step, gradients not yet used, and the
average of the weights if the run keeps one; and meta.json, written last, with the size and SHA-256
of each. All numbers are float32, bit for bit. It appears whole or not at all: written to a folder
beside its place, every file and folder synced, then renamed. Names with a "~" are such unfinished
folders, which Store clears when it opens. All files are checked before an adapter is changed.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import encryption, families, weights
from tinsmith.files.lora import Average, LoraSpec

Kind = Literal["weights", "sampler_weights", "external_weights"]

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
META_FILE = "meta.json"
PREFIX = "base_model.model."  # of a base model's modules, in PEFT's names
AVERAGE = "average"  # of the weights, in OPTIMIZER_FILE
VERSION = 1

# The keys of a base model's config that an adapter's matrices depend on.
SHAPE = ("layers", "width", "heads", "kv_heads", "head_width", "ffn", "vocab")

_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ASIDE = "~old"  # a checkpoint while its successor takes its place


@dataclass(frozen=True)
class Meta:
    """A checkpoint's description of itself, in its meta.json."""

    base_model: str
    rank: int
    alpha: float
    seed: int
    attn: bool
    mlp: bool
    unembed: bool
    kind: Kind
    step: int
    user_metadata: dict[str, str]
    created: str  # ISO 8601
    ttl_seconds: int | None  # after `created`
    public: bool = False
    run_metadata: dict[str, str] = field(default_factory=dict)  # user_metadata of its run
    recipients: tuple[str, ...] = ()  # public keys that its files are encrypted to

    @property
    def lora(self) -> LoraSpec:
        """The adapter that continues from it."""
        return LoraSpec(self.rank, self.seed, self.attn, self.mlp, self.unembed, self.alpha)

    @property
    def expires(self) -> datetime | None:
        """When the checkpoint is to be gone."""
        if self.ttl_seconds is None:
            return None
        return datetime.fromisoformat(self.created) + timedelta(seconds=self.ttl_seconds)

    @property
    def expired(self) -> bool:
        """Whether it should be gone."""
        return self.expires is not None and self.expires <= datetime.now(UTC)


# ---- saving ----


def save(
    folder: Path | str,
    family: families.Family,
    adapter: _core.Adapter,
    meta: Meta,
    *,
    optimizer: bool,
    average: Average | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, its matrices under the names of the base model's family; when it
    returns, the checkpoint is on disk whole. With optimizer, also the average of the weights that
    the run keeps, if it keeps one.

    Raises FileExistsError where one exists, unless overwrite; OSError when it can't be written.
    After an error the place is as it was, and nothing of the new checkpoint is left.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(
            f"the checkpoint {folder} exists; choose another name or overwrite it"
        )
    temporary = folder.with_name(f"{folder.name}~{secrets.token_hex(4)}")
    try:
        _make_folder(folder.parent)
        temporary.mkdir()
        _write_files(temporary, family, adapter, meta, optimizer, average)
        _sync(temporary)
        _put(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full: the checkpoint {folder} was not written"
            raise OSError(error.errno, message) from None
        raise


def _write_files(
    folder: Path,
    family: families.Family,
    adapter: _core.Adapter,
    meta: Meta,
    optimizer: bool,
    average: Average | None,
) -> None:
    named = dict(matrices(family, adapter, _read_finite(adapter, "weights")))
    weights.write(folder / ADAPTER_FILE, named, {"format": "pt"})
    _write_json(folder / CONFIG_FILE, _peft_config(family, adapter, meta))
    files = [ADAPTER_FILE, CONFIG_FILE]
    if optimizer:
        state = {what: _read_finite(adapter, what) for what in ("m", "v")}
        gradients = _read_finite(adapter, "gradients")
        if gradients.any():
            state["gradients"] = gradients
        facts = {"step": str(adapter.step), "pending": json.dumps(adapter.pending)}
        if average is not None:
            state[AVERAGE] = _read_finite(average.adapter, "weights")
        weights.write(folder / OPTIMIZER_FILE, state, facts)
        files.append(OPTIMIZER_FILE)
    files = encryption.seal(folder, files, meta.recipients)
    content = {
        "version": VERSION,
        **dataclasses.asdict(meta),
        "model": {key: adapter.model.config[key] for key in SHAPE},
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
            for name in files
        },
    }
    if optimizer and average is not None:
        content["average"] = {"decay": average.decay}
    _write_json(folder / META_FILE, content)


def _read_finite(adapter: _core.Adapter, what: str) -> NDArray[np.float32]:
    """One of an adapter's vectors; ValueError for one that could not be loaded again."""
    flat = adapter.read(what)
    weights.check_finite(flat, f"the checkpoint was not written: the adapter's {what}")
    return flat


def _peft_config(family: families.Family, adapter: _core.Adapter, meta: Meta) -> dict[str, Any]:
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
    family: families.Family, adapter: _core.Adapter, flat: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """PEFT's name of each matrix and a view of it in PEFT's shape, which is the engine's turned."""
    for slot, layer, index, letter, offset, rows, cols in adapter.layout:
        matrix = flat[offset : offset + rows * cols].reshape(rows, cols)
        yield matrix_name(family.module(slot, layer, index), letter), matrix.T


def matrix_name(module: str, letter: str) -> str:
    """PEFT's name of one of a module's matrices, A or B."""
    return f"{PREFIX}{module}.lora_{letter}.weight"


def _put(temporary: Path, folder: Path) -> None:
    """Moves a finished folder to its place, and one that is there aside until that is on disk."""
    aside = folder.with_name(folder.name + _ASIDE)
    if folder.exists() and aside.exists():
        shutil.rmtree(aside)
    try:
        if folder.exists():
            folder.rename(aside)
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if folder.exists() and not temporary.exists():
            folder.rename(temporary)
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    """Makes a folder with its parents, each synced into the one above it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _replace_json(path: Path, content: dict[str, Any], times: os.stat_result | None = None) -> None:
    """Writes a file whole or not at all, with the times of the one that was there, if given."""
    temporary = path.with_name(path.name + "~")
    try:
        _write_json(temporary, content)
        if times is not None:
            os.utime(temporary, ns=(times.st_atime_ns, times.st_mtime_ns))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _share(source: Path, target: Path) -> None:
    """The same file under a second name, or a copy where the file system has no such thing."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- loading ----


def load_meta(folder: Path | str) -> Meta:
    """A checkpoint's Meta. FileNotFoundError if there is none."""
    return as_meta(_read_meta(Path(folder)))


def as_meta(content: Mapping[str, Any]) -> Meta:
    """A Meta from its JSON object; unknown keys are ignored."""
    names = (item.name for item in dataclasses.fields(Meta))
    known = {name: content[name] for name in names if name in content}
    return Meta(**known | {"recipients": tuple(known.get("recipients", ()))})


def load_adapter(
    folder: Path | str, loaded: families.LoadedModel, *, optimizer: bool
) -> _core.Adapter:
    """A new adapter on a base model, with the numbers of a checkpoint."""
    meta = load_meta(folder)
    _check_model(Path(folder), loaded.core)
    adapter = meta.lora.adapter(loaded.core)
    load_into(folder, loaded.family, adapter, optimizer=optimizer)
    return adapter


def load_into(
    folder: Path | str, family: families.Family, adapter: _core.Adapter, *, optimizer: bool
) -> None:
    """Gives an adapter the numbers of a checkpoint.

    With optimizer also AdamW's moments, its step and the gradients that were not used yet, so that
    a run continues bit for bit; without, all of these are as in a new adapter. ValueError for
    another shape of base model or adapter and for damaged files; the adapter is then as it was.
    """
    folder = Path(folder)
    meta = load_meta(folder)
    _check_model(folder, adapter.model)
    for what, found, needed in (
        ("rank", meta.rank, adapter.rank),
        ("alpha", meta.alpha, adapter.alpha),
    ):
        if found != needed:
            raise ValueError(f"{folder} has {what} {found}, this adapter has {what} {needed}")
    state = {"weights": _read_weights(folder, family, adapter)}
    step, pending = 0, (0.0, 0.0, 0.0)
    if optimizer:
        moments, step, pending = _read_optimizer(folder, adapter.size)
        state |= moments
    zeros = np.zeros(adapter.size, np.float32)
    state = {"m": zeros, "v": zeros} | state
    adapter.clear_gradients()
    for what, flat in state.items():
        adapter.write(what, flat)
    adapter.step, adapter.pending = step, pending


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META_FILE
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=weights.unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    needed = {"version", "model", "files"} | {
        item.name
        for item in dataclasses.fields(Meta)
        if item.default is MISSING and item.default_factory is MISSING
    }
    missing = needed - set(content if isinstance(content, dict) else ())
    if missing:
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}")
    if content["version"] != VERSION:
        found = content["version"]
        raise ValueError(f"{file} has version {found!r}; this tinsmith reads {VERSION}")
    return content


def _check_model(folder: Path, core: _core.Model) -> None:
    shape = _read_meta(folder)["model"]
    for key in SHAPE:
        if shape.get(key) != core.config[key]:
            found, needed = f"{shape.get(key):g}", f"{core.config[key]:g}"
            raise ValueError(
                f"{folder} is for a base model with {key} {found}, this one has {key} {needed}"
            )


def _open_checked(folder: Path, name: str) -> weights.Tensors:
    """One file of a checkpoint, after comparing it with its size and hash in meta.json."""
    said = _read_meta(folder)["files"].get(name)
    if said is None and name + encryption.SUFFIX in _read_meta(folder)["files"]:
        raise ValueError(f"{folder} is encrypted: decrypt its files with age -d, and load those")
    if said is None:
        raise ValueError(f"{folder} was saved without {name}")
    file = folder / name
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    size = file.stat().st_size
    if size != said["bytes"]:
        raise ValueError(f"{file} should be {said['bytes']} bytes, found {size}")
    if _digest(file) != said["sha256"]:
        raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {META_FILE}")
    return weights.open_file(file)


def open_adapter(folder: Path) -> weights.Tensors:
    """The matrices of a checkpoint, compared with its meta.json, or of a PEFT folder."""
    if (folder / META_FILE).is_file():
        return _open_checked(folder, ADAPTER_FILE)
    return weights.open_file(folder / ADAPTER_FILE)


def _read_weights(
    folder: Path, family: families.Family, adapter: _core.Adapter
) -> NDArray[np.float32]:
    flat = np.empty(adapter.size, np.float32)
    with _open_checked(folder, ADAPTER_FILE) as tensors:
        views = dict(matrices(family, adapter, flat))
        different = sorted(set(views) ^ set(tensors))
        if different:
            where = "the file" if different[0] in tensors else "this adapter"
            raise ValueError(f"{folder} is for other matrices: only {where} has {different[0]}")
        for name, view in views.items():
            entry = tensors.entry(name)
            if (entry.dtype, entry.shape) != ("F32", view.shape):
                found, needed = f"{entry.dtype} {entry.shape}", f"F32 {view.shape}"
                raise ValueError(f"{name}: file has {found}, the adapter needs {needed}")
            weights.check_finite(tensors[name], f"{folder}: {name}")
            view[:] = tensors[name]
    return flat


Pending = tuple[float, float, float]  # _core.Adapter.pending


def _read_optimizer(folder: Path, size: int) -> tuple[dict[str, NDArray[np.float32]], int, Pending]:
    with _open_checked(folder, OPTIMIZER_FILE) as tensors:
        if not {"m", "v"} <= set(tensors) <= {"m", "v", "gradients", AVERAGE}:
            raise ValueError(f"{folder / OPTIMIZER_FILE} should have m and v, has {list(tensors)}")
        for name in tensors:
            entry = tensors.entry(name)
            if (entry.dtype, entry.shape) != ("F32", (size,)):
                found = f"{entry.dtype} {entry.shape}"
                raise ValueError(f"{name}: file has {found}, the adapter needs F32 {(size,)}")
        step = tensors.metadata.get("step", "")
        if not step.isdecimal():
            raise ValueError(f"{folder / OPTIMIZER_FILE} has the step {step!r}")
        loss, tokens, sequences = json.loads(tensors.metadata.get("pending", "[0, 0, 0]"))
        pending = (float(loss), float(tokens), float(sequences))
        for name in tensors:
            weights.check_finite(tensors[name], f"{folder}: its {name}")
        state = {name: tensors[name].copy() for name in tensors if name != AVERAGE}
        return state, int(step), pending


def load_average(folder: Path, adapter: _core.Adapter) -> Average | None:
    """The average that a checkpoint's run keeps beside its adapter; None where it keeps none, or
    the folder is PEFT's. Errors as load_into's."""
    said = _read_meta(folder).get("average") if (folder / META_FILE).is_file() else None
    if said is None:
        return None
    with _open_checked(folder, OPTIMIZER_FILE) as tensors:
        if AVERAGE not in tensors:
            raise ValueError(f"{folder / OPTIMIZER_FILE} lacks the average that {META_FILE} names")
        entry = tensors.entry(AVERAGE)
        if (entry.dtype, entry.shape) != ("F32", (adapter.size,)):
            found, needed = f"{entry.dtype} {entry.shape}", f"F32 {(adapter.size,)}"
            raise ValueError(f"{AVERAGE}: file has {found}, the adapter needs {needed}")
        average = Average(adapter.snapshot(), float(said["decay"]))
        average.adapter.write("weights", tensors[AVERAGE].copy())
    return average


# ---- tinker:// paths ----


class Store:
    """Checkpoints under one folder: <root>/<run>/<kind>/<name>.

    One process at a time may have a root open: opening it clears what an interrupted one left.
    """

    def __init__(self, root: Path | str, *, recover: bool = True) -> None:
        self.root = Path(root).resolve()
        if not recover:  # to look something up beside a server
            return
        for kind in get_args(Kind):
            for left in sorted(self.root.glob(f"*/{kind}/*~*")):
                _recover(left)

    def path(self, run: str, kind: str, name: str) -> str:
        """The tinker:// path of a checkpoint, checked."""
        path = f"{_SCHEME}{run}/{kind}/{name}"
        _parse(path)
        return path

    def folder(self, tinker_path: str) -> Path:
        """The folder of a checkpoint, which need not exist."""
        run, kind, name = _parse(tinker_path)
        return self.run_folder(run) / kind / name

    def runs(self) -> list[str]:
        """Ids of the runs that have a folder."""
        return sorted(unquote(folder.name) for folder in self.root.glob("*/"))

    def checkpoints(self, run: str) -> list[str]:
        """The tinker:// paths of a run's checkpoints, the oldest first."""
        found = []
        for kind in get_args(Kind):
            for file in self.run_folder(run).glob(f"{kind}/*/{META_FILE}"):
                if "~" not in file.parent.name:
                    found.append((file.stat().st_mtime_ns, self.path(run, kind, file.parent.name)))
        return [path for _, path in sorted(found)]

    def delete(self, tinker_path: str) -> None:
        """Removes a checkpoint. FileNotFoundError where there is none."""
        folder = self.folder(tinker_path)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {tinker_path}")
        gone = folder.with_name(f"{folder.name}~{secrets.token_hex(4)}")
        folder.rename(gone)
        _sync(folder.parent)
        shutil.rmtree(gone, ignore_errors=True)

    def update(self, tinker_path: str, **changes: Any) -> None:
        """Changes a checkpoint's Meta and nothing else; its place among its run's checkpoints
        stays."""
        file = self.folder(tinker_path) / META_FILE
        content = _read_meta(file.parent) | changes
        _replace_json(file, content, file.stat())

    def copy(self, tinker_path: str, run: str, **changes: Any) -> str:
        """Copies a checkpoint to another run under the same name, with changes in its Meta. The
        files are shared: nothing ever writes to a finished one."""
        source = self.folder(tinker_path)
        _, kind, name = _parse(tinker_path)
        path = self.path(run, kind, name)
        folder = self.folder(path)
        if folder.exists():
            raise FileExistsError(f"the checkpoint {path} exists")
        content = _read_meta(source) | changes
        temporary = folder.with_name(f"{name}~{secrets.token_hex(4)}")
        try:
            _make_folder(folder.parent)
            temporary.mkdir()
            for file in content["files"]:
                _share(source / file, temporary / file)
            _write_json(temporary / META_FILE, content)
            _sync(temporary)
            _put(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return path

    def files(self, tinker_path: str) -> dict[str, Path]:
        """A checkpoint's files by name, without those that only tinsmith reads."""
        folder = self.folder(tinker_path)
        return {name: folder / name for name in sorted(_read_meta(folder)["files"])}

    def delete_expired(self) -> list[str]:
        """Removes expired checkpoints; returns their paths."""
        gone = []
        for run in self.runs():
            for path in self.checkpoints(run):
                with contextlib.suppress(OSError, ValueError):  # damaged, or deleted meanwhile
                    if load_meta(self.folder(path)).expired:
                        self.delete(path)
                        gone.append(path)
        return gone

    def run_folder(self, run: str) -> Path:
        """The folder of a run's checkpoints, which need not exist."""
        encoded = quote(run, safe="")  # ':' and all that means something in a path
        if run in ("", ".", "..") or len(encoded) > 200:
            raise ValueError(f"{run!r:.60} can't be the id of a training run")
        return self.root / encoded


def _parse(tinker_path: str) -> tuple[str, str, str]:
    form = f"{_SCHEME}<run>/<kind>/<name>"
    parts = tinker_path.removeprefix(_SCHEME).split("/")
    if not tinker_path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
        raise ValueError(f"{tinker_path!r:.200} is not a checkpoint's path, {form}")
    run, kind, name = parts
    if kind not in get_args(Kind):
        kinds = " or ".join(get_args(Kind))
        raise ValueError(f"{tinker_path!r:.200}: the kind should be {kinds}, found {kind!r:.60}")
    if not _NAME.fullmatch(name) or name in (".", ".."):
        rule = "1 to 128 letters, digits, '.', '_' and '-'"
        raise ValueError(f"{name!r:.200} can't be a checkpoint's name: it should be {rule}")
    return run, kind, name


def _recover(left: Path) -> None:
    """Finishes an interrupted save: a checkpoint moved aside goes back if nothing took its
    place."""
    place = left.with_name(left.name.partition("~")[0])
    if left.name.endswith(_ASIDE) and not place.exists():
        left.rename(place)
        _sync(place.parent)
        return
    with contextlib.suppress(OSError):
        shutil.rmtree(left)
