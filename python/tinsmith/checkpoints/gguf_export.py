"""`tinsmith export --gguf`: the merged model as one GGUF file for llama.cpp.

The metadata is config.json and the tokenizer in llama.cpp's terms, by the tables that also read
such files (gguf_model.py, gguf_tokenizer.py). If the base model is a GGUF file itself, its
tokenizer's keys are copied. The package gguf writes the header; the tensors follow one by one, each
merged when its turn comes, so memory holds one matrix at a time. Vectors are f32, because llama.cpp
requires it. What can't be written is refused before any work, and the file appears whole or not at
all.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.checkpoints.export import Merged, open_merged
from tinsmith.formats import config, gguf_model, safetensors_io, tokenizer
from tinsmith.formats.gguf_header import read_header, require_gguf
from tinsmith.formats.gguf_tokenizer import tokenizer_keys
from tinsmith.models import registry
from tinsmith.models.tensor_views import FREQUENCIES
from tinsmith.system import disk

# By --type: the type of matrices, its name in ggml, and llama.cpp's name of such a file.
TYPES = {
    "bf16": (np.uint16, "BF16", "MOSTLY_BF16"),
    "f16": (np.float16, "F16", "MOSTLY_F16"),
    "f32": (np.float32, "F32", "ALL_F32"),
}
ALIGNMENT = 32  # of a tensor's first byte, unless the file says otherwise
TOKENIZER = "tokenizer."


@dataclass(frozen=True)
class Words:
    """A file's metadata. `types` are the value types of copied keys; `heads` are of modules whose
    rows are in rotary pairs; `factors` are ROPE's, or None."""

    arch: str
    values: Mapping[str, Any] = field(repr=False)
    types: Mapping[str, tuple[int, ...]] = field(repr=False)
    heads: Mapping[str, int]
    factors: np.ndarray | None = field(repr=False)


def export_gguf(model: Path, adapter: Path, out: Path, kind: str = "bf16") -> int:
    """Writes the merged model; returns the number of changed tensors."""
    if out.suffix != gguf_model.SUFFIX:
        raise ValueError(f"{out}: a GGUF file's name should end in {gguf_model.SUFFIX}")
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists; choose another name")
    gguf = require_gguf()
    words = _words(model)
    disk.make_open_folder(out.parent)
    with open_merged(model, adapter) as merged, disk.unfinished(out, "model") as folder:
        _write(gguf, folder / out.name, words, merged, kind)
        disk.publish(folder / out.name)
        disk.put(folder / out.name, out, overwrite=False)
        disk.remove(folder)
        return merged.count


# ---- metadata ----


