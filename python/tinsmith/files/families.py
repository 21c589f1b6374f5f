"""Model families: how a Hugging Face checkpoint becomes an engine's model. One row per family.

A row names the architecture, what its layers have and are (config.py reads which), and the tensor
behind each of the engine's slots (family.py); no code anywhere asks for a family's name. Weights
are streamed from the mapped files one matrix at a time, after all names and shapes have been
checked.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.files import config as hugging_face
from tinsmith.files import gguf_model, home, kept, tokenizer, weights
from tinsmith.files.config import CONFIG_FILE, read_json
from tinsmith.files.family import LLAMA_NAMES, NESTED, PREFIX, Family, plain
from tinsmith.files.gguf_model import HALVES, PAIRS

Slots = Sequence[tuple[str, int, int, int, int]]  # of a core: slot, layer or -1, index, rows, cols

DTYPES = ("auto", "float32", "bfloat16")

# config.json's key of each of the engine's sizes.
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
# What the engine has too (csrc/model/model.c).
LAYERS_MAX, HEAD_WIDTH_MAX = 1 << 16, 256
DELTA_UNIT, DELTA_MOST = 32, 256
EXPERTS_MOST, CHOSEN_MOST = 1024, 32
# Sizes that only some families have; the others' are 0.
SOME_SIZES = (
    "key_heads", "value_heads", "key_width", "value_width", "experts", "chosen", "expert_ffn",
    "norm_shares",
)  # fmt: skip

# A mixture of experts' keys, and its tensors, one for each matrix or one for all experts.
EXPERT_SIZES = {
    "experts": "num_experts", "chosen": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}  # fmt: skip
EXPERTS = "model.layers.{layer}.mlp.experts."
APART = {
    "router": "model.layers.{layer}.mlp.gate.weight",
    "e_gate": EXPERTS + "{index}.gate_proj.weight",
    "e_up": EXPERTS + "{index}.up_proj.weight",
    "e_down": EXPERTS + "{index}.down_proj.weight",
}
FUSED = {
    "e_gate": EXPERTS + "gate_up_proj",
    "e_up": EXPERTS + "gate_up_proj",
    "e_down": EXPERTS + "down_proj",
}
# As the hosted service names all experts' matrices, which share one factor.
EXPERT_MODULES = {"e_gate": EXPERTS + "w1", "e_up": EXPERTS + "w3", "e_down": EXPERTS + "w2"}

FREQUENCIES = "rotary_emb.inv_freq"  # of old Llama files, which config.json says too

QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    mixers=hugging_face.some_linear,
    qk_norm=True,
    q_gate=True,
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    fixed={"linear_conv_kernel_dim": 4, "attn_output_gate": True},
    refused=("attention_bias",),
    sizes={
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
        "key_width": "linear_key_head_dim", "value_width": "linear_value_head_dim",
    },
    partial=0.25,
    prefixes=(NESTED, PREFIX),
    names=LLAMA_NAMES | {
        "delta_q": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_k": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_v": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_z": "model.layers.{layer}.linear_attn.in_proj_z.weight",
        "delta_b": "model.layers.{layer}.linear_attn.in_proj_b.weight",
        "delta_a": "model.layers.{layer}.linear_attn.in_proj_a.weight",
        "delta_conv": "model.layers.{layer}.linear_attn.conv1d.weight",
        "delta_rate": "model.layers.{layer}.linear_attn.A_log",
        "delta_bias": "model.layers.{layer}.linear_attn.dt_bias",
        "delta_norm": "model.layers.{layer}.linear_attn.norm.weight",
        "delta_out": "model.layers.{layer}.linear_attn.out_proj.weight",
    },
    tails={"delta_conv": (1, 4)},
    plus_one=("final_norm", "attn_norm", "q_norm", "k_norm", "mlp_norm"),
    # rmsnorm with these weights divides by a length: x / (|x| / √N) · 1/√N; q also by √N.
    constants={"delta_q_unit": lambda width: 1 / width, "delta_k_unit": lambda width: width**-0.5},
    aside=("model.visual.", NESTED + "visual.", "mtp."),
    # As the hosted service names them: it trains matrices of their own on q, k and v.
    modules={
        "delta_q": "model.layers.{layer}.linear_attn.in_proj_q",
        "delta_k": "model.layers.{layer}.linear_attn.in_proj_k",
        "delta_v": "model.layers.{layer}.linear_attn.in_proj_v",
        "head": "model.unembed_tokens",
    },
)  # fmt: skip

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    feeds=hugging_face.all_experts_with_shared,
    defaults=QWEN3_5.defaults | {
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    fixed=QWEN3_5.fixed | {"norm_topk_prob": True},
    sizes={
        **QWEN3_5.sizes, **EXPERT_SIZES, "ffn": "shared_expert_intermediate_size",
    },
    names={
        **QWEN3_5.names, **APART,
        "w_gate": "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
        "w_up": "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
        "w_down": "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
        "shared_gate": "model.layers.{layer}.mlp.shared_expert_gate.weight",
    },
    others=FUSED,
    modules={**QWEN3_5.modules, **EXPERT_MODULES},
)  # fmt: skip

FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        mixers=hugging_face.some_sliding,
        qk_norm=True,
        defaults={"head_dim": 128},
        refused=("attention_bias",),
        gguf=HALVES,
    ),
    Family("qwen2", "Qwen2ForCausalLM", hugging_face.some_sliding, qkv_bias=True, gguf=HALVES),
    Family(
        "llama",
        "LlamaForCausalLM",
        refused=("attention_bias", "sliding_window", "use_sliding_window"),
        gguf=PAIRS,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        mixers=hugging_face.all_sliding,
        refused=("use_sliding_window",),
    ),
    QWEN3_5,
    replace(QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", section="text_config"),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        feeds=hugging_face.some_experts,
        qk_norm=True,
        defaults={
            "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
        refused=("attention_bias", "use_sliding_window"),
        sizes=EXPERT_SIZES,
        names={**LLAMA_NAMES, **APART},
        others=FUSED,
        modules=EXPERT_MODULES,
    ),
    QWEN3_5_MOE,
    replace(QWEN3_5_MOE, architecture="Qwen3_5MoeForConditionalGeneration", section="text_config"),
)  # fmt: skip


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
    packed: Mapping[kept.Place, str]  # those of fewer bits
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
    weights: str = "stored",
    threads: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Loads a model's folder: config.json, tokenizer.json and its safetensors files.

    dtype is what products with base weights are computed in: "float32", which is exact for bf16
    checkpoints too; "bfloat16", which also rounds the weights of others; "auto": bfloat16 for a
    bf16 checkpoint where that is faster on this processor, else float32; None: float32 on the
    CPU, and on a GPU bfloat16, which is all it has. Sums are always float32. weights is what they
    are kept in: "stored": as they come; "bf16"; "int8" or "int4": blocks of so many bits, and the
    model is that of the numbers that these mean (kept.py). `report` is called with the bytes loaded
    and the bytes in all.

    Raises FileNotFoundError for a missing file, and ValueError for content that is not supported or
    does not fit. Each names the file, what was expected and what came.
    """
    model = inspect_model(path, device=device, dtype=dtype, weights=weights)
    return load_weights(model, threads=threads, report=report)


