"""The tensors of a model's folder, by Hugging Face's names, for every file format."""

from pathlib import Path

from tinsmith.formats import gguf_model, quantization, safetensors_io


def open_tensors(folder: Path | str) -> safetensors_io.Tensors:
    """The tensors of a model's folder: from its safetensors files, plain or quantised, or from the
    GGUF file that it was made from."""
    found = gguf_model.open_source(folder)
    return quantization.open_folder(folder) if found is None else found
