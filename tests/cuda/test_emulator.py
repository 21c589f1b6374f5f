"""The emulator that runs CUDA kernels on the CPU (cuda/emulator/emulator.h): kernels that are right
give the right numbers, and each planted error (planted.cu) is seen, in every order of warps."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import ROOT
from support.op_devices import Unavailable, from_bf16, setup_py, to_bf16

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
FLOATS, TEXT_BYTES = 4 * 128, 512

Run = Callable[[str, int], tuple[np.ndarray, str]]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """planted.cu, compiled as C++ with setup.py's command for the emulated device."""
    command = setup_py().EMULATED
    if not shutil.which(command[0]):
        raise Unavailable(f"{command[0]} was not found")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "planted.so"
        source = ROOT / "tests/cuda/planted.cu"
        subprocess.run([*command, "-shared", source, "-o", out], check=True)
        return ctypes.CDLL(str(out))


def planted(
    library: ctypes.CDLL, name: str, bug: int, order: str, seed: int = 0
) -> tuple[np.ndarray, str]:
    out, text = np.zeros(FLOATS, np.float32), ctypes.create_string_buffer(TEXT_BYTES)
    pointer, start = ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(seed)
    n = library.planted(name.encode(), bug, ORDERS[order], start, pointer, text)
    return out[:n], text.value.decode()


