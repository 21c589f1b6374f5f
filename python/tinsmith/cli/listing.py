"""`tinsmith list`: the models, servers and checkpoints of this machine, with sizes and ages.

All of it is read from folders, so it is the same while a server runs. Servers are those that use
the folder of checkpoints now; each is asked for its models.
"""

import argparse
import json
import sys
from collections.abc import Iterator

from tinsmith.checkpoints.store import Store
from tinsmith.cli.prune import items, line, send
from tinsmith.formats.gguf_model import PACKAGED, find_file
from tinsmith.system import home
from tinsmith.system.format import counted
from tinsmith.system.home import cache_folder, checkpoints_folder
from tinsmith.system.lock import addresses

CAPABILITIES = "/api/v1/get_server_capabilities"


def run(options: argparse.Namespace) -> None:
    """Prints the list."""
    found = [*_models()]
    print(f"{counted(len(found), 'model')} in {cache_folder()} and in packages")
    for text in found:
        print(text)
    store = Store(checkpoints_folder(options.checkpoints))
    for address in addresses(store.root):
        print(f"a server at {address}: {_served(address)}")
    saved, odd = items(store)
    print(f"{counted(len(saved), 'checkpoint')} in {store.root}")
    for item in saved:
        about = f"{item.meta.base_model}, rank {item.meta.rank}, step {item.meta.step}"
        if name := item.meta.run_metadata.get("name"):  # the client's name for the run
            about = f"{name}: {about}"
        where = store.folder(item.place.path)
        print(line(where, item.created, f"{item.place.path}  ({about})"))
    if odd:
        print(f"{len(odd)} that can't be read: {', '.join(odd)}", file=sys.stderr)


def _models() -> Iterator[str]:
    """A line for each model with a name here: in the cache, and in packages."""
    for folder in sorted(cache_folder().glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        found = home.cached_model(name)
        whole = found is not None and found.is_dir()
        made = (found if found and whole else folder).stat().st_mtime
        yield line(folder, made, name if whole else f"{name}, of which no main revision is here")
    for name in PACKAGED:
        try:
            file = find_file(name)
        except FileNotFoundError:  # the package is not installed
            continue
        if file is not None:
            yield line(file, file.stat().st_mtime, name)


def _served(address: str) -> str:
    """The models of a server, or why it does not answer."""
    try:
        told = json.loads(send(address, CAPABILITIES))
        return ", ".join(sorted(model["model_name"] for model in told["supported_models"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it does not say what it serves ({error})"
