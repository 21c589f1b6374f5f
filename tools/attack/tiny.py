"""A very small model's folder for the attack programs, made without torch: a Qwen3 of one layer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models import registry

VOCAB, CONTEXT = 24, 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "model": {
        "type": "WordLevel",
        "unk_token": "t0",
        "vocab": {f"t{i}": i for i in range(VOCAB - 2)},
    },
    "added_tokens": [{"id": 2, "content": "<end>", "special": True}],
}
MORE: dict[str, dict[str, Any]] = {  # other files of a folder that are read
    "generation_config.json": {"eos_token_id": [2, 3], "temperature": 0.6},
    "tokenizer_config.json": {"eos_token": {"content": "<end>"}, "model_max_length": CONTEXT},
}


def tensors(config: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Random weights by their names in a checkpoint."""
    rng = np.random.default_rng(0)
    folder_config = config or CONFIG
    layers, width = folder_config["num_hidden_layers"], folder_config["hidden_size"]
    family = registry.FAMILIES[0]
    shape = {
        "layers": layers, "width": width, "heads": 2, "kv_heads": 1, "head_width": 8, "ffn": 24,
        "vocab": VOCAB, "context": CONTEXT, "window": 0, "qkv_bias": 0, "qk_norm": 1, "tied": 0,
        "norm_eps": 1e-6, "rope_scale": 1.0, "mixers": ("full_attention",) * layers,
        "feeds": ("mlp",) * layers, "rotary": 8, "q_gate": 0, "key_heads": 0, 
        "value_heads": 0, "key_width": 0, "value_width": 0,
    }  # fmt: skip
    core = _core.Model(shape, np.ones(4, np.float32), weights="f32", threads=1)
    return {
        family.tensor(slot, layer, index): (
            rng.standard_normal((rows, cols) if rows > 1 else cols).astype(np.float32) * 0.3
        )
        for slot, layer, index, rows, cols in core.slots
    }


def make(folder: Path, *, extra: bool = False) -> Path:
    """The model's folder; with `extra` also the files that it need not have."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_io.write(folder / safetensors_io.SINGLE_FILE, tensors(), {"format": "pt"})
    files = {"config.json": CONFIG, "tokenizer.json": TOKENIZER} | (MORE if extra else {})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def load(folder: Path) -> registry.LoadedModel:
    """The model in the engine, on one thread."""
    return registry.load_model(folder, threads=1)


def batch(length: int = 9, vocab: int = VOCAB) -> tuple[Any, ...]:
    """The arguments of a forward_backward of the core on one sequence."""
    ids = np.arange(length, dtype=np.int32) * 5 % vocab
    one = np.ones(1, np.int32)
    weight = np.ones(length, np.float32)
    return ids, one * length, ids[::-1].copy(), one, "cross_entropy", {"weights": weight}, {}
