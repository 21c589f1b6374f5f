"""OpenAI's API through its own client: the SDK's tokens, streams, tools, refusals."""

import asyncio
import json
import shutil
import socket
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.chat_models import CALL, CONTEXT, MISTRAL, WEATHER, make_tokenizer
from support.inference_server import ASKED, SAID, drawn, serve
from support.waiting import until
from tinsmith.chat.chat import Chat
from tinsmith.chat.tools import ToolCall
from tinsmith.demo import demo
from tinsmith.engine.decoding import SampleDelta
from tinsmith.engine.errors import RequestError
from tinsmith.server.backend import Backend
from tinsmith.server.inference import openai_chat, serving
from tinsmith.server.service.config import ServerConfig

SETTINGS = {"max_tokens": 60, "seed": 5, "temperature": 1.3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with serve(tmp_path_factory.mktemp("openai")) as found:
        yield found


@pytest.fixture(scope="module", params=("/oai/api/v1", "/v1"))
def client(place, request) -> openai.OpenAI:
    return openai.OpenAI(base_url=place[0].url + request.param, api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def one(place) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{place[0].url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def chat(place) -> Chat:
    return Chat(place[0]._service.bases["tiny"].tokenizer_dir)


def ask(client: openai.OpenAI, **settings: Any):
    given = {"model": "tiny", "messages": ASKED, **SETTINGS, **settings}
    return client.chat.completions.create(**given)


def shown(chat: Chat, sequence) -> str:
    return chat.tokenizer.decode(list(sequence.tokens))


# ---- the same tokens ----


@pytest.mark.parametrize("model", ("tiny", "the checkpoint", "both"))
def test_a_chats_tokens_are_the_sdks(place, client, chat, model: str) -> None:
    backend, path = place
    name = {"tiny": "tiny", "the checkpoint": path, "both": f"tiny;{path}"}[model]
    sdk = "tiny" if model == "tiny" else path
    wanted = drawn(backend, sdk, chat.prompt(ASKED), 3, **SETTINGS)
    reply = ask(client, model=name, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    total = 0
    for choice, sequence in zip(reply.choices, wanted, strict=True):
        ended = list(sequence.tokens)[-1:] == [2]
        count = len(sequence.tokens) - ended
        total += len(sequence.tokens)
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.message.content == shown(chat, sequence)
        rows = choice.logprobs.content
        assert [row.logprob for row in rows] == list(sequence.logprobs)[:count]
        text = b"".join(bytes(row.bytes) for row in rows).decode(errors="replace")
        assert text == chat.tokenizer.decode(sequence.tokens[:count], skip_special_tokens=False)
        assert all(len(row.top_logprobs) == 2 for row in rows)
        best = [max(entry.logprob for entry in row.top_logprobs) for row in rows]
        assert all(top >= row.logprob for top, row in zip(best, rows, strict=True))
    usage, prompt = reply.usage, len(chat.prompt(ASKED))
    found = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
    assert found == (prompt, total, prompt + total) and reply.model == name


def test_a_completions_tokens_are_the_sdks(place, client, chat) -> None:
    ids = chat.encode("The weather")
    wanted = drawn(place[0], "tiny", ids, 2, **SETTINGS, top_p=0.8, top_k=50)
    given = {"model": "tiny", **SETTINGS, "top_p": 0.8, "logprobs": 1, "n": 2}
    extra = {"top_k": 50}
    for prompt in ("The weather", ids):
        reply = client.completions.create(prompt=prompt, **given, extra_body=extra)
        assert [c.text for c in reply.choices] == [shown(chat, one) for one in wanted]
        for choice, sequence in zip(reply.choices, wanted, strict=True):
            ended = list(sequence.tokens)[-1:] == [2]
            kept = list(sequence.logprobs)[: len(sequence.tokens) - ended]
            assert choice.logprobs.token_logprobs == kept
            assert (
                "".join(choice.logprobs.tokens[:2]) == choice.text[: choice.logprobs.text_offset[2]]
            )
    several = client.completions.create(prompt=["a", "The weather"], **given, extra_body=extra)
    assert [c.text for c in several.choices[2:]] == [shown(chat, one) for one in wanted]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_a_stream_says_what_the_reply_says(one, chat) -> None:
    """Random weights write bytes that are no text, and characters spread over tokens."""
    given = {"n": 3, "logprobs": True, "stop": ["e", "zz"]}
    whole = ask(one, **given)
    texts, scored, ends = [""] * 3, [[], [], []], [None] * 3
    usage = None
    for chunk in ask(one, **given, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert ends[choice.index] is None  # nothing follows the end
            texts[choice.index] += choice.delta.content or ""
            scored[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert scored == [choice.logprobs.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices] and "stop" in ends
    assert usage == whole.usage
    assert not any("e" in text for text in texts)


def test_a_completion_streams_what_it_replies(one) -> None:
    given = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "logprobs": 0, **SETTINGS}
    whole = one.completions.create(**given)
    texts, offsets = [""] * 4, [[], [], [], []]
    for chunk in one.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert len(one.completions.create(model="tiny", prompt="a", seed=1).choices[0].text) > 0


# ---- tools ----


def test_a_checkpoint_calls_a_tool(place, one) -> None:
    given = {"model": place[1], "temperature": 0, "tools": [WEATHER], "max_tokens": 200}
    choice = ask(one, **given).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look 你 😀.")
    [call] = choice.message.tool_calls
    assert call.function.name == "weather" and call.type == "function"
    assert json.loads(call.function.arguments) == {"town": "Zürich"}
    text, found = "", []
    for chunk in ask(one, **given, stream=True):
        for part in chunk.choices:
            text += part.delta.content or ""
            found += part.delta.tool_calls or []
            end = part.finish_reason
    assert (text, end) == ("I look 你 😀.", "tool_calls")
    [streamed] = found
    assert streamed.index == 0 and streamed.function == found[0].function
    assert streamed.function.arguments == call.function.arguments
    results = [
        *ASKED,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = ask(one, model=place[1], messages=results, tools=[WEATHER], max_tokens=5)
    assert again.usage.completion_tokens <= 5


@pytest.mark.parametrize("stop_reason", (None, "stop", "length"))
@pytest.mark.parametrize("said", (f"So.{CALL}\n{CALL} and", "\n".join([CALL] * 3), "No call."))
@pytest.mark.parametrize("size", (1, 7, 1000))
def test_one_call_ends_an_answer(chat, said: str, stop_reason: str | None, size: int) -> None:
    """Its tokens are those up to the call, however they come."""
    tokens, found = chat.encode(said), []
    choice = serving.Choice(chat.answer([5], (), (2,), [WEATHER]), (2,), one_call=True)
    for begin in range(0, len(tokens), size):
        drawn = np.array(tokens[begin : begin + size])
        last = begin + size >= len(tokens)
        part = SampleDelta(0, drawn, drawn, stop_reason if last else None, None, None)
        if choice.ended is None:
            found += choice.add(part)
    calls = [piece for piece in found if isinstance(piece, ToolCall)]
    if CALL not in said:
        assert (calls, choice.tokens) == ([], len(tokens))
        return
    assert len(calls) == 1 and found[-1] == calls[0] and choice.ended == "calls"
    assert choice.tokens == len(chat.encode(said[: said.index(CALL) + len(CALL)]))
    assert "".join(map(str, found[:-1])) == said[: said.index(CALL)]


def test_one_call_ends_an_answer_that_has_several_at_once(tmp_path) -> None:
    """Mistral's are a list, which is read when it is closed, or at the end."""
    make_tokenizer(tmp_path, MISTRAL)
    chat, [call] = Chat(tmp_path), [{"name": "weather", "arguments": {"town": "Zürich"}}]
    tokens = chat.encode(f"[TOOL_CALLS]{json.dumps([call, call])}")
    found = []
    for one_call in (False, True):
        answer = chat.answer([5], tools=[WEATHER])
        choice, drawn = serving.Choice(answer, (), one_call=one_call), np.array(tokens)
        found.append(choice.add(SampleDelta(0, drawn, drawn, "stop", None, None)))
        assert choice.ended == "calls"
    assert len(found[0]) == 2 and found[1] == found[0][:1]


def test_one_call_is_asked_for(place, one) -> None:
    given = {"model": place[1], "temperature": 0, "tools": [WEATHER], "max_tokens": 200}
    whole = ask(one, **given, parallel_tool_calls=True)
    single = ask(one, **given, parallel_tool_calls=False)
    assert single.choices[0].finish_reason == "tool_calls"
    [call], [wanted] = (r.choices[0].message.tool_calls for r in (single, whole))
    assert call.function == wanted.function
    assert single.usage.completion_tokens == whole.usage.completion_tokens - 1  # <|im_end|>
    chunks = list(ask(one, **given, parallel_tool_calls=False, stream=True))
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    assert sum(len(c.choices[0].delta.tool_calls or []) for c in chunks) == 1


def test_calls_of_earlier_answers_are_the_templates(one, chat) -> None:
    def asked(arguments: Any) -> list[dict[str, Any]]:
        call = {"name": "weather", "arguments": arguments}
        called = {"id": "call12345", "type": "function", "function": call}
        said = {"role": "assistant", "content": "", "tool_calls": [called]}
        result = {"role": "tool", "tool_call_id": "call12345", "content": "rain"}
        return [*ASKED, said, result]

    reply = ask(one, messages=asked('{"town": "Zürich"}'), tools=[WEATHER], max_tokens=1)
    prompt = chat.prompt(asked({"town": "Zürich"}), [WEATHER])
    assert reply.usage.prompt_tokens == len(prompt)


def test_each_call_of_a_stream_has_a_number() -> None:
    sent, numbers = 0, []
    for name in ("first", "second"):
        delta, sent = openai_chat._delta(ToolCall(name, "{}"), sent)
        numbers.append(delta["tool_calls"][0]["index"])
    assert numbers == [0, 1] and openai_chat._delta("text", sent) == ({"content": "text"}, 2)


def test_without_tools_a_call_is_text(place, one, chat) -> None:
    prompt = chat.prompt(ASKED, [WEATHER])
    given = {"model": place[1], "temperature": 0, "max_tokens": 200}
    text = one.completions.create(prompt=prompt, **given).choices[0].text
    assert text == SAID.removesuffix("<|im_end|>")
    none = ask(one, **given, tools=[WEATHER], tool_choice="none").choices[0]
    assert none.finish_reason != "tool_calls" and none.message.tool_calls is None


# ---- refusals ----

BAD: tuple[tuple[dict[str, Any], str | None, str], ...] = (
    ({"frequency_penalty": 0.5}, "frequency_penalty", "does not have: leave it out; it can be 0"),
    ({"presence_penalty": 1}, "presence_penalty", "does not have"),
    ({"logit_bias": {"5": 3}}, "logit_bias", "does not have"),
    ({"response_format": {"type": "json_object"}}, "response_format", "does not have"),
    ({"parallel_tool_calls": 0}, None, "parallel_tool_calls must be true or false"),
    ({"best_of": 2}, "best_of", "does not have"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "does not have"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "which reads enable_thinking"),
    ({"min_p": 0.1}, "min_p", "is no setting of this server"),
    ({"tool_choice": "required"}, "tool_choice", 'can be "auto" or "none"'),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, None, "tool 0 must be"),
    (
        {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
        "tools",
        "held",
    ),
    ({"n": 0}, "n", "n must be from 1 to 128, 0 came"),
    ({"n": 129}, "n", "n must be from 1 to 128"),
    ({"n": True}, None, "n must be an integer"),
    ({"temperature": 2.5}, "temperature", "from 0.0 to 2.0"),
    ({"top_p": 0}, None, "top_p must be in (0, 1]"),
    ({"top_k": 0}, None, "top_k must be at least 1"),
    ({"max_tokens": 0}, None, "max_tokens must be at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ: send one"),
    ({"stop": ["a", ""]}, "stop", "must be strings that are not empty"),
    ({"stop": ["a"] * 65}, "stop", "64 strings"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0]", "must be one of system"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0]", "a text or text parts"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "no setting"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0]",
        "content[0].image_url must have a url, which is a text",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
            ]
        },
        "messages[0].tool_calls",
        "the arguments of 'f' are no JSON object",
    ),
    (
        {"messages": [*ASKED, {"role": "system", "content": "x"}]},
        None,
        "system message comes first",
    ),
    ({"messages": [{"role": "user", "content": "x " * 2000}]}, None, "the model's context is 1024"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is no variable"),
    ({"chat_template_kwargs": {"enable_thinkng": 1}}, "chat_template_kwargs", "is no variable of"),
    ({"model": f"tiny;{'/nowhere'}"}, None, "is not a checkpoint's path"),
)


@pytest.mark.parametrize(("change", "param", "sentence"), BAD)
def test_what_can_not_be_done_is_refused_by_name(place, change, param, sentence) -> None:
    body = {"model": "tiny", "messages": ASKED, **change}
    reply = httpx.post(f"{place[0].url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error", reply.text
    assert sentence in error["message"] and error["param"] == param
    assert ("context" in sentence) == (error["code"] == "context_length_exceeded")


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"best_of": 2}, "best_of is 2"),
        ({"suffix": "end"}, "suffix is"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "must be a text or token ids"),
        ({"prompt": [["a"]]}, "must be a text, or token ids"),
        ({"prompt": [100000]}, "ids must be from 0 to"),
        ({"prompt": ["a"] * 100, "n": 100}, "more than 4096 answers"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20"),
        ({"messages": ASKED}, "messages is no setting"),
    ),
)
def test_a_completion_that_can_not_be_is_refused(place, change, sentence) -> None:
    body = {"model": "tiny", "prompt": "a", **change}
    reply = httpx.post(f"{place[0].url}/v1/completions", json=body)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]


