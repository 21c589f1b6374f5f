"""How long loading a model takes from the system's cache of its files, by what its weights are
kept in.

    python benchmarks/load.py --threads 2

Some layers of a model of sizes.py are written to the folder for temporary files, with random bf16
weights, and loaded once unmeasured. "s" is wall time, "CPU s" that of all threads, and "whole
model" is the wall time times the whole model's numbers over those of the layers that were loaded: a
machine need not hold all of it. A system that has to find free memory takes longer, so the best
wall time is beside the median. "copied" is loaded from the quantised copy that the unmeasured load
has left (tinsmith/models/weight_cache.py).

Ten seconds and 3 GiB, with 2 GB on the disk."""

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import sizes
from peers import alternate, parse, parser
from report import Report
from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models.registry import FAMILIES, inspect_model, load_weights, read_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

KINDS = (("stored", False), ("int8", False), ("int8", True), ("int4", False), ("int4", True))
COLUMNS = {"s": ".2f", "best s": ".2f", "CPU s": ".2f", "whole model, s": ".1f"}


def config_of(name: str, layers: int, vocab: int) -> dict[str, object]:
    """config.json of a model with so many layers and ids; 0: all."""
    given, shape = sizes.MODELS[name]
    found = {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
        **dict(zip(sizes.SHAPE, shape, strict=True)), **given,
    }  # fmt: skip
    found |= {"num_hidden_layers": layers} if layers else {}
    return found | ({"vocab_size": vocab} if vocab else {})


def slots_of(folder: Path, config: dict[str, object]) -> list[tuple[str, int, int, int, int]]:
    """The engine's tensors of a model, whose config.json is written there."""
    (folder / "config.json").write_text(json.dumps(config))
    shape, frequencies = read_config(folder)
    return _core.Model(shape, frequencies).slots


def write(folder: Path, args: argparse.Namespace) -> float:
    """Writes the folder; how many times more numbers the whole model has."""
    folder.mkdir()
    whole = sum(rows * cols for *_, rows, cols in slots_of(folder, config_of(args.model, 0, 0)))
    config = config_of(args.model, args.layers, args.vocab)
    slots = slots_of(folder, config)
    family = next(one for one in FAMILIES if [one.architecture] == config["architectures"])
    pool = np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32) * np.float32(0.02)
    pool = safetensors_io.narrow(pool, np.dtype(np.uint16))
    forms = {
        family.tensor(slot, layer, index): (pool.dtype, (rows, cols) if rows > 1 else (cols,))
        for slot, layer, index, rows, cols in slots
    }
    safetensors_io.write_each(
        folder / safetensors_io.SINGLE_FILE, forms, lambda name: np.resize(pool, forms[name][1])
    )
    words = {f"w{index}": index for index in range(int(config["vocab_size"]))}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return whole / sum(rows * cols for *_, rows, cols in slots)


def load(folder: Path, kind: str, copied: bool, threads: int) -> None:
    """Loads the model and forgets it."""
    load_weights(inspect_model(folder, weights=kind, weights_copy=copied), threads=threads)


def seconds(run: partial[None]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """One table."""
    options = parser(__doc__)
    options.set_defaults(clock="wall")
    options.add_argument("--model", default="Qwen3-8B", choices=sizes.MODELS)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--vocab", type=int, default=16384)
    options.add_argument("--weights", default="stored,int8,int4")
    args = parse(options)
    with (
        Report(args, __doc__) as report,
        tempfile.TemporaryDirectory() as place,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": place}),
    ):
        folder = Path(place) / "model"
        times = write(folder, args)
        sides = {
            f"{kind}{', copied' * copied}": partial(load, folder, kind, copied, args.threads)
            for kind, copied in KINDS
            if kind in args.weights.split(",")
        }
        found = alternate(sides, args.rounds, seconds)
        title = f"{args.model}, {args.vocab} ids: 1 / {times:.1f} of its weights"
        table = report.table(title, "layers", COLUMNS, plot="s")
        rows = {}
        for kind, runs in found.items():
            walls = [wall for wall, _ in runs]
            median, best = statistics.median(walls), min(walls)
            rows[kind] = (median, best, statistics.median(cpu for _, cpu in runs), median * times)
        table.add(str(args.layers), rows)


if __name__ == "__main__":
    main()
