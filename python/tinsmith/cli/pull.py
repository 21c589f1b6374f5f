"""`tinsmith pull`: fetches a model from the Hugging Face hub into its cache, by huggingface_hub.

That library handles the token, the progress bars, and resuming after a broken connection. It
fetches the safetensors in the model's index, its configuration, tokenizer, chat template and image
processor; no code, and no other weights. config.json comes last, and only then the name points to
the new files. So a model found by its name is complete, and an interrupted update leaves the old
model in place.
"""

import contextlib
import errno
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinsmith.formats import image_processor, safetensors_io
from tinsmith.formats.config import CONFIG_FILE, read_json
from tinsmith.formats.tokenizer import TEMPLATES_FOLDER
from tinsmith.models.registry import find_model
from tinsmith.system import home
from tinsmith.system.install_hints import pip_install

TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    image_processor.FILE,
    image_processor.WHOLE_FILE,
)
OTHER_WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")
HTTP_CLIENTS = ("httpcore", "httpx", "requests", "urllib3")  # of huggingface_hub's versions


def find(name: str, *, fetch: bool) -> Path:
    """The folder of a model; with `fetch`, a missing one is fetched."""
    try:
        return find_model(name, {})
    except FileNotFoundError:
        if not fetch or not home.is_hub_name(name):
            raise
    return pull(name)


def pull(name: str) -> Path:
    """Fetches the missing files of NAME or NAME@REVISION; returns the folder. ValueError and
    OSError with a sentence if that is not possible."""
    model, _, revision = name.partition("@")
    if not home.is_hub_name(name):
        raise ValueError(
            f"{name!r:.200} is no model's name on the hub: say ORGANIZATION/MODEL, or "
            "ORGANIZATION/MODEL@REVISION"
        )
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ImportError(
            f"fetching a model needs huggingface_hub: {pip_install('server')}"
        ) from None
    with _told(model, revision):
        info = hub.HfApi().model_info(model, revision=revision or None, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        place = {"revision": info.sha, "cache_dir": home.cache_folder()}

        def fetch(file: str) -> Path:
            return Path(hub.hf_hub_download(model, file, **place))

        templates = [name for name in sizes if name.startswith(f"{TEMPLATES_FOLDER}/")]
        texts = [*(sizes.keys() & set(TEXT_FILES)), *templates]
        files = [*_weight_files(model, sizes, fetch), *texts]
        _check_room(model, {file: sizes[file] for file in files}, str(info.sha))
        hub.snapshot_download(model, allow_patterns=files, **place)
        folder = fetch(CONFIG_FILE).parent
    if revision != folder.name:
        _name(model, revision or home.MAIN, folder.name)
    return folder


def _weight_files(model: str, sizes: Mapping[str, int], fetch: Callable[[str], Path]) -> list[str]:
    """The names of a model's tensor files, and of their index."""
    if CONFIG_FILE not in sizes:
        raise ValueError(f"{model} has no {CONFIG_FILE}, so it is no model that tinsmith can read")
    if safetensors_io.SINGLE_FILE in sizes:
        return [safetensors_io.SINGLE_FILE]
    if safetensors_io.INDEX_FILE not in sizes:
        found = sorted(file for file in sizes if file.endswith(OTHER_WEIGHTS))
        shown = f"has {', '.join(found[:3])}" if found else "has no weights at all"
        raise ValueError(
            f"{model} {shown}, and no {safetensors_io.SINGLE_FILE} or {safetensors_io.INDEX_FILE}: "
            "tinsmith reads safetensors; most models have another repository with them"
        )
    index = read_json(fetch(safetensors_io.INDEX_FILE))
    named = index.get("weight_map")
    shards = sorted({str(file) for file in named.values()}) if isinstance(named, dict) else []
    missing = [file for file in shards if file not in sizes]
    if missing or not shards:
        raise ValueError(f"{model}: its {safetensors_io.INDEX_FILE} names {missing or 'no files'}")
    return [safetensors_io.INDEX_FILE, *shards]


def _check_room(model: str, sizes: Mapping[str, int], commit: str) -> None:
    """Raises OSError if the disk has no space for the missing files."""
    from tinsmith.system.format import readable

    there = home.model_folder(model) / "snapshots" / commit
    needed = sum(size for file, size in sizes.items() if not (there / file).exists())
    cache = home.cache_folder()
    place = next(place for place in (cache, *cache.parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"{model} needs {readable(needed)} more, and the disk of {cache} has {readable(free)} "
            "free; make room, or set HF_HUB_CACHE to a folder on another disk"
        )


def _name(model: str, revision: str, commit: str) -> None:
    """Points a branch or a tag to a commit, as in the cache's layout."""
    named = home.model_folder(model) / "refs" / revision
    named.parent.mkdir(parents=True, exist_ok=True)
    new = named.with_name(f"{named.name}~{secrets.token_hex(4)}")
    new.write_text(commit)
    new.replace(named)


# ---- errors ----


@contextlib.contextmanager
def _told(model: str, revision: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub and of its HTTP client into a sentence."""
    try:
        yield
    except Exception as error:
        told = _sentence(error, model, revision)
        if told is None:
            raise
        raise OSError(told) from None


def _sentence(error: BaseException, model: str, revision: str) -> str | None:
    """An error as a sentence for the user; None if its own message suffices."""
    from huggingface_hub import constants, errors

    again = "files that are complete are kept"
    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model} is gated: accept its terms at {hub}/{model}, and set HF_TOKEN to a token of "
            "that account, or log in with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no model {model} at {hub}; or it is private, and needs a token in HF_TOKEN, "
            "or from `hf auth login`"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so {model} can't be fetched; unset it"
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _sentence(error.__cause__, model, revision)
    if isinstance(error, errors.HfHubHTTPError):
        status: Any = getattr(error.response, "status_code", "an error")
        return f"{hub} answered with {status} when {model} was asked for; {again}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {home.cache_folder()} is full; make room, and pull again; {again}"
    client = type(error).__module__.partition(".")[0] in HTTP_CLIENTS
    if client or isinstance(error, ConnectionError | TimeoutError):
        return f"{hub} can't be reached, or the connection broke ({_first(error)}); {again}"
    return None


def _first(error: BaseException) -> str:
    """The first line of an error's message, without its number."""
    line = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    return re.sub(r"\[Errno -?\d+\] ", "", line)
