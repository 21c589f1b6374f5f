"""A model's vision tower: its sizes in config.json, its tensors, and why a model can't see.

A tower turns an image's patches into rows of the language model: `depth` blocks of attention and
an MLP, then a merger of 2 × 2 patches; behind the blocks in `deep` other mergers make what is added
after the first layers. All sizes, and all names and shapes of tensors, are checked from headers
when the model is inspected; the tower itself is read when the first image comes. A folder whose
tower is missing or not supported is still a model of text: `no_images` then says why.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tinsmith import _core
from tinsmith.formats import config as hugging_face
from tinsmith.formats import gguf_model, safetensors_io
from tinsmith.formats.config import CONFIG_FILE, read_json
from tinsmith.formats.image_processor import ImageProcessor, read_processor
from tinsmith.formats.tensor_files import open_tensors
from tinsmith.models import convert
from tinsmith.models.architecture import Family, Tower

# The engine's limits (csrc/device/device.h, csrc/vision/tower.h).
HEAD_WIDTH_MAX, DEEP_MAX = 256, 8
FIXED = {
    "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
MERGED = 4  # patches of a token
ROPE_THETA, ROPE_TYPES = 10000, ("axial", "default", None)

# Of a core: slot, index, rows, cols. Vectors have one row; the positions are one vector.
TowerSlots = Sequence[tuple[str, int, int, int]]


@dataclass(frozen=True)
class TowerSizes:
    """The part of config.json that has the tower."""

    depth: int
    width: int
    heads: int
    ffn: int
    grid: int  # the side of the square of learned positions
    out: int  # the width of a row of the language model
    patch: int  # pixels of a patch's side
    frames: int
    merge: int  # patches of a token's side
    deep: tuple[int, ...]  # the blocks whose rows are added in the language model


@dataclass(frozen=True)
class Vision:
    """A model's tower, and its image processor."""

    sizes: TowerSizes
    processor: ImageProcessor
    kind: Literal["bf16", "f32"]  # the type of its matrices
    names: Mapping[tuple[str, int], str] = field(repr=False)  # of tensors, by slot and index
    parameters: int
    token: int | None  # the id that stands for an image in a chat template's text

    @property
    def config(self) -> dict[str, Any]:
        """For _core.Model.tower_open."""
        processor = self.processor
        return vars(self.sizes) | {
            "deep": list(self.sizes.deep),
            "rescale": processor.rescale,
            "mean": list(processor.mean),
            "std": list(processor.std),
        }


@dataclass(frozen=True)
class TowerPart:
    """One tensor for the engine, and the bytes of the files: up to and including it, and in all."""

    slot: str
    index: int
    array: np.ndarray
    done: int
    total: int
    refuse: partial[None]  # raises ValueError if a number is not finite
    leave: partial[None]  # its bytes are not needed again soon

    def load(self, core: _core.Model) -> None:
        """Loads it into the tower of an engine's model. ValueError names a number that is not
        finite by its name in the file."""
        try:
            core.tower_load(self.slot, self.index, self.array)
        except ValueError:
            self.refuse()
            raise
        self.leave()


def find_vision(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    tensors: safetensors_io.Tensors,
    narrow: bool,
) -> tuple[Vision | None, str]:
    """The tower of a model's folder, or why the model can't see. `config` has the engine's sizes;
    `narrow`: its matrices are kept in bf16 whatever the file has."""
    try:
        return _find(folder, family, config, tensors, narrow), ""
    except (ValueError, OSError) as error:
        # Clients read this, who need not know where a server has its models.
        return None, str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "its folder")


