"""`tinsmith info`: a model's memory, part by part, before anything is loaded."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tinsmith import _core
from tinsmith.cli import doctor, pull

if TYPE_CHECKING:
    from tinsmith.models.vision import Vision

SIDE = 1024  # pixels of the image that is an example


def show(options: argparse.Namespace) -> None:
    """Prints the plan."""
    from tinsmith.engine.devices import choose_device, kind_of
    from tinsmith.formats.gguf_model import GGUF_TYPES, source_of
    from tinsmith.formats.tensor_files import open_tensors
    from tinsmith.models.registry import left_aside, measure_model, measure_vision, read_family
    from tinsmith.system.format import readable

    folder = pull.find(options.model, fetch=options.pull)
    device = choose_device(options.device, stages=options.stages)
    core, counts = measure_model(
        folder,
        device=device,
        dtype=options.dtype,
        weights=options.weights,
        weights_copy=options.weights_copy,
    )
    sizes, config = _plan(core, options), core.config
    print(
        f"{source_of(folder)}: {config['layers']} layers, width {config['width']}, {_types(counts)}"
    )
    with open_tensors(folder) as tensors:
        stored = tensors.widened()
    for name, size in stored.items():
        if GGUF_TYPES.get(name) not in counts:
            print(f"{readable(size)} of the files are {name}, which is widened in memory")
    if aside := left_aside(folder):
        tensors = ", ".join(f"{count} tensors of {prefix}*" for prefix, count in aside.items())
        print(f"left aside, because text does not need them: {tensors}")
    if read_family(folder).tower:
        seen = measure_vision(folder, core.device, options.weights, options.dtype)
        print(_tower(core, *seen))
    layers = _kept(sizes, config["layers"])
    labels = {
        "held": _base(sizes),
        "adapter": f"one adapter of rank {options.rank}, with gradients and optimizer",
        "step": f"a training step of {sizes['step_tokens']} tokens, which {layers}",
        "sums": "sums of a call's gradients, part by part, until it ends",
        "own": "what the device's ops need for themselves",
        "cache": _cache(sizes),
    }
    for key, label in labels.items():
        print(f"{readable(sizes[key]):>12}  {label}")
    print(_sum(sizes, device, options))
    if options.stages > 1:
        for line in _stages(core, options):
            print(line)
    for line in doctor.card_lines(kind_of(device)):
        print(line)
    print(
        "Sampling fills the KV cache and keeps it for prompts that begin alike (prefix cache): "
        "by default a quarter of what the weights leave; of serve's --memory, if that is given."
    )
    most = readable(sizes["step_most"])
    if sizes["datum_most"] > sizes["step_most"]:
        most += f", and that of one long datum {readable(sizes['datum_most'])}"
    bound = ", the model's context" if sizes["longest"] == int(config["context"]) else ""
    longest = f"the longest datum that can be trained has {sizes['longest']} tokens{bound}"
    print(
        f"A training step may take {most}; "
        f"{longest if sizes['longest'] else 'no datum can be trained in that'}."
    )


def _tower(core: _core.Model, vision: "Vision | None", no_images: str) -> str:
    """The line about the vision tower, or why images are refused."""
    from tinsmith.system.format import counted, readable

    if vision is None:
        return f"no images: {no_images}"
    core.tower_open(vision.config, weights=vision.kind)
    high, wide = vision.processor.tokens(SIDE, SIDE)
    return (
        f"vision tower: {counted(vision.sizes.depth, 'block')}, {vision.parameters:,} parameters, "
        f"{readable(core.tower_bytes)} when the first image comes; an image of {SIDE} × {SIDE} is "
        f"{counted(high * wide, 'token')}"
    )


def _limits(core: _core.Model, options: argparse.Namespace) -> tuple[int, int]:
    """What a training step may take, and that of one long datum; 0: the engine's own."""
    from tinsmith.engine.bases import step_share

    memory, step = options.memory, options.step_memory
    if not memory or step:
        return step, 0
    adapter = core.plan(options.rank)["adapter"]
    step = max(1, step_share(core, memory, adapter))  # 0 would mean no limit
    return step, max(step, memory - core.held_bytes - adapter)