def inspect_model(
    path: Path | str, *, device: str = "cpu", dtype: str | None = None, weights: str = "stored"
) -> BaseModel:
    """Checks all that load_model checks, in the files' headers; no weights are read."""
    folder = Path(path).resolve()
    kept.check(weights, device)
    family, config, inv_freq = _read_model(folder)
    vocab = int(config["vocab"])
    known = tokenizer.read(folder)
    eos_ids = tokenizer.read_eos(folder, family.section, known, vocab)
    with gguf_model.open_tensors(folder) as tensors:
        family = family.of(tensors)
        stored = "bf16" if weights == "bf16" else _element_type(family, tensors)
        kind, device = _choose_type(stored, device, dtype)
        slots = _core.Model(config, inv_freq, weights=kind, threads=1).slots
        held = _check_tensors(family, slots, tensors, tied=bool(config["tied"]))
        packed = kept.choose(weights, device, _stored(held, tensors))
        core = _core.Model(config, inv_freq, weights=kind, packed=packed, threads=1)
    return BaseModel(
        path=folder,
        family=family,
        context=int(config["context"]),
        vocab=vocab,
        tokenizer_vocab=min(max(known.values()) + 1, vocab),
        eos_ids=eos_ids,
        tokenizer_dir=folder,
        weight_bytes=core.weight_bytes,
        device=device,
        kind=kind,
        packed=packed,
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
        core.load(piece.slot, piece.layer, piece.array, piece.index, piece.packed)
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
    packed: str | None = None  # the array's type, where it has blocks


def open_core(model: BaseModel, *, threads: int) -> _core.Model:
    """A model in the engine that has no weights yet."""
    return _core.Model(
        dict(model.config),
        model.inv_freq,
        weights=model.kind,
        packed=dict(model.packed),
        device=model.device,
        threads=threads,
    )


def read_weights(
    model: BaseModel, slots: Slots, fetch: Callable[[weights.Entry], None] = lambda _: None
) -> Iterator[Piece]:
    """The tensors that a core with these slots loads, after its files were checked. `fetch` is
    called for each tensor before it is touched."""
    family = model.family
    with gguf_model.open_tensors(model.path) as tensors:
        places = _check_tensors(family, slots, tensors, tied=bool(model.config["tied"]))
        done, total = 0, sum(tensors.entry(name).size for name in places)
        for name, held in places.items():
            entry = tensors.entry(name)
            fetch(entry)
            done += entry.size
            read = _Tensor(model, tensors, name)
            row = 0
            for slot, layer, index, rows, cols in held:
                array, packed = read.rows(slot, layer, row, rows, cols)
                row += rows
                yield Piece(slot, layer, index, array, done, total, packed)
        for slot, layer, index, _, length in slots:
            if slot in family.constants:
                constant = np.full(length, family.constants[slot](length), np.float32)
                yield Piece(slot, layer, index, constant, done, total)


class _Tensor:
    """One tensor of a model's files, of which slots take their rows; finite, or ValueError."""

    def __init__(self, model: BaseModel, tensors: weights.Tensors, name: str) -> None:
        self._model, self._tensors, self._name = model, tensors, name
        self._what = f"{tensors.entry(name).file}: {name}"
        self._wide: np.ndarray | None = None
        self._blocks: tuple[np.ndarray, str] | None = None

    def rows(
        self, slot: str, layer: int, first: int, rows: int, cols: int
    ) -> tuple[np.ndarray, str | None]:
        """Those rows as the engine takes them for a slot, and the type of blocks, if they are."""
        kind = self._model.packed.get((slot, layer))
        if kind is not None and kind == self._tensors.stored(self._name):
            if self._blocks is None:
                self._blocks = self._tensors.blocks(self._name)
                kept.check_blocks(*self._blocks, self._what)
            blocks, packed = self._blocks
            return blocks[first : first + rows], packed
        if self._wide is None:
            self._wide = self._tensors[self._name]
            weights.check_finite(self._wide, self._what)
        family, array = self._model.family, self._wide
        whole = array.ravel() if slot in family.tails or array.ndim == 1 else _rows(array)
        part = whole[first : first + rows] if whole.ndim == 2 else whole
        if kind is not None:
            return part, None  # quantised when it is loaded
        narrowed = _as_kept(part, self._model.kind)
        if narrowed.itemsize < array.itemsize:  # float32's largest are none of bfloat16's
            what = f"{self._what}, in bfloat16,"
            weights.check_finite(narrowed, what, array.shape, first * cols)
        return (narrowed + np.float32(1) if slot in family.plus_one else narrowed), None


def close_core(model: BaseModel, core: _core.Model) -> LoadedModel:
    """The loaded model, once its core has all weights."""
    core.seal()
    facts = {item.name: getattr(model, item.name) for item in fields(BaseModel)}
    return LoadedModel(**facts, core=core)


def _rows(array: np.ndarray) -> np.ndarray:
    """A tensor's matrices, behind one another: a view."""
    return array.reshape(-1, array.shape[-1])


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
    return _read_model(Path(path))[0]


def element_type(path: Path | str) -> str:
    """ "bf16" or "f32": how the engine will keep a folder's matrices. Only headers are read."""
    with gguf_model.open_tensors(path) as tensors:
        return _element_type(read_family(path), tensors)


def read_kept(
    path: Path | str, weights: str, device: str
) -> tuple[dict[str, Any], NDArray[np.float32], str, dict[kept.Place, str], dict[str, int]]:
    """A folder's config and frequencies, and what its matrices are kept in: the wide type, those of
    fewer bits, and how many numbers each type has. Only headers are read."""
    kept.check(weights, device)
    family, config, inv_freq = _read_model(Path(path))
    with gguf_model.open_tensors(path) as tensors:
        family = family.of(tensors)
        kind = "bf16" if weights == "bf16" else _element_type(family, tensors)
        slots = _core.Model(config, inv_freq, weights=kind, threads=1).slots
        held = _check_tensors(family, slots, tensors, tied=bool(config["tied"]))
        packed = kept.choose(weights, device, _stored(held, tensors))
    return config, inv_freq, kind, packed, kept.tally(slots, packed, kind)


def left_aside(path: Path | str) -> dict[str, int]:
    """How many of a folder's tensors begin with each prefix whose tensors text does not need."""
    family = read_family(path)
    with gguf_model.open_tensors(path) as tensors:
        counts = {one: sum(name.startswith(one) for name in tensors) for one in family.aside}
    return {prefix: count for prefix, count in counts.items() if count}


# Tinker's names of a model at a context of so many tokens end so.
_CONTEXT = re.compile(r"(.+):peft:([0-9]{1,9})", re.DOTALL)


def split_context(name: str) -> tuple[str, int | None]:
    """A model's name without Tinker's suffix, and the tokens that the suffix says:
    "Qwen/Qwen3-8B:peft:32768" is ("Qwen/Qwen3-8B", 32768)."""
    found = _CONTEXT.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


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
    if family.section:
        hugging_face.refuse(file, content, (), {})
        content = hugging_face.section(file, content, family.section)
    content = hugging_face.one_name(file, content) if "experts" in family.sizes else content
    sizes = {**SIZES, **family.sizes}
    hugging_face.refuse(file, content, family.refused, family.fixed, sizes.values())
    missing = {key for key in family.defaults if content.get(key) is None}
    content = content | {key: family.defaults[key] for key in missing}
    count, number = hugging_face.count, hugging_face.number
    config: dict[str, Any] = dict.fromkeys(SOME_SIZES, 0)
    config |= {size: count(file, content, key) for size, key in sizes.items()}
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
        "rotary": rotary,
        "qkv_bias": int(family.qkv_bias),
        "qk_norm": int(family.qk_norm),
        "q_gate": int(family.q_gate),
        "tied": int(bool(content.get(hugging_face.TIED, False))),
    }
    if config["experts"]:
        config["norm_shares"] = int(hugging_face.flag(file, content, "norm_topk_prob"))
        _check_experts(file, config, sizes)
    _check_delta(file, config, sizes)
    return family, config, inv_freq