def _find(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    tensors: safetensors_io.Tensors,
    narrow: bool,
) -> Vision:
    file, tower = folder / CONFIG_FILE, family.tower
    if gguf_model.source_of(folder) != folder:
        raise ValueError(
            "images need a vision tower, which a GGUF file does not have: llama.cpp keeps it in a "
            "file of its own (mmproj). Take the model's safetensors files"
        )
    if tower is None:
        raise ValueError(f"{file} names {family.architecture}, which has no vision tower")
    content = read_json(file)
    sizes = read_sizes(file, content, tower, config)
    text = hugging_face.section(file, content, family.section)
    hugging_face.rope_axis(file, text, config["rotary"], family.sections)
    names = _find_tensors(folder, tower, sizes, tensors)
    processor = read_processor(folder)
    for key, ours, theirs in (
        ("patch_size", sizes.patch, processor.patch),
        ("temporal_patch_size", sizes.frames, processor.frames),
        ("spatial_merge_size", sizes.merge, processor.merge),
    ):
        if ours != theirs:
            raise ValueError(
                f"{file}: {tower.section}.{key} is {ours}, but the image processor's is {theirs}"
            )
    shapes = {(slot, index): shape for slot, index, shape in _shapes(sizes)}
    matrices = {place for place, shape in shapes.items() if len(shape) > 1 and place[0] != "pos"}
    types = {tensors.entry(names[place]).dtype for place in matrices}
    kind: Literal["bf16", "f32"] = "bf16" if narrow or types <= safetensors_io.IN_BF16 else "f32"
    parameters = sum(map(math.prod, shapes.values()))
    return Vision(
        sizes, processor, kind, names, parameters, _image_token(file, content, config["vocab"])
    )


def _image_token(file: Path, content: Mapping[str, Any], vocab: int) -> int | None:
    """The id that stands for an image in a chat template's text, if config.json has one."""
    token = content.get("image_token_id")
    if token is not None and (type(token) is not int or not 0 <= token < vocab):
        raise ValueError(
            f"{file}: image_token_id should be an id from 0 to {vocab - 1}, found {token!r:.40}"
        )
    return token


def tower_parts(
    folder: Path,
    vision: Vision,
    slots: TowerSlots,
    fetch: safetensors_io.Fetch = lambda entry, bits: None,
) -> Iterator[TowerPart]:
    """What a tower with these slots loads, from checked files: matrices as they are stored, vectors
    and positions in float32; `fetch` is called for bytes first."""
    with open_tensors(folder) as tensors:
        names = [vision.names[slot, index] for slot, index, _, _ in slots]
        done, total = 0, sum(entry.size for name in names for entry in tensors.sources(name))
        for name, (slot, index, rows, cols) in zip(names, slots, strict=True):
            for entry in tensors.sources(name):
                fetch(entry, tensors.bits(entry))
                done += entry.size
            array = np.ascontiguousarray(tensors[name]).reshape((rows, cols) if rows > 1 else cols)
            wide = rows == 1
            yield TowerPart(
                slot,
                index,
                safetensors_io.widen(array) if wide else array,
                done,
                total,
                partial(convert.refuse_numbers, folder, name, vision.kind == "bf16" and not wide),
                partial(tensors.leave, name),
            )


# ---- config.json ----


def read_sizes(
    file: Path, content: Mapping[str, Any], tower: Tower, config: Mapping[str, Any]
) -> TowerSizes:
    """The sizes of the tower of a config.json, for a language model with the engine's sizes
    `config`. ValueError for what the engine does not compute."""
    said = content.get(tower.section)
    if not isinstance(said, dict):
        raise ValueError(f"{file}: {tower.section} should be an object, found {said!r:.60}")
    said = {**tower.defaults, **{key: one for key, one in said.items() if one is not None}}
    # With its object's name before each key, as errors show them.
    flat = {f"{tower.section}.{key}": value for key, value in said.items()}

    def count(key: str) -> int:
        return hugging_face.count(file, flat, f"{tower.section}.{key}")

    for key, value in FIXED.items():
        if said[key] != value:
            raise ValueError(
                f"{file}: {tower.section}.{key} is {said[key]!r:.60}; only {value} is supported"
            )
    _check_rope(file, tower, said.get("rope_parameters"))
    depth, width, heads = count("depth"), count("hidden_size"), count("num_heads")
    head_width = width / heads
    if head_width % 4 or head_width > HEAD_WIDTH_MAX:
        raise ValueError(
            f"{file}: {tower.section} has {heads} heads in hidden_size {width}; a head should be a "
            f"multiple of 4 wide, and at most {HEAD_WIDTH_MAX}"
        )
    places = count("num_position_embeddings")
    grid = math.isqrt(places)
    if grid * grid != places:
        raise ValueError(
            f"{file}: {tower.section}.num_position_embeddings is {places}, which is no square"
        )
    out = count("out_hidden_size")
    if out != config["width"]:
        raise ValueError(
            f"{file}: {tower.section}.out_hidden_size is {out}; it should be the language model's "
            f"hidden_size, {config['width']}"
        )
    return TowerSizes(
        depth=depth,
        width=width,
        heads=heads,
        ffn=count("intermediate_size"),
        grid=grid,
        out=out,
        patch=count("patch_size"),
        frames=count("temporal_patch_size"),
        merge=count("spatial_merge_size"),
        deep=_deep(file, tower, said["deepstack_visual_indexes"], depth, config["layers"]),
    )


