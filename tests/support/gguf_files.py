"""GGUF files made of small models, with gguf's own writer and names: what the reader is held to."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tinsmith.checkpoints import gguf_export
from tinsmith.formats import gguf_header, safetensors_io
from tinsmith.models import registry

from support import packed_weights, tiny_models

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
MIXTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "uint16": gguf.GGMLQuantizationType.BF16,
}


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q's and k's rows, element by element: those that turn together are
    neighbours."""
    out, width = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for pair in range(width // 2):
            for side in range(2):
                out[head * width + 2 * pair + side] = rows[head * width + side * width // 2 + pair]
    return out


def words(vocab: int, used: int) -> dict[str, Any]:
    """A tokenizer of words w0, w1, ..., one of which is a merge of the last two tokens; and unused
    ids up to the vocabulary's end."""
    tokens = [*(f"w{index}" for index in range(used - 2)), "w", "1"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{index}]" for index in range(used, vocab)],
        "tokenizer.ggml.token_type": [1] * used + [5] * (vocab - used),
        "tokenizer.ggml.merges": ["w 1"],
        "tokenizer.ggml.eos_token_id": 7,
    }


def write(
    file: Path,
    folder: Path,
    tokenizer: dict[str, Any],
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    factors: Sequence[float] = (),
    keys: dict[str, Any] | None = None,
    drop: Sequence[str] = (),
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A folder's model as a GGUF file: its matrices in a quantised type, if one is given, and in
    `kinds` where it has their names ("ffn_down"); with `factors` of rotary frequencies, other
    `keys`, without some keys or tensors, or with more."""
    config = json.loads((folder / "config.json").read_text())
    kind_of_model, layers = config["model_type"], config["num_hidden_layers"]
    arch = MIXTURES.get(kind_of_model, kind_of_model)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, arch)
    rope = config.get("rope_parameters") or config
    values = {
        f"{arch}.block_count": layers,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
    }
    values |= experts_keys(arch, config) if kind_of_model in MIXTURES else {}
    for key, value in (values | tokenizer | (keys or {})).items():
        if key not in drop:
            add(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], layers)
    with safetensors_io.open_folder(folder) as found:
        for name, array in stacked({name: np.array(found[name]) for name in found}).items():
            if arch == "llama" and ".q_proj" in name:
                array = paired(array, heads)
            if arch == "llama" and ".k_proj" in name:
                array = paired(array, kv_heads)
            for ours, part in parts_of(names, name, array):
                if ours not in drop:
                    own = (kinds or {}).get(ours.split(".")[-2], kind)
                    put(writer, ours, part, own if part.ndim > 1 and ".bias" not in ours else None)
    if len(factors):
        put(writer, "rope_freqs.weight", np.asarray(factors, np.float32))
    for name, array in (tensors or {}).items():
        put(writer, name, array)
    return finish(writer, file)


def experts_keys(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter says of a mixture of experts."""
    found = {
        f"{arch}.expert_count": config.get("num_experts") or config["num_local_experts"],
        f"{arch}.expert_used_count": config["num_experts_per_tok"],
        f"{arch}.expert_feed_forward_length": config.get("moe_intermediate_size")
        or config["intermediate_size"],
    }
    if arch == "gpt-oss":
        rope = config["rope_parameters"]
        found |= {
            f"{arch}.attention.sliding_window": config["sliding_window"],
            f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.factor": float(rope["factor"]),
            f"{arch}.rope.scaling.original_context_length": rope[
                "original_max_position_embeddings"
            ],
        }
    return found


def parts_of(names: Any, name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor by llama.cpp's name; gpt-oss's experts with outputs as rows, gate and up apart."""
    block, _, experts = name.partition(".mlp.experts.")
    if "_proj" in experts and not experts.endswith(".weight"):
        number, kind = block.rpartition(".")[2], experts.partition("_")[0]
        end = "bias" if experts.endswith("_bias") else "weight"
        rows = array if end == "bias" else array.swapaxes(1, 2)
        sides = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if kind == "gate" else {"down": rows}
        return [
            (f"blk.{number}.ffn_{side}_exps.{end}", np.ascontiguousarray(part))
            for side, part in sides.items()
        ]
    ours = names.get_name(name, (".weight", ".bias"))
    return [(ours if name.endswith((".weight", ".bias")) else f"{ours}.weight", array)]


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of Qwen's experts, one each, in one tensor for all."""
    found, experts = {}, dict[str, dict[int, np.ndarray]]()
    for name, array in tensors.items():
        stem, _, rest = name.partition(".experts.")
        number, _, kind = rest.partition(".")
        if number.isdigit():
            experts.setdefault(f"{stem}.experts.{kind}", {})[int(number)] = array
        else:
            found[name] = array
    return found | {name: np.stack([one[i] for i in sorted(one)]) for name, one in experts.items()}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key in the type that llama.cpp expects of its kind."""
    if key == "general.architecture":
        writer.kv_data[0][key].value = value
    else:
        gguf_export.add_key(gguf, writer, key, value)


def put(
    writer: gguf.GGUFWriter,
    name: str,
    array: np.ndarray,
    kind: gguf.GGMLQuantizationType | None = None,
) -> None:
    """A tensor as it is, or a vector in float32, or quantised."""
    if kind is not None or array.ndim == 1:
        array = safetensors_io.widen(array)
    if kind is not None:
        array = quantise(array, kind)
    raw = kind or TYPES[array.dtype.name]
    if raw == gguf.GGMLQuantizationType.BF16:
        array = array.view(np.uint8)
    writer.add_tensor(name, array, raw_dtype=raw)


def quantise(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """float32 numbers as a type's blocks."""
    if kind.name.endswith("_K"):
        return packed_weights.quantise_large(array, kind.name.lower())
    return gguf.quantize(array, kind)


def make_kept(spec: tiny_models.Spec, place: Path, kind: str) -> Path:
    """The folder of a GGUF file of a model like `spec`, wide enough for whole blocks. Half of its
    matrices are in `kind`, the others, as llama.cpp mixes them, in Q6_K and Q8_0; beside blocks of
    32 in Q8_0 alone."""
    types = gguf.GGMLQuantizationType
    size, more = (256, types.Q6_K) if kind.endswith("_k") else (64, types.Q8_0)
    wide = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 4}
    config = {**spec.config, **wide, "head_dim": size // 4}
    folder = tiny_models.make(replace(spec, config=config), place)
    vocab, kinds = spec.config["vocab_size"], {"ffn_down": more, "output": more}
    kinds["attn_v"] = types.Q8_0
    tokens = words(vocab, vocab - tiny_models.PADDING)
    file = write(place / "model.gguf", folder, tokens, kind=types[kind.upper()], kinds=kinds)
    return registry.find_model(str(file), {})


def without_tokenizer(file: Path, out: Path) -> Path:
    """The same model without a tokenizer, whose lists gguf's own reader takes seconds for."""
    header = gguf_header.read_header(file)
    writer = gguf.GGUFWriter(out, header.values["general.architecture"])
    for key, value in header.values.items():
        if not key.startswith(("tokenizer.", "general.")):
            writer.add_key_value(key, value, gguf.GGUFValueType(header.types[key][0]))
    for name, info in header.tensors.items():
        bits = np.fromfile(file, np.uint8, info.end - info.begin, offset=info.begin)
        raw = gguf.GGMLQuantizationType[info.dtype]
        array = bits.view(np.float32) if info.dtype == "F32" else bits
        rows = info.shape[:-1]
        writer.add_tensor(name, array.reshape(*rows, array.size // math.prod(rows)), raw_dtype=raw)
    return finish(writer, out)


def finish(writer: gguf.GGUFWriter, file: Path) -> Path:
    """Writes what a writer was told."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
