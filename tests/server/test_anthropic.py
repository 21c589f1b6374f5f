"""Anthropic's API through its own client: the SDK's tokens, streams, tools, refusals."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from support.chat_models import WEATHER
from support.inference_server import ASKED, drawn, serve
from tinsmith.chat.chat import Chat

SETTINGS = {"max_tokens": 60}
EXTRA = {"seed": 5, "temperature": 1.3}  # clients of today have no arguments for them
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with serve(tmp_path_factory.mktemp("anthropic")) as found:
        yield found


@pytest.fixture(scope="module", params=("", "/anthropic/api"))
def client(place, request) -> anthropic.Anthropic:
    url = place[0].url + request.param
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def chat(place) -> Chat:
    return Chat(place[0]._service.bases["tiny"].tokenizer_dir)


def ask(client: anthropic.Anthropic, **settings: Any):
    given = {"model": "tiny", "messages": ASKED, **SETTINGS, "extra_body": EXTRA, **settings}
    return client.messages.create(**given)


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_messages_tokens_are_the_sdks(place, client, chat) -> None:
    system = {"role": "system", "content": "Be brief.\nBe kind."}
    blocks = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.")]
    for model, given, messages in (
        ("tiny", {}, ASKED),
        (place[1], {"system": "Be brief.\nBe kind."}, [system, *ASKED]),
        (place[1], {"system": blocks}, [system, *ASKED]),
    ):
        prompt = chat.prompt(messages)
        [wanted] = drawn(place[0], model, prompt, **EXTRA, **SETTINGS)
        reply = ask(client, model=model, **given)
        assert text_of(reply) == chat.tokenizer.decode(list(wanted.tokens))
        ended = list(wanted.tokens)[-1:] == [2]
        assert reply.stop_reason == ("end_turn" if ended else "max_tokens")
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
            len(prompt),
            len(wanted.tokens),
        )


def test_an_answer_that_has_begun_goes_on(place, client, chat) -> None:
    prompt = chat.prompt(ASKED, prefix="It rains")
    [wanted] = drawn(place[0], "tiny", prompt, **EXTRA, **SETTINGS)
    begun = [*ASKED, {"role": "assistant", "content": "It rains"}]
    assert text_of(ask(client, messages=begun)) == chat.tokenizer.decode(list(wanted.tokens))


@pytest.mark.parametrize("stops", ([], ["e", "zz"]))
def test_a_stream_says_what_the_reply_says(client, stops: list[str]) -> None:
    whole = ask(client, stop_sequences=stops)
    given = {"model": "tiny", "messages": ASKED, **SETTINGS, "extra_body": EXTRA}
    with client.messages.stream(**given, stop_sequences=stops) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason and final.stop_sequence == whole.stop_sequence
    assert (final.stop_reason == "stop_sequence") == bool(stops)
    assert final.stop_sequence == ("e" if stops else None) and not (stops and "e" in text)
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in ask(client, stream=True, stop_sequences=stops)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_checkpoint_uses_a_tool(place, client) -> None:
    given = {"model": place[1], "tools": [TOOL], "max_tokens": 200, **GREEDY}
    reply = ask(client, **given)
    assert reply.stop_reason == "tool_use" and text_of(reply) == "I look 你 😀."
    use = reply.content[1]
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"town": "Zürich"})
    with client.messages.stream(messages=ASKED, **given) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == use.input and final.stop_reason == "tool_use"
    assert text_of(final) == text_of(reply)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=ASKED, **given, tool_choice=one) as stream:
        single = stream.get_final_message()
    assert [block.type for block in single.content] == ["text", "tool_use"]
    assert single.content[1].input == use.input and single.stop_reason == "tool_use"
    assert single.usage.output_tokens == final.usage.output_tokens - 1  # <|im_end|>
    asked = given | {"extra_body": {**GREEDY["extra_body"], "context_management": {"edits": []}}}
    assert ask(client, **asked, tool_choice=one).usage == single.usage
    none = ask(client, **given, tool_choice={"type": "none"})
    assert none.stop_reason != "tool_use"


def test_a_tools_result_is_the_templates(client, chat) -> None:
    """The prompt has the tokens that the same conversation has in OpenAI's form."""
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"town": "Bonn"}}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "a", "content": "wet", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    messages = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": results},
    ]
    counted = client.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL])
    call = {"function": {"name": "weather", "arguments": {"town": "Bonn"}}}
    wanted = [
        *ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "Error: wet"},
        {"role": "user", "content": "So?"},
    ]
    assert counted.input_tokens == len(chat.prompt(wanted, [WEATHER]))
    reply = ask(client, messages=messages, tools=[TOOL], max_tokens=1)
    assert reply.usage.input_tokens == counted.input_tokens


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"max_tokens": None}, "has no max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "does not have: leave it out"),
        ({"tool_choice": {"type": "any"}}, 'can have the type "auto" or "none"'),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "true or false"),
        ({"context_management": {"edits": [{}]}}, "does not have: leave it out"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "no tool of the client's own"),
        ({"tools": [{"name": "x"}]}, "tools[0] has no input_schema"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "a user's must come before them"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must be user or assistant"),
        ({"messages": [{"role": "user", "content": [BLOCK]}]}, "[0]: this model takes no images: "),
        ({"messages": [{"role": "assistant", "content": [BLOCK]}]}, "a block of type 'image'"),
        ({"messages": [{"role": "user", "content": 3}]}, "a text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        ({"stop_sequences": "x" * 1001}, "64 strings of 1000 characters"),
        ({"temperature": 3}, "temperature must be from 0.0 to 2.0"),
        ({"n": 2}, "n is no setting of this server"),
        ({"system": [BLOCK]}, "system has a block of type 'image'"),
    ),
)
def test_what_can_not_be_done_is_refused(place, change, sentence: str) -> None:
    body = {"model": "tiny", "messages": ASKED, **SETTINGS, **change}
    reply = httpx.post(f"{place[0].url}/v1/messages", json=body)
    content = reply.json()
    assert reply.status_code == 400 and content["type"] == "error", reply.text
    assert content["error"]["type"] == "invalid_request_error"
    assert sentence in content["error"]["message"]


def test_other_refusals_have_anthropics_shape(place, client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="unknown base model 'nobody'"):
        ask(client, model="nobody")
    url = str(client.base_url).rstrip("/")
    reply = httpx.post(f"{url}/v1/messages", headers={"Host": "evil.example"}, json={})
    assert reply.status_code == 403
    assert json.loads(reply.text)["error"]["type"] == "permission_error"
    missing = httpx.post(f"{place[0].url}/anthropic/api/v1/complete", json={}).json()
    assert missing["error"]["type"] == "not_found_error"
    usual = anthropic.Anthropic(base_url=place[0].url, api_key="any", max_retries=0)
    assert [model.id for model in usual.models.list()] == ["tiny", "other", place[1]]
