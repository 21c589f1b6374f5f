"""Models that see, with little room: features and pages that come and go, kept forwards, recomputed
layers, interrupted towers, and images whose pixels were freed change no number."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.sampler_loop import finish, run, step_until_interrupted
from support.tiny_models import DEVICE, assert_same, call, cpu_only, datum, randomize
from support.vision_models import folder, held, ids_of, loaded, picture
from tinsmith import _core
from tinsmith.models import registry

pytestmark = pytest.mark.usefixtures("on")
NAME, HYBRID = "qwen3_vl", "qwen3_5"
names = pytest.mark.parametrize("name", (NAME, pytest.param(HYBRID, marks=cpu_only)))


def fresh(name: str, device: str, memory: Callable[[_core.Model], int]) -> _core.Model:
    """A model that takes its share of so much memory for features."""
    model = registry.load_model(folder(name), device=device, threads=1)
    assert model.vision
    model.core.tower_open(model.vision.config, model.vision.kind, memory=memory(model.core))
    for piece in registry.read_tower(model, model.core.tower_slots):
        piece.load(model.core)
    model.core.tower_seal()
    return model.core


@functools.cache
def _narrow(name: str, device: str) -> _core.Model:
    return fresh(name, device, lambda core: 1)


def narrow(name: str) -> _core.Model:
    """A model that keeps no features beside those of a step."""
    return _narrow(name, DEVICE.get())


def image_of(name: str, seed: int, width: int, height: int) -> _core.Image:
    processor = loaded(name).processor
    assert processor
    return held(processor, picture(seed, width, height))


def text_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


def prompts_of(name: str) -> tuple[list[np.ndarray], list[_core.Image]]:
    """Prompts with images over the ends of pages and steps; and those images."""
    tall, wide, small = (
        image_of(name, seed, *size) for seed, size in enumerate(((96, 1200), (900, 64), (31, 31)))
    )
    parts: list[list[Any]] = [
        [text_of(1, 40), tall, text_of(2, 90), wide, text_of(3, 5)],
        [text_of(4, 70)],
        [small, text_of(5, 480), tall, text_of(6, 3), small],
        [text_of(1, 40), tall, text_of(7, 9)],
    ]
    return [ids_of(one) for one in parts], [tall, wide, small]


def scored(ids: np.ndarray) -> Any:
    return datum(ids, np.maximum(np.roll(ids, -1), 0))


@names
def test_features_without_room_are_computed_again_to_the_same_bits(name: str) -> None:
    """In several micro-batches, the first of which has no image."""
    prompts, _images = prompts_of(name)
    data = [scored(prompts[at]) for at in (1, 0, 3, 2)]
    results = []
    for core in (loaded(name).core, narrow(name)):
        adapter = randomize(_core.Adapter(core, rank=4, step_tokens=200))
        results.append((*call(adapter, data), adapter.read("gradients")))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(results[0][2], results[1][2])
    assert narrow(name).features_bytes < loaded(name).core.features_bytes


@names
def test_requests_that_put_each_other_off_within_an_image_draw_the_same(name: str) -> None:
    """A cache that is too small for all of them, and features that stay for one step."""
    prompts, images = prompts_of(name)
    options: dict[str, Any] = {"num_samples": 2, "max_tokens": 70, "prompt_logprobs": True}
    roomy = _core.Sampler(loaded(name).core, tokens=8192)
    wanted = [run(roomy, prompt, **options) for prompt in prompts]
    core = narrow(name)
    sampler, before = _core.Sampler(core, tokens=1024), core.tower_images
    for number, prompt in enumerate(prompts):
        sampler.add(number, prompt, seed=3, client=number, **options)
    for one, other in zip(finish(sampler, *range(len(prompts))), wanted, strict=True):
        assert_same(one, other)
    assert core.tower_images - before > len(images)


def test_what_a_step_has_is_not_evicted_for_what_it_lacks() -> None:
    core = narrow(NAME)
    known, new, newer = (image_of(NAME, seed, 64, 64) for seed in (50, 51, 52))
    core.tower_features(known)
    before = core.tower_images
    call(_core.Adapter(core, rank=1), [scored(ids_of([new, [1, 2], known]))], backward=False)
    assert core.tower_images == before + 1
    core.tower_features(known)
    before = core.tower_images
    run(_core.Sampler(core, tokens=1024), ids_of([newer, [1, 2], known, [3]]), max_tokens=1)
    assert core.tower_images == before + 1


def test_requests_of_several_clients_share_an_image_that_is_new() -> None:
    """Its features are computed in the step in which all of them run it."""
    core = loaded(NAME).core
    image = image_of(NAME, 61, 64, 64)
    ids, others = ids_of([[1], image, [2]]), ids_of([[3], image, [4]])
    sampler, before = _core.Sampler(core, tokens=1024), core.tower_images
    sampler.add(1, ids, client=1, max_tokens=1)
    sampler.add(2, others, client=2, max_tokens=1)
    assert sorted(sampler.step()[1]) == [1, 2]
    assert core.tower_images == before + 1


@pytest.mark.parametrize("keep", (0, 1 << 30))
@names
def test_a_kept_forward_goes_on_after_its_features_went(name: str, keep: int) -> None:
    """Its backward finds them in the activations, or computes them again."""
    prompts, _images = prompts_of(name)
    core, data = loaded(name).core, [scored(prompts[0]), scored(prompts[3])]
    whole = randomize(_core.Adapter(core, rank=4, step_tokens=200))
    logp, _ = call(whole, data)
    halves = randomize(_core.Adapter(core, rank=4, step_tokens=200, keep_bytes=keep))
    tokens = np.concatenate([one.tokens for one in data])
    lengths = np.array([len(one.tokens) for one in data], np.int32)
    targets = np.concatenate([one.targets for one in data])
    found = halves.forward(tokens, lengths, targets, np.ones(2, np.int32), keep=True)
    np.testing.assert_array_equal(found, np.concatenate(logp))
    core.features_drop()
    halves.backward(-np.ones(len(targets), np.float32))
    np.testing.assert_array_equal(halves.read("gradients"), whole.read("gradients"))


@names
def test_recomputed_layers_have_their_images_rows(name: str) -> None:
    """A step that keeps the least: deepstack's additions are in what is kept."""
    prompts, _images = prompts_of(name)
    core, one = loaded(name).core, scored(prompts[0])
    gradients, least = [], _core.Adapter(core, rank=4).step_least(len(one.tokens))
    for step_bytes in (0, least):
        adapter = randomize(_core.Adapter(core, rank=4, step_bytes=step_bytes))
        call(adapter, [one])
        gradients.append((adapter.read("gradients"), core.training_bytes))
        core.trim()
    np.testing.assert_array_equal(gradients[0][0], gradients[1][0])
    assert gradients[1][1] < gradients[0][1]


