"""The machine that a benchmark runs on: what it is, and the most that its cores can do.

`describe` is the line that every table's header shows. `Roofline` is measured at the start of a
run, in half a second: multiply-adds in registers and memory read, by roofline.c, which the
system's C compiler builds for the processor at hand; without a compiler there is no % of
roofline, and the header says so. `Probe.gain` is what several threads get just now: a virtual
machine's cores may be two threads of one core in this minute and two cores in the next."""

import ctypes
import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "roofline.c"
FLAGS = ["-O2", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
PACKAGES = ("numpy", "torch", "transformers", "peft", "onednn-cpu-gomp")
ISAS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
READ_BYTES = 256 << 20  # more than the caches hold; a thread's own part is 64 MB at least
TIMES = 2_000_000  # rounds of multiply-adds: some milliseconds
TRIES = 7
GAIN_SECONDS = 0.025  # of one thread, and of several


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Name, instruction sets, cores of the machine, memory."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        name += f" (family {info['cpu family']}, model {info['model']})"
    flags = set((info.get("flags") or info.get("Features") or "").split())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 2**30
    sets = " ".join(isa for isa in ISAS if isa in flags)
    return f"{name}, {sets}, {os.cpu_count()} cores, {memory:.0f} GiB".replace(", ,", ",")


def versions() -> str:
    """Python, and those of the peers' packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def describe() -> str:
    """Processor, versions and date in one line."""
    return f"{processor()}; {versions()}; {datetime.date.today().isoformat()}"


class Probe:
    """What this processor's cores can do, by roofline.c; OSError with a sentence where that can't
    be built. Each work takes (thread, threads), and returns the flops or bytes that it did."""

    def __init__(self, threads: int) -> None:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        if not shutil.which(compiler[0]):
            raise OSError("a C compiler (cc, or what CC names) was not found")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "roofline.so"
            command = [*compiler, *FLAGS, SOURCE, "-o", library]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{compiler[0]} can't build roofline.c: {done.stderr.strip()}")
            c = self._c = ctypes.CDLL(str(library))
        for name in ("f32_flops", "bf16_flops"):
            getattr(c, name).restype, getattr(c, name).argtypes = ctypes.c_double, [ctypes.c_long]
        c.read_bytes.restype, c.read_bytes.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t]
        self._bytes = max(READ_BYTES, threads * READ_BYTES // 4)
        self._memory = np.ones(self._bytes + 4096, np.uint8)

    def f32(self, *_: int) -> float:
        """Multiply-adds in registers."""
        return self._c.f32_flops(TIMES)

    def bf16(self, *_: int) -> float:
        """The same of bf16 pairs, where the processor has such an instruction."""
        return self._c.bf16_flops(TIMES) or self.f32()

    def read(self, thread: int, threads: int) -> float:
        """A thread's own part of the memory: what one reads another does not find in a cache."""
        part = self._bytes // threads // 4096 * 4096
        first = self._memory.ctypes.data
        self._c.read_bytes(first + -first % 4096 + thread * part, part)
        return part

    def gain(self, work: Callable[[int, int], float], threads: int) -> float:
        """How many times what one thread does by the wall so many do together, just now."""

        def rate(thread: int, count: int) -> float:
            begin = now = time.perf_counter()
            done = 0.0
            while now - begin < GAIN_SECONDS:
                done += work(thread, count)
                now = time.perf_counter()
            return done / (now - begin)

        with ThreadPoolExecutor(threads) as pool:
            together = sum(pool.map(rate, range(threads), [threads] * threads))
        return together / rate(0, 1)


def _together(work: Callable[[int, int], float], threads: int) -> float:
    """What `threads` threads do in a second of their own CPU time, at once: the best of some
    tries."""

    def rate(thread: int) -> float:
        start = time.thread_time()
        done = work(thread, threads)
        return done / (time.thread_time() - start)

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(rate, range(threads))) for _ in range(TRIES))


@dataclass(frozen=True)
class Roofline:
    """The most that `threads` cores do in a second."""

    threads: int
    flops: dict[str, float]  # of "f32" and "bf16"; equal where no instruction takes bf16
    bytes: float  # read from memory

    def __str__(self) -> str:
        f32, bf16 = (self.flops[name] / 1e9 for name in ("f32", "bf16"))
        count = "one core" if self.threads == 1 else f"{self.threads} cores"
        return (
            f"Roofline, {count}: {f32:.0f} GFLOP/s in f32, {bf16:.0f} in bf16, "
            f"{self.bytes / 1e9:.1f} GB/s read"
        )


def measure(threads: int = 1) -> Roofline | str:
    """The roofline of so many threads, or the sentence that says why there is none."""
    try:
        probe = Probe(threads)
    except OSError as error:
        return f"No roofline: {error}"
    f32, bf16, read = (_together(w, threads) for w in (probe.f32, probe.bf16, probe.read))
    return Roofline(threads, {"f32": f32, "bf16": bf16}, read)
