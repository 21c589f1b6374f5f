"""What transformers computes of tokens and images, in float64 or as it computes in bf16: the oracle
of models that see.

A sequence is a list of parts, each a list of tokens or an image of Pillow. Each image is taken by
itself, so two that follow one another are not one, as transformers takes them; its rows of the
tower are computed by transformers, as are the language model's layers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from tinsmith import _core
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.tiny_models import TextModel, as_it_computes, in_double, trained

Part = Sequence[int] | Image.Image
MERGE = 2  # patches of a token's side


@dataclass(frozen=True)
class Features:
    """An image's rows in the language model: instead of embeddings (N, D), and what is added after
    its first layers; `high` times `wide` tokens."""

    main: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    high: int
    wide: int


@functools.cache
def whole(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A folder's model with its tower."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(dtype).eval()
    return in_double(model) if dtype == torch.float64 else as_it_computes(model)


@functools.cache
def text_model(folder: Path, dtype: torch.dtype = torch.float64) -> TextModel:
    """Its language model."""
    return TextModel(whole(folder, dtype)).eval()


def pixels(folder: Path, image: Image.Image) -> tuple[np.ndarray, int, int]:
    """An image's patches (P, 1536) in float32, and how many are in a column and in a row."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found = processor(images=[image.convert("RGB")], return_tensors="pt")
    [[_, high, wide]] = found["image_grid_thw"].tolist()
    return found["pixel_values"].numpy(), high, wide


def features(folder: Path, image: Image.Image, dtype: torch.dtype = torch.float64) -> Features:
    """An image's rows."""
    patches, high, wide = pixels(folder, image)
    grid = torch.tensor([[1, high, wide]])
    with torch.no_grad():
        found = whole(folder, dtype).model.get_image_features(
            torch.from_numpy(patches).to(dtype), grid, return_dict=True
        )
    deep = getattr(found, "deepstack_features", None) or ()
    return Features(found.pooler_output[0], tuple(deep), high // MERGE, wide // MERGE)


def positions(parts: Sequence[int | tuple[int, int]]) -> np.ndarray:
    """The positions (T, 3) in time, height and width: of parts that are numbers of tokens, or
    images' tokens high and wide."""
    found, at = [], 0
    for part in parts:
        if isinstance(part, int):
            found += [(at + index,) * 3 for index in range(part)]
            at += part
        else:
            high, wide = part
            found += [(at, at + row, at + col) for row in range(high) for col in range(wide)]
            at += max(high, wide)
    return np.array(found, np.int64).reshape(-1, 3)


def inputs(
    folder: Path, parts: Sequence[Part], dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """What a language model takes for the parts, in transformers' names."""
    embed = whole(folder, dtype).get_input_embeddings()
    rows, seen, sizes, deep = [], [], [], []
    for part in parts:
        if isinstance(part, Image.Image):
            found = features(folder, part, dtype)
            rows.append(found.main)
            deep.append(found.deep)
            sizes.append((found.high, found.wide))
        else:
            rows.append(embed(torch.tensor(list(part), dtype=torch.int64)).detach())
            sizes.append(len(part))
        seen += [isinstance(part, Image.Image)] * len(rows[-1])
    given = {
        "inputs_embeds": torch.cat(rows)[None],
        "position_ids": torch.from_numpy(positions(sizes).T.copy())[:, None],
    }
    if any(deep):
        given["visual_pos_masks"] = torch.tensor(seen)[None]
        given["deepstack_visual_embeds"] = [torch.cat(one) for one in zip(*deep, strict=True)]
    return given


def log_probabilities(
    folder: Path,
    parts: Sequence[Part],
    model: PeftModel | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """log-softmax of every row's logits (T, V), images' rows too; of `model`, if it is given, which
    with_lora makes."""
    used = model.get_base_model() if model else text_model(folder, dtype)
    return torch.log_softmax(used(**inputs(folder, parts, dtype)).logits[0].double(), dim=-1)


def with_lora(
    folder: Path, adapter: _core.Adapter, dtype: torch.dtype = torch.float64
) -> PeftModel:
    """The language model with an adapter's matrices in PEFT's layers, whose gradients have the
    names of tiny_models.cut."""
    return trained(text_model(folder, dtype), adapter, dtype)
