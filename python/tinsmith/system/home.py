"""Default paths: checkpoints in the user's data folder, as in XDG, and models in Hugging Face's
cache.

tinsmith-checkpoints in the working directory was the default before, and is still used if it
exists: a recipe resumed there looks for its own checkpoints. Each use prints how to move it.
https://specifications.freedesktop.org/basedir-spec
"""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("tinsmith")

FORMER = "tinsmith-checkpoints"
MAIN = "main"  # the default branch of a model
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# The suffix of Tinker's names of a model at a given context.
_CONTEXT = re.compile(r"(.+):peft:([0-9]{1,9})", re.DOTALL)


def data_folder() -> Path:
    """$XDG_DATA_HOME/tinsmith. A relative path is ignored, as the specification requires."""
    return _base("XDG_DATA_HOME", ".local/share") / "tinsmith"


def cache_folder() -> Path:
    """Hugging Face's cache of models."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    if given := os.environ.get("HF_HOME"):
        return Path(given).expanduser() / "hub"
    return _base("XDG_CACHE_HOME", ".cache") / "huggingface" / "hub"


def is_hub_name(name: str) -> bool:
    """Whether a text looks like a hub name, organization/model, with an optional @revision."""
    model, at, revision = name.partition("@")
    return (
        _HUB_NAME.fullmatch(model) is not None and ".." not in name and bool(revision) == bool(at)
    )


def split_context(name: str) -> tuple[str, int | None]:
    """A model's name without Tinker's suffix, and the suffix's tokens: "Qwen/Qwen3-8B:peft:32768"
    is ("Qwen/Qwen3-8B", 32768)."""
    found = _CONTEXT.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


def spelled(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that equals `name`, or else the only one that differs only in case."""
    found = [one for one in known if one.casefold() == name.casefold()]
    return name if name in found else found[0] if len(found) == 1 else None


def model_folder(model: str) -> Path:
    """The cache's folder of a model."""
    return cache_folder() / "--".join(["models", *model.split("/")])


def cached_model(name: str) -> Path | None:
    """The folder of a model in the cache, by its name or NAME@REVISION: a branch, a tag or a
    commit. It may be incomplete."""
    model, at, revision = name.partition("@")
    revision = revision if at else MAIN
    parts = [*model.split("/"), *revision.split("/")]
    if model.count("/") > 1 or any(part in ("", ".", "..") or "\0" in part for part in parts):
        return None
    folder = model_folder(model)
    named = folder / "refs" / revision
    commit = named.read_text().strip() if named.is_file() else revision
    return folder / "snapshots" / commit


def gguf_folder() -> Path:
    """The cache of folders made from GGUF files: $XDG_CACHE_HOME/tinsmith/gguf."""
    return _base("XDG_CACHE_HOME", ".cache") / "tinsmith" / "gguf"


def copies_folder() -> Path:
    """The cache of quantised copies of weights: $XDG_CACHE_HOME/tinsmith/weights."""
    return _base("XDG_CACHE_HOME", ".cache") / "tinsmith" / "weights"


def checkpoints_folder(given: Path | str | None = None) -> Path:
    """The folder of checkpoints: the given one, the former default if it is in the working
    directory, or the default."""
    if given is not None:
        return Path(given)
    folder = data_folder() / "checkpoints"
    former = Path(FORMER).absolute()
    if not former.is_dir() or former == folder:
        return folder
    log.warning(
        "%s is used, which was the default; the default is now %s: move it there, or name it with "
        "--checkpoints",
        former,
        folder,
    )
    return former


def _base(variable: str, otherwise: str) -> Path:
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / otherwise
    except RuntimeError:
        raise FileNotFoundError(
            f"this user has no home folder: set {variable} to a folder"
        ) from None
