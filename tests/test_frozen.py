"""Base weights in the CPU's panels (csrc/cpu/frozen.c), byte for byte what csrc/cpu/cpu.h says."""

import numpy as np
import pytest
from engine import DTYPES, ISAS, Device, Memory, device

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
