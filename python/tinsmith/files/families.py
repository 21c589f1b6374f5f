"""Model families: how a Hugging Face checkpoint becomes an engine's model. One row per family.

A row names the architecture, what its layers have, and the tensor behind each of the engine's
slots. Whatever in config.json would change the maths and is not handled is refused by name, rather
than computed wrongly; keys that change nothing are ignored. The rotary frequencies follow
transformers' modeling_rope_utils step by step in float32. Weights are streamed from the mapped
files one tensor at a time, after all names and shapes have been checked.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import weights

Slots = Sequence[tuple[str, int, int, int]]  # of a core: slot, layer or -1, rows, columns

DTYPES = ("auto", "float32", "bfloat16")
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

# The tensor behind each slot, in Llama's naming, which all rows share.
NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "wq": "model.layers.{layer}.self_attn.q_proj.weight",
    "wk": "model.layers.{layer}.self_attn.k_proj.weight",
    "wv": "model.layers.{layer}.self_attn.v_proj.weight",
    "bq": "model.layers.{layer}.self_attn.q_proj.bias",
    "bk": "model.layers.{layer}.self_attn.k_proj.bias",
    "bv": "model.layers.{layer}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "wo": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "w_gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "w_up": "model.layers.{layer}.mlp.up_proj.weight",
    "w_down": "model.layers.{layer}.mlp.down_proj.weight",
}

# config.json's key of each of the engine's sizes.
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}

# Keys that change the maths when they are set, and that no row handles.
REFUSED = (
    "use_sliding_window", "mlp_bias", "quantization_config", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_intermediate_size", "final_logit_softcapping",
    "attn_logit_softcapping", "logits_soft_cap", "query_pre_attn_scalar", "clip_qkv",
    "no_rope_layers", "attention_chunk_size", "use_mrope",
)  # fmt: skip

# Factors that change the maths unless they are one.
FACTORS = (
    "partial_rotary_factor", "rotary_pct", "logit_scale", "logits_scaling",
    "embedding_multiplier", "residual_multiplier",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row: an architecture, and in what it differs from plain Llama."""

    name: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_width: int | None = None  # where config.json has no head_dim; None: width / heads
    refused: tuple[str, ...] = ()  # keys that this architecture reads and the engine doesn't handle
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)


FAMILIES = (
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, head_width=128, refused=("attention_bias",)),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    Family("llama", "LlamaForCausalLM", refused=("attention_bias", "sliding_window")),
)


@dataclass(frozen=True)
class BaseModel:
    """What is known of a base model before its weights are read."""

    path: Path
    family: str
    context: int
    vocab: int
    tokenizer_vocab: int  # ids from here on stand for no token
    eos_ids: tuple[int, ...]
    tokenizer_dir: Path
    weight_bytes: int  # in memory, once loaded
    device: str  # the engine's, which also says what products are computed in
    kind: str  # "bf16" or "f32": how matrices are kept
    config: Mapping[str, float] = field(repr=False, compare=False)
    inv_freq: NDArray[np.float32] = field(repr=False, compare=False)


@dataclass(frozen=True)
class LoadedModel(BaseModel):
    """A base model in the engine."""

    core: _core.Model


