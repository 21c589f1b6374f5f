"""`python -m tinsmith.launch`: Python on a recipe, which finds the tokenizers of served models.

A server's model may have any name, "Qwen/Qwen3-8B" say, for a folder on this machine; the cookbook
looks for a name's tokenizer on the Hugging Face hub. Here it is told of the folder, through its own
register_tokenizer, before the recipe starts. Nothing else differs from `python -m MODULE …` and
`python SCRIPT …`.
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MODELS = "TINSMITH_MODELS"  # in the environment: JSON, a folder for each name


def register_tokenizers(models: Mapping[str, str | Path]) -> None:
    """Lets the cookbook's get_tokenizer read each name's tokenizer from the model's folder."""
    names = {name: str(folder) for name, folder in models.items() if not Path(name).is_dir()}
    if not names:
        return
    try:
        from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer
    except ImportError:
        return  # a script that needs the SDK only
    for name, folder in names.items():
        register_tokenizer(name, lambda folder=folder: get_tokenizer(folder))


def launch(command: Sequence[str]) -> None:
    """Runs what `python` would with these arguments: -m MODULE …, or SCRIPT …"""
    module = command[0] == "-m"
    sys.argv = list(command[1:] if module else command)
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        script = Path(sys.argv[0])
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(str(script.absolute()), run_name="__main__")


if __name__ == "__main__":
    register_tokenizers(json.loads(os.environ.get(MODELS, "{}")))
    launch(sys.argv[1:])
