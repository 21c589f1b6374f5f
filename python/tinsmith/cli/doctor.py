"""`tinsmith doctor`: what this installation can do, what is missing, and where its files are.

Nothing is started or changed; --ray has a task on each node of a cluster. A file with several names
(a copied checkpoint, a model in Hugging Face's cache) is counted once.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

KEPT = (
    "weights stay as they are stored: bf16, f32, MXFP4 and GGUF's {}, on the CPU {} too; other "
    "types are widened. --weights int8 takes 0.53 of bf16's bytes and errs by 0.5 % of a weight, "
    "int4 0.28 and 7 %"
)
PACKAGES = (
    "tinker",
    "tinker-cookbook",
    "starlette",
    "uvicorn",
    "tokenizers",
    "jinja2",
    "zstandard",
    "pyrage",
    "prometheus-client",
    "huggingface-hub",
    "gguf",
    "pillow",
)
# Packages that `server` does not include.
EXTRAS = {"tinker-cookbook": "cookbook", "gguf": "gguf", "pillow": "images"}
MEMINFO = Path("/proc/meminfo")


def show(options: argparse.Namespace) -> None:
    """Prints the report."""
    from tinsmith import _core
    from tinsmith.engine.worker import devices
    from tinsmith.formats.gguf_model import GGUF_TYPES
    from tinsmith.models.weight_dtypes import FOLDER_TYPES, ON_GPU
    from tinsmith.system.format import readable
    from tinsmith.system.install_hints import pip_install, require_ray

    print(f"tinsmith {version('tinsmith') or '(not installed)'}, Python {sys.version.split()[0]}")
    for name, reason in devices().items():
        if name != "cuda-emulated":  # for tests only
            means = _core.computes_with(name)
            with_them = f", with {means}" if means else ""
            print(f"device {reason or f'{name}: ready{with_them}'}")
    types = {name: kind for name, kind in GGUF_TYPES.items() if name != "MXFP4"} | FOLDER_TYPES
    parts = [[n for n in types if (types[n] in ON_GPU) == both] for both in (True, False)]
    print(KEPT.format(*(", ".join(part) for part in parts)))
    for line in card_lines("cuda"):
        print(line)
    for name in PACKAGES:
        missing = f"is not installed: {pip_install(EXTRAS.get(name, 'server'))}"
        print(f"{name} {version(name) or missing}")
    free, total = _core.memory("cpu")
    print(f"memory: {readable(free_memory(free))} of {readable(total)} are free")
    for line in _files():
        print(line)
    if options.ray is not None:
        require_ray()
        for line in import_module("tinsmith.cli.ray_report").lines(options.ray):
            print(line)


def card_lines(kind: str) -> list[str]:
    """A line for each GPU of this machine."""
    from tinsmith.engine.devices import cards
    from tinsmith.system.format import readable

    try:
        found = cards(kind)
    except RuntimeError:  # the device's own line says why
        return []
    return [
        f"  {one.device}: {one.title}, {readable(one.bytes)}, compute capability "
        f"{one.capability[0]}.{one.capability[1]}"
        for one in found
    ]


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def free_memory(most: int) -> int:
    """The free bytes of the machine's memory, at most what this process may use."""
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(most, 1024 * int(line.split()[1]))
    except (OSError, ValueError, IndexError):
        pass
    return most


# ---- files ----


def _files() -> Iterator[str]:
    """The folders, their contents, and the free space."""
    from tinsmith.checkpoints.quota import bytes_in
    from tinsmith.checkpoints.store import Store
    from tinsmith.models.weight_cache import copies
    from tinsmith.system.format import counted, readable
    from tinsmith.system.home import cache_folder, checkpoints_folder, copies_folder

    checkpoints, cache = checkpoints_folder(), cache_folder()
    store = Store(checkpoints)
    runs = [len(store.checkpoints(run)) for run in store.runs()]
    held = f"{readable(bytes_in(checkpoints))}, {counted(sum(runs), 'checkpoint')}"
    held += f" of {counted(len(runs), 'run')}"
    yield f"checkpoints in {checkpoints}: {held}; {_room(checkpoints)}"
    models = {path.name: bytes_in(path) for path in cache.glob("models--*")}
    held = f"{readable(sum(models.values()))}, {counted(len(models), 'model')}"
    yield f"models in {cache}: {held}; {_room(cache)}"
    for name, size in sorted(models.items(), key=lambda item: -item[1]):
        yield f"  {readable(size):>12}  {name.removeprefix('models--').replace('--', '/')}"
    folder, found = copies_folder(), copies()
    held = f"{readable(sum(found.values()))}, {counted(len(found), 'copy', 'copies')}"
    hint = " (`tinsmith prune --copies` deletes them)" if found else ""
    yield f"quantised weights in {folder}: {held}{hint}; {_room(folder)}"
    for path, size in found.items():
        yield f"  {readable(size):>12}  {path.name}"


def _room(folder: Path) -> str:
    """The free space of the disk that a folder is on, or will be."""
    from tinsmith.system.format import readable

    try:
        place = next(place for place in (folder, *folder.parents) if place.exists())
        disk = shutil.disk_usage(place)
    except (OSError, StopIteration) as error:
        return f"its disk can't be looked at: {error}"
    return f"{readable(disk.free)} of {readable(disk.total)} of the disk are free"