def load_model(
    path: Path | str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    threads: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Loads a model's folder: config.json, tokenizer.json and its safetensors files.

    dtype is what products with base weights are computed in: "float32", which is exact for bf16
    checkpoints too; "bfloat16", which also rounds the weights of others; "auto": bfloat16 for a
    bf16 checkpoint where the processor has the instructions, else float32; None: float32 on the
    CPU, and on a GPU bfloat16, which is all it has. Sums are always float32. `report` is called
    with the bytes loaded and the bytes in all.

    Raises FileNotFoundError for what is missing and ValueError for what is not supported or does
    not fit, each with a sentence that names the file, what was expected and what came.
    """
    model = inspect_model(path, device=device, dtype=dtype)
    return load_weights(model, threads=threads, report=report)


def inspect_model(path: Path | str, *, device: str = "cpu", dtype: str | None = None) -> BaseModel:
    """Checks all that load_model checks, in the files' headers; no weights are read."""
    folder = Path(path).resolve()
    family, config, inv_freq = _read_model(folder)
    vocab = int(config["vocab"])
    tokenizer = _read_tokenizer(folder)
    eos_ids = _read_eos(folder, tokenizer, vocab)
    with weights.open_folder(folder) as tensors:
        kind, device = _choose_type(_element_type(tensors), device, dtype)
        core = _core.Model(config, inv_freq, weights=kind, threads=1)
        _check_tensors(family, core.slots, tensors, tied=bool(config["tied"]))
    return BaseModel(
        path=folder,
        family=family.name,
        context=int(config["context"]),
        vocab=vocab,
        tokenizer_vocab=min(max(tokenizer.values()) + 1, vocab),
        eos_ids=eos_ids,
        tokenizer_dir=folder,
        weight_bytes=core.weight_bytes,
        device=device,
        kind=kind,
        config=config,
        inv_freq=inv_freq,
    )


def load_weights(
    model: BaseModel,
    *,
    threads: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Reads the weights of a model that was inspected into the engine."""
    core = open_core(model, threads=threads)
    for piece in read_weights(model, core.slots):
        core.load(piece.slot, piece.layer, piece.array)
        report(piece.done, piece.total)
    return close_core(model, core)


@dataclass(frozen=True)
class Piece:
    """One tensor as the engine takes it, and the bytes of the files: with it so far, and in all."""

    slot: str
    layer: int
    array: np.ndarray
    done: int
    total: int


def open_core(model: BaseModel, *, threads: int) -> _core.Model:
    """A model in the engine that has no weights yet."""
    return _core.Model(
        dict(model.config), model.inv_freq, weights=model.kind, device=model.device, threads=threads
    )


def read_weights(
    model: BaseModel, slots: Slots, fetch: Callable[[weights.Entry], None] = lambda _: None
) -> Iterator[Piece]:
    """All that a core with these slots is to load, after its files were checked. `fetch` is told of
    each tensor before it is touched."""
    family = next(row for row in FAMILIES if row.name == model.family)
    with weights.open_folder(model.path) as tensors:
        names = _check_tensors(family, slots, tensors, tied=bool(model.config["tied"]))
        done, total = 0, sum(tensors.entry(name).size for name in names.values())
        for (slot, layer), name in names.items():
            entry = tensors.entry(name)
            fetch(entry)
            done += entry.size
            yield Piece(slot, layer, _as_kept(tensors[name], model.kind), done, total)


def close_core(model: BaseModel, core: _core.Model) -> LoadedModel:
    """The model whose core has all its weights."""
    core.seal()
    facts = {item.name: getattr(model, item.name) for item in fields(BaseModel)}
    return LoadedModel(**facts, core=core)


def _as_kept(array: np.ndarray, kind: str) -> np.ndarray:
    """A tensor in the type that the engine keeps: matrices in `kind`, vectors in float32."""
    if array.ndim == 1 or kind == "f32":
        return weights.widen(array)
    if array.dtype != np.uint16:
        return weights.narrow(weights.widen(array), np.dtype(np.uint16))
    return array


def read_config(path: Path | str) -> tuple[dict[str, float], NDArray[np.float32]]:
    """The engine's config and rotary frequencies of a model's folder; no weights are read."""
    _, config, inv_freq = _read_model(Path(path))
    return config, inv_freq


def element_type(path: Path | str) -> str:
    """ "bf16" or "f32": how the engine will keep a folder's matrices. Only headers are read."""
    with weights.open_folder(path) as tensors:
        return _element_type(tensors)


def find_model(name: str, models: Mapping[str, Path]) -> Path:
    """The folder of a base model: registered under its name, a path, or in Hugging Face's cache."""
    if name in models:
        return Path(models[name])
    if "\0" not in name and (Path(name).expanduser() / CONFIG_FILE).is_file():
        return Path(name).expanduser().resolve()
    cached = _find_cached(name)
    if cached is not None:
        return cached
    registered = ", ".join(sorted(models)) or "none"
    raise FileNotFoundError(
        f"there is no model {name!r}: not registered (those are: {registered}), not a folder with "
        f"a {CONFIG_FILE}, and not in the Hugging Face cache {_cache_folder()}"
    )


def _cache_folder() -> Path:
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"


def _find_cached(name: str) -> Path | None:
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
        return None
    folder = _cache_folder() / "--".join(["models", *parts])
    revision = folder / "refs" / "main"
    if not revision.is_file():
        return None
    snapshot = folder / "snapshots" / revision.read_text().strip()
    return snapshot if (snapshot / CONFIG_FILE).is_file() else None


# ---- config.json ----


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=weights.unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, found {type(content).__name__}")
    return content


def _read_model(folder: Path) -> tuple[Family, dict[str, float], NDArray[np.float32]]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    content = read_json(file)
    family = _find_family(file, content)
    _refuse(file, content, family)
    config = {engine: _count(file, content, key) for engine, key in SIZES.items()}
    heads, width = config["heads"], config["width"]
    kv_heads = _count(file, content, "num_key_value_heads", default=heads)
    head_width = _count(file, content, "head_dim", default=family.head_width or width // heads)
    if heads % kv_heads:
        raise ValueError(f"{file}: {heads} heads can't share {kv_heads} key-value heads evenly")
    if head_width % 2:
        raise ValueError(f"{file}: head_dim is {head_width}; rotary embeddings need an even one")
    inv_freq = _inv_freq(file, content, head_width)
    config |= {
        "kv_heads": kv_heads,
        "head_width": head_width,
        "norm_eps": _number(file, content, "rms_norm_eps", default=1e-6),
        "rope_scale": 1.0,
        "qkv_bias": int(family.qkv_bias),
        "qk_norm": int(family.qk_norm),
        "tied": int(bool(content.get("tie_word_embeddings", False))),
    }
    return family, config, inv_freq


def _find_family(file: Path, content: dict[str, Any]) -> Family:
    named = content.get("architectures")
    named = named if isinstance(named, list) else []
    for family in FAMILIES:
        if named == [family.architecture]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    found = ", ".join(map(str, named)) or "no architecture"
    raise ValueError(f"{file} names {found}; tinsmith knows {known}")


def _refuse(file: Path, content: dict[str, Any], family: Family) -> None:
    for key in (*REFUSED, *family.refused):
        if content.get(key):
            raise ValueError(f"{file}: {key} is {content[key]!r:.60}, which is not supported")
    for key in FACTORS:
        if content.get(key) not in (None, 1):
            raise ValueError(f"{file}: {key} is {content[key]!r:.60}; only 1 is supported")
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{file}: hidden_act is {content['hidden_act']!r}; only silu is supported")
    kinds = set(content.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        found = ", ".join(sorted(map(str, kinds)))
        raise ValueError(f"{file}: layer_types has {found}; only full_attention is supported")


def _count(file: Path, content: dict[str, Any], key: str, default: int | None = None) -> int:
    value = content.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{file}: {key} should be a positive integer, found {value!r:.60}")
    return value


def _number(file: Path, content: dict[str, Any], key: str, default: float | None = None) -> float:
    value = content.get(key)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{file}: {key} should be a positive number, found {value!r:.60}")
    return float(value)


def _inv_freq(file: Path, content: dict[str, Any], head_width: int) -> NDArray[np.float32]:
    # transformers 4 writes rope_theta beside rope_scaling, transformers 5 both in rope_parameters.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: rope_parameters per layer are not supported, found {rope!r:.60}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        found = rope["partial_rotary_factor"]
        raise ValueError(f"{file}: partial_rotary_factor is {found!r}; only 1 is supported")
    theta = _number(file, {"rope_theta": 10000.0} | content | rope, "rope_theta")
    exponents = np.arange(0, head_width, 2).astype(np.float32) / np.float32(head_width)
    # A float64 power, rounded, is torch's float32 power but for the last bit of one in a hundred.
    powers = (float(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1.0) / powers
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return inv_freq
    if kind == "llama3":
        rope = {"original_max_position_embeddings": content.get("max_position_embeddings")} | rope
        return _llama3(file, rope, inv_freq)
    raise ValueError(f"{file}: the rope type is {kind!r}; tinsmith knows default and llama3")


def _llama3(file: Path, rope: dict[str, Any], inv_freq: NDArray[np.float32]) -> NDArray[np.float32]:
    """Llama 3.1's frequencies: long wavelengths slowed by a factor, with a smooth passage."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (_number(file, rope, key) for key in keys)
    if high <= low:
        raise ValueError(f"{file}: high_freq_factor {high} should exceed low_freq_factor {low}")
    # torch divides a number by a tensor as the number times the tensor's reciprocal.
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    slowed = np.where(wavelength > original / low, inv_freq / np.float32(factor), inv_freq)
    turns = np.float32(1) / wavelength * np.float32(original)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * slowed / np.float32(factor) + smooth * slowed
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(medium, between, slowed).astype(np.float32)


# ---- tensors ----


def _element_type(tensors: weights.Tensors) -> str:
    entries = [tensors.entry(name) for name in tensors]
    matrices = {entry.dtype for entry in entries if len(entry.shape) == 2}
    return "bf16" if matrices == {"BF16"} else "f32"


def _choose_type(kind: str, device: str, dtype: str | None) -> tuple[str, str]:
    """How matrices are kept, and the device that computes with them as dtype asks."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; {dtype!r} came")
    if device != "cpu":
        if dtype == "float32" and device == "cuda":
            raise ValueError("the device cuda computes in bfloat16: dtype float32 needs the CPU")
        return ("bf16" if dtype == "bfloat16" else kind), device
    if dtype == "bfloat16":
        return "bf16", "cpu-bf16"
    fast = dtype == "auto" and kind == "bf16" and not _core.devices("cpu-bf16")["cpu-bf16"]
    return kind, "cpu-bf16" if fast else "cpu"


def _check_tensors(
    family: Family, slots: Slots, tensors: weights.Tensors, *, tied: bool
) -> dict[tuple[str, int], str]:
    """The tensor name of each (slot, layer), after checking that all fit and none is left over."""
    names: dict[tuple[str, int], str] = {}
    for slot, layer, rows, cols in slots:
        name = family.names[slot].format(layer=layer)
        place = slot if layer < 0 else f"layer {layer} {slot}"
        if name not in tensors:
            raise ValueError(f"{place}: the file has no {name}")
        shape, needed = tensors.entry(name).shape, (rows, cols) if rows > 1 else (cols,)
        if shape not in (needed, (rows, cols)):
            raise ValueError(f"{place}: file has {shape}, the model needs {needed}")
        names[slot, layer] = name
    # A tied head may be stored all the same; old Llama files keep their rotary frequencies.
    ignored = {family.names["head"]} if tied else set()
    surplus = [
        name
        for name in set(tensors) - set(names.values()) - ignored
        if not name.endswith("rotary_emb.inv_freq")
    ]
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ValueError(f"the file has {min(surplus)}{more}, which {family.name} does not use")
    return names


# ---- the tokenizer ----


def _read_tokenizer(folder: Path) -> dict[str, int]:
    """Every token of tokenizer.json with its id."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {TOKENIZER_FILE}")
    content = read_json(file)
    try:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: pairs of a token and its score, in the order of ids
            vocab = {token: index for index, (token, _score) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        tokens = {str(token): int(index) for token, index in (vocab | added).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer: {error!r}") from None
    if not tokens:
        raise ValueError(f"{file} has no tokens")
    return tokens


def _read_eos(folder: Path, tokenizer: dict[str, int], vocab: int) -> tuple[int, ...]:
    """The ids that end a sequence, from the first file that names any."""
    for name in ("generation_config.json", CONFIG_FILE):
        file = folder / name
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(item) is not int or not 0 <= item < vocab for item in ids):
            raise ValueError(f"{file}: eos_token_id {found!r:.60} is not an id below {vocab}")
        if ids:
            return tuple(ids)
    file = folder / "tokenizer_config.json"
    token = read_json(file).get("eos_token") if file.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    return (tokenizer[token],) if token in tokenizer else ()
