"""Attacks a model's folder: safetensors files, config.json and the tokenizer's files, mutated.

A folder is refused with a sentence, which names a file, a tensor or a layer; or the model loads,
and then gives finite log-probabilities.
"""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models import registry

from tools.attack import common, tiny
from tools.attack.common import Attempt, One

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NAMES = (
    ".json",
    ".safetensors",
    "layer ",
    "embed",
    "norm",
    "head",
    "file has",
    "slot",
    "a model's",
)


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace() as folder:
        single = tiny.make(folder / "single", extra=True)
        shards = _sharded(tiny.make(folder / "shards"))
        sources = [
            {file.name: file.read_bytes() for file in one.iterdir()} for one in (single, shards)
        ]
        place = folder / "model"

        def one(attempt: Attempt) -> str:
            files = dict(attempt.rng.choice(sources))
            for _ in range(attempt.rng.choice((1, 1, 2))):
                _mutate(attempt, files)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for file, content in files.items():
                (place / file).write_bytes(content)
            return use(place)

        yield one


def use(folder: Path) -> str:
    """Loads a folder and runs the model."""
    try:
        registry.read_config(folder)
        loaded = tiny.load(folder)
    except Exception as error:
        return common.refusal(error, *NAMES)
    adapter = _core.Adapter(loaded.core, rank=1)
    length = min(5, loaded.context)
    try:
        logprobs, _ = adapter.forward_backward(*tiny.batch(length, loaded.vocab))
    except FloatingPointError as error:  # of numbers that are finite, and very large
        return f"{common.refusal(error)} when used"
    if not np.isfinite(logprobs).all():
        raise common.Failure(f"log-probabilities {logprobs}")
    return "taken"


def _sharded(folder: Path) -> Path:
    """The same model in two files with an index."""
    tensors = tiny.tensors()
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    for shard, half in zip(SHARDS, halves, strict=True):
        safetensors_io.write(folder / shard, half, {"format": "pt"})
    places = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / safetensors_io.INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    (folder / safetensors_io.SINGLE_FILE).unlink()
    return folder


def _mutate(attempt: Attempt, files: dict[str, bytes]) -> None:
    name = attempt.rng.choice(sorted(files))
    change = common.changed_json if name.endswith(".json") else changed_file
    files[name] = change(attempt.rng, files[name])
    attempt.note(name, files[name])


def changed_file(rng: random.Random, file: bytes) -> bytes:
    """A safetensors file with some of its header, its numbers or its bytes changed."""
    if rng.random() < 0.2 or len(file) < 8:
        return common.changed_bytes(rng, file)
    end = 8 + int.from_bytes(file[:8], "little")
    text, data = file[8:end], file[end:]
    if rng.random() < 0.6:
        text = common.changed_json(rng, text)
    if rng.random() < 0.5:
        data = _numbers(rng, data)
    return struct.pack("<Q", len(text)) + text + data


def _numbers(rng: random.Random, data: bytes) -> bytes:
    """float32 data with a few extreme numbers, cut or longer now and then."""
    array = np.frombuffer(data[: len(data) // 4 * 4], np.float32).copy()
    for _ in range(rng.choice((0, 1, 3)) if len(array) else 0):
        at, value = rng.randrange(len(array)), rng.choice(common.FLOATS)
        with np.errstate(over="ignore"):
            array[at] = value
    data = array.tobytes()
    return data[: len(data) - rng.choice((0, 0, 0, 1, 4))] + b"\0" * rng.choice((0, 0, 0, 1, 64))
