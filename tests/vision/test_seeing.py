"""Models that see have one and the same number: in the trainer, the sampler, the prefix cache, a
packed batch, on several stages. And which ids are an image's."""

import contextlib
from typing import Any

import numpy as np
import pytest
from support.emulated_card import emulated_cards
from support.sampler_loop import finish, run
from support.tiny_models import DEVICE, assert_same, call, cpu_only, datum, randomize
from support.vision_models import SEEING, folder, held, ids_of, loaded, loaded_on, picture
from tinsmith import _core
from tinsmith.models import registry

pytestmark = pytest.mark.usefixtures("on")
# In the emulator one of each kind of text model: the others' kernels are the same.
EVERYWHERE = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
NAMES = [name if name in EVERYWHERE else pytest.param(name, marks=cpu_only) for name in SEEING]


def image_of(name: str, seed: int, width: int, height: int) -> _core.Image:
    processor = loaded(name).processor
    assert processor
    return held(processor, picture(seed, width, height))


def parts_of(name: str) -> list[Any]:
    """Text and images: first, last, two side by side, one of them twice."""
    sizes = (96, 200), (190, 60), (31, 31)
    tall, wide, small = (image_of(name, seed, *size) for seed, size in enumerate(sizes))
    text = np.random.default_rng(5).integers(0, 96, 90).tolist()
    return [tall, text[:5], small, small, text[5:80], wide, text[80:], tall]


