"""The memory that known models take, computed: the table of docs/sizes.md.

    python benchmarks/sizes.py

Nothing is measured and no model is needed: the engine plans from a configuration, as
`tinsmith info` does. Each column is a part, in GiB: base weights as they are kept (bf16, float32,
or by --weights int4), an adapter of rank 32 on all matrices with its gradients and moments, a
training step of 512 tokens that keeps every layer's activations and one that keeps the least, and
keys and values of 8,192 tokens. Two seconds."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import DELTA
from tinsmith import _core
from tinsmith.models import weight_dtypes
from tinsmith.models.registry import read_config

GIB = 2**30
TOKENS = 8192  # in the cache
EVERYTHING = 1 << 44  # bytes for a step: whatever it wants
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
QWEN3_5 = DELTA | {"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320}
SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
COLUMNS = (
    "model", "weights, bf16", "float32", "int4", "adapter", "step, all kept", "the least",
    "KV of 8,192", "in all, bf16", "int4",
)  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
OSS = {"architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "head_dim": 64}
TIED = {"tie_word_embeddings": True}
# By name: what its config.json says.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "SmolLM2-135M": (LLAMA | TIED | {"vocab_size": 49152}, (576, 1536, 30, 9, 3)),
    "Qwen2.5-0.5B": (QWEN2 | TIED | {"vocab_size": 151936}, (896, 4864, 24, 14, 2)),
    "Qwen3-0.6B": (QWEN3 | TIED, (1024, 3072, 28, 16, 8)),
    "Qwen3.5-0.8B": (
        QWEN3_5 | TIED | {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        (1024, 3584, 24, 8, 2),
    ),
    "Llama-3.2-1B": (LLAMA | TIED | {"vocab_size": 128256}, (2048, 8192, 16, 32, 8)),
    "Qwen3-1.7B": (QWEN3 | TIED, (2048, 6144, 28, 16, 8)),
    "Llama-3.2-3B": (LLAMA | TIED | {"vocab_size": 128256}, (3072, 8192, 28, 24, 8)),
    "Qwen3-4B": (QWEN3 | TIED, (2560, 9728, 36, 32, 8)),
    "Qwen2.5-7B": (QWEN2 | {"vocab_size": 152064}, (3584, 18944, 28, 28, 4)),
    "Llama-3.1-8B": (LLAMA | {"vocab_size": 128256}, (4096, 14336, 32, 32, 8)),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32, 8)),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40, 8)),
    "gpt-oss-20b": (OSS | {"num_local_experts": 32}, (2880, 2880, 24, 64, 8)),
    "Qwen3-30B-A3B": (MOE, (2048, 6144, 48, 32, 4)),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64, 8)),
    "gpt-oss-120b": (OSS | {"num_local_experts": 128}, (2880, 2880, 36, 64, 8)),
}


def planned(name: str, kind: str, step: int = EVERYTHING) -> dict[str, int]:
    """The engine's plan for a model, with the bytes that a step may take."""
    given, shape = MODELS[name]
    content = {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "max_position_embeddings": 32768, **dict(zip(SHAPE, shape, strict=True)), **given,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        config, inv_freq = read_config(Path(folder))
    wide = "bf16" if kind == "int4" else kind
    core = _core.Model(config, inv_freq, weights=wide)
    if kind == "int4":
        places = {one[:2]: {None} for one in core.slots if one[3] > 1}
        packed = weight_dtypes.choose(kind, "cpu", places)
        core = _core.Model(config, inv_freq, weights=wide, packed=packed)
    return core.plan(32, 512, step)


def least(name: str) -> int:
    """The bytes of a step of 512 tokens that keeps no more than it must."""
    low, high = 0, planned(name, "bf16")["step"]
    while high - low > 1 << 20:
        middle = (low + high) // 2
        found = planned(name, "bf16", middle)
        low, high = (low, middle) if found["attention_kept"] else (middle, high)
    return planned(name, "bf16", high)["step"]


def rows() -> list[str]:
    """The table in Markdown."""
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in MODELS:
        half, full, small = (planned(name, kind) for kind in ("bf16", "f32", "int4"))
        cache = TOKENS * half["kv_token"] + half["kv_window"] + half["kv_sequence"]
        smallest = least(name)
        parts = [half["weights"], full["weights"], small["weights"]]
        parts += [half["adapter"], half["step"], smallest, cache]
        rest = half["adapter"] + smallest + cache
        parts += [half["weights"] + rest, small["weights"] + rest]
        shown = [f"{part / GIB:.{1 if part > 10 * GIB else 2}f}" for part in parts]
        table.append(f"| {name} | {' | '.join(shown)} |")
    return table


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows()) + "\n")
