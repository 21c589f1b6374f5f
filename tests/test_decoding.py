"""The decoder that the server and the face share, where the cache is smaller than the context."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tinsmith.engine.decoding import Decoder, SampleRequest, SampleResult, _Text
from tinsmith.files.families import LoadedModel, load_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

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


def test_a_cache_that_is_in_use_is_not_dropped(base) -> None:
    decoder, future = Decoder(), Future[SampleResult]()
    decoder.open(base, PAGE)
    decoder.add(base, None, SampleRequest(PROMPT, max_tokens=2), future)
    assert not decoder.shut(base.path) and decoder.is_open(base)
    while decoder.active:
        decoder.step()
    assert len(future.result(0).samples[0].tokens) == 2
    assert decoder.shut(base.path) and not decoder.is_open(base)


def test_a_stop_text_begins_with_the_space_before_a_word() -> None:
    """Which a tokenizer leaves out at the beginning of what it decodes."""
    words = {"▁one": 0, "▁two": 1, "▁three": 2}
    tokenizer, text = Tokenizer(WordLevel(words, unk_token="▁one")), _Text()
    tokenizer.decoder = decoders.Metaspace()
    assert [text.read(token, tokenizer, (" three",)) for token in range(3)] == [False, False, True]


def test_only_the_last_n_are_scored_where_draws_need_all_rows(base) -> None:
    asked = {"prompt_logprobs": True, "topk_prompt": 2, "prompt_draws": 1, "max_tokens": 1}
    whole = decode(base, PAGE, SampleRequest(PROMPT, **asked))
    found = decode(base, PAGE, SampleRequest(PROMPT, last_n=3, **asked))
    assert found.prompt_logprobs is not None and found.topk_ids is not None
    assert np.isnan(found.prompt_logprobs[:-3]).all() and not found.topk_ids[:-3].any()
    np.testing.assert_array_equal(found.prompt_logprobs[-3:], whole.prompt_logprobs[-3:])
    np.testing.assert_array_equal(found.topk_logprobs[-3:], whole.topk_logprobs[-3:])
    np.testing.assert_array_equal(found.drawn_ids, whole.drawn_ids)
