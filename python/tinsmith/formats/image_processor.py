"""How a model's image processor prepares images: the settings in its folder, as one value.

The file is preprocessor_config.json, or the object `image_processor` of processor_config.json,
which wins, as in transformers. An image is resized so that both sides are whole tokens, `patch`
times `merge` pixels each, and their product is from `least` to `most` pixels. Settings that would
make other pixels are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.formats.config import count, number, read_json, section

FILE, WHOLE_FILE = "preprocessor_config.json", "processor_config.json"
SECTION = "image_processor"
KIND = "Qwen2VLImageProcessor"  # transformers' classes of this name: also …Fast and …Pil
ASPECT_MAX = 200

# Settings that make other pixels unless they have one of these values; None: the key is absent.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True, None), "do_rescale": (True, None), "do_normalize": (True, None),
    "do_convert_rgb": (True, None), "do_center_crop": (False, None), "do_pad": (False, None),
    "resample": (3, None),  # bicubic
}  # fmt: skip

# The class's own numbers.
LEAST, MOST, PATCH, FRAMES, MERGE = 56 * 56, 28 * 28 * 1280, 14, 2, 2
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
RESCALE = 1 / 255


@dataclass(frozen=True)
class ImageProcessor:
    """See the file's header."""

    least: int  # pixels of a resized image
    most: int
    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    frames: int  # of a patch: an image is repeated
    mean: tuple[float, float, float]  # of the channels, after `rescale`
    std: tuple[float, float, float]
    rescale: float

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image is resized; ValueError if it is too narrow. It is
        transformers' smart_resize, in doubles and step by step; round takes halves to even."""
        if max(height, width) / min(height, width) > ASPECT_MAX:
            raise ValueError(
                f"the image is {width} × {height}: more than {ASPECT_MAX} times as long as wide"
            )
        side = self.patch * self.merge
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.most:
            scale = math.sqrt(height * width / self.most)
            tall = max(side, math.floor(height / scale / side) * side)
            wide = max(side, math.floor(width / scale / side) * side)
        elif tall * wide < self.least:
            scale = math.sqrt(self.least / (height * width))
            tall = math.ceil(height * scale / side) * side
            wide = math.ceil(width * scale / side) * side
        return tall, wide

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """How many tokens high and wide an image is."""
        side = self.patch * self.merge
        tall, wide = self.resized(height, width)
        return tall // side, wide // side


def read_processor(folder: Path) -> ImageProcessor:
    """The processor of a model's folder. FileNotFoundError if it has none, ValueError for a setting
    that is not supported; both name the file."""
    file, content = _content(folder)
    kind = content.get("image_processor_type")
    if kind is not None and kind not in (KIND, f"{KIND}Fast", f"{KIND}Pil"):
        raise ValueError(f"{file}: image_processor_type is {kind!r:.80}; {KIND} is supported")
    for key, values in FIXED.items():
        if (value := content.get(key)) not in values:
            raise ValueError(f"{file}: {key} is {value!r:.60}; only {values[0]!r} is supported")
    least, most = _pixels(file, content)
    return ImageProcessor(
        least=least,
        most=most,
        patch=count(file, content, "patch_size", default=PATCH),
        merge=count(file, content, "merge_size", default=MERGE),
        frames=count(file, content, "temporal_patch_size", default=FRAMES),
        mean=_channels(file, content, "image_mean", MEAN),
        std=_channels(file, content, "image_std", STD),
        rescale=number(file, content, "rescale_factor", default=RESCALE),
    )


def _content(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that has the settings, and the settings."""
    whole, file = folder / WHOLE_FILE, folder / FILE
    if whole.is_file():
        content = read_json(whole)
        if SECTION in content:
            return whole, section(whole, content, SECTION)
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {FILE}, which belongs to the model: `tinsmith pull` fetches it"
        )
    return file, read_json(file)


def _pixels(file: Path, content: dict[str, Any]) -> tuple[int, int]:
    """The least and the most pixels: two keys of their own win over those of the size."""
    size = content.get("size")
    size = {"shortest_edge": LEAST, "longest_edge": MOST} if size is None else size
    if not isinstance(size, dict):
        raise ValueError(f"{file}: size should be an object, found {size!r:.60}")
    least, most = (
        count(file, size, edge) if content.get(key) is None else count(file, content, key)
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    if least > most:
        raise ValueError(f"{file}: an image can't have {least} pixels or more, and at most {most}")
    return least, most


def _channels(
    file: Path, content: dict[str, Any], key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """A number for each of the three channels: std's are positive."""
    value = content.get(key)
    value = list(default) if value is None else value
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{file}: {key} should be a list of 3 numbers, found {value!r:.60}")
    red, green, blue = (
        0.0 if part == 0 and key == "image_mean" else number(file, {key: part}, key)
        for part in value
    )
    return red, green, blue