def _check_rope(file: Path, tower: Tower, rope: object) -> None:
    """Refuses rotary settings other than those that all towers have."""
    if rope is None:
        return
    fits = isinstance(rope, dict) and rope.get("rope_theta") in (ROPE_THETA, None)
    if not (isinstance(rope, dict) and fits and rope.get("rope_type") in ROPE_TYPES):
        raise ValueError(
            f"{file}: {tower.section}.rope_parameters is {rope!r:.80}; only rope_type "
            f"{ROPE_TYPES[0]} with rope_theta {ROPE_THETA} is supported"
        )


def _deep(file: Path, tower: Tower, said: object, depth: int, layers: int) -> tuple[int, ...]:
    """The blocks whose rows are added after the first layers."""
    deep = said if isinstance(said, list) else [None]
    order = all(type(one) is int and 0 <= one < depth for one in deep)
    if not order or any(one >= other for one, other in pairwise(deep)):
        raise ValueError(
            f"{file}: {tower.section}.deepstack_visual_indexes should be increasing numbers of the "
            f"{depth} blocks, found {said!r:.60}"
        )
    if len(deep) >= layers or len(deep) > DEEP_MAX:
        raise ValueError(
            f"{file}: {tower.section}.deepstack_visual_indexes has {len(deep)} blocks; it should "
            f"have at most {DEEP_MAX}, and fewer than the language model has layers, {layers}"
        )
    return tuple(deep)


# ---- tensors ----


def _shapes(sizes: TowerSizes) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """The slots of a tower: of itself, of each block, and of each merger, of which the main one is
    0; and their tensors' shapes."""
    width, ffn, whole = sizes.width, sizes.ffn, MERGED * sizes.width
    yield "patch", 0, (width, 3, sizes.frames, sizes.patch, sizes.patch)
    yield "patch_bias", 0, (width,)
    yield "pos", 0, (sizes.grid**2, width)
    for block in range(sizes.depth):
        for slot, rows, cols in (
            ("qkv", 3 * width, width),
            ("proj", width, width),
            ("fc1", ffn, width),
            ("fc2", width, ffn),
        ):
            yield slot, block, (rows, cols)
            yield f"{slot}_bias", block, (rows,)
        for slot in ("norm1", "norm1_bias", "norm2", "norm2_bias"):
            yield slot, block, (width,)
    for merger in range(1 + len(sizes.deep)):
        for slot, shape in (
            ("norm", (whole if merger else width,)),
            ("norm_bias", (whole if merger else width,)),
            ("fc1", (whole, whole)),
            ("fc1_bias", (whole,)),
            ("fc2", (sizes.out, whole)),
            ("fc2_bias", (sizes.out,)),
        ):
            yield f"merge_{slot}", merger, shape


def _find_tensors(
    folder: Path, tower: Tower, sizes: TowerSizes, tensors: safetensors_io.Tensors
) -> dict[tuple[str, int], str]:
    """The names of the tower's tensors, after checking that all fit and none is left over."""
    seen = {one: [name for name in tensors if name.startswith(one)] for one in tower.prefixes}
    prefix = next((one for one in tower.prefixes if seen[one]), None)
    if prefix is None:
        raise ValueError(
            f"{folder} has no vision tower: its files have no tensor {tower.prefixes[0]}*"
        )
    names = {}
    for slot, index, shape in _shapes(sizes):
        name = prefix + tower.tensor(slot, index)
        if name not in tensors:
            raise ValueError(f"the vision tower: the file has no {name}")
        entry = tensors.entry(name)
        if entry.shape != shape:
            raise ValueError(f"the vision tower: {name} is {entry.shape}, the model needs {shape}")
        if entry.dtype not in {*safetensors_io.READ, *safetensors_io.IN_BF16}:
            known = ", ".join(safetensors_io.READ)
            raise ValueError(f"the vision tower: {name} is {entry.dtype}; tinsmith reads {known}")
        names[slot, index] = name
    surplus = sorted(set(seen[prefix]) - set(names.values()))
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ValueError(f"the file has {surplus[0]}{more}, which the vision tower does not use")
    return names
