"""Attacks adapters on disk: checkpoints of ours and PEFT's folders, mutated, read into an adapter.

A folder is refused with a sentence, and then the adapter is as it was, to the bit; or it is read,
and then all numbers are finite and the adapter can be trained on. meta.json is another program's.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.lora import Average
from tinsmith.models import registry

from tools.attack import common, tiny
from tools.attack.common import Attempt, One
from tools.attack.models import changed_file

ADAM = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
VECTORS = ("weights", "gradients", "m", "v")


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace() as folder:
        loaded = tiny.load(tiny.make(folder / "model"))
        ours = saved(folder / "ours", loaded)
        sources = [ours, {key: ours[key] for key in ours if key.startswith("adapter_")}]
        place = folder / "adapter"

        def one(attempt: Attempt) -> str:
            files = dict(attempt.rng.choice(sources))
            for _ in range(attempt.rng.choice((1, 1, 2))):
                mutate(attempt, files)
            if attempt.rng.random() < 0.8:
                rehash(files)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for file, content in files.items():
                (place / file).write_bytes(content)
            return use(place, loaded, optimizer=attempt.rng.random() < 0.6)

        yield one


def saved(folder: Path, loaded: registry.LoadedModel) -> dict[str, bytes]:
    """The files of a checkpoint with an optimizer's state, gradients and an average."""
    adapter = _core.Adapter(loaded.core, rank=2, seed=1)
    adapter.forward_backward(*tiny.batch())
    adapter.optim_step(**ADAM)
    adapter.forward_backward(*tiny.batch())
    meta = checkpoint.Meta(
        base_model="tiny", rank=2, alpha=32.0, seed=1, attn=True, mlp=True, unembed=True,
        kind="weights", step=1, user_metadata={"a": "b"}, created="2026-01-01T00:00:00+00:00",
        ttl_seconds=60,
    )  # fmt: skip
    average = Average(adapter.snapshot(), 0.9)
    checkpoint.save(folder, loaded.family, adapter, meta, optimizer=True, average=average)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def use(folder: Path, loaded: registry.LoadedModel, *, optimizer: bool) -> str:
    """Reads a folder as a new adapter and into an old one."""
    fresh = _core.Adapter(loaded.core, rank=2, seed=3)
    before = _state(fresh)
    try:
        peft.load_into(folder, loaded.family, fresh, optimizer=optimizer)
    except Exception as error:
        word = common.refusal(error)
        if _state(fresh) != before:
            raise common.Failure("the adapter has changed") from error
        word += " into an old one, "
    else:
        word = "taken into an old one, "
    try:
        adapter = peft.load_adapter(folder, loaded, optimizer=optimizer)
        if optimizer:
            checkpoint.load_average(folder, adapter)
    except Exception as error:
        return word + common.refusal(error) + " as a new one"
    for what in VECTORS:
        if _core.first_bad(adapter.read(what)) >= 0:
            raise common.Failure(f"{what} is not finite")
    try:
        adapter.forward_backward(*tiny.batch())
        adapter.optim_step(**ADAM)
    except Exception as error:
        return word + common.refusal(error) + " when trained"
    return word + "taken as a new one"


def _state(adapter: _core.Adapter) -> list[Any]:
    return [*(adapter.read(what).tobytes() for what in VECTORS), adapter.step, adapter.pending]


def mutate(attempt: Attempt, files: dict[str, bytes]) -> None:
    name = attempt.rng.choice(sorted(set(files) - {checkpoint.META_FILE}))
    change = common.changed_json if name.endswith(".json") else changed_file
    files[name] = change(attempt.rng, files[name])
    attempt.note(name, files[name])


def rehash(files: dict[str, bytes]) -> None:
    """Makes meta.json, where it is one, agree with the files."""
    try:
        meta = json.loads(files[checkpoint.META_FILE])
        for name, said in meta["files"].items():
            said["bytes"] = len(files[name])
            said["sha256"] = hashlib.sha256(files[name]).hexdigest()
        files[checkpoint.META_FILE] = json.dumps(meta).encode()
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return
