"""Copies of a model's folder that differ in their config.json, or in their tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

from tinsmith.formats import safetensors_io

from support.tiny_models import folder


def changed(tmp_path: Path, name: str, /, **config: Any) -> Path:
    """A copy of a model's folder with other values in config.json, in the part that has the sizes;
    None removes a key."""
    shutil.copytree(folder(name), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    part = content.get("text_config", content)
    part.update(config)
    for key in [key for key, value in config.items() if value is None]:
        del part[key]
    file.write_text(json.dumps(content))
    return tmp_path / "model"


def rewritten(tmp_path: Path, name: str, change: Any) -> Path:
    """A copy of a model's folder as one safetensors file, after `change` was called on its dict."""
    shutil.copytree(folder(name), tmp_path / "model")
    with safetensors_io.open_folder(folder(name)) as found:
        tensors = {key: found[key].copy() for key in found}
    for file in (tmp_path / "model").glob("model*"):
        file.unlink()
    change(tensors)
    safetensors_io.write(tmp_path / "model" / "model.safetensors", tensors)
    return tmp_path / "model"