def _check_delta(file: Path, config: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """The sizes of a delta network, which are zeros where the family has none."""
    for size in ("key_width", "value_width"):
        if config[size] % DELTA_UNIT or config[size] > DELTA_MOST:
            raise ValueError(
                f"{file}: {keys[size]} is {config[size]}; it should be a multiple of "
                f"{DELTA_UNIT}, at most {DELTA_MOST}"
            )
    heads, values = config["key_heads"], config["value_heads"]
    if heads and values % heads:
        raise ValueError(f"{file}: {values} value heads can't share {heads} key heads evenly")


def _check_experts(file: Path, config: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    experts, chosen = config["experts"], config["chosen"]
    if experts > EXPERTS_MOST:
        raise ValueError(
            f"{file}: {keys['experts']} is {experts}; it should be at most {EXPERTS_MOST}"
        )
    if chosen > min(experts, CHOSEN_MOST):
        most = f"{CHOSEN_MOST}" if experts > CHOSEN_MOST else f"{experts}, the number of experts"
        raise ValueError(f"{file}: {keys['chosen']} is {chosen}; it should be at most {most}")


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


@dataclass(frozen=True)
class Place:
    """The rows [first, first + rows) of a tensor, which has `cols` columns."""

    tensor: str
    first: int
    rows: int
    cols: int


def read_places(path: Path | str) -> tuple[Family, dict[str, list[Place]]]:
    """The row of a model's folder, and where the weights of each module lie, by its plain name. A
    module of several matrices has a place for each; one of a tensor with several slots, all of
    it."""
    family, config, inv_freq = _read_model(Path(path))
    with gguf_model.open_tensors(path) as tensors:
        family = family.of(tensors)
        slots = _core.Model(config, inv_freq, weights="f32", threads=1).slots
        held = _check_tensors(family, slots, tensors, tied=bool(config["tied"]))
    found: dict[str, list[Place]] = {}
    for name, parts in held.items():
        first = 0
        for slot, layer, index, rows, cols in parts:
            place = Place(name, first, rows, cols)
            found.setdefault(plain(family.module(slot, layer, index)), []).append(place)
            if family.stacked(slot) or len(parts) == 1:
                found[plain(family.matrix(slot, layer, index))] = [place]
            first += rows
        if not family.stacked(parts[0][0]):
            found[plain(name.removesuffix(".weight"))] = [Place(name, 0, first, parts[0][4])]
    return family, found


def _stored(
    held: Mapping[str, Sequence[tuple[str, int, int, int, int]]], tensors: weights.Tensors
) -> dict[kept.Place, set[str | None]]:
    """In what types with blocks, or None, the matrices of each slot of a layer are stored."""
    found: dict[kept.Place, set[str | None]] = {}
    for name, parts in held.items():
        for slot, layer, _, rows, _ in parts:
            if rows > 1:
                found.setdefault((slot, layer), set()).add(tensors.stored(name))
    return found


def _element_type(family: Family, tensors: weights.Tensors) -> str:
    used = (name for name in tensors if not family.is_aside(name) and not family.is_vector(name))
    entries = [tensors.entry(name) for name in used]
    matrices = {entry.dtype for entry in entries if len(entry.shape) > 1}
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
    fast = dtype == "auto" and kind == "bf16" and _core.bf16_is_fast()
    return kind, "cpu-bf16" if fast else "cpu"


def _check_tensors(
    family: Family, slots: Slots, tensors: weights.Tensors, *, tied: bool
) -> dict[str, list[tuple[str, int, int, int, int]]]:
    """The slots that each tensor holds, behind one another, after checking that all fit and none is
    left over."""
    held: dict[str, list[tuple[str, int, int, int, int]]] = {}
    for one in slots:
        if one[0] not in family.constants:
            held.setdefault(family.tensor(*one[:3]), []).append(one)
    for name, parts in held.items():
        parts.sort(key=lambda part: part[2])  # all slots of one expert, then those of the next
        slot, layer, index, _, cols = parts[0]
        place = slot if layer < 0 else f"layer {layer} {slot}"
        place += f" {index}" if index else ""
        if name not in tensors:
            raise ValueError(f"{place}: the file has no {name}")
        rows, count = sum(part[3] for part in parts), len({part[2] for part in parts})
        tail = family.tails.get(slot, ())
        shape, needed = tensors.entry(name).shape, (rows, cols) if rows > 1 else (cols,)
        needed = (cols // math.prod(tail), *tail) if tail else needed
        needed = (count, rows // count, cols) if family.stacked(slot) else needed
        if shape != needed and (len(needed) > 2 or shape != (rows, cols)):
            raise ValueError(f"{place}: file has {shape}, the model needs {needed}")
    # A tied head may be stored all the same; old Llama files keep their rotary frequencies.
    ignored = {family.tensor("head", -1)} if tied else set()
    surplus = [
        name
        for name in set(tensors) - set(held) - ignored
        if not name.endswith(FREQUENCIES) and not family.is_aside(name)
    ]
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ValueError(f"the file has {min(surplus)}{more}, which {family.name} does not use")
    return held
