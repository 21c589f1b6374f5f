"""Base models: how a Hugging Face checkpoint becomes an engine's model, by its family's row.

config.json and the files' headers are checked first, by the row of families.py that names its
architecture. Weights are streamed from the mapped files matrix by matrix, once all names and shapes
are checked.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.formats import config as hugging_face
from tinsmith.formats import gguf_model, safetensors_io, tokenizer
from tinsmith.formats.config import CONFIG_FILE, read_json
from tinsmith.formats.image_processor import ImageProcessor
from tinsmith.formats.tensor_files import open_tensors
from tinsmith.models import convert, weight_cache, weight_dtypes
from tinsmith.models.architecture import Family, plain
from tinsmith.models.convert import WeightPart
from tinsmith.models.families import FAMILIES
from tinsmith.models.tensor_views import Slots, TensorView, check_count, check_tied, find_slots
from tinsmith.models.vision import TowerPart, TowerSlots, Vision, find_vision, tower_parts
from tinsmith.system import home

DTYPES = ("auto", "float32", "bfloat16")

# config.json's key of each of the engine's sizes.
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": hugging_face.CONTEXT,
}
# The engine's limits (csrc/model/model.c).
LAYERS_MAX, HEAD_WIDTH_MAX = 1 << 16, 256
# Sizes, switches and numbers that only some families have; for others they are 0.
SOME = (
    "key_heads", "value_heads", "key_width", "value_width", "experts", "chosen", "expert_ffn",
    "qkv_bias", "qk_norm", "q_gate", "o_bias", "sinks", "expert_bias", "norm_shares",
    "expert_limit",
)  # fmt: skip


@dataclass(frozen=True)
class BaseModel:
    """A base model's description, known before its weights are read."""

    path: Path
    family: Family
    context: int
    vocab: int
    eos_ids: tuple[int, ...]
    tokenizer_dir: Path
    weight_bytes: int  # memory that they take, once loaded
    device: str  # the engine's name, which includes the type of products
    kind: str  # "bf16" or "f32": the type of wide matrices
    packed: Mapping[weight_dtypes.Place, str]  # the matrices in fewer bits
    copy: weight_cache.Copy | None  # their quantised copy, existing or not
    vision: Vision | None  # its vision tower, which is not in weight_bytes
    no_images: str  # why it has none, in a sentence; "" if it has one
    config: Mapping[str, Any] = field(repr=False, compare=False)
    inv_freq: NDArray[np.float32] = field(repr=False, compare=False)

    @property
    def processor(self) -> ImageProcessor | None:
        """How an image is prepared; None if the model takes no images."""
        return self.vision.processor if self.vision else None

    @property
    def image_token(self) -> int | None:
        """The id that stands for an image in a chat template's text, if there is one."""
        return self.vision.token if self.vision else None


@dataclass(frozen=True)
class LoadedModel(BaseModel):
    """A base model in the engine."""

    core: _core.Model


