"""Base weights in the CPU's panels (csrc/cpu/weights/weight_load.c), byte for byte what
csrc/cpu/weights/frozen.h says."""

import numpy as np
import pytest
from support.op_devices import DTYPES, ISAS, PACKED, Device, Memory, device, from_bf16, to_bf16

PANEL = 32
HEADER_BYTES = 64  # struct frozen before its data


def panels(rows: np.ndarray) -> np.ndarray:
    """(N, K) as (N / 32, K, 32), or bf16 bits as (N / 32, K / 2, 32, 2); filled up with zeros."""
    N, K = rows.shape
    pair = 2 if rows.dtype == np.uint16 else 1
    full = np.zeros((-(-N // PANEL) * PANEL, -(-K // pair) * pair), rows.dtype)
    full[:N, :K] = rows
    shape = (full.shape[0] // PANEL, PANEL, full.shape[1] // pair, pair)
    return full.reshape(shape).transpose(0, 2, 1, 3)


@pytest.fixture(params=ISAS)
def dev(request: pytest.FixtureRequest) -> Device:
    return device(f"cpu-{request.param}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [0, 1, 2, 3, 8, 31, 32, 33, 64, 101, 131])
@pytest.mark.parametrize("rows", [1, 2, 15, 17, 31, 32, 33, 47, 64, 101])
def test_a_loaded_weight_is_its_rows_in_panels(dev, rows, cols, dtype):
    rng = np.random.default_rng(0)
    kind = np.uint32 if dtype == "f32" else np.uint16
    bits = rng.integers(0, np.iinfo(kind).max, (rows, cols), kind, endpoint=True)  # NaN too
    if dtype == "f16":
        bits[bits & 0x7C00 == 0x7C00] &= 0x83FF  # a NaN's payload is nobody's business
    odd = np.empty(bits.nbytes + 2, np.uint8)[2:]  # as an array may lie in a file
    odd[:] = bits.view(np.uint8).ravel()
    size = dev.c.frozen_bytes(dev.pointer, DTYPES["bf16" if dtype == "bf16" else "f32"], rows, cols)
    memory = Memory(dev, size)
    kept, kind = DTYPES["bf16" if dtype == "bf16" else "f32"], DTYPES[dtype]
    dev.c.frozen_load(dev.pointer, memory.pointer, kept, odd.ctypes.data, kind, rows, cols)
    memory.assert_guarded("frozen_load")
    held = bits.view(np.float16).astype(np.float32).view(np.uint32) if dtype == "f16" else bits
    wanted = panels(held)
    assert size == HEADER_BYTES + wanted.nbytes
    assert memory.read(size)[HEADER_BYTES:].tobytes() == wanted.tobytes()


def load(dev: Device, kept: str, source: str, array: np.ndarray) -> tuple[int, np.ndarray]:
    """What frozen_load says of an array, and the bytes that it put."""
    kinds, (rows, cols) = DTYPES | PACKED, array.shape
    memory = Memory(dev, dev.c.frozen_bytes(dev.pointer, kinds[kept], rows, cols))
    array = np.ascontiguousarray(array)
    finite = dev.c.frozen_load(
        dev.pointer, memory.pointer, kinds[kept], array.ctypes.data, kinds[source], rows, cols
    )
    return finite, memory.read(memory.size_bytes)[HEADER_BYTES:]


def stored(numbers: np.ndarray, source: str) -> np.ndarray:
    if source == "bf16":
        return to_bf16(numbers)
    return numbers.astype(np.float16 if source == "f16" else np.float32)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("kept", ["f32", "bf16", "int8", "int4"])
def test_a_number_that_is_not_finite_is_seen_wherever_it_is(dev, kept, source):
    """In whole blocks and parts of them, in each of their rows and columns."""
    numbers = np.random.default_rng(0).standard_normal((45, 101)).astype(np.float32)
    assert load(dev, kept, source, stored(numbers, source))[0] == 1
    places = [(row, row % 32 + 64) for row in range(45)] + [(row, 100) for row in (0, 31, 44)]
    places += [(2, column) for column in range(32)]
    for number, (row, column) in enumerate(places):
        spoilt = numbers.copy()
        spoilt[row, column] = (np.nan, np.inf, -np.inf)[number % 3]
        assert load(dev, kept, source, stored(spoilt, source))[0] == 0, (row, column)


def test_wide_types_become_each_other(dev):
    numbers = np.random.default_rng(0).standard_normal((45, 101)).astype(np.float32)
    for source in DTYPES:
        array = stored(numbers, source)
        exact = from_bf16(array) if source == "bf16" else array.astype(np.float32)
        assert load(dev, "f32", source, array)[1].tobytes() == panels(exact).tobytes()
        wanted = panels(to_bf16(exact)).tobytes()
        assert load(dev, "bf16", source, array)[1].tobytes() == wanted


def test_what_bfloat16_has_not_is_seen(dev):
    numbers = np.ones((33, 40), np.float32)
    numbers[32, 39] = 3.3895313e38  # its largest, and the next of float32 that rounds to it
    assert load(dev, "bf16", "f32", numbers)[0] == 1
    numbers[32, 39] = 3.4e38
    assert load(dev, "bf16", "f32", numbers)[0] == 0
    assert load(dev, "f32", "f32", numbers)[0] == 1


# Of a block of each type, bytes in a file: which of them to set, and whether it is finite then.
HALF, FULL = b"\x00\x7c", b"\xff\x7b"  # infinity in f16, and its largest number
BLOCKS = {
    "int8": (34, {0: (HALF, 0)}, {0: (FULL, 1), 2: (b"\x7f\x7f", 1)}),
    "q4_0": (18, {0: (HALF, 0)}, {0: (FULL, 1)}),
    "q4_1": (20, {0: (HALF, 0), 2: (HALF, 0)}, {0: (FULL, 1), 4: (HALF, 1)}),
    "mxfp4": (17, {0: (b"\xff", 0)}, {0: (b"\xfe\x33", 1)}),
    "fp8": (36, {2: (b"\x80\x7f", 0), 35: (b"\x7f", 0), 4: (b"\xff", 0)}, {4: (b"\x7e", 1)}),
    "nf4": (20, {2: (b"\xc0\x7f", 0)}, {4: (b"\xff\xff", 1)}),
    "q4_k": (144, {0: (HALF, 0), 2: (HALF, 0)}, {4: (HALF, 1)}),
    "q5_k": (176, {0: (HALF, 0), 2: (HALF, 0)}, {4: (HALF, 1)}),
    "q6_k": (210, {208: (HALF, 0)}, {0: (HALF, 1), 206: (HALF, 1)}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_means_a_number_that_is_not_finite_is_seen(dev, name):
    """Also in the last row, which fills no panel."""
    size, bad, good = BLOCKS[name]
    cols = 512 if name.endswith("_k") else 64
    for at, (text, finite) in [*bad.items(), *good.items()]:
        array = np.zeros((35, cols // (256 if name.endswith("_k") else 32) * size), np.uint8)
        first = array.shape[1] - size + at
        array[34, first : first + len(text)] = list(text)
        assert blocks_load(dev, name, array, cols) == finite, (at, text)


@pytest.mark.parametrize("power", [252, 253, 254])
def test_a_power_of_mxfp4_may_be_large_where_codes_are_small(dev, power):
    table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for code in range(16):
        array = np.zeros((1, 17), np.uint8)
        array[0, 0], array[0, 9] = power, code << 4
        finite = table[code % 8] * 2.0 ** (power - 127) < 2.0**128
        assert blocks_load(dev, "mxfp4", array, 32) == finite, code


def blocks_load(dev: Device, name: str, array: np.ndarray, cols: int) -> int:
    memory = Memory(dev, dev.c.frozen_bytes(dev.pointer, PACKED[name], len(array), cols))
    return dev.c.frozen_load(
        dev.pointer, memory.pointer, PACKED[name], array.ctypes.data, PACKED[name], len(array), cols
    )
