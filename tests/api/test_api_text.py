"""The face's texts: the tokenizer is transformers', and what goes in and comes out as text is what
its ids would be."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import tinsmith
import torch
from support.chat_models import make_model
from tinsmith.api.answers import AnswerReader
from tinsmith.chat import text as chat_text
from tinsmith.engine.decoding import Sample
from transformers import AutoTokenizer

TEXTS = ["Hello, world", "naïve – 語 🙂", "a\n\n b", ""]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "Noon."},
    {"role": "user", "content": "Where?"},
]
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "the time",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("text") / "talker")


@pytest.fixture(scope="module")
def talker(folder: Path) -> tinsmith.Model:
    return tinsmith.Model(folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


# ---- the tokenizer ----


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_and_decoded_as_by_transformers(talker, theirs, text: str) -> None:
    ours = talker.tokenizer
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
    ids += [theirs.eos_token_id]
    for skip in (True, False):
        wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for form in (ids, np.asarray(ids), torch.tensor(ids)):
            assert ours.decode(form, skip_special_tokens=skip) == wanted
    assert "".join(ours.pieces(ids)) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert len(ours.pieces(ids)) == len(ids)


def test_several_texts_are_a_list(talker) -> None:
    ours = talker.tokenizer
    assert ours.encode(TEXTS) == [ours.encode(text) for text in TEXTS]
    rows = [np.asarray(ours.encode(text)) for text in TEXTS[:3]]
    assert ours.decode(rows) == TEXTS[:3]
    assert len(ours) == ours.backend.get_vocab_size()
    assert repr(ours) == "<tinsmith.Tokenizer of talker>"


@pytest.mark.parametrize("answer", [True, False])
def test_a_conversation_is_written_as_by_transformers(talker, theirs, answer: bool) -> None:
    for tools, settings in (([], {}), ([CLOCK], {}), ([], {"enable_thinking": False})):
        given = {"add_generation_prompt": answer, "tokenize": False, **settings}
        wanted = theirs.apply_chat_template(MESSAGES, tools=tools or None, **given)
        assert talker.tokenizer.apply_chat_template(MESSAGES, tools=tools, **given) == wanted
        given.pop("tokenize")
        ids = talker.tokenizer.apply_chat_template(MESSAGES, tools=tools, **given)
        assert ids == theirs.encode(wanted, add_special_tokens=False)


# ---- texts in and out ----


def test_a_texts_results_are_its_ids_results(talker) -> None:
    texts = ["Hello, world", "one two"]
    ids = [talker.tokenizer.encode(text) for text in texts]
    for mine, other in zip(talker.logprobs(texts), talker.logprobs(ids), strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(talker.logprobs(texts[0]), talker.logprobs(ids[0]))
    found, wanted = talker.topk_logprobs(texts[0], 3), talker.topk_logprobs(ids[0], 3)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    sampler, options = talker.sampler(), {"max_tokens": 9, "seed": 4, "num_samples": 2}
    mine, other = (sampler.sample(prompts, **options) for prompts in (texts, ids))
    drawn = [[[s.tokens.tolist() for s in row] for row in rows] for rows in (mine, other)]
    assert drawn[0] == drawn[1]
    [alone, _] = sampler.sample(texts[0], **options)
    assert alone.tokens.tolist() == mine[0][0].tokens.tolist()


def test_a_samples_text_is_without_what_has_ended_it(talker, theirs) -> None:
    sampler = talker.sampler()
    options = {"max_tokens": 60, "seed": 5}
    [free] = sampler.sample(torch.tensor([5, 6, 7]), stop=[], **options)
    assert isinstance(free.tokens, torch.Tensor)
    whole = theirs.decode(
        free.tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert free.text == whole
    assert pickle.loads(pickle.dumps(free)).text == whole
    stop = whole[len(whole) // 2 :][:3]
    [cut] = sampler.sample([5, 6, 7], stop=stop, **options)
    assert (cut.stop_reason, cut.text) == ("stop", whole[: whole.index(stop)])
    last = int(free.tokens[20])
    [cut] = sampler.sample([5, 6, 7], stop=[last], **options)
    assert (cut.stop_reason, int(cut.tokens[-1])) == ("stop", last)
    assert cut.text == talker.tokenizer.decode(cut.tokens[:-1], skip_special_tokens=True)
    with pytest.raises(ValueError, match="has no tokenizer"):
        tinsmith.SampledSequence(free.tokens, free.logprobs, "length").text  # noqa: B018


def test_ids_need_no_tokenizers(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only texts do, and they say how to get it."""
    chat_text.load_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    [drawn] = model.sampler().sample([10, 20], max_tokens=3)
    assert "SampledSequence" in repr(drawn)
    fresh = tinsmith.Tokenizer(model.path, "tiny")
    for call in (lambda: drawn.text, lambda: fresh.encode("a"), lambda: fresh.backend):
        with pytest.raises(RuntimeError, match="text needs tokenizers: pip install"):
            call()


# ---- chat ----


