"""What a sequence keeps of a gated delta network: rows that come one by one, in pieces or all at
once have the same bits, whatever runs beside them, and the newest row may be run again."""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

from collections.abc import Callable

import numpy as np
import pytest
from support.delta_cases import make_conv, make_delta
from support.op_devices import DEVICES, KV_PAGE, Device, Memory, Span, device

CONV, DELTA_HEAD = 4, 16
ROWS = 2 * KV_PAGE + 3
G, H, N, E, C = 1, 2, 32, 32, 24
SLOTS = 3

# How many rows each call runs. Pieces begin and end at, before and behind a page's borders.
CUTS = {
    "one by one": (1,) * ROWS,
    "around the borders": (1, 62, 1, 1, 62, 2, 2),
    "whole pages": (64, 64, 3),
    "across pages": (40, 90, 1),
}


@pytest.fixture(params=DEVICES)
def dev(request: pytest.FixtureRequest) -> Device:
    return device(request.param)


class Delta:
    """The delta rule on a device, over what SLOTS sequences keep."""

    op, rows = "delta", ("q", "k", "v", "beta", "decay")

    def __init__(self, dev: Device):
        self.dev = dev
        head, matrix = H * DELTA_HEAD, H * N * E
        self.step = KV_PAGE * (G * N + H * (E + 2)) + head + matrix
        self.kept = {name: Memory(dev, 4 * SLOTS * self.step) for name in ("state", "open")}

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        args = make_delta(np.random.default_rng(seed), (ROWS,), G, H, N, E)
        return {name: args[name] for name in self.rows}

    def call(self, inputs: dict[str, np.ndarray], spans: list[Span], **kept: object) -> dict:
        T = len(inputs["v"])
        out = dict(y=(T, H, E), w=(T, H, E), pages=None, state=None, open=None)
        if not kept:
            out["pages"] = (T // KV_PAGE, H, N, E)
        sizes = dict(S=len(spans), T=T, G=G, H=H, N=N, E=E, step=self.step)
        return self.dev.call(self.op, **out | kept | inputs, spans=spans, **sizes)


class Conv(Delta):
    """Likewise the convolution."""

    op, rows = "conv", ("x",)

    def __init__(self, dev: Device):
        self.dev, self.step = dev, CONV * C
        self.kept = {name: Memory(dev, 4 * SLOTS * self.step) for name in ("start", "ring")}
        self.w = make_conv(np.random.default_rng(9), (1,), C)["w"]

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        return {"x": make_conv(np.random.default_rng(seed), (ROWS,), C)["x"]}

    def call(self, inputs: dict[str, np.ndarray], spans: list[Span], **kept: object) -> dict:
        T = len(inputs["x"])
        out = dict(y=(T, C), start=None, ring=None, w=self.w)
        sizes = dict(S=len(spans), T=T, C=C, step=self.step)
        return self.dev.call(self.op, **out | kept | inputs, spans=spans, **sizes)


Op = Callable[[Device], Delta]
on_ops = pytest.mark.parametrize("op", [Delta, Conv])


def whole(ran: Delta, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All rows at once, of a sequence that keeps nothing: as in training."""
    return ran.call(inputs, [Span(0, ROWS, 0, 0, -1)])


def piece(
    ran: Delta, sequences: list[tuple[dict[str, np.ndarray], int, int, int]]
) -> dict[str, np.ndarray]:
    """Of each (inputs, slot, first row, rows), these rows; all in one call."""
    spans, row = [], 0
    for _, slot, first, rows in sequences:
        spans.append(Span(row, rows, first, 0, slot))
        row += rows
    parts = [{k: v[at : at + n] for k, v in inputs.items()} for inputs, _, at, n in sequences]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ran.rows}
    return ran.call(joined, spans, **ran.kept)


@on_ops
@pytest.mark.parametrize("cut", CUTS)
def test_rows_in_pieces_have_the_bits_of_all_at_once(dev: Device, op: Op, cut: str) -> None:
    ran = op(dev)
    inputs = ran.inputs(0)
    together, first = whole(ran, inputs), 0
    for rows in CUTS[cut]:
        part = piece(ran, [(inputs, 1, first, rows)])
        for name in part.keys() & {"y", "w"}:
            expected = together[name][first : first + rows]
            np.testing.assert_array_equal(part[name], expected, f"{name} from row {first}")
        first += rows
    for memory in ran.kept.values():
        memory.assert_guarded("what is kept")


@on_ops
def test_the_newest_row_may_be_run_again(dev: Device, op: Op) -> None:
    ran = op(dev)
    inputs = ran.inputs(0)
    together = whole(ran, inputs)["y"]
    for first, rows in ((0, 1), (1, 62), (63, 1), (64, 1), (65, 63), (128, 1), (129, 2)):
        piece(ran, [(inputs, 2, first, rows)])
        last = first + rows - 1
        for _ in range(2):
            again = piece(ran, [(inputs, 2, last, 1)])["y"]
            np.testing.assert_array_equal(again[0], together[last], f"row {last}")


@on_ops
def test_sequences_beside_each_other_keep_their_own(dev: Device, op: Op) -> None:
    """One in a long piece, one in short ones, then both row by row; a third that keeps nothing."""
    ran = op(dev)
    a, b = ran.inputs(0), ran.inputs(1)
    of_a, of_b = whole(ran, a)["y"], whole(ran, b)["y"]
    got = piece(ran, [(a, 2, 0, 62), (b, 0, 0, 100)])["y"]
    np.testing.assert_array_equal(got, np.concatenate([of_a[:62], of_b[:100]]))
    for i in range(3):
        got = piece(ran, [(b, 0, 100 + i, 1), (b, -1, 0, 1), (a, 2, 62 + i, 1)])["y"]
        np.testing.assert_array_equal(got, np.stack([of_b[100 + i], of_b[0], of_a[62 + i]]))
    got = piece(ran, [(b, -1, 0, 60), (a, 2, 65, 2), (b, 0, 103, 28)])["y"]
    np.testing.assert_array_equal(got, np.concatenate([of_b[:60], of_a[65:67], of_b[103:]]))


def test_a_kept_state_is_the_one_behind_the_page_before(dev: Device) -> None:
    """So a sequence that begins like another may take its state over at a page's border."""
    ran = Delta(dev)
    inputs = ran.inputs(0)
    pages = whole(ran, inputs)["pages"]
    for cut in ((64, 1), (65,), (100, 31)):
        first = 0
        for rows in cut:
            piece(ran, [(inputs, 0, first, rows)])
            first += rows
        kept = ran.kept["state"].read(4 * ran.step)
        page = (first - 1) // KV_PAGE
        heads = kept.view(np.int32)[: H * DELTA_HEAD : DELTA_HEAD]
        np.testing.assert_array_equal(heads, [page] * H)
        matrices = kept.view(np.float32)[H * DELTA_HEAD :][: H * N * E].reshape(H, N, E)
        np.testing.assert_array_equal(matrices, pages[page - 1], f"after {cut}")


def test_a_kept_start_is_the_inputs_before_the_page(dev: Device) -> None:
    ran = Conv(dev)
    inputs = ran.inputs(0)
    x = dev.round(inputs["x"])
    for cut in ((1,), (64, 1), (65,), (66, 60), (66, 63), (129,)):
        first = 0
        for rows in cut:
            piece(ran, [(inputs, 0, first, rows)])
            first += rows
        begin = (first - 1) // KV_PAGE * KV_PAGE
        before = np.concatenate([np.zeros((3, C)), x])[begin : begin + 3]
        kept = ran.kept["start"].read(4 * 3 * C).view(np.float32).reshape(3, C)
        np.testing.assert_array_equal(kept, before, f"after {cut}")