def scored(ids: np.ndarray) -> np.ndarray:
    """Targets: the next token, and 0 where it is an image's."""
    return np.maximum(np.roll(ids, -1), 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_samplers_numbers_are_the_trainers(name: str) -> None:
    """Behind images, in a group, and again from the prefix cache; None is said of images' rows."""
    core = loaded(name).core
    adapter = randomize(_core.Adapter(core, rank=4, alpha=8.0))
    parts = parts_of(name)
    ids = ids_of(parts)
    sampler = _core.Sampler(core, tokens=4096)
    asked = {"num_samples": 3, "max_tokens": 12, "prompt_logprobs": True, "topk_prompt": 2}
    first = run(sampler, ids, adapter, **asked)
    for _ in range(2):
        assert_same(run(sampler, ids, adapter, **asked), first)
    assert sampler.reused > 0
    [[alone], _] = call(adapter, [datum(ids, scored(ids))])
    images = ids < 0
    assert images.sum() > 20
    np.testing.assert_array_equal(
        np.isnan(first["prompt_logprobs"]), images | (np.arange(len(ids)) == 0)
    )
    np.testing.assert_array_equal(
        first["prompt_logprobs"][1:][~images[1:]], alone[:-1][~images[1:]]
    )
    assert not first["topk_ids"][images].any() and (first["topk_logprobs"][images] < -9e4).all()
    for sample in first["samples"]:
        whole = np.concatenate([ids, sample["tokens"]]).astype(np.int32)
        [[trained], _] = call(adapter, [datum(whole, scored(whole))], backward=False)
        np.testing.assert_array_equal(trained[len(ids) - 1 : -1], sample["logprobs"])


def trained(name: str, device: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Log-probabilities of packed datums, and gradients; and the datums alone have theirs."""
    parts = parts_of(name)
    data = [datum(ids, scored(ids)) for ids in map(ids_of, (parts, parts[1:4], parts[3:]))]
    adapter = randomize(_core.Adapter(loaded_on(name, device).core, rank=4, alpha=8.0))
    found, gradients = call(adapter, data)[0], adapter.read("gradients")
    for one, packed in zip(data, found, strict=True):
        np.testing.assert_array_equal(call(adapter, [one], backward=False)[0][0], packed)
    return found, gradients


@pytest.mark.parametrize("name", NAMES)
def test_packed_datums_and_stages_have_the_bits_of_one(name: str) -> None:
    """Deepstack's rows are where their layers are."""
    device = DEVICE.get()
    second = f"{device}:1" if "cuda" in device else device
    cards = emulated_cards(2) if device == "cuda-emulated" else contextlib.nullcontext()
    with cards:  # which have a mode of their own
        found, gradients = trained(name, device)
        if device == "cuda":
            return  # one card is here
        others, again = trained(name, f"{device},{second}")
        loaded_on.cache_clear()
    for one, other in zip(found, others, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(gradients, again)


@pytest.mark.parametrize("name", ("qwen3_vl", "qwen3_5"))
def test_text_has_the_bits_of_a_model_with_one_axis(name: str) -> None:
    """M-RoPE turns text as plain rope does: its three positions are equal."""
    model = loaded(name)
    plain = {key: value for key, value in model.config.items() if key != "rope_axis"}
    assert len(plain) < len(model.config)
    core = _core.Model(plain, model.inv_freq, weights=model.kind, device=model.device, threads=1)
    for piece in registry.read_weights(model, core.slots):
        piece.load(core)
    core.seal()
    one = datum(np.random.default_rng(1).integers(0, 96, 150))
    found = [
        call(randomize(_core.Adapter(each, rank=4)), [one])[0][0] for each in (model.core, core)
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", ("qwen3_vl", "qwen3_5"))
def test_features_that_were_evicted_come_back_with_their_bits(name: str) -> None:
    model = registry.load_model(folder(name), device=DEVICE.get(), threads=1)
    registry.load_tower(model)
    core, image = model.core, image_of(name, 7, 96, 200)
    before, held = core.tower_features(image), core.features_bytes
    np.testing.assert_array_equal(core.tower_features(image), before)
    assert core.tower_images == 1 and held > 0
    core.features_drop()
    assert core.features_bytes == 0
    np.testing.assert_array_equal(core.tower_features(image), before)
    assert core.tower_images == 2 and core.features_bytes == held
    core.tower_close()
    assert core.features_bytes == 0 and core.tower_slots == []
    registry.load_tower(model)
    np.testing.assert_array_equal(core.tower_features(image), before)
    assert core.features_bytes == held


def test_a_step_computes_one_new_image_so_that_others_do_not_wait() -> None:
    core = loaded("qwen3_vl").core
    sampler, parts = _core.Sampler(core, tokens=4096), []
    for seed in range(20, 24):
        parts += [image_of("qwen3_vl", seed, 64, 64), [1, 2, 3]]
    sampler.add(1, np.arange(40, dtype=np.int32), max_tokens=30)
    sampler.step()
    sampler.add(2, ids_of(parts), max_tokens=1)
    counts = []
    while True:
        before = core.tower_images
        drawn, done = sampler.step()
        counts.append(core.tower_images - before)
        assert any(request == 1 for request, *_ in drawn), "the other request waits"
        if 2 in done:
            break
    assert max(counts) == 1 and sum(counts) == 4
    sampler.take(2)
    finish(sampler, 1)


BAD: dict[str, tuple[Any, str]] = {
    "no image's": ([1, -5], "the token at position 1 is -5; the model's ids are 0 to"),
    "a masked target's": ([-100], "the token at position 0 is -100; the model's ids"),
    "a cut image's": (lambda ids: [1, *ids[:-1]], "at position 1 is a row of an image whose other"),
    "an image's end": (lambda ids: ids[1:], "at position 0 is a row of an image whose other"),
    "turned rows": (lambda ids: ids[::-1], "at position 0 is a row of an image whose other rows"),
}


@cpu_only
@pytest.mark.parametrize("case", BAD)
def test_ids_of_no_whole_image_are_refused(case: str) -> None:
    made, sentence = BAD[case]
    image = image_of("qwen3_vl", 1, 96, 200)
    ids = ids_of([image])
    bad = np.array(made(ids.tolist()) if callable(made) else made, np.int32)
    core = loaded("qwen3_vl").core
    with pytest.raises((ValueError, IndexError), match=f"datum 0: .*{sentence}|{sentence}"):
        call(_core.Adapter(core, rank=2), [datum(bad, np.maximum(bad, 0))])
    sampler = _core.Sampler(core, tokens=1024)
    with pytest.raises((ValueError, IndexError), match=sentence.replace("the token", "token")):
        sampler.add(1, bad)


@cpu_only
def test_a_model_without_its_tower_refuses_images() -> None:
    model = registry.load_model(folder("qwen3_5"), device=DEVICE.get(), threads=1)
    parts = [image_of("qwen3_5", 1, 96, 200), [1, 2]]
    ids = ids_of(parts)
    with pytest.raises(ValueError, match="datum 0: the token is an image's; the model's"):
        call(_core.Adapter(model.core, rank=2), [datum(ids, scored(ids))])


@cpu_only
def test_an_image_is_known_by_its_ids_and_keeps_its_pixels_while_held() -> None:
    pixels = np.asarray(picture(9, 96, 64)).reshape(-1)
    image = _core.Image(pixels, 2, 3)
    other = _core.Image(pixels, 2, 3)
    assert (image.rows, image.high, image.wide, image.side, image.nbytes) == (6, 2, 3, 32, 18432)
    assert other.first == image.first - 6
    np.testing.assert_array_equal(image.pixels, pixels)
    first = image.first
    del image
    again = _core.Image(pixels, 2, 3, first)
    assert again.first == first
    with pytest.raises(ValueError, match="are those of an image of 2 × 3 tokens"):
        _core.Image(pixels, 3, 2, first)
    with pytest.raises(ValueError, match="18432 bytes are no image of 2 by 4 tokens"):
        _core.Image(pixels, 2, 4)
    with pytest.raises(ValueError, match="has 1 to 16384 tokens on each side"):
        _core.Image(pixels, 0, 3)