def test_an_answer_is_what_the_template_samples(talker) -> None:
    prompt = talker.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    for seed in range(4):
        options = {"seed": seed, "max_tokens": 40, "temperature": 0.9, "top_k": 50, "top_p": 0.95}
        shown: list[str] = []
        answer = talker.chat(MESSAGES, on_text=shown.append, **options)
        [drawn] = talker.sampler().sample(prompt, **options)
        assert answer.prompt.tolist() == prompt
        assert answer.tokens.tolist() == drawn.tokens.tolist()
        np.testing.assert_array_equal(answer.logprobs, drawn.logprobs)
        assert (answer.text, answer.stop_reason) == (drawn.text, drawn.stop_reason)
        assert answer.message == {"role": "assistant", "content": drawn.text}
        assert "".join(shown) == answer.text
        assert talker.chat(MESSAGES, **options).message == answer.message
    assert talker.chat("Hi", seed=1, max_tokens=5).prompt.tolist() == (
        talker.tokenizer.apply_chat_template("Hi", add_generation_prompt=True)
    )


def test_a_chat_has_an_adapter_settings_and_stops(talker) -> None:
    from support import tiny_models

    adapter = talker.lora(rank=4, seed=1)
    tiny_models.randomize(adapter.core)
    options = {"seed": 3, "max_tokens": 40}
    plain, adapted = (talker.chat("Hi", adapter=one, **options) for one in (None, adapter))
    assert plain.tokens.tolist() != adapted.tokens.tolist()
    quiet = talker.chat("Hi", enable_thinking=False, **options)
    assert talker.tokenizer.decode(quiet.prompt).endswith("</think>\n\n")
    stop = plain.text[5:8]
    cut = talker.chat("Hi", stop=stop, **options)
    assert cut.message["content"] == cut.text == plain.text[: plain.text.index(stop)]


@pytest.mark.parametrize("told", [0, 3, 1000])  # tokens that come before the answer has ended
def test_a_message_has_the_calls_that_were_written(talker, told: int) -> None:
    written = 'Look:\n<tool_call>\n{"name": "clock", "arguments": {"city": "Rome"}}\n</tool_call>'
    ids = talker.tokenizer.encode(written, add_special_tokens=False)
    sample = Sample(np.asarray([*ids, 2], np.int32), np.zeros(len(ids) + 1, np.float32), "stop")
    shown: list[str] = []
    answer = talker.tokenizer.core.answer([], ends=[2], tools=[CLOCK])
    reader = AnswerReader(answer, shown.append)
    reader._add(ids[:told])
    message = reader.message(sample)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": {"city": "Rome"}}
    assert message["content"].strip() == "Look:" == "".join(shown).strip()
    again = talker.tokenizer.apply_chat_template([*MESSAGES, message], tokenize=False)
    assert '"arguments": {"city": "Rome"}' in again


def test_a_misspelled_argument_is_no_variable_of_the_template(talker) -> None:
    """It was passed to the template, which reads no such thing, and so passed over."""
    wanted = (
        r"chat\(\) has no argument 'max_token' \(did you mean max_tokens\?\), and the model's chat "
        r"template reads no such variable: it reads enable_thinking"
    )
    with pytest.raises(TypeError, match=wanted):
        talker.chat("Hi", max_token=2)
    with pytest.raises(TypeError, match=r"'thinking' \(did you mean enable_thinking\?\)"):
        talker.tokenizer.apply_chat_template("Hi", thinking=False)
    with pytest.raises(TypeError, match="'add_generation_promt'"):
        talker.tokenizer.apply_chat_template("Hi", add_generation_promt=True)


def test_no_tools_may_be_said_as_none(talker) -> None:
    options = {"seed": 1, "max_tokens": 4}
    assert talker.chat("Hi", tools=None, **options).tokens.tolist() == (
        talker.chat("Hi", **options).tokens.tolist()
    )
    render = talker.tokenizer.apply_chat_template
    assert render(MESSAGES, tools=None) == render(MESSAGES)


def test_bad_texts_are_refused(talker, model) -> None:
    for call, kind, sentence in (
        (lambda: talker.tokenizer.encode(5), TypeError, "text must be a str .* int came"),
        (lambda: talker.tokenizer.encode([5]), TypeError, "int came"),
        (lambda: talker.tokenizer.decode([1.5]), TypeError, "ids must be integers"),
        (lambda: talker.tokenizer.decode([[5], [-1]]), IndexError, r"ids\[1\] has id -1"),
        (lambda: talker.tokenizer.decode("abc"), TypeError, "ids must be an array"),
        (lambda: talker.chat([]), ValueError, "messages is empty"),
        (lambda: talker.chat({"role": "user"}), TypeError, "messages must be a text, or a list"),
        (lambda: talker.chat(["Hi"]), TypeError, "messages must be a text, or a list"),
        (lambda: talker.chat(MESSAGES[::-1]), ValueError, "a system message comes first"),
        (lambda: talker.chat("Hi", messages=1), TypeError, "multiple values"),
        (lambda: talker.chat("Hi", bos_token="x"), TypeError, "no argument 'bos_token'"),
        (lambda: talker.tokenizer.encode("a\ud800"), ValueError, "stands alone at character 1"),
        (lambda: talker.chat("a\udc00"), ValueError, "half of a surrogate pair"),
        (lambda: talker.sampler().sample("\ud800"), ValueError, "half of a surrogate pair"),
        (lambda: talker.chat("Hi", seed=[1, 2]), TypeError, "seed must be an integer"),
        (lambda: talker.chat("Hi", max_tokens=0), ValueError, "max_tokens must be at least 1"),
        (lambda: model.chat("Hi"), ValueError, "has no chat template"),
        (lambda: talker.sampler().sample(""), ValueError, "the prompt is empty"),
        (lambda: talker.logprobs(["a", 5]), TypeError, r"tokens\[1\] must be an array"),
    ):
        with pytest.raises(kind, match=sentence):
            call()
