"""The settings of an image processor: sizes and tokens are transformers', and settings that would
make other pixels are refused by name."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinsmith.formats import images
from tinsmith.formats.image_processor import ImageProcessor, read_processor
from transformers import Qwen2VLImageProcessorPil

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SMALL = {**QWEN, "size": {"shortest_edge": 1024, "longest_edge": 20000}}
# With a size: without one, transformers writes the two into its class's own.
OTHER = {**QWEN, "patch_size": 14, "merge_size": 3, "min_pixels": 5000, "max_pixels": 70000}


def folder(path: Path, content: dict[str, Any], whole: dict[str, Any] | None = None) -> Path:
    (path / "preprocessor_config.json").write_text(json.dumps(content))
    if whole is not None:
        (path / "processor_config.json").write_text(json.dumps(whole))
    return path


def both(path: Path, content: dict[str, Any]) -> tuple[ImageProcessor, Qwen2VLImageProcessorPil]:
    """Ours, and transformers' from the same file."""
    return read_processor(folder(path, content)), Qwen2VLImageProcessorPil.from_pretrained(path)


@pytest.mark.parametrize("content", [QWEN, SMALL, OTHER, {}], ids=["qwen", "small", "other", "{}"])
def test_sizes_and_tokens_are_transformers(content, tmp_path) -> None:
    ours, theirs = both(tmp_path, content)
    rng = random.Random(0)
    sizes = [(rng.randint(1, 1500), rng.randint(1, 1500)) for _ in range(3000)]
    sizes += [(rng.randint(1, 130), rng.randint(1, 130)) for _ in range(3000)]
    sizes += [(16 * a, 16 * b) for a in range(1, 12) for b in range(1, 12)]  # halves
    sizes += [(side, 200 * side + more) for side in (1, 7, 31) for more in (0, 1, 9, 70)] + [
        (8192, 4096),
        (5793, 5792),
        (220, 300),
    ]
    asked = refused = 0
    for height, width in sizes:
        try:
            wanted = theirs.get_number_of_image_patches(height, width, {})
        except ValueError:
            with pytest.raises(ValueError, match="more than 200 times as long as wide"):
                ours.tokens(height, width)
            refused += 1
            continue
        high, wide = ours.tokens(height, width)
        side = ours.patch * ours.merge
        assert high * wide * ours.merge**2 == wanted, (height, width)
        assert ours.resized(height, width) == (side * high, side * wide)
        asked += 1
    assert asked > 5000 and refused > 15


@pytest.mark.parametrize("size", [(300, 220), (64, 64), (500, 90), (31, 47)])
def test_pixels_are_transformers(size, tmp_path) -> None:
    """Its patches of a PNG file, from our pixels and the settings, in the order of the tower."""
    ours, theirs = both(tmp_path, SMALL)
    width, height = size
    rng = np.random.default_rng(width)
    picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    data = io.BytesIO()
    picture.save(data, "png")
    resized = ours.resized(height, width)
    pixels = images.decode(data.getvalue(), "png", resized)
    wanted = theirs(images=[picture], return_tensors="np")
    assert wanted["image_grid_thw"].tolist() == [[1, *(side // ours.patch for side in resized)]]
    scaled = pixels.astype(np.float64) * ours.rescale
    scaled = (scaled - np.asarray(ours.mean)) / np.asarray(ours.std)
    high, wide = ours.tokens(height, width)
    parts = scaled.reshape(high, ours.merge, ours.patch, wide, ours.merge, ours.patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    found = np.repeat(parts, ours.frames, axis=5).reshape(wanted["pixel_values"].shape)
    np.testing.assert_allclose(found, wanted["pixel_values"], atol=1e-6)


def test_the_nested_settings_win_and_defaults_are_the_classes(tmp_path) -> None:
    nested = {"image_processor": {**QWEN, "patch_size": 12}, "processor_class": "X"}
    assert read_processor(folder(tmp_path, QWEN, nested)).patch == 12
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).patch_size == 12
    assert read_processor(folder(tmp_path, QWEN, {"processor_class": "X"})).patch == 16
    ours, theirs = read_processor(folder(tmp_path, {})), Qwen2VLImageProcessorPil()
    assert (ours.patch, ours.merge) == (theirs.patch_size, theirs.merge_size)
    assert (ours.frames, ours.rescale) == (theirs.temporal_patch_size, theirs.rescale_factor)
    assert [*ours.mean, *ours.std] == [*theirs.image_mean, *theirs.image_std]
    assert (ours.least, ours.most) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])


def test_two_keys_of_their_own_win_over_the_size(tmp_path) -> None:
    ours, theirs = both(tmp_path, {**QWEN, "min_pixels": 4096, "max_pixels": 8192})
    assert (ours.least, ours.most) == (4096, 8192)
    assert theirs.size["shortest_edge"] == 4096 and theirs.size["longest_edge"] == 8192


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "Qwen2VLImageProcessor is supported"),
        ({"resample": 2}, "resample is 2; only 3 is supported"),
        ({"do_resize": False}, "do_resize is False; only True is supported"),
        ({"do_rescale": False}, "do_rescale is False"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"do_convert_rgb": False}, "do_convert_rgb is False"),
        ({"do_center_crop": True}, "do_center_crop is True; only False is supported"),
        ({"do_pad": True}, "do_pad is True"),
        ({"size": {"height": 224, "width": 224}}, "shortest_edge should be a positive integer"),
        ({"size": 224}, "size should be an object, found 224"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "9 pixels or more, and at most 8"),
        ({"size": {"shortest_edge": 0, "longest_edge": 8}}, "shortest_edge should be a positive"),
        ({"min_pixels": "4"}, "min_pixels should be a positive integer, found '4'"),
        ({"patch_size": 0}, "patch_size should be a positive integer, found 0"),
        ({"image_mean": [0.5]}, "image_mean should be a list of 3 numbers"),
        ({"image_mean": [0.5, "a", 0]}, "image_mean should be a positive number, found 'a'"),
        ({"image_std": [0.5, 0, 1]}, "image_std should be a positive number, found 0"),
        ({"rescale_factor": 0}, "rescale_factor should be a positive number"),
    ],
)
def test_a_setting_that_would_make_other_pixels_is_refused(change, wanted, tmp_path) -> None:
    with pytest.raises(ValueError, match=wanted) as caught:
        read_processor(folder(tmp_path, QWEN | change))
    assert str(caught.value).startswith(str(tmp_path / "preprocessor_config.json"))


def test_a_folder_without_the_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config.json"):
        read_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_processor": []}')
    with pytest.raises(ValueError, match="image_processor should be an object"):
        read_processor(tmp_path)
