"""Models that see against transformers and PEFT: the tower's rows, log-probabilities of sequences
with images, and gradients."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import vision_reference
from support.tiny_models import (
    assert_near,
    call,
    cpu_only,
    cut,
    datum,
    error,
    in_bf16,
    randomize,
)
from support.vision_models import SEEING, folder, held, ids_of, loaded, picture
from tinsmith import _core
from tinsmith.models.registry import LoadedModel

pytestmark = pytest.mark.usefixtures("on")
MIXTURES = [name for name in SEEING if "moe" in name]
# A mixture's row near a tie goes to another expert in bf16, by luck.
NAMES = [
    *(name for name in SEEING if name not in MIXTURES),
    *(pytest.param(name, marks=cpu_only) for name in MIXTURES),
]
# Lengths of text and sizes of images: two images follow one another, one is first, one is last.
LAYOUTS: dict[str, list[int | tuple[int, int]]] = {
    "one": [4, (100, 70), 5],
    "two in a row": [3, (64, 64), (200, 64), 7],
    "first and last": [(64, 180), 6, (70, 70)],
    "beyond a page": [40, (256, 256), 30, (128, 96), 9],
}


def parts_of(layout: str) -> list[list[int] | Image.Image]:
    rng = np.random.default_rng(len(layout))
    return [
        rng.integers(0, 120, part).tolist() if isinstance(part, int) else picture(number, *part)
        for number, part in enumerate(LAYOUTS[layout])
    ]


class Sequence:
    """Tokens and images in the engine, for as long as it lives."""

    def __init__(self, model: LoadedModel, parts: list[list[int] | Image.Image]) -> None:
        assert model.processor
        self.images = {
            number: held(model.processor, part)
            for number, part in enumerate(parts)
            if isinstance(part, Image.Image)
        }
        self.ids = ids_of([self.images.get(number, part) for number, part in enumerate(parts)])
        # A row before an image has some token as its target.
        self.targets = np.maximum(np.roll(self.ids, -1), 0)


@torch.no_grad()
def scores(name: str, layout: str, adapter: _core.Adapter | None, one: Any, dtype: Any) -> Any:
    """torch's log-probabilities of the targets."""
    place = folder(name)
    model = vision_reference.with_lora(place, adapter, dtype) if adapter else None
    found = vision_reference.log_probabilities(place, parts_of(layout), model, dtype)
    wanted = torch.from_numpy(one.targets.reshape(len(one.tokens), -1).astype(np.int64))
    return found.gather(1, wanted).reshape(one.targets.shape).numpy()


@pytest.mark.parametrize("size", [(64, 64), (100, 70), (300, 40), (90, 256)])
@pytest.mark.parametrize("name", SEEING)
def test_an_images_rows_are_transformers(name: str, size: tuple[int, int]) -> None:
    image, model = picture(7, *size), loaded(name)
    assert model.processor and model.vision
    one = held(model.processor, image)

    def wanted(level: int, dtype: torch.dtype) -> np.ndarray:
        found = vision_reference.features(folder(name), image, dtype)
        return (found.main, *found.deep)[level].double().numpy()

    found = np.asarray(model.core.tower_features(one))
    if in_bf16():
        found = (found.astype(np.uint32) << 16).view(np.float32)
    levels = found.reshape(1 + len(model.vision.sizes.deep), one.rows, -1)
    for level, rows in enumerate(levels):
        assert_near(rows, functools.partial(wanted, level), f"{name} {level}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_behind_images_equal_transformers(name: str, layout: str) -> None:
    sequence = Sequence(loaded(name), parts_of(layout))
    vocab = SEEING[name].config["vocab_size"]
    one = datum(sequence.ids, np.tile(np.arange(vocab), (len(sequence.ids), 1)))
    (found,), _ = call(_core.Adapter(loaded(name).core, rank=1), [one], backward=False)
    assert_near(found, functools.partial(scores, name, layout, None, one))


@cpu_only
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SEEING)
def test_gradients_behind_images_equal_pefts(name: str, layout: str) -> None:
    """The tower is frozen, so they are those of the language model with its rows."""
    model = loaded(name)
    sequence = Sequence(model, parts_of(layout))
    adapter = randomize(_core.Adapter(model.core, rank=2), scale=0.02)
    one = datum(sequence.ids, sequence.targets)
    (found,), _ = call(adapter, [one])
    torchs = vision_reference.with_lora(folder(name), adapter)
    table = vision_reference.log_probabilities(folder(name), parts_of(layout), torchs)
    wanted = table.gather(1, torch.from_numpy(one.targets.astype(np.int64))[:, None])[:, 0]
    assert error(found, wanted) < 1e-5
    (-wanted.sum()).backward()
    parameters = dict(torchs.named_parameters())
    for key, gradient in cut(adapter, adapter.read("gradients")).items():
        grad = parameters[key].grad
        assert grad is not None and error(gradient, grad.T) < 5e-5, key


@cpu_only
@pytest.mark.parametrize("name", SEEING)
def test_another_image_of_that_size_has_other_scores(name: str) -> None:
    model = loaded(name)
    adapter, found = _core.Adapter(model.core, rank=1), []
    for seed in (1, 2):
        sequence = Sequence(model, [[5, 6], picture(seed, 96, 64), [7, 8, 9]])
        one = datum(sequence.ids, sequence.targets)
        found.append(call(adapter, [one], backward=False)[0][0])
    np.testing.assert_array_equal(found[0][:2], found[1][:2])  # before it, all is the same
    assert (np.abs(found[0][2:] - found[1][2:]) > 1e-4).all()
