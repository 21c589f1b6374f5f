"""The decoder that the server and the face share, where the cache is smaller than the context."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tinsmith import _core
from tinsmith.engine import decoding
from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import Decoder, SampleDelta, SampleRequest, SampleResult
from tinsmith.engine.errors import RequestError
from tinsmith.models.registry import LoadedModel, load_model

PAGE = 64
PROMPT = np.arange(5, 15, dtype=np.int32)


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> LoadedModel:
    return load_model(tiny_model_dir, threads=1)


def decode(base: LoadedModel, cache_tokens: int, request: SampleRequest) -> SampleResult:
    decoder, future = Decoder(), Future[SampleResult]()
    decoder.open(base, cache_tokens)
    decoder.add(base, None, request, future)
    while decoder.active:
        decoder.step()
    return future.result(0)


def test_without_max_tokens_a_sample_goes_on_to_the_end_of_the_cache(base) -> None:
    request = SampleRequest(PROMPT, num_samples=2, seed=1)
    roomy, small = (decode(base, tokens, request) for tokens in (4 * base.context, PAGE))
    for long, short in zip(roomy.samples, small.samples, strict=True):
        assert len(long.tokens) == base.context - len(PROMPT)
        count = len(short.tokens)
        assert PAGE - len(PROMPT) <= count < len(long.tokens) and short.stop_reason == "length"
        np.testing.assert_array_equal(short.tokens, long.tokens[:count])
        np.testing.assert_array_equal(short.logprobs, long.logprobs[:count])


def test_rows_of_images_are_given() -> None:
    """Whatever the engine computed there; and the tokens before the last n have no scores."""
    prompt = np.asarray([5, -1, -2, 6, 7], np.int32)
    for last_n, scored, given in ((None, [0, 3, 4], [1, 2]), (2, [3, 4], []), (3, [3, 4], [2])):
        raw = {
            "samples": [],
            "prompt_logprobs": np.arange(-5, 0).astype(np.float32),
            "topk_ids": np.ones((5, 2), np.int32),
            "topk_logprobs": np.full((5, 2), -1, np.float32),
            **dict.fromkeys(("target_logprobs", "drawn_ids", "drawn_logprobs", "prompt_reused")),
        }
        request = SampleRequest(prompt, prompt_logprobs=True, topk_prompt=2, last_n=last_n)
        item = decoding._Pending(request, Future(), None, None, None, Call("sample"))
        found = decoding._result(item, raw)
        assert np.flatnonzero(found.prompt_logprobs < 0).tolist() == scored
        assert np.flatnonzero(found.prompt_logprobs == 0).tolist() == given
        assert np.flatnonzero(found.topk_ids[:, 0]).tolist() == scored
        assert (found.topk_logprobs[found.topk_ids == 0] == -99999).all()


def test_max_tokens_that_a_cache_can_not_hold_are_refused(base) -> None:
    told = f"needs a cache of 73 tokens; the sampler's holds {PAGE}"
    with pytest.raises(MemoryError, match=told):
        decode(base, PAGE, SampleRequest(PROMPT, max_tokens=64))


def test_a_stop_text_in_the_last_token_that_there_is_room_for(base) -> None:
    """The engine has ended the sample already, and its request, when the text is seen."""
    free = decode(base, PAGE, SampleRequest(PROMPT, seed=2)).samples[0]
    letters = tuple("abcdefghijklmnopqrstuvwxyz ")
    stopped = decode(base, PAGE, SampleRequest(PROMPT, seed=2, stop_texts=letters)).samples[0]
    seen = len(stopped.tokens)
    np.testing.assert_array_equal(stopped.tokens, free.tokens[:seen])
    request = SampleRequest(PROMPT, seed=2, max_tokens=seen, stop_texts=letters)
    last = decode(base, PAGE, request).samples[0]
    np.testing.assert_array_equal(last.tokens, stopped.tokens)
    assert (last.stop_reason, stopped.stop_reason) == ("stop", "stop")


def test_what_running_sequences_hold_of_a_cache(base) -> None:
    """Pages that are only remembered are free for others."""
    decoder, future = Decoder(), Future[SampleResult]()
    decoder.open(base, 4 * PAGE)
    [(_, size, _)] = decoder.caches()
    decoder.add(base, None, SampleRequest(np.resize(PROMPT, PAGE), max_tokens=2), future)
    assert decoder.cache_used == 0
    decoder.step()
    held = decoder.cache_used / size
    while decoder.active:
        decoder.step()
    assert 0 < held <= 0.5 and decoder.cache_used == 0


def test_a_cache_that_is_in_use_is_not_dropped(base) -> None:
    decoder, future = Decoder(), Future[SampleResult]()
    decoder.open(base, PAGE)
    decoder.add(base, None, SampleRequest(PROMPT, max_tokens=2), future)
    assert not decoder.shut(base.path) and decoder.is_open(base)
    while decoder.active:
        decoder.step()
    assert len(future.result(0).samples[0].tokens) == 2
    assert decoder.shut(base.path) and not decoder.is_open(base)


class Unwalked(dict):
    """Of requests under way, which may be thousands: nobody walks through them to find one."""

    def items(self):
        raise AssertionError("it was walked through")

    values = __iter__ = items


def test_a_request_is_cancelled_without_a_look_at_the_others(base) -> None:
    decoder, futures = Decoder(), [Future[SampleResult]() for _ in range(3)]
    decoder.open(base)
    for future in futures:
        decoder.add(base, None, SampleRequest(PROMPT, max_tokens=3, seed=1), future)
    batcher = decoder._batchers[base.path]
    batcher.pending = Unwalked(batcher.pending)
    for _ in range(2):  # the second time it is done
        decoder.cancel(futures[1])
    with pytest.raises(RequestError, match="was cancelled"):
        futures[1].result(0)
    batcher.pending = dict(dict.items(batcher.pending))
    while decoder.active:
        decoder.step()
    decoder.cancel(futures[0])
    wanted = decode(base, 0, SampleRequest(PROMPT, max_tokens=3, seed=1)).samples[0].tokens
    for future in (futures[0], futures[2]):
        np.testing.assert_array_equal(future.result(0).samples[0].tokens, wanted)
    assert not decoder._places


def test_only_the_last_n_are_scored_where_draws_need_all_rows(base) -> None:
    asked = {"prompt_logprobs": True, "topk_prompt": 2, "prompt_draws": 1, "max_tokens": 1}
    whole = decode(base, PAGE, SampleRequest(PROMPT, **asked))
    found = decode(base, PAGE, SampleRequest(PROMPT, last_n=3, **asked))
    assert found.prompt_logprobs is not None and found.topk_ids is not None
    assert np.isnan(found.prompt_logprobs[:-3]).all() and not found.topk_ids[:-3].any()
    np.testing.assert_array_equal(found.prompt_logprobs[-3:], whole.prompt_logprobs[-3:])
    np.testing.assert_array_equal(found.topk_logprobs[-3:], whole.topk_logprobs[-3:])
    np.testing.assert_array_equal(found.drawn_ids, whole.drawn_ids)


def test_a_listener_hears_of_each_token_as_it_is_drawn(base) -> None:
    asked = {"num_samples": 3, "topk_sample": 2, "max_tokens": 20}
    request = SampleRequest(PROMPT, seed=4, stop_texts=("e", "t"), **asked)
    decoder, future, heard = Decoder(), Future[SampleResult](), list[list[SampleDelta]]()
    decoder.open(base)
    decoder.add(base, None, request, future, listener=lambda parts: heard.append(list(parts)))
    silent = Future[SampleResult]()
    decoder.add(base, None, request, silent)
    while decoder.active:
        before = len(heard)
        decoder.step()
        assert len(heard) <= before + 1
    assert all(len(part.tokens) == 1 for parts in heard for part in parts)
    for number, sample in enumerate(future.result(0).samples):
        own = [part for parts in heard for part in parts if part.number == number]
        for key in ("tokens", "logprobs", "topk_ids", "topk_logprobs"):
            joined = np.concatenate([getattr(part, key) for part in own])
            np.testing.assert_array_equal(joined, getattr(sample, key))
            np.testing.assert_array_equal(joined, getattr(silent.result(0).samples[number], key))
        reasons = [part.stop_reason for part in own]
        assert reasons == [None] * (len(own) - 1) + [sample.stop_reason]
    assert len({len(sample.tokens) for sample in future.result(0).samples}) > 1


def test_a_listener_that_fails_ends_its_own_request_alone(base) -> None:
    def fail(parts: object) -> None:
        raise ValueError("nobody listens")

    decoder, futures = Decoder(), [Future[SampleResult]() for _ in range(2)]
    decoder.open(base)
    for future, listener in zip(futures, (fail, None), strict=True):
        request = SampleRequest(PROMPT, seed=4, max_tokens=1)  # drawn and done in one step
        decoder.add(base, None, request, future, listener=listener)
    while decoder.active:
        decoder.step()
    with pytest.raises(RequestError, match="nobody listens"):
        futures[0].result(0)
    assert len(futures[1].result(0).samples[0].tokens) == 1


def test_a_result_that_can_not_be_taken_fails_its_future(
    base, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, future = Decoder(), Future[SampleResult]()
    decoder.open(base)
    decoder.add(base, None, SampleRequest(PROMPT, seed=4, max_tokens=1), future)

    class Full:
        """The batcher's sampler, where no memory is left for a result."""

        def __init__(self, sampler: object) -> None:
            self.sampler = sampler

        def __getattr__(self, name: str) -> object:
            return getattr(self.sampler, name)

        def take(self, number: int) -> None:
            raise MemoryError("no memory is left")

    (batcher,) = decoder._batchers.values()
    monkeypatch.setattr(batcher, "sampler", Full(batcher.sampler))
    while decoder.active:
        decoder.step()
    with pytest.raises(Exception, match="no memory"):
        future.result(0)


def test_what_a_sample_has_drawn_can_be_looked_at_within_its_bounds(base) -> None:
    batcher = _core.Sampler(base.core)
    batcher.add(7, PROMPT, max_tokens=3, seed=1)
    batcher.step()
    assert (
        batcher.look(7, 0, 1)["tokens"].shape == (0,)
        and batcher.look(7, 0, 0)["stop_reason"] is None
    )
    for wrong in ((7, 0, 2), (7, 0, -1), (7, 1, 0), (7, -1, 0), (8, 0, 0)):
        with pytest.raises(ValueError, match="has no sample"):
            batcher.look(*wrong)
