"""Idle runs outside the engine's memory: in the host's, where the engine's is a GPU's, or on disk.

An offloaded run is its weights, its optimizer's moments, gradients if it has any, and its moving
average if it keeps one: flat vectors, in one safetensors file, 12 to 20 bytes a parameter. The few
numbers beside them (its step, its losses so far) stay here. Restored, it is the same to the bit.
The files are private to this process, in a folder that `close` removes. They count as checkpoints
do, so a full disk refuses them; then the run stays where it is. A file is checked by its vectors'
checksums, and removed only after the run is back.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints.checkpoint import AVERAGE, PendingGradient, Reserve
from tinsmith.checkpoints.lora import Average, LoraSpec, spec_of
from tinsmith.checkpoints.optimizers import OPTIMIZERS
from tinsmith.engine.runs import BUSY_BYTES
from tinsmith.formats import safetensors_io
from tinsmith.system import disk

AVERAGE_BYTES = 12  # a parameter: an average's weights, and memory for both sides' next ones
HOST_SHARE = 0.9  # of the host's memory: beyond it, runs go to disk

Growth = tuple[int, float, float]  # _core.Adapter.growth


@dataclass(eq=False)
class Offloaded:
    """One run's adapter and average. `vectors` or `file` has their numbers."""

    spec: LoraSpec
    step_tokens: int
    size: int  # parameters
    step: int
    pending: PendingGradient
    growth: Growth
    average: tuple[float, Growth] | None  # the average's decay and growth
    sums: dict[str, int]  # each vector's checksum
    vectors: dict[str, NDArray[np.float32]] | None = None
    file: Path | None = None

    @property
    def bytes(self) -> int:
        """The bytes of its vectors."""
        return 4 * self.size * len(self.sums)

    @property
    def engine_bytes(self) -> int:
        """The bytes that it takes in the engine."""
        return self.size * (BUSY_BYTES + AVERAGE_BYTES * (self.average is not None))


class Offload:
    """See the file's header. `host`: whether the host's spare memory is used before the disk."""

    def __init__(self, folder: Path, reserve: Reserve, *, host: bool):
        self._folder = folder
        self._reserve = reserve
        self._host = host
        self._in_host: dict[Offloaded, None] = {}  # the longest there first
        self._files = 0  # written so far

    def put(self, adapter: _core.Adapter, average: Average | None) -> Offloaded:
        """Copies a run out of the engine. OSError if the disk refuses it; ValueError if it has
        numbers that are not finite, which could not be restored."""
        if not all(map(math.isfinite, adapter.pending)):
            raise ValueError(f"the loss so far is {adapter.pending[0]}")
        sources = {what: (adapter, what) for what in _vectors(adapter)}
        if average is not None:
            sources[AVERAGE] = average.adapter, "weights"
        item = Offloaded(
            spec_of(adapter),
            adapter.step_tokens,
            adapter.size,
            adapter.step,
            adapter.pending,
            adapter.growth,
            (average.decay, average.adapter.growth) if average else None,
            dict.fromkeys(sources, 0),
        )

        def read(name: str) -> NDArray[np.float32]:
            holder, what = sources[name]
            flat = holder.read(what)
            safetensors_io.check_finite(flat, name)
            item.sums[name] = _checksum(flat)
            return flat

        if self._host and self._make_room(item.bytes):
            item.vectors = {name: read(name) for name in sources}
            self._in_host[item] = None
        else:
            self._write(item, read)
        return item

    def restore(self, item: Offloaded, core: _core.Model) -> tuple[_core.Adapter, Average | None]:
        """The adapter and the average, in the engine's memory again; `forget` comes after. OSError
        if the file can't be read, or is not what was written."""
        adapter = _core.Adapter(core, **asdict(item.spec), step_tokens=item.step_tokens)
        average = None
        for name in item.sums:
            if name != AVERAGE:
                adapter.write(name, self._read(item, name))
        adapter.step, adapter.pending = item.step, item.pending
        if item.average is not None:
            average = Average(adapter.snapshot(), item.average[0])
            average.adapter.write("weights", self._read(item, AVERAGE))
            average.adapter.growth = item.average[1]
        adapter.growth = item.growth
        return adapter, average

    def forget(self, item: Offloaded) -> None:
        """Drops a run's numbers."""
        self._in_host.pop(item, None)
        item.vectors = None
        if item.file is not None:
            disk.remove(item.file)

    def close(self) -> None:
        """Removes everything."""
        self._in_host.clear()
        disk.remove(self._folder)

    def _make_room(self, size: int) -> bool:
        """Whether the host has memory for so many bytes, after others have gone to disk."""
        while not _fits_host(size):
            if not self._in_host:
                return False
            longest = next(iter(self._in_host))
            vectors = longest.vectors
            assert vectors is not None
            self._write(longest, vectors.__getitem__)
            del self._in_host[longest]
            longest.vectors = None
        return True

    def _write(self, item: Offloaded, read: Callable[[str], NDArray[np.float32]]) -> None:
        blank = np.broadcast_to(np.float32(0), (item.size,))
        forms = dict.fromkeys(item.sums, (blank.dtype, blank.shape))
        size = safetensors_io.size(dict.fromkeys(item.sums, blank))
        self._files += 1
        file = self._folder / f"{self._files}.safetensors"
        try:
            with self._reserve(size, file):
                disk.make_folder(self._folder)
                safetensors_io.write_each(file, forms, read)
        except BaseException as error:
            disk.remove(file)
            if isinstance(error, OSError) and error.errno in disk.FULL:
                what = f"an idle run was not written to {file}"
                raise disk.full(error, what, file, size) from None
            raise
        item.file = file

    def _read(self, item: Offloaded, name: str) -> NDArray[np.float32]:
        if item.vectors is not None:
            return item.vectors[name]
        assert item.file is not None
        with safetensors_io.open_file(item.file) as tensors:
            begin = tensors.entry(name).begin
        flat = np.fromfile(item.file, np.float32, item.size, offset=begin)
        if _checksum(flat) != item.sums[name]:
            raise OSError(f"{item.file} does not give back what was written to it")
        return flat


def _vectors(adapter: _core.Adapter) -> list[str]:
    """The vectors that the adapter's next request depends on."""
    gradients = ["gradients"] if adapter.has_gradients else []
    return ["weights", *OPTIMIZERS[adapter.optimizer].state, *gradients]


def _checksum(flat: NDArray[np.float32]) -> int:
    return _core.checksum(flat.view(np.uint8))


def _fits_host(size: int) -> bool:
    free, total = _core.memory("cpu")
    return free - size >= (1 - HOST_SHARE) * total