def test_models_that_are_not_there(place, one) -> None:
    for name in ("nobody", "tinker://s-0:train:0/sampler_weights/x", f"nobody;{place[1]}"):
        with pytest.raises(openai.NotFoundError) as told:
            ask(one, model=name)
        assert (told.value.code, told.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="is a checkpoint of tiny, not of other"):
        ask(one, model=f"other;{place[1]}")
    with pytest.raises(openai.NotFoundError, match="tinsmith has no POST /v1/embeddings"):
        one.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError) as told:
        ask(one, model="x" * 5000)
    assert len(str(told.value)) < 500


def test_a_models_name_may_say_its_context(place, one) -> None:
    """Requests end there. The seeds' tokens are the same before."""
    given = {"prompt": [10, 20, 30], "max_tokens": 50, "seed": 3, "temperature": 2.0}
    for form in ("tiny:peft:16", f"tiny:peft:16;{place[1]}"):
        whole = one.completions.create(model=form.replace(":peft:16", ""), **given)
        cut = one.completions.create(model=form, **given)
        assert whole.usage.completion_tokens == 50 and cut.usage.completion_tokens == 13
        assert whole.choices[0].text.startswith(cut.choices[0].text)
        with pytest.raises(openai.BadRequestError, match="the model's context is 16") as told:
            one.completions.create(model=form, **{**given, "prompt": [10] * 17})
        assert told.value.code == "context_length_exceeded"
    for context in (0, CONTEXT + 1, 10**8):
        with pytest.raises(openai.NotFoundError, match=f"asks for a context of {context} tokens"):
            one.completions.create(model=f"tiny:peft:{context}", **given)
        with pytest.raises(openai.NotFoundError, match=f"the model's is {CONTEXT}"):
            one.models.retrieve(f"tiny:peft:{context}")