def _plan(core: _core.Model, options: argparse.Namespace) -> dict[str, int]:
    """The engine's plan; with --memory, that of a server with this limit."""
    memory = options.memory
    sizes = core.plan(options.rank, options.tokens, *_limits(core, options))
    if memory:
        tokens = core.cache_tokens(memory, max(0, memory - core.held_bytes))
        sizes |= {"cache_tokens": tokens, "cache": core.cache_bytes(tokens)}
    return sizes


def _stages(core: _core.Model, options: argparse.Namespace) -> Iterator[str]:
    """A line for each stage: its layers, and what they need of its device, or of its part of
    --memory."""
    from tinsmith.system.format import readable

    rows = core.stage_plan(options.rank, options.tokens, *_limits(core, options))
    for number, row in enumerate(rows, 1):
        parts = {
            "weights": row["weights"],
            "adapter": row["adapter"],
            "step": row["step"] + row["own"],
        }
        if not options.memory:
            parts["cache"] = row["cache"]
        total = sum(parts.values())
        room = options.memory // len(rows) if options.memory else row["free"]
        little = "" if total <= room else ", which is too little"
        said = ", ".join(f"{what} {readable(size)}" for what, size in parts.items())
        yield (
            f"stage {number} of {len(rows)}, {row['device']}, layers {row['first']} to "
            f"{row['end'] - 1}: {said}; {readable(total)} in all, of {readable(room)}{little}"
        )


def _sum(sizes: Mapping[str, int], device: str, options: argparse.Namespace) -> str:
    """The line with the sum, and with the available memory."""
    from tinsmith.system.format import readable

    total = sum(sizes[key] for key in ("held", "adapter", "step", "sums", "own"))
    if options.memory:
        little = "" if total <= options.memory else ", which is too little"
        return (
            f"{readable(total):>12}  without the cache, which makes room for training; of the "
            f"{readable(options.memory)} that a server may use{little}"
        )
    total, free = total + sizes["cache"], sizes["free"]
    if device.startswith("cpu"):
        free = doctor.free_memory(free)
    little = "" if total <= free else ", which is too little"
    return (
        f"{readable(total):>12}  in all; of the {readable(sizes['all'])} of device "
        f"{device} {readable(free)} are free now{little}"
    )


def _base(sizes: Mapping[str, int]) -> str:
    """The part of the weights that is in memory."""
    from tinsmith.system.format import readable

    rows = sizes["weights"] - sizes["held"]
    if not rows:
        return "base weights"
    return f"base weights; of the embedding, {readable(rows)} in their copy, only rows in use"


def _types(counts: Mapping[str, int]) -> str:
    """The types of the stored matrices; with the share of each, if there are several."""
    if len(counts) == 1:
        return next(iter(counts))
    whole = sum(counts.values())
    parts = (f"{count / whole:.0%} of its matrices in {kind}" for kind, count in counts.items())
    return ", ".join(parts)


def _kept(sizes: Mapping[str, int], layers: int) -> str:
    """The part of its layers' activations that a step keeps, as the end of a sentence."""
    if not sizes["attention_kept"]:
        return "is more than it may take"
    if sizes["kept"] == layers:
        return f"keeps all of its {layers} layers"
    return (
        f"keeps {sizes['kept']} of its {layers} layers, attention's part of "
        f"{sizes['attention_kept']}, and makes the rest again"
    )


def _cache(sizes: Mapping[str, int]) -> str:
    """The size of a sampler's cache."""
    from tinsmith.system.format import readable

    pages = f"a KV cache of {sizes['cache_tokens']} tokens"
    if sizes["kv_token"]:
        pages += f", {readable(sizes['kv_token'])} each"
    if sizes["kv_window"]:
        pages += f", and {readable(sizes['kv_window'])} at most for the window of a sequence"
    if not sizes["states"]:
        return pages
    one = readable(sizes["kv_sequence"])
    return f"{pages}, and the states of {sizes['states']} sequences, {one} each"
