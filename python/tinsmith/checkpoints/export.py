"""`tinsmith export`: an adapter merged into its base model, as a Hugging Face folder.

Tensors are merged one by one, each in its own type (bfloat16 is rounded once) and in the base
model's files, so memory holds one matrix at a time. Quantised tensors (a GGUF file's, MXFP4) become
bfloat16. A tied head that the adapter trained becomes a separate tensor. Everything else in the
base model's folder, such as the tokenizer, is copied. The result appears whole or not at all.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.store import Store
from tinsmith.formats import config, gguf_model, safetensors_io
from tinsmith.formats.folder_version import read
from tinsmith.formats.tensor_files import open_tensors
from tinsmith.formats.tokenizer import TEMPLATES_FOLDER
from tinsmith.models import registry
from tinsmith.models.architecture import plain
from tinsmith.system import disk
from tinsmith.system.home import checkpoints_folder

# Suffixes of files that are not copied: weights, and their indexes.
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
WEIGHT_FILES += (gguf_model.SOURCE_FILE,)


def find_adapter(name: str, checkpoints: Path | None) -> Path:
    """The folder of an adapter, given its path or its tinker:// path."""
    if not name.startswith("tinker://"):
        return Path(name)
    checkpoints = checkpoints_folder(checkpoints)
    folder = Store(checkpoints).folder(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {name} in {checkpoints}")
    return folder


def _check_count(model: Path, module: str, count: int, needed: int) -> None:
    """Checks that a module has as many matrices in one tensor as the base model has experts."""
    if count != needed:
        raise ValueError(
            f"{module} is {count or 1} matrices in the adapter, and {needed} in {model}: it "
            "belongs to another model"
        )


class Merged:
    """A base model's tensors with an adapter merged in, by name; each is merged on access. `config`
    is the merged model's config.json, `count` the number of changed modules."""

    def __init__(
        self,
        model: Path,
        base: safetensors_io.Tensors,
        lora: peft.Lora,
        matrices: safetensors_io.Tensors,
    ) -> None:
        family, places = registry.read_places(model)  # refuses models that can't be trained on
        said = config.read_json(model / config.CONFIG_FILE)
        head, embed = family.tensor("head", -1), family.tensor("embed", -1)
        self._base, self._matrices, self._scale = base, matrices, lora.alpha / lora.rank
        self._changed: dict[str, list[peft.ModuleMatrix]] = {}
        for module, count in lora.modules.items():
            found = places.get(plain(module), [])
            if len(found) > 1 or count:
                _check_count(model, module, count, len(found))
            tensors = [place.tensor for place in found] or [
                family.spelled(f"{plain(module)}.weight")
            ]
            for index, tensor in enumerate(tensors):
                part = peft.ModuleMatrix(module, index, found[index] if found else None)
                self._changed.setdefault(tensor, []).append(part)
        tied = bool(said.get(config.TIED, False))
        self._sources = {name: name for name in base if not (tied and name == head)}
        untied = tied and head in self._changed
        if untied:
            self._sources[head] = embed
        missing = sorted(self._changed.keys() - self._sources.keys())
        if missing:
            raise ValueError(f"{model} has no {missing[0]}: the adapter belongs to another model")
        self.config = peft.options(said, untied=untied)
        self.count = len(lora.modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def entry(self, name: str) -> safetensors_io.Entry:
        """The base model's entry of the tensor."""
        return self._base.entry(self._sources[name])

    def make(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """A tensor in a type, rounded once."""
        source, parts = self._base[self._sources[name]], self._changed.get(name, ())
        return peft.merge(source, self._matrices, parts, self._scale, dtype)


@contextlib.contextmanager
def open_merged(model: Path, adapter: Path) -> Iterator[Merged]:
    """The merged model, with its files open."""
    lora, matrices = read(
        adapter, lambda version: (peft.describe(version), checkpoint.open_adapter(version))
    )
    with matrices, open_tensors(model) as base:
        yield Merged(model, base, lora, matrices)


def export(model: Path, adapter: Path, out: Path) -> int:
    """Writes the merged model; returns the number of changed tensors."""
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder")
    disk.make_open_folder(out.parent)
    with (
        open_merged(model, adapter) as merged,
        disk.unfinished(out, "model") as temporary,
    ):
        _write(temporary, merged)
        for file in [*model.iterdir(), *(model / TEMPLATES_FOLDER).glob("*.jinja")]:
            copy = temporary / file.relative_to(model)
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                with file.open("rb") as source, disk.create(copy) as target:
                    shutil.copyfileobj(source, target)
                    target.flush()
                    os.fsync(target.fileno())
        disk.sync(temporary)
        disk.publish(temporary)
        disk.put(temporary, out, overwrite=False)
        return merged.count


def _write(folder: Path, merged: Merged) -> None:
    def form(name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        entry = merged.entry(name)
        return np.dtype(
            safetensors_io.READ.get(entry.dtype, safetensors_io.READ["BF16"])
        ), entry.shape

    shards: dict[str, list[str]] = {}
    for name in merged:
        file = merged.entry(name).file
        shard = safetensors_io.SINGLE_FILE if file.suffix == gguf_model.SUFFIX else file.name
        shards.setdefault(shard, []).append(name)
    sizes = 0
    for shard, names in shards.items():
        forms = {name: form(name) for name in names}
        sizes += sum(dtype.itemsize * math.prod(shape) for dtype, shape in forms.values())
        safetensors_io.write_each(
            folder / shard, forms, lambda name: merged.make(name, form(name)[0]), {"format": "pt"}
        )
    if list(shards) != [safetensors_io.SINGLE_FILE]:
        places = {name: shard for shard, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sizes}, "weight_map": places}
        disk.write_json(folder / safetensors_io.INDEX_FILE, index)
    disk.write_json(folder / config.CONFIG_FILE, merged.config)
