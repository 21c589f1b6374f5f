"""The tensors of a model's folder, by Hugging Face's names, whatever the format of its files."""

from pathlib import Path

from tinsmith.formats import gguf_model, quantization, weights


def open_tensors(folder: Path | str) -> weights.Tensors:
    """The tensors of a model's folder: of its safetensors files, plain or quantised, or of the GGUF
    file that it was made of."""
    found = gguf_model.open_source(folder)
    return quantization.open_folder(folder) if found is None else found
