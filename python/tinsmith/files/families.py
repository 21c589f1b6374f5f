"""Model families: how a Hugging Face checkpoint becomes an engine's model. One row per family.

A row names the architecture, what its layers have and are (config.py reads which), and the tensor
behind each of the engine's slots; no code anywhere asks for a family's name. Weights are streamed
from the mapped files one tensor at a time, after all names and shapes have been checked.
"""

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import config as hugging_face
from tinsmith.files import weights
from tinsmith.files.config import CONFIG_FILE, Mixers, read_json

Slots = Sequence[tuple[str, int, int, int, int]]  # of a core: slot, layer or -1, index, rows, cols

DTYPES = ("auto", "float32", "bfloat16")
TOKENIZER_FILE = "tokenizer.json"

# The tensor behind each slot, in Llama's naming. Where a layer has several matrices in one slot,
# {index} is the matrix's number.
LLAMA_NAMES = {
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
LAYERS_MAX, HEAD_WIDTH_MAX = 1 << 16, 256  # which the engine has too (csrc/model/model.c)


@dataclass(frozen=True)
class Family:
    """One row: an architecture, and its differences from plain Llama."""

    name: str
    architecture: str
    mixers: Callable[[Path, dict[str, Any], int], Mixers] = hugging_face.all_full
    feed: str = "mlp"
    qkv_bias: bool = False
    qk_norm: bool = False
    head_width: int | None = None  # where config.json has no head_dim; None: width / heads
    refused: tuple[str, ...] = ()  # keys that this architecture reads and the engine doesn't handle
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES, repr=False)

    def tensor(self, slot: str, layer: int, index: int = 0) -> str:
        """The checkpoint's name of the tensor in a slot."""
        return self.names[slot].format(layer=layer, index=index)

    def module(self, slot: str, layer: int, index: int = 0) -> str:
        """The name of the module that has this weight."""
        return self.tensor(slot, layer, index).removesuffix(".weight")


FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        mixers=hugging_face.some_sliding,
        qk_norm=True,
        head_width=128,
        refused=("attention_bias",),
    ),
    Family("qwen2", "Qwen2ForCausalLM", mixers=hugging_face.some_sliding, qkv_bias=True),
    Family(
        "llama",
        "LlamaForCausalLM",
        refused=("attention_bias", "sliding_window", "use_sliding_window"),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        mixers=hugging_face.all_sliding,
        refused=("use_sliding_window",),
    ),
)


@dataclass(frozen=True)
class BaseModel:
    """A base model's description, known before its weights are read."""

    path: Path
    family: Family
    context: int
    vocab: int
    tokenizer_vocab: int  # ids from here on stand for no token
    eos_ids: tuple[int, ...]
    tokenizer_dir: Path
    weight_bytes: int  # in memory, once loaded
    device: str  # the engine's, which also says what products are computed in
    kind: str  # "bf16" or "f32": how matrices are kept
    config: Mapping[str, Any] = field(repr=False, compare=False)
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

    Raises FileNotFoundError for a missing file, and ValueError for content that is not supported or
    does not fit. Each names the file, what was expected and what came.
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
        family=family,
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
        core.load(piece.slot, piece.layer, piece.array, piece.index)
        report(piece.done, piece.total)
    return close_core(model, core)


@dataclass(frozen=True)
class Piece:
    """One tensor as the engine takes it, and the bytes of the files: with it so far, and in all."""

    slot: str
    layer: int
    index: int
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
    """The tensors that a core with these slots loads, after its files were checked. `fetch` is
    called for each tensor before it is touched."""
    with weights.open_folder(model.path) as tensors:
        names = _check_tensors(model.family, slots, tensors, tied=bool(model.config["tied"]))
        done, total = 0, sum(tensors.entry(name).size for name in names.values())
        for (slot, layer, index), name in names.items():
            entry = tensors.entry(name)
            fetch(entry)
            done += entry.size
            array = tensors[name]
            weights.check_finite(array, f"{entry.file}: {name}")
            kept = _as_kept(array, model.kind)
            if kept.itemsize < array.itemsize:  # float32's largest numbers are none of bfloat16's
                weights.check_finite(kept, f"{entry.file}: {name}, in bfloat16,")
            yield Piece(slot, layer, index, kept, done, total)