def _words(model: Path) -> Words:
    """The file's metadata; ValueError for a model that can't be written."""
    family = registry.read_family(model)
    written = {one.name for one in registry.FAMILIES if one.gguf and not one.others}
    if family.name not in written:
        known = ", ".join(sorted(written))
        raise ValueError(
            f"{model}: a model of the family {family.name} can't be written to a GGUF file; "
            f"{known} can"
        )
    sizes, inv_freq = registry.read_config(model)
    file = model / config.CONFIG_FILE
    if sizes["window"]:
        raise ValueError(f"{file}: the sliding window can't be written to a GGUF file")
    if sizes["rope_scale"] != 1:
        raise ValueError(f"{file}: YaRN's attention factor can't be written to a GGUF file")
    theta, head = config.rope_theta(file, config.read_json(file)), sizes["head_width"]
    named = {
        **{gguf_model.SIZES[key]: sizes[name] for name, key in registry.SIZES.items()
           if key in gguf_model.SIZES},
        "vocab_size": sizes["vocab"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": sizes["norm_eps"],
        "rope.dimension_count": head,
        "rope.freq_base": theta,
    }  # fmt: skip
    values, types = _tokenizer(model, family, sizes["vocab"])
    return Words(
        arch=family.name,
        values={f"{family.name}.{key}": value for key, value in named.items()} | values,
        types=types,
        heads=gguf_model.heads_in_pairs(family.gguf, sizes["heads"], sizes["kv_heads"]),
        factors=_factors(file, family, theta, head, inv_freq),
    )


def _factors(
    file: Path, family: registry.Family, theta: float, head: int, inv_freq: np.ndarray
) -> np.ndarray | None:
    """The divisors of the rotary frequencies; None if there are none."""
    plain = config.frequencies(file, {"rope_theta": theta}, head)
    if np.array_equal(plain, inv_freq):
        return None
    if family.gguf != gguf_model.PAIRS:  # llama.cpp reads factors only there
        raise ValueError(
            f"{file}: the rope scaling can't be written to a GGUF file of the family {family.name}"
        )
    return plain / inv_freq


def _tokenizer(
    model: Path, family: registry.Family, vocab: int
) -> tuple[dict[str, Any], Mapping[str, tuple[int, ...]]]:
    """The tokenizer's keys, and the types of those that are copied from a GGUF file."""
    source = gguf_model.source_of(model)
    if source == model:
        vocabulary = tokenizer.read(model)
        ends = tokenizer.read_eos(vocabulary, family.section, vocab)
        return tokenizer_keys(vocabulary, vocab, ends), {}
    header = read_header(source)
    keys = [
        key for key, value in header.values.items() if key.startswith(TOKENIZER) and value != []
    ]
    return {key: header.values[key] for key in keys}, {key: header.types[key] for key in keys}


# ---- the file ----


@dataclass(frozen=True)
class _OutputTensor:
    """A tensor of the file; `make` returns it in its type."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ggml: str
    make: Callable[[], np.ndarray]


def _write(gguf: Any, file: Path, words: Words, merged: Merged, kind: str) -> None:
    parts = _parts(words, merged, kind)
    disk.create(file).close()  # readable by its owner only until it is whole
    writer = gguf.GGUFWriter(file, words.arch)
    try:
        writer.add_type("model")
        writer.add_name(file.stem)
        writer.add_file_type(gguf.LlamaFileType[TYPES[kind][2]])
        for key, value in words.values.items():
            add_key(gguf, writer, key, value, words.types.get(key, ()))
        for part in parts:
            size = part.dtype.itemsize * math.prod(part.shape)
            ggml = gguf.GGMLQuantizationType[part.ggml]
            writer.add_tensor_info(part.name, part.shape, part.dtype, size, ggml)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with file.open("ab") as target:
        for part in parts:
            array = part.make()
            assert (array.dtype, array.shape) == (part.dtype, part.shape), part.name
            safetensors_io.check_finite(array, f"{part.name}, in {kind},")
            target.write(bytes(-target.tell() % ALIGNMENT))
            target.write(np.ascontiguousarray(array).data)
        target.write(bytes(-target.tell() % ALIGNMENT))
        target.flush()
        os.fsync(target.fileno())


def _parts(words: Words, merged: Merged, kind: str) -> list[_OutputTensor]:
    parts = []
    if (factors := words.factors) is not None:
        parts.append(
            _OutputTensor(gguf_model.ROPE, factors.shape, factors.dtype, "F32", lambda: factors)
        )
    for name in merged:
        if name.endswith(FREQUENCIES):  # old files have what is in config.json
            continue
        shape = merged.entry(name).shape
        dtype, ggml, _ = TYPES[kind if len(shape) == 2 else "f32"]
        make = _maker(merged, name, np.dtype(dtype), words.heads.get(gguf_model.module_of(name)))
        parts.append(_OutputTensor(gguf_model.gguf_name(name), shape, np.dtype(dtype), ggml, make))
    return parts


def _maker(
    merged: Merged, name: str, dtype: np.dtype[Any], heads: int | None
) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        with np.errstate(over="ignore"):  # infinite results are refused
            array = merged.make(name, dtype)
        return array if heads is None else gguf_model.in_pairs(array, heads)

    return make


def add_key(gguf: Any, writer: Any, key: str, value: Any, types: tuple[int, ...] = ()) -> None:
    """Adds a key in its original type, or in the type that llama.cpp expects."""
    if types:
        writer.add_key_value(key, value, *map(gguf.GGUFValueType, types))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
