"""Text as its tokens come: whatever the tokens are, the pieces are together the text that
transformers' tokenizers make of all, and it ends where the first stop string does."""

from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some
from support import tokenizer_folders as folders
from tinsmith.chat.text import Reading, Stops, Text, pieces
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

KINDS = {
    "byte-level": folders.qwen,
    "llama 3": folders.llama3,
    "sentencepiece": folders.sentencepiece,
    "metaspace first": lambda: folders.sentencepiece("first"),
    "metaspace never": lambda: folders.sentencepiece("never"),
    "unigram": folders.unigram,
    "wordpiece": folders.wordpiece,
    "words": folders.words,
}
# The same examples each time, however long they take.
same = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
made = cache(lambda kind: KINDS[kind]())
said = cache(lambda: [text for text in folders.texts() if text])


def tokens_of(tokenizer: Tokenizer) -> some.SearchStrategy[list[int]]:
    """Tokens of texts, and any tokens, one behind the other."""
    size = tokenizer.get_vocab_size()
    texts = some.sampled_from(said()).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    anything = some.lists(some.integers(0, size - 1), max_size=6)
    return some.lists(some.one_of(texts, anything), max_size=3).map(
        lambda parts: list(chain.from_iterable(parts))[:24]
    )


def behind(tokenizer: Tokenizer, prompt: list[int], drawn: list[int], skip: bool = True) -> str:
    """What drawn tokens add to a prompt's text."""
    whole, begun = (
        tokenizer.decode(ids, skip_special_tokens=skip) for ids in ([*prompt, *drawn], prompt)
    )
    if isinstance(tokenizer.decoder, decoders.ByteLevel):  # a token may end within a character
        begun = begun if whole.startswith(begun) else begun.rstrip("\ufffd")
    elif not whole.startswith(begun):  # tokens are single bytes, which the drawn ones complete
        end = next(n for n in range(4) if is_text(tokenizer, prompt[: len(prompt) - n]))
        begun = tokenizer.decode(prompt[: len(prompt) - end], skip_special_tokens=skip)
    assert whole.startswith(begun)
    return whole[len(begun) :]


def steps(tokenizer: Tokenizer, prompt: list[int], drawn: list[int]) -> list[str]:
    """What each token adds to the text without special tokens, in whole characters."""
    found, told = [], ""
    for count in range(1, len(drawn) + 1):
        now = told
        if is_text(tokenizer, [*prompt, *drawn[:count]]):
            now = behind(tokenizer, prompt, drawn[:count])
        found.append(now[len(told) :])
        told = now
    return found


