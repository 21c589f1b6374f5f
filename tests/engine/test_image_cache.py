"""The images of a process: one decoding for each, the same ids for the same image, pixels while
they are in use or recent."""

import gc
import io
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from support.images import PROCESSOR, Core, png
from tinsmith.engine import image_cache
from tinsmith.engine.image_cache import EncodedImage, ImageCache, look, pixel_bytes


def encoded(seed: int, size: tuple[int, int] = (40, 60)) -> EncodedImage:
    data = png(seed, size)
    return look(lambda: data, "png", PROCESSOR)


def test_the_same_image_is_decoded_once_and_has_the_same_ids() -> None:
    core = Core()
    cache = ImageCache(core)
    first, other = cache.hold(encoded(1)), cache.hold(encoded(2))
    assert cache.hold(encoded(1)) is first and (cache.decoded, cache.found) == (2, 1)
    high, wide = PROCESSOR.tokens(40, 60)
    assert first.ids.tolist() == [-1 - row for row in range(high * wide)]
    assert other.ids.max() == first.ids.min() - 1 and other.ids.dtype == np.int32
    shape = PROCESSOR.resized(40, 60)
    plain = Image.open(io.BytesIO(png(1, (40, 60)))).resize(shape[::-1], Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(core.pixels[first.core.first], np.asarray(plain))
    assert pixel_bytes([first, other, first]) == first.nbytes + other.nbytes


def test_bytes_format_and_processor_make_an_image() -> None:
    """A file's other format, other bytes, or other settings: another image."""
    data = png(1, (40, 60))
    keys = {look(lambda: data, "png", PROCESSOR).key, encoded(2).key}
    keys.add(look(lambda: data, "png", replace(PROCESSOR, mean=(0.5, 0.5, 0.25))).key)
    assert len(keys) == 3 and encoded(1).key in keys


def test_pixels_go_with_their_last_holder_but_for_the_recent_ones() -> None:
    core = Core()
    cache = ImageCache(core, recent_bytes=2 * encoded(1).nbytes)
    gone = [weakref.ref(cache.hold(encoded(seed)).core) for seed in range(4)]
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, False, False]
    assert cache.bytes == 2 * encoded(1).nbytes
    held = cache.hold(encoded(0))  # decoded again, under its first ids
    assert held.core.first == -1 and core.added == [0, 0, 0, 0, -1]
    for seed in range(10, 13):
        cache.hold(encoded(seed))
    assert cache.hold(encoded(0)) is held and cache.decoded == 8  # because it is held


def test_a_large_image_takes_no_place_among_the_recent_ones() -> None:
    cache = ImageCache(Core(), recent_bytes=encoded(1).nbytes - 1)
    held = cache.hold(encoded(1))
    assert cache.bytes == 0 and cache.hold(encoded(1)) is held


def test_what_decoding_takes_is_told_before_it_begins() -> None:
    cache = ImageCache(Core())
    small, large = encoded(1, (40, 60)), encoded(2, (120, 80))
    most = 2 * large.length + image_cache.DECODING_BYTES * 120 * 80
    assert cache.needs([small, large, small]) == most + small.nbytes + large.nbytes
    cache.hold(large)
    most = 2 * small.length + image_cache.DECODING_BYTES * 40 * 60
    assert cache.needs([small, large]) == most + small.nbytes
    cache.hold(small)
    assert cache.needs([small, large]) == 0 == cache.needs([])


def test_ids_of_images_that_were_long_ago_are_forgotten_and_never_given_again(monkeypatch) -> None:
    monkeypatch.setattr(image_cache, "KNOWN_MAX", 3)
    core = Core()
    cache = ImageCache(core, recent_bytes=0)
    firsts = [cache.hold(encoded(seed)).core.first for seed in range(5)]
    assert len(set(firsts)) == 5
    assert cache.hold(encoded(4)).core.first == firsts[4]
    assert cache.hold(encoded(0)).core.first < min(firsts)


def test_the_process_has_one_cache_and_its_counts(monkeypatch) -> None:
    monkeypatch.setattr(image_cache, "_made", [])
    monkeypatch.setattr(image_cache._core, "Images", Core, raising=False)
    assert image_cache.counts() == (0, 0, 0)
    cache = image_cache.images()
    assert image_cache.images() is cache
    held = [cache.hold(encoded(1)) for _ in range(3)]
    assert image_cache.counts() == (1, 2, held[0].nbytes)


def test_a_damaged_file_leaves_nothing() -> None:
    data = png(1, (40, 60))
    cut = data[:60] + data[-12:]
    core = Core()
    cache = ImageCache(core)
    with pytest.raises(ValueError, match="ends early or is damaged"):
        cache.hold(look(lambda: cut, "png", PROCESSOR))
    assert not core.added and (cache.decoded, cache.bytes) == (0, 0)


def test_threads_that_want_one_image_get_one() -> None:
    core = Core()
    cache = ImageCache(core)
    start, found = threading.Barrier(4), list[image_cache.HeldImage]()

    def ask() -> None:
        start.wait()
        found.extend(cache.hold(encoded(seed)) for seed in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 20 == len(core.added)