def test_an_interrupted_tower_leaves_nothing_and_runs_again() -> None:
    core = loaded(NAME).core
    image = image_of(NAME, 70, 900, 900)
    ids = ids_of([[1, 2], image, [3]])
    core.features_drop()
    wanted = run(_core.Sampler(core, tokens=2048), ids)
    core.features_drop()
    sampler, number = _core.Sampler(core, tokens=2048), 0

    def add() -> None:
        nonlocal number
        core.features_drop()
        sampler.add(number := number + 1, ids, seed=3, max_tokens=5)

    step_until_interrupted(sampler, add)
    for left in range(number + 1):
        sampler.cancel(left)
    assert_same(run(sampler, ids), wanted)
    adapter, ended = _core.Adapter(core, rank=2), threading.Event()

    def interrupt() -> None:
        while not ended.is_set():
            adapter.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(10_000):
                core.features_drop()
                call(adapter, [scored(ids)], backward=False)
    finally:
        ended.set()
        thread.join()
    [[found], _] = call(adapter, [scored(ids)], backward=False)
    np.testing.assert_array_equal(found, call(_core.Adapter(core, rank=2), [scored(ids)])[0][0])


def test_a_request_keeps_the_pixels_of_its_images() -> None:
    """An image that goes after its request came is no black one."""
    core = loaded(NAME).core
    prompts, images = prompts_of(NAME)
    core.features_drop()
    wanted = run(_core.Sampler(core, tokens=2048), prompts[0])
    core.features_drop()
    sampler = _core.Sampler(core, tokens=2048)
    sampler.add(0, prompts[0], max_tokens=5, seed=3)
    images.clear()
    assert_same(*finish(sampler, 0), wanted)


