"""The base models that a server holds: read on first use, evicted least recently used first.

Using a model that is not loaded raises NotLoaded. The caller then gives `want` a function to call
when the model can be used. Models are read (loading.py) tensor by tensor, in turns, between other
work. If a model can't be loaded, only the requests that wait for it get the error; later requests
retry.

Memory is counted as the engine allocates it: weights, KV caches, adapters (ledger.py), and for each
model that is trained one training step, which its runs share. In a quantised copy, which is
memory-mapped, an embedding that is only looked up does not count. The limit is given, or nine
tenths of the memory of the machine, the container or the card. A model is evicted only when nothing
on it would be lost: no adapter in training, no snapshot that is not on disk, no sample in flight.
An evicted model is read again on its next use, to the same bits. If nothing can be evicted, the run
that was idle for longest is moved elsewhere (offload.py). A failed allocation also evicts, where
the limit did not foresee it. All of this belongs to the worker's thread.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.engine.devices import GPUS, card_bytes, kind_of
from tinsmith.engine.ledger import Hold, Ledger
from tinsmith.engine.loading import Loading, TowerLoading, bytes_of
from tinsmith.models.registry import BaseModel, LoadedModel, inspect_model
from tinsmith.ops.tensors import to_integer
from tinsmith.system.format import readable

T = TypeVar("T")

# What is read: a base model by its folder, or its vision tower.
Key: TypeAlias = tuple[Path, bool]

SHARE = 0.9  # of all memory, if no limit is given
VECTOR_BYTES = 4  # a parameter
# Vectors of a call: one that is computed, and one for each level of the parts' tree.
SUMS_MOST = _core.PARTS.bit_length()
HOLDS_TOLD = 8  # of what holds memory, in a refusal


def inspect_models(
    paths: Mapping[str, Path],
    *,
    device: str = "cpu",
    dtype: str | None = None,
    weights: str = "stored",
    weights_copy: bool = True,
) -> dict[str, BaseModel]:
    """Checks the files of base models and returns a description of each by its name. Raises an
    error if a file is invalid."""
    known: dict[Path, BaseModel] = {}
    for path in paths.values():
        key = Path(path).resolve()
        if key not in known:
            known[key] = inspect_model(
                key, device=device, dtype=dtype, weights=weights, weights_copy=weights_copy
            )
    return {name: known[Path(path).resolve()] for name, path in paths.items()}


class NotLoaded(Exception):
    """A base model in use is not loaded, or the vision tower of a loaded one; Bases.want() has it
    read."""

    def __init__(self, model: BaseModel, tower: bool = False):
        part = "the vision tower of " if tower else ""
        super().__init__(f"{part}the base model in {model.path} is not loaded")
        self.model, self.tower = model, tower

    @property
    def key(self) -> Key:
        """What is to be read."""
        return self.model.path, self.tower


class Bases:
    """See the file's header. `ledger` and `passing` have what else takes memory: the second lists
    what changes from call to call, a few holds for each model. `release` drops what can be restored
    on a base (an idle cache, adapters that are on disk); `drop` drops the first hold that yields;
    `move` moves an idle run elsewhere. All return whether they freed anything. `wake` is called in
    another thread when `busy` becomes true."""

    def __init__(
        self,
        models: Mapping[str, BaseModel],
        *,
        device: str,
        threads: int,
        memory: int | None,
        ledger: Ledger,
        passing: Callable[[], list[Hold]],
        release: Callable[[Path], bool],
        drop: Callable[[], bool] = lambda: False,
        move: Callable[[], bool] = lambda: False,
        wake: Callable[[], None] = lambda: None,
    ):
        self.memory = memory_of(device) if memory is None else memory
        self._models = {model.path: model for model in models.values()}
        self._names = {model.path: name for name, model in models.items()}
        self._threads = threads
        self._ledger = ledger
        self._passing = passing
        self._release = release
        self._drop = drop
        self._move = move
        self._steps: dict[Path, int] = {}  # bytes that are reserved for a step of a trained model
        self._wake = wake
        self._needs: dict[tuple[Path, int], tuple[int, int]] = {}  # by a model and a rank
        self._loaded: dict[Path, LoadedModel] = {}  # the least recently used first
        self._seeing = set[Path]()  # those of them whose vision tower is loaded
        self._wanted: dict[Key, list[Callable[[], None]]] = {}  # called when that is read
        self._loading: dict[Key, Loading] = {}  # what is wanted and being read
        self._full = False  # the next one waits until one of those is done
        self._failed: dict[Key, Exception] = {}  # while the functions in _wanted are called
        self.evictions = 0
        self.stuck = ""  # why the last idle run could not be moved elsewhere

    def use(self, model: BaseModel, *, tower: bool = False) -> LoadedModel:
        """The loaded model, with its vision tower if that is asked for; it becomes the most
        recently used one. Raises NotLoaded if it is not loaded. Inside a call that want() makes,
        raises the reason why it can't be loaded."""
        for key in ((model.path, False), (model.path, True))[: 1 + tower]:
            if key in self._failed:
                raise self._failed[key]
        loaded = self._loaded.pop(model.path, None)
        if loaded is None:
            raise NotLoaded(model)
        self._loaded[model.path] = loaded
        if tower and model.path not in self._seeing:
            raise NotLoaded(model, tower=True)
        return loaded

    def want(self, missing: NotLoaded, again: Callable[[], None]) -> None:
        """Queues what is missing to be read. `again` is called when it is read, or when that
        fails."""
        self._wanted.setdefault(missing.key, []).append(again)

    @property
    def busy(self) -> bool:
        """Whether load() would do anything."""
        return self._next() is not None

    def load(self) -> None:
        """Begins to read a wanted model, or takes one tensor of the model that is next in turn.
        After the last tensor, calls the functions that wait for the model. Only they get an error.
        """
        key = self._next()
        assert key is not None
        try:
            loaded = self._go_on(key)
        except Exception as error:
            self._failed[key] = error
            self._blind(key)
        else:
            if loaded is None:
                self._wanted[key] = self._wanted.pop(key)  # to the end of the queue
                return
            path, tower = key
            if tower:
                self._seeing.add(path)
            else:
                self._loaded[path] = loaded
        self._finish(key)

    def waits_for(self, missing: NotLoaded) -> str:
        """Why what is wanted can't be used yet. Any thread may ask."""
        what, loading = self._what(missing.key), self._loading.get(missing.key)
        if loading is None:
            return f"{what} is read after another one"
        return f"{what} is being read: {loading.share:.0%}"

    def name(self, path: Path) -> str:
        """The name of the model in a folder."""
        return self._names[path]

    @property
    def weight_bytes(self) -> int:
        """Of the models that are loaded or being read, with the kept features of images."""
        held = sum(self._bytes(path) + self.features(path) for path in self._loaded)
        return held + sum(item.bytes for item in self._loading.values())

    def _bytes(self, path: Path) -> int:
        """The bytes of a loaded model, and of its vision tower once it is read."""
        loaded = self._loaded[path]
        return loaded.weight_bytes + (loaded.core.tower_bytes if path in self._seeing else 0)

    def features(self, path: Path) -> int:
        """The bytes of the features of images that a loaded model keeps."""
        return self._loaded[path].core.features_bytes

    def drop_features(self, path: Path) -> bool:
        """Drops them, until a step wants them again; returns whether there were any."""
        if path not in self._loaded or not self.features(path):
            return False
        self._loaded[path].core.features_drop()
        return True

    def close(self, error: Exception) -> None:
        """Ends all reading. All waiting functions are called, and get the error."""
        for key in list(self._wanted):
            self._failed[key] = error
            self._finish(key)

    def make(
        self,
        need: int,
        what: str,
        function: Callable[[], T],
        keep: Path | None = None,
        least: int | None = None,
    ) -> T:
        """Evicts until `need` bytes are free, then calls a function that allocates. If the function
        can use less (`least`), evicts as much as it can.

        `keep` is a model that must not be evicted. An idle run is moved for the least only. Raises
        MemoryError if that can't be had; nothing was evicted then, unless a disk was full.
        """
        least = need if least is None else least
        self.stuck = ""
        if self.memory is not None:
            if self._stays(keep) + least > self.memory:
                raise MemoryError(self._no_room(least, what, self.memory - self._stays(keep)))
            self._free(lambda: least, keep, move=True)
            self._free(lambda: need, keep, move=False)
            if self._used() + least > self.memory:
                raise MemoryError(self._no_room(least, what, self.memory - self._used()))
        return self._try(what, function, keep)

    def make_run(
        self, base: LoadedModel, rank: int, vectors: int, what: str, function: Callable[[], T]
    ) -> T:
        """Calls a function that makes a run's vectors of so many bytes. The model's first run also
        reserves a step: as much as is free within its share, at least what the shortest one takes,
        with a margin for batches that are not one long datum."""
        path = base.path
        held = self._steps.get(path, 0) if self._ledger.trains(path) else 0
        least, most = self._step_needs(base, rank)
        least, most = max(0, least - held), max(0, least - held if held else most)
        made = self.make(vectors + most, what, function, keep=path, least=vectors + least)
        self._steps[path] = held + max(least, self.room(vectors + most) - vectors)
        return made

    def _step_needs(self, base: LoadedModel, rank: int) -> tuple[int, int]:
        """The bytes to reserve for a model's step and a call's gradients, (least, most): the least
        is that of a call of one part."""
        key = base.path, rank
        if key not in self._needs:
            core, planned = base.core, base.core.plan(rank)
            rows = planned["step_tokens"]
            share = step_share(core, self.memory, planned["adapter"])
            one = planned["scratch"] + planned["sums"] // SUMS_MOST
            least = one + core.plan(rank, rows, 1)["step"] * 9 // 8
            most = planned["scratch"] + planned["sums"] + core.plan(rank, rows, share)["step"]
            self._needs[key] = least, max(least, most)
        return self._needs[key]

    def step_limits(
        self, path: Path, adapter: _core.Adapter, longest: int, sums: int
    ) -> tuple[int, int]:
        """The bytes that an adapter's step may take beside `sums`, those of its call's gradients,
        as (usual, for a longest datum that needs more). The first is what is reserved, or what is
        free within a step's share. The second is all that is free; other memory is freed for it.
        (0, 0): unlimited."""
        if self.memory is None:
            return 0, 0
        least = adapter.step_least(longest)
        most = self.memory - self._stays(path) + self._step_staying(path, path) - sums
        if least <= most:
            self._free(lambda: least + sums - self._step_bytes(path), path, move=True)
        free = self.memory - self._used() + self._step_bytes(path) - sums
        share = step_share(adapter.model, self.memory, adapter.bytes)
        reserved = self._reserved(path) - sums
        return (
            max(1, reserved, min(share, free)),
            max(1, reserved, free if least <= most else most),
        )

    def trim(self, path: Path, *, above: int = 0) -> bool:
        """Frees the memory of a model's training steps until the next one, if it takes more than
        `above` bytes and no training call is in flight; returns whether it did. What is reserved
        for it stays so."""
        loaded = self._loaded.get(path)
        if loaded is None or loaded.core.training_bytes <= above or self._calls(path):
            return False
        loaded.core.trim()
        return True

    def trim_surplus(self, path: Path) -> bool:
        """The same, if it takes more than what is reserved."""
        return self.trim(path, above=self._reserved(path))

    def room(self, need: int) -> int:
        """The free bytes, at most `need`."""
        return need if self.memory is None else min(need, self.memory - self._used())

    @property
    def step_bytes(self) -> int:
        """Of the models' training steps: what is reserved, or taken."""
        return sum(map(self._step_bytes, self._loaded))

    def cache_tokens(self, loaded: LoadedModel) -> int:
        """How many tokens a new KV cache will hold."""
        if self.memory is None:
            return loaded.core.cache_tokens()
        return loaded.core.cache_tokens(self.memory, max(0, self.memory - self._used()))

    def _try(self, what: str, function: Callable[[], T], keep: Path | None) -> T:
        """Calls a function that allocates; after a MemoryError, evicts and retries while it can."""
        while True:
            try:
                return function()
            except MemoryError as error:
                trimmed = any(self.trim(path) for path in self._loaded)
                if not (trimmed or self._evict(keep) or self._move_run()):
                    raise MemoryError(f"{what}: {error}; {self._holders()}") from None

    def _next(self) -> Key | None:
        """What load() continues with."""
        for key in self._wanted:
            loading = self._loading.get(key)
            if not self._full if loading is None else loading.ready:
                return key
        return None

    def _what(self, key: Key) -> str:
        path, tower = key
        return f"{'the vision tower of ' * tower}the base model {self._names[path]}"

    def _go_on(self, key: Key) -> LoadedModel | None:
        """One step of loading a model or its tower; returns the model after the last step."""
        path, tower = key
        model, what = self._models[path], self._what(key)
        keep = path if tower else None
        if key in self._loading:
            return self._try(what, self._loading[key].take, keep)
        if tower and path not in self._loaded:
            raise NotLoaded(model)  # it was evicted meanwhile: whoever waits asks for it again

        def begin() -> Loading:
            if tower:
                return TowerLoading(self._loaded[path], wake=self._wake)
            return Loading(model, threads=self._threads, wake=self._wake)

        try:
            size = self._open_tower(path) if tower else bytes_of(model)
            self._loading[key] = self.make(size, what, begin, keep=keep)
        except MemoryError:
            if not self._loading:
                raise
            self._blind(key)
            self._full = True
        return None

    def _open_tower(self, path: Path) -> int:
        """Opens the tower of a loaded model, without memory yet; the bytes that it will take."""
        loaded = self._loaded[path]
        if loaded.vision is None:
            raise ValueError(loaded.no_images)
        loaded.core.tower_open(loaded.vision.config, loaded.vision.kind, self.memory or 0)
        return loaded.core.tower_bytes

    def _blind(self, key: Key) -> None:
        """Drops a tower that could not be read, so that the next image asks for it again."""
        path, tower = key
        if tower and path in self._loaded:
            self._loaded[path].core.tower_close()

    def _finish(self, key: Key) -> None:
        """Calls the functions that wait for what was read or can't be."""
        loading = self._loading.pop(key, None)
        if loading is not None:
            loading.close()
        for again in self._wanted.pop(key):
            again()
        self._failed.pop(key, None)
        self._full = False

    def _reserved(self, path: Path) -> int:
        """The bytes that are reserved for a step of a model, beside its calls in flight."""
        if not self._ledger.trains(path):
            return 0
        return self._steps.get(path, 0) - sum(hold.bytes for hold in self._calls(path))

    def _calls(self, path: Path) -> list[Hold]:
        """The training calls in flight on a model."""
        return [hold for hold in self._passing() if hold.trains and hold.base == path]

    def _step_bytes(self, path: Path) -> int:
        """The bytes of a model's step; one of long datums may have taken more than is reserved."""
        loaded = self._loaded.get(path)
        return max(self._reserved(path), loaded.core.training_bytes if loaded else 0)

    def _step_staying(self, path: Path, keep: Path | None) -> int:
        """The bytes of it that nothing frees."""
        if self._calls(path):
            return self._step_bytes(path)
        stays = path == keep or self._ledger.trains_for_good(path)
        return self._reserved(path) if stays else 0

    def _used(self) -> int:
        held = self.weight_bytes + self.step_bytes + self._ledger.bytes
        return held + sum(hold.bytes for hold in self._passing())

    def _stays(self, keep: Path | None) -> int:
        """The bytes that nothing frees."""
        passing = [hold for hold in self._passing() if hold.stays]
        pinned = {keep, *(hold.base for hold in passing)}
        stay = sum(item.bytes for item in self._loading.values())
        stay += self._ledger.staying + sum(hold.bytes for hold in passing)
        for path in self._loaded:
            if path in pinned or self._ledger.pinned_for_good(path):
                stay += self._bytes(path)
            stay += self._step_staying(path, keep)
        return stay

    def _free(self, need: Callable[[], int], keep: Path | None, *, move: bool) -> None:
        """Evicts until `need` bytes are free, as far as it can; with `move`, idle runs too."""
        assert self.memory is not None
        while self._used() + need() > self.memory:
            if not (self._evict(keep) or (move and self._move_run())):
                return

    def _move_run(self) -> bool:
        """Moves the run that was idle for longest elsewhere; returns whether it could."""
        moved = self._move()
        self.evictions += moved
        return moved

    def _evict(self, keep: Path | None) -> bool:
        """Drops the first hold that yields. Otherwise evicts the least recently used model that may
        be evicted, or else drops what can be restored on others. Returns whether anything was
        dropped."""
        if self._drop():
            self.evictions += 1
            return True
        pinned = {keep, *(hold.base for hold in self._passing() if hold.pins)}
        pinned |= {path for path, tower in self._loading if tower}
        idle = [
            path for path in self._loaded if path not in pinned and not self._ledger.pinned(path)
        ]
        if idle:
            self._release(idle[0])
            del self._loaded[idle[0]]
            self._seeing.discard(idle[0])
        dropped = bool(idle) or any(self._release(path) for path in self._loaded)
        self.evictions += dropped
        return dropped

    def _no_room(self, need: int, what: str, free: int) -> str:
        assert self.memory is not None
        left = readable(max(free, 0))
        return (
            f"{what} needs {readable(need)}, and of the {readable(self.memory)} that the server "
            f"may use {left} are free; {self._holders()}{self.stuck and '; '}{self.stuck}; end a "
            "client that is not needed, or start the server with more --memory"
        )

    def _holders(self) -> str:
        parts = [
            f"the base model {self._names[path]} ({readable(self._bytes(path))})"
            for path in self._loaded
        ]
        parts += [
            f"{self._what(key)} ({readable(item.bytes)}), which is being read"
            for key, item in self._loading.items()
        ]
        holds = [
            Hold(path, self._step_bytes(path), f"a training step on {self._names[path]}", True)
            for path in self._loaded
        ]
        holds += self._passing() + self._ledger.largest(HOLDS_TOLD)
        holds = sorted((hold for hold in holds if hold.bytes), key=lambda hold: -hold.bytes)
        parts += [f"{hold.what} ({readable(hold.bytes)})" for hold in holds[:HOLDS_TOLD]]
        return f"memory is held by {', '.join(parts)}" if parts else "nothing else holds memory"


