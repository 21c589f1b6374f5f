"""Calls any op of any device with NumPy arrays, through the same list that the C code is made of.

`call("cpu", "rmsnorm", y=(T, D), rstd=(T,), x=x, w=w, T=T, D=D, eps=1e-6)` returns every array the
op may write, by name. What an argument is follows from its type in csrc/device/ops.inc and from its
value:

- a tuple, for a pointer that is not const: an output of that shape, poisoned before the call;
- an array: an input, or where the pointer is not const, memory the op updates;
- a string: the same memory as the argument of that name;
- Memory: device memory that outlives the call, handed over as it is;
- Repeats: an array of that shape, for timing, made of device memory by the device's own copies;
- None: a null pointer.

An op that takes a group of device.h's Lora has each one's fields as arguments of their own, y0, s0,
a0, b0, N0, y1, ...; those from number `count` on are left out.

Floats become the device's `real` where the row says real, and are rounded to it. Behind every array
lies a stretch of poison that must survive the call, and const inputs must come back unchanged.

"cpu" is the device in tinsmith._core and opens the widest of its instruction sets; "cpu-generic",
"cpu-avx2", "cpu-avx512", "cpu-avx512bf16" and "cpu-amx" are each of them; "cpu-bf16" is its widest
with products of bf16, "cpu-int16" that with products of whole numbers, and "cpu-int16-avx2",
"cpu-int16-avx512" and "cpu-int16-avx512vnni" are each of these. "cuda" is the library beside _core;
"cuda-emulated" is built here when it is first asked for, from the same files, and kept in build/
for the next time.
TINSMITH_SANITIZE=address,undefined, for a _core that was built with it, builds that with sanitizers
too and gives the instruction sets' devices memory whose end the sanitizer knows; then run Python
with ASAN_OPTIONS=detect_leaks=0 and LD_PRELOAD=$(gcc -print-file-name=libasan.so).
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from support import ROOT
from support.emulated_mode import Mode, mode_now
from support.strided import STEPS, Layout, with_steps

STAND_IN = ROOT / "tests/support/cublaslt.cpp"  # for cuBLASLt, which the emulated device loads
COUNTER = (
    ROOT / "tests/support/traffic.cpp"
)  # of bytes that are moved, and how it comes to see them
COUNTING = ["-O0", "-g0", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
COUNTING_LINK = ["-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset"]
GUARD_BYTES = 256  # may be read: a product loads whole tiles (cpu/device.c), not written
POISON = 0x7F  # f32 3.4e38 in bf16 and f32, a huge id in int32
# A NaN of outputs before an op, in f32 and in bf16. No arithmetic makes it: what still has these
# bits was not written, or copied from what was not.
UNWRITTEN = np.uint32(0x7FD5_0000).view(np.float32)
ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")
ISA_NEEDS = {
    "generic": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx512bf16": {
        *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi"),
        "avx512_vnni",
    },
    "amx": {"avx512_bf16", "amx_tile", "amx_bf16"},
}
DEVICES = ("cpu", *(f"cpu-{isa}" for isa in ISAS), "cuda", "cuda-emulated")
DTYPES = {"f32": 0, "bf16": 1, "f16": 2}
PACKED = {
    "int8": 3, "int4": 4, "q4_0": 5, "q4_1": 6, "mxfp4": 7, "mxfp4_pairs": 8, "fp8": 9, "nf4": 10,
    "q4_k": 11, "q5_k": 12, "q6_k": 13,
}  # fmt: skip
KV_PAGE = 64
ARENA_STEP = 256


class Span(ctypes.Structure):
    """device.h's Span."""

    _fields_ = [(name, ctypes.c_int32) for name in ("row", "rows", "pos", "first", "state")]


class Draw(ctypes.Structure):
    """device.h's Draw."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("sample", ctypes.c_uint32),
        ("pos", ctypes.c_uint32),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
    ]


class Lora(ctypes.Structure):
    """device.h's Lora."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "s", "ds", "a", "b", "da", "db")),
        ("N", ctypes.c_int32),
        ("step", ctypes.c_int32),
    ]