@cpu_only
def test_an_image_whose_pixels_were_freed_is_a_sentence() -> None:
    core, image = loaded(NAME).core, image_of(NAME, 80, 64, 64)
    ids = ids_of([[1], image])
    del image
    with pytest.raises(ValueError, match=r"whose ids begin with -\d+ were freed: keep the image"):
        call(_core.Adapter(core, rank=2), [scored(ids)])
    sampler = _core.Sampler(core, tokens=1024)
    with pytest.raises(ValueError, match="were freed: keep the image"):
        sampler.add(1, ids)
    assert run(sampler, np.arange(3, dtype=np.int32))["samples"]


@cpu_only
@pytest.mark.parametrize("first", (-(1 << 31), -(1 << 31) + 4, -(1 << 19) + 4))
def test_ids_that_are_not_free_are_given_to_no_image(first: int) -> None:
    """Those of other images, and those that no 32 bits hold."""
    pixels = np.zeros(2 * 3 * 32 * 32 * 3, np.uint8)
    other = _core.Image(pixels, 2, 3, -(1 << 19))
    with pytest.raises(ValueError, match=f"6 ids from {first} on are not free"):
        _core.Image(pixels, 2, 3, first)
    assert _core.Image(pixels, 2, 3).first < other.first


@cpu_only
def test_the_features_that_were_used_last_stay() -> None:
    """As many as a sixteenth of what the weights leave has room for: here, of two images."""
    one = 3 * 4 * 64 * 4  # the merger's and two levels of deepstack's, of four rows
    core = fresh(NAME, DEVICE.get(), lambda core: core.held_bytes + 16 * 2 * one)
    first, second, third = (image_of(NAME, seed, 64, 64) for seed in (90, 91, 92))
    for image, computed in (
        (first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4), (third, 5),
        (second, 5),
    ):  # fmt: skip
        core.tower_features(image)
        assert core.tower_images == computed
        assert core.features_bytes == min(computed, 2) * one


@cpu_only
def test_a_request_that_is_done_lets_go_of_its_images() -> None:
    """Other pixels under the same ids are taken where nobody has any."""
    image = image_of(NAME, 93, 64, 64)
    first, ids, other = image.first, ids_of([[1], image]), 255 - np.array(image.pixels)
    run(_core.Sampler(loaded(NAME).core, tokens=1024), ids)
    del image
    np.testing.assert_array_equal(_core.Image(other, 2, 2, first).pixels, other)


def test_text_before_an_image_does_not_wait_for_it() -> None:
    """It runs in the step that computes another image."""
    core = loaded(NAME).core
    one, other = (image_of(NAME, seed, 64, 64) for seed in (94, 95))
    sampler = _core.Sampler(core, tokens=4096)
    sampler.add(1, ids_of([[1], one]), client=1, max_tokens=1)
    sampler.add(2, ids_of([text_of(8, 400), other, text_of(9, 200)]), client=2, max_tokens=1)
    assert [sampler.step()[1] for _ in range(2)] == [[1], [1, 2]]


def test_an_image_that_ends_a_prompt_behind_a_cached_page_is_no_token() -> None:
    """Its last row is all that a step runs."""
    sampler = _core.Sampler(loaded(NAME).core, tokens=1024)
    image = image_of(NAME, 96, 64, 64)
    ids = ids_of([text_of(10, 61), image])
    wanted = run(sampler, ids)
    assert_same(run(sampler, ids), wanted)
    assert sampler.reused == 64


def test_an_image_that_ran_is_not_computed_for_the_rows_behind_it() -> None:
    core, image, other = narrow(NAME), *(image_of(NAME, seed, 64, 64) for seed in (97, 98))
    ids = ids_of([image, text_of(11, 600)])
    sampler, before = _core.Sampler(core, tokens=1024), core.tower_images
    sampler.add(1, ids, max_tokens=3)
    sampler.step()
    core.tower_features(other)  # for which those of the first are evicted
    finish(sampler, 1)
    assert core.tower_images == before + 2
