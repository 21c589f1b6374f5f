"""A vision tower beside transformers': seconds for one image, patches in, features out.

    python benchmarks/vision.py --tower 4b --dtype bf16 --rounds 3 --sides 256 512 1024

Random weights in the shape of Qwen3.5's towers (0.8b, 4b, 9b), whose blocks Qwen3-VL shares.
transformers' side is its own vision model with its fastest attention (sdpa), without a gradient.
Both sides get decoded pixels of the processor's size. What counts is an image that comes for the
first time: later its features are kept, which takes no time. The roofline is the flops of all
products and of attention.

A minute for the 0.8b tower up to 512²; for 4b at 1024² five minutes and 4 GiB."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peers import interleave, parse, parser
from report import Report
from tinsmith import _core
from tinsmith.models.families import QWEN_TOWER

PATCH, MERGE, FRAMES, GRID, COLOURS = 16, 2, 2, 48, 3
TOWERS = {
    "0.8b": {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072,
             "out_hidden_size": 1024},
    "4b": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
           "out_hidden_size": 2560},
    "9b": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
           "out_hidden_size": 4096},
}  # fmt: skip


def flops(shape: dict[str, int], tokens: int) -> float:
    """Of one image of so many tokens."""
    width, out, patches = shape["hidden_size"], shape["out_hidden_size"], tokens * MERGE**2
    block = width * (4 * width + 2 * shape["intermediate_size"]) + 2 * patches * width
    embed = COLOURS * FRAMES * PATCH**2 * width
    merged = MERGE**2 * width
    return 2.0 * (patches * (embed + shape["depth"] * block) + tokens * merged * (merged + out))


def hf_tower(shape: dict[str, int], dtype: torch.dtype) -> Any:
    """transformers' vision model with random weights."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import (
        Qwen3VLVisionConfig,
        Qwen3VLVisionModel,
    )

    config = Qwen3VLVisionConfig(
        **shape, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=FRAMES,
        num_position_embeddings=GRID**2, deepstack_visual_indexes=[],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLVisionModel._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()


def our_tower(tower: Any, shape: dict[str, int], args: argparse.Namespace) -> _core.Model:
    """A model of one small layer with these weights in its tower."""
    width = shape["out_hidden_size"]
    small = {
        "layers": 1, "width": width, "heads": 1, "kv_heads": 1, "head_width": 8, "rotary": 8,
        "ffn": 8, "vocab": 8, "context": 64, "norm_eps": 1e-6, "rope_scale": 1.0, "tied": 1,
        "mixers": ["full_attention"], "feeds": ["mlp"], "rope_axis": [0, 1, 2, 0],
    }  # fmt: skip
    bf16 = args.dtype == "bf16"
    kind, device = ("bf16", "cpu-bf16") if bf16 else ("f32", "cpu")
    frequencies = np.ones(4, np.float32)
    core = _core.Model(small, frequencies, weights=kind, device=device, threads=args.threads)
    core.tower_open(
        {
            "depth": shape["depth"], "width": shape["hidden_size"], "heads": shape["num_heads"],
            "ffn": shape["intermediate_size"], "grid": GRID, "out": width, "patch": PATCH,
            "merge": MERGE, "frames": FRAMES, "deep": [], "rescale": 1 / 255,
            "mean": [0.5] * 3, "std": [0.5] * 3,
        },
        kind,
    )  # fmt: skip
    weights = tower.state_dict()
    for slot, index, rows, cols in core.tower_slots:
        found = weights[QWEN_TOWER.tensor(slot, index)].reshape(rows, cols)
        if rows == 1:
            found = found.reshape(-1).float()
        array = found.view(torch.uint16).numpy() if found.dtype == torch.bfloat16 else found.numpy()
        core.tower_load(slot, index, array)
    core.tower_seal()
    return core


def our_side(core: _core.Model, pixels: np.ndarray) -> Callable[[], None]:
    """A call that computes a new image each time."""
    high, wide = (size // (PATCH * MERGE) for size in pixels.shape[:2])

    def run() -> None:
        core.tower_features(_core.Image(pixels.reshape(-1), high, wide))

    return run


def hf_side(tower: Any, pixels: np.ndarray) -> Callable[[], None]:
    """The same with transformers, from the processor's patches."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1, "longest_edge": 1 << 30}, patch_size=PATCH, merge_size=MERGE,
        temporal_patch_size=FRAMES, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    made = processor(images=[pixels], return_tensors="pt")
    patches, grid = made["pixel_values"].to(tower.dtype), made["image_grid_thw"]

    def run() -> None:
        with torch.inference_mode():
            tower(patches, grid_thw=grid)

    return run


def main() -> None:
    """One case for each size of image."""
    options = parser(__doc__, rounds=3, dtype="f32")
    options.add_argument("--tower", choices=TOWERS, default="0.8b")
    options.add_argument("--sides", type=int, nargs="+", default=[256, 512], help="of a square")
    args = parse(options)
    if any(side < 1 or side % (PATCH * MERGE) for side in args.sides):
        options.error(f"--sides are multiples of {PATCH * MERGE}")
    shape = TOWERS[args.tower]
    tower = hf_tower(shape, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    core = our_tower(tower, shape, args)
    rng = np.random.default_rng(0)
    with Report(args, __doc__) as report:
        table = report.table(f"The {args.tower} tower, {args.dtype}", "image", {args.unit: ".3f"})
        for side in args.sides:
            pixels = rng.integers(0, 256, (side, side, COLOURS), np.uint8)
            sides = {"tinsmith": our_side(core, pixels), "transformers": hf_side(tower, pixels)}
            seconds = interleave(sides, args.rounds, clock=args.clock)
            work = flops(shape, (side // (PATCH * MERGE)) ** 2)
            table.add(f"{side}²", seconds, report.floor(flops=work, dtype=args.dtype))


if __name__ == "__main__":
    main()
