"""Whether two processes compute the same bits: what each is made of, and a probe.

Facts are compared first, because they name the reason: device, instruction set, code, weights. The
probe then trains an adapter of random weights on 150 tokens; the checksums of its
log-probabilities and gradients must be equal. It finds what no fact tells, such as another choice
of algorithm by a GPU's library.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.devices import GPUS, cards, kind_of, stages_of
from tinsmith.models.registry import BaseModel, LoadedModel

Identity = Mapping[str, str]

PROBE_LENGTHS, PROBE_RANK = (100, 1, 49), 4
MIXED = ("device", "instruction set", "compute capability", "library", "probe")
PIECE, PIECES = 1 << 12, 256  # of a file, for its checksum


@cache
def code() -> str:
    """A checksum of the package: its C libraries and its Python."""
    root, found = Path(_core.__file__).parent, sha256()
    for path in sorted([*root.glob("*.so"), *root.rglob("*.py")]):
        found.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def identity(models: Mapping[str, BaseModel], device: str) -> Identity:
    """The facts of this process, with its models' files."""
    computes = _core.computes_with(stages_of(device)[0])
    facts = {"code": code(), "device": kind_of(device), "number of parts": str(_core.PARTS)}
    if kind_of(device) in GPUS:
        own = {
            card.capability for card in cards(kind_of(device)) if card.device in stages_of(device)
        }
        facts["compute capability"] = ", ".join("{}.{}".format(*one) for one in sorted(own))
        facts["library"] = computes.partition(" (")[0]  # without its path
    else:
        facts["instruction set"] = computes
    for name, model in models.items():
        facts[f"weights of {name}"] = weights(model)
        facts[f"types of {name}"] = types(model)
    return facts


def weights(model: BaseModel) -> str:
    """A checksum of a model's files: their sizes, and PIECES pieces of each. All bytes would take
    as long to read as the model; the probe computes with all of them."""
    files = sorted(model.path.glob("*.safetensors")) if model.path.is_dir() else [model.path]
    found = sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for at in range(0, max(size, 1), max(size // PIECES, PIECE)):
                file.seek(at)
                found.update(file.read(PIECE))
    return found.hexdigest()[:16]


def types(model: BaseModel) -> str:
    """In which types a model's weights are held, and its products computed."""
    packed = sorted(set(model.packed.values()))
    return ", ".join([*dict.fromkeys([model.kind, *packed]), f"on {kind_of(model.device)}"])


def differences(own: Identity, other: Identity, *, mixed: bool = False) -> list[str]:
    """Sentences' ends for the fields in which two identities differ. With `mixed`, only those that
    can't be accepted."""
    return [
        f"its {field} is {other.get(field, 'unknown')}, and the owner's is {value}"
        for field, value in own.items()
        if other.get(field) != value and not (mixed and field in MIXED)
    ]


def step_tokens(model: LoadedModel) -> int:
    """The rows of a training step. They follow the device's memory; replicas use the owner's."""
    return model.core.plan(PROBE_RANK)["step_tokens"]


def probe_bytes(model: LoadedModel) -> int:
    """The memory that a probe takes."""
    plan = model.core.plan(PROBE_RANK, max(PROBE_LENGTHS))
    return plan["adapter"] + plan["step"]


def probe(model: LoadedModel, step_tokens: int) -> Identity:
    """The fingerprint of a training call on a base model."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(np.asarray(PROBE_LENGTHS, np.int32), model.context)
    tokens, targets = generator.integers(0, model.vocab, (2, lengths.sum()), np.int32)
    adapter = LoraSpec(PROBE_RANK, 0).adapter(model.core, step_tokens)
    numbers = generator.uniform(-0.05, 0.05, adapter.size)
    adapter.write("weights", numbers.astype(np.float32))
    ones = np.ones(len(lengths), np.int32)
    logprobs, _ = adapter.forward_backward(tokens, lengths, targets, ones, "cross_entropy", {}, {})
    sums = [zlib.crc32(array.tobytes()) for array in (logprobs, adapter.read("gradients"))]
    return {"probe": "{:08x} {:08x}".format(*sums)}
