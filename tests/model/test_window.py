"""Attention with a window, on every device: what a query sees is transformers', pages before it are
not read, and a row's bits depend neither on its neighbours nor on a window that it does not fill.
"""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np
import pytest
import torch
from support import op_reference
from support.op_cases import make_attention, make_attention_backward
from support.op_devices import DEVICES, KV_PAGE, Span, device
from support.op_tolerance import compare, run
from test_ops import take_queries
from transformers.masking_utils import sliding_window_causal_mask_function

WINDOWS = (1, 2, 31, 33, 63, 64, 65, 100, 129)
WIDTHS = {4: (34, 64), 2: (34, 64, 128, 256)}  # of a head; by the device's kernels


@pytest.fixture(params=DEVICES)
def dev(request):
    return device(request.param)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_reference_sees_what_transformers_sees(window):
    sees = sliding_window_causal_mask_function(window)
    at = torch.arange(2 * KV_PAGE + 3)
    wanted = sees(0, 0, at[:, None], at[None, :]).numpy()
    for query, keys in enumerate(wanted):
        first = op_reference.first_seen(query, window)
        np.testing.assert_array_equal(np.flatnonzero(keys), np.arange(first, query + 1))


@pytest.mark.parametrize("window", WINDOWS)
def test_windowed_attention_is_its_formula(dev, window):
    spans = ((140, 0), (1, window - 1), (1, window), (1, window + 1), (9, 2 * KV_PAGE - 4))
    for E in WIDTHS[dev.c.real_bytes]:
        compare(dev, "attention", make_attention(np.random.default_rng(0), spans, 4, 2, E, window))


@pytest.mark.parametrize("window", WINDOWS[1:])  # of a single key dq and dk are 0
def test_windowed_attention_backward_is_its_formula(dev, window):
    for E in WIDTHS[dev.c.real_bytes][::2]:
        args = make_attention_backward(np.random.default_rng(0), (window + 1, 133), 2, 1, E, window)
        compare(dev, "attention_backward", args)


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_decoded_position_has_the_windowed_attention_of_a_trained_one(dev, window, heads):
    spans = ((2 * KV_PAGE + 30, 0), (70, 5 * KV_PAGE - 10), (1, 20 * KV_PAGE))
    args = make_attention(np.random.default_rng(0), spans, 2 * heads, 2, 34, window)
    many = run(dev, "attention", args)
    edges = {KV_PAGE, 2 * KV_PAGE, window, window + KV_PAGE}
    near = {edge + step for edge in edges for step in (-2, -1, 0, 1)}
    rows = [t for t in range(spans[0][0]) if t in near]
    rows += [spans[0][0] + t for t in (0, 9, 10, 11, 63, 69)] + [args["T"] - 1]
    for some in (rows, rows[::-1], rows[-1:]):
        few = run(dev, "attention", take_queries("attention", args, some))
        np.testing.assert_array_equal(few["y"], many["y"][some])
        np.testing.assert_array_equal(few["lse"], many["lse"][some])


def test_a_prompt_in_pieces_has_the_windowed_attention_of_a_whole_one(dev):
    length = 3 * KV_PAGE + 7
    for window in (1, 63, 64, 65, 100):
        args = make_attention(np.random.default_rng(0), ((length, 0),), 4, 2, 64, window)
        whole = run(dev, "attention", args)
        for pieces in ((1, length - 1), (64, 64, length - 128), (33, 100, length - 133)):
            row = np.cumsum([0, *pieces])
            spans = [Span(int(r), n, int(r), 0) for r, n in zip(row[:-1], pieces, strict=True)]
            part = run(dev, "attention", args | dict(spans=spans, S=len(spans)))
            np.testing.assert_array_equal(part["y"], whole["y"], str((window, pieces)))
            np.testing.assert_array_equal(part["lse"], whole["lse"])


def test_a_window_that_no_row_fills_changes_no_bit(dev):
    rng, lengths = np.random.default_rng(0), (5, 71, 150)
    args = make_attention(rng, ((150, 0), (1, 130), (20, 100)), 4, 2, 64)
    back = make_attention_backward(rng, lengths, 4, 2, 64)
    for op, given in (("attention", args), ("attention_backward", back)):
        wanted = run(dev, op, given)
        for window in (150, 151, 1 << 20):
            for name, value in run(dev, op, given | dict(window=window)).items():
                np.testing.assert_array_equal(value, wanted[name], f"{op}: {name} {window}")


def test_pages_before_the_window_are_not_read(dev):
    """Whole pages that no row of a span sees hold NaN: they would show in every product."""
    spans, window = ((1, 300), (40, 200), (33, 5 * KV_PAGE)), 70
    args = make_attention(np.random.default_rng(0), spans, 4, 2, 34, window)
    wanted = run(dev, "attention", args)
    k, v = args["k_pages"].copy(), args["v_pages"].copy()
    for span in args["spans"]:
        for page in range((span.pos - window + 1) // KV_PAGE):
            k[args["pages"][span.first + page]] = v[args["pages"][span.first + page]] = np.nan
    found = run(dev, "attention", args | dict(k_pages=k, v_pages=v))
    for name in ("y", "lse"):
        np.testing.assert_array_equal(found[name], wanted[name])