class Jsd(ctypes.Structure):
    """device.h's Jsd."""

    _fields_ = [
        ("beta", ctypes.c_float),
        ("temperature", ctypes.c_float),
        ("clip", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("probs", ctypes.c_int32),
        ("each", ctypes.c_int32),
    ]


class Patches(ctypes.Structure):
    """device.h's Patches."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "cols", "side", "merge", "frames")),
        ("rescale", ctypes.c_float),
        ("mean", ctypes.c_float * 3),
        ("std", ctypes.c_float * 3),
    ]


@dataclass(frozen=True)
class Frozen:
    """A base weight (rows, cols) in float64, exact in `dtype`; or several of them, (count, rows,
    cols), which an op finds `step` bytes apart. `blocks` are its bytes where it is loaded from
    them, and not from its numbers."""

    value: np.ndarray
    dtype: str = "f32"
    blocks: np.ndarray | None = None

    @property
    def kept(self) -> int:
        """The type that it is kept in."""
        return PACKED.get(self.dtype.removesuffix("_pairs"), DTYPES.get(self.dtype, 0) % 2)


@dataclass(frozen=True)
class Repeats:
    """An array of a shape, of any type, whose bytes are those of a block of device memory again and
    again, from byte `at` on; a base weight is one in bf16."""

    block: "Memory"
    shape: tuple[int, ...]
    at: int = 0


@dataclass(frozen=True)
class Param:
    """One argument of an op."""

    name: str
    type: str
    pointer: bool
    const: bool


try:
    from pytest import skip
except ModuleNotFoundError:  # where programs use this file, and no test runs
    skip = SimpleNamespace(Exception=RuntimeError)
Unavailable = skip.Exception  # a device that this machine does not have: skips, says why


def parse_ops() -> dict[str, list[Param]]:
    """Every row of csrc/device/ops.inc: its name and its arguments after the device."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc/device/ops.inc").read_text(), flags=re.S)
    ops = {}
    for name, args in re.findall(r"OP\((\w+),\s*\(Device \*dev,(.*?)\)\)", text, flags=re.S):
        ops[name] = []
        for arg in args.split(","):
            parts = re.fullmatch(r"\s*(const )?\s*(\w+) (\*?)(\w+)\s*", arg)
            const, kind, star, param = parts.groups()
            ops[name].append(Param(param, kind, bool(star), bool(const)))
    return ops


# A Lora's fields: type, and whether an op only reads it, forward and backward.
LORA_FIELDS = {
    "lora": {"y": ("real", 0), "s": ("real", 0), "a": ("float", 1), "b": ("float", 1)},
    "lora_backward": {
        **{"y": ("real", 1), "s": ("real", 1), "ds": ("real", 0)},
        **{"a": ("float", 1), "b": ("float", 1), "da": ("float", 0), "db": ("float", 0)},
    },
}
LORA_GROUP = 4


def flatten(op: str, params: list[Param]) -> list[Param]:
    """An op's arguments as the tests give them: a group's fields instead of the group."""
    flat = []
    for p in params:
        if p.type != "Lora":
            flat.append(p)
            continue
        for i in range(LORA_GROUP):
            fields = LORA_FIELDS[op].items()
            flat += [Param(f"{k}{i}", kind, True, bool(const)) for k, (kind, const) in fields]
            flat += [Param(f"{name}{i}", "int", False, True) for name in ("N", "step")]
    return flat


ROWS = parse_ops()
OPS = {op: flatten(op, params) for op, params in ROWS.items()}
SCALARS = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "Jsd": Jsd,
    "Patches": Patches,
}
ELEMENTS = {"float": np.float32, "double": np.float64, "int32_t": np.int32, "int64_t": np.int64}
ELEMENTS |= {"void": np.uint8, "uint8_t": np.uint8}
FLOATS = {4: np.dtype(np.float32), 2: np.dtype(np.uint16)}  # by bytes
STRUCTS = {"Span": Span, "Draw": Draw}


def op_type(params: list[Param]) -> type:
    """The C type of an op's function pointer."""
    args = [ctypes.c_void_p if p.pointer else SCALARS[p.type] for p in params]
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, *args)


VOID, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
COPY = ctypes.CFUNCTYPE(None, VOID, VOID, VOID, SIZE)


