"""Small random models that see, of every family with a vision tower: folders as transformers writes
them, with an image processor.

Heads of the tower are 24, 48 and 72 wide, its MLPs no multiple of 32, its grids of positions of odd
and even sides; its biases and norms are not zeros and ones. An image has 4 to 64 tokens.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tinsmith import _core
from tinsmith.formats.image_processor import ImageProcessor
from tinsmith.models import registry

from support.tiny_models import DEVICE, Spec, make

# By the width of a head.
TOWERS: dict[int, dict[str, Any]] = {
    24: {"depth": 3, "hidden_size": 48, "num_heads": 2, "intermediate_size": 60,
         "num_position_embeddings": 49, "patch_size": 16},
    48: {"depth": 2, "hidden_size": 144, "num_heads": 3, "intermediate_size": 100,
         "num_position_embeddings": 36, "patch_size": 16},
    72: {"depth": 4, "hidden_size": 144, "num_heads": 2, "intermediate_size": 132,
         "num_position_embeddings": 25, "patch_size": 16},
}  # fmt: skip
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 1024,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
QWEN3_VL = TEXT | {"head_dim": 32, "rope_parameters": MROPE | {"mrope_section": [6, 5, 5]}}
QWEN3_5 = TEXT | {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25},
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

SEEING = {
    "qwen3_vl": Spec(
        "qwen3_vl", QWEN3_VL | UNTIED, seeing=True,
        vision=TOWERS[24] | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl-tied": Spec(
        "qwen3_vl", QWEN3_VL | TIED, torch.bfloat16, "300KB", seeing=True,
        vision=TOWERS[72] | {"deepstack_visual_indexes": [0, 1, 3]},
    ),
    "qwen3_vl_moe": Spec(
        "qwen3_vl_moe", QWEN3_VL | EXPERTS | UNTIED, seeing=True,
        vision=TOWERS[48] | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3_vl_moe-turned": Spec(
        "qwen3_vl_moe", QWEN3_VL | EXPERTS | TIED, torch.bfloat16, seeing=True, turned=True,
        vision=TOWERS[24] | {"deepstack_visual_indexes": []},
    ),
    "qwen3_5": Spec("qwen3_5", QWEN3_5 | UNTIED, seeing=True, vision=TOWERS[72]),
    "qwen3_5-tied": Spec(
        "qwen3_5", QWEN3_5 | TIED, torch.bfloat16, "300KB", seeing=True, vision=TOWERS[24]
    ),
    "qwen3_5_moe": Spec("qwen3_5_moe", QWEN3_5 | SHARED | UNTIED, seeing=True, vision=TOWERS[48]),
}  # fmt: skip

_ROOT = tempfile.TemporaryDirectory(prefix="tinsmith-seeing-")


@functools.cache
def folder(name: str) -> Path:
    """The folder of one of SEEING, made once."""
    return make(SEEING[name], Path(_ROOT.name) / name)


def loaded(name: str) -> registry.LoadedModel:
    """One of SEEING in the engine, with its tower, on the device that the test runs on."""
    return loaded_on(name, DEVICE.get())


@functools.cache
def loaded_on(name: str, device: str) -> registry.LoadedModel:
    model = registry.load_model(folder(name), device=device, threads=1)
    registry.load_tower(model)
    return model


def picture(seed: int, width: int, height: int) -> Image.Image:
    """An image of noise, on which every mistake shows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def held(processor: ImageProcessor, image: Image.Image) -> _core.Image:
    """An image in the engine, where it stays while the result lives."""
    high, wide = processor.tokens(image.height, image.width)
    side = processor.patch * processor.merge
    resized = image.resize((wide * side, high * side), Image.Resampling.BICUBIC)
    return _core.Image(np.array(resized).reshape(-1), high, wide)


def ids_of(parts: Sequence[Sequence[int] | _core.Image]) -> np.ndarray:
    """The ids of tokens and of images' rows."""
    found = [
        part.first - np.arange(part.rows) if isinstance(part, _core.Image) else np.asarray(part)
        for part in parts
    ]
    return np.concatenate(found).astype(np.int32)
