"""The models that suites are served: the demonstration's, and small ones with its tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tinsmith.demo import demo

CONTEXT = 16384
# Sizes of the random ones, as in the recipes' tests.
SIZES = {
    "vocab_size": 1217, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
HYBRID = {
    **SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "full_attention_interval": 4,
}  # fmt: skip
MIXTURE = {
    **HYBRID, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip


def changed(folder: Path, **settings: object) -> None:
    """Changes a folder's config.json."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def copied(folder: Path) -> None:
    """The demonstration's model, whose head is its embedding, for texts of any length."""
    shutil.copytree(demo.MODEL, folder)
    changed(folder, max_position_embeddings=CONTEXT)


def untied(folder: Path) -> None:
    """The demonstration's model with a head of its own, which is a copy of its embedding."""
    from safetensors.torch import load_file, save_file

    copied(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    changed(folder, tie_word_embeddings=False)


def random(family: str, *, tied: bool, sizes: dict[str, int]) -> Callable[[Path], None]:
    """A random float32 model of a family, whose answers hardly ever end."""

    def make(folder: Path) -> None:
        from support import tiny_models  # of the tests

        config = sizes | {"tie_word_embeddings": tied}
        seeing = family != "qwen3"  # as folders of Qwen3.5 are published
        tiny_models.make(tiny_models.Spec(family, config, seeing=seeing), folder)
        for file in demo.MODEL.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                shutil.copyfile(file, folder / file.name)

    return make


MODELS: dict[str, Callable[[Path], None]] = {
    "demo": copied,
    "untied": untied,
    "random": random("qwen3", tied=False, sizes=SIZES),
    "hybrid": random("qwen3_5", tied=False, sizes=HYBRID),
    "hybrid-tied": random("qwen3_5", tied=True, sizes=HYBRID),
    "mixture": random("qwen3_5_moe", tied=False, sizes=MIXTURE),
    "mixture-tied": random("qwen3_5_moe", tied=True, sizes=MIXTURE),
}


def folder(name: str, work: Path) -> Path:
    """A model's folder in `work`, made on first use."""
    made = work / "models" / name
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        MODELS[name](made)
    return made
