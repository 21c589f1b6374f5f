"""The quantisation methods of a safetensors folder: a row of METHODS each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinsmith.formats import config, fp8, mxfp4, nf4, safetensors_io
from tinsmith.formats.quantized_tensors import Folder

# By config.json's name: the function that finds the tensors stored this way.
METHODS: Mapping[str, Callable[[Folder, dict[str, Any]], None]] = {
    mxfp4.METHOD: mxfp4.find,
    fp8.METHOD: fp8.find,
    nf4.METHOD: nf4.find,
}


def open_folder(path: Path | str) -> safetensors_io.Tensors:
    """The tensors of a model's folder; its config.json says how some of them are quantised."""
    tensors = safetensors_io.open_folder(path)
    file = Path(path) / config.CONFIG_FILE
    said = config.read_json(file).get(config.QUANTIZATION) if file.is_file() else None
    if not isinstance(said, dict) or said.get(config.METHOD) not in METHODS:
        return tensors
    folder = Folder(tensors)
    METHODS[said[config.METHOD]](folder, said)
    return folder
