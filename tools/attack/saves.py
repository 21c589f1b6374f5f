"""Checkpoints for the attack programs: every number in one says which version it is."""

from pathlib import Path
from typing import Any

import numpy as np
from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.meta import Meta, as_meta, content_of
from tinsmith.formats.folder_version import Version
from tinsmith.models.registry import FAMILIES

from tools.attack.common import Failure

FAMILY = FAMILIES[0]
SHAPE: dict[str, Any] = {
    "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_width": 8, "ffn": 24, "vocab": 24,
    "context": 64, "window": 0, "qkv_bias": 0, "qk_norm": 1, "tied": 0, "norm_eps": 1e-6,
    "rope_scale": 1.0, "rotary": 8, "q_gate": 0, "key_heads": 0, "value_heads": 0,
    "key_width": 0, "value_width": 0,
    "mixers": ("full_attention",), "feeds": ("mlp",),
}  # fmt: skip


def _model() -> _core.Model:
    """A model of zeros: nothing is computed with it."""
    model = _core.Model(SHAPE, np.ones(4, np.float32), weights="f32", threads=1)
    for slot, layer, index, rows, cols in model.slots:
        shape = (rows, cols) if rows > 1 else cols
        model.load(slot, layer, np.zeros(shape, np.float32), index)
    model.seal()
    return model


MODEL = _model()


def adapter_of(version: int) -> _core.Adapter:
    """An adapter whose numbers are all the version's."""
    adapter = _core.Adapter(MODEL, rank=2, seed=1)
    for what in ("weights", "m", "v"):
        adapter.write(what, np.full(adapter.size, version, np.float32))
    adapter.step = version
    return adapter


def meta_of(version: int, **changes: Any) -> Meta:
    """Its Meta."""
    fields: dict[str, Any] = {
        "base_model": "tiny", "rank": 2, "alpha": 32.0, "seed": 1, "attn": True, "mlp": True,
        "unembed": True, "kind": "weights", "step": version,
        "user_metadata": {"version": str(version)}, "created": "2026-01-01T00:00:00+00:00",
        "ttl_seconds": None,
    }  # fmt: skip
    return Meta(**fields | changes)


def save(folder: Path, version: int, *, overwrite: bool = True, **changes: Any) -> None:
    """Saves a version."""
    adapter, meta = adapter_of(version), meta_of(version, **changes)
    checkpoint.save(folder, FAMILY, adapter, meta, optimizer=True, overwrite=overwrite)


def version_of(version: Version) -> int:
    """The one version that all of a folder is of."""
    meta = as_meta(content_of(version))
    adapter = adapter_of(0)
    checkpoint.load_version(version, FAMILY, adapter, optimizer=True)
    found = {float(number) for what in ("weights", "m", "v") for number in adapter.read(what)}
    found |= {float(adapter.step), float(meta.step), float(meta.user_metadata["version"])}
    if len(found) != 1:
        raise Failure(f"a mixture of the versions {sorted(found)}")
    return meta.step
