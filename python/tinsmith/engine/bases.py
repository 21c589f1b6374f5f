"""The base models that a server holds: read on first use, evicted least recently used first.

Using a model that is not loaded raises NotLoaded. The caller then gives `want` a function to call
when the model can be used. Models are read (loading.py) tensor by tensor, in turns, between other
work. If a model can't be loaded, only the requests that wait for it get the error; later requests
retry.

Memory is counted as the engine allocates it: weights, KV caches, and adapters with a step's
activations. In a quantised copy, which is memory-mapped, an embedding that is only looked up does
not count. The limit is given, or nine tenths of the memory of the machine, the container or the
card. A model is evicted only when nothing on it would be lost: no adapter in training, no snapshot
that is not on disk, no sample in flight. An evicted model is read again on its next use, to the
same bits. A failed allocation also evicts, where the limit did not foresee it. All of this belongs
to the worker's thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tinsmith import _core
from tinsmith.engine.devices import GPUS, card_bytes, kind_of
from tinsmith.engine.loading import Loading, bytes_of
from tinsmith.models.registry import BaseModel, LoadedModel, inspect_model
from tinsmith.ops.tensors import to_integer
from tinsmith.system.format import readable

T = TypeVar("T")

SHARE = 0.9  # of all memory, if no limit is given


@dataclass(frozen=True)
class Hold:
    """Memory on a base model besides its weights. pins: its data would be lost with the model.
    yields: it is dropped anyway as soon as memory is short. spare: the bytes of it that can be
    restored, and that `release` drops."""

    base: Path
    bytes: int
    what: str
    pins: bool
    yields: bool = False
    spare: int = 0


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
    """A base model in use is not loaded; Bases.want() has it read."""

    def __init__(self, model: BaseModel):
        super().__init__(f"the base model in {model.path} is not loaded")
        self.model = model


class Bases:
    """See the file's header. `holds` lists what else takes memory. `release` drops what can be
    restored on a base (an idle cache, adapters that are on disk); `drop` drops the first hold that
    yields. Both return whether they dropped anything. `wake` is called in another thread when
    `busy` becomes true."""

    def __init__(
        self,
        models: Mapping[str, BaseModel],
        *,
        device: str,
        threads: int,
        memory: int | None,
        holds: Callable[[], list[Hold]],
        release: Callable[[Path], bool],
        drop: Callable[[], bool] = lambda: False,
        wake: Callable[[], None] = lambda: None,
    ):
        self.memory = memory_of(device) if memory is None else memory
        self._models = {model.path: model for model in models.values()}
        self._names = {model.path: name for name, model in models.items()}
        self._threads = threads
        self._holds = holds
        self._release = release
        self._drop = drop
        self._wake = wake
        self._loaded: dict[Path, LoadedModel] = {}  # the least recently used first
        self._wanted: dict[Path, list[Callable[[], None]]] = {}  # called when a model is read
        self._loading: dict[Path, Loading] = {}  # the wanted models that are being read
        self._full = False  # the next one waits until one of those is done
        self._failed: dict[Path, Exception] = {}  # while the functions in _wanted are called
        self.evictions = 0

    def use(self, model: BaseModel) -> LoadedModel:
        """The loaded model, which becomes the most recently used one. Raises NotLoaded if it is not
        loaded. Inside a call that want() makes, raises the reason why it can't be loaded."""
        if model.path in self._failed:
            raise self._failed[model.path]
        loaded = self._loaded.pop(model.path, None)
        if loaded is None:
            raise NotLoaded(model)
        self._loaded[model.path] = loaded
        return loaded

    def want(self, model: BaseModel, again: Callable[[], None]) -> None:
        """Queues a model to be read. `again` is called when it is read, or when that fails."""
        self._wanted.setdefault(model.path, []).append(again)

    @property
    def busy(self) -> bool:
        """Whether load() would do anything."""
        return self._next() is not None

    def load(self) -> None:
        """Begins to read a wanted model, or takes one tensor of the model that is next in turn.
        After the last tensor, calls the functions that wait for the model. Only they get an error.
        """
        path = self._next()
        assert path is not None
        try:
            loaded = self._go_on(path)
        except Exception as error:
            self._failed[path] = error
        else:
            if loaded is None:
                self._wanted[path] = self._wanted.pop(path)  # to the end of the queue
                return
            self._loaded[path] = loaded
        self._finish(path)

    def waits_for(self, model: BaseModel) -> str:
        """Why a wanted model can't be used yet. Any thread may ask."""
        name, loading = self._names[model.path], self._loading.get(model.path)
        if loading is None:
            return f"the base model {name} is read after another one"
        return f"the base model {name} is being read: {loading.share:.0%}"

    def name(self, path: Path) -> str:
        """The name of the model in a folder."""
        return self._names[path]

    @property
    def weight_bytes(self) -> int:
        """Of the models that are loaded or being read."""
        held = sum(model.weight_bytes for model in self._loaded.values())
        return held + sum(item.bytes for item in self._loading.values())

    def close(self, error: Exception) -> None:
        """Ends all reading. All waiting functions are called, and get the error."""
        for path in list(self._wanted):
            self._failed[path] = error
            self._finish(path)

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

        `keep` is a model that must not be evicted. Raises MemoryError if eviction can't free
        enough; then nothing was evicted.
        """
        least = need if least is None else least
        if self.memory is not None and self._stays(keep) + least > self.memory:
            raise MemoryError(self._no_room(least, what, self.memory - self._stays(keep)))
        while self.memory is not None and self._used() + need > self.memory:
            if not self._evict(keep):
                break
        return self._try(what, function, keep)

    def run_bytes(self, loaded: LoadedModel, rank: int) -> tuple[int, int]:
        """The bytes that a run of some rank takes for its adapter and a step's activations: the
        most that a step may keep, and the least. The least has a margin for batches that are not
        one long datum."""
        core = loaded.core
        planned = core.plan(rank)
        rows = planned["step_tokens"]
        most = core.plan(rank, rows, step_share(core, self.memory, planned["adapter"]))
        least = core.plan(rank, rows, 1)["step"] * 9 // 8
        beside = most["adapter"] + most["scratch"]
        return beside + max(most["step"], least), beside + least

    def step_limits(
        self, path: Path, adapter: _core.Adapter, vectors: int, reserved: int, longest: int
    ) -> tuple[int, int]:
        """The bytes that an adapter's step may take, beside the adapter's vectors, as (usual, for a
        longest datum that needs more). The first is what is reserved, or what is free within a
        step's share. The second is all that is free; other memory is evicted for it. (0, 0):
        unlimited."""
        if self.memory is None:
            return 0, 0
        least = adapter.step_least(longest)
        most = self.memory - self._stays(path) + reserved  # if all went that may
        while least <= most and self._used() - reserved + least > self.memory:
            if not self._evict(path):
                break
        free = reserved + max(0, self.memory - self._used())
        share = step_share(adapter.model, self.memory, vectors)
        return max(reserved, min(share, free)), max(reserved, free if least <= most else most)

    def room(self, need: int) -> int:
        """The free bytes, at most `need`."""
        return need if self.memory is None else min(need, self.memory - self._used())

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
                if not self._evict(keep):
                    raise MemoryError(f"{what}: {error}; {self._holders()}") from None

    def _next(self) -> Path | None:
        """The model that load() continues with."""
        for path in self._wanted:
            loading = self._loading.get(path)
            if not self._full if loading is None else loading.ready:
                return path
        return None

    def _go_on(self, path: Path) -> LoadedModel | None:
        """One step of loading a model; returns the model after the last step."""
        model, what = self._models[path], f"the base model {self._names[path]}"
        if path in self._loading:
            return self._try(what, self._loading[path].take, None)

        def begin() -> Loading:
            return Loading(model, threads=self._threads, wake=self._wake)

        try:
            self._loading[path] = self.make(bytes_of(model), what, begin)
        except MemoryError:
            if not self._loading:
                raise
            self._full = True
        return None

    def _finish(self, path: Path) -> None:
        """Calls the functions that wait for a model, which was read or can't be."""
        loading = self._loading.pop(path, None)
        if loading is not None:
            loading.close()
        for again in self._wanted.pop(path):
            again()
        self._failed.pop(path, None)
        self._full = False

    def _used(self) -> int:
        return self.weight_bytes + sum(hold.bytes for hold in self._holds())

    def _stays(self, keep: Path | None) -> int:
        """The bytes that no eviction frees."""
        holds = [hold for hold in self._holds() if hold.pins]
        pinned = {keep, *(hold.base for hold in holds)}
        stay = sum(item.bytes for item in self._loading.values())
        stay += sum(model.weight_bytes for path, model in self._loaded.items() if path in pinned)
        return stay + sum(hold.bytes - hold.spare for hold in holds if not hold.yields)

    def _evict(self, keep: Path | None) -> bool:
        """Drops the first hold that yields. Otherwise evicts the least recently used model that may
        be evicted, or else drops what can be restored on others. Returns whether anything was
        dropped."""
        if self._drop():
            self.evictions += 1
            return True
        pinned = {hold.base for hold in self._holds() if hold.pins}
        idle = [path for path in self._loaded if path != keep and path not in pinned]
        if idle:
            self._release(idle[0])
            del self._loaded[idle[0]]
        dropped = bool(idle) or any(self._release(path) for path in self._loaded)
        self.evictions += dropped
        return dropped

    def _no_room(self, need: int, what: str, free: int) -> str:
        assert self.memory is not None
        left = readable(max(free, 0))
        return (
            f"{what} needs {readable(need)}, and of the {readable(self.memory)} that the server "
            f"may use {left} are free; {self._holders()}; end a client that is not "
            "needed, or start the server with more --memory"
        )

    def _holders(self) -> str:
        parts = [
            f"the base model {self._names[path]} ({readable(model.weight_bytes)})"
            for path, model in self._loaded.items()
        ]
        parts += [
            f"the base model {self._names[path]} ({readable(item.bytes)}), which is being read"
            for path, item in self._loading.items()
        ]
        holds = sorted((h for h in self._holds() if h.bytes), key=lambda hold: -hold.bytes)
        parts += [f"{hold.what} ({readable(hold.bytes)})" for hold in holds[:8]]
        return f"memory is held by {', '.join(parts)}" if parts else "nothing else holds memory"


def step_share(core: _core.Model, memory: int | None, adapter: int) -> int:
    """The bytes that a training step may take on a model, given the memory limit and an adapter's
    bytes; 0: unlimited."""
    return 0 if memory is None else core.step_bytes(max(1, memory - adapter))


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
