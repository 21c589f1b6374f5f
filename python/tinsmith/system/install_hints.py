"""The command that installs an optional part of tinsmith, matching how tinsmith was installed.

pip records the source of a package (PEP 610, direct_url.json). A package from an index has no
record, and its name suffices. A checkout or a file must be named by its path again.
"""

import json
import os
import shlex
from importlib import metadata
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

# Nothing is reported to Ray's makers, and a process goes on for 11 days without a cluster's head.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000"}


def pip_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, such as "server"."""
    source, options = _source()
    if source == "tinsmith":
        return f"pip install 'tinsmith[{extra}]'"
    if options is None:
        return f"pip install {shlex.quote(f'tinsmith[{extra}] @ {source}')}"
    return f"pip install {options}{shlex.quote(f'{source}[{extra}]')}"


def require_ray() -> None:
    """Called before Ray is imported. Raises ImportError with the fix if it is not installed."""
    if find_spec("ray") is None:
        raise ImportError(f"--ray needs Ray: {pip_install('ray')}", name="ray")
    for name, value in RAY.items():
        os.environ.setdefault(name, value)


def _source() -> tuple[str, str | None]:
    """pip's source: a name, an address without options, or a folder with pip's options."""
    try:
        record = metadata.distribution("tinsmith").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ".", ""  # a checkout on the path, unknown to pip
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