def test_models_are_listed(place, client) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", "other", place[1]]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve(place[1]).id == place[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_effort_is_a_variable_of_the_template(tmp_path) -> None:
    shutil.copy(demo.MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }} {{ reasoning_effort }}"
    )
    chat, asked = Chat(tmp_path), {"reasoning_effort": "high"}
    assert serving.template_settings({}, chat, []) == {}
    assert chat.text(ASKED, [], serving.template_settings(asked, chat, [])).endswith("? high")
    more = {**asked, "chat_template_kwargs": {"reasoning_effort": 0.2}}
    assert serving.template_settings(more, chat, []) == {"reasoning_effort": 0.2}


# ---- who asks, and who goes away ----


def test_a_key_is_asked_for_as_a_bearers(tiny_model_dir, tmp_path) -> None:
    key = "tml-the-right-one"
    with Backend(
        ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path, api_key=key)
    ) as backend:
        url = f"{backend.url}/v1"
        assert openai.OpenAI(base_url=url, api_key=key).models.list().data[0].id == "tiny"
        wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="needs the API key") as told:
            wrong.models.list()
        assert told.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            ask(openai.OpenAI(base_url=url, api_key=key))


@pytest.mark.parametrize("stream", (True, False))
def test_a_client_that_goes_away_frees_its_sequences(place, monkeypatch, stream: bool) -> None:
    backend, futures = place[0], list[Future]()
    submit = backend.worker.sample

    def sample(*arguments: Any) -> Future:
        futures.append(submit(*arguments))
        return futures[-1]

    monkeypatch.setattr(backend.worker, "sample", sample)
    body = {"model": "tiny", "prompt": ["a"] * 8, "n": 128, "max_tokens": 1000, "stream": stream}
    url, before = f"{backend.url}/v1/completions", backend.queue.count
    if stream:
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
    else:
        post = httpx.Request("POST", url, json=body)
        lines = [f"POST {post.url.path} HTTP/1.1", *map(": ".join, post.headers.items()), "", ""]
        with socket.create_connection((post.url.host, post.url.port), timeout=60) as client:
            client.sendall("\r\n".join(lines).encode() + post.content)
            until(lambda: len(futures) == 8)
    assert len(futures) == 8
    for future in futures:
        with pytest.raises(RequestError, match="was cancelled"):
            future.result(60)
    until(lambda: backend.queue.count == before)
    assert not backend.worker._engine.decoder.active