def close_core(model: BaseModel, core: _core.Model) -> LoadedModel:
    """The loaded model, once its core has all weights."""
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


def read_config(path: Path | str) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """The engine's config and rotary frequencies of a model's folder; no weights are read."""
    _, config, inv_freq = _read_model(Path(path))
    return config, inv_freq


def read_family(path: Path | str) -> Family:
    """The row of a model's folder; ValueError where config.json asks for what no row computes."""
    family, _, _ = _read_model(Path(path))
    return family


def element_type(path: Path | str) -> str:
    """ "bf16" or "f32": how the engine will keep a folder's matrices. Only headers are read."""
    with weights.open_folder(path) as tensors:
        return _element_type(tensors)


# Tinker's names of a model at a context of so many tokens end so.
_CONTEXT = re.compile(r"(.+):peft:([0-9]{1,9})", re.DOTALL)


def split_context(name: str) -> tuple[str, int | None]:
    """A model's name without Tinker's suffix, and the tokens that the suffix says:
    "Qwen/Qwen3-8B:peft:32768" is ("Qwen/Qwen3-8B", 32768)."""
    found = _CONTEXT.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


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


def _read_model(folder: Path) -> tuple[Family, dict[str, Any], NDArray[np.float32]]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    content = read_json(file)
    family = _find_family(file, content)
    hugging_face.refuse(file, content, family.refused)
    count, number = hugging_face.count, hugging_face.number
    config: dict[str, Any] = {engine: count(file, content, key) for engine, key in SIZES.items()}
    heads, width, layers = config["heads"], config["width"], config["layers"]
    kv_heads = count(file, content, "num_key_value_heads", default=heads)
    head_width = count(file, content, "head_dim", default=family.head_width or width // heads)
    if layers > LAYERS_MAX:
        raise ValueError(f"{file}: {layers} layers are more than {LAYERS_MAX}")
    if heads % kv_heads:
        raise ValueError(f"{file}: {heads} heads can't share {kv_heads} key-value heads evenly")
    if head_width % 2 or not 2 <= head_width <= HEAD_WIDTH_MAX:
        raise ValueError(
            f"{file}: head_dim is {head_width}; it should be even, for rotary embeddings, and at "
            f"most {HEAD_WIDTH_MAX}"
        )
    inv_freq = hugging_face.frequencies(file, content, head_width)
    mixers, window = family.mixers(file, content, layers)
    config |= {
        "mixers": mixers,
        "feeds": (family.feed,) * layers,
        "window": window,
        "kv_heads": kv_heads,
        "head_width": head_width,
        "norm_eps": number(file, content, "rms_norm_eps", default=1e-6),
        "rope_scale": 1.0,
        "rotary": head_width,
        "q_gate": 0,
        "key_heads": 0,
        "value_heads": 0,
        "key_width": 0,
        "value_width": 0,
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
    raise ValueError(f"{file} names {found:.200}; tinsmith knows {known}")


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
) -> dict[tuple[str, int, int], str]:
    """The tensor name of each (slot, layer, index), after checking that all fit and none is left
    over."""
    names: dict[tuple[str, int, int], str] = {}
    for slot, layer, index, rows, cols in slots:
        name = family.tensor(slot, layer, index)
        place = slot if layer < 0 else f"layer {layer} {slot}"
        if name not in tensors:
            raise ValueError(f"{place}: the file has no {name}")
        shape, needed = tensors.entry(name).shape, (rows, cols) if rows > 1 else (cols,)
        if shape not in (needed, (rows, cols)):
            raise ValueError(f"{place}: file has {shape}, the model needs {needed}")
        names[slot, layer, index] = name
    # A tied head may be stored all the same; old Llama files keep their rotary frequencies.
    ignored = {family.tensor("head", -1)} if tied else set()
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
        tokens = {str(token): operator.index(index) for token, index in (vocab | added).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer: {error!r:.200}") from None
    if not tokens or min(tokens.values()) < 0:
        raise ValueError(f"{file} has {'an id below 0' if tokens else 'no tokens'}")
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
    found = tokenizer.get(token, vocab) if isinstance(token, str) else vocab
    return (found,) if found < vocab else ()