@pytest.fixture(params=ORDERS)
def run(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Run:
    """Runs a kernel, with a planted error or with 0: what it wrote, and the emulator's sentence."""

    return lambda name, bug: planted(library, name, bug, request.param)


def mma_expected() -> np.ndarray:
    a = np.arange(256).reshape(16, 16) / 64
    b = np.arange(16)[:, None] - np.arange(8)
    return (a @ b).ravel()


def cut_expected() -> float:
    turns = 1 / (3 + np.arange(4096) // 16 % 7)
    return float(from_bf16(to_bf16(turns)).astype(float).sum() * from_bf16(to_bf16([1 / 3]))[0])


EXPECTED = {
    "barrier": 130 - np.arange(128),
    "bounds": np.full(128, 6),
    "unwritten": np.full(128, 6),
    "mma": mma_expected(),
    "copy": np.roll(np.arange(512), -4),
    "divergence": np.full(128, 32),
    "address": np.full(32, 1),
    "large": np.full(128, 6),
    "cut": np.full(32, cut_expected()),
    "blocks": 1 + np.arange(16),
    "warps": 1 + np.arange(16),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_kernel_without_errors_gives_its_numbers(run: Run, name: str) -> None:
    out, text = run(name, 0)
    assert not text
    if name == "cut":
        return np.testing.assert_allclose(out[:32], EXPECTED[name], rtol=1e-6)
    np.testing.assert_array_equal(out[: len(EXPECTED[name])], EXPECTED[name])


# (kernel, which of its errors, what the numbers or the sentence must show)
SEEN_IN_NUMBERS = {
    "no barrier before reading": ("barrier", 1),
    "no barrier before writing again": ("barrier", 2),
    "an element of the output never written": ("unwritten", 1),
    "an element of shared memory never written": ("unwritten", 2),
    "registers of an mma fragment swapped": ("mma", 1),
    "an mma fragment loaded transposed": ("mma", 2),
    "cp.async read before it is waited for": ("copy", 1),
}
SEEN_IN_WORDS = {
    "past a static array": ("bounds", 1, "index 128 of shared memory, which has 128 elements"),
    "past a part of dynamic memory": ("bounds", 2, "index 128 of shared memory"),
    "past a static array, through a pointer": ("bounds", 3, "of tile was written, which has 512"),
    "below a part of dynamic memory": ("bounds", 4, "index -1 of shared memory"),
    "cp.async never waited for": ("copy", 2, "never waited for its cp.async"),
    "a barrier some threads never reach": ("divergence", 1, "and 96 have returned"),
    "a shuffle some lanes never reach": ("divergence", 2, "16 lanes of warp"),
    "two collectives in one warp": ("divergence", 3, "meet at"),
    "a shuffle of a part of a warp": ("divergence", 4, "a collective of part of a warp"),
    "two barriers in one block": ("divergence", 5, "others at that of line"),
    "ldmatrix off its alignment": ("address", 1, "ldmatrix: the address is not a multiple of 16"),
    "ldmatrix from elsewhere": ("address", 2, "ldmatrix: the address is outside of shared memory"),
    "more shared memory than a block may have": ("large", 1, "asks for 102400 bytes of shared"),
}


@pytest.mark.parametrize("error", SEEN_IN_NUMBERS)
def test_a_planted_error_spoils_the_numbers(run: Run, error: str) -> None:
    name, bug = SEEN_IN_NUMBERS[error]
    out, text = run(name, bug)
    wrong = not np.array_equal(out[: len(EXPECTED[name])], EXPECTED[name])
    assert wrong or text, "the emulator does not see it"


@pytest.mark.parametrize("error", SEEN_IN_WORDS)
def test_a_planted_error_ends_the_launch_with_a_sentence(run: Run, error: str) -> None:
    name, bug, sentence = SEEN_IN_WORDS[error]
    text = run(name, bug)[1]
    assert sentence in text
    assert "bounds_kernel asks" in text if name == "large" else f"{name}_kernel, block (" in text
    assert run(name, 0)[1] == "", "a failed launch must not spoil the next one"


# ---- what only a mode shows ----

# (which of the errors, the orders that show it)
ORDER_ERRORS = {
    "going on from the one before": (1, {"reverse", "random"}),
    "taking the last one for a neighbour": (2, {"random"}),
}


@pytest.mark.parametrize("of", ["blocks", "warps"])
@pytest.mark.parametrize("error", ORDER_ERRORS)
def test_a_trust_in_an_order_shows_in_the_others(library: ctypes.CDLL, error: str, of: str) -> None:
    bug, shown = ORDER_ERRORS[error]
    for order in ORDERS:
        out, text = planted(library, of, bug, order)
        assert not text
        assert np.array_equal(out, EXPECTED[of]) == (order not in shown), order


@pytest.mark.parametrize("of", ["blocks", "warps"])
def test_a_seed_repeats_its_random_order(library: ctypes.CDLL, of: str) -> None:
    found = [planted(library, of, 2, "random", seed)[0] for seed in (0, 1, 2, 0)]
    np.testing.assert_array_equal(found[0], found[3])
    assert not np.array_equal(found[0], found[1]) and not np.array_equal(found[1], found[2])


@pytest.fixture
def mode(library: ctypes.CDLL) -> Iterator[Callable[[int, int], None]]:
    """Sets whether work is lazy, and whether tensor cores cut their sums."""
    yield library.planted_mode
    library.planted_mode(0, 0)


def on_host(library: ctypes.CDLL, name: str, bug: int) -> tuple[np.ndarray, str]:
    out, text = np.zeros(FLOATS, np.float32), ctypes.create_string_buffer(TEXT_BYTES)
    library.planted_host(name.encode(), bug, ctypes.c_void_p(out.ctypes.data), text)
    return out, text.value.decode()


HOST = {
    "copy": 1 + np.arange(128),
    "streams": np.repeat([8, 16], 32),
    "cards": np.tile(1 + np.arange(32), 2),
}
# (what the host does, which of its errors, whether only the lazy mode shows it)
HOST_ERRORS = {
    "a result read without a wait": ("copy", 1, True),
    "pinned memory changed while it is read": ("copy", 2, True),
    "memory freed while a kernel uses it": ("copy", 3, True),
    "a wait for an earlier event": ("copy", 4, True),
    "a counter that two streams share": ("streams", 1, True),
    "a kernel launched while another card is current": ("cards", 1, False),
}


@pytest.mark.parametrize("lazy", (0, 1))
@pytest.mark.parametrize("name", HOST)
def test_a_host_without_errors_gets_its_numbers(
    library: ctypes.CDLL, mode: Callable[[int, int], None], name: str, lazy: int
) -> None:
    mode(lazy, 0)
    out, text = on_host(library, name, 0)
    assert not text
    np.testing.assert_array_equal(out[: len(HOST[name])], HOST[name])


@pytest.mark.parametrize("error", HOST_ERRORS)
def test_a_hosts_error_shows_in_the_lazy_mode(
    library: ctypes.CDLL, mode: Callable[[int, int], None], error: str
) -> None:
    name, bug, only_lazy = HOST_ERRORS[error]
    for lazy in (0, 1):
        mode(lazy, 0)
        out, text = on_host(library, name, bug)
        wrong = not np.array_equal(out[: len(HOST[name])], HOST[name]) or text
        assert bool(wrong) == (lazy or not only_lazy)
    if not only_lazy:
        assert "next_kernel" in text


def test_truncated_sums_show_in_long_products(
    library: ctypes.CDLL, mode: Callable[[int, int], None]
) -> None:
    errors = {}
    for truncates in (0, 1):
        mode(0, truncates)
        for bug in (0, 1):
            out, _ = planted(library, "cut", bug, "forward")
            errors[truncates, bug] = abs(out[0] / EXPECTED["cut"][0] - 1)
    assert errors[0, 0] < 1e-6 and errors[1, 0] < 2e-6 and errors[1, 1] > 5e-6
