"""Folders for the tests whose matrices are in FP8, or in bitsandbytes' NF4."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tinsmith.formats import nf4

from support import tiny_models

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32],
       "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
       "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
       "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
       "llm_int8_threshold": 6.0, "_load_in_4bit": True}  # fmt: skip


def fp8(tensors: Tensors, name: str, size: tuple[int, int] | None = (64, 32)) -> np.ndarray:
    """Puts a matrix in FP8; the numbers that it has then, in float32."""
    w = tensors.pop(name).float()
    rows, cols = size or w.shape
    tall, wide = -(-w.shape[0] // rows), -(-w.shape[1] // cols)
    whole = torch.zeros(tall * rows, wide * cols)
    whole[: w.shape[0], : w.shape[1]] = w
    scale = whole.reshape(tall, rows, wide, cols).abs().amax((1, 3)) / 448
    each = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    each = each[: w.shape[0], : w.shape[1]]
    codes = (w / each).to(torch.float8_e4m3fn)
    tensors[name] = codes
    tensors[f"{name}_scale_inv"] = scale if size else scale.reshape(())
    return (codes.float() * each).numpy()


def nf4_of(tensors: Tensors, name: str, nested: bool = True, span: int = 64) -> np.ndarray:
    """The same in NF4, its scales in 8 bits too if nested."""
    w = tensors.pop(name).float()
    flat = w.reshape(-1, span)
    absmax = flat.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": span, "dtype": "bfloat16", "shape": list(w.shape),
    }  # fmt: skip
    if nested:
        offset = float(absmax.mean())
        levels = torch.linspace(-1, 1, 256)
        outer = torch.stack([p.abs().max() for p in (absmax - offset).split(256)])
        each = outer.repeat_interleave(256)[: len(absmax)]
        codes = ((absmax - offset) / each)[:, None].sub(levels).abs().argmin(1)
        absmax = levels[codes] * each + offset
        tensors[f"{name}.absmax"] = codes.to(torch.uint8)
        tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"] = outer, levels
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        tensors[f"{name}.absmax"] = absmax
    table = torch.from_numpy(nf4.NF4.copy())
    codes = (flat / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
    pairs = codes.reshape(-1, 2)
    tensors[name] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    tensors[f"{name}.quant_map"] = table
    text = json.dumps(state).encode()
    tensors[f"{name}{nf4.STATE}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return (table[codes] * absmax[:, None]).reshape(w.shape).numpy()


METHODS = {"fp8": (fp8, FP8), "nf4": (nf4_of, NF4)}


def written(
    spec: tiny_models.Spec, path: Path, kind: str, change: Change = lambda tensors: None
) -> dict[str, np.ndarray]:
    """A random model in bf16 whose layers' matrices are quantised; their numbers."""
    tiny_models.make(replace(spec, dtype=torch.bfloat16, shard="1GB"), path)
    quantise, config = METHODS[kind]
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    numbers = {
        name: quantise(tensors, name) for name in list(tensors) if name.endswith("_proj.weight")
    }
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    content = json.loads((path / "config.json").read_text())
    content["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(content))
    return numbers


def make_kept(spec: tiny_models.Spec, path: Path, kind: str) -> Path:
    """The folder of a model like `spec`, wide enough for whole blocks."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    written(replace(spec, config={**spec.config, **wide}), path, kind)
    return path
