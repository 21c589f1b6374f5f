"""What the general tests of test_ops.py do not see of a vision tower's ops: bits that must agree,
each number's own error, and the order of transformers' patches."""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import numpy as np
import pytest
from support import op_reference
from support.op_cases import CASES, make_attention
from support.op_devices import DEVICES, Patches, Span, device
from support.op_tolerance import run


@pytest.fixture(params=DEVICES)
def dev(request):
    return device(request.param)


# ---- attention of whole spans, and positions of several axes ----


# Two spans of a head that is no multiple of 16 wide, in parts of several blocks; then the widths of
# GPUs' tiles.
@pytest.mark.parametrize(
    ("spans", "G", "E"),
    [
        (((150, 0), (1, 0), (70, 5)), 4, 72),
        (((300, 0), (33, 0)), 2, 64),
        (((40, 280), (90, 0)), 2, 128),
        (((70, 0), (20, 250)), 4, 256),
    ],
)
def test_a_row_of_a_whole_span_is_alone_the_same_bit_for_bit(dev, spans, G, E):
    """So it depends on no other query, on no other span, and not on how a span's rows are cut."""
    args = make_attention(np.random.default_rng(E), spans, H=4, G=G, E=E, grows=2.0, whole=1)
    whole = run(dev, "attention", args)
    own = args["spans"]
    ends = [Span(s.row + i, 1, s.pos + s.rows - 1, s.first) for s in own for i in range(s.rows)]
    rows = run(dev, "attention", args | dict(spans=ends, S=len(ends)))
    alone = [run(dev, "attention", args | dict(spans=[one], S=1)) for one in own]
    for name in whole:
        np.testing.assert_array_equal(whole[name], rows[name], name)
        for one, got in zip(own, alone, strict=True):
            own_rows = slice(one.row, one.row + one.rows)
            np.testing.assert_array_equal(got[name][own_rows], whole[name][own_rows], name)


@pytest.mark.parametrize("turned", (0, 1))
def test_three_equal_positions_have_the_bits_of_one(dev, turned):
    args = CASES["rope_table"][0](np.random.default_rng(0), T=61, E=66)
    one = dev.call("rope_table", **args)
    axis = (np.arange(33) % 3).astype(np.int32) if turned else None
    three = args | dict(pos=np.repeat(args["pos"].reshape(-1, 1), 3, axis=1), axis=axis, A=3)
    for name, value in dev.call("rope_table", **three).items():
        np.testing.assert_array_equal(value, one[name], name)


# ---- each number ----


@pytest.mark.parametrize("exact", (0, 1))
def test_gelu_errs_by_little_of_each_number_and_keeps_what_is_not_finite(dev, exact):
    x = np.concatenate(
        [np.linspace(-14, 14, 40_000), *(s * np.logspace(-30, 38, 700) for s in (-1, 1))]
    )
    x = dev.round(x)
    got = dev.call("gelu", y=(len(x),), x=x, n=len(x), exact=exact)["y"]
    with np.errstate(over="ignore"):
        wanted = op_reference.gelu(x, exact)["y"]
    rounding = 0.0 if dev.c.real_bytes == 4 else 2.0**-8
    assert (np.abs(got - wanted) <= 2e-7 * np.abs(x) + rounding * np.abs(wanted)).all()
    odd = dev.call("gelu", y=(2,), x=np.array([np.nan, np.inf]), n=2, exact=exact)["y"]
    np.testing.assert_array_equal(odd, [np.nan, np.inf])


def test_a_pixel_has_the_bits_of_its_formula(dev):
    args = CASES["patches"][0](np.random.default_rng(3), rows=4, cols=6, side=16, merge=2, frames=2)
    args["pixels"].ravel()[:256] = np.arange(256)
    exact = op_reference.patches(args["pixels"], args["how"])["y"]
    np.testing.assert_array_equal(dev.call("patches", **args)["y"], dev.round(exact))


def test_reference_patches_are_those_of_transformers():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3)).astype(np.uint8)
    module = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    processor = pytest.importorskip(module).Qwen2VLImageProcessorPil(
        size=dict(shortest_edge=1, longest_edge=1 << 20),
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.6, 0.7],
    )
    found = processor(images=[pixels], return_tensors="np")
    three = type(Patches().mean)
    how = Patches(4, 6, 16, 2, 2, 1 / 255, three(0.5, 0.4, 0.3), three(0.5, 0.6, 0.7))
    np.testing.assert_allclose(
        op_reference.patches(pixels, how)["y"], found["pixel_values"], rtol=0, atol=3e-7
    )
