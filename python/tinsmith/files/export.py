"""`tinsmith export`: an adapter merged into its base model, as a Hugging Face folder.

The merge works tensor by tensor, each in its own type (bfloat16 stays so, rounded once) and in the
base model's files, so memory holds one matrix at a time. Quantised tensors of a GGUF file become
bfloat16. A tied head that the adapter trained becomes a tensor of its own. Everything else in the
base model's folder, the tokenizer above all, is copied. The result appears whole or not at all.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.files import checkpoint, config, disk, families, gguf_model, peft, weights
from tinsmith.files.home import checkpoints_folder
from tinsmith.files.store import Store
from tinsmith.files.version import read

# What is not copied, by the ends of names: weights, and where they are.
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
WEIGHT_FILES += (gguf_model.SOURCE_FILE,)


def find_adapter(name: str, checkpoints: Path | None) -> Path:
    """The folder of an adapter that is named by its path or by its tinker:// path."""
    if not name.startswith("tinker://"):
        return Path(name)
    checkpoints = checkpoints_folder(checkpoints)
    folder = Store(checkpoints).folder(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {name} in {checkpoints}")
    return folder


def export(model: Path, adapter: Path, out: Path) -> int:
    """Writes the merged model; returns how many of its tensors the adapter changed."""
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder")
    lora, matrices = read(
        adapter, lambda version: (peft.describe(version), checkpoint.open_adapter(version))
    )
    family, places = families.read_places(model)  # refuses what could not have been trained on
    with disk.unfinished(out) as temporary:
        with gguf_model.open_tensors(model) as base, matrices:
            _write(temporary, model, family, places, base, lora, matrices)
        for file in model.iterdir():
            copy = temporary / file.name
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not copy.exists():
                with file.open("rb") as source, disk.create(copy) as target:
                    shutil.copyfileobj(source, target)
        disk.put(temporary, out, overwrite=False)
    return len(lora.modules)


def _write(
    folder: Path,
    model: Path,
    family: families.Family,
    places: Mapping[str, families.Place],
    base: weights.Tensors,
    lora: peft.Lora,
    matrices: weights.Tensors,
) -> None:
    said = config.read_json(model / config.CONFIG_FILE)
    head, embed = family.tensor("head", -1), family.tensor("embed", -1)
    changed: dict[str, list[tuple[str, families.Place | None]]] = {}
    for module in lora.modules:
        name = families.plain(module)
        place = places.get(name)
        tensor = place.tensor if place else family.spelled(f"{name}.weight")
        changed.setdefault(tensor, []).append((module, place))
    tied = bool(said.get("tie_word_embeddings", False))
    sources = {name: name for name in base if not (tied and name == head)}
    untied = tied and head in changed
    if untied:
        sources[head] = embed
    missing = sorted(changed.keys() - sources.keys())
    if missing:
        raise ValueError(f"{model} has no {missing[0]}: the adapter belongs to another model")

    def form(name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        entry = base.entry(sources[name])
        return np.dtype(weights.READ.get(entry.dtype, weights.READ["BF16"])), entry.shape

    def make(name: str) -> np.ndarray:
        source = base[sources[name]]
        parts = changed.get(name, ())
        merged = peft.merge(source, matrices, parts, lora.alpha / lora.rank) if parts else source
        dtype = form(name)[0]
        return merged if merged.dtype == dtype else weights.narrow(merged, dtype)

    shards: dict[str, list[str]] = {}
    for name, source in sources.items():
        file = base.entry(source).file
        shard = weights.SINGLE_FILE if file.suffix == gguf_model.SUFFIX else file.name
        shards.setdefault(shard, []).append(name)
    sizes = 0
    for shard, names in shards.items():
        forms = {name: form(name) for name in names}
        sizes += sum(dtype.itemsize * math.prod(shape) for dtype, shape in forms.values())
        weights.write_each(folder / shard, forms, make, {"format": "pt"})
    if list(shards) != [weights.SINGLE_FILE]:
        places = {name: shard for shard, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sizes}, "weight_map": places}
        disk.write_json(folder / weights.INDEX_FILE, index)
    merged = peft.options(said, untied=untied)
    disk.write_json(folder / config.CONFIG_FILE, merged)