def test_a_checkpoint_that_is_saved_again_while_a_request_waits(place, monkeypatch) -> None:
    """The request draws from what is there at its turn."""
    backend = place[0]
    with backend.service_client() as client:
        run = client.create_lora_training_client("tiny", rank=2).result()
        path = run.save_state("again").result().path
        given = {"model": path, "prompt": [5, 6, 7], "max_tokens": 4, "seed": 3}
        url, enter = f"{backend.url}/v1/completions", backend.queue.enter
        assert httpx.post(url, json=given).status_code == 200
        loop = backend._service.worker  # what a session is opened and forgotten by
        opened: list[str] = []
        begin = loop.open_checkpoint

        def seen(name: str, *arguments: Any) -> None:
            opened.append(name)
            begin(name, *arguments)

        monkeypatch.setattr(loop, "open_checkpoint", seen)

        async def late(held: int) -> Any:
            """The turn comes after another request, which found the checkpoint as it is now."""
            monkeypatch.setattr(backend.queue, "enter", enter)
            await asyncio.to_thread(run.save_state("again", overwrite=True).result)
            await asyncio.to_thread(httpx.post, url, json=given)
            return await enter(held)

        monkeypatch.setattr(backend.queue, "enter", late)
        reply = httpx.post(url, json=given, timeout=60)
        assert reply.status_code == 200, reply.text
        assert len(opened) == 1


def test_a_failure_within_a_stream_is_told_there(place, one, monkeypatch) -> None:
    decoder = place[0].worker._engine.decoder
    stream = ask(one, stream=True, max_tokens=900, n=64)
    next(iter(stream))
    with pytest.raises(openai.APIError, match="the request was cancelled"):
        for _ in stream:
            for batcher in decoder._batchers.values():
                for item in list(batcher.pending.values()):
                    place[0].worker.cancel(item.future)