def load_model(
    path: Path | str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    weights: str = "stored",
    weights_copy: bool = True,
    threads: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Loads a model's folder: config.json, tokenizer.json and its safetensors files.

    dtype is the type of products with base weights: "float32", which is exact for bf16 checkpoints
    too; "bfloat16", which also rounds the weights of others; "auto": bfloat16 for a bf16 checkpoint
    if that is faster on this processor, otherwise float32, where weights in blocks may take inputs
    in 16 bits; None: float32 on the CPU, and bfloat16 on a GPU, its only type. Sums are always
    float32. weights is how they are stored: "stored": as in the file; "bf16"; "int8" or "int4": in
    blocks of 8 or 4 bits, and the model has the quantised numbers (weight_dtypes.py). weights_copy:
    whether a large model in int8 or int4 is written to the user's cache and found there
    (weight_cache.py). `report` is called with the bytes loaded and the bytes in all.

    Raises FileNotFoundError if a file is missing, and ValueError if its content is not supported or
    does not fit. Each names the file, what was expected and what came.
    """
    model = inspect_model(
        path, device=device, dtype=dtype, weights=weights, weights_copy=weights_copy
    )
    return load_weights(model, threads=threads, report=report)


def inspect_model(
    path: Path | str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    weights: str = "stored",
    weights_copy: bool = True,
) -> BaseModel:
    """Does all checks of load_model, on the files' headers; no weights are read."""
    folder = Path(path).resolve()
    family, config, inv_freq = _read_model(folder)
    vocab = int(config["vocab"])
    vocabulary = tokenizer.read(folder)
    eos_ids = tokenizer.read_eos(vocabulary, family.section, vocab)
    with open_tensors(folder) as tensors:
        check_count(folder, config, tensors)
        family = family.of(tensors)
        shape = config, inv_freq
        kind, device, packed = _choose(family, shape, tensors, device, dtype, weights)
        sources = [entry.file for name in tensors for entry in tensors.sources(name)]
        narrow = _is_narrow(device, weights, dtype)
        vision, no_images = find_vision(folder, family, config, tensors, narrow)
    measured = weight_dtypes.staged("cpu", device)
    core = _core.Model(
        config, inv_freq, weights=kind, packed=packed, device=measured, mapped=True, threads=1
    )
    facts = {"config": config, "inv_freq": inv_freq.tolist(), "kind": kind, "family": family.name}
    facts["packed"] = sorted((*place, found) for place, found in packed.items())
    wanted = core.weight_bytes if weights_copy else 0  # a copy of 0 bytes is never wanted
    copy = weight_cache.wanted(folder, weights, device, wanted, sources, facts)
    return BaseModel(
        path=folder,
        family=family,
        context=int(config["context"]),
        vocab=vocab,
        eos_ids=eos_ids,
        tokenizer_dir=folder,
        weight_bytes=core.held_bytes if copy else core.weight_bytes,
        device=device,
        kind=kind,
        packed=packed,
        copy=copy,
        vision=vision,
        no_images=no_images,
        config=config,
        inv_freq=inv_freq,
    )


def load_weights(
    model: BaseModel,
    *,
    threads: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Reads the weights of an inspected model into the engine, or maps their copy."""
    core, copy = open_core(model, threads=threads), model.copy
    key = copy.key() if copy else b""
    if copy and copy.map(core, key):
        report(model.weight_bytes, model.weight_bytes)
        return close_core(model, core)
    for piece in read_weights(model, core.slots):
        piece.load(core)
        report(piece.done, piece.total)
    if copy:
        core = copy.keep(core, key, lambda: open_core(model, threads=threads))
    return close_core(model, core)


def open_core(model: BaseModel, *, threads: int) -> _core.Model:
    """A model in the engine, without weights yet."""
    return _core.Model(
        dict(model.config),
        model.inv_freq,
        weights=model.kind,
        packed=dict(model.packed),
        device=model.device,
        threads=threads,
    )


def read_weights(
    model: BaseModel, slots: Slots, fetch: safetensors_io.Fetch = lambda entry, bits: None
) -> Iterator[WeightPart]:
    """What a core with these slots loads, from checked files; `fetch` is called for bytes first."""
    family = model.family
    with open_tensors(model.path) as tensors:
        held = find_slots(family, slots, tensors, model.config)
        check_tied(family, tensors, model.config, model.path)
        done, total = 0, sum(entry.size for name in held for entry in tensors.sources(name))
        for name, parts in held.items():
            for entry in tensors.sources(name):
                fetch(entry, tensors.bits(entry))
                done += entry.size
            for one, part, packed in convert.arrays(tensors, name, parts, model.packed):
                array = part + np.float32(1) if one.slot in family.plus_one else part
                refuse = partial(convert.refuse, model.path, one, model.kind, model.packed)
                leave = partial(tensors.leave, name) if one is parts[-1] else lambda: None
                where = one.slot, one.layer, one.index
                yield WeightPart(*where, array, done, total, packed, refuse, leave)
        for slot, layer, index, _, length in slots:
            if slot in family.constants:
                constant = np.full(length, family.constants[slot](length), np.float32)
                yield WeightPart(slot, layer, index, constant, done, total)


def read_tower(
    model: BaseModel,
    slots: TowerSlots,
    fetch: safetensors_io.Fetch = lambda entry, bits: None,
) -> Iterator[TowerPart]:
    """What a core whose tower has these slots loads, for a model with vision; as read_weights."""
    assert model.vision
    return tower_parts(model.path, model.vision, slots, fetch)


def load_tower(model: LoadedModel) -> None:
    """Reads a loaded model's vision tower into the engine, unless it is there. ValueError if it has
    none, or a number is not finite."""
    core, vision = model.core, model.vision
    if vision is None:
        raise ValueError(model.no_images)
    if core.tower_bytes:
        return
    core.tower_open(vision.config, vision.kind)
    try:
        for piece in read_tower(model, core.tower_slots):
            piece.load(core)
        core.tower_seal()
    except BaseException:
        core.tower_close()
        raise


def close_core(model: BaseModel, core: _core.Model) -> LoadedModel:
    """The loaded model, once its core has all weights."""
    core.seal()
    facts = {item.name: getattr(model, item.name) for item in fields(BaseModel)}
    return LoadedModel(**facts | {"weight_bytes": core.held_bytes}, core=core)


def read_config(path: Path | str) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """The engine's config and rotary frequencies of a model's folder; no weights are read."""
    _, config, inv_freq = _read_model(Path(path))
    return config, inv_freq


def read_family(path: Path | str) -> Family:
    """The row of a model's folder; ValueError if no row supports its config.json."""
    return _read_model(Path(path))[0]


def element_type(path: Path | str) -> str:
    """ "bf16" or "f32": how the engine will store a folder's matrices. Only headers are read."""
    with open_tensors(path) as tensors:
        return _element_type(read_family(path), tensors)


def measure_model(
    path: Path | str, device: str, weights: str, dtype: str | None = None, weights_copy: bool = True
) -> tuple[_core.Model, dict[str, int]]:
    """A model without memory, for planning, and how many numbers each type has."""
    family, config, inv_freq = _read_model(Path(path))
    with open_tensors(path) as tensors:
        shape = config, inv_freq
        kind, device, packed = _choose(family.of(tensors), shape, tensors, device, dtype, weights)
    make = partial(_core.Model, config, inv_freq, weights=kind, packed=packed, device=device)
    core = make(mapped=weights_copy and weight_cache.worth(weights, device, make().weight_bytes))
    return core, weight_dtypes.tally(core.slots, packed, kind)


def left_aside(path: Path | str) -> dict[str, int]:
    """How many of a folder's tensors have each prefix of tensors that are not used."""
    family, used = read_family(path), set[str]()
    if vision := measure_vision(path)[0]:
        used = set(vision.names.values())
    with open_tensors(path) as tensors:
        rest = [name for name in tensors if name not in used]
    counts = {one: sum(name.startswith(one) for name in rest) for one in family.aside}
    return {prefix: count for prefix, count in counts.items() if count}


def measure_vision(
    path: Path | str, device: str = "cpu", weights: str = "stored", dtype: str | None = None
) -> tuple[Vision | None, str]:
    """A folder's vision tower on a model's device, or why it has none."""
    family, config, _ = _read_model(Path(path))
    narrow = _is_narrow(device, weights, dtype)
    with open_tensors(path) as tensors:
        return find_vision(Path(path), family, config, tensors, narrow)


def find_model(name: str, models: Mapping[str, Path], *, make: bool = True) -> Path:
    """A base model's folder: registered, a path, a GGUF file's, or in Hugging Face's cache."""
    if name in models:
        return Path(models[name])
    if "\0" not in name and (Path(name).expanduser() / CONFIG_FILE).is_file():
        return Path(name).expanduser().resolve()
    if (file := gguf_model.find_file(name)) is not None:
        rows = {one.name: (one.architecture, one.gguf) for one in FAMILIES if one.gguf}
        return gguf_model.make_folder(file, rows) if make else gguf_model.folder_of(file)
    cached = home.cached_model(name)
    if cached is not None and (cached / CONFIG_FILE).is_file():
        return cached
    registered = f"not registered (those are: {', '.join(sorted(models))}), " if models else ""
    fetch = f"; `tinsmith pull {name}` fetches it" if home.is_hub_name(name) else ""
    raise FileNotFoundError(
        f"there is no model {name!r}: {registered}neither a folder with a {CONFIG_FILE} nor a GGUF "
        f"file, and not in the Hugging Face cache {home.cache_folder()}{fetch}"
    )


# ---- config.json ----


def _read_model(folder: Path) -> tuple[Family, dict[str, Any], NDArray[np.float32]]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    content = read_json(file)
    family = _find_family(file, content)
    sees = family.tower is not None and isinstance(content.get(family.tower.section), dict)
    hugging_face.quantization(file, content, family.packed)
    if family.section:
        hugging_face.refuse(file, content, (), {})
        content = hugging_face.section(file, content, family.section)
        hugging_face.quantization(file, content, family.packed)
    content = hugging_face.one_name(file, content) if "experts" in family.sizes else content
    sizes = {**SIZES, **family.sizes}
    hugging_face.refuse(file, content, family.refused, family.fixed, sizes.values())
    missing = {key for key in family.defaults if content.get(key) is None}
    content = content | {key: family.defaults[key] for key in missing}
    count, number = hugging_face.count, hugging_face.number
    config: dict[str, Any] = dict.fromkeys(SOME, 0)
    config |= {size: count(file, content, key) for size, key in sizes.items()}
    config |= {size: number(file, content, key) for size, key in family.numbers.items()}
    for switch, said in family.switches.items():
        config[switch] = int(said if said is True else hugging_face.flag(file, content, said))
    heads, width, layers = config["heads"], config["width"], config["layers"]
    kv_heads = count(file, content, "num_key_value_heads", default=heads)
    head_width = count(file, content, "head_dim", default=width // heads)
    if layers > LAYERS_MAX:
        raise ValueError(f"{file}: {layers} layers are more than {LAYERS_MAX}")
    if heads % kv_heads:
        raise ValueError(f"{file}: {heads} heads can't share {kv_heads} key-value heads evenly")
    if head_width % 2 or not 2 <= head_width <= HEAD_WIDTH_MAX:
        raise ValueError(
            f"{file}: head_dim is {head_width}; it should be even, for rotary embeddings, and at "
            f"most {HEAD_WIDTH_MAX}"
        )
    rotary = hugging_face.rotary_width(file, content, head_width, family.partial)
    inv_freq = hugging_face.frequencies(file, content, rotary)
    mixers, window = family.mixers(file, content, layers)
    config |= {
        "mixers": mixers,
        "feeds": family.feeds(file, content, layers),
        "window": window,
        "kv_heads": kv_heads,
        "head_width": head_width,
        "norm_eps": number(file, content, "rms_norm_eps", default=1e-6),
        "rope_scale": hugging_face.rope_scale(file, content),
        "context": hugging_face.context(file, content),
        "rotary": rotary,
        "tied": int(bool(content.get(hugging_face.TIED, False))),
    }
    if axis := _rope_axis(file, content, rotary, family) if sees else ():
        config["rope_axis"] = list(axis)
    if config["experts"]:
        hugging_face.check_experts(file, config, sizes)
    hugging_face.check_delta(file, config, sizes)
    return family, config, inv_freq


def _rope_axis(file: Path, content: dict[str, Any], rotary: int, family: Family) -> tuple[int, ...]:
    """The axis of positions that rotates each pair; none with settings for which find_vision
    refuses images, as text has the same position on all axes."""
    try:
        return hugging_face.rope_axis(file, content, rotary, family.sections)
    except ValueError:
        return ()


def _find_family(file: Path, content: dict[str, Any]) -> Family:
    named = content.get("architectures")
    named = named if isinstance(named, list) else []
    for family in FAMILIES:
        if named == [family.architecture]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    found = ", ".join(map(str, named)) or "no architecture"
    raise ValueError(f"{file} names {found:.200}; tinsmith knows {known}")


# ---- tensors ----


def read_places(path: Path | str) -> tuple[Family, dict[str, list[TensorView]]]:
    """The row of a model's folder, and the positions of each module's weights, by plain name. A
    module with several matrices has one for each; a module whose tensor has several slots has one
    for all of it."""
    family, config, inv_freq = _read_model(Path(path))
    with open_tensors(path) as tensors:
        check_count(Path(path), config, tensors)
        family = family.of(tensors)
        slots = _core.Model(config, inv_freq, weights="f32", threads=1).slots
        held = find_slots(family, slots, tensors, config)
        check_tied(family, tensors, config, Path(path))
    found: dict[str, list[TensorView]] = {}
    for name, parts in held.items():
        for one in parts:
            where, stacked = (one.slot, one.layer, one.index), family.stacked(one.slot)
            found.setdefault(plain(family.module(*where)), []).append(one.place)
            if stacked or len(parts) == 1:
                found[plain(family.matrix(*where))] = [one.place]
        last = parts[-1].place
        if not family.stacked(parts[0].slot):
            whole = replace(last, lines=range(last.lines.stop), rows=last.lines.stop)
            found[plain(name.removesuffix(".weight"))] = [whole]
    return family, found


def _choose(
    family: Family,
    shape: tuple[dict[str, Any], NDArray[np.float32]],
    tensors: safetensors_io.Tensors,
    device: str,
    dtype: str | None,
    weights: str,
) -> tuple[str, str, dict[weight_dtypes.Place, str]]:
    """The wide type of a folder's matrices, the device, and the types of matrices in fewer bits,
    after checking that all tensors fit."""
    weight_dtypes.check(weights)
    stored = "bf16" if weights == "bf16" else _element_type(family, tensors)
    kind, device = _choose_type(stored, device, dtype)
    config, inv_freq = shape
    slots = _core.Model(config, inv_freq, weights=kind, threads=1).slots
    held = find_slots(family, slots, tensors, config)
    packed = weight_dtypes.choose(weights, device, weight_dtypes.stored(held, tensors))
    return kind, weight_dtypes.device_for(packed, device, dtype), packed


def _element_type(family: Family, tensors: safetensors_io.Tensors) -> str:
    used = (name for name in tensors if not family.is_aside(name) and not family.is_vector(name))
    entries = [tensors.entry(name) for name in used]
    matrices = {entry.dtype for entry in entries if len(entry.shape) > 1}
    return "bf16" if matrices and matrices <= safetensors_io.IN_BF16 else "f32"


def _is_narrow(device: str, weights: str, dtype: str | None) -> bool:
    """Whether matrices are kept in bf16 whatever the file has."""
    in_bf16 = device == weight_dtypes.staged("cpu-bf16", device)
    return in_bf16 or weights == "bf16" or dtype == "bfloat16"


def _choose_type(kind: str, device: str, dtype: str | None) -> tuple[str, str]:
    """The type of stored matrices, and the device that computes with them in dtype."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; {dtype!r} came")
    if device != weight_dtypes.staged("cpu", device):
        if dtype == "float32" and device.split(",")[0].partition(":")[0] == "cuda":
            raise ValueError("the device cuda computes in bfloat16: dtype float32 needs the CPU")
        return ("bf16" if dtype == "bfloat16" else kind), device
    if dtype == "bfloat16" or (dtype == "auto" and kind == "bf16" and _core.bf16_is_fast()):
        return "bf16", weight_dtypes.staged("cpu-bf16", device)
    return kind, device
