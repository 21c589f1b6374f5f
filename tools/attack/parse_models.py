"""Attacks what reads a model's folder before its weights: config.json, the tokenizer's files, the
index and the headers of safetensors files, mutated, some thousand a second. models.py does the same
with the weights, and runs the model.

The folders are of all families. An input is refused with a sentence, and the report says by which
function; or the model is known, and now and then is loaded and run. The files are in memory.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models import registry

from tools.attack import common, memory, models, tiny
from tools.attack.common import Attempt, One

LOADED = 0.01  # of the folders that are taken
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# Of each folder its family and what its config.json has beside tiny.CONFIG's.
CONFIGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
               "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}),
    ("qwen2", {"layer_types": None, "tie_word_embeddings": True}),
    ("llama", {"rope_scaling": LLAMA3, "layer_types": None, "num_hidden_layers": 3}),
    ("mistral", {"sliding_window": 16, "layer_types": None, "torch_dtype": "bfloat16"}),
)  # fmt: skip


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace() as root:
        folders = [_make(root / str(n), *row) for n, row in enumerate(CONFIGS)]
        sources = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders]

        def one(attempt: Attempt) -> str:
            rng = attempt.rng
            number = rng.randrange(len(sources))
            files = dict(sources[number])
            for name in rng.choices(sorted(files), k=rng.choice((1, 1, 1, 2))):
                change = common.changed_json if name.endswith(".json") else models.changed_file
                files[name] = change(rng, files[name])
                attempt.note(CONFIGS[number][0], name, files[name])
            return _use(memory.put(files), whole=rng.random() < LOADED)

        with memory.reading():
            yield one


def _use(folder: Path, *, whole: bool) -> str:
    """Looks into a folder; `whole` also loads the model and runs it."""
    try:
        model = registry.inspect_model(folder)
    except Exception as error:
        common.refusal(error, *models.NAMES)
        return f"refused by {common.where(error)}"
    if not np.isfinite(model.inv_freq).all() or min(model.eos_ids, default=0) < 0:
        raise common.Failure(f"it is taken as {model}")
    return f"{models.use(folder)} as a whole" if whole else "taken"


def _make(folder: Path, family: str, more: dict[str, Any]) -> Path:
    """A model's folder: bf16 where its config says so, in two files where it has several layers."""
    row = next(row for row in registry.FAMILIES if row.name == family)
    config = tiny.CONFIG | {"architectures": [row.architecture], "model_type": family} | more
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir()
    files = {"config.json": config, "tokenizer.json": tiny.TOKENIZER} | tiny.MORE
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    sizes, inv_freq = registry.read_config(folder)
    core = _core.Model(sizes, inv_freq, weights="f32", threads=1)
    rng = np.random.default_rng(1)
    narrow = np.dtype(np.uint16 if config.get("torch_dtype") else np.float32)
    tensors = {
        row.tensor(slot, layer, index): safetensors_io.narrow(
            rng.standard_normal((rows, cols) if rows > 1 else cols).astype(np.float32), narrow
        )
        for slot, layer, index, rows, cols in core.slots
    }
    parts = 2 if config["num_hidden_layers"] > 1 else 1
    names = models.SHARDS if parts == 2 else (safetensors_io.SINGLE_FILE,)
    for part, name in enumerate(names):
        some = dict(list(tensors.items())[part::parts])
        safetensors_io.write(folder / name, some, {"format": "pt"})
    if parts == 2:
        places = {name: names[at % 2] for at, name in enumerate(tensors)}
        index = {"metadata": {}, "weight_map": places}
        (folder / safetensors_io.INDEX_FILE).write_text(json.dumps(index))
    registry.inspect_model(folder)
    return folder