def step_share(core: _core.Model, memory: int | None, adapter: int) -> int:
    """The bytes that a training step may take on a model, given the memory limit and an adapter's
    bytes; 0: unlimited."""
    return 0 if memory is None else core.step_bytes(max(1, memory - adapter))


def gradient_sums(adapter: _core.Adapter, lengths: NDArray[np.int32]) -> int:
    """The bytes that a training call with datums of these lengths takes for gradients until it
    ends: its own, and those of its parts that wait for their siblings."""
    parts = sum(first < last for first, last in adapter.parts(lengths))
    return VECTOR_BYTES * adapter.size * min(parts, SUMS_MOST)


def memory_of(device: str) -> int | None:
    """The default memory limit of a server on a device, in bytes; None if unknown."""
    total = card_bytes(device) if kind_of(device) in GPUS else _core.memory("cpu")[1]
    return None if total is None else int(total * SHARE)


def parse_bytes(text: str) -> int:
    """Bytes from a number with or without a unit: 2000000, 1.5G, 12GiB, 800M. Units are powers of
    1,024."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    scales = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    scale = scales.get(number[-1:], 1)
    try:
        count = int(float(number.rstrip("kmgt")) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise ValueError(f"{text!r} is not an amount of memory; say 800M, 12G or a number of bytes")
    return count


def memory_from(given: int | str) -> int:
    """An amount of memory, given as bytes or as text like "12G"."""
    size = parse_bytes(given) if isinstance(given, str) else to_integer(given, "memory")
    if size < 1:
        raise ValueError(f"memory must be at least 1 byte, {size} came")
    return size