def is_text(tokenizer: Tokenizer, tokens: list[int]) -> bool:
    """Whether all bytes make up characters."""
    return "\ufffd" not in tokenizer.decode(tokens, skip_special_tokens=False)


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """A text up to the stop string that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@same
@given(data=some.data())
def test_what_is_read_is_the_text_behind_the_prompt(kind: str, data: some.DataObject) -> None:
    tokenizer = made(kind)
    prompt, drawn = (data.draw(tokens_of(tokenizer)) for _ in range(2))
    assume(is_text(tokenizer, [*prompt, *drawn]))
    reading = Reading(tokenizer, prompt)
    found = [reading.add(token) for token in drawn]
    assert found == steps(tokenizer, prompt, drawn)  # at once, and nothing twice
    assert "".join(found) + reading.end() == behind(tokenizer, prompt, drawn)


@pytest.mark.parametrize("prompt", ([], [0]))
def test_a_first_space_that_is_a_byte_is_stripped_as_transformers_does(prompt: list[int]) -> None:
    tokenizer = made("sentencepiece")
    space = tokenizer.token_to_id("<0x20>")
    for drawn in ([space], [0, space], [space, space]):
        reading = Reading(tokenizer, prompt)
        found = "".join(reading.add(token) for token in drawn) + reading.end()
        assert found == tokenizer.decode([*prompt, *drawn])


@pytest.mark.parametrize("kind", KINDS)
@same
@given(data=some.data())
def test_it_ends_at_the_first_stop_in_the_one_text(kind: str, data: some.DataObject) -> None:
    """Special tokens are part of the text that is searched, and of none that is read."""
    tokenizer = made(kind)
    prompt, drawn = (data.draw(tokens_of(tokenizer)) for _ in range(2))
    assume(drawn and is_text(tokenizer, [*prompt, *drawn]))
    special = {t for t, about in tokenizer.get_added_tokens_decoder().items() if about.special}
    parts = [
        (
            tokenizer.decode([token], skip_special_tokens=False) if token in special else one,
            token in special,
        )
        for token, one in zip(drawn, steps(tokenizer, prompt, drawn), strict=True)
    ]
    text = "".join(one for one, _ in parts)
    assume(text)
    cut = some.tuples(some.integers(0, len(text) - 1), some.integers(1, 8))
    places = data.draw(some.lists(cut, max_size=3))
    stops = [text[at : at + size] for at, size in places] + data.draw(
        some.lists(some.text("the <|>_\n", min_size=1, max_size=4), max_size=2)
    )
    wanted, stop = first_stop(text, stops)
    shown, left = "", len(wanted)
    for one, is_special in parts:
        shown += "" if is_special else one[:left]
        left = max(0, left - len(one))
    reading, found, ended = Reading(tokenizer, prompt, stops), "", None
    for count, token in enumerate(drawn, 1):
        found += reading.add(token)
        if reading.found is not None:
            ended = count
            break
    assert (found + reading.end(), reading.found) == (shown, stop)
    if stop is not None:  # it ended with the token that completed it
        assert len("".join(one for one, _ in parts[: ended - 1])) < len(wanted) + len(stop)


@same
@given(text=some.text("abc", max_size=30), data=some.data())
def test_stops_do_not_depend_on_how_a_text_is_cut(text: str, data: some.DataObject) -> None:
    stops = data.draw(some.lists(some.text("abc", min_size=1, max_size=5), max_size=4))
    cuts = sorted(data.draw(some.lists(some.integers(0, len(text)), max_size=8)))
    search, found = Stops(stops), ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += search.add(text[begin:end])
    assert (found + search.end(), search.found) == first_stop(text, stops)


def test_the_stop_that_is_complete_first_is_the_first() -> None:
    for stops, wanted in (
        (["abcd", "c"], ("ab", "c", "d")),
        (["bc", "abc", "c"], ("", "abc", "d")),
        (["abx", "d"], ("abc", "d", "")),
    ):
        search = Stops(stops)
        assert (search.add("abcd"), search.found, search.rest) == wanted


@pytest.mark.parametrize("kind", KINDS)
@same
@given(data=some.data())
def test_pieces_are_together_what_all_tokens_are(kind: str, data: some.DataObject) -> None:
    tokenizer = made(kind)
    prompt, drawn = (data.draw(tokens_of(tokenizer)) for _ in range(2))
    assume(is_text(tokenizer, [*prompt, *drawn]))
    found = pieces(tokenizer, drawn, prompt)
    assert len(found) == len(drawn)
    assert "".join(found) == behind(tokenizer, prompt, drawn, skip=False)


@pytest.mark.parametrize("kind", ("sentencepiece", "unigram"))
def test_bytes_that_are_cut_off_leave_earlier_characters_alone(kind: str) -> None:
    """A whole run of bytes that is no text becomes U+FFFD for the tokenizer, told letters too."""
    tokenizer = made(kind)

    def bytes_of(data: bytes) -> list[int]:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]

    for text, rest in (("🙂", b"\xf0\x9f"), ("你好", b"\xe4"), ("é", b"\xff")):
        reading = Reading(tokenizer, [])
        found = "".join(map(reading.add, bytes_of(text.encode() + rest)))
        assert found.rstrip("\ufffd") == text
        assert (found + reading.end()).rstrip("\ufffd") == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_behind_an_image_begins_after_it(kind: str) -> None:
    """The rows of an image, which are below 0, are no text; nor is what stands before them."""
    tokenizer = made(kind)
    text = tokenizer.encode(said()[0], add_special_tokens=False).ids[:6]
    for prompt in ([*text, -1, -2], [*text, -1, -2, *text[:2]], [-1, -2, *text[:2]]):
        expected = Reading(tokenizer, prompt[prompt.index(-2) + 1 :])
        found = Reading(tokenizer, np.asarray(prompt, np.int32))
        for token in text:
            assert found.add(token) == expected.add(token)
        assert found.end() == expected.end()


def test_a_stop_string_is_seen_at_the_first_token() -> None:
    """It begins with the space that a tokenizer leaves out at the beginning of what it decodes."""
    words = {"▁one": 0, "▁two": 1, "▁three": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    reading = Reading(tokenizer, [0, 1], (" three",))
    assert (reading.add(2), reading.end(), reading.found) == ("", "", " three")


def test_the_prompts_own_bytes_are_not_the_answers() -> None:
    tokenizer = made("byte-level")
    [first, second] = tokenizer.encode("é", add_special_tokens=False).ids
    [letter] = tokenizer.encode("a", add_special_tokens=False).ids
    for drawn, wanted in (([second], "é"), ([letter], "a"), ([], "")):
        reading = Reading(tokenizer, [letter, first])
        assert "".join(map(reading.add, drawn)) + reading.end() == wanted
    text = Text(tokenizer, [letter, first])
    assert text.add(letter) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_without_a_token_says_nothing(kind: str) -> None:
    """A model may have more rows than its tokenizer has tokens, and draws them like others."""
    tokenizer = made(kind)
    drawn = tokenizer.encode("the time", add_special_tokens=False).ids
    reading, wanted = Reading(tokenizer, drawn[:1]), behind(tokenizer, drawn[:1], drawn[1:])
    found = [reading.add(token) for token in (10**6, *drawn[1:], 10**6)]
    assert (found[0], found[-1], "".join(found)) == ("", "", wanted)


def test_what_the_end_leaves_completes_no_stop_string() -> None:
    """The sample did not end there: its length did."""
    tokenizer = made("byte-level")
    [letter] = tokenizer.encode("a", add_special_tokens=False).ids
    [first, _] = tokenizer.encode("é", add_special_tokens=False).ids
    reading = Reading(tokenizer, [], ["a\ufffd"])
    said = reading.add(letter) + reading.add(first) + reading.end()
    assert (said, reading.found) == ("a\ufffd", None)


def test_the_id_that_ends_is_searched_and_not_read() -> None:
    tokenizer = made("byte-level")
    [letter] = tokenizer.encode("a", add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|im_end|>")
    reading = Reading(tokenizer, [], ["<|im_end|>"], ends=[end])
    assert (reading.add(letter), reading.add(end), reading.found) == ("a", "", "<|im_end|>")
    assert Reading(tokenizer, [], ends=[letter]).add(letter) == ""
