"""How to get an optional part of tinsmith, in the words that work for how it was installed.

pip records where it took a package from (PEP 610, direct_url.json). A package of an index has no
such record, and its name alone is right. A checkout or a file must be named again by its place.
"""

import json
import shlex
from importlib import metadata
from urllib.parse import unquote, urlsplit


def pip_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, such as "server"."""
    source, options = _source()
    if source == "tinsmith":
        return f"pip install 'tinsmith[{extra}]'"
    if options is None:
        return f"pip install {shlex.quote(f'tinsmith[{extra}] @ {source}')}"
    return f"pip install {options}{shlex.quote(f'{source}[{extra}]')}"


def _source() -> tuple[str, str | None]:
    """What pip was given: a name, an address without options, or a folder with pip's options."""
    try:
        record = metadata.distribution("tinsmith").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ".", ""  # a checkout on the path, which pip knows nothing of
    try:
        found = json.loads(record or "{}")
        url = found.get("url", "")
        if "dir_info" in found and urlsplit(url).scheme == "file":
            return unquote(urlsplit(url).path), "-e " if found["dir_info"].get("editable") else ""
        if "vcs_info" in found:
            at = found["vcs_info"].get("commit_id")
            return f"{found['vcs_info']['vcs']}+{url}" + (f"@{at}" if at else ""), None
    except (ValueError, KeyError, AttributeError, TypeError):
        return "tinsmith", None
    return url or "tinsmith", None