class CDevice(ctypes.Structure):
    """device.h's struct Device, field by field."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("real_bytes", SIZE),
        ("cached_bytes", SIZE),
        ("own_bytes", SIZE),
        ("step_rows", INT),
        ("chunk_bytes", SIZE),
        ("async_", INT),
        ("library", ctypes.c_char_p),
        ("notes_", ctypes.POINTER(ctypes.c_char_p)),
        ("alloc", ctypes.CFUNCTYPE(INT, VOID, ctypes.POINTER(VOID), SIZE)),
        ("release", ctypes.CFUNCTYPE(None, VOID, VOID, SIZE)),
        ("map", ctypes.CFUNCTYPE(INT, VOID, ctypes.POINTER(VOID), INT, SIZE, SIZE)),
        ("rarely", ctypes.CFUNCTYPE(None, VOID, VOID, SIZE)),
        ("memory", ctypes.CFUNCTYPE(None, VOID, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))),
        ("upload", COPY),
        ("download", COPY),
        ("copy", COPY),
        ("receive", ctypes.CFUNCTYPE(None, VOID, VOID, VOID, VOID, SIZE)),
        ("zero", ctypes.CFUNCTYPE(None, VOID, VOID, SIZE)),
        ("blank", ctypes.CFUNCTYPE(None, VOID, VOID, SIZE)),
        ("frozen_bytes", ctypes.CFUNCTYPE(SIZE, VOID, INT, INT, INT)),
        ("frozen_continues", ctypes.CFUNCTYPE(INT, VOID, VOID, VOID, INT, INT)),
        ("frozen_load", ctypes.CFUNCTYPE(INT, VOID, VOID, INT, VOID, INT, INT, INT)),
        ("stream", ctypes.CFUNCTYPE(SIZE, VOID)),
        ("sync", ctypes.CFUNCTYPE(INT, VOID)),
        ("close", ctypes.CFUNCTYPE(None, VOID)),
        ("fetch", COPY),
        ("await_", ctypes.CFUNCTYPE(INT, VOID, INT)),
        ("rehearse", ctypes.CFUNCTYPE(None, VOID)),
        ("rehearsed", ctypes.CFUNCTYPE(SIZE, VOID)),
        ("reserve", ctypes.CFUNCTYPE(INT, VOID, SIZE)),
        ("record", ctypes.CFUNCTYPE(INT, VOID)),
        ("recorded", ctypes.CFUNCTYPE(INT, VOID, ctypes.POINTER(VOID))),
        ("replay", ctypes.CFUNCTYPE(INT, VOID, VOID)),
        ("graph_close", ctypes.CFUNCTYPE(None, VOID, VOID)),
        *((name, op_type(params)) for name, params in ROWS.items()),
    ]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Floats as bf16 bits in uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Memory:
    """A stretch of device memory, poisoned, with poison behind it. Freed with the object. With
    `filled` it has that memory's bytes again and again, and so has what is behind it: nothing is
    made on the host."""

    def __init__(self, device: "Device", size_bytes: int, filled: "Repeats | None" = None):
        self.device, self.size_bytes = device, size_bytes
        self.pointer = VOID()
        self.whole_bytes = size_bytes + GUARD_BYTES
        if device.malloc:  # under a sanitizer, memory whose end it knows
            device.malloc(ctypes.byref(self.pointer), 64, self.whole_bytes)
        else:
            pointer = ctypes.byref(self.pointer)
            device.check(device.c.alloc(device.pointer, pointer, self.whole_bytes))
        if filled:
            self.repeat(filled)
        else:
            self.write(np.full(self.whole_bytes, POISON, np.uint8))

    def repeat(self, filled: "Repeats") -> None:
        """Fills all of this memory with copies of another."""
        block, done, at = filled.block, 0, filled.at % filled.block.size_bytes
        while done < self.whole_bytes:
            size = min(block.size_bytes - at, self.whole_bytes - done)
            to, source = self.pointer.value + done, block.pointer.value + at
            self.device.c.copy(self.device.pointer, to, source, size)
            done, at = done + size, 0

    def write(self, data: np.ndarray) -> None:
        """Uploads a host array to the beginning of this memory."""
        data = np.ascontiguousarray(data)
        self.device.c.upload(self.device.pointer, self.pointer, data.ctypes.data, data.nbytes)
        self.device.check(self.device.c.sync(self.device.pointer))

    def read(self, size_bytes: int) -> np.ndarray:
        """The first bytes of this memory."""
        data = np.empty(size_bytes, np.uint8)
        self.device.c.download(self.device.pointer, data.ctypes.data, self.pointer, size_bytes)
        self.device.check(self.device.c.sync(self.device.pointer))
        return data

    def assert_guarded(self, what: str) -> None:
        """Fails if anything was written behind the end."""
        tail = self.read(self.whole_bytes)[self.size_bytes :]
        assert (tail == POISON).all(), f"{what}: written past its end"

    def __del__(self):
        if not self.pointer:
            return
        if self.device.malloc:
            self.device.free(self.pointer)
        else:
            self.device.c.release(self.device.pointer, self.pointer, self.whole_bytes)


class Device:
    """An opened device: its C struct, and memory to call its ops on."""

    def __init__(self, name: str, threads: int = 0):
        last = name.rpartition("-")[2]
        isa = last if name in (f"cpu-{last}", f"cpu-int16-{last}") and last in ISA_NEEDS else None
        self.whole = name.startswith("cpu-int16")  # rounds what narrow weights are multiplied with
        self.name = name
        self.library = ctypes.CDLL(str(core_library()))
        if name == "cuda-emulated":
            emulated_library()
        self.malloc = self.free = None
        if isa and os.environ.get("TINSMITH_SANITIZE"):
            self.malloc, self.free = ctypes.CDLL(None).posix_memalign, ctypes.CDLL(None).free
            self.malloc.argtypes, self.free.argtypes = [VOID, SIZE, SIZE], [VOID]
        self.library.device_open.argtypes = [VOID, ctypes.c_char_p, INT]
        self.pointer = VOID()
        opened = name.removesuffix(f"-{isa}") if isa else name
        opened = "cpu-bf16" if isa == "amx" else opened  # which asks for the unit
        if self.library.device_open(ctypes.byref(self.pointer), opened.encode(), threads):
            raise Unavailable(self.sentence())
        if isa:
            self.table(isa)
        self.c = ctypes.cast(self.pointer, ctypes.POINTER(CDevice)).contents
        self.pairs = name in (
            "cpu-avx512bf16",
            "cpu-amx",
            "cpu-bf16",
        )  # rounds what a bf16 weight is multiplied with to bf16
        self.real = self.element("real")

    def table(self, isa: str) -> None:
        """Fills in the op pointers of one instruction set."""
        fill = self.library[f"cpu_{isa}_table"]
        fill.argtypes = [VOID]
        fill(self.pointer)

    def check(self, status: int) -> None:
        """Raises the sentence of a Status that is not OK."""
        if status:
            raise RuntimeError(f"status {status}: {self.sentence()}")

    def sentence(self) -> str:
        """The last failure's sentence."""
        self.library.status_text.restype = ctypes.c_char_p
        return self.library.status_text().decode()

    @property
    def notes(self) -> list[str]:
        """What the device does slower than it could, as far as it was found out."""
        if not self.c.notes_:
            return []
        every = (self.c.notes_[i] for i in itertools.count())
        return [text.decode() for text in itertools.takewhile(bool, every)]

    @property
    def truncates(self) -> bool:
        """Whether long sums are cut, as tensor cores cut them."""
        return self.name == "cuda" or (self.name == "cuda-emulated" and modes[0].truncating)

    def element(self, kind: str) -> np.dtype:
        """The element that a pointer type of ops.inc has in this device's memory."""
        own = {"real": self.c.real_bytes, "cached": self.c.cached_bytes}
        return FLOATS[own[kind]] if kind in own else np.dtype(ELEMENTS[kind])

    def encode(self, values, kind: str) -> np.ndarray:
        """A host array as the bytes of a pointer type of ops.inc."""
        if kind in STRUCTS:
            return np.frombuffer(b"".join(bytes(v) for v in values) or b"", np.uint8)
        if self.element(kind) == np.uint16:
            return to_bf16(values)
        return np.ascontiguousarray(values, self.element(kind))

    def decode(self, data: np.ndarray, kind: str, shape: tuple) -> np.ndarray:
        """Bytes of device memory as a host array; real comes back as float32."""
        values = data.view(self.element(kind)).reshape(shape)
        return from_bf16(values) if values.dtype == np.uint16 else values

    def round(self, values: np.ndarray) -> np.ndarray:
        """Float64 of what this device's `real` makes of the values: what its ops are given."""
        return self._round(values, "real")

    def round_cached(self, values: np.ndarray) -> np.ndarray:
        """The same for keys and values that it keeps in pages."""
        return self._round(values, "cached")

    def _round(self, values: np.ndarray, kind: str) -> np.ndarray:
        data = self.encode(values, kind).view(np.uint8).ravel()
        return self.decode(data, kind, np.shape(values)).astype(float)

    def round_frozen(self, values: np.ndarray) -> np.ndarray:
        """Float64 of what this device makes of a base weight: exact on the CPU, bf16 on a GPU."""
        return self.round(values) if self.real == np.uint16 else np.asarray(values, float)

    def put(self, values, kind: str) -> Memory:
        """Device memory that holds a host array, as a pointer type of ops.inc."""
        data = self.encode(values, kind)
        memory = Memory(self, data.nbytes)
        memory.write(data)
        return memory

    def frozen_step(self, frozen: Frozen) -> int:
        """Bytes from one base weight of several to the next."""
        rows, cols = frozen.value.shape[-2:]
        one = self.c.frozen_bytes(self.pointer, frozen.kept, rows, cols)
        return -(-one // ARENA_STEP) * ARENA_STEP

    def put_frozen(self, frozen: Frozen) -> Memory:
        """A base weight in the device's own order."""
        rows, cols = frozen.value.shape[-2:]
        dtype = np.float16 if frozen.dtype == "f16" else np.float32
        host = np.ascontiguousarray(frozen.value, dtype)
        host = host[None] if host.ndim == 2 else host
        host = to_bf16(host) if frozen.dtype == "bf16" else host
        kind, step = DTYPES.get(frozen.dtype, 0), self.frozen_step(frozen)
        if frozen.blocks is not None:
            kind, host = PACKED[frozen.dtype], np.ascontiguousarray(frozen.blocks)
            host = host[None] if host.ndim == 2 else host
        size = self.c.frozen_bytes(self.pointer, frozen.kept, rows, cols)
        memory = Memory(self, size + (len(host) - 1) * step)
        for i, one in enumerate(host):
            at = memory.pointer.value + i * step
            data = one.ctypes.data
            self.c.frozen_load(self.pointer, at, frozen.kept, data, kind, rows, cols)
        self.check(self.c.sync(self.pointer))
        return memory

    def place(self, param: Param, value) -> tuple[Memory | None, tuple]:
        """Memory for one pointer argument, and the shape to read it back in."""
        if value is None or isinstance(value, Memory):
            return value, None
        if isinstance(value, Repeats):
            size = int(np.prod(value.shape, dtype=np.int64))
            if param.type == "frozen":
                size = self.c.frozen_bytes(self.pointer, DTYPES["bf16"], *value.shape)
            else:
                size *= self.element(param.type).itemsize
            return Memory(self, size, value), value.shape
        if param.type == "frozen":
            return self.put_frozen(value if isinstance(value, Frozen) else Frozen(value)), None
        if isinstance(value, tuple):
            assert not param.const, f"{param.name} is an input: give an array"
            count = int(np.prod(value, dtype=np.int64))
            memory = Memory(self, count * self.element(param.type).itemsize)
            if param.type in ("real", "float"):
                memory.write(self.encode(np.full(value, UNWRITTEN), param.type))
            return memory, value
        return self.put(value, param.type), None if param.type in STRUCTS else np.shape(value)

    def bind(self, op: str, args: dict) -> "Bound":
        """Places one op's arguments in the device's memory, and makes room for its scratch."""
        args = with_steps(op, args)
        layout = Layout(op, args)
        absent = range(args["count"], LORA_GROUP) if op in LORA_FIELDS else ()
        params = [p for p in OPS[op] if not any(p.name.endswith(str(i)) for i in absent)]
        names = [p.name for p in params]
        assert sorted(names) == sorted(args), f"{op} takes {names}, not {list(args)}"
        memory, shape = {}, {}
        for p in params:
            if p.pointer and not isinstance(args[p.name], str):
                memory[p.name], shape[p.name] = self.place(p, layout.spread(p.name, args[p.name]))
        for p in params:
            if p.pointer and isinstance(args[p.name], str):
                memory[p.name], shape[p.name] = memory[args[p.name]], shape[args[p.name]]
        values = args | {name: m and m.pointer for name, m in memory.items()}
        if op not in STEPS and "step" in args and isinstance(args.get("w"), Frozen):
            values["step"] = self.frozen_step(args["w"])
        if op in LORA_FIELDS:
            fields = (*LORA_FIELDS[op], "N", "step")
            group = [Lora(**{k: values[f"{k}{i}"] for k in fields}) for i in range(args["count"])]
            values["group"] = (Lora * len(group))(*group)
        ordered = [values[p.name] for p in ROWS[op]]
        if self.c.rehearse:  # as a step does before its ops
            self.c.rehearse(self.pointer)
            getattr(self.c, op)(self.pointer, *ordered)
            self.check(self.c.reserve(self.pointer, self.c.rehearsed(self.pointer)))
        return Bound(self, op, params, memory, shape, ordered, layout)

    def prepared(self, op: str, **args) -> Callable[[], None]:
        """A call of one op on memory that is placed once: for timing."""
        return self.bind(op, args).run

    def call(self, op: str, **args) -> dict[str, np.ndarray]:
        """Runs one op and returns all arrays it may have written; see the head of this file."""
        bound = self.bind(op, args)
        memory, shape = bound.memory, bound.shape
        shared = {value for value in args.values() if isinstance(value, str)}
        before = {
            p.name: memory[p.name].read(memory[p.name].size_bytes)
            for p in bound.params
            if p.pointer and p.const and memory[p.name] and p.name not in shared
        }
        bound.run()
        self.check(self.c.sync(self.pointer))
        out = {}
        for p in bound.params:
            if not p.pointer or memory[p.name] is None:
                continue
            memory[p.name].assert_guarded(f"{op}: {p.name}")
            if p.name in before:
                now = memory[p.name].read(memory[p.name].size_bytes)
                assert (now == before[p.name]).all(), f"{op}: wrote to its input {p.name}"
            elif not p.const and shape[p.name] is not None:
                count = int(np.prod(shape[p.name], dtype=np.int64))
                data = memory[p.name].read(count * self.element(p.type).itemsize)
                out[p.name] = bound.layout.gather(p.name, self.decode(data, p.type, shape[p.name]))
        return out


@dataclass(frozen=True)
class Bound:
    """An op with its arguments in a device's memory, which lives as long as this does."""

    device: Device
    op: str
    params: list[Param]
    memory: dict[str, Memory | None]
    shape: dict[str, tuple | None]
    ordered: list
    layout: Layout

    def run(self) -> None:
        """Does it, or queues it, once more."""
        getattr(self.device.c, self.op)(self.device.pointer, *self.ordered)


def core_library() -> Path:
    """tinsmith._core's shared library."""
    try:
        spec = importlib.util.find_spec("tinsmith._core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise RuntimeError("tinsmith._core is not built: pip install -e .")
    library = Path(spec.origin)
    seam = getattr(ctypes.CDLL(str(library)), "device_abi", lambda: 0)() & 0xFFFFFFFF
    if seam != int(setup_py().ABI.rstrip("u")):  # its struct Device is another
        raise RuntimeError(f"{library.name} was built for another seam: pip install -e . again")
    return library


@functools.cache
def setup_py() -> ModuleType:
    """setup.py as a module: its flags, and how it builds cuda/*.cu."""
    spec = importlib.util.spec_from_file_location("tinsmith_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def emulated_build(counting: bool = False) -> tuple[Path, str]:
    """The emulated CUDA device's library, built where there is none of these sources and flags yet,
    while other processes of the tests wait; and the sentence of why it could not be. `counting`:
    the one that counts the bytes that work moves (traffic.cpp)."""
    setup = setup_py()
    compile_with, link_with, counter = setup.EMULATED, setup.EMULATED_LINK, []
    if counting:
        compile_with, link_with = [*compile_with, *COUNTING], [*link_with, *COUNTING_LINK]
        counter = ["-fPIC", "-O2", COUNTER, "-Wl,-soname,device.so,-z,defs"]
    sources = STAND_IN.read_bytes() + COUNTER.read_bytes() * counting
    digest = hashlib.sha256(setup.cuda_digest([*compile_with, *link_with]).encode() + sources)
    folder = ROOT / "build" / "emulated" / digest.hexdigest()[:16]
    library, part, objects = (folder / name for name in ("device.so", "part.so", "objects"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library, ""
        reason = setup.cuda_build(part, objects, compile_with, [*link_with, *counter])
        if not reason:
            beside = folder / "libcublasLt_stand_in.so"  # where cublaslt.cuh looks for it
            stand_in = objects / "stand_in.o"
            subprocess.run([*compile_with, "-c", STAND_IN, "-o", stand_in], check=True)
            needed = [part] if counting else []  # it has what the counter is told
            link = [compile_with[0], stand_in, *needed, "-o", beside, *link_with]
            subprocess.run(link, check=True)
            part.rename(library)
            shutil.rmtree(objects)
        return library, reason


def emulated_library() -> Path:
    """The emulated CUDA device's library, of which tinsmith._core is told."""
    core = ctypes.CDLL(str(core_library()))
    if not shutil.which(setup_py().EMULATED[0]):
        raise Unavailable("cuda-emulated: the tests build it with g++, which was not found")
    try:
        library, reason = emulated_build()
    except OSError as error:
        raise Unavailable(f"cuda-emulated: the tests can't build it: {error}") from error
    if reason:
        raise RuntimeError(f"cuda-emulated: {reason}")
    use.asked = True
    core.device_emulated.argtypes = [ctypes.c_char_p]
    assert core.device_emulated(os.fsencode(library)) == 0
    if not modes:
        set_mode()
    return library


modes: list[Mode] = []  # what the emulator was set to, the last one now


def set_mode(mode: Mode | None = None) -> None:
    """Sets the emulator's mode once what waits there is done; by default that of the test."""
    mode = mode_now() if mode is None else mode
    library = ctypes.CDLL(str(emulated_build()[0]))
    library.cuda_emulated_mode(mode.lazy, mode.truncating)
    library.cuda_emulated_order(mode.order, ctypes.c_uint64(mode.seed))
    modes[:] = [mode]


@dataclass
class Use:
    """Of the emulated device, by the test that runs."""

    asked: bool = False
    kernels_before: int = 0


use = Use()


def kernels_given() -> int:
    """How many kernels the emulated card has been given."""
    if not modes:
        return 0
    count = ctypes.CDLL(str(emulated_build()[0])).cuda_emulated_given
    count.restype = ctypes.c_int64
    return count(0)


def begin_test() -> None:
    """Puts the emulated device in the mode of the test that begins."""
    use.asked, use.kernels_before = False, kernels_given()
    if modes:
        set_mode()


def emulated_used() -> bool:
    """Whether the test that runs has used the emulated device."""
    return use.asked or kernels_given() > use.kernels_before


def cpu_has(isa: str) -> bool:
    """Whether this machine can run an instruction set."""
    if isa == "generic":
        return True
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return bool(flags) and ISA_NEEDS[isa] <= set(flags.group(1).split())


@functools.cache
def device(name: str, threads: int = 2) -> Device:
    """The device of that name, opened once; Unavailable says why it can't be had."""
    last = name.rpartition("-")[2].replace("int16", "avx2")
    if name.startswith("cpu-") and not cpu_has(last):
        raise Unavailable(f"this processor has no {last}")
    return Device(name, threads)


def call(name: str, op: str, **args) -> dict[str, np.ndarray]:
    """Device.call on the device of that name."""
    return device(name).call(op, **args)
